"""What is special to metadata in SQLite: full disks, changes that are forgotten, what others do to the file."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runnel.errors import ClosedError, DiskFullError, FencedError
from runnel.log.metadata.records import (
    Closed,
    MetadataRecord,
    Opened,
    SubscriptionSet,
    TermTaken,
    TopicDeleted,
)
from runnel.log.metadata.sqlite import sqlite_metadata
from runnel.log.metadata.sqlite.conversion import make_file
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.log.metadata.sqlite.sqlite_metadata import SqliteMetadata
from runnel.platform.disk import RealDisk
from tests.log.test_shared_metadata import topic

DEADLINE_S = 20.0


class Place:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._databases: list[ClusterDatabase] = []
        make_file(RealDisk(), self.path, ())

    async def database(self) -> ClusterDatabase:
        self._databases.append(await ClusterDatabase.open(self.path))
        return self._databases[-1]

    async def member(self, name: str, seen: list[MetadataRecord] | None = None) -> SqliteMetadata:
        metadata = SqliteMetadata(await self.database(), name)
        seen = [] if seen is None else seen
        seen += await metadata.load(seen.extend)
        return metadata

    async def alone(self) -> SqliteMetadata:
        return SqliteMetadata.alone(await self.database())

    async def value(self, query: str) -> object:
        [value] = (await self._databases[-1].read(lambda it: it.execute(query).fetchone())) or [
            None
        ]
        return value

    async def close(self) -> None:
        for database in self._databases:
            await database.close()


def scenario(run: Callable[[Place], Awaitable[None]]) -> Callable[[Path], None]:
    def test(tmp_path: Path) -> None:
        async def act() -> None:
            async with opened(tmp_path) as place:
                await run(place)

        asyncio.run(act())

    test.__name__, test.__doc__ = run.__name__, run.__doc__
    return test


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Place]:
    place = Place(folder / "cluster.sqlite")
    try:
        yield place
    finally:
        await place.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - other connections change it
            await asyncio.sleep(0.001)


async def fill_disk(database: ClusterDatabase, *, is_full: bool) -> None:
    """Let the file grow no further, or without a limit."""

    def limit(connection: sqlite3.Connection) -> None:
        [pages] = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages if is_full else 2**30}")

    await database.read(limit)


def log_bytes(place: Place) -> int:
    """The size of SQLite's log beside the file."""
    return Path(f"{place.path}-wal").stat().st_size


def contents(names: Iterable[str]) -> list[SubscriptionSet]:
    return [SubscriptionSet(name, bytes(3000)) for name in names]


@scenario
async def test_full_disk_fails_what_was_added_and_nothing_else(place: Place) -> None:
    seen: list[MetadataRecord] = []
    first = await place.member("first")
    second = await place.member("second", seen)
    await fill_disk(first._database, is_full=True)
    applied: list[str] = []
    with pytest.raises(DiskFullError, match=r"no room to record it in .*cluster\.sqlite: "):
        await first.add(*contents("abcdefgh"), apply=lambda: applied.append("never"))
    await second.add(*contents("i"))  # another process has more room
    await fill_disk(first._database, is_full=False)
    await first.add(*contents("j"))
    await until(lambda: len(seen) == 1)  # its own are applied by whoever adds them
    assert [each.name for each in seen if isinstance(each, SubscriptionSet)] == ["j"]
    assert applied == []


