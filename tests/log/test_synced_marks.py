"""Synced marks: whatever is lost of the end of a state journal or the catalogue is told, and nothing that was not."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from functools import cache

import pytest

from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import CursorPosition, ShardId
from runnel.log.reading import OfflineLog, verify
from runnel.log.segments.synced_marks import SLOT_BYTES, Mark, SyncedMarks, read_marks
from runnel.platform.disk import FileAccess
from tests.fakes.disk import FakeDisk, Kind
from tests.log.images import (
    DIRECTORY,
    Image,
    batch,
    disk_of,
    flipped,
    format_one,
    image_of,
    open_log,
    run,
    the_path,
)

ALL = ShardId("all", 0)
METADATA = "/metadata/"
CATALOGUE = "/catalogue/"
STATE = "/state/"
MARKS = "data/synced"


async def _store(log: DiskLog) -> None:
    """Several records in the metadata, in a catalogue, and in a state journal."""
    await log.append(batch("a", b"one"))
    for _ in range(3):
        await log.metadata.purge_topic("a")
    journal = log.shard(ALL).state
    known: list[bytes] = []
    journal.snapshot = lambda: list(known)
    for number in range(3):
        known.append(b"content %d" % number)
        await journal.add(known[-1])
        await log.metadata.set_cursor(f"c{number}", [CursorPosition(topic="a", offset=1)])


@cache
def image(is_closed: bool) -> Image:
    async def act(log: DiskLog) -> None:
        await _store(log)
        if is_closed:
            await log.close()

    disk = disk_of({})
    run(act, disk)
    return image_of(disk)


def _record_ends(content: bytes) -> list[int]:
    ends = [0]
    while ends[-1] < len(content):
        size = int.from_bytes(content[ends[-1] + 4 : ends[-1] + 8], "little")
        ends.append(ends[-1] + 24 + size + -size % 8)
    return ends


Damage = Callable[[bytes], bytes | None]

WAYS: dict[str, Damage] = {
    "all zeros": lambda content: bytes(len(content)),
    "emptied": lambda content: b"",
    "last 512 bytes zeroed": lambda content: content[:-512] + bytes(min(512, len(content))),
    "last record cut off": lambda content: content[: _record_ends(content)[-2]],
    "half of the records cut off": lambda content: content[
        : _record_ends(content)[len(_record_ends(content)) // 2]
    ],
    "last record torn": lambda content: content[:-8],
    "last record flipped": lambda content: flipped(content, len(content) - 12, 3),
    "missing": lambda content: None,
}


def damaged(whole: Image, path: str, damage: Damage) -> Image:
    content = damage(whole[path])
    rest = {other: data for other, data in whole.items() if other != path}
    return rest if content is None else rest | {path: content}


async def _told(log: DiskLog) -> list[str]:
    assert list(log.recovered.damage) == log.statistics().damage
    assert not (log.recovered.damage and log.recovered.was_clean)
    return list(log.recovered.damage)


def verified(whole: Image) -> list[str]:
    disk = disk_of(whole)
    return [
        str(bad) for bad in verify(OfflineLog(DIRECTORY, disk=disk, find_holder=_nobody)).damage
    ]


def _nobody(_: str) -> None:
    return None


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_whole_directory_has_nothing_to_tell(is_closed: bool) -> None:
    assert run(_told, disk_of(image(is_closed))) == []
    assert verified(image(is_closed)) == []


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("part", [METADATA, CATALOGUE, STATE])
@pytest.mark.parametrize("way", WAYS)
def test_lost_records_are_reported(way: str, part: str, is_closed: bool) -> None:
    whole = image(is_closed)
    path = the_path(whole, part)
    bad = damaged(whole, path, WAYS[way])
    assert [told for told in run(_told, disk_of(bad)) if told.startswith(path)]
    assert [told for told in verified(bad) if told.startswith(path)]


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("part", [METADATA, CATALOGUE, STATE])
def test_file_cut_at_every_length_is_reported(part: str, is_closed: bool) -> None:
    whole = image(is_closed)
    path = the_path(whole, part)
    for size in range(len(whole[path])):
        told = run(_told, disk_of(whole | {path: whole[path][:size]}))
        assert [one for one in told if one.startswith(path)], size


def test_missing_folder_of_a_journal_is_reported() -> None:
    rest = {path: data for path, data in image(True).items() if "/journals/" not in path}
    assert any("journals/all/0/state:0: missing" in told for told in run(_told, disk_of(rest)))
    assert any("journals/all/0/state:0: missing" in told for told in verified(rest))


@pytest.mark.parametrize("way", WAYS)
def test_lost_state_is_told_at_every_start_until_state_is_written_again(way: str) -> None:
    whole = image(True)
    path = the_path(whole, STATE)
    disk = disk_of(damaged(whole, path, WAYS[way]))
    for _ in range(3):
        assert [told for told in run(_told, disk) if told.startswith(path)]
        disk = disk.restart()

    async def write(log: DiskLog) -> None:
        journal = log.shard(ALL).state
        contents = list(journal.contents)
        journal.snapshot = lambda: contents
        contents.append(b"new")
        await journal.add(b"new")
        await log.close()

    run(write, disk)
    disk = disk.restart()

    async def found(log: DiskLog) -> bytes:
        assert await _told(log) == []
        return log.shard(ALL).state.contents[-1]

    assert run(found, disk) == b"new"


@pytest.mark.parametrize("part", [METADATA, CATALOGUE])
def test_records_that_were_lost_are_written_anew_and_told_once(part: str) -> None:
    whole = image(True)
    disk = disk_of(damaged(whole, the_path(whole, part), WAYS["missing"]))
    assert run(_told, disk) != []
    assert run(_told, disk.restart()) == []


# --- The marks themselves ---


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_damaged_marks_are_reported_and_cost_nothing(is_closed: bool) -> None:
    whole = image(is_closed)

    async def look(log: DiskLog) -> list[str]:
        assert [cursor.name for cursor in log.metadata.cursors.all()] == ["c0", "c1", "c2"]
        assert len(log.shard(ALL).state.contents) == 3
        return [*log.recovered.torn, *log.recovered.damage]

    for position in range(len(whole[MARKS])):
        disk = disk_of(whole | {MARKS: flipped(whole[MARKS], position, position % 8)})
        assert [told for told in run(look, disk) if told.startswith(MARKS)], position
        assert run(_told, disk.restart()) == [], position  # they were made anew
    for content in (b"", bytes(len(whole[MARKS]))):
        disk = disk_of(whole | {MARKS: content})
        assert [told for told in run(look, disk) if told.startswith(MARKS)]
    missing = {path: data for path, data in whole.items() if path != MARKS}
    assert [told for told in run(look, disk_of(missing)) if told.startswith(MARKS)]
    assert [told for told in verified(missing) if told.startswith(MARKS)]


def test_directory_of_an_earlier_version_has_no_marks_and_gets_them() -> None:
    """Its records do not mention marks, so their absence is no damage."""
    disk = disk_of({})

    run(_store, disk)
    earlier = format_one(image_of(disk), has_marks=False)
    del earlier[MARKS]
    disk = disk_of(earlier)
    assert run(_told, disk) == []
    path = the_path(image_of(disk), STATE)
    assert run(_told, disk_of(image_of(disk) | {path: b""})) != []


def test_mark_that_cannot_be_written_lags_behind_and_is_written_by_the_next() -> None:
    disk = disk_of(image(True))

    async def act() -> None:
        log = await open_log(disk)
        disk.fail(Kind.WRITE, errno.EIO, path=lambda path: path == MARKS)
        await log.metadata.set_cursor("d", [])
        disk.heal()
        await log.metadata.set_cursor("e", [])
        number, end = read_marks(disk, DIRECTORY).marks["metadata"]
        content = image_of(disk)[f"data/metadata/{number:020d}"]
        assert len(content) == end
        await log.close()

    asyncio.run(act())
    assert run(_told, disk.restart()) == []


def test_marks_only_rise() -> None:
    disk = FakeDisk(1)
    disk.make_directory("data")
    marks = SyncedMarks(disk, "data")
    assert not marks.open().is_present
    marks.note("data/x", 2, 100)
    for lower in ((2, 99), (1, 500), (2, 100)):
        marks.note("data/x", *lower)
    assert marks.get("data/x") == Mark(2, 100)
    marks.note("data/y", 1, 8)
    marks.note("data/x", 3, 1)
    marks.close()
    found = read_marks(disk.restart(), "data")
    assert found.marks == {"x": Mark(3, 1), "y": Mark(1, 8)}
    assert found.bytes == 3 * SLOT_BYTES


def test_slot_that_power_loss_took_is_used_again_and_nothing_is_reported() -> None:
    disk = FakeDisk(1)
    disk.make_directory("data")
    marks = SyncedMarks(disk, "data")
    marks.open()
    for name in ("x", "y", "z"):
        marks.note(f"data/{name}", 1, 8)
    disk.kill()
    disk = disk.restart()
    disk.open(MARKS, FileAccess.WRITE).write(2 * SLOT_BYTES, [bytes(SLOT_BYTES)], sync=True)
    marks = SyncedMarks(disk, "data")
    found = marks.open()
    assert found.marks == {"x": Mark(1, 8), "z": Mark(1, 8)}
    assert not found.damage
    assert not found.torn
    marks.note("data/y", 1, 16)
    assert read_marks(disk, "data").marks == {"x": Mark(1, 8), "y": Mark(1, 16), "z": Mark(1, 8)}
