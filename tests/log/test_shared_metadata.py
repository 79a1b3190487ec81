"""Metadata that several logs share: what `SharedMetadata` promises, of the store in SQLite and of the tests' fake."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from runnel.config import Keep
from runnel.errors import FencedError, Unavailable
from runnel.log.log import Cursor, CursorPosition, Position, ShardId
from runnel.log.metadata.records import (
    CursorRemoved,
    CursorSet,
    JournalMade,
    MetadataRecord,
    Opened,
    SubscriptionRemoved,
    SubscriptionSet,
    TermTaken,
    TopicDeleted,
    TopicMade,
)
from runnel.log.metadata.shared_metadata import SharedMetadata
from runnel.log.metadata.shared_records import SharedRecords
from runnel.log.metadata.sqlite.conversion import make_file
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.log.metadata.sqlite.sqlite_metadata import SqliteMetadata
from runnel.platform.disk import RealDisk

DEADLINE_S = 20.0
JOURNAL = JournalMade("wide", Keep.DISK, 4)
CURSOR = Cursor(
    "c",
    (
        CursorPosition(topic="a", partition=1, offset=7),
        CursorPosition(shard=ShardId("main", 2), position=Position(3, 4, 5), patterns=("a/*",)),
    ),
    123,
    "token",
)


class Kind(enum.Enum):
    FAKE = "fake"
    SQLITE = "sqlite"


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> Kind:
    found = request.param
    assert isinstance(found, Kind)
    return found


class Member:
    """A log's access, and all that it has seen, in order: what it loaded, what it followed, what it applied."""

    def __init__(self, metadata: SharedMetadata) -> None:
        self.metadata = metadata
        self.seen: list[MetadataRecord] = []

    async def load(self) -> None:
        self.seen += await self.metadata.load(self.seen.extend)

    def add(self, *records: MetadataRecord) -> asyncio.Future[None]:
        return self.metadata.add(*records, apply=lambda: self.seen.extend(records))

    def define(self, content: bytes, replaces: bytes | None) -> asyncio.Future[None]:
        record = SubscriptionSet("s", content)
        return self.metadata.add(
            record, apply=lambda: self.seen.append(record), replaces={"s": replaces}
        )

    async def saw(self, *records: MetadataRecord) -> None:
        """Wait until it has seen these."""
        async with asyncio.timeout(DEADLINE_S):
            while not all(record in self.seen for record in records):  # noqa: ASYNC110 - others add them
                await asyncio.sleep(0.001)


