"""Reading a data directory without its broker: the same messages, nothing written, nothing unsafe served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import cache

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.config import Keep, Retain, Rotate, TopicRule
from runnel.errors import ClientFault, FormatVersionError
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.formats.checksum import crc32c
from runnel.formats.message import Message
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import CursorPosition
from runnel.log.reading import OfflineLog, Selection, offline_log
from runnel.log.segments import paths
from runnel.platform.lock_holder import LockHolder
from runnel.topics.patterns import Pattern
from tests.fakes.disk import FakeDisk
from tests.log.home import Home, run
from tests.log.samples import batch, one, trim_log

SECOND_NS = 10**9
SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=4000), partitions=2)
SYSTEM = TopicRule(match="!*", journal="system", keep=Keep.DISK, partitions=2)

Write = Callable[[DiskLog, Home], Awaitable[None]]


def written(*rules: TopicRule, write: Write) -> Home:
    """A directory that was written to and closed."""
    home = Home(*rules)

    async def scenario() -> None:
        log = await home.open()
        await write(log, home)
        await log.close()

    run(scenario)
    return home


def offline(home: Home, *, live: bool = False) -> OfflineLog:
    holder = LockHolder(1, is_certain=True) if live else None
    return OfflineLog(home.directory, disk=home.disk, find_holder=lambda _: holder)


def messages_of(batches: Iterable[Batch]) -> list[Message]:
    return [message for found in batches for message in found]


def payloads(batches: Iterable[Batch]) -> list[bytes]:
    return [message.payload for message in messages_of(batches)]


# --- Everything, and parts of it ---


@cache
def sensors() -> tuple[Home, list[Message]]:
    """Batches of several topics over several segments and journals, and what a reader must get."""
    expected: list[Message] = []

    async def write(log: DiskLog, home: Home) -> None:
        for number in range(60):
            home.clock.advance(SECOND_NS)
            prefix = "!system/" if number % 5 == 0 else "sensors/"
            messages = [
                Message(
                    f"{prefix}{'abc'[row % 3]}",
                    b"%d-%d" % (number, row),
                    key=b"k%d" % row if row % 2 else None,
                    tags=({}, {"unit": "C"}, {"unit": "F", "site": "x"})[(number + row) % 3],
                    event_time_ns=(number * 7 + row) % 23,
                    partition=row % 2,
                )
                for row in range(number % 9 + 1)
            ]
            published = Batch.from_messages(messages)
            done = await log.append(published)
            offsets = [
                base + row
                for base, run in zip(done.base_offsets, published.runs(), strict=True)
                for row in range(run.count)
            ]
            expected.extend(
                msgspec.structs.replace(
                    message,
                    offset=offset,
                    receive_time_ns=done.receive_time_ns,
                    partition_key=message.key,
                )
                for message, offset in zip(messages, offsets, strict=True)
            )

    home = written(SYSTEM, SMALL, write=write)
    # Journals come one after the other, by name: "main", then "system".
    return home, sorted(expected, key=lambda message: message.topic.startswith("!"))


def wants(selection: Selection, message: Message) -> bool:
    """The selection as naively as it can be said."""

    def within(value: int, begin: int | None, end: int | None) -> bool:
        return (begin is None or value >= begin) and (end is None or value < end)

    key = (message.topic, message.partition)
    ranges = selection.ranges
    return (
        any(Pattern(text).matches(message.topic) for text in selection.topics)
        and (selection.partitions is None or message.partition in selection.partitions)
        and within(message.offset, selection.begin_offset, selection.end_offset)
        and (ranges is None or (key in ranges and within(message.offset, *ranges[key])))
        and within(message.receive_time_ns, selection.since_ns, selection.until_ns)
        and within(message.event_time_ns, selection.event_since_ns, selection.event_until_ns)
        and all(message.tags.get(name) == value for name, value in selection.tags.items())
    )


def test_everything_is_read_in_the_order_of_its_shard() -> None:
    home, expected = sensors()
    log = offline(home)
    found = messages_of(log.scan(Selection(topics=("*", "!*"))))
    assert found == expected
    assert log.report.damage == []
    assert len(log.segment_names(log.journals()[0])) > 2


@pytest.mark.parametrize("piece_bytes", [1, 300, 2**19])
def test_blocks_are_the_same_in_however_many_pieces_they_are_read(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(offline_log, "PIECE_BYTES", piece_bytes)
    home, expected = sensors()
    assert messages_of(offline(home).scan(Selection(topics=("*", "!*")))) == expected


def test_patterns_without_a_mark_do_not_see_system_topics() -> None:
    home, expected = sensors()
    found = messages_of(offline(home).scan())
    assert found == [message for message in expected if not message.topic.startswith("!")]


TIMES = st.none() | st.integers(0, 62).map(lambda n: 1_700_000_000 * SECOND_NS + n * SECOND_NS)
OFFSETS = st.integers(0, 60)
SELECTIONS = st.builds(
    Selection,
    topics=st.sampled_from(
        [("*",), ("sensors/a",), ("*/b", "!*"), ("!system/*",), ("none",), ("sensors/[ac]",)]
    ),
    partitions=st.none() | st.frozensets(st.integers(0, 2)),
    begin_offset=OFFSETS,
    end_offset=st.none() | OFFSETS,
    ranges=st.none()
    | st.dictionaries(
        st.tuples(st.sampled_from(["sensors/a", "!system/b"]), st.integers(0, 1)),
        st.tuples(OFFSETS, OFFSETS),
    ),
    since_ns=TIMES,
    until_ns=TIMES,
    event_since_ns=st.none() | st.integers(0, 23),
    event_until_ns=st.none() | st.integers(0, 23),
    tags=st.sampled_from([{}, {"unit": "C"}, {"unit": "F", "site": "x"}, {"unit": "K"}]),
)


@given(SELECTIONS)
def test_selection_gives_what_a_naive_filter_gives(selection: Selection) -> None:
    home, expected = sensors()
    log = offline(home)
    wanted = [message for message in expected if wants(selection, message)]
    assert messages_of(log.scan(selection)) == wanted
    planned = [log.read(stretch, selection) for stretch in log.plan(selection)]
    assert [message for found in planned for message in messages_of(found)] == wanted


def test_selection_without_patterns_is_refused() -> None:
    with pytest.raises(ClientFault, match="at least one topic pattern"):
        Selection(topics=())


# --- Reading only what is needed ---


async def write_wide(log: DiskLog, home: Home) -> None:
    """Twenty topics with large messages, each in batches of its own, over several segments."""
    for _ in range(10):
        home.clock.advance(SECOND_NS)
        for topic in range(20):
            await log.append(one(f"t{topic}", bytes(30_000)))


WIDE = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1_500_000))


def read_bytes(home: Home, selection: Selection) -> tuple[int, int]:
    """Messages found, and bytes that were read for them."""
    log = offline(home)
    before = home.disk.read_bytes
    return sum(map(len, log.scan(selection))), home.disk.read_bytes - before


def test_one_topic_of_many_costs_its_own_blocks() -> None:
    home = written(WIDE, write=write_wide)
    everything, all_bytes = read_bytes(home, Selection())
    assert everything == 200
    found, some_bytes = read_bytes(home, Selection(topics=("t7",)))
    assert found == 10
    assert some_bytes < all_bytes / 10


def test_times_outside_a_segment_leave_it_unread() -> None:
    home = written(WIDE, write=write_wide)
    log = offline(home)
    segments = log.segments(log.journals()[0])
    assert len(segments) == 5
    assert {segment.is_sealed for segment in segments} == {True}
    _, all_bytes = read_bytes(home, Selection())
    for selection in (
        Selection(since_ns=segments[-1].last_time_ns),
        Selection(until_ns=segments[0].first_time_ns + 1),
    ):
        found, some_bytes = read_bytes(home, selection)
        assert found == 20
        assert some_bytes < all_bytes / 9


def test_neighbouring_blocks_are_read_together() -> None:
    async def write(log: DiskLog, _: Home) -> None:
        for number in range(500):
            await log.append(one("a", b"%d" % number))

    home = written(write=write)
    stretches = list(offline(home).plan())
    assert len(stretches) == 1
    assert len(stretches[0].blocks) == 500
    before = home.disk.read_count
    assert sum(map(len, offline(home).scan())) == 500
    assert home.disk.read_count - before < 15


def test_segments_are_described_by_headers_alone() -> None:
    home = written(WIDE, write=write_wide)
    log = offline(home)
    before = home.disk.read_bytes
    segments = log.segments(log.journals()[0])
    assert home.disk.read_bytes - before < 2000
    assert [segment.name.number for segment in segments] == [1, 2, 3, 4, 5]
    assert sum(segment.entries for segment in segments) == 200
    assert segments[-1].last_entry == 200


def test_reading_changes_nothing() -> None:
    home = written(SMALL, write=write_wide)
    for path in home.shard_files(".index")[1:]:
        home.disk.remove(path)
    before = len(home.disk.operations)
    log = offline(home)
    log.topics()
    assert sum(map(len, log.scan())) == 200
    assert len(home.disk.operations) == before


# --- Beside a broker ---


def test_batch_is_served_beside_a_broker_only_when_something_vouches_for_its_sync() -> None:
    home = Home()

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"first"))
        await log.append(one("a", b"second"))
        await log.sync()
        assert payloads(offline(home, live=True).scan()) == [b"first", b"second"]
        # As if neither the mark behind the last batch nor the one beside the file had been written yet.
        (path,) = home.shard_files(".segment")
        content = home.content(path)
        home.overwrite(path, content.replace(b"RNM\x01", bytes(4)))
        home.lose_segment_marks()
        beside = offline(home, live=True)
        assert payloads(beside.scan()) == [b"first"]
        assert [item.path for item in beside.report.withheld] == [path]
        assert beside.report.torn == []
        assert beside.report.damage == []
        assert beside.topics()[0].partitions[0].next_offset == 2
        assert payloads(offline(home).scan()) == [b"first", b"second"]
        await log.close()

    run(scenario)


def test_segment_that_goes_on_after_a_restart_is_read_on_from_its_index() -> None:
    home = Home()

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"first"))
        log = await home.reopen(log)
        await log.append(one("a", b"second"))
        await log.sync()
        beside = offline(home, live=True)
        assert payloads(beside.scan()) == [b"first", b"second"]
        assert beside.report.damage == []
        await log.close()

    run(scenario)


def test_scan_sees_batches_that_came_before_each_of_many_looks() -> None:
    home = Home(SMALL)

    async def scenario() -> None:
        log = await home.open()
        for count in range(1, 60):
            await log.append(one("a", b"%d" % count))
            await log.sync()
            beside = offline(home, live=True)
            assert payloads(beside.scan()) == [b"%d" % number for number in range(1, count + 1)]
            assert beside.report.damage == []
        await log.close()

    run(scenario)


def test_directory_that_a_killed_process_left_is_read_to_its_last_whole_batch() -> None:
    home = Home()

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"first"))
        await log.append(one("a", b"torn" * 100))
        await log.sync()
        home.disk = home.disk.restart()
        (path,) = home.shard_files(".segment")
        file_end = home.content(path).rindex(b"torn")
        home.overwrite(path, home.content(path)[:file_end])
        home.lose_segment_marks()

    run(scenario)
    log = offline(home)
    assert payloads(log.scan()) == [b"first"]
    assert len(log.report.torn) == 1
    assert log.report.damage == []


# --- What is hidden ---


def test_purged_and_deleted_messages_are_not_served() -> None:
    async def write(log: DiskLog, _: Home) -> None:
        await log.append(batch(("purged", [b"1", b"2"]), ("deleted", [b"3"]), ("kept", [b"4"])))
        await log.append(one("again", b"5"))
        await log.metadata.purge_topic("purged")
        await log.metadata.delete_topic("deleted")
        await log.metadata.delete_topic("again")
        await log.append(batch(("purged", [b"6"]), ("again", [b"7"])))

    home = written(write=write)
    log = offline(home)
    found = messages_of(log.scan())
    assert [(message.topic, message.offset, message.payload) for message in found] == [
        ("kept", 1, b"4"),
        ("purged", 3, b"6"),
        ("again", 2, b"7"),
    ]
    assert [topic.name for topic in log.topics()] == ["again", "kept", "purged"]
    assert log.topics(("purged",))[0].partitions[0].first_offset == 3


def test_messages_past_their_age_are_served_while_their_segment_is_there() -> None:
    rule = TopicRule(match="*", journal="main", retain=Retain(age_ns=SECOND_NS))

    async def write(log: DiskLog, home: Home) -> None:
        await log.append(one("a", b"old"))
        home.clock.advance(10 * SECOND_NS)

    home = written(rule, write=write)
    assert payloads(offline(home).scan()) == [b"old"]


def test_without_metadata_and_catalogue_nothing_is_hidden() -> None:
    async def write(log: DiskLog, _: Home) -> None:
        await log.append(one("a", b"1"))
        await log.metadata.purge_topic("a")

    home = written(write=write)
    for path in home.metadata_files() + home.catalogue_files():
        home.disk.remove(path)
    log = offline(home)
    assert payloads(log.scan()) == [b"1"]
    assert not log.catalogued.is_present
    assert [topic.name for topic in log.topics()] == ["a"]


# --- Topics and cursors ---


def test_topics_have_their_offsets_counts_and_times() -> None:
    rule = TopicRule(match="*", journal="main", partitions=2)

    async def write(log: DiskLog, home: Home) -> None:
        await log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"], 1)))
        home.clock.advance(SECOND_NS)
        await log.append(batch(("a", [b"4"])))
        await log.metadata.ensure_topic("silent")
        await log.metadata.set_cursor("reader", [CursorPosition(topic="a", partition=0, offset=2)])

    home = written(rule, write=write)
    log = offline(home)
    start_ns = 1_700_000_000 * SECOND_NS
    found = {
        (topic.name, part.partition): (
            part.first_offset,
            part.next_offset,
            part.messages,
            part.last_time_ns,
        )
        for topic in log.topics()
        for part in topic.partitions
    }
    assert found == {
        ("a", 0): (1, 4, 3, start_ns + SECOND_NS),
        ("a", 1): (1, 1, 0, 0),
        ("b", 0): (1, 1, 0, 0),
        ("b", 1): (1, 2, 1, start_ns),
        ("silent", 0): (1, 1, 0, 0),
        ("silent", 1): (1, 1, 0, 0),
    }
    assert [cursor.name for cursor in log.cursors()] == ["reader"]
    assert log.catalogued.was_closed


# --- Files that go ---


async def write_sparse(log: DiskLog, home: Home) -> None:
    for number in range(40):
        await log.append(batch(("wanted", [b"%d" % number]), ("bulk", [bytes(200)])))
        home.clock.advance(SECOND_NS)


def test_plan_survives_the_rewriting_of_its_segments() -> None:
    home = Home(SMALL)

    async def scenario() -> None:
        log = await home.open()
        await write_sparse(log, home)
        log = await home.reopen(log)
        selection = Selection(topics=("wanted",))
        reader = offline(home, live=True)
        plan = list(reader.plan(selection))
        await log.metadata.purge_topic("bulk")
        await trim_log(log)
        assert any("-1.segment" in path for path in home.shard_files(".segment"))
        found = [message for stretch in plan for message in reader.read(stretch, selection)]
        assert payloads(found) == [b"%d" % number for number in range(40)]
        assert payloads(offline(home, live=True).scan()) == [b"%d" % n for n in range(40)]
        await log.close()

    run(scenario)


def test_segment_that_retention_removed_is_reported_and_passed() -> None:
    home = written(SMALL, write=write_sparse)
    log = offline(home)
    plan = list(log.plan())
    first = home.shard_files(".segment")[0]
    home.disk.remove(first)
    found = [message for stretch in plan for message in log.read(stretch)]
    assert log.report.gone == [first]
    assert log.report.damage == []
    assert 0 < sum(map(len, found)) < 80
    assert sum(map(len, offline(home).scan())) == sum(map(len, found))


class ReplacingDisk:
    """A disk on which a segment gets a higher generation between being listed and being opened."""

    def __init__(self, disk: FakeDisk, path: str) -> None:
        self._disk = disk
        self._path = path
        self.is_replaced = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    def open(self, path: str, access: object) -> object:
        if path == self._path and not self.is_replaced:
            self.is_replaced = True
            newer = path.replace("-0.segment", "-1.segment")
            self._disk.rename(path, newer)
            self._disk.remove(paths.index_path(path))
        return self._disk.open(path, access)  # type: ignore[arg-type]


def test_segment_that_was_replaced_just_now_is_read_in_its_new_generation() -> None:
    home = written(SMALL, write=write_sparse)
    expected = payloads(offline(home).scan())
    disk = ReplacingDisk(home.disk, home.shard_files(".segment")[0])
    log = OfflineLog(home.directory, disk=disk, find_holder=lambda _: None)  # type: ignore[arg-type]
    assert payloads(log.scan()) == expected
    assert disk.is_replaced


# --- Damage ---


def test_flipped_bit_is_never_served_and_hides_nothing_else() -> None:
    home = written(SMALL, write=write_sparse)
    path = home.shard_files(".segment")[0]
    stretch = next(iter(offline(home).plan()))
    block = stretch.blocks[3]
    home.disk.flip_bit(path, block.position + block.size // 2, 2)
    log = offline(home)
    found = [message.payload for message in messages_of(log.scan()) if message.topic == "wanted"]
    assert found == [b"%d" % number for number in range(40) if number != 3]
    assert [(bad.path, bad.position) for bad in log.report.damage] == [(path, block.position)]
    # A piece of a plan finds the same.
    reader = offline(home)
    assert b"3" not in payloads(reader.read(stretch))
    assert [bad.position for bad in reader.report.damage] == [block.position]


def test_damaged_last_batch_of_a_sealed_segment_is_damage_and_no_torn_tail() -> None:
    home = written(SMALL, write=write_sparse)
    path = home.shard_files(".segment")[-1]
    last = [stretch.blocks[-1] for stretch in offline(home).plan() if stretch.path == path][-1]
    home.disk.flip_bit(path, last.position + 30, 0)
    log = offline(home)
    assert b"39" not in payloads(log.scan())
    assert [(bad.path, bad.position) for bad in log.report.damage] == [(path, last.position)]
    assert log.report.torn == []


@pytest.mark.parametrize("position", [0, 20, 60, 100, -1])
def test_segment_with_a_damaged_index_is_scanned(position: int) -> None:
    home = written(SMALL, write=write_sparse)
    expected = payloads(offline(home).scan())
    for path in home.shard_files(".index"):
        home.disk.flip_bit(path, position % len(home.content(path)), 1)
    log = offline(home)
    assert payloads(log.scan()) == expected
    assert log.report.damage == []


# (What such an index keeps quiet about is not missed by a reader who asks for nothing else: that is for verify.)
@pytest.mark.parametrize(("topic", "count"), [("*", 20), ("b", 10)])
def test_index_of_another_segment_is_found_out(topic: str, count: int) -> None:
    async def write(log: DiskLog, _: Home) -> None:
        for name in ("a", "b"):
            for number in range(10):
                await log.append(one(name, b"%d" % number + bytes(500)))

    home = written(TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=7500)), write=write)
    first, second = home.shard_files(".index")
    sizes = {len(home.content(path)) for path in home.shard_files(".segment")}
    assert len(sizes) == 1  # so that the one's index seems to cover the other
    home.overwrite(first, home.content(second))
    log = offline(home)
    assert sum(map(len, log.scan(Selection(topics=(topic,))))) == count
    assert log.report.damage == []


def test_body_that_was_published_unreadable_is_reported_and_passed() -> None:
    garbage = b"not columns"
    head = envelopes.published(["a"], [1], body_bytes=len(garbage), body_crc=crc32c(garbage))

    async def write(log: DiskLog, _: Home) -> None:
        await log.append(one("a", b"before"))
        await log.append(Batch(head, garbage))
        await log.append(one("a", b"after"))

    home = written(write=write)
    log = offline(home)
    assert payloads(log.scan()) == [b"before", b"after"]
    (damage,) = log.report.damage
    assert "body" in damage.problem


def test_damaged_segment_header_is_reported_and_its_batches_are_served() -> None:
    home = written(SMALL, write=write_sparse)
    expected = payloads(offline(home).scan())
    path = home.shard_files(".segment")[0]
    home.disk.flip_bit(path, 9, 0)
    home.disk.remove(paths.index_path(path))
    log = offline(home)
    assert payloads(log.scan()) == expected
    assert [(bad.path, bad.position) for bad in log.report.damage] == [(path, 0)]


# --- Not a directory to read ---


def test_directory_without_a_format_file_is_no_data_directory() -> None:
    with pytest.raises(ClientFault, match="not a data directory"):
        OfflineLog("data", disk=FakeDisk(1))


def test_newer_format_is_refused() -> None:
    home = written(write=write_sparse)
    home.overwrite("data/runnel.json", b'{"format": 99}')
    with pytest.raises(FormatVersionError, match="format 99"):
        offline(home)
