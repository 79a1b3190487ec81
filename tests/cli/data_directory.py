"""Data directories on the real disk for the tests of `runnel log`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from runnel.config import LogSettings, Rotate, Settings, TopicRule
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.disk.disk_log import DiskLog
from runnel.platform.clock import Clock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock

LOG = LogSettings(allocate_bytes=65_536, disk_reserve_bytes=0)
SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=6000), partitions=2)
START_NS = 1_700_000_000 * 10**9
STEP_NS = 1_500_000_001  # no round number: every digit of a time must survive


async def open_log(
    directory: Path, workers: ThreadWorkers, rule: TopicRule = SMALL, clock: Clock | None = None
) -> DiskLog:
    return await DiskLog.open(
        str(directory),
        settings=Settings(log=LOG),
        policies=Policies((rule,)),
        disk=RealDisk(),
        clock=clock or VirtualClock(START_NS),
        workers=workers,
    )


def write(directory: Path, batches: Sequence[Sequence[Message]]) -> list[Message]:
    """Append each batch, the clock a step further each time; returns what readers must get."""
    return asyncio.run(_write(directory, batches))


async def _write(directory: Path, batches: Sequence[Sequence[Message]]) -> list[Message]:
    clock = VirtualClock(START_NS)
    workers = ThreadWorkers(1)
    expected: list[Message] = []
    try:
        log = await open_log(directory, workers, clock=clock)
        for messages in batches:
            published = Batch.from_messages(messages)
            done = await log.append(published)
            offsets = [
                base + row
                for base, run in zip(done.base_offsets, published.runs(), strict=True)
                for row in range(run.count)
            ]
            expected += [
                msgspec.structs.replace(
                    message,
                    offset=offset,
                    receive_time_ns=done.receive_time_ns,
                    partition_key=message.partition_key or message.key,
                )
                for message, offset in zip(messages, offsets, strict=True)
            ]
            clock.advance(STEP_NS)
        await log.close()
    finally:
        workers.close()
    return expected


def sensor_batches(count: int = 40) -> list[list[Message]]:
    """Batches of a few messages of three topics, with everything that a message can have."""
    return [
        [
            Message(
                f"sensors/{'abc'[row % 3]}",
                b"21.%d" % row if row % 4 else b"\xff\x00%d" % number,
                key=(None, b"plain", b"\x80")[row % 3],
                partition_key=b"p" if row == 4 else None,
                tags=({}, {"unit": "C"}, {"unit": "F", "ort": "Köln"})[(number + row) % 3],
                event_time_ns=START_NS - number * 1_000_000_007 + row,
                transmit_time_ns=START_NS + number,
                partition=row % 2,
                uid=bytes([row + 1]) * 20 if row % 2 else None,
            )
            for row in range(number % 5 + 1)
        ]
        for number in range(count)
    ]
