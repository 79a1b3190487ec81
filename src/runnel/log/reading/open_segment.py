"""Opens a segment for reading, with an index of the part that readers may see.

A sealed segment has its index beside it. Any other segment is scanned, from where an older index of it ends; the
resulting index stays in memory. Readers may see:

- of the last segment of a shard, while a broker has the directory open: the bytes before the highest position that a
  whole block, or the mark behind the last one, knows to be synced;
- of every other segment: all that is whole, which is what recovery would keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from runnel.errors import CorruptionError, MalformedError
from runnel.log.reading.report import Report, Withheld
from runnel.log.segments import index as indexes
from runnel.log.segments import paths, segment
from runnel.log.segments.index import GrowingIndex, Index, SealedIndex
from runnel.log.segments.scan import Damage, Scanned, ScanUnit, ScanWindow
from runnel.log.segments.segment import HEADER_BYTES, StoredBlock
from runnel.log.segments.segments import SEARCH_BYTES
from runnel.platform.disk import Disk, File, FileAccess

# A scan beside a writer may see half of a write as damage; the next one sees it whole.
_SCANS_MAX: Final = 4


class SegmentName(msgspec.Struct, frozen=True, order=True):
    """The identity of a segment: enough to open it."""

    journal: str
    shard: int
    number: int
    generation: int
    path: str

    @property
    def index_path(self) -> str:
        return paths.index_path(self.path)


class SegmentInfo(msgspec.Struct, frozen=True):
    """A segment's sizes, entries and times, by its headers or else by a scan. Times are 0 without entries."""

    name: SegmentName
    file_bytes: int  # preallocated room included
    used_bytes: int
    index_bytes: int
    is_sealed: bool
    entries: int
    first_entry: int
    last_entry: int
    first_time_ns: int
    last_time_ns: int
    topic_partitions: int
    runs: int


class OpenSegment(msgspec.Struct, frozen=True):
    """A segment that is open for reading. Readers may see it up to `end`."""

    name: SegmentName
    file: File
    index: Index
    end: int
    is_sealed: bool


@contextmanager
def opened(disk: Disk, path: str) -> Iterator[File]:
    file = disk.open(path, FileAccess.READ)
    try:
        yield file
    finally:
        file.close()


def short_segment(path: str, file_bytes: int, covered_bytes: int) -> Damage:
    """The damage of a segment that lost its end: an index is written only after what it covers was synced."""
    problem = f"file has {file_bytes} bytes, its index says {covered_bytes}"
    return Damage(path, file_bytes, covered_bytes - file_bytes, problem)


def sealed_info(disk: Disk, name: SegmentName) -> SegmentInfo | None:
    """A segment by 88 bytes of its index; None unless that covers all of it. FileNotFoundError if it is gone."""
    with opened(disk, name.path) as file:
        try:
            with opened(disk, name.index_path) as index_file:
                header = indexes.decode_header(index_file.read(0, indexes.HEADER_BYTES))
                index_bytes = index_file.size()
        except (FileNotFoundError, MalformedError):
            return None
        file_bytes = file.size()
    if header.generation != name.generation or header.covered_bytes != file_bytes:
        return None
    return SegmentInfo(
        name,
        file_bytes,
        file_bytes,
        index_bytes,
        is_sealed=True,
        entries=header.blocks,
        first_entry=header.first_entry,
        last_entry=header.last_entry,
        first_time_ns=header.first_time_ns,
        last_time_ns=header.last_time_ns,
        topic_partitions=header.keys,
        runs=header.runs,
    )


def info_of(open_segment: OpenSegment) -> SegmentInfo:
    """A segment that had to be scanned."""
    index = open_segment.index
    blocks = index.block_count()
    first = index.block_place(0) if blocks else (0, 0, 0)
    last = index.block_place(blocks - 1) if blocks else (0, 0, 0)
    table = index.run_table(lambda _: True)
    return SegmentInfo(
        open_segment.name,
        open_segment.file.size(),
        open_segment.end,
        0,
        is_sealed=open_segment.is_sealed,
        entries=blocks,
        first_entry=first[0],
        last_entry=last[0],
        first_time_ns=first[2],
        last_time_ns=last[2],
        topic_partitions=len(table.keys),
        runs=len(table.runs),
    )


