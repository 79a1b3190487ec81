"""The segment files of one shard: opened at start, begun, sealed and removed, and a cache of their indexes.

Blocking methods are for workers. A segment's file name carries its generation. A rewrite makes a file of the next
generation beside the old one, so that readers of the old file are not disturbed. A crash leaves either file or both.
If both exist, the higher generation counts, which was synced before it got its name.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from runnel.errors import CorruptionError, MalformedError
from runnel.formats import block
from runnel.formats import envelope as envelopes
from runnel.formats.envelope import Envelope
from runnel.log.segments import index as indexes
from runnel.log.segments import paths, segment
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.index import GrowingIndex, SealedIndex
from runnel.log.segments.records import store_again
from runnel.log.segments.scan import Damage, ScanWindow
from runnel.log.segments.segment import HEADER_BYTES, SegmentHeader
from runnel.platform.disk import Disk, File, FileAccess

# How far to search behind a torn block: as far as one group of writes and one block can reach.
SEARCH_BYTES: Final = 96 * 2**20
# Many blocks are read and verified piece by piece: a checksum takes half the time while its bytes, and the bytes they
# were copied from, are still in the processor's second-level cache (bench/log.py, "read").
PIECE_BYTES: Final = 2**19


_ENDLESS: Final = 2**63
MISSING_SEGMENT: Final = "segment is missing, its index is there"


class Segment:
    """A segment file of a shard. `growing` is its index until the index is written to disk.

    No entry below `first_entry` was ever in it; after a rewrite the first remaining entry may be higher. A segment
    `is_short` if its file ends before the end that its index covers: nothing may be written behind that end.
    """

    __slots__ = (
        "allocated",
        "end",
        "first_entry",
        "first_time_ns",
        "generation",
        "growing",
        "is_short",
        "last_entry",
        "last_time_ns",
        "number",
        "path",
    )

    def __init__(self, path: str, number: int, generation: int, first_entry: int) -> None:
        self.path = path
        self.number = number
        self.generation = generation
        self.first_entry = first_entry
        self.last_entry = first_entry - 1
        self.first_time_ns = 0
        self.last_time_ns = 0
        self.end = HEADER_BYTES
        self.allocated = 0
        self.growing: GrowingIndex | None = None
        self.is_short = False

    @property
    def is_empty(self) -> bool:
        return self.last_entry < self.first_entry

    @property
    def index_path(self) -> str:
        return paths.index_path(self.path)

    def describe(self, first_entry: int, last_entry: int, first_ns: int, last_ns: int) -> None:
        if not self.first_entry:  # its header is damaged: the remaining entries begin here
            self.first_entry = first_entry
        self.last_entry = last_entry
        self.first_time_ns = first_ns
        self.last_time_ns = last_ns


class ProducerSeen(msgspec.Struct, frozen=True):
    """A named publisher's batch, found by a scan."""

    producer: str
    term: int
    number: int
    entry: int
    time_ns: int


class UnreadablePlace(msgspec.Struct, frozen=True):
    """Damaged bytes without an envelope, and the number of the first block behind them."""

    damage: Damage
    block: int


class OpenedSegment(msgspec.Struct, frozen=True):
    """An opened segment, and the results of its scan, which are empty if its index was complete."""

    segment: Segment
    producers: Sequence[ProducerSeen] = ()
    damage: Sequence[Damage] = ()
    torn: Damage | None = None
    lost: Sequence[Envelope] = ()  # of blocks with only the body damaged; the index has them
    unknown: Sequence[UnreadablePlace] = ()  # damage that includes the envelope

    @property
    def unknown_bytes(self) -> int:
        return sum(item.damage.size for item in self.unknown)


