"""The resources for monitoring: the connections of all listeners, and the broker's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from litestar import Request, get
from litestar.params import QueryParameter

from runnel.broker.broker import ConnectionStats
from runnel.protocols.http.encoding.parameters import PageLimit, time_text
from runnel.protocols.http.server.calls import call_of


class FlowOut(msgspec.Struct, frozen=True):
    """Messages and bytes since the connection was opened."""

    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int


class ConnectionOut(msgspec.Struct, frozen=True):
    """A connection of any listener."""

    id: int
    listener: str
    door: Annotated[str, msgspec.Meta(description="Deprecated: the former name of `listener`.")]
    peer: str
    client: str
    token: str
    since_ns: int
    since: str
    subscriptions: int
    queued_bytes: int
    flow: FlowOut


class ConnectionList(msgspec.Struct, frozen=True):
    """Connections in order of their ids."""

    connections: Sequence[ConnectionOut]
    is_complete: Annotated[
        bool, msgspec.Meta(description="If false, ask again with `after` set to the last id.")
    ]


@get("/v1/connections", operation_id="listConnections", tags=["monitoring"])
async def list_connections(
    request: Request[Any, Any, Any],
    after: Annotated[int, QueryParameter(ge=0, description="Only ids after this one.")] = 0,
    limit: PageLimit = 0,
) -> ConnectionList:
    """List the connections of all listeners, in the order in which they came."""
    rows, is_complete = await call_of(request).access.connections(after=after, limit=limit)
    return ConnectionList([_connection(row) for row in rows], is_complete)


def _connection(row: ConnectionStats) -> ConnectionOut:
    flow = row.flow
    return ConnectionOut(
        row.id,
        row.listener,
        row.listener,
        row.peer,
        row.client,
        row.token,
        row.since_ns,
        time_text(row.since_ns),
        row.subscriptions,
        row.queued_bytes,
        FlowOut(flow.messages_in, flow.bytes_in, flow.messages_out, flow.bytes_out),
    )


@get("/v1/statistics", operation_id="statistics", tags=["monitoring"])
async def statistics(request: Request[Any, Any, Any]) -> dict[str, Any]:
    """Return the current statistics, as they are published on `!system/metrics/broker`.

    Of several processes, these are of the one that answers. `nodes` has those of all by the name of their node; null of
    one that does not answer.
    """
    return await call_of(request).access.statistics_of_nodes()


monitoring_handlers = [list_connections, statistics]
