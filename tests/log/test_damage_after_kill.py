"""Every reader gets a gap for missing messages, on every start, however the broker ended before."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from threading import Thread
from typing import TypeVar

import msgspec
import pytest

from runnel.config import TopicRule
from runnel.errors import OffsetGoneError
from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import Position, ShardId
from runnel.log.losses.shard_losses import Loss, LossesFile, ShardLosses, decode, without
from runnel.log.metadata.topic_table import Topic, TopicTable
from runnel.log.reading import OfflineLog, verify
from runnel.log.segments import paths
from runnel.log.segments.records import RecordFile
from tests.fakes.disk import FakeDisk
from tests.log.home import Home
from tests.log.images import (
    DIRECTORY,
    Image,
    batch,
    disk_of,
    flipped,
    format_one,
    image_of,
    open_log,
)
from tests.log.samples import trim_log
from tests.log.test_damaged_files import block_ends

T = TypeVar("T")
_Seen = tuple[set[int], set[int]]  # offsets that were served, and that were told as missing

COUNT = 20
FOLDER = f"{DIRECTORY}/journals/all/0"
SHARD = ShardId("all")
MARK = block.pack_mark(0)


def payload(number: int) -> bytes:
    return b"message %d" % number


@cache
def image(*, is_closed: bool, segment_bytes_max: int = 100_000) -> Image:
    """Messages 1 to 20 of topic a, and of topic b beside each fourth of them; each published by itself."""

    async def fill() -> None:
        log = await open_log(disk, segment_bytes_max=segment_bytes_max)
        for number in range(1, COUNT + 1):
            await log.append(batch("a", payload(number)))
            if number % 4 == 0:
                await log.append(batch("b", payload(number)))
        if is_closed:
            await log.close()

    disk = disk_of({})
    asyncio.run(fill())
    return image_of(disk)


def run(disk: FakeDisk, work: Callable[[DiskLog], Awaitable[T]], *, is_closed: bool = False) -> T:
    async def act() -> T:
        log = await open_log(disk)
        done = await work(log)
        if is_closed:
            await log.close()
        return done

    return asyncio.run(act())


async def fetched(log: DiskLog, topic: str = "a") -> tuple[set[int], set[int]]:
    """The offsets that a reader from 1 on gets, and those that its gaps name."""
    found: set[int] = set()
    told: set[int] = set()
    offset = 1
    while True:
        try:
            page = await log.read(topic, 0, offset)
        except OffsetGoneError as gone:
            told |= set(range(offset, gone.first_offset))
            offset = gone.first_offset
            continue
        for one in page.found:
            found |= {message.offset for message in one.wanted().messages()}
        for gap in page.gaps:
            told |= set(range(max(gap.first_offset, 1), min(gap.next_offset, COUNT + 1)))
        if page.next_offset == offset:
            return found, told
        offset = page.next_offset


async def scanned(log: DiskLog) -> tuple[set[int], set[int]]:
    """The same of topic a for a reader of the whole shard."""
    found: set[int] = set()
    told: set[int] = set()
    position = Position(0, log.shard(SHARD).entries().first_offset)
    while True:
        page = await log.read_shard(SHARD, position)
        for one in page.found:
            found |= {each.offset for each in one.wanted().messages() if each.topic == "a"}
        for gap in page.gaps:
            for lost in gap.lost:
                if lost.topic == "a":
                    told |= set(range(lost.first_offset, min(lost.next_offset, COUNT + 1)))
        if page.next_position.entry == position.entry:
            return found, told
        position = page.next_position


def check_told(disk: FakeDisk, lost: set[int]) -> None:
    """Three starts, the second and third after a clean end: everything that is not served is told, and nothing else."""
    everything = set(range(1, COUNT + 1))
    for start in range(3):
        offline = OfflineLog(DIRECTORY, disk=disk, find_holder=lambda _: None)
        exported = {
            message.offset
            for each in offline.scan()
            for message in each.messages()
            if message.topic == "a"
        }
        assert exported == everything - lost, f"start {start}"
        assert offline.report.damage_count, f"start {start}: an export says nothing"
        checked = verify(OfflineLog(DIRECTORY, disk=disk, find_holder=lambda _: None))
        assert checked.damage_count, f"start {start}: verify says nothing"

        async def look(log: DiskLog) -> tuple[int, int, _Seen, _Seen]:
            at_start = len(log.recovered.damage), len(log.statistics().damage)
            return *at_start, await fetched(log), await scanned(log)

        recovered, gauge, by_offset, by_entry = run(disk, look, is_closed=True)
        assert recovered, f"start {start}: no diagnostic"
        assert gauge, f"start {start}: the gauge is 0"
        assert by_offset == (everything - lost, lost), f"start {start}"
        assert by_entry == (everything - lost, lost), f"start {start}"
        disk = disk.restart()


def the_segments(files: Image) -> list[str]:
    return sorted(path for path in files if path.endswith(".segment"))


def block_of(files: Image, path: str, text: bytes) -> tuple[int, int]:
    """Where the block with a payload begins, and where the payload is."""
    content = files[path]
    at = content.index(text + b"\0") if text + b"\0" in content else content.index(text)
    begin = content.rindex(b"RNB\x01", 0, at)
    return begin, at


@pytest.mark.parametrize("is_closed", [True, False])
def test_flipped_bit_in_a_body_is_a_gap_for_every_reader_on_every_start(is_closed: bool) -> None:
    files = image(is_closed=is_closed)
    [path] = the_segments(files)
    _, at = block_of(files, path, payload(8))
    disk = disk_of(files | {path: flipped(files[path], at, 3)})
    if is_closed:  # it is found when it is read; from then on every start tells
        run(disk, fetched, is_closed=True)
        disk = disk.restart()
    check_told(disk, {8})


@pytest.mark.parametrize("number", [1, 8, 9, 19])
def test_flipped_bit_in_an_envelope_is_a_gap_by_what_lies_around_it(number: int) -> None:
    files = image(is_closed=False)
    [path] = the_segments(files)
    begin, _ = block_of(files, path, payload(number))
    disk = disk_of(files | {path: flipped(files[path], begin + 30, 3)})
    check_told(disk, {number})


def test_partition_without_anything_behind_a_damaged_envelope_is_told_that_it_may_miss_some() -> (
    None
):
    files = image(is_closed=False)
    [path] = the_segments(files)
    begin, _ = block_of(files, path, payload(19))
    disk = disk_of(files | {path: flipped(files[path], begin + 30, 3)})

    async def fetch_b(log: DiskLog) -> list[int]:
        page = await log.read("b", 0, 1)
        return [gap.first_offset for gap in page.gaps]

    assert run(disk, fetch_b) == []  # b has a message behind it


def test_what_was_put_right_is_not_told_any_more() -> None:
    files = image(is_closed=False)
    [path] = the_segments(files)
    _, at = block_of(files, path, payload(8))
    disk = disk_of(files | {path: flipped(files[path], at, 3)})
    run(disk, fetched, is_closed=True)
    disk = disk.restart()
    disk.flip_bit(path, at, 3)

    async def look(log: DiskLog) -> tuple[object, ...]:
        return list(log.recovered.damage), await fetched(log)

    assert run(disk, look) == ([], (set(range(1, COUNT + 1)), set()))


@pytest.mark.parametrize("is_closed", [True, False])
def test_sealed_segment_that_was_cut_is_missing_messages(is_closed: bool) -> None:
    files = image(is_closed=is_closed, segment_bytes_max=1500)
    second = the_segments(files)[1]
    content = files[second]
    ends = block_ends(content + MARK)
    stored = ends_of_messages(content, ends)
    for size in (0, 70, ends[1], ends[1] + 100, ends[2] + 3, max(stored.values()) - 1):
        lost = {number for number, end in stored.items() if end > size}
        assert lost
        check_told(disk_of(files | {second: content[:size]}), lost)


def ends_of_messages(content: bytes, ends: list[int]) -> dict[int, int]:
    """Of each message of topic a in a segment, where its block ends."""
    return {
        message.offset: end
        for begin, end in itertools.pairwise(ends)
        for message in Batch.unpack(content[begin:end]).messages()
        if message.topic == "a"
    }


def test_last_segment_that_was_cut_after_a_clean_end_is_missing_messages() -> None:
    files = image(is_closed=True)
    [path] = the_segments(files)
    begin, _ = block_of(files, path, payload(15))
    check_told(disk_of(files | {path: files[path][: begin + 50]}), set(range(15, COUNT + 1)))


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_segment_that_is_gone_is_missed(which: int, has_index: bool) -> None:
    files = image(is_closed=True, segment_bytes_max=1500)
    paths_ = the_segments(files)
    gone = paths_[which]
    left = dict(files)
    content = left.pop(gone)
    if not has_index:
        del left[paths.index_path(gone)]
    lost = set(ends_of_messages(content, block_ends(content + MARK)))
    assert lost
    check_told(disk_of(left), lost)


def test_offsets_of_a_lost_last_segment_are_not_given_again() -> None:
    files = image(is_closed=True, segment_bytes_max=1500)
    gone = the_segments(files)[-1]
    left = {path: content for path, content in files.items() if not path.startswith(gone[:-8])}

    async def append(log: DiskLog) -> int:
        return (await log.append(batch("a", b"new"))).base_offsets[0]

    disk = disk_of(left)
    assert run(disk, append, is_closed=True) == COUNT + 1
    check_told_after = run(disk.restart(), fetched)
    assert check_told_after[0] | check_told_after[1] == set(range(1, COUNT + 2))


def test_losses_outlast_rewriting_and_go_with_retention() -> None:
    files = image(is_closed=False, segment_bytes_max=1500)
    first = the_segments(files)[0]
    _, at = block_of(files, first, payload(2))
    disk = disk_of(files | {first: flipped(files[first], at, 3)})

    async def rewrite(log: DiskLog) -> tuple[set[int], set[int]]:
        def all_but_one(
            key: tuple[str, int], base: int, count: int, _time_ns: int, _entry: int
        ) -> list[tuple[int, int]]:
            return [] if key == ("a", 0) and base == 1 else [(base, base + count)]

        await log._owned.shards[SHARD].rewrite(all_but_one)
        return await fetched(log)

    expected = (set(range(3, COUNT + 1)), {1, 2})
    assert run(disk, rewrite, is_closed=True) == expected
    disk = disk.restart()
    assert run(disk, fetched, is_closed=True) == expected

    async def forget(log: DiskLog) -> object:
        await log.metadata.purge_topic("a")
        await log.metadata.purge_topic("b")
        await trim_log(log)
        return log._owned.shards[SHARD].losses.remembered.losses

    assert run(disk.restart(), forget, is_closed=True) == ()


def test_what_retention_removed_is_no_loss() -> None:
    disk = disk_of(image(is_closed=True, segment_bytes_max=1500))

    async def purge(log: DiskLog) -> int:
        await log.metadata.purge_topic("a")
        return (await trim_log(log)).segments_removed

    run(disk, purge, is_closed=True)
    disk = disk.restart()
    assert run(disk, purge) >= 0

    async def damage(log: DiskLog) -> list[str]:
        return list(log.recovered.damage)

    assert run(disk.restart(), damage) == []


def test_directory_of_an_older_runnel_is_not_accused_of_what_its_retention_removed() -> None:
    """It has no account of what was removed: what is missing now is settled, and what goes missing later is told."""
    files = image(is_closed=True, segment_bytes_max=1500)
    segments = the_segments(files)
    older = {
        path: content
        for path, content in files.items()
        if not path.startswith((segments[0][:-8], segments[2][:-8]))
    }
    older[f"{DIRECTORY}/{paths.FORMAT_FILE}"] = b'{"format":1}'
    disk = disk_of(older)

    async def damage(log: DiskLog) -> list[str]:
        return list(log.recovered.damage)

    assert run(disk, damage, is_closed=True) == []
    disk = disk.restart()
    assert run(disk, damage, is_closed=True) == []
    left = image_of(disk)
    for path in (segments[-2], paths.index_path(segments[-2])):
        del left[path]
    assert any("missing" in text for text in run(disk_of(left), damage))


def test_older_runnel_that_was_here_in_between_is_not_accused_of_what_it_removed() -> None:
    files = format_one(image(is_closed=True, segment_bytes_max=1500))
    removed = the_segments(files)[1]
    disk = disk_of({path: files[path] for path in files if not path.startswith(removed[:-8])})

    async def damage(log: DiskLog) -> list[str]:
        return list(log.recovered.damage)

    assert any("missing" in text for text in run(disk_of(image_of(disk)), damage))
    [catalogue] = [path for path in files if path.startswith(f"{DIRECTORY}/catalogue/")]
    file, _, _ = RecordFile.recover(disk, catalogue)
    file.append(msgspec.msgpack.encode([["opened", 9, 0], ["closed", 9]]))
    file.close()
    assert run(disk, damage, is_closed=True) == []
    assert run(disk.restart(), damage) == []


def test_damaged_file_of_losses_is_reported() -> None:
    files = image(is_closed=False)
    [path] = the_segments(files)
    begin, _ = block_of(files, path, payload(8))
    disk = disk_of(files | {path: flipped(files[path], begin + 30, 3)})
    run(disk, fetched, is_closed=True)
    left = image_of(disk)
    losses = f"{FOLDER}/{paths.LOSSES_FILE}"
    remembered = decode(left[losses])
    assert [run.first_offset for loss in remembered.losses for run in loss.runs] == [8]

    async def damage(log: DiskLog) -> list[str]:
        return list(log.recovered.damage)

    for position in range(len(left[losses])):
        damaged = disk_of(left | {losses: flipped(left[losses], position, position % 8)})
        assert any(losses in text for text in run(damaged, damage)), position
    assert any(losses in text for text in run(disk_of(left | {losses: b""}), damage))


def test_numbers_of_lost_segments_are_remembered_with_those_that_were_removed() -> None:
    loss = Loss(7, "x", 0, 0, "gone", 1, 2, 0)
    assert LossesFile(((1, 3), (5, 6)), 0, (loss,)).last_number == 7
    assert [LossesFile(((1, 3), (5, 6))).was_removed(n) for n in range(7)] == [
        False, True, True, False, False, True, False
    ]  # fmt: skip


def test_without_cuts_parts_out_of_a_range() -> None:
    assert list(without((1, 10), [(0, 2), (4, 6), (6, 7), (9, 20)])) == [(2, 4), (7, 9)]
    assert list(without((1, 10), [])) == [(1, 10)]
    assert list(without((1, 10), [(1, 10)])) == []


def test_losses_that_two_threads_add_are_both_remembered() -> None:
    losses = ShardLosses(disk_of({}), FOLDER, lambda: None)
    ours, theirs = (
        Loss(number, f"{number}", 0, 0, "gone", number, number + 1, 0) for number in (1, 2)
    )
    thread = Thread(target=losses.add, args=([theirs],))

    def slowly() -> Iterator[Loss]:
        thread.start()
        thread.join(0.2)  # long enough for it to be done, unless it waits for us
        yield ours

    losses.add(slowly())
    thread.join()
    assert set(losses.remembered.losses) == {ours, theirs}


def test_topics_are_walked_as_often_for_many_shards_as_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walks = 0
    walk = TopicTable.__iter__

    def counted(table: TopicTable) -> Iterator[Topic]:
        nonlocal walks
        walks += 1
        return walk(table)

    monkeypatch.setattr(TopicTable, "__iter__", counted)

    async def walks_of_start(topics: int) -> int:
        home = Home(TopicRule(match="*", journal="{topic}"))
        log = await home.open()
        for number in range(topics):
            await log.append(batch(f"topic{number}", b""))
        log = await home.kill()
        before = walks
        log = await home.reopen(log)
        await log.close()
        return walks - before

    assert asyncio.run(walks_of_start(20)) == asyncio.run(walks_of_start(1))


# --- The last segment of a killed broker ---


@pytest.mark.parametrize(
    "way", ["cut", "cut before", "cut at a block", "zeroed", "emptied", "removed"]
)
@pytest.mark.parametrize("segment_bytes_max", [100_000, 1500])
def test_end_of_the_last_segment_is_missed_and_its_offsets_are_not_given_again(
    segment_bytes_max: int, way: str
) -> None:
    files = dict(image(is_closed=False, segment_bytes_max=segment_bytes_max))
    last = the_segments(files)[-1]
    content = files[last]
    ends = block_ends(content)
    stored = ends_of_messages(content, ends)
    if way == "removed":
        del files[last]
        size = 0
    else:
        # Whole blocks are gone behind the one before: its envelope, which is left, tells nothing of them.
        cuts = {"cut": ends[-2] - 10, "cut before": ends[-3] - 10, "cut at a block": ends[-3]}
        size = cuts.get(way, 0)
        files[last] = bytes(len(content)) if way == "zeroed" else content[:size]
    lost = {number for number, end in stored.items() if end > size}
    assert lost

    async def append(log: DiskLog) -> int:
        return (await log.append(batch("a", b"new"))).base_offsets[0]

    check_told(disk_of(files), lost)
    assert run(disk_of(files), append) > COUNT
    disk = disk_of(files)
    run(disk, append, is_closed=True)
    _, told = run(disk.restart(), fetched)
    assert told >= lost


def test_running_out_of_messages_at_a_mark_is_no_loss() -> None:
    """Kills and clean ends alike leave nothing to tell, however many segments there are."""
    for is_closed in (True, False):
        for size in (100_000, 1500):
            disk = disk_of(image(is_closed=is_closed, segment_bytes_max=size))

            async def damage(log: DiskLog) -> list[str]:
                return list(log.recovered.damage)

            offline = OfflineLog(DIRECTORY, disk=disk, find_holder=lambda _: None)
            assert sum(len(each.messages()) for each in offline.scan()) == COUNT + COUNT // 4
            assert not offline.report.damage_count
            assert not verify(offline).damage_count
            assert run(disk, damage) == []
