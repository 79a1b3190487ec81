"""Runnel as a queue: a subscription that four processes consume, with its own client.

- Under uvloop, as the broker is. Publishing: `send` for every message, `ready` now and then, `flush` at the end; the
  broker acknowledges what is stored.
- Consuming one by one: `async for work in consumer` and `await consumer.ack(work)` for each. By batches: those that
  come, each message of them made an object, and one `ack` for all of it.
- 4,000 messages may be leased to a consumer. With the default of 256, which suits work that takes longer than counting,
  it came out at a quarter; with 1,000 at half.
- An acknowledgement counts once it is stored: beside its work each consumer asks for that again and again (`flush`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems import runnel_system
from bench.systems.system import NUMBERS, RunningServer, payloads
from bench.systems.work import SUBSCRIPTION, TOPIC, AckTally, WorkPlan
from runnel.client import Consumer, Work, connect

NAME = runnel_system.NAME
absence = runnel_system.absence

_WINDOW_MESSAGES = 4000
_HELD_BYTES_MAX = 2**30
_SEED = 1
_MAKING = 50  # subscriptions at a time


@contextmanager
def serve(*, stored: str = "disk") -> Iterator[RunningServer]:
    with runnel_system.serve(stored=stored) as served:
        yield served


def produce(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        data = payloads()
        keys = [b"%d" % number for number in range(plan.keys)]
        chosen = random.Random(_SEED).choices(keys, k=plan.count) if keys else None
        async with connect(plan.url) as bus, bus.publisher(TOPIC) as publisher:
            send = publisher.send
            authenticator.ready()
            authenticator.wait_go()
            begin_ns = time.time_ns()
            for begin in range(0, plan.count, NUMBERS):
                due = data[: plan.count - begin]
                if chosen is None:
                    for payload in due:
                        send(payload)
                else:
                    for payload, key in zip(due, chosen[begin : begin + NUMBERS], strict=True):
                        send(payload, key=key)
                await publisher.ready()
            await publisher.flush()
            return RoleReport(begin_ns, time.time_ns(), plan.count)

    return uvloop.run(work())


# --- Consuming ---


class _Progress:
    """What a consumer has acknowledged, and how much of it was out of its key's order."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.misplaced = 0
        self.last_offsets: dict[bytes | None, int] = {}


def consume(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        mode, _, way = plan.mode.partition(" by ")
        take = _take_batches if way == "batches" else _take_keyed if plan.keys else _take
        progress = _Progress()
        with AckTally(plan.tally, plan.place) as tally:
            async with (
                connect(plan.url) as bus,
                bus.consume(
                    SUBSCRIPTION, TOPIC, mode=mode, window_messages=_WINDOW_MESSAGES
                ) as consumer,
            ):
                authenticator.ready()
                tasks = [
                    asyncio.create_task(take(consumer, progress)),
                    asyncio.create_task(_tell_stored(consumer, progress, tally)),
                    asyncio.create_task(authenticator.wait_over()),
                ]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()  # raises what went wrong
                    task.cancel()
                await asyncio.wait(tasks)
            return tally.report(misplaced=progress.misplaced)

    return uvloop.run(work())


async def _take(consumer: Consumer, progress: _Progress) -> None:
    ack = consumer.ack
    async for work in consumer:
        await ack(work)
        progress.acknowledged += 1


async def _take_keyed(consumer: Consumer, progress: _Progress) -> None:
    """The same, and what a key's messages come in is their order."""
    ack, last_offsets = consumer.ack, progress.last_offsets
    async for work in consumer:
        key, offset = work.key, work.offset
        if offset <= last_offsets.get(key, 0):
            progress.misplaced += 1
        last_offsets[key] = offset
        await ack(work)
        progress.acknowledged += 1


async def _take_batches(consumer: Consumer, progress: _Progress) -> None:
    async for batch in consumer.batches():
        messages = list(batch.messages())
        await consumer.ack(batch)
        progress.acknowledged += len(messages)


async def _tell_stored(consumer: Consumer, progress: _Progress, tally: AckTally) -> None:
    """Asked for again as soon as it is answered: each asks for what has come in the meantime."""
    while True:
        count = progress.acknowledged
        if count == tally.count:
            await asyncio.sleep(0.001)
            continue
        await consumer.flush()
        tally.reach(count)


def hold(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    """Take `count` messages, acknowledge none of them until all have theirs, and then one by one."""

    async def work() -> RoleReport:
        with AckTally(plan.tally, plan.place) as tally:
            async with (
                connect(plan.url) as bus,
                bus.consume(
                    SUBSCRIPTION,
                    TOPIC,
                    mode=plan.mode,
                    window_messages=plan.count,
                    window_bytes=_HELD_BYTES_MAX,
                ) as consumer,
            ):
                works = await _taken(consumer, plan.count)
                if plan.is_shuffled:
                    random.Random(plan.place).shuffle(works)
                authenticator.ready()
                await (
                    authenticator.wait_over()
                )  # without holding up the loop, which renews the leases
                begin_ns = time.time_ns()
                ack = consumer.ack
                for work in works:
                    await ack(work)
                await consumer.flush()
                tally.reach(len(works))
                return RoleReport(begin_ns, tally.end_ns, tally.count)

    return uvloop.run(work())


async def _taken(consumer: Consumer, count: int) -> list[Work]:
    works: list[Work] = []
    async for work in consumer:
        works.append(work)
        if len(works) == count:
            break
    return works


# --- Subscriptions ---


def subscribe_idly(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    """Make subscriptions to the topic that get no consumers."""

    async def work() -> RoleReport:
        async with connect(plan.url) as bus:
            authenticator.ready()
            for begin in range(0, plan.subscriptions, _MAKING):
                async with asyncio.TaskGroup() as group:
                    for number in range(begin, min(begin + _MAKING, plan.subscriptions)):
                        making = bus.make_subscription(f"idle-{number}", TOPIC, mode="shared")
                        group.create_task(making)
        return RoleReport(messages=plan.subscriptions)

    return uvloop.run(work())


def audit(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    """What the broker says is acknowledged, and how much it delivered more than once."""

    async def work() -> RoleReport:
        async with connect(plan.url) as bus:
            authenticator.ready()
            state = await bus.subscription(SUBSCRIPTION)
            (member,) = state.members
            return RoleReport(messages=plan.count - member.backlog, misplaced=state.redelivered)

    return uvloop.run(work())