class SegmentFolder:
    """The directory of a shard's segments. All methods block."""

    def __init__(self, disk: Disk, files: OpenFiles, folder: str) -> None:
        self._disk = disk
        self._files = files
        self.folder = folder
        self.missing: list[Damage] = []  # segments that `open_all` did not find

    def check_exists(self) -> None:
        """Raise FileNotFoundError if the folder is gone: a disk that is briefly unavailable has not lost its data."""
        if not self._disk.list(self.folder):
            raise FileNotFoundError(errno.ENOENT, "the shard's folder is gone", self.folder)

    def open_all(
        self, *, is_clean: bool = False, synced: tuple[int, int] = (0, 0)
    ) -> list[OpenedSegment]:
        """Open every segment, in order. A last segment that a crash has cut is mended and stored.

        `synced`: the number of the segment with a synced mark, and its synced bytes.
        """
        newest: dict[int, int] = {}
        names = self._disk.list(self.folder)
        for name in names:
            numbered = paths.segment_number(name)
            if numbered is not None:
                number, generation = numbered
                newest[number] = max(newest.get(number, 0), generation)
        wanted = {paths.segment_path(self.folder, *item) for item in newest.items()}
        wanted |= {paths.index_path(path) for path in wanted}
        self.missing = [
            Damage(f"{self.folder}/{paths.segment_of_index(name)}", 0, 0, MISSING_SEGMENT)
            for name in paths.orphaned_indexes(names)
        ]
        # Their indexes stay, so that the loss is reported until an operator removes them.
        wanted |= {paths.index_path(lost.path) for lost in self.missing}
        wanted |= {
            paths.catalogue_folder(self.folder),
            paths.state_folder(self.folder),
            f"{self.folder}/{paths.LOSSES_FILE}",
            f"{self.folder}/{paths.LOCK_FILE}",
        }
        unwanted = [name for name in names if f"{self.folder}/{name}" not in wanted]
        if names and (unwanted or not is_clean):
            # A killed process may not have made these names durable. What is stored in these files from here on, and
            # the removal of the files that they replace, rely on the names.
            self._disk.sync_directory(self.folder)
        for name in unwanted:
            self._disk.remove(f"{self.folder}/{name}")
        opened: list[OpenedSegment] = []
        for number in sorted(newest, reverse=True):
            # If a crash came while the newest was being made, the one before it is the last that was written to.
            durable = synced[1] if synced[0] == number and not newest[number] else 0
            found = self._open(number, newest[number], is_last=not opened, synced=durable)
            if found is not None:
                opened.append(found)
        return opened[::-1]

    def _open(
        self, number: int, generation: int, *, is_last: bool, synced: int
    ) -> OpenedSegment | None:
        path = paths.segment_path(self.folder, number, generation)
        with self._files.use(path) as file:
            damage: list[Damage] = []
            try:
                header = segment.decode_header(file.read(0, HEADER_BYTES), path)
                found = Segment(path, number, generation, header.first_entry)
            except CorruptionError as error:
                found = Segment(path, number, generation, 0)
                damage.append(Damage(path, 0, HEADER_BYTES, error.problem))
            index = self._index_header(found)
            size = file.size()
            if index is not None and index.covered_bytes > size:
                lost = index.covered_bytes - size
                text = f"file has {size} bytes, its index says {index.covered_bytes}"
                damage.append(Damage(path, size, lost, text))
                found.is_short = True
            durable = max(0 if index is None else index.covered_bytes, synced)
            opened = self._open_indexed(file, found, durable) or self._open_scanned(
                file, found, is_last=is_last, durable=durable
            )
        if damage and found.is_empty and is_last and index is None:
            # A crash came while it was being made: nothing was ever appended to it.
            self.remove(found)
            return None
        return msgspec.structs.replace(opened, damage=(*damage, *opened.damage))

    def _open_indexed(self, file: File, found: Segment, durable: int) -> OpenedSegment | None:
        """Open a segment by its index header, if the index covers the whole file or, for a cut file, more."""
        header = self._index_header(found)
        if header is None or header.covered_bytes < max(file.size(), durable):
            return None
        if found.is_short and not self._has_whole_index(found):
            found.is_short = False
            return None
        found.end = header.covered_bytes
        if header.blocks:
            found.describe(
                header.first_entry, header.last_entry, header.first_time_ns, header.last_time_ns
            )
        return OpenedSegment(found)

    def _has_whole_index(self, found: Segment) -> bool:
        try:
            self.load_index(found)
        except (FileNotFoundError, MalformedError):
            return False
        return True

    def _index_header(self, found: Segment) -> indexes.IndexHeader | None:
        try:
            with self._files.use(found.index_path) as file:
                header = indexes.decode_header(file.read(0, indexes.HEADER_BYTES))
        except (FileNotFoundError, MalformedError):
            return None
        return header if _describes(header, found) else None

    def _open_scanned(
        self, file: File, found: Segment, *, is_last: bool, durable: int = 0
    ) -> OpenedSegment:
        growing = self._covered_part(found, file.size())
        scanner = segment.scanner(
            found.path,
            ScanWindow(file.read, file.size()),
            start=growing.covered_bytes,
            search_bytes=SEARCH_BYTES,
            durable=durable,
        )
        producers: list[ProducerSeen] = []
        lost: list[Envelope] = []
        unknown: list[UnreadablePlace] = []
        passed = 0

        def take(envelope: Envelope, position: int, size: int) -> None:
            nonlocal producers
            partitions = envelope.column32(envelope.partitions)
            growing.add(
                envelope, list(zip(envelope.topics, partitions, strict=True)), position, size
            )
            producers += _producer_seen(envelope)

        def take_damaged(next_entry: int) -> None:
            """Index damaged blocks that have a readable envelope: readers then find the damage at its messages."""
            nonlocal passed
            for bad in scanner.damage[passed:]:
                last_entry = growing.last_entry() or found.first_entry - 1
                whole, rest = _salvage(file, bad, last_entry, next_entry)
                for envelope, position, size in whole:
                    lost.append(envelope)
                    take(envelope, position, size)
                if rest is not None:
                    unknown.append(UnreadablePlace(rest, growing.block_count()))
            passed = len(scanner.damage)

        for unit in scanner:
            assert unit.content is not None
            envelope = unit.content.envelope
            if len(scanner.damage) > passed:
                take_damaged(envelope.entry)
            take(envelope, unit.position, unit.size)
        take_damaged(_ENDLESS)
        scanned = scanner.result()
        growing.covered_bytes = found.end = scanned.end
        describe_by(found, growing)
        found.growing = growing
        if is_last:
            file.truncate(scanned.end)
            store_again(file, scanned)
        return OpenedSegment(found, producers, scanned.damage, scanned.torn, lost, unknown)

    def _covered_part(self, found: Segment, file_bytes: int) -> GrowingIndex:
        """An index of the file's beginning, from an older index file if that is usable."""
        try:
            sealed = self.load_index(found)
        except (FileNotFoundError, MalformedError):
            return GrowingIndex(HEADER_BYTES)
        if not _describes(sealed.header, found) or sealed.covered_bytes > file_bytes:
            return GrowingIndex(HEADER_BYTES)
        return GrowingIndex.resume(sealed)

    def load_index(self, found: Segment) -> SealedIndex:
        """Read the index file. MalformedError or FileNotFoundError if there is no usable one."""
        with self._files.use(found.index_path) as file:
            return SealedIndex(file.read(0, file.size()))

    def resume_index(self, found: Segment) -> GrowingIndex:
        """The index of a sealed segment, in a form that can be continued."""
        try:
            return GrowingIndex.resume(self.load_index(found))
        except (FileNotFoundError, MalformedError):
            rebuilt = self.rebuild_index(found).segment.growing
            assert rebuilt is not None
            return rebuilt

    def rebuild_index(self, found: Segment) -> OpenedSegment:
        """Scan a sealed segment whose index is missing or wrong, and write a new index."""
        with self._files.use(found.path) as file:
            self._files.forget(found.index_path)
            with suppress(FileNotFoundError):
                self._disk.remove(found.index_path)
            rebuilt = Segment(found.path, found.number, found.generation, found.first_entry)
            # All of it was stored when it was sealed: blocks that are not whole are damage.
            opened = self._open_scanned(file, rebuilt, is_last=False, durable=found.end)
        assert rebuilt.growing is not None
        with suppress(OSError):  # for example on a full disk: then the next use rebuilds it again
            self.write_index(rebuilt, rebuilt.growing)
        return opened

    def new_segment(self, header: SegmentHeader) -> Segment:
        """An empty segment. `begin` makes its file."""
        path = paths.segment_path(self.folder, header.number, header.generation)
        made = Segment(path, header.number, header.generation, header.first_entry)
        made.growing = GrowingIndex(HEADER_BYTES)
        return made

    def begin(self, new: Segment, header: SegmentHeader) -> None:
        """Make the file of a new segment. It is durable when this returns."""
        with self._files.use(new.path, FileAccess.CREATE) as file:
            file.write(0, [header.encode()], sync=True)
        self._disk.sync_directory(self.folder)

    def discard(self, header: SegmentHeader) -> None:
        """Remove the remains of a failed `begin`."""
        path = paths.segment_path(self.folder, header.number, header.generation)
        self._files.forget(path)
        with suppress(FileNotFoundError):
            self._disk.remove(path)
        # Durably: refused batches must not reappear beside the batches stored in their place.
        self._disk.sync_directory(self.folder)

    def discard_beyond(self, number: int) -> None:
        """Remove the remains of failed attempts behind the segment of this number."""
        for name in self._disk.list(self.folder):
            numbered = paths.segment_number(name)
            if numbered is not None and numbered[0] > number:
                self._files.forget(f"{self.folder}/{name}")
                self._disk.remove(f"{self.folder}/{name}")
        with suppress(FileNotFoundError):  # there is no folder before the first segment
            self._disk.sync_directory(self.folder)

    def seal(self, found: Segment) -> None:
        """Free preallocated room, then write the index. The index is last because it can be rebuilt."""
        assert found.growing is not None
        with self._files.use(found.path) as file:
            if file.size() != found.end:
                file.truncate(found.end)
                file.sync()
        self.write_index(found, found.growing)

    def write_index(self, found: Segment, growing: GrowingIndex) -> None:
        self._files.forget(found.index_path)
        write_whole(self._disk, found.index_path, growing.encode(found.generation))
        self._disk.sync_directory(self.folder)

    def remove(self, found: Segment) -> None:
        """Remove a segment. Its index goes first, durably: an index without its segment would mean a loss."""
        self.remove_index(found)
        self._remove(found.path)

    def remove_index(self, found: Segment) -> None:
        """Remove an index. It is rebuilt when needed."""
        self._remove(found.index_path)

    def _remove(self, path: str) -> None:
        self._files.forget(path)
        with suppress(FileNotFoundError):
            self._disk.remove(path)
        self._disk.sync_directory(self.folder)


