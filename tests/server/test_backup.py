"""Copies of a data directory, made as docs/howto/backup-and-restore.md says, while clients publish and consume.

`runnel backup` asks the broker for a checkpoint and copies that.

A process that is stopped (SIGSTOP) leaves the same files as one that is killed at that moment. So a copy made meanwhile
is as good as the directory of a killed broker.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from runnel.client import Bus, connect
from runnel.errors import ClientFault
from tests.server.load import (
    DEADLINE_S,
    SMALL,
    ClientLoad,
    PublishLedger,
    StoredAt,
    TopicPartition,
    read_stored,
)
from tests.server.server_process import ServerProcess, held_port, running_server
from tests.server.test_sigkill import check_order, check_places, check_promises

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


_WORK: Final = "work"
_WORK_TOPICS: Final = ("a", "parts/p", "parts/q")
_CURSOR: Final = "reader"
SETTINGS: Final = (*SMALL, "log.state_log_bytes_max=8KiB")


class AckedWork:
    """The messages whose acknowledgement was sent, and those whose acknowledgement was answered as stored."""

    def __init__(self) -> None:
        self.acked: set[StoredAt] = set()
        self.stored: set[StoredAt] = set()


async def work(bus: Bus, worked: AckedWork) -> None:
    async with bus.consume(_WORK, *_WORK_TOPICS) as consumer:
        async for batch in consumer.batches():
            places = [
                (TopicPartition(each.topic, each.partition), each.offset)
                for each in batch.messages()
            ]
            worked.acked.update(places)
            await batch.ack(stored=True)
            worked.stored.update(places)


def copy_whole(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def mirror(source: Path, target: Path) -> None:
    """Like rsync -a --delete --modify-window=-1: copies files that differ in size or time, deletes others."""
    target.mkdir(exist_ok=True)
    here = {child.name: child for child in source.iterdir()}
    for there in list(target.iterdir()):
        if there.name not in here:
            shutil.rmtree(there) if there.is_dir() else there.unlink()
    for name, child in here.items():
        # The broker runs: a listed file may be gone by now. The second pass corrects that.
        with suppress(FileNotFoundError):
            if child.is_dir():
                mirror(child, target / name)
            elif not _is_same(child, target / name):
                shutil.copy2(child, target / name)


def _is_same(source: Path, target: Path) -> bool:
    if not target.exists():
        return False
    here, there = source.stat(), target.stat()
    return (here.st_size, here.st_mtime_ns) == (there.st_size, there.st_mtime_ns)


def runnel(*words: str) -> str:
    """The output of a command that must succeed."""
    ended = subprocess.run(
        [sys.executable, "-m", "runnel", *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def verify(data: Path) -> None:
    runnel("log", "verify", str(data))


def pause(data: Path, server: ServerProcess) -> int:
    pid = int((data / "lock").read_text())
    assert pid == server.process.pid
    os.kill(pid, signal.SIGSTOP)
    return pid


async def work_off(bus: Bus, owed: set[StoredAt]) -> set[StoredAt]:
    """Consume until all that is certainly owed has arrived. Returns all that arrived."""
    came: set[StoredAt] = set()
    async with asyncio.timeout(DEADLINE_S), bus.consume(_WORK) as consumer:
        batches = consumer.batches()
        while not owed <= came:
            batch = await anext(batches)
            came.update(
                (TopicPartition(each.topic, each.partition), each.offset)
                for each in batch.messages()
            )
            await batch.ack()
    return came


async def check_restored(directory: Path, promised: PublishLedger, worked: AckedWork) -> None:
    """A broker on the copy keeps all that the original had promised by then."""
    verify(directory / "data")
    with held_port() as port:
        server = ServerProcess(directory, port, SETTINGS)
        try:
            await server.start()
            async with connect(server.url, deadline_s=DEADLINE_S) as bus:
                stored = await read_stored(bus)
                places = check_places(stored)
                check_order(stored)
                check_promises(promised, places)
                cursor = await bus.cursor(_CURSOR)
                assert cursor is not None
                assert [place.offset for place in cursor.places] == [7]
                there = {where for where in places.values() if where[0].topic in _WORK_TOPICS}
                came = await work_off(bus, there - worked.acked)
                assert not came & worked.stored, "acknowledged work comes again"
                receipt = await bus.publish("a", b"after")
                assert receipt.offset == len(stored[TopicPartition("a", 0)]) + 1
            await server.stop()
            assert "Traceback" not in server.stderr, server.stderr
        finally:
            server.discard()


@pytest.mark.parametrize("passes", [1, 2])
def test_a_copy_of_a_paused_broker_keeps_everything_that_was_promised(
    tmp_path: Path, passes: int
) -> None:
    original, restored = tmp_path / "original", tmp_path / "restored"
    data, copied = original / "data", restored / "data"
    original.mkdir()
    restored.mkdir()

    async def scenario() -> None:
        promised, worked = PublishLedger(), AckedWork()
        until_then = AckedWork()
        async with running_server(original, *SETTINGS) as server:
            load = ClientLoad(server.url, seed=passes)
            async with connect(server.url, deadline_s=DEADLINE_S) as bus:
                working = asyncio.create_task(work(bus, worked))
                try:
                    await load.subscribe("*")
                    for number in range(2):
                        await load.publish_named(f"named-{number}")
                    await load.wait_for(lambda: load.acknowledged > 1000)
                    await bus.set_cursor(_CURSOR, {"a": 7})
                    if passes == 2:
                        await asyncio.to_thread(mirror, data, copied)
                    await load.wait_for(
                        lambda: load.acknowledged > 3000 and len(worked.stored) > 200
                    )
                    pid = pause(data, server)
                    try:
                        promised.acknowledged.update(load.named.acknowledged)
                        until_then.acked, until_then.stored = set(worked.acked), set(worked.stored)
                        await asyncio.to_thread(mirror if passes == 2 else copy_whole, data, copied)
                    finally:
                        os.kill(pid, signal.SIGCONT)
                    # The clients noticed no more than a pause.
                    wanted = load.acknowledged + 500
                    await load.wait_for(lambda: load.acknowledged > wanted)
                    await load.end_publishing()
                    stored = await read_stored(bus)
                    await load.end_reading(stored)
                finally:
                    working.cancel()
                    await asyncio.gather(working, return_exceptions=True)
                    await load.close()
            assert load.named.failures == []
            check_promises(load.named, check_places(stored))
            await server.stop()
        await check_restored(restored, promised, until_then)

    asyncio.run(scenario())


def test_a_backup_of_a_broker_at_work_keeps_everything_that_was_promised(tmp_path: Path) -> None:
    original, restored = tmp_path / "original", tmp_path / "restored"
    original.mkdir()
    restored.mkdir()

    async def scenario() -> None:
        promised, worked, until_then = PublishLedger(), AckedWork(), AckedWork()
        async with running_server(original, *SETTINGS) as server:
            load = ClientLoad(server.url, seed=3)
            async with connect(server.url, deadline_s=DEADLINE_S) as bus:
                working = asyncio.create_task(work(bus, worked))
                try:
                    await load.subscribe("*")
                    for number in range(2):
                        await load.publish_named(f"named-{number}")
                    await load.wait_for(lambda: load.acknowledged > 1000)
                    await bus.set_cursor(_CURSOR, {"a": 7})
                    await load.wait_for(
                        lambda: load.acknowledged > 3000 and len(worked.stored) > 200
                    )
                    promised.acknowledged.update(load.named.acknowledged)
                    until_then.stored = set(worked.stored)
                    backup = str(tmp_path / "backup")
                    told = await asyncio.to_thread(runnel, "backup", backup, "--url", server.url)
                    assert "verified" in told
                    # Acknowledgements that came during the copy may be in it or not.
                    until_then.acked = set(worked.acked)
                    await wait_until(lambda: not (original / "data" / "checkpoint").exists())
                    wanted = load.acknowledged + 500
                    await load.wait_for(lambda: load.acknowledged > wanted)
                    await load.end_publishing()
                    stored = await read_stored(bus)
                    await load.end_reading(stored)
                finally:
                    working.cancel()
                    await asyncio.gather(working, return_exceptions=True)
                    await load.close()
            assert load.named.failures == []
            check_promises(load.named, check_places(stored))
            await server.stop()
        runnel("restore", str(tmp_path / "backup"), str(restored / "data"))
        await check_restored(restored, promised, until_then)

    asyncio.run(scenario())


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - another process makes it so
            await asyncio.sleep(0.01)


def test_a_broker_that_is_killed_during_a_backup_leaves_no_half_copy_and_loses_nothing(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "data" / "checkpoint"
    target = tmp_path / "backup"

    async def scenario() -> None:
        async with running_server(tmp_path, *SMALL) as server:
            async with connect(server.url, deadline_s=DEADLINE_S) as bus:
                for number in range(200):
                    await bus.publish("a", str(number).encode() * 100)
            words = [sys.executable, "-m", "runnel", "backup", str(target), "--url", server.url]
            copying = await asyncio.create_subprocess_exec(*words, stderr=subprocess.PIPE)
            await wait_until(lambda: checkpoint.exists() or copying.returncode is not None)
            server.kill()
            _, told = await copying.communicate()
            # Either the copy was complete by then, or nothing has the name of a complete copy.
            assert target.exists() == (copying.returncode == 0), told
            assert b"Traceback" not in told
            await server.start()
            assert not checkpoint.exists()
            async with connect(server.url, deadline_s=DEADLINE_S) as bus:
                assert (await bus.fetch("a", 200)).messages[0].payload == b"199" * 100
            again = str(tmp_path / "again")
            await asyncio.to_thread(runnel, "backup", again, "--url", server.url)
            await server.stop()

    asyncio.run(scenario())


def test_files_of_a_backup_whose_client_vanishes_are_removed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "data" / "checkpoint"

    async def scenario() -> None:
        async with running_server(tmp_path) as server:
            async with connect(server.url) as bus:
                await bus.publish("a", b"1")
                path, _ = await bus.checkpoint()
                assert Path(path) == checkpoint
                async with connect(server.url) as another:
                    with pytest.raises(ClientFault, match="a copy of this broker is being made"):
                        await another.checkpoint()
                assert checkpoint.exists()
            await wait_until(lambda: not checkpoint.exists())
            async with connect(server.url) as bus:
                await bus.checkpoint()  # another may be made
            await server.stop()

    asyncio.run(scenario())
