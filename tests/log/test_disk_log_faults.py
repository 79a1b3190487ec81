"""What the disk store makes of a disk that fails: full, broken, damaged."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable

import msgspec
import pytest

from runnel.config import LogSettings, Retain, Rotate, TopicRule
from runnel.config.settings import DAY_NS
from runnel.errors import DiskFullError, OffsetGoneError, ReadOnlyError
from runnel.log.disk.disk_log import DiskLog
from runnel.log.disk.reader import ShardReader
from runnel.log.log import CursorPosition, Level, OffsetBounds, Position, ShardId
from runnel.log.segments.index import Index
from runnel.log.segments.segments import Segment
from runnel.platform.disk import FileAccess
from tests.fakes.disk import FakeDisk, Kind
from tests.log.home import Home, run
from tests.log.samples import (
    batch,
    last_message,
    numbered,
    one,
    read_all,
    read_offsets,
    read_payloads,
    trim_log,
)

MAIN = ShardId("main")
EVERY_BATCH = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1))
FOR_A_DAY = msgspec.structs.replace(EVERY_BATCH, retain=Retain(age_ns=DAY_NS))
PLAIN = LogSettings(allocate_bytes=0, disk_reserve_bytes=0)
# Looking anything up takes a while.
FORGETFUL = LogSettings(allocate_bytes=0, disk_reserve_bytes=0, index_cache_bytes_max=1)


def is_segment(path: str) -> bool:
    return path.endswith(".segment")


def is_metadata(path: str) -> bool:
    return "/metadata/" in path


async def payloads(log: DiskLog, topic: str) -> list[bytes]:
    return [message.payload for message in await read_all(log, topic)]


# --- Full ---


@pytest.mark.parametrize("allocate_bytes", [0, 4096])
def test_full_disk_refuses_publishing_and_takes_it_again_when_there_is_room(
    allocate_bytes: int,
) -> None:
    home = Home(
        log=LogSettings(allocate_bytes=allocate_bytes, disk_reserve_bytes=0),
        disk=FakeDisk(3, capacity_bytes=60_000),
    )

    async def scenario() -> None:
        log = await home.open()
        stored = 0
        while stored < 100:
            try:
                await log.append(one("a", b"x" * 5000))
            except DiskFullError:
                break
            stored += 1
        assert 9 <= stored < 12
        assert len(await read_all(log, "a")) == stored  # reading goes on
        assert not log.statistics().shards[0].is_read_only
        with pytest.raises(DiskFullError, match="no room") as raised:
            await log.append(one("a", b"x" * 5000))
        assert raised.value.retriable
        home.disk.capacity_bytes = 200_000
        done = await log.append(one("a", b"y" * 5000))
        assert done.base_offsets == [stored + 1]
        assert len(await read_all(log, "a")) == stored + 1
        log = await home.crash()
        assert len(await read_all(log, "a")) == stored + 1
        assert not log.recovered.damage
        await log.close()

    run(scenario)


def test_reserve_is_kept_free() -> None:
    home = Home(
        log=LogSettings(allocate_bytes=0, disk_reserve_bytes=50_000),
        disk=FakeDisk(3, capacity_bytes=60_000),
    )

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"x" * 5000))
        with pytest.raises(DiskFullError, match=r"log.disk_reserve_bytes = 50000"):
            await log.append(one("a", b"x" * 5000))
        assert home.disk.room_bytes > 50_000
        await log.metadata.set_cursor(
            "c", [CursorPosition(topic="a", offset=1)]
        )  # what needs little goes on
        await log.close()

    run(scenario)


def test_failed_write_takes_along_what_is_queued_behind_it_and_numbers_go_back() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        home.disk.fail(Kind.WRITE, errno.ENOSPC, path=is_segment)
        futures = [log.append(numbered("p", number)) for number in range(5)]
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert {type(result) for result in results} == {DiskFullError}
        assert log.statistics().shards[0].failed_batches == 5
        assert await log.bounds("a", 0) == OffsetBounds(1, 2)
        done = await log.append(numbered("p", 0))
        assert (done.base_offsets, done.entry, done.is_repeated) == ([2], 2, False)
        log = await home.kill()
        assert len(await read_all(log, "a")) == 2
        await log.close()

    run(scenario)


def test_topic_that_could_not_be_recorded_was_never_made_and_hinders_no_other() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        home.disk.fail(Kind.WRITE, errno.ENOSPC, path=is_metadata)
        with pytest.raises(DiskFullError, match="metadata"):
            await log.append(one("new", b"1"))
        assert log.metadata.topics.names() == ["a"]
        assert (await log.append(one("a", b"2"))).base_offsets == [2]
        assert (await log.append(one("new", b"2"))).base_offsets == [1]
        assert await payloads(log, "new") == [b"2"]
        await log.close()

    run(scenario)


def test_cursor_that_could_not_be_recorded_is_not_set() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=1)])
        home.disk.fail(Kind.WRITE, errno.ENOSPC, path=is_metadata)
        with pytest.raises(DiskFullError):
            await log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=2)])
        assert log.metadata.cursors.all()[0].positions[0].offset == 1
        log = await home.kill()
        assert log.metadata.cursors.all()[0].positions[0].offset == 1
        await log.close()

    run(scenario)


# --- A sync that fails ---


def test_sync_tells_of_a_batch_that_was_answered_too_early() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        home.disk.fail(Kind.WRITE, errno.ENOSPC, path=is_segment, times=1)
        await log.append(one("a", b"2"), Level.RECEIVED)
        # Clients are told too: no path of a file is in it.
        with pytest.raises(DiskFullError, match=rf"the batch: {os.strerror(errno.ENOSPC)}$"):
            await log.sync()
        await log.sync()  # told once
        assert (await log.append(one("a", b"3"))).base_offsets == [2]
        await log.close()

    run(scenario)


def test_failed_sync_makes_the_shard_read_only_until_it_has_been_reopened() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        home.disk.fail(Kind.SYNC, errno.EIO, path=is_segment)
        with pytest.raises(ReadOnlyError, match=r"main/0 takes no more batches until .* reopened"):
            await log.append(one("a", b"2"))
        assert log.statistics().shards[0].is_read_only
        with pytest.raises(ReadOnlyError):
            log.append(one("a", b"3"))
        assert await payloads(log, "a") == [b"1"]  # reading goes on
        assert await log.reopen(MAIN) == []
        assert not log.statistics().shards[0].is_read_only
        done = await log.append(one("a", b"4"))
        assert done.base_offsets == [2]
        assert await payloads(log, "a") == [b"1", b"4"]
        log = await home.crash()
        assert await payloads(log, "a") == [b"1", b"4"]
        await log.close()

    run(scenario)


def test_other_shards_go_on_while_one_is_read_only() -> None:
    home = Home(TopicRule(match="*", journal="{topic}"), log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        await log.append(one("b", b"1"))
        home.disk.fail(Kind.SYNC, errno.EIO, path=lambda path: "/journals/a/" in path)
        with pytest.raises(ReadOnlyError):
            await log.append(one("a", b"2"))
        assert (await log.append(one("b", b"2"))).base_offsets == [2]
        await log.close()

    run(scenario)


def test_read_error_is_an_error_and_not_an_empty_page() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        home.disk.fail(Kind.READ, errno.EIO, path=is_segment)
        with pytest.raises(OSError) as raised:
            await log.read("a", 0, 1)
        assert raised.value.errno == errno.EIO
        assert await payloads(log, "a") == [b"1"]
        await log.close()

    run(scenario)


# --- Damage ---


@pytest.mark.parametrize("is_reopened", [False, True])
def test_damaged_batch_is_passed_and_reported_with_file_and_position(is_reopened: bool) -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        for number in range(5):
            await log.append(batch(("a", [b"%d" % number, b"-"]), ("b", [b"other"])))
        [path] = home.shard_files(".segment")
        blocks = [len(found.block) for found in (await log.read("a", 0, 1)).found]
        position = 64 + sum(blocks[:2])
        home.disk.flip_bit(path, position + blocks[2] - 20, 3)
        if is_reopened:
            log = await home.kill()
            assert any(line.startswith(f"{path}:{position}:") for line in log.recovered.damage)

        page = await log.read("a", 0, 1)
        assert read_offsets(page) == [1, 2, 3, 4, 7, 8, 9, 10]
        assert page.next_offset == 11
        if not is_reopened:
            [gap] = page.gaps
            assert (gap.path, gap.position) == (path, position)
            assert (gap.first_offset, gap.next_offset) == (5, 7)
            shard_page = await log.read_shard(MAIN, Position(0, 1))
            assert [(gap.first_offset, gap.next_offset) for gap in shard_page.gaps] == [(3, 4)]
        assert any(line.startswith(f"{path}:{position}: ") for line in log.statistics().damage)
        assert len(await read_all(log, "b")) == 4
        assert (await log.append(one("a", b"new"))).base_offsets == [11]
        await log.close()

    run(scenario)


def test_numbers_of_a_last_batch_whose_body_rotted_are_known_and_not_given_again() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(numbered("a", 0))
        await log.append(numbered("a", 1))
        [path] = home.shard_files(".segment")
        last = (await log.read("a", 0, 2)).found[0].block
        end = 64 + 2 * len(last)
        home.disk.flip_bit(path, end - 20, 3)
        log = await home.kill()  # the writer rested: its mark vouches for the last batch
        [damage] = log.recovered.damage
        assert damage.startswith(f"{path}:{end - len(last)}:")
        assert (await log.append(numbered("a", 1))).is_repeated
        assert (await log.append(numbered("a", 2))).base_offsets == [3]
        assert read_offsets(await log.read("a", 0, 1)) == [1, 3]
        await log.close()

    run(scenario)


def test_torn_tail_is_cut_and_reported() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        [path] = home.shard_files(".segment")
        whole = home.content(path)
        log.append(one("a", b"2" * 5000), Level.RECEIVED)
        await log.sync()
        content = home.content(path)
        log = await _after_cut(home, path, content[: len(whole) + 500])
        [torn] = log.recovered.torn
        assert torn.startswith(f"{path}:")
        assert "torn tail cut" in torn
        assert not log.recovered.damage
        assert await payloads(log, "a") == [b"1"]
        assert (await log.append(one("a", b"3"))).base_offsets == [2]
        await log.close()

    async def _after_cut(home: Home, path: str, content: bytes) -> DiskLog:
        home.disk = home.disk.restart()
        home.overwrite(path, content)
        home.lose_segment_marks()
        return await home.open()

    run(scenario)


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "flipped", "garbage", "of another"])
def test_index_that_is_missing_or_wrong_is_made_anew(how: str) -> None:
    home = Home(EVERY_BATCH, log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        for number in range(6):
            await log.append(batch(("a", [b"%d" % number]), ("b", [b"x"] * (number + 1))))
        await log.close()
        indexes = home.shard_files(".index")
        contents = [home.content(path) for path in indexes]
        assert len(indexes) == 6
        for number, path in enumerate(indexes[1:], 1):
            if how == "missing":
                home.disk.remove(path)
            elif how == "empty":
                home.overwrite(path, b"")
            elif how == "cut":
                home.overwrite(path, contents[number][:-9])
            elif how == "flipped":
                home.disk.flip_bit(path, len(contents[number]) - 20, 0)
            elif how == "garbage":
                home.overwrite(path, b"?" * len(contents[number]))
            else:
                home.overwrite(path, contents[number - 1])

        log = await home.open()
        assert await log.bounds("a", 0) == OffsetBounds(1, 7)
        for offset in range(1, 7):
            assert read_payloads(await log.read("a", 0, offset))[0] == b"%d" % (offset - 1)
        assert len(await read_all(log, "b")) == 21
        assert not log.statistics().damage
        assert (await log.append(one("a", b"new"))).base_offsets == [7]
        await log.close()
        assert [home.content(path) for path in indexes] == contents

    run(scenario)


# --- The catalogue ---


def test_catalogue_is_replaced_by_a_snapshot_when_it_has_grown() -> None:
    home = Home(
        log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0, catalogue_log_bytes_max=2000)
    )

    async def scenario() -> None:
        log = await home.open()
        await log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"])))
        await log.metadata.delete_topic("b")
        for offset in range(1, 200):
            await log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=offset)])
        [path] = home.metadata_files()
        assert int(path.rpartition("/")[2]) > 3
        assert len(home.content(path)) < 5000
        log = await home.kill()
        assert log.metadata.topics.names() == ["a"]
        assert log.metadata.cursors.all()[0].positions[0].offset == 199
        assert (await log.append(one("a", b"x"))).base_offsets == [3]
        assert (await log.append(one("b", b"x"))).base_offsets == [2]
        await log.close()

    run(scenario)


@pytest.mark.parametrize("files", [Home.metadata_files, Home.catalogue_files])
def test_what_damaged_metadata_or_a_damaged_catalogue_lost_is_learned_from_the_segments(
    files: Callable[[Home], list[str]],
) -> None:
    home = Home(EVERY_BATCH, log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        for number in range(4):
            await log.append(batch(("a", [b"%d" % number]), ("b", [b"x", b"y"])))
        await log.close()
        [path] = files(home)
        for position in range(24, len(home.content(path)) // 2, 16):
            home.disk.flip_bit(path, position, 1)
        log = await home.open()
        assert any(line.startswith(f"{path}:") for line in log.recovered.damage)
        assert sorted(log.metadata.topics.names()) == ["a", "b"]
        assert await log.bounds("a", 0) == OffsetBounds(1, 5)
        assert await log.bounds("b", 0) == OffsetBounds(1, 9)
        done = await log.append(batch(("a", [b"new"]), ("b", [b"new"])))
        assert (done.base_offsets, done.entry) == ([5, 9], 5)
        log = await home.reopen(log)
        assert not log.recovered.damage  # told once
        assert await log.bounds("a", 0) == OffsetBounds(1, 6)
        await log.close()

    run(scenario)


@pytest.mark.parametrize(
    "files",
    [
        Home.metadata_files,
        Home.catalogue_files,
        lambda home: home.metadata_files() + home.catalogue_files(),
    ],
    ids=["metadata", "catalogue", "both"],
)
def test_lost_records_do_not_lead_to_offsets_given_twice(
    files: Callable[[Home], list[str]],
) -> None:
    home = Home(EVERY_BATCH, log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        await log.append(one("a", b"2"))
        await log.close()
        for path in files(home):
            home.disk.remove(path)
        log = await home.open()
        assert await log.bounds("a", 0) == OffsetBounds(1, 3)
        done = await log.append(one("a", b"3"))
        assert (done.base_offsets, done.entry) == ([3], 3)
        await log.close()

    run(scenario)


def test_catalogue_older_than_its_segments_does_not_lead_to_offsets_given_twice() -> None:
    """As in a copy that was made piece by piece, the catalogue first, while the broker went on."""
    home = Home(EVERY_BATCH, log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        files = home.metadata_files() + home.catalogue_files()
        early = {path: home.content(path) for path in files}
        await log.append(one("rare", b"1"))
        for number in range(4):
            await log.append(one("a", b"%d" % number))
        log = await home.reopen(log)
        await log.close()
        assert list(early) == home.metadata_files() + home.catalogue_files()
        for path, content in early.items():
            home.overwrite(path, content)
        log = await home.open()
        assert sorted(log.metadata.topics.names()) == ["a", "rare"]
        done = await log.append(batch(("rare", [b"2"]), ("a", [b"6"])))
        assert (done.base_offsets, done.entry) == ([2, 6], 7)
        assert await payloads(log, "rare") == [b"1", b"2"]
        log = await home.reopen(log)
        assert await payloads(log, "rare") == [b"1", b"2"]
        await log.close()

    run(scenario)


# --- Retention while others read ---


def test_reader_beside_retention_meets_messages_or_a_gap_but_no_error() -> None:
    home = Home(
        TopicRule(
            match="*",
            journal="main",
            rotate=Rotate(bytes_max=1),
            retain=Retain(bytes_max=4000),
        ),
        log=PLAIN,
    )

    async def scenario() -> None:
        log = await home.open()
        seen: list[int] = []
        entries: list[int] = []

        async def publish() -> None:
            for number in range(60):
                await log.append(one("a", b"%d" % number * 200))
                await trim_log(log)

        async def read() -> None:
            offset = 1
            while offset < 61:
                offset = max(offset, (await log.bounds("a", 0)).first_offset)
                try:
                    page = await log.read("a", 0, offset)
                except OffsetGoneError as gone:
                    offset = gone.first_offset
                    continue
                seen.extend(read_offsets(page))
                offset = page.next_offset
                await last_message(log, "a", 0)
                await asyncio.sleep(0)

        async def read_shard() -> None:
            position = Position(0, 1)
            while position.entry < 61:
                try:
                    page = await log.read_shard(MAIN, position)
                except OffsetGoneError as gone:
                    position = Position(0, gone.first_offset)
                    continue
                entries.extend(found.batch.envelope.entry for found in page.found)
                position = page.next_position
                await asyncio.sleep(0)

        await log.metadata.ensure_topic("a")
        await log.append(one("b", b"first"))
        async with asyncio.TaskGroup() as group:
            for work in (publish, read, read_shard):
                group.create_task(work())
        assert seen == sorted(set(seen))
        assert seen[-1] == 60
        assert entries == sorted(set(entries))
        await log.close()

    run(scenario)


def test_expired_segment_before_a_young_one_does_not_hide_it() -> None:
    """The clock may pass a message's age between two looks at it; what follows is served all the same."""
    home = Home(FOR_A_DAY, log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"old"))
        home.clock.advance(DAY_NS)
        await log.append(one("a", b"young"))
        await trim_log(log)  # both segments have their indexes on disk now, so that reading waits
        log = await home.reopen(log)
        reading = asyncio.ensure_future(log.read("a", 0, 1))
        for _ in range(200):
            await asyncio.sleep(0)
            if not home.clock.time_ns() % 2:
                home.clock.advance(1)
        try:
            page = await reading
        except OffsetGoneError as gone:
            page = await log.read("a", 0, gone.first_offset)
        assert read_payloads(page)[-1] == b"young"
        await log.close()

    run(scenario)


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("is_trimmed", [False, True])
def test_what_goes_while_it_is_read_is_never_passed_in_silence(
    turns: int, *, is_trimmed: bool
) -> None:
    home = Home(FOR_A_DAY, log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"old"))
        home.clock.advance(DAY_NS // 2)
        await log.append(one("a", b"young"))
        await trim_log(log)
        log = await home.reopen(log)  # nothing is known of its segments: reading waits
        reading = asyncio.ensure_future(log.read("a", 0, 1))
        for _ in range(turns):
            await asyncio.sleep(0)
        home.clock.advance(DAY_NS // 2 + 1)
        if is_trimmed:
            await trim_log(log)
        try:
            came = read_payloads(await reading)
        except OffsetGoneError as gone:
            came = [b"told"] * gone.gap
        assert came in ([b"old", b"young"], [b"told"])
        await log.close()

    run(scenario)


@pytest.mark.parametrize("reads", range(2, 7))
def test_page_ends_before_a_segment_that_goes_between_two_reads(
    reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=100_000)), log=PLAIN)
    left, read_bytes = reads, ShardReader.read_bytes

    async def read(reader: ShardReader, segment: Segment, position: int, size: int) -> memoryview:
        nonlocal left
        left -= 1
        if not left:
            raise FileNotFoundError(segment.path)
        return await read_bytes(reader, segment, position, size)

    monkeypatch.setattr(ShardReader, "read_bytes", read)

    async def scenario() -> None:
        log = await home.open()
        for number in range(8):  # several segments, each with several places to read
            await log.append(one("a", b"%d" % number))
            await log.append(one("b", b"x" * 40_000))
        page = await log.read("a", 0, 1)
        assert left <= 0
        assert read_offsets(page) == list(range(1, page.next_offset))
        await log.close()

    run(scenario)