def _describes(header: indexes.IndexHeader, found: Segment) -> bool:
    """Whether an index can belong to this segment and its generation."""
    return header.generation == found.generation and (
        not header.blocks or header.first_entry >= found.first_entry
    )


def _producer_seen(envelope: Envelope) -> list[ProducerSeen]:
    if envelope.producer is None:
        return []
    time_ns = envelope.column64(envelope.receive_times)[0]
    return [
        ProducerSeen(envelope.producer, envelope.term, envelope.number, envelope.entry, time_ns)
    ]


def _salvage(
    file: File, bad: Damage, last_entry: int, next_entry: int
) -> tuple[list[tuple[Envelope, int, int]], Damage | None]:
    """The readable envelopes in damaged bytes between two entries, with their places, and the unreadable rest."""
    lost: list[tuple[Envelope, int, int]] = []
    data = memoryview(file.read(bad.position, bad.size))
    at = 0
    while at < bad.size:
        try:
            header = block.read_header(data, at)
            envelope = envelopes.decode(block.envelope_view(data, at, header))
        except MalformedError:
            break
        if not envelope.is_stored or not last_entry < envelope.entry < next_entry:
            break
        lost.append((envelope, bad.position + at, header.block_bytes))
        last_entry = envelope.entry
        at += header.block_bytes
    if at >= bad.size:
        return lost, None
    return lost, Damage(bad.path, bad.position + at, bad.size - at, bad.problem)


