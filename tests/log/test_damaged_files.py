"""Small files of a log, cut at every byte and flipped at every bit: cut off, reported, or harmless."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest

from runnel.errors import FormatVersionError
from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import CursorPosition
from runnel.log.segments.segment import HEADER_BYTES
from runnel.platform.disk import FileAccess
from tests.fakes.disk import FakeDisk
from tests.log.images import (
    Image,
    batch,
    disk_of,
    flipped,
    image_of,
    open_log,
    payloads,
    reports,
    run,
    the_path,
    without_segment_marks,
)

STORED = {1: b"one", 2: b"two", 3: b"three"}


async def _store_three(log: DiskLog) -> None:
    for payload in STORED.values():
        await log.append(batch("a", payload))


@cache
def killed_image() -> Image:
    """Three batches of one message, and a process that was killed: no index, but a mark."""
    disk = disk_of({})
    run(_store_three, disk)
    return image_of(disk)


@cache
def closed_image() -> Image:
    async def store_and_close(log: DiskLog) -> None:
        await _store_three(log)
        await log.close()

    disk = disk_of({})
    run(store_and_close, disk)
    return image_of(disk)


def block_ends(content: bytes) -> list[int]:
    ends = [HEADER_BYTES]
    while True:
        header = block.read_header(content, ends[-1])
        if header.is_mark:
            return ends
        ends.append(ends[-1] + header.block_bytes)


# --- Cut ---


def test_segment_cut_at_every_byte_keeps_whole_batches_and_goes_on() -> None:
    """No synced mark knows of more: test_damage_after_kill.py has the segments whose mark does."""
    image = dict(killed_image())
    marks = the_path(image, "/synced")
    image[marks] = without_segment_marks(image[marks])
    path = the_path(image, ".segment")
    ends = block_ends(image[path])

    async def read_and_append(log: DiskLog) -> tuple[dict[int, bytes], list[str], int]:
        found = await payloads(log, "a")
        [offset] = (await log.append(batch("a", b"new"))).base_offsets
        return found, list(log.recovered.torn), offset

    for size in range(ends[1], len(image[path])):
        kept = sum(end <= size for end in ends[1:])
        found, torn, offset = run(read_and_append, disk_of(image | {path: image[path][:size]}))
        assert list(found.values()) == list(STORED.values())[:kept]
        assert offset == kept + 1
        is_torn = size not in ends and size < ends[-1]
        assert bool(torn) == (is_torn or size > ends[-1])  # behind the last one the mark is torn
        assert all(report.startswith(f"{path}:{ends[kept]}: torn") for report in torn)


def test_metadata_cut_at_every_byte_keeps_whole_records_and_goes_on() -> None:
    sizes: list[int] = []

    async def set_cursors(log: DiskLog) -> None:
        for offset in (1, 2, 3):
            await log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=offset)])
            sizes.append(len(image_of(disk)[path]))

    disk = disk_of(closed_image())
    path = the_path(closed_image(), "/metadata/")
    run(set_cursors, disk)
    image = image_of(disk)

    async def cursor_then_another(log: DiskLog) -> int | None:
        found = [
            cursor.positions[0].offset
            for cursor in log.metadata.cursors.all()
            if cursor.name == "c"
        ]
        await log.metadata.set_cursor("d", [])
        return found[0] if found else None

    for size in range(sizes[0] - 1, sizes[-1] + 1):
        kept = sum(end <= size for end in sizes) or None
        cut = disk_of(image | {path: image[path][:size]})
        assert run(cursor_then_another, cut) == kept
        assert run(cursor_then_another, cut.restart()) == kept


# --- Flipped ---


async def _read_what_is_left(log: DiskLog) -> tuple[dict[int, bytes], list[str]]:
    found = await payloads(log, "a")
    return found, list(reports(log))


def check_flip(image: Image, path: str, position: int, bit: int, lost: int | None) -> None:
    """Nothing wrong is served, only message `lost` may be missing, and then that is reported."""
    where = f"{path}:{position} bit {bit}"
    disk = disk_of(image | {path: flipped(image[path], position, bit)})
    found, told = run(_read_what_is_left, disk)
    missing = {offset for offset in STORED if found.get(offset) != STORED[offset]}
    assert found.items() <= STORED.items(), where
    assert missing <= {lost}, where
    if missing:
        assert any(report.startswith(path) for report in told), where


def message_at(content: bytes, position: int) -> int | None:
    """The offset of the message whose block lies there; blocks here have one each."""
    ends = block_ends(content)
    if not HEADER_BYTES <= position < ends[-1]:
        return None
    return sum(end <= position for end in ends)


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_an_open_segment_is_found_at_recovery(bit: int) -> None:
    image = killed_image()
    path = the_path(image, ".segment")
    for position in range(len(image[path])):
        check_flip(image, path, position, bit, message_at(image[path], position))


def test_every_flipped_bit_of_a_sealed_segment_is_found_when_it_is_read() -> None:
    image = closed_image()
    path = the_path(image, ".segment")

    async def flip_all(log: DiskLog) -> None:
        for position in range(HEADER_BYTES, len(image[path])):
            for bit in range(8):
                disk.flip_bit(path, position, bit)
                found = await payloads(log, "a")
                page = await log.read("a", 0, 1)
                disk.flip_bit(path, position, bit)
                lost = sum(end <= position for end in ends)
                assert found == {o: p for o, p in STORED.items() if o != lost}
                assert [gap.first_offset for gap in page.gaps] == [lost]
        assert len(log.statistics().damage) > 0

    disk = disk_of(image)
    ends = block_ends(image[path] + block.pack_mark(0))
    run(flip_all, disk)


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_an_index_is_harmless(bit: int) -> None:
    image = closed_image()
    path = the_path(image, ".index")
    for position in range(len(image[path])):
        check_flip(image, path, position, bit, None)


@pytest.mark.parametrize("part", ["/metadata/", "/catalogue/"])
@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_a_record_is_reported_or_harmless(bit: int, part: str) -> None:
    """Messages stay, and no offset is given twice, whatever the records have forgotten."""
    image = closed_image()
    path = the_path(image, part)

    async def read_and_append(log: DiskLog) -> tuple[dict[int, bytes], list[int]]:
        found = await payloads(log, "a")
        return found, list((await log.append(batch("a", b"new"))).base_offsets)

    for position in range(len(image[path])):
        disk = disk_of(image | {path: flipped(image[path], position, bit)})
        assert run(read_and_append, disk) == (STORED, [4]), f"{path}:{position} bit {bit}"


@pytest.mark.parametrize("part", ["/metadata/", "/catalogue/"])
@pytest.mark.parametrize("is_closed", [False, True])
def test_topic_made_again_is_there_wherever_a_record_is_damaged(is_closed: bool, part: str) -> None:
    """And what was deleted comes back only if its shard has lost the record of the new topic's beginning."""

    async def make_again(log: DiskLog) -> tuple[int, int]:
        await log.append(batch("a", b"old"))
        on_its_way = log.append(batch("a", b"late"))
        await log.metadata.delete_topic("a")
        await on_its_way
        begin = len(image_of(disk)[the_path(image_of(disk), "/catalogue/")])
        await log.append(batch("a", b"new"))
        end = len(image_of(disk)[the_path(image_of(disk), "/catalogue/")])
        await log.append(batch("b", b"another record"))
        if is_closed:
            await log.close()
        return begin, end

    disk = disk_of({})
    begin, end = run(make_again, disk)
    image = image_of(disk)
    path = the_path(image, part)
    for position in range(len(image[path])):
        damaged = disk_of(image | {path: flipped(image[path], position, position % 8)})
        found = run(lambda log: payloads(log, "a"), damaged)
        assert found[3] == b"new", f"{path}:{position}"
        if part == "/metadata/" or not begin <= position < end:
            assert found == {3: b"new"}, f"{path}:{position}"