@scenario
async def test_limit_of_a_file_s_size_is_a_full_disk_too(place: Place) -> None:
    metadata = await place.member("first")
    await metadata.add(*contents("a"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (log_bytes(place) + 4096, hard))
        with pytest.raises(DiskFullError):
            await metadata.add(*contents("bcdefghi"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await metadata.add(*contents("j"))
    assert await place.value("SELECT group_concat(name) FROM record") == "a,j"


@scenario
async def test_one_refused_change_does_not_fail_those_of_the_same_transaction(place: Place) -> None:
    metadata = await place.member("first")
    outcomes = await asyncio.gather(
        metadata.add(SubscriptionSet("a", b"")),
        metadata.add(SubscriptionSet("s", b"2"), replaces={"s": b"1"}),
        metadata.add_made(lambda: [][1]),
        metadata.add(SubscriptionSet("b", b"")),
        return_exceptions=True,
    )
    assert [type(outcome).__name__ for outcome in outcomes] == [
        "NoneType",
        "Unavailable",
        "IndexError",
        "NoneType",
    ]
    assert await place.value("SELECT group_concat(name) FROM record") == "a,b"


@scenario
async def test_changes_that_all_have_passed_are_forgotten(place: Place) -> None:
    seen: list[MetadataRecord] = []
    first = await place.member("first")
    await place.member("second", seen)
    for number in range(1200):
        await first.add(SubscriptionSet("s", b"%d" % number))
        if number % 100 == 0:
            await until(lambda number=number: len(seen) > number)  # type: ignore[misc]
    await until(lambda: len(seen) == 1200)
    count = await place.value("SELECT count(*) FROM change")
    assert isinstance(count, int)
    assert count < 900
    third: list[MetadataRecord] = []
    await place.member("third", third)
    assert third == [SubscriptionSet("s", b"1199")]


@scenario
async def test_log_that_lags_too_far_behind_is_fenced_and_reads_everything_again(
    place: Place,
) -> None:
    """As one whose process was paused. What it misses is not kept for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_metadata, "CHANGES_KEPT_MAX", 300)
        first = await place.member("first")
        lagging: list[MetadataRecord] = []
        second = await place.member("second", lagging)
        second._database.unfollow(second)  # it looks no more
        for number in range(800):
            await first.add(SubscriptionSet("s", b"%d" % number))
        assert await place.value("SELECT count(*) FROM change") < 600  # type: ignore[operator]
        second._database.follow(second)
        with pytest.raises(FencedError, match="paused for too long"):
            await second.add(SubscriptionSet("late", b""))
        assert lagging == []
        again: list[MetadataRecord] = []
        second = await place.member("second", again)
        assert again == [SubscriptionSet("s", b"799")]
        await second.add(SubscriptionSet("on time", b""))


@scenario
async def test_terms_are_bounded_and_the_first_are_forgotten_first(place: Place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_metadata, "_TERMS_MAX", 20)
        patch.setattr(sqlite_metadata, "_TERMS_PRUNED_EVERY", 8)
        metadata = await place.member("first")
        for number in range(100):
            await metadata.take_term(f"p{number:03}", number)
        seen: list[MetadataRecord] = []
        await place.member("second", seen)
        assert 20 <= len(seen) < 30
        assert seen[-1] == TermTaken("p099", 99)
        assert [each.term for each in seen if isinstance(each, TermTaken)] == list(
            range(100 - len(seen), 100)
        )


@scenario
async def test_epochs_of_openings_only_rise_and_each_undoes_the_closing(place: Place) -> None:
    alone = await place.alone()
    await alone.add(Opened(50, 1))
    await alone.add(Closed(50))
    assert (await alone.load_alone()).records == [Opened(50, 1), Closed(50)]
    await alone.add(Opened(3, 2, has_marks=True))
    assert (await alone.load_alone()).records == [Opened(50, 2, has_marks=True)]


@scenario
async def test_renewed_metadata_has_what_the_snapshot_says(place: Place) -> None:
    alone = await place.alone()
    await alone.add(SubscriptionSet("s", b""), topic("a"), topic("b"))
    await alone.renew([topic("a"), TopicDeleted("a")])
    assert (await alone.load_alone()).records == [topic("a"), TopicDeleted("a")]


@scenario
async def test_what_is_queued_is_committed_at_the_end_and_nothing_after_it(place: Place) -> None:
    metadata = await place.member("first")
    database = metadata._database
    waiting = [metadata.add(SubscriptionSet(f"s{number}", b"")) for number in range(50)]
    await database.close()
    assert all(each.done() and each.exception() is None for each in waiting)
    with pytest.raises(ClosedError):
        await metadata.add(SubscriptionSet("late", b""))
    again = await place.member("again")
    assert await place.value("SELECT count(*) FROM record") == 50
    released = again.add(SubscriptionSet("never", b""))
    again._database.release()
    with pytest.raises(ClosedError):
        await released


@scenario
async def test_looking_costs_nothing_while_nothing_changes(place: Place) -> None:
    """An idle process asks for a number 20 times a second, and reads no table."""
    database = await place.database()
    statements: list[str] = []
    await database.read(lambda connection: connection.set_trace_callback(statements.append))
    await place.member("other")  # registers: one change
    await until(lambda: "BEGIN" in statements)
    await asyncio.sleep(0.4)  # the attention to what follows a change ends
    statements.clear()
    await asyncio.sleep(0.5)
    assert set(statements) == {"PRAGMA data_version"}
    assert len(statements) < 15
