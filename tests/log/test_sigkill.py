"""A real process that writes to a real disk and is killed without warning, again and again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from runnel.errors import LockedError
from runnel.formats.message import Message
from runnel.log.disk.disk_log import DiskLog
from runnel.platform.workers import ThreadWorkers
from tests.log import sigkill_writer as writer

pytestmark = pytest.mark.slow

ROUNDS = 12


@contextmanager
def writing(directory: Path, life: int) -> Iterator[subprocess.Popen[str]]:
    """The writer in a process of its own. Killed at the end, if it was not before."""
    process = subprocess.Popen(
        [sys.executable, "-m", writer.__name__, str(directory), str(life)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_acknowledged(process: subprocess.Popen[str], lines: int) -> list[str]:
    """Kill the process after so many acknowledgements; everything that it had said by then."""
    assert process.stdout is not None
    acknowledged = [line for line in (process.stdout.readline() for _ in range(lines)) if line]
    assert acknowledged, f"the writer ended with {process.wait()} before it wrote anything"
    os.kill(process.pid, signal.SIGKILL)
    acknowledged += process.stdout.readlines()
    assert process.wait() == -signal.SIGKILL
    return [line.strip() for line in acknowledged if line.endswith("\n")]


async def read_all(directory: Path) -> dict[tuple[str, int], list[Message]]:
    workers = ThreadWorkers(2)
    try:
        log = await writer.open_log(directory, workers)
        found: dict[tuple[str, int], list[Message]] = {}
        for name in log.metadata.topics.names():
            for number in range(log.metadata.topics.policy(name).partitions):
                messages = found[name, number] = []
                offset = (await log.bounds(name, number)).first_offset
                while (page := await log.read(name, number, offset)).found:
                    messages += [m for one in page.found for m in one.wanted().messages()]
                    offset = page.next_offset
        await log.close()
    finally:
        workers.close()
    return found


def test_acknowledged_batches_survive_sigkill(tmp_path: Path) -> None:
    random = Random(20)
    acknowledged: dict[str, tuple[str, int]] = {}  # payload to topic and offset
    for life in range(ROUNDS):
        with writing(tmp_path, life) as process:
            for line in read_acknowledged(process, random.randint(2, 60)):
                payload, topic, offset = line.split("\t")
                # A named publisher sends its last batch of the life before again: the same answer.
                assert acknowledged.setdefault(payload, (topic, int(offset))) == (
                    topic,
                    int(offset),
                )
    found = asyncio.run(read_all(tmp_path))
    places: dict[str, tuple[str, int]] = {}
    for (topic, _), messages in found.items():
        offsets = [message.offset for message in messages]
        assert offsets == list(range(1, len(offsets) + 1))
        for message in messages:
            payload = message.payload.rstrip(b".").decode()
            assert payload not in places, f"{payload} is there twice"
            places[payload] = (topic, message.offset)
    assert {payload: places.get(payload) for payload in acknowledged} == acknowledged
    assert len(acknowledged) > ROUNDS * 10


def test_directory_is_locked_until_its_process_dies(tmp_path: Path) -> None:
    async def open_and_close() -> None:
        workers = ThreadWorkers(1)
        try:
            log: DiskLog = await writer.open_log(tmp_path, workers)
            await log.close()
        finally:
            workers.close()

    with writing(tmp_path, 0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(LockedError, match=str(process.pid)):
            asyncio.run(open_and_close())
        process.kill()
        process.wait()
        asyncio.run(open_and_close())