def write_whole(disk: Disk, path: str, content: bytes, *, member: str = "") -> None:
    """Write a small file completely or not at all. Its name is durable after `sync_directory`.

    Of several logs that may write it at once, each names itself as `member`.
    """
    unfinished = (
        f"{path}.{paths.folder_name(member)}" if member else path
    ) + paths.UNFINISHED_SUFFIX
    with suppress(FileNotFoundError):
        disk.remove(unfinished)
    file = disk.open(unfinished, FileAccess.CREATE)
    try:
        file.write(0, [content], sync=True)
    finally:
        file.close()
    disk.rename(unfinished, path)


def describe_by(found: Segment, growing: GrowingIndex) -> None:
    """Set a segment's entries and times from its index."""
    blocks = growing.block_count()
    if blocks:
        first_entry, _, first_ns = growing.block_place(0)
        last_entry, _, last_ns = growing.block_place(blocks - 1)
        found.describe(first_entry, last_entry, first_ns, last_ns)


class IndexCache:
    """Caches as many indexes of sealed segments as fit; the latest always fits."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._indexes: OrderedDict[str, SealedIndex] = OrderedDict()

    def get(self, path: str) -> SealedIndex | None:
        index = self._indexes.get(path)
        if index is not None:
            self._indexes.move_to_end(path)
        return index

    def put(self, path: str, index: SealedIndex) -> None:
        self.drop(path)
        self._indexes[path] = index
        self._bytes += index.size
        while self._bytes > self._bytes_max and len(self._indexes) > 1:
            self.drop(next(iter(self._indexes)))

    def drop(self, path: str) -> None:
        index = self._indexes.pop(path, None)
        if index is not None:
            self._bytes -= index.size
