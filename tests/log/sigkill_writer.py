"""The process that tests kill: appends to a log without end, and prints what is acknowledged as stored.

python -m tests.log.sigkill_writer DIRECTORY LIFE
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from runnel.config import LogSettings, Rotate, Settings, TopicRule
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import Appended
from runnel.platform.clock import SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.topics.policies import Policies

IN_FLIGHT = 16
# Small segments and snapshots, so that a kill meets rotation and the catalogue too.
_RULES = (TopicRule(match="*", journal="all", rotate=Rotate(bytes_max=20_000)),)


async def open_log(directory: Path, workers: ThreadWorkers) -> DiskLog:
    return await DiskLog.open(
        str(directory),
        settings=Settings(
            log=LogSettings(
                allocate_bytes=8_192, disk_reserve_bytes=0, catalogue_log_bytes_max=4_096
            )
        ),
        policies=Policies(_RULES),
        disk=RealDisk(),
        clock=SystemClock(),
        workers=workers,
    )


def named_batch(life: int, number: int) -> Batch:
    """A named publisher's batch: the life is its term, so a later one can send it again."""
    messages = _messages(f"named-{life}-{number}", "named", number % 5 + 1)
    return Batch.from_messages(messages, producer=f"p{life}", term=life, number=number)


def _messages(name: str, topic: str, count: int) -> list[Message]:
    return [Message(topic, f"{name}-{row}{'.' * 200}".encode()) for row in range(count)]


def _tell(batch: Batch, appended: Appended) -> None:
    """One line a message, all of a batch in one write: the pipe never holds half a batch."""
    payloads = [message.payload.rstrip(b".").decode() for message in batch.messages()]
    topic = batch.envelope.topics[0]
    base = appended.base_offsets[0]
    lines = [f"{payload}\t{topic}\t{base + row}\n" for row, payload in enumerate(payloads)]
    os.write(sys.stdout.fileno(), "".join(lines).encode())


async def _write(log: DiskLog, life: int) -> None:
    room = asyncio.Semaphore(IN_FLIGHT)

    async def send(batch: Batch) -> None:
        try:
            _tell(batch, await log.append(batch))
        finally:
            room.release()

    if life:  # whether or not it was stored before the kill, it is stored once
        await room.acquire()
        await send(named_batch(life - 1, 0))
    async with asyncio.TaskGroup() as group:
        for number in range(1_000_000):
            await room.acquire()
            group.create_task(send(named_batch(life, number)))
            await room.acquire()
            messages = _messages(f"plain-{life}-{number}", f"plain/{number % 3}", number % 7 + 1)
            group.create_task(send(Batch.from_messages(messages)))


async def main(directory: Path, life: int) -> None:
    workers = ThreadWorkers(2)
    await _write(await open_log(directory, workers), life)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
