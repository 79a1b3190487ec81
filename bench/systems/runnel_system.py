"""Runnel, with its own client and that client's defaults.

- Under uvloop, as the broker is. A publisher that batches by itself: `send` for every message, `ready` now and then for
  backpressure, `flush` at the end. `async for message in subscription` on the other side.
- The broker's bound on what waits for a slow subscriber of an ephemeral topic is raised, as NATS's is.
- Publishing is acknowledged at the topic's default: `received` for ephemeral topics, `stored` for those on disk.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems.system import (
    NUMBERS,
    ArrivalWatch,
    PayloadOrder,
    ReceivedMessages,
    RolePlan,
    RunningServer,
    aticks,
    blast,
    free_port,
    payloads,
    scratch,
    serving,
    stamped,
    when_up,
)
from runnel.client import Opening, Publisher, Subscription, connect
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.message import Message

NAME = "Runnel"
_PATTERNS_PER_CONNECTION = 1000
_MESSAGES_PER_LOADING_BATCH = 10
_CONFIG = """
data = "{data}"

[native]
listen = "127.0.0.1:{port}"

[http]
listen = "none"

[grpc]
listen = "none"

[broker]
live_queue_bytes_max = "1GiB"

[[topics]]
match = "live/*"
keep = "none"
"""


def absence() -> str | None:
    """Nothing: it is always here."""
    return None


@contextmanager
def serve(*, stored: str = "") -> Iterator[RunningServer]:
    """`stored` needs nothing here: topics outside live/ are on disk, and synced before they are acknowledged."""
    assert stored in ("", "disk")
    with scratch() as directory, serve_in(directory, free_port()) as served:
        yield served


@contextmanager
def serve_in(directory: Path, port: int, *, options: Sequence[str] = ()) -> Iterator[RunningServer]:
    """`options` of `runnel serve`, beside those that every run has."""
    config = directory / "runnel.toml"
    config.write_text(_CONFIG.format(data=directory / "data", port=port))
    command = [sys.executable, "-m", "runnel", "serve", "--config", str(config), *options]
    with serving(command, port, "runnel", directory) as served:
        yield served


def _connect(plan: RolePlan) -> Opening:
    return connect(plan.url)


# --- Publishing ---


async def _send(publisher: Publisher, topics: list[str], data: list[bytes], count: int) -> None:
    """Round and round over the topics; the payload's number goes on when each has had one."""
    send = publisher.send
    if len(topics) == 1:  # the publisher's own
        for left in range(count, 0, -NUMBERS):
            for payload in data[:left]:
                send(payload)
            await publisher.ready()
        return
    for turn in range(-(-count // len(topics))):
        payload = data[turn % NUMBERS]
        due = topics[: count - turn * len(topics)]
        for begin in range(0, len(due), NUMBERS):
            for topic in due[begin : begin + NUMBERS]:
                send(payload, topic)
            await publisher.ready()


def publish(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        topics, data = list(plan.topics), payloads(size=plan.payload_bytes)
        own = topics[0] if len(topics) == 1 else None
        async with _connect(plan) as bus, bus.publisher(own) as publisher:
            authenticator.ready()
            authenticator.wait_go()
            begin_ns = time.time_ns()
            await _send(publisher, topics, data, plan.count)
            await publisher.flush()
            return RoleReport(begin_ns, time.time_ns(), plan.count)

    return uvloop.run(work())


def publish_stored(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        topic, data = plan.topics[0], payloads()
        async with _connect(plan) as bus, bus.publisher(topic) as publisher:
            authenticator.ready()
            authenticator.wait_go()
            begin_ns = time.time_ns()
            await _send(publisher, [topic], data, plan.count)
            await publisher.flush()
            end_ns = time.time_ns()
            stored = (await bus.topic(topic)).messages
            return RoleReport(begin_ns, end_ns, stored)

    return uvloop.run(work())


def publish_steadily(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        async with _connect(plan) as bus, bus.publisher(plan.topics[0]) as publisher:
            authenticator.ready()
            authenticator.wait_go()
            begin_ns = time.time_ns()
            async for number in aticks(plan.rate, plan.count):
                publisher.send(stamped(number))
            await publisher.flush()
            return RoleReport(begin_ns, time.time_ns(), plan.count)

    return uvloop.run(work())


def probe_stored(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """One acknowledged publish after another."""

    async def work() -> RoleReport:
        topic, payload, taken_ns = plan.topics[0], payloads()[0], []
        async with _connect(plan) as bus:
            await bus.publish(topic, payload)
            authenticator.ready()
            authenticator.wait_go()
            deadline = time.monotonic() + plan.seconds
            while time.monotonic() < deadline:
                begin_ns = time.perf_counter_ns()
                await bus.publish(topic, payload)
                taken_ns.append(time.perf_counter_ns() - begin_ns)
        return RoleReport(messages=len(taken_ns), taken_ns=taken_ns)

    return uvloop.run(work())


def load(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Saturate the broker: raw sockets, so that this process costs as little as it can."""
    topic = plan.topics[0]
    messages = [Message(topic, payload) for payload in payloads()[:_MESSAGES_PER_LOADING_BATCH]]
    block = bytes(Batch.from_messages(messages).pack())
    frame = wire.encode(wire.Publish(1, "none"), len(block)) + block
    hello = wire.encode(wire.Hello(0, wire.VERSION, (), "runnel-bench"))
    sockets = []
    for _ in range(plan.connections):
        each = socket.create_connection(("127.0.0.1", int(plan.url.rpartition(":")[2])))
        each.sendall(hello)
        each.recv(65536)  # the welcome
        sockets.append(each)
    authenticator.ready()
    frames = 50
    chunks = blast(sockets, frame * frames, authenticator.is_over)
    return RoleReport(messages=chunks * frames * _MESSAGES_PER_LOADING_BATCH)


# --- Reading ---


async def _read(
    subscription: Subscription, arrivals: ReceivedMessages, expected: int, order: PayloadOrder
) -> None:
    """All that is expected. Where there is one topic, its offsets say whether anything is missing."""
    if order is not PayloadOrder.ALL:
        take = arrivals.take
        async for message in subscription:
            if take(message.topic, message.payload):
                return
    count = before = 0
    async for message in subscription:
        offset = message.offset
        if offset != before + 1 and before:
            arrivals.misplaced += 1
        before = offset
        arrivals.count = count = count + 1
        if count == expected:
            arrivals.end_ns = time.time_ns()
            return


@asynccontextmanager
async def _reading(
    subscriptions: list[Subscription], expected: int, order: PayloadOrder
) -> AsyncIterator[ArrivalWatch]:
    """Read all of them at once; those that lack something when the block is left are given up."""
    watch = ArrivalWatch(len(subscriptions), expected, order)

    async def read(place: int) -> None:
        await _read(subscriptions[place], watch.arrivals[place], expected, order)
        watch.finish_one()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(place)) for place in range(len(subscriptions))]
        yield watch
        for task in tasks:
            task.cancel()


def subscribe(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        async with AsyncExitStack() as stack:
            subscriptions = []
            for _ in range(plan.connections):
                bus = await stack.enter_async_context(_connect(plan))
                reading = bus.subscribe(plan.pattern, start="latest")
                subscriptions.append(await stack.enter_async_context(reading))
            authenticator.ready()
            async with _reading(subscriptions, plan.count, plan.order) as watch:
                return await watch.finished()

    return uvloop.run(work())


def clients(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Each connection publishes over all topics and listens to one of them."""

    async def work() -> RoleReport:
        to_come = plan.clients * plan.count // len(plan.topics)
        async with AsyncExitStack() as stack:
            subscriptions, publishers = [], []
            for _ in range(plan.connections):
                bus = await stack.enter_async_context(_connect(plan))
                reading = bus.subscribe(plan.pattern, start="latest")
                subscriptions.append(await stack.enter_async_context(reading))
                publishers.append(await stack.enter_async_context(bus.publisher()))
            authenticator.ready()
            authenticator.wait_go()
            begin_ns = time.time_ns()
            async with _reading(subscriptions, to_come, PayloadOrder.PUBLISHER) as watch:
                async with asyncio.TaskGroup() as group:
                    for place, publisher in enumerate(publishers):
                        data = payloads(plan.first_client + place)
                        group.create_task(_send(publisher, list(plan.topics), data, plan.count))
                report = await watch.finished()
            return RoleReport(begin_ns, report.end_ns, report.messages, report.misplaced)

    return uvloop.run(work())


def catch_up(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        async with _connect(plan) as bus:
            authenticator.ready()
            authenticator.wait_go()
            begin_ns = time.time_ns()
            async with (
                bus.subscribe(plan.pattern, start="earliest") as subscription,
                _reading([subscription], plan.count, plan.order) as watch,
            ):
                report = await watch.finished()
            return RoleReport(begin_ns, report.end_ns, report.messages, report.misplaced)

    return uvloop.run(work())


def catch_up_arrow(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """To record batches of all columns; the offsets in them say whether anything is missing."""

    async def work() -> RoleReport:
        async with _connect(plan) as bus:
            authenticator.ready()
            authenticator.wait_go()
            begin_ns = time.time_ns()
            count = misplaced = before = 0
            async with bus.subscribe(plan.pattern, start="earliest") as subscription:
                async for rows in subscription.to_arrow():
                    offsets = rows.column("offset")
                    misplaced += before > 0 and offsets[0].as_py() != before + 1
                    before = offsets[-1].as_py()
                    count += rows.num_rows
                    if count >= plan.count:
                        break
            return RoleReport(begin_ns, time.time_ns(), count, misplaced)

    return uvloop.run(work())


def iterate(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Processor time a message of `async for message in subscription`, everything that it takes to read included."""

    async def work() -> RoleReport:
        async with _connect(plan) as bus, bus.subscribe(plan.pattern, start="earliest") as reading:
            authenticator.ready()
            authenticator.wait_go()
            begin_ns, count = time.process_time_ns(), 0
            async for _ in reading:
                count += 1
                if count == plan.count:
                    break
            return RoleReport(messages=count, taken_ns=[time.process_time_ns() - begin_ns])

    return uvloop.run(work())


def decode(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """The same by batches, whose messages are made at once: what `async for` stands on."""

    async def work() -> RoleReport:
        async with _connect(plan) as bus, bus.subscribe(plan.pattern, start="earliest") as reading:
            authenticator.ready()
            authenticator.wait_go()
            begin_ns, count = time.process_time_ns(), 0
            async for batch in reading.batches():
                for _ in batch.messages():
                    count += 1
                if count >= plan.count:
                    break
            return RoleReport(messages=count, taken_ns=[time.process_time_ns() - begin_ns])

    return uvloop.run(work())


def fill(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Round and round over the topics, acknowledged as stored."""

    async def work() -> RoleReport:
        async with _connect(plan) as bus, bus.publisher() as publisher:
            authenticator.ready()
            await _send(publisher, list(plan.topics), payloads(size=plan.payload_bytes), plan.count)
            await publisher.flush()
            return RoleReport(messages=plan.count)

    return uvloop.run(work())


def wait_up(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Until a stored message of the last topic can be read."""

    async def read() -> int:
        async with _connect(plan) as bus:
            page = await bus.fetch(plan.topics[-1], messages_max=1)
            end_ns = time.time_ns()
            assert len(page.messages[0].payload) == plan.payload_bytes
            return end_ns

    authenticator.ready()
    authenticator.wait_go()
    return RoleReport(end_ns=when_up(plan.url, lambda: uvloop.run(read())))


# --- What is only held ---


def connect_many(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Hold connections with one subscription each until the measurement is over."""

    async def work() -> RoleReport:
        async with AsyncExitStack() as stack:
            for place in range(plan.connections):
                bus = await stack.enter_async_context(_connect(plan))
                await stack.enter_async_context(bus.subscribe(f"live/idle/{place}"))
            authenticator.ready()
            await authenticator.wait_over()
        return RoleReport(messages=plan.connections)

    return uvloop.run(work())


def hold_patterns(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Hold `count` pattern subscriptions that match nothing, on as few connections as are allowed."""

    async def work() -> RoleReport:
        async with AsyncExitStack() as stack:
            for begin in range(0, plan.count, _PATTERNS_PER_CONNECTION):
                bus = await stack.enter_async_context(_connect(plan))
                end = min(begin + _PATTERNS_PER_CONNECTION, plan.count)
                async with asyncio.TaskGroup() as group:
                    for number in range(begin, end):
                        subscription = bus.subscribe(f"live/other/{number}/*")
                        group.create_task(subscription.open())
            authenticator.ready()
            await authenticator.wait_over()  # leaving the bus ends its subscriptions
        return RoleReport(messages=plan.count)

    return uvloop.run(work())
