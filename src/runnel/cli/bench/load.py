"""One process of `runnel bench`: its clients publish, read and check. Run it with `python -m runnel.cli.bench.load`.

Standard input brings its part of the load and then a line for each next step. Its results go to standard output as
lines (`runnel.cli.bench.plan`).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from runnel.cli.bench.latencies import Latencies
from runnel.cli.bench.payload import PayloadMaker, RunCheck
from runnel.cli.bench.plan import Expect, Load, Ready, Received, Sent
from runnel.cli.connection import run_loop
from runnel.cli.payloads import LineSplitter
from runnel.cli.standard_streams import read_some
from runnel.client import connect
from runnel.errors import RunnelError

if TYPE_CHECKING:
    from runnel.client import Bus, Gap, Publisher, Subscription

# Messages count as lost when none has come for this long.
_DRAIN_S: Final = 3.0
_DRAIN_LOOK_S: Final = 0.02
_LATENCIES_GATHERED: Final = 4096
# Of one client: more in the queue of a publisher that sends without a pause only adds to the latency.
_BUFFER_BYTES_MAX: Final = 512 * 2**10


class Client:
    """One connection that publishes to all topics in turn."""

    def __init__(self, number: int, load: Load, publisher: Publisher) -> None:
        self._load = load
        self._publisher = publisher
        self._payloads = [
            PayloadMaker(load.run, number, index, load.size) for index in range(len(load.topics))
        ]
        self._turn = number  # so that clients begin with different topics

    async def publish(self) -> None:
        """Publish a batch to the next topic at every interval, until the load ends."""
        load, publisher = self._load, self._publisher
        due = time.monotonic()
        ends = due + load.duration_s
        while time.monotonic() < ends:
            index = self._turn % len(load.topics)
            self._turn += 1
            topic, payloads = load.topics[index], self._payloads[index]
            for _ in range(load.batch):
                publisher.send(payloads.next(), topic)
            await publisher.ready()  # also lets the other clients run, whenever a batch is full
            if load.interval_s:
                due += load.interval_s
                await asyncio.sleep(max(due - time.monotonic(), 0))
        await publisher.flush()

    def made(self) -> dict[str, int]:
        return {
            topic: payloads.made
            for topic, payloads in zip(self._load.topics, self._payloads, strict=True)
        }


class Subscriber:
    """One subscription, which checks every message."""

    def __init__(self, load: Load, bus: Bus) -> None:
        self.subscription: Subscription = bus.subscribe(*load.subscribe, on_gap=self._take_gap)
        self.arrivals = RunCheck(load.run)
        self.latencies = Latencies()
        self.told_missed = 0
        self.last_ns = 0
        self._waiting: list[int] = []

    @property
    def seen(self) -> int:
        """Messages that came, and messages that the broker reported as missed."""
        return self.arrivals.received + self.arrivals.disordered + self.told_missed

    async def read(self) -> None:
        async for batch in self.subscription.batches():
            now_ns = time.time_ns()
            if times := self.arrivals.take(batch.messages()):
                self.last_ns = now_ns
                self._waiting += [now_ns - event_ns for event_ns in times]
                if len(self._waiting) >= _LATENCIES_GATHERED:
                    self.count_latencies()

    def count_latencies(self) -> None:
        """Add the waiting latencies to the histogram at once: adding them one by one costs more than reading."""
        self.latencies.add(self._waiting)
        self._waiting.clear()

    def _take_gap(self, gap: Gap) -> None:
        self.told_missed += gap.missed


class Instructions:
    """Lines on standard input. Its end means that the bench has ended."""

    def __init__(self) -> None:
        self._splitter = LineSplitter()
        self._lines: list[bytes] = []

    async def next(self) -> bytes:
        while not self._lines:
            data = await read_some(sys.stdin.fileno())
            if not data:
                raise RunnelError("the bench that started this process has ended")
            self._lines += self._splitter.feed(data)
        return self._lines.pop(0)


async def carry_out(orders: Instructions) -> None:
    """Run the steps of a load. Between two steps every process waits for all others."""
    load = msgspec.json.decode(await orders.next(), type=Load)
    async with AsyncExitStack() as stack:
        clients, subscribers = await _connect_all(load, stack)
        async with asyncio.TaskGroup() as reading:
            readers = [reading.create_task(subscriber.read()) for subscriber in subscribers]
            _say(Ready())
            await orders.next()
            _say(await _publish(clients))
            expected = msgspec.json.decode(await orders.next(), type=Expect)
            await _drain(subscribers, expected.messages)
            for reader in readers:
                reader.cancel()
        _say(_received(subscribers))


async def _connect_all(load: Load, stack: AsyncExitStack) -> tuple[list[Client], list[Subscriber]]:
    clients: list[Client] = []
    subscribers: list[Subscriber] = []
    for number in load.clients:
        bus = await stack.enter_async_context(connect(load.url))
        publisher = await stack.enter_async_context(
            bus.publisher(level=load.level, buffer_bytes_max=_BUFFER_BYTES_MAX)
        )
        clients.append(Client(number, load, publisher))
        if load.subscribe:
            subscriber = Subscriber(load, bus)
            # After this the broker has answered: the subscription misses nothing that is published from now on.
            await stack.enter_async_context(subscriber.subscription)
            subscribers.append(subscriber)
    return clients, subscribers


async def _publish(clients: list[Client]) -> Sent:
    first_ns = time.time_ns()
    async with asyncio.TaskGroup() as publishing:
        for client in clients:
            publishing.create_task(client.publish())
    messages: Counter[str] = Counter()
    for client in clients:
        messages.update(client.made())
    return Sent(dict(messages), first_ns, time.time_ns())


async def _drain(subscribers: list[Subscriber], expected: int) -> None:
    """Wait until every subscriber has everything, or until nothing has come for a while."""
    before, rested_since = -1, time.monotonic()
    while any(subscriber.seen < expected for subscriber in subscribers):
        seen = sum(subscriber.seen for subscriber in subscribers)
        if seen != before:
            before, rested_since = seen, time.monotonic()
        elif time.monotonic() - rested_since > _DRAIN_S:
            return
        await asyncio.sleep(_DRAIN_LOOK_S)


def _received(subscribers: list[Subscriber]) -> Received:
    latencies = Latencies()
    for subscriber in subscribers:
        subscriber.count_latencies()
        latencies.merge(subscriber.latencies)
    seen = [subscriber.arrivals for subscriber in subscribers]
    return Received(
        subscribers=len(subscribers),
        messages=sum(arrivals.received for arrivals in seen),
        bytes=sum(arrivals.bytes for arrivals in seen),
        disordered=sum(arrivals.disordered for arrivals in seen),
        told_missed=sum(subscriber.told_missed for subscriber in subscribers),
        foreign=sum(arrivals.foreign for arrivals in seen),
        last_ns=max((subscriber.last_ns for subscriber in subscribers), default=0),
        latencies=tuple(latencies.counts),
    )


def _say(word: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
    sys.stdout.buffer.flush()


def main() -> NoReturn:
    try:
        run_loop(carry_out(Instructions()))
    except RunnelError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