class Place:
    """What is shared. Each member has its own connection, as if it was a process of its own."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self._shared = SharedRecords() if kind is Kind.FAKE else None
        self._path = str(folder / "cluster.sqlite")
        self._databases: list[ClusterDatabase] = []
        if self._shared is None:
            make_file(RealDisk(), self._path, ())

    async def member(self, name: str) -> Member:
        metadata: SharedMetadata
        if self._shared is not None:
            metadata = self._shared.member(name)
        else:
            self._databases.append(await ClusterDatabase.open(self._path))
            metadata = SqliteMetadata(self._databases[-1], name)
        member = Member(metadata)
        await member.load()
        return member

    async def two(self) -> tuple[Member, Member]:
        return await self.member("first"), await self.member("second")

    async def close(self) -> None:
        for database in self._databases:
            await database.close()


def scenario(run: Callable[[Place], Awaitable[None]]) -> Callable[[Kind, Path], None]:
    def test(kind: Kind, tmp_path: Path) -> None:
        async def act() -> None:
            place = Place(kind, tmp_path)
            try:
                await run(place)
            finally:
                await place.close()

        asyncio.run(act())

    test.__name__, test.__doc__ = run.__name__, run.__doc__
    return test


def topic(name: str, *, journal: str = "main", generation: int = 1) -> TopicMade:
    return TopicMade(name, Keep.DISK, 2, journal, "token", generation)


# --- Records ---


@scenario
async def test_records_of_every_kind_are_followed_and_loaded(place: Place) -> None:
    first, second = await place.two()
    added: list[MetadataRecord] = [
        Opened(4, 5, has_marks=True),
        JOURNAL,
        topic("a", journal="wide"),
        topic("b"),
        TopicDeleted("b"),
        TermTaken("p", 12),
        CursorSet(CURSOR),
        SubscriptionSet("s", b"\x00definition"),
    ]
    for record in added:
        await first.add(record)
    await second.saw(*added)
    assert second.seen == first.seen == added
    late = await place.member("late")
    assert late.seen == added


@scenario
async def test_what_was_removed_is_not_loaded(place: Place) -> None:
    first, second = await place.two()
    await first.add(CursorSet(CURSOR), SubscriptionSet("s", b"1"), topic("a"), TopicDeleted("a"))
    await second.add(CursorRemoved("c"), SubscriptionRemoved("s"), topic("a", generation=2))
    late = await place.member("late")
    # The topic was made again. Whether the record of the former one is still there makes no difference.
    kept = [each for each in late.seen if isinstance(each, TopicMade | TopicDeleted)]
    assert kept[-1] == topic("a", generation=2)


@scenario
async def test_newest_value_is_loaded_last(place: Place) -> None:
    first, _ = await place.two()
    for number in range(3):
        await first.add(SubscriptionSet("s", b"%d" % number))
    late = await place.member("late")
    assert late.seen[-1] == SubscriptionSet("s", b"2")


@scenario
async def test_all_logs_see_all_records_in_one_order(place: Place) -> None:
    members = [await place.member(f"member-{number}") for number in range(3)]
    added: list[MetadataRecord] = []
    for number in range(30):
        waiting = []
        for member in members:
            record = SubscriptionSet("s", b"%d %d" % (members.index(member), number))
            added.append(record)
            waiting.append(member.add(record))
            if number % 3:
                waiting.append(member.add(topic(f"{members.index(member)}/{number}")))
                added.append(topic(f"{members.index(member)}/{number}"))
        await asyncio.gather(*waiting)
    for member in members:
        await member.saw(*added)
    assert members[0].seen == members[1].seen == members[2].seen
    assert len(members[0].seen) == len(added)


@scenario
async def test_records_of_one_log_keep_their_order(place: Place) -> None:
    first, second = await place.two()
    added = [SubscriptionSet("s", b"%d" % number) for number in range(200)]
    await asyncio.gather(*(first.add(record) for record in added))
    await second.saw(*added)
    assert first.seen == second.seen == added


@scenario
async def test_made_records_are_applied_before_the_answer(place: Place) -> None:
    first, _ = await place.two()
    applied: list[str] = []
    recorded = first.metadata.add_made(lambda: [topic("a")], apply=lambda: applied.append("now"))
    recorded.add_done_callback(lambda _: applied.append("answered"))
    await recorded
    await asyncio.sleep(0)
    assert applied == ["now", "answered"]


# --- Of two, the first counts ---


@scenario
async def test_same_topic_made_twice_is_recorded_once(place: Place) -> None:
    first, second = await place.two()
    await asyncio.gather(first.metadata.add(topic("a")), second.metadata.add(topic("a")))
    await second.metadata.add(TermTaken("p", 1))  # behind both
    await first.saw(TermTaken("p", 1))
    made = [each for each in (*first.seen, *second.seen) if isinstance(each, TopicMade)]
    assert made == [topic("a")]  # one of them followed the other
    assert (await place.member("late")).seen == [topic("a"), TermTaken("p", 1)]


@scenario
async def test_of_two_policies_the_first_counts_and_is_followed(place: Place) -> None:
    first, second = await place.two()
    await first.add(topic("a"))
    with pytest.raises(Unavailable):
        await second.add(topic("b"), topic("a", journal="elsewhere"))
    await second.saw(topic("a"))
    assert topic("b") not in (await place.member("late")).seen  # one of them fails with the other
    await second.add(topic("a", journal="elsewhere", generation=2))
    await first.saw(topic("a", journal="elsewhere", generation=2))


@scenario
async def test_topic_that_another_log_has_deleted_meanwhile_is_not_recorded(place: Place) -> None:
    first, second = await place.two()
    await first.add(topic("a"))
    await first.add(TopicDeleted("a"))
    with pytest.raises(Unavailable):
        await second.add(topic("a"))
    await second.add(topic("a", generation=2))


@scenario
async def test_journal_keeps_the_shards_with_which_it_was_recorded_first(place: Place) -> None:
    first, second = await place.two()
    await first.add(JOURNAL)
    await second.add(JOURNAL)
    with pytest.raises(Unavailable, match="wide"):
        await second.add(JournalMade("wide", Keep.DISK, 8))
    assert (await place.member("late")).seen == [JOURNAL]


@scenario
async def test_terms_rise_whoever_takes_them(place: Place) -> None:
    first, second = await place.two()
    terms = [await first.metadata.take_term("p", 100)]
    terms += await asyncio.gather(
        *(member.metadata.take_term("p", 50) for member in (first, second) * 5)
    )
    assert sorted(terms) == list(range(100, 111))
    assert await second.metadata.take_term("q", 7) == 7
    assert await first.metadata.take_term("p", 500) == 500


@scenario
async def test_definition_is_only_replaced_by_who_has_seen_it(place: Place) -> None:
    first, second = await place.two()
    await first.define(b"1", None)
    with pytest.raises(Unavailable):
        await second.define(b"other", None)
    await second.define(b"2", b"1")
    with pytest.raises(Unavailable):
        await first.define(b"3", b"1")
    await first.metadata.add(SubscriptionRemoved("s"))
    with pytest.raises(Unavailable):
        await second.define(b"4", b"2")
    await second.define(b"4", None)
    assert (await place.member("late")).seen[-1] == SubscriptionSet("s", b"4")


# --- Fences, rest and end ---


@scenario
async def test_log_that_was_opened_again_is_fenced(place: Place) -> None:
    former = await place.member("first")
    await former.add(topic("a"))
    again = await place.member("first")
    with pytest.raises(FencedError):
        await former.add(topic("b"))
    with pytest.raises(FencedError):
        await former.metadata.take_term("p", 1)
    await again.add(topic("c"))
    assert again.seen == [topic("a"), topic("c")]


@scenario
async def test_paused_metadata_records_nothing_until_it_is_resumed(place: Place) -> None:
    first, second = await place.two()
    early = first.add(topic("a"))
    await early
    await first.metadata.pause()
    waiting = first.add(topic("b"))
    await second.add(topic("c"))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert topic("b") not in second.seen
    first.metadata.resume()
    await waiting
    await second.saw(topic("b"))


@scenario
async def test_closed_member_is_told_nothing_and_its_last_records_are_stored(place: Place) -> None:
    first, second = await place.two()
    await first.metadata.close(topic("last"))
    await second.saw(topic("last"))
    seen: Sequence[MetadataRecord] = list(first.seen)
    await second.add(topic("a"))
    await asyncio.sleep(0.1)
    assert first.seen == seen
    with pytest.raises(Unavailable):
        await first.add(topic("b"))
