"""The resources for health and readiness, which need no token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, Response, get

from runnel.protocols.http.server.calls import call_of


class Health(msgspec.Struct, frozen=True):
    """`status` is `ok`."""

    status: str


class Readiness(msgspec.Struct, frozen=True):
    """`troubles` says why the broker is not ready, and is empty if it is. `warnings` says what else is wrong."""

    status: str
    troubles: Sequence[str]
    warnings: Sequence[str]


@get("/healthz", operation_id="health", tags=["health"], sync_to_thread=False)
def healthz() -> Health:
    """Report that the process is alive: answered as long as it answers anything."""
    return Health("ok")


@get("/readyz", operation_id="readiness", tags=["health"], sync_to_thread=False)
def readyz(request: Request[Any, Any, Any]) -> Response[Readiness]:
    """Report whether the broker is ready: 503 while it shuts down, or cannot store everything that it is given."""
    server = call_of(request).server
    troubles = list(server.broker.monitor.troubles())
    if server.is_closing:
        troubles.insert(0, "the broker is shutting down")
    warnings = server.broker.monitor.warnings()
    if troubles:
        return Response(Readiness("unready", troubles, warnings), status_code=503)
    return Response(Readiness("ready", (), warnings))


health_handlers = [healthz, readyz]
