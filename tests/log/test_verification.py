"""Verifying a data directory: what is damaged is found, with its place; what is not damaged is not called so."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from runnel.config import Rotate, TopicRule
from runnel.formats import block
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.formats.checksum import crc32c
from runnel.log.disk.disk_log import DiskLog
from runnel.log.reading import Verified, verify
from runnel.log.segments.segment import HEADER_BYTES
from tests.log.home import Home, run
from tests.log.samples import batch, one, trim_log
from tests.log.test_reading import offline, written

SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1500))


async def write(log: DiskLog, _: Home) -> None:
    for number in range(12):
        await log.append(batch(("a", [b"%d" % number] * 3), ("größe", [b"x"])))


def places(found: Verified) -> list[tuple[str, int]]:
    return [(bad.path, bad.position) for bad in found.damage]


def test_sound_directory_has_no_damage_and_is_counted() -> None:
    home = written(SMALL, write=write)
    progress: list[tuple[int, int]] = []
    found = verify(offline(home), lambda done, total: progress.append((done, total)))
    assert found.damage == []
    assert found.notes == []
    assert (found.blocks, found.messages) == (12, 48)
    segments = home.shard_files(".segment")
    assert found.segments == len(segments) > 2
    assert found.bytes == sum(len(home.content(path)) for path in segments)
    assert progress == sorted(progress)
    assert progress[-1] == (found.bytes, found.bytes)


def test_every_flipped_bit_of_a_segment_is_found_in_its_block() -> None:
    home = written(SMALL, write=write)
    path = home.shard_files(".segment")[0]
    blocks = [item for stretch in offline(home).plan() for item in stretch.blocks]
    starts = [0, *(item.position for item in blocks if item.position < len(home.content(path)))]
    for position in range(len(home.content(path))):
        home.disk.flip_bit(path, position, position % 8)
        found = verify(offline(home))
        home.disk.flip_bit(path, position, position % 8)
        expected = max(start for start in starts if start <= position)
        assert places(found) == [(path, expected)], position


def test_every_flipped_bit_of_an_index_is_found_where_it_is() -> None:
    home = written(SMALL, write=write)
    path = home.shard_files(".index")[1]
    for position in range(len(home.content(path))):
        home.disk.flip_bit(path, position, position % 8)
        found = verify(offline(home))
        home.disk.flip_bit(path, position, position % 8)
        assert places(found) == [(path, position)]


@pytest.mark.parametrize("files", [Home.metadata_files, Home.catalogue_files])
def test_every_flipped_bit_of_a_record_is_reported(files: Callable[[Home], list[str]]) -> None:
    home = written(SMALL, write=write)
    (path,) = files(home)
    content = home.content(path)
    start = 0
    while start < len(content):
        end = start + 24 + int.from_bytes(content[start + 4 : start + 8], "little")
        for position in range(start, end):
            home.disk.flip_bit(path, position, position % 8)
            found = verify(offline(home))
            home.disk.flip_bit(path, position, position % 8)
            (told,) = [*map(str, found.damage), *found.notes]
            assert told.startswith(f"{path}:{start}: ")
        start = end + -end % 8


def test_torn_tail_of_the_last_segment_is_a_note_cut_where_it_may() -> None:
    home = written(write=write)
    (path,) = home.shard_files(".segment")
    home.disk.remove(home.shard_files(".index")[0])
    content = home.content(path)
    last = [item for stretch in offline(home).plan() for item in stretch.blocks][-1]
    home.lose_segment_marks()
    for end in range(last.position + 1, len(content)):
        home.overwrite(path, content[:end])
        found = verify(offline(home))
        assert found.damage == []
        assert len(found.notes) == 1
        assert found.notes[0].startswith(f"{path}:{last.position}: torn tail")
        assert found.blocks == 11


def test_torn_segment_that_others_follow_is_damaged() -> None:
    home = written(SMALL, write=write)
    path = home.shard_files(".segment")[0]
    home.disk.remove(home.shard_files(".index")[0])
    home.overwrite(path, home.content(path)[:-8])
    found = verify(offline(home))
    assert [bad.path for bad in found.damage] == [path]


def test_last_segment_without_a_header_is_one_that_a_crash_kept_from_being_made() -> None:
    home = written(SMALL, write=write)
    path = home.shard_files(".segment")[-1]
    home.disk.remove(home.shard_files(".index")[-1])
    home.overwrite(path, home.content(path)[: HEADER_BYTES - 1])
    home.lose_segment_marks()
    found = verify(offline(home))
    assert found.damage == []
    assert "torn while it was made" in found.notes[0]


def test_missing_index_is_a_note() -> None:
    home = written(SMALL, write=write)
    path = home.shard_files(".index")[0]
    home.disk.remove(path)
    found = verify(offline(home))
    assert found.damage == []
    assert found.notes == [f"{path}: missing; it is made anew when needed"]


def test_index_with_right_checksums_that_describes_something_else_is_found() -> None:
    home = written(SMALL, write=write)
    first, second = home.shard_files(".index")[:2]
    home.overwrite(first, home.content(second))
    (damage,) = verify(offline(home)).damage
    assert damage.path == first
    assert "does not describe its segment" in damage.problem


def test_file_that_a_crash_left_is_a_note() -> None:
    home = written(SMALL, write=write)
    path = home.shard_files(".segment")[0]
    left = path.replace("-0.segment", "-1.segment.new")
    home.disk.rename(home.shard_files(".index")[0], left)
    notes = verify(offline(home)).notes
    assert f"{left}: not in use; the next start removes it" in notes


def test_journal_whose_name_was_damaged_is_found_and_read_all_the_same() -> None:
    home = written(SMALL, write=write)
    path = "data/journals/main/name"
    home.disk.flip_bit(path, 1, 7)
    found = verify(offline(home))
    assert places(found) == [(path, 0)]
    assert found.messages == 48
    assert [journal.name for journal in offline(home).journals()] == ["main"]


def test_order_that_contradicts_itself_is_found() -> None:
    home = written(write=write)
    (path,) = home.shard_files(".segment")
    home.disk.remove(home.shard_files(".index")[0])
    content = home.content(path)
    second = [item for stretch in offline(home).plan() for item in stretch.blocks][1]
    # The second block once more at the end: whole, and yet it cannot be.
    again = content[second.position : second.position + second.size]
    home.overwrite(path, content + again)
    (damage,) = verify(offline(home)).damage
    assert damage.position == len(content)
    assert damage.problem == (
        "entry 2 after entry 12; 'a'[0] goes back to offset 4 from 37; "
        "'größe'[0] goes back to offset 2 from 13"
    )


def test_header_that_is_not_that_of_its_name_is_found() -> None:
    home = written(SMALL, write=write)
    path = home.shard_files(".segment")[-1]
    home.disk.rename(path, path.replace("-0.segment", "-3.segment"))
    home.disk.remove(home.shard_files(".index")[-1])
    (damage,) = verify(offline(home)).damage
    assert damage.position == 24
    assert damage.problem == "header says generation 0, its name 3"


def test_rewritten_segments_are_sound() -> None:
    home = Home(SMALL)

    async def scenario() -> None:
        log = await home.open()
        await write(log, home)
        log = await home.reopen(log)
        await log.metadata.purge_topic("a")
        await trim_log(log)
        await log.close()

    run(scenario)
    assert any("-1.segment" in path for path in home.shard_files(".segment"))
    found = verify(offline(home))
    assert found.damage == []
    assert found.messages < 48


def test_directory_that_a_broker_has_open_is_sound_at_every_moment() -> None:
    home = Home(SMALL)

    async def scenario() -> None:
        log = await home.open()
        for number in range(20):
            await log.append(one("a", b"%d" % number))
            found = verify(offline(home, live=True))
            assert found.damage == []
            assert found.notes == []
            assert found.messages == number + 1
        await log.close()

    run(scenario)


def test_unreadable_body_with_right_checksums_is_found() -> None:
    home = written(write=write)
    (path,) = home.shard_files(".segment")
    content = home.content(path)
    last = [item for stretch in offline(home).plan() for item in stretch.blocks][-1]
    head = Batch.unpack(content, last.position).envelope
    garbage = bytes(head.body_bytes)
    broken = envelopes.encode(msgspec.structs.replace(head, body_crc=crc32c(garbage)))
    packed = block.pack(broken, garbage, durable_position=last.position)
    home.overwrite(path, content[: last.position] + b"".join(packed))
    home.disk.remove(home.shard_files(".index")[0])
    (damage,) = verify(offline(home)).damage
    assert damage.position == last.position
    assert damage.problem.startswith("checksums match, but the body cannot be read")
