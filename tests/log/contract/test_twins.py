"""The same history in both stores looks the same to every reader."""

from __future__ import annotations

from random import Random

import pytest

from runnel.config import Keep, Pin, Retain, Rotate, Settings, TopicRule
from runnel.config.settings import DAY_NS
from runnel.errors import RunnelError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import CursorPosition, Position, ShardId
from runnel.log.memory import MemoryLog
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.workers import SimulatedWorkers
from tests.log.contract.stores import LOG
from tests.log.home import run
from tests.log.samples import batch, last_message, read_all, trim_log

MAIN = ShardId("main")
HOUR_NS = DAY_NS // 24
TOPICS = ["a", "b", "c/1", "c/2"]
RULE = TopicRule(
    match="*",
    journal="main",
    rotate=Rotate(bytes_max=1, every_ns=HOUR_NS),
    retain=Retain(age_ns=DAY_NS),
    pin=Pin(age_ns=3 * DAY_NS, bytes_max=None),
    last_value=True,
)


def random_batch(random: Random, number: int) -> Batch:
    runs = [
        (random.choice(TOPICS), [b"%d.%d" % (number, row) for row in range(random.randint(1, 3))])
        for _ in range(random.randint(1, 4))
    ]
    return batch(*runs)


async def act(log: MemoryLog | DiskLog, random: Random, number: int) -> object:
    """One random call; what it said, or how it failed."""
    topic = random.choice(TOPICS)
    choice = random.random()
    try:
        if choice < 0.55:
            done = await log.append(random_batch(random, number))
            return (list(done.base_offsets), done.entry, done.receive_time_ns)
        if choice < 0.65:
            await trim_log(log)
        elif choice < 0.73:
            await log.metadata.purge_topic(topic)
        elif choice < 0.79:
            await log.metadata.delete_topic(topic)
        elif choice < 0.86:
            # Only to what is still served: of what is not, the stores free more or less as it suits them.
            bounds = await log.bounds(topic, 0)
            offset = random.randint(bounds.first_offset, bounds.next_offset)
            await log.metadata.set_cursor(
                random.choice("xy"), [CursorPosition(topic=topic, offset=offset)]
            )
        elif choice < 0.92:
            now = Position(0, log.shard(MAIN).entries().next_offset)
            at = CursorPosition(shard=MAIN, position=now, patterns=("c/*",))
            await log.metadata.set_cursor(random.choice("xy"), [at])
        else:
            await log.metadata.remove_cursor(random.choice("xy"))
    except RunnelError as error:
        return type(error)
    return None


async def look(log: MemoryLog | DiskLog) -> list[object]:
    """All that readers can see."""
    seen: list[object] = [sorted(log.metadata.topics.names())]
    for topic in TOPICS:
        try:
            bounds = await log.bounds(topic, 0)
        except UnknownTopicError:
            seen.append(None)
            continue
        last = await last_message(log, topic, 0)
        seen += [
            bounds,
            await read_all(log, topic, bounds.first_offset),
            last and last.messages(),
        ]
    if MAIN in log.shards():
        entries = log.shard(MAIN).entries()
        position = Position(0, entries.first_offset)
        while position.entry < entries.next_offset:
            page = await log.read_shard(MAIN, position)
            seen += [message for found in page.found for message in found.wanted()]
            position = page.next_position
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_memory_and_disk_answer_alike(seed: int) -> None:
    async def scenario() -> None:
        clock = VirtualClock()
        settings, policies = Settings(log=LOG), Policies([RULE])
        memory = MemoryLog(settings=settings, policies=policies, clock=clock, keep=Keep.DISK)
        disk = await DiskLog.open(
            "data",
            settings=settings,
            policies=policies,
            disk=FakeDisk(seed),
            clock=clock,
            workers=SimulatedWorkers(Random(seed)),
        )
        random = Random(seed)
        for number in range(40):
            call_seed = random.random()
            answers = [await act(log, Random(call_seed), number) for log in (memory, disk)]
            assert answers[0] == answers[1]
            if number % 3 == 0:
                assert await look(memory) == await look(disk)
            clock.advance(random.choice([0, 1, HOUR_NS, 10 * HOUR_NS]))
        await disk.close()

    run(scenario)
