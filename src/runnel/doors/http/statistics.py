"""What the broker tells of itself: its figures, and who is connected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, get

from runnel.doors.http.calls import call_of
from runnel.doors.http.parameters import time_text


class FlowOut(msgspec.Struct, frozen=True):
    """From the connection's beginning."""

    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int


class ConnectionOut(msgspec.Struct, frozen=True):
    id: int
    door: str
    peer: str
    client: str
    token: str
    since_ns: int
    since: str
    subscriptions: int
    queued_bytes: int
    flow: FlowOut


class ConnectionList(msgspec.Struct, frozen=True):
    connections: Sequence[ConnectionOut]


@get("/v1/connections", operation_id="listConnections", tags=["watching"], sync_to_thread=False)
def list_connections(request: Request[Any, Any, Any]) -> ConnectionList:
    """List the connections at all doors."""
    call = call_of(request)
    call.access.check_watching()
    return ConnectionList(
        [
            ConnectionOut(
                row.id,
                row.door,
                row.peer,
                row.client,
                row.token,
                row.since_ns,
                time_text(row.since_ns),
                row.subscriptions,
                row.queued_bytes,
                FlowOut(
                    row.flow.messages_in,
                    row.flow.bytes_in,
                    row.flow.messages_out,
                    row.flow.bytes_out,
                ),
            )
            for rows in call.door.broker.connection_rows
            for row in rows()
        ]
    )


@get("/v1/statistics", operation_id="statistics", tags=["watching"], sync_to_thread=False)
def statistics(request: Request[Any, Any, Any]) -> dict[str, Any]:
    """Tell the figures of this moment, as they are published on `!system/metrics/broker`."""
    return call_of(request).access.statistics()


watch_handlers = [list_connections, statistics]
