"""The resource `/metrics`: all metrics of the broker, for Prometheus."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, get
from litestar.types import ControllerRouterHandler

from runnel.protocols.http.encoding.exposition import Exposition
from runnel.protocols.http.server.answers import Answer
from runnel.protocols.http.server.calls import call_of


@get("/metrics", operation_id="metrics", tags=["monitoring"], media_type="text/plain")
async def metrics(request: Request[Any, Any, Any]) -> Answer:
    """Return all metrics in Prometheus' text format, or as OpenMetrics if `Accept` asks for it.

    Of several processes, any answers for all, with a label `node`. Needs the right to read `!system/metrics/broker`.
    docs/operations/metrics.md describes each of them.
    """
    call = call_of(request)
    nodes = await call.access.metrics_of_nodes()
    exposition = Exposition(call.headers.get(b"accept", b"").decode("latin-1"))
    written = bytearray()
    for piece in exposition.encode(nodes):
        written += piece
        # Each piece is bounded, but all together take long: other tasks run in between.
        await asyncio.sleep(0)
    return Answer(bytes(written), content_type=exposition.content_type)


metrics_handlers: list[ControllerRouterHandler] = [metrics]
