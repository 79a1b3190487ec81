"""The resource `/metrics`: all metrics of the broker, for Prometheus."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, get
from litestar.types import ControllerRouterHandler

from runnel.protocols.http.encoding.exposition import Exposition, metrics_of
from runnel.protocols.http.server.answers import Answer
from runnel.protocols.http.server.calls import call_of


@get("/metrics", operation_id="metrics", tags=["monitoring"], media_type="text/plain")
async def metrics(request: Request[Any, Any, Any]) -> Answer:
    """Return all metrics in Prometheus' text format, or as OpenMetrics if `Accept` asks for it.

    Needs the right to read `!system/metrics/broker`. docs/operations/metrics.md describes each of them.
    """
    call = call_of(request)
    call.access.check_monitoring()
    broker = call.server.broker
    await broker.monitor.refresh()
    exposition = Exposition(call.headers.get(b"accept", b"").decode("latin-1"))
    written = bytearray()
    for metric in metrics_of(broker.metrics):
        written += exposition.encode(metric)
        # Each metric is bounded, but all together take long: other tasks run in between.
        await asyncio.sleep(0)
    return Answer(bytes(written + exposition.end), content_type=exposition.content_type)


metrics_handlers: list[ControllerRouterHandler] = [metrics]
