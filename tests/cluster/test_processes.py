"""Real processes record metadata in one file at once, and are killed while they do."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from runnel.errors import Unavailable
from runnel.log.metadata.records import SubscriptionSet
from runnel.log.metadata.sqlite import database as databases
from runnel.log.metadata.sqlite.conversion import make_file
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.log.metadata.sqlite.offline import read_file, verify_file
from runnel.log.metadata.sqlite.sqlite_metadata import SqliteMetadata, forget_follower
from runnel.platform.disk import RealDisk
from tests.cluster import recorder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
KILLS = 6
DEADLINE_S = 60.0


class Process:
    """A `recorder` that has loaded. What it tells goes into a file, so that it never waits for its reader."""

    def __init__(self, path: Path, name: str, count: int, total: int) -> None:
        self._told = path.with_name(f"{name}.told")
        with self._told.open("w") as told:
            self._process = subprocess.Popen(
                [sys.executable, "-m", recorder.__name__, str(path), name, str(count), str(total)],
                stdin=subprocess.PIPE,
                stdout=told,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        self.wait_for(1)

    def lines(self) -> list[str]:
        """What it has told until now; whole lines only."""
        return self._told.read_text().split("\n")[:-1]

    def stored(self) -> list[str]:
        return [line.removeprefix("stored ") for line in self.lines() if line.startswith("stored")]

    def wait_for(self, count: int) -> None:
        """Wait until it has told so many lines."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.lines()) < count:
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, self.lines()[-1:]
            time.sleep(0.005)

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> list[str]:
        """Wait until it ends. Returns all records in the order in which it has seen them."""
        _, errors = self._process.communicate(timeout=DEADLINE_S)
        assert self._process.returncode == 0, errors
        seen = json.loads(self.lines()[-1])
        assert isinstance(seen, list)
        return seen

    def failure(self) -> str:
        """Wait until it fails. Returns why."""
        _, errors = self._process.communicate(timeout=DEADLINE_S)
        assert self._process.returncode != 0
        return errors

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def processes(*made: tuple[Path, str, int, int]) -> Iterator[list[Process]]:
    found: list[Process] = []
    try:
        for each in made:  # one by one: those that were made are stopped if the next one fails
            process = Process(*each)
            found.append(process)
        for process in found:
            process.begin()
        yield found
    finally:
        for process in found:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "cluster.sqlite"
    make_file(RealDisk(), str(found), ())
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_commit_at_once_see_every_record_in_one_order(
    path: Path, count: int
) -> None:
    each = 600 // count
    total = each * count
    with processes(*((path, f"p{number}", each, total) for number in range(count))) as found:
        seen = [process.end() for process in found]
    names = {f"p{number}/{index}" for number in range(count) for index in range(each)}
    assert set(seen[0]) == names
    assert len(seen[0]) == total
    assert all(order == seen[0] for order in seen)
    assert not Path(f"{path}-wal").exists()  # the last one to close has put it into the file
    assert {r.name for r in read_file(str(path)).records if isinstance(r, SubscriptionSet)} == names


def test_what_a_killed_process_was_told_is_stored_and_others_go_on(path: Path) -> None:
    random = Random(7)
    stored: list[str] = []
    with processes((path, "steady", 0, 0)) as [steady]:
        for life in range(KILLS):
            with processes((path, f"killed-{life}", 0, 0)) as [killed]:
                killed.wait_for(1 + random.randint(1, 40))
                killed.kill()
                stored += killed.stored()
            steady.wait_for(len(steady.lines()) + 20)  # it is not stuck
        steady.kill()
        stored += steady.stored()
    assert len(stored) > 20 * KILLS

    # Nobody has closed the file: the next one to open it recovers it.
    async def reopened() -> set[str]:
        database = await ClusterDatabase.open(str(path))
        try:
            metadata = SqliteMetadata(database, "next")
            found = await metadata.load(lambda _: None)
            await metadata.add(SubscriptionSet("goes on", b""))
        finally:
            await database.close()
        return {each.name for each in found if isinstance(each, SubscriptionSet)}

    known = asyncio.run(reopened())
    assert set(stored) <= known
    assert verify_file(str(path)).damage == []
    # Of each process exactly the first records are there: none is missing in between.
    for name in ("steady", *(f"killed-{life}" for life in range(KILLS))):
        numbers = sorted(
            int(each.rpartition("/")[2]) for each in known if each.startswith(f"{name}/")
        )
        assert numbers[: len(numbers) - recorder.IN_FLIGHT] == list(
            range(len(numbers) - recorder.IN_FLIGHT)
        )


def test_paused_process_that_was_declared_dead_is_fenced_when_it_wakes(path: Path) -> None:
    with processes((path, "paused", 0, 0)) as [paused]:
        is_fenced = False
        while not is_fenced:
            paused.wait_for(len(paused.lines()) + 3)
            paused.signal(signal.SIGSTOP)
            try:
                asyncio.run(declare_dead(path, "paused"))
                is_fenced = True
            except Unavailable:  # it was stopped in the middle of a transaction
                paused.signal(signal.SIGCONT)
        count = len(read_file(str(path)).records)
        paused.signal(signal.SIGCONT)
        assert "FencedError" in paused.failure()
        assert len(read_file(str(path)).records) == count


async def declare_dead(path: Path, name: str) -> None:
    database = await ClusterDatabase.open(str(path))
    try:
        await database.change(lambda connection: forget_follower(connection, name, 1))
    finally:
        await database.close()


def test_locked_file_is_a_retriable_error_after_a_deadline(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another process is stopped in the middle of a transaction."""
    monkeypatch.setattr(databases, "BUSY_MS_MAX", 200)

    async def scenario() -> None:
        database = await ClusterDatabase.open(str(path))
        try:
            metadata = SqliteMetadata(database, "one")
            await metadata.load(lambda _: None)
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(Unavailable, match=r"locked for 0 s; try again"):
                    await metadata.add(SubscriptionSet("s", b""))
                other.execute("ROLLBACK")
            await metadata.add(SubscriptionSet("s", b""))
        finally:
            await database.close()

    asyncio.run(scenario())
