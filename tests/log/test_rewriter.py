"""A segment without some of its messages."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.formats.batch import Batch
from runnel.formats.block import read_header
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from runnel.log.retention.rewriter import KeepOffsets, Rewritten, rewrite
from runnel.log.segments import paths
from runnel.log.segments.segments import SegmentFolder
from runnel.platform.disk import FileAccess
from runnel.topics.names import TopicPartition
from tests.fakes.disk import FakeDisk, Kind, PowerLoss
from tests.log.samples import batch, one
from tests.log.segment_samples import (
    FOLDER,
    Numbers,
    open_segments,
    sealed_segment,
    segment_bytes,
    write_segment,
)

Ranges = list[tuple[int, int]]


def everything(_key: TopicPartition, base: int, count: int, _time_ns: int, _entry: int) -> Ranges:
    return [(base, base + count)]


def nothing(*_: object) -> Ranges:
    return []


def only(topic: str) -> KeepOffsets:
    return lambda key, base, count, *_: [(base, base + count)] if key[0] == topic else []


def keep_chosen(chosen: set[tuple[str, int]]) -> KeepOffsets:
    def keep(key: TopicPartition, base: int, count: int, *_: int) -> Ranges:
        offsets = [offset for offset in range(base, base + count) if (key[0], offset) in chosen]
        return [(offset, offset + 1) for offset in offsets]

    return keep


def rewritten_by(disk: FakeDisk, batches: list[Batch], keep: KeepOffsets) -> Rewritten:
    old, files = sealed_segment(disk, batches)
    return rewrite(disk, files, FOLDER, old, 0, 9, keep)


def messages_on(disk: FakeDisk) -> list[tuple[str, int, bytes, int, int]]:
    """Topic, offset, payload, entry and row of everything that opening finds."""
    found = []
    _, files, opened = open_segments(disk)
    for item in opened:
        with files.use(item.segment.path) as file:
            data = file.read(0, item.segment.end)
        at = 64
        while at < len(data):
            stored = Batch.unpack(data, at)
            at += read_header(data, at).block_bytes
            rows = [(run.entry, run.row + row) for run in stored.runs() for row in range(run.count)]
            found += [
                (message.topic, message.offset, message.payload, *place)
                for message, place in zip(stored.messages(), rows, strict=True)
            ]
    return found


def sample() -> list[Batch]:
    numbers = Numbers()
    return [
        numbers.store(batch(("a", [b"1", b"2"]), ("b", [b"3"])), 10),
        numbers.store(one("b", b"4", b"5"), 20),
        numbers.store(one("a", b"6"), 30),
    ]


def test_what_stays_keeps_offset_entry_and_row() -> None:
    disk = FakeDisk(1)
    before_batches = sample()
    done = rewritten_by(disk, before_batches, only("b"))
    assert done.segment is not None
    assert done.segment.generation == 1
    assert done.segment.path == paths.segment_path(FOLDER, 1, 1)
    assert messages_on(disk) == [
        ("b", 1, b"3", 1, 2),
        ("b", 2, b"4", 2, 0),
        ("b", 3, b"5", 2, 1),
    ]


def test_batch_that_stays_whole_is_copied_as_it_is() -> None:
    disk = FakeDisk(1)
    done = rewritten_by(disk, sample(), everything)
    assert done.segment is not None
    [old] = [n for n in disk.list(FOLDER) if n.endswith("-0.segment")]
    assert disk.open(f"{FOLDER}/{old}", FileAccess.READ).read(64, 10**6) == disk.open(
        done.segment.path, FileAccess.READ
    ).read(64, 10**6)


def test_named_publishers_batch_that_was_cut_is_no_longer_its_batch() -> None:
    disk = FakeDisk(1)
    numbers = Numbers()
    sent = batch(("a", [b"1"]), ("b", [b"2"]), producer="p", term=1, number=0)
    done = rewritten_by(disk, [numbers.store(sent)], only("a"))
    assert done.segment is not None
    _, _, [opened] = open_segments(disk)
    assert not opened.producers


def test_compressed_batches_are_cut_too() -> None:
    disk = FakeDisk(1)
    messages = [Message("ab"[row % 2], b"%d" % row) for row in range(6)]
    stored = Numbers().store(Batch.from_messages(messages, codec=Codec.ZSTD))
    rewritten_by(disk, [stored], only("b"))
    assert [found[2] for found in messages_on(disk)] == [b"1", b"3", b"5"]


def test_nothing_left_leaves_no_new_file() -> None:
    disk = FakeDisk(1)
    done = rewritten_by(disk, sample(), nothing)
    assert done.segment is None
    assert disk.list(FOLDER) == [
        "00000000000000000001-0.index",
        "00000000000000000001-0.segment",
    ]


def test_damaged_batches_are_left_out_and_reported() -> None:
    disk = FakeDisk(1)
    old, files = sealed_segment(disk, sample())
    disk.flip_bit(old.path, 64 + 40, 2)
    done = rewrite(disk, files, FOLDER, old, 0, 9, everything)
    assert [damage.position for damage in done.scanned.damage] == [64]
    assert [found[2] for found in messages_on(disk)] == [b"4", b"5", b"6"]


def test_index_of_the_new_file_describes_it() -> None:
    disk = FakeDisk(1)
    done = rewritten_by(disk, sample(), only("b"))
    assert done.segment is not None
    folder, _, [opened] = open_segments(disk)
    assert opened.segment.growing is None  # its index was there and right
    assert (opened.segment.last_entry, opened.segment.last_time_ns) == (2, 20)
    index = folder.load_index(opened.segment)
    assert list(index.keys()) == [("b", 0)]
    assert index.next_offset(("b", 0)) == 4
    assert index.first_block_from_time(15) == 1


@given(st.data())
def test_exactly_what_was_chosen_stays(data: st.DataObject) -> None:
    disk = FakeDisk(1)
    numbers = Numbers()
    counts = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=4))
    batches = [
        numbers.store(
            batch(*(("abc"[run], [b"%d" % run] * count) for run, count in enumerate(runs)))
        )
        for runs in counts or [[1]]
    ]
    all_messages = [(m.topic, m.offset) for stored in batches for m in stored]
    chosen = set(data.draw(st.lists(st.sampled_from(all_messages), unique=True)))
    old, files = sealed_segment(disk, batches)
    before = messages_on(disk)
    done = rewrite(disk, files, FOLDER, old, 0, 9, keep_chosen(chosen))
    assert (done.segment is None) == (not chosen)
    if chosen:
        assert messages_on(disk) == [found for found in before if found[:2] in chosen]


def test_crash_at_any_operation_leaves_the_old_segment_or_the_new_one() -> None:
    outcomes = set()
    for seed in range(3):
        for operation in range(1, 100):
            disk = FakeDisk(seed)
            old, files = sealed_segment(disk, sample())
            before = len(disk.operations)
            disk.crash_at(before + operation)
            try:
                rewrite(disk, files, FOLDER, old, 0, 9, only("b"))
                SegmentFolder(disk, files, FOLDER).remove(old)
            except PowerLoss:
                pass
            else:
                assert operation > 5
                break
            disk = disk.restart()
            payloads = [found[2] for found in messages_on(disk)]
            assert payloads in ([b"1", b"2", b"3", b"4", b"5", b"6"], [b"3", b"4", b"5"])
            outcomes.add(len(payloads))
            generations = {name.rpartition(".")[0] for name in disk.list(FOLDER)}
            assert len(generations) == 1
    assert outcomes == {3, 6}


def test_failing_disk_leaves_the_old_segment_alone() -> None:
    disk = FakeDisk(1)
    old, files = sealed_segment(disk, sample())
    for kind in (Kind.CREATE, Kind.WRITE, Kind.SYNC, Kind.RENAME):
        disk.fail(kind, errno.EIO)
        with pytest.raises(OSError) as raised:
            rewrite(disk, files, FOLDER, old, 0, 9, only("b"))
        assert raised.value.errno == errno.EIO
        disk.heal()
    assert len(messages_on(disk)) == 6


@pytest.mark.parametrize("kind", [Kind.RENAME, Kind.SYNC_DIRECTORY])
def test_rewriting_that_fails_at_its_end_leaves_nothing_of_the_new_segment(kind: Kind) -> None:
    disk = FakeDisk(1)
    old, files = sealed_segment(disk, sample())
    before = disk.list(FOLDER)
    index_is_written = 1 if kind is Kind.RENAME else 0
    disk.fail(kind, errno.EIO, skip=index_is_written)
    with pytest.raises(OSError, match="Input/output error"):
        rewrite(disk, files, FOLDER, old, 0, 9, only("b"))
    disk.heal()
    assert disk.list(FOLDER) == before


def test_unfinished_files_are_removed_when_the_folder_is_opened() -> None:
    disk = FakeDisk(1)
    write_segment(disk, segment_bytes(sample()))
    for name in ("00000000000000000001-1.segment.new", "00000000000000000001-1.index", "stray"):
        disk.open(f"{FOLDER}/{name}", FileAccess.CREATE)
    open_segments(disk)
    assert disk.list(FOLDER) == ["00000000000000000001-0.segment"]