def test_every_flipped_bit_of_a_journal_name_is_mended() -> None:
    image = closed_image()
    path = the_path(image, "/name")
    for position in range(len(image[path])):
        for bit in range(8):
            disk = disk_of(image | {path: flipped(image[path], position, bit)})
            found, told = run(_read_what_is_left, disk)
            assert found == STORED
            assert any(report.startswith(path) for report in told)


def refusal_of(disk: FakeDisk) -> FormatVersionError | None:
    try:
        asyncio.run(open_log(disk))
    except FormatVersionError as error:
        return error
    return None


def test_every_flipped_bit_of_the_format_is_refused_or_harmless() -> None:
    image = closed_image()
    path = the_path(image, "runnel.json")
    for position in range(len(image[path])):
        for bit in range(8):
            disk = disk_of(image | {path: flipped(image[path], position, bit)})
            refusal = refusal_of(disk)
            assert refusal is None or path in str(refusal)


# --- Other batches in the place of the stored ones ---


def test_block_of_the_right_entry_with_fewer_runs_is_reported_and_not_served() -> None:
    """Its checksums are right, and the index in memory describes the block that it has replaced."""
    two_runs = Batch.from_messages([Message("a", b"a"), Message("b", b"b")])
    end = block_ends(_segment_of(two_runs))[1]
    segments = (_segment_of(batch("a", b"." * size)) for size in range(200))
    with_one_run = next(segment for segment in segments if block_ends(segment)[1] == end)

    async def read_replaced(log: DiskLog) -> list[str]:
        await log.append(two_runs)
        path = the_path(image_of(disk), ".segment")
        disk.open(path, FileAccess.WRITE).write(0, [with_one_run], sync=True)
        page = await log.read("b", 0, 1)
        assert not page.found
        assert [(gap.first_offset, gap.next_offset) for gap in page.gaps] == [(1, 2)]
        return list(log.statistics().damage)

    disk = disk_of({})
    [reported] = run(read_replaced, disk)
    assert "not the one of entry 1 that its index describes" in reported


def _segment_of(only: Batch) -> bytes:
    async def store(log: DiskLog) -> None:
        await log.append(only)

    disk = disk_of({})
    run(store, disk)
    image = image_of(disk)
    return image[the_path(image, ".segment")]