@contextmanager
def open_segment(
    disk: Disk,
    name: SegmentName,
    report: Report,
    *,
    is_last: bool,
    is_live: Callable[[], bool],
    trust_index: bool = True,
    synced: int = 0,
) -> Iterator[OpenSegment]:
    """Open a segment, which then stays readable even if it is removed. FileNotFoundError if it is gone.

    Without `trust_index` the segment is scanned whatever its index says. `synced`: the number of its bytes that were
    synced before this call.
    """
    with opened(disk, name.path) as file:
        sealed = load_index(disk, name)
        # Read after the index: a segment only grows, until sealing cuts it to what the index covers.
        file_bytes = file.size()
        is_short = sealed is not None and sealed.covered_bytes > file_bytes
        if sealed is not None and is_short:
            report.add_damage(short_segment(name.path, file_bytes, sealed.covered_bytes))
            sealed = None
        is_whole = sealed is not None and max(file_bytes, synced) == sealed.covered_bytes
        if trust_index and sealed is not None and is_whole:
            yield OpenSegment(name, file, sealed, file_bytes, is_sealed=True)
            return
        _check_header(file, name, report, is_last=is_last)
        growing, scanned = _scan_beside_writer(
            file,
            name,
            sealed if trust_index else None,
            durable=max(synced, HEADER_BYTES if sealed is None else sealed.covered_bytes),
            is_last=is_last,
            is_live=is_live,
        )
        report.add_damage(*scanned.damage)
        if scanned.torn is not None and not is_short and not (is_last and is_live()):
            report.add_torn(scanned.torn)
        if growing.covered_bytes < scanned.end:
            size = scanned.end - growing.covered_bytes
            report.add_withheld(Withheld(name.path, growing.covered_bytes, size))
        yield OpenSegment(name, file, growing, growing.covered_bytes, is_sealed=False)


def load_index(disk: Disk, name: SegmentName) -> SealedIndex | None:
    """The index beside a segment if it is whole and of the same generation."""
    try:
        with opened(disk, name.index_path) as file:
            sealed = SealedIndex(file.read(0, file.size()))
    except (FileNotFoundError, MalformedError):
        return None
    return sealed if sealed.header.generation == name.generation else None


def _check_header(file: File, name: SegmentName, report: Report, *, is_last: bool) -> None:
    data = file.read(0, HEADER_BYTES)
    if is_last and len(data) < HEADER_BYTES:
        return  # it is being made, or a crash interrupted that
    try:
        segment.decode_header(data, name.path)
    except CorruptionError as error:
        report.add_damage(Damage(name.path, 0, HEADER_BYTES, error.problem))


def _scan_beside_writer(
    file: File,
    name: SegmentName,
    sealed: SealedIndex | None,
    *,
    durable: int,
    is_last: bool,
    is_live: Callable[[], bool],
) -> tuple[GrowingIndex, Scanned]:
    """Scan until two scans find damage at the same places: then it is not a write in progress.

    Beside a broker a torn tail is such a write, too: it may be replacing the mark that vouched for the
    batches before it.
    """
    former: list[int] = []
    attempt = 1
    while True:
        growing, scanned = _scan(
            file, name, sealed, durable=durable, is_last=is_last, is_live=is_live
        )
        places = [damage.position for damage in scanned.damage]
        is_settled = places == former and (scanned.torn is None or not is_live())
        if is_settled or not is_last or attempt == _SCANS_MAX:
            return growing, scanned
        former = places
        attempt += 1


def _scan(
    file: File,
    name: SegmentName,
    sealed: SealedIndex | None,
    *,
    durable: int,
    is_last: bool,
    is_live: Callable[[], bool],
) -> tuple[GrowingIndex, Scanned]:
    """An index of what readers may see, and the result of the scan.

    An index is written after a sync, so what it covers is `durable` even if the index itself is not
    trusted.
    """
    growing = GrowingIndex(HEADER_BYTES) if sealed is None else GrowingIndex.resume(sealed)
    start = growing.covered_bytes
    scanner = segment.scanner(
        name.path,
        ScanWindow(file.read, file.size()),
        start=start,
        search_bytes=SEARCH_BYTES,
        durable=durable,
    )
    # Blocks of the last group or two: nothing vouches for them yet.
    unsure: list[ScanUnit[StoredBlock]] = []
    for unit in scanner:
        durable = max(durable, unit.durable_position)
        if unsure and unsure[-1].position < durable:
            _add_all(growing, unsure)
            unsure = []
        unsure.append(_without_body(unit))
    scanned = scanner.result()
    # Checked after the scan: if no broker runs now, its recovery will find what the scan found.
    end = scanned.durable if is_last and is_live() else scanned.end
    _add_all(growing, [unit for unit in unsure if unit.position < end])
    growing.covered_bytes = max(growing.covered_bytes, min(end, scanned.end))
    return growing, scanned


def _without_body(unit: ScanUnit[StoredBlock]) -> ScanUnit[StoredBlock]:
    """The unit without its body, so that waiting units do not keep the file's bytes in memory."""
    assert unit.content is not None
    empty = memoryview(b"")
    return msgspec.structs.replace(unit, content=StoredBlock(unit.content.envelope, empty, empty))


def _add_all(growing: GrowingIndex, units: list[ScanUnit[StoredBlock]]) -> None:
    for unit in units:
        assert unit.content is not None
        add_block(growing, unit, unit.content)


def add_block(growing: GrowingIndex, unit: ScanUnit[StoredBlock], stored: StoredBlock) -> None:
    head = stored.envelope
    keys = list(zip(head.topics, head.column32(head.partitions), strict=True))
    growing.add(head, keys, unit.position, unit.size)