def test_reader_of_the_last_message_does_not_mind_that_those_before_it_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = Home(EVERY_BATCH, log=PLAIN)
    index = ShardReader.index

    async def look(reader: ShardReader, segment: Segment) -> Index:
        """Retention is quicker, every time."""
        if segment is not reader._segments[-1]:
            reader._segments.remove(segment)
            raise FileNotFoundError(segment.path)
        return await index(reader, segment)

    async def scenario() -> None:
        log = await home.open()
        for number in range(1, 9):
            await log.append(one("a", b"%d" % number))
        await log.bounds("a", 0)
        monkeypatch.setattr(ShardReader, "index", look)
        assert read_payloads(await log.read("a", 0, 8)) == [b"8"]
        await log.close()

    run(scenario)


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_what_stays_of_a_segment_that_is_rewritten_is_not_taken_for_gone(turns: int) -> None:
    home = Home(EVERY_BATCH, log=FORGETFUL)

    async def scenario() -> None:
        log = await home.open()
        for _ in range(3):
            await log.append(one("c", b"before"))
        await log.append(batch(("a", [b"1"]), ("b", [b"much", b"more"])))
        await log.append(one("a", b"2"))
        await log.metadata.purge_topic("b")
        trimming = asyncio.ensure_future(trim_log(log))
        for _ in range(turns):
            await asyncio.sleep(0)
        while not trimming.done():
            looking = (log.bounds("a", 0), log.entry_at(MAIN, 0), log.read("a", 0, 1))
            bounds, entry, page = await asyncio.gather(*looking)
            assert (bounds, entry) == (OffsetBounds(1, 3), 1)
            assert read_payloads(page) == [b"1", b"2"]
        assert (await trimming).segments_rewritten == 1
        await log.close()

    run(scenario)


def test_missing_and_shortened_segments_are_told_of_at_every_opening() -> None:
    home = Home(EVERY_BATCH, log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        for number in range(3):
            await log.append(one("a", b"%d" % number))
        await log.close()
        first, _, last = home.shard_files(".segment")
        home.disk.remove(first)
        file = home.disk.open(last, FileAccess.WRITE)
        file.truncate(0)
        file.close()
        for _ in range(2):
            log = await home.open()
            assert not log.recovered.was_clean
            told = "; ".join(log.recovered.damage)
            assert f"{first}:0: segment is missing, its index is there" in told
            assert read_offsets(await log.read("a", 0, 2)) == [2]
            assert (await log.bounds("a", 0)).next_offset >= 4
            await log.close()

    run(scenario)


def test_journal_that_lost_its_name_is_found_all_the_same() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        await log.close()
        home.disk.remove("data/journals/main/name")
        log = await home.open()
        assert any("name:0:" in line for line in log.recovered.damage)
        assert (await log.append(one("a", b"2"))).base_offsets == [2]
        assert read_payloads(await log.read("a", 0, 1)) == [b"1", b"2"]
        await log.close()

    run(scenario)
