"""Messages for measurements with Spark: a topic filled at once, or a steady flow into it."""

from __future__ import annotations

import asyncio
import random
import time

import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems.system import PAYLOAD_BYTES, RolePlan
from runnel.client import connect
from runnel.formats.batch import Batch
from runnel.formats.message import Message

MESSAGES_PER_BATCH = 1000  # as many as a publisher gathers by itself
_DISTINCT_BATCHES = 64
_UNDER_WAY_MAX = 64
_STEP_S = 0.01
_SENSORS = 100
_SITES = 10


def random_payloads(count: int, seed: int = 1) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(PAYLOAD_BYTES) for _ in range(count)]


def fill(url: str, topic: str, count: int, *, has_tags: bool = False) -> None:
    """So many messages, in batches as a busy publisher would make them; with a key and two tags each, if wanted."""
    assert count % MESSAGES_PER_BATCH == 0
    begin_ns = time.time_ns()
    batches = [
        Batch.from_messages(
            [
                Message(
                    topic,
                    payload,
                    key=b"sensor-%d" % (row % _SENSORS) if has_tags else None,
                    tags={"unit": "C", "site": f"site-{row % _SITES}"} if has_tags else {},
                    event_time_ns=begin_ns + row,
                )
                for row, payload in enumerate(random_payloads(MESSAGES_PER_BATCH, seed))
            ]
        )
        for seed in range(min(_DISTINCT_BATCHES, count // MESSAGES_PER_BATCH))
    ]

    async def publish() -> None:
        room = asyncio.Semaphore(_UNDER_WAY_MAX)

        async def one(batch: Batch) -> None:
            async with room:
                await bus.publish_batch(batch)

        async with connect(url) as bus, asyncio.TaskGroup() as group:
            for number in range(count // MESSAGES_PER_BATCH):
                group.create_task(one(batches[number % len(batches)]))

    uvloop.run(publish())


def feed(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """`rate` messages a second, in small bursts, until it is told that it is over."""

    async def work() -> RoleReport:
        payloads = random_payloads(MESSAGES_PER_BATCH)
        async with connect(plan.url) as bus, bus.publisher(plan.topics[0]) as publisher:
            authenticator.ready()
            begin_ns = time.time_ns()
            sent = 0
            while not authenticator.is_over():
                due = (time.time_ns() - begin_ns) * plan.rate // 10**9
                for number in range(sent, due):
                    publisher.send(payloads[number % MESSAGES_PER_BATCH])
                sent = due
                await asyncio.sleep(_STEP_S)
            await publisher.flush()
            return RoleReport(begin_ns, time.time_ns(), sent)

    return uvloop.run(work())
