"""Well-behaved clients, one of each listener, that must not notice the attacks beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from runnel.client import connect
from tests.conformance.clients.grpc_bus import connect_grpc
from tests.conformance.clients.http_bus import connect_http
from tests.server.server_process import ServerProcess

# A well-behaved client waits less than this for an answer, however busy the listener is.
PATIENCE_MAX_S: Final = 20.0
_PAUSE_S: Final = 0.002

Connector = Callable[[], AbstractAsyncContextManager[Any]]


class Irregularity(AssertionError):
    """A well-behaved client noticed something of the attacks."""


class Bystander:
    """Publishes, subscribes and consumes, on a kept and on an ephemeral topic, and checks every answer."""

    def __init__(self, listener: str, bus: Any) -> None:
        self.messages = 0
        self.slowest_s = 0.0
        self.is_ending = False  # after the current message
        self._listener = listener
        self._bus = bus

    async def run(self) -> None:
        bus, kept_topic, live_topic = self._bus, f"kept/{self._listener}", f"live/{self._listener}"
        async with (
            bus.subscribe(kept_topic) as kept,
            bus.subscribe(live_topic) as live,
            bus.consume(f"honest-{self._listener}", kept_topic) as consumer,
        ):
            while not self.is_ending:
                self.messages += 1
                payload = b"%d" % self.messages
                begin = time.monotonic()
                async with asyncio.timeout(PATIENCE_MAX_S):
                    receipt = await bus.publish(kept_topic, payload)
                    self._compare("the receipt", receipt.offset, receipt.level, "stored")
                    await bus.publish(live_topic, payload)
                    for subscription in (kept, live):
                        message = await anext(subscription)
                        self._compare(message.topic, message.offset, message.payload, payload)
                    work = await anext(consumer)
                    self._compare("work", work.offset, work.payload, payload)
                    self._compare("work", self.messages, work.delivery_count, 1)
                    await work.ack(stored=True)
                self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
                if kept.gaps or live.gaps:
                    raise Irregularity(f"{self._listener}: gaps: {kept.gaps} {live.gaps}")
                await asyncio.sleep(_PAUSE_S)

    def _compare(self, what: str, offset: int, found: object, expected: object) -> None:
        if (offset, found) != (self.messages, expected):
            raise Irregularity(
                f"{self._listener}: {what} has {found!r} at {offset}; expected is "
                f"{expected!r} at {self.messages}"
            )


def connectors(
    server: ServerProcess, listeners: Sequence[str], authority: str | None
) -> dict[str, Connector]:
    """Opens a client of each listener. With TLS there is only a native one: the test clients of the others lack it."""
    if authority is not None:
        url = f"runnels://127.0.0.1:{server.port}?ca={authority}"
        return {"native": lambda: connect(url)}
    all_connectors: dict[str, Connector] = {
        "native": lambda: connect(server.url),
        "http": lambda: connect_http(server.addresses["http"]),
        "grpc": lambda: connect_grpc(server.addresses["grpc"]),
    }
    return {name: all_connectors[name] for name in listeners}
