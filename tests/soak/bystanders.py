"""Well-behaved clients beside the vandals, one at each door: they must not notice anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from runnel.client import connect
from tests.conformance.clients.grpc_bus import connect_grpc
from tests.conformance.clients.http_bus import connect_http
from tests.server.serving import Server

# However busy the door, a well-behaved client waits less than this for one answer.
PATIENCE_MAX_S: Final = 20.0
_PAUSE_S: Final = 0.002


class Irregularity(AssertionError):
    """Something that a client could tell, and should not."""


class Bystander:
    """Publishes, reads back and works through, on a topic that is kept and one that is not, and minds everything."""

    def __init__(self, door: str, bus: Any) -> None:
        self.messages = 0
        self.slowest_s = 0.0
        self.is_ending = False  # after what is under way
        self._door = door
        self._bus = bus

    async def run(self) -> None:
        bus, kept_topic, live_topic = self._bus, f"kept/{self._door}", f"live/{self._door}"
        async with (
            bus.subscribe(kept_topic) as kept,
            bus.subscribe(live_topic) as live,
            bus.consume(f"honest-{self._door}", kept_topic) as consumer,
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
                    raise Irregularity(f"{self._door}: gaps: {kept.gaps} {live.gaps}")
                await asyncio.sleep(_PAUSE_S)

    def _compare(self, what: str, offset: int, found: object, expected: object) -> None:
        if (offset, found) != (self.messages, expected):
            raise Irregularity(
                f"{self._door}: {what} has {found!r} at {offset}; expected was "
                f"{expected!r} at {self.messages}"
            )


def ways_in(
    server: Server, doors: Mapping[str, int], authority: str | None
) -> dict[str, Callable[[], AbstractAsyncContextManager[Any]]]:
    """How each of them connects. With TLS there is one at the native door alone, whose client can do it."""
    if authority is not None:
        url = f"runnels://127.0.0.1:{server.port}?ca={authority}"
        return {"native": lambda: connect(url)}
    ways: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
        "native": lambda: connect(server.url),
        "http": lambda: connect_http(server.addresses["http"]),
        "grpc": lambda: connect_grpc(server.addresses["grpc"]),
    }
    return {door: ways[door] for door in doors}
