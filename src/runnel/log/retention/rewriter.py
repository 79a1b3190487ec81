"""Rewrites a segment without some of its messages. The others keep their offsets, entries and rows.

The new segment is one generation higher. The segment and its index are written and synced under unfinished names; the
index gets its name first, then the segment; then the caller removes the old files. A crash leaves the old segment, or
both (the higher generation counts, and was whole before it had its name), never less.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress

import msgspec

from runnel.formats import block
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.log.segments import paths, segment
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.index import GrowingIndex
from runnel.log.segments.scan import Scanned, ScanWindow
from runnel.log.segments.segment import HEADER_BYTES, SegmentHeader, StoredBlock
from runnel.log.segments.segments import SEARCH_BYTES, Segment, describe_by, write_whole
from runnel.platform.disk import Disk, File, FileAccess
from runnel.topics.names import TopicPartition

# Returns the offsets of a run that stay, as ranges [begin, end) in order. It gets the run's topic-partition, base
# offset, count, receive time and entry.
KeepOffsets = Callable[[TopicPartition, int, int, int, int], list[tuple[int, int]]]

_GATHER_BYTES = 4 * 2**20


class Rewritten(msgspec.Struct, frozen=True):
    """The new segment, and the scan of the old one."""

    segment: Segment | None  # None: nothing was left
    scanned: Scanned


def rewrite(
    disk: Disk,
    files: OpenFiles,
    folder: str,
    old: Segment,
    shard: int,
    epoch: int,
    keep: KeepOffsets,
    before_naming: Callable[[AbstractSet[int]], None] = lambda _: None,
) -> Rewritten:
    """Write the new segment. Blocks: for a worker. The caller removes the old files afterwards.

    `before_naming` gets the entries that were found in the old segment, before the new one counts.
    """
    new = Segment(
        paths.segment_path(folder, old.number, old.generation + 1),
        old.number,
        old.generation + 1,
        old.first_entry,
    )
    unfinished = new.path + paths.UNFINISHED_SUFFIX
    with suppress(FileNotFoundError):
        disk.remove(unfinished)
    growing = GrowingIndex(HEADER_BYTES)
    found_entries: set[int] = set()
    file = disk.open(unfinished, FileAccess.CREATE)
    try:
        header = SegmentHeader(shard, new.number, old.first_entry, new.generation, epoch, 0)
        file.write(0, [header.encode()], sync=False)
        with files.use(old.path) as source:
            scanned = _copy(source, old, file, growing, keep, found_entries)
        file.sync()
        before_naming(found_entries)
        new.end = growing.covered_bytes
        describe_by(new, growing)
        if growing.block_count():
            write_whole(disk, new.index_path, growing.encode(new.generation))
    finally:
        file.close()
    if not growing.block_count():
        disk.remove(unfinished)
        return Rewritten(None, scanned)
    try:
        disk.rename(unfinished, new.path)
        disk.sync_directory(folder)
    except OSError:
        # The old segment stays. When it is removed later, no file with its number may be left.
        for path in (unfinished, new.path, new.index_path):
            with suppress(OSError):
                disk.remove(path)
        raise
    return Rewritten(new, scanned)


def _copy(
    source: File,
    old: Segment,
    target: File,
    growing: GrowingIndex,
    keep: KeepOffsets,
    found_entries: set[int],
) -> Scanned:
    file_bytes = min(old.end, source.size())
    scanner = segment.scanner(
        old.path, ScanWindow(source.read, file_bytes), search_bytes=SEARCH_BYTES, durable=old.end
    )
    buffers: list[bytes | memoryview] = []
    written = end = HEADER_BYTES
    for unit in scanner:
        assert unit.content is not None
        found_entries.add(unit.content.envelope.entry)
        kept = _kept_part(unit.content, keep)
        if kept is None:
            continue
        head = kept.envelope
        # Each block vouches for all before it: the whole file is synced before readers see it.
        parts = block.pack(envelopes.encode(head), kept.body, durable_position=end)
        size = sum(map(len, parts))
        keys = list(zip(head.topics, head.column32(head.partitions), strict=True))
        growing.add(head, keys, end, size)
        buffers += parts
        end += size
        if end - written >= _GATHER_BYTES:
            target.write(written, buffers, sync=False)
            buffers = []
            written = end
    target.write(written, buffers, sync=False)
    return scanner.result()


def _kept_part(stored: StoredBlock, keep: KeepOffsets) -> Batch | None:
    """The rows of a batch that stay: the batch itself if all do, None if none does."""
    batch = Batch(stored.envelope, stored.body)
    rows: list[int] = []
    begin = 0
    for run in batch.runs():
        for first, end in keep(
            (run.topic, run.partition), run.base_offset, run.count, run.receive_time_ns, run.entry
        ):
            rows.extend(range(begin + first - run.base_offset, begin + end - run.base_offset))
        begin += run.count
    if len(rows) == begin:
        return batch
    return batch.take(rows) if rows else None
