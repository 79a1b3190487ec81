"""Reads one shard's segments: finds blocks by the index, reads them from the file, and verifies every checksum.

Batches are returned as they are stored, in as few reads as the index allows: adjoining and nearly adjoining blocks are
read together. A read that the page cache can answer is done at once; a read that would wait goes to a worker. Damaged
blocks are skipped and reported. An index that contradicts its segment is rebuilt.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, Protocol, TypeVar

import msgspec

from runnel.errors import MalformedError
from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.log.log import DamageGap, EntryPage, FoundBatch, PartitionPage, PassedRun, Position
from runnel.log.retention.rules import IsServed, passed_runs, served_runs
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.index import Index, RunPlace, SealedIndex, StaleIndexError, runs_of_blocks
from runnel.log.segments.scan import Damage
from runnel.log.segments.segments import PIECE_BYTES, IndexCache, Segment, SegmentFolder
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition

# Reading this many unwanted bytes is cheaper than another read.
_BRIDGE_BYTES: Final = 16 * 1024
_READ_BYTES_MAX: Final = 4 * 2**20


class Spot(Protocol):
    """A block in a segment's file. Its size is an upper bound: damage may lie between it and the next block."""

    @property
    def position(self) -> int: ...
    @property
    def size(self) -> int: ...


AnySpot = TypeVar("AnySpot", bound=Spot)


class _BlockRead(msgspec.Struct, frozen=True, gc=False):
    """A block to read, and its wanted runs."""

    position: int
    size: int
    entry: int
    first_offset: int
    next_offset: int
    runs: tuple[int, ...]


class BlockStretch(msgspec.Struct, frozen=True):
    """Neighbouring blocks of a segment, to be read together."""

    segment: Segment
    index: Index
    first: int  # the number of the first block
    positions: list[int]  # of each block, and where the last one ends

    @property
    def begin(self) -> int:
        return self.positions[0]

    @property
    def size(self) -> int:
        return self.positions[-1] - self.positions[0]

    def part(self, begin: int, end: int | None = None) -> BlockStretch:
        """Blocks `begin` to `end` (exclusive) of these, counted from 0."""
        positions = self.positions[begin : None if end is None else end + 1]
        return BlockStretch(self.segment, self.index, self.first + begin, positions)

    def pieces(self, bytes_max: int) -> list[BlockStretch]:
        """The same blocks in stretches of at most `bytes_max`, or of a single larger block."""
        if self.size <= bytes_max:
            return [self]
        positions, last = self.positions, len(self.positions) - 1
        pieces: list[BlockStretch] = []
        begin = 0
        while begin < last:
            end = max(bisect_right(positions, positions[begin] + bytes_max) - 1, begin + 1)
            pieces.append(self.part(begin, end))
            begin = end
        return pieces


class ShardReader:
    """Reads the segments of one shard. The list belongs to the writer and may change between two awaits."""

    def __init__(
        self,
        folder: SegmentFolder,
        files: OpenFiles,
        workers: Workers,
        cache: IndexCache,
        segments: list[Segment],
        on_damage: Callable[[Damage], None],
    ) -> None:
        self._folder = folder
        self._files = files
        self._workers = workers
        self._cache = cache
        self._segments = segments
        self._on_damage = on_damage
        # The segment where a reader of a partition stopped: most readers continue from there.
        self._hints: dict[tuple[TopicPartition, int], int] = {}
        self._rebuilding = asyncio.Lock()  # two rebuilds at once would write the same file

    async def index(self, segment: Segment) -> Index:
        """The segment's index: from memory, from its file, or rebuilt from the segment."""
        if segment.growing is not None:
            return segment.growing
        cached = self._cache.get(segment.path)
        if cached is not None and cached.covered_bytes == segment.end:
            return cached
        try:
            loaded = await self._workers.submit(self._folder.load_index, segment)
            if (
                loaded.header.generation != segment.generation
                or loaded.covered_bytes != segment.end
            ):
                raise MalformedError("index", "describes another state of the segment")
        except (FileNotFoundError, MalformedError):
            return await self.rebuild_index(segment)
        self._cache.put(segment.path, loaded)
        return loaded

    async def rebuild_index(self, segment: Segment) -> Index:
        async with self._rebuilding:
            self._cache.drop(segment.path)
            opened = await self._workers.submit(self._folder.rebuild_index, segment)
            for damage in opened.damage:
                self._on_damage(damage)
            rebuilt = opened.segment.growing
            assert rebuilt is not None
            encoded = await self._workers.submit(rebuilt.encode, segment.generation)
            self._cache.put(segment.path, SealedIndex(encoded))
            return rebuilt

    # --- One partition ---

    async def first_offset(
        self, key: TopicPartition, floor: int, is_served: IsServed
    ) -> int | None:
        """The offset of the partition's first message that readers get; None if there is none."""
        number = 0
        while (behind := await self._index_behind(number)) is not None:
            segment, index = behind
            number = segment.number
            for place in index.runs_from(key, floor):
                entry, _, time_ns = index.block_place(place.block)
                if is_served(key, place.base_offset + place.count, time_ns, entry):
                    return max(place.base_offset, floor)
        return None

    async def _index_behind(self, number: int) -> tuple[Segment, Index] | None:
        """The first segment behind a number, and its index. A segment that is removed meanwhile is skipped."""
        segments = self._segments
        while (place := bisect_right(segments, number, key=attrgetter("number"))) < len(segments):
            segment = segments[place]
            try:
                return segment, await self.index(segment)
            except FileNotFoundError:  # removed, or rewritten: then a new one has its number
                if segment in segments:
                    raise
        return None

    async def offset_at(self, key: TopicPartition, time_ns: int) -> int | None:
        """The partition's first offset received at this time or later."""
        for segment in list(self._segments):
            if segment.last_time_ns < time_ns:
                continue
            index = await self.index(segment)
            place = index.first_run_from_block(key, index.first_block_from_time(time_ns))
            if place is not None:
                return place.base_offset
        return None

    async def entry_at(self, time_ns: int) -> int | None:
        """The first entry received at this time or later."""
        for segment in list(self._segments):
            if segment.last_time_ns >= time_ns:
                index = await self.index(segment)
                number = index.first_block_from_time(time_ns)
                if number < index.block_count():
                    return index.block_place(number)[0]
        return None

    async def read(
        self,
        key: TopicPartition,
        offset: int,
        end_offset: int,
        bytes_max: int,
        is_served: IsServed,
        *,
        is_mended: bool = False,
    ) -> PartitionPage:
        """Batches with messages of the partition from `offset` on, up to `end_offset`.

        A block that its index does not describe is a StaleIndexError. Once the indexes have been rebuilt (`is_mended`)
        it is damage: a whole block in a file where it does not belong.
        """
        found: list[FoundBatch] = []
        gaps: list[DamageGap] = []
        next_offset = offset
        size = 0
        for segment in await self._segments_from(key, offset):
            places: list[_BlockRead] = []
            read: list[FoundBatch] = []
            damaged: list[DamageGap] = []
            is_full = False
            try:
                index = await self.index(segment)
                if index.next_offset(key) <= next_offset:
                    continue
                for place in _places(index, key, next_offset, is_served):
                    if (found or places) and size + place.size > bytes_max:
                        is_full = True
                        break
                    places.append(place)
                    size += place.size
                await self._read_places(segment, key, places, read, damaged, is_mended=is_mended)
            except (FileNotFoundError, StaleIndexError):
                if found or gaps:
                    break  # the page so far is right; the next page begins with this segment
                raise
            found += read  # all batches of a segment or none: the next page must not repeat any
            gaps += damaged
            if places:
                next_offset = places[-1].next_offset
            self._remember(key, next_offset, segment.number)
            if is_full or size >= bytes_max:
                break
        if not found and not gaps:
            next_offset = end_offset  # only holes up to the end
        return PartitionPage(found, next_offset, gaps)

    async def _segments_from(self, key: TopicPartition, offset: int) -> list[Segment]:
        """The first segment with messages of the partition from an offset on, and all segments behind it now.

        Segments before it may be removed meanwhile without effect.
        """
        number = self._hints.get((key, offset), 1) - 1  # the search begins with the hinted segment
        while (behind := await self._index_behind(number)) is not None:
            segment, index = behind
            if index.next_offset(key) <= offset:
                number = segment.number
            elif segment in self._segments:
                return self._segments[self._segments.index(segment) :]
        return []

    def _remember(self, key: TopicPartition, offset: int, number: int) -> None:
        if len(self._hints) >= 4096:
            self._hints.clear()
        self._hints[key, offset] = number

    async def _read_places(
        self,
        segment: Segment,
        key: TopicPartition,
        places: Sequence[_BlockRead],
        found: list[FoundBatch],
        gaps: list[DamageGap],
        *,
        is_mended: bool,
    ) -> None:
        for group in adjoining(places):
            begin = group[0].position
            data = await self.read_bytes(
                segment, begin, group[-1].position + group[-1].size - begin
            )
            for place in group:
                try:
                    stored = found_at(data, place.position - begin, place.runs)
                except MalformedError as error:
                    gaps.append(self._gap(segment, place, error))
                    continue
                head = stored.batch.envelope
                if not _is_described(head, place, key):
                    if not is_mended:
                        raise StaleIndexError(segment.path)
                    wrong = MalformedError(
                        "block", f"is not the one of entry {place.entry} that its index describes"
                    )
                    gaps.append(self._gap(segment, place, wrong))
                    continue
                is_all = len(place.runs) == head.run_count
                found.append(FoundBatch(stored.block, stored.batch) if is_all else stored)

    def _gap(self, segment: Segment, place: _BlockRead, error: MalformedError) -> DamageGap:
        self.report_damage(segment, place, error)
        return DamageGap(
            segment.path, place.position, str(error), place.first_offset, place.next_offset
        )

    def report_damage(self, segment: Segment, spot: Spot, error: MalformedError) -> None:
        self._on_damage(Damage(segment.path, spot.position, spot.size, str(error)))

    # --- The whole shard ---

    async def read_entries(
        self,
        position: Position,
        end_entry: int,
        epoch: int,
        bytes_max: int,
        is_served: IsServed | None,
    ) -> EntryPage:
        """Stored batches from a position on. `is_served` None: readers get all of them."""
        stretch = await self.stretch(position, bytes_max)
        if stretch is None:
            return EntryPage((), Position(epoch, end_entry))
        found: list[FoundBatch] = []
        gaps: list[DamageGap] = []
        end = stretch.first + len(stretch.positions) - 1
        rest = self._verify_cached(stretch, found, gaps)
        if rest is not None:
            try:
                data = await self._read_slowly(rest.segment, rest.begin, rest.size)
                self._verify(rest, memoryview(data), found, gaps)
            except FileNotFoundError:
                if rest.first == stretch.first:
                    raise
                end = rest.first  # the page so far is right
        return self._page(stretch.index, end, found, gaps, is_served)

    async def stretch(self, position: Position, bytes_max: int) -> BlockStretch | None:
        """The next blocks to read from a position on; None if nothing is stored there."""
        for segment in list(self._segments):
            if segment.last_entry < position.entry:
                continue
            index = await self.index(segment)
            first = index.first_block_from_entry(position.entry)
            if first < index.block_count():
                begin = index.block_place(first)[1]
                last = self._last_block_within(index, first, begin + bytes_max)
                return BlockStretch(segment, index, first, index.block_positions(first, last))
        return None

    def _verify_cached(
        self, stretch: BlockStretch, found: list[FoundBatch], gaps: list[DamageGap]
    ) -> BlockStretch | None:
        """Add the batches of a stretch that can be read without waiting. Returns the rest, if any."""
        with self._files.use(stretch.segment.path) as file:
            for piece in stretch.pieces(PIECE_BYTES):
                data = file.read_nowait(piece.begin, piece.size)
                if data is None:
                    return stretch.part(piece.first - stretch.first)
                self._verify(piece, memoryview(data), found, gaps)
        return None

    def _verify(
        self,
        stretch: BlockStretch,
        data: memoryview,
        found: list[FoundBatch],
        gaps: list[DamageGap],
    ) -> None:
        """Add the batches in the bytes of a stretch, and gaps for damaged blocks."""
        positions, begin = stretch.positions, stretch.begin
        for number, at in enumerate(positions[:-1]):
            try:
                found.append(found_at(data, at - begin, None))
            except MalformedError as error:
                entry = stretch.index.block_place(stretch.first + number)[0]
                size = positions[number + 1] - at
                place = _BlockRead(at, size, entry, entry, entry + 1, ())
                gap = self._gap(stretch.segment, place, error)
                block_number = stretch.first + number
                runs = runs_of_blocks(stretch.index, [block_number])[block_number]
                lost = [PassedRun(*key, base, base + count) for key, base, count in runs]
                gaps.append(msgspec.structs.replace(gap, lost=lost))

    @staticmethod
    def _page(
        index: Index,
        end: int,
        found: list[FoundBatch],
        gaps: list[DamageGap],
        is_served: IsServed | None,
    ) -> EntryPage:
        """The page of what was found in the blocks before block `end`."""
        last_entry = index.block_place(end - 1)[0]
        epochs = found[-1].batch.envelope.epochs if found else b""
        position = Position(int.from_bytes(epochs[-8:], "little"), last_entry + 1)
        if is_served is None:
            return EntryPage(found, position, gaps)
        passed: list[PassedRun] = []
        served = list(_served(found, is_served, passed))
        return EntryPage(served, position, gaps, passed)

    @staticmethod
    def _last_block_within(index: Index, first: int, end: int) -> int:
        """The number behind the last block that ends by this position; one block at least."""
        if index.covered_bytes <= end:
            return index.block_count()
        return max(index.first_block_from_position(end + 1) - 1, first + 1)

    async def read_bytes(self, segment: Segment, position: int, size: int) -> memoryview:
        """Read bytes of a segment. FileNotFoundError if retention has removed it."""
        with self._files.use(segment.path) as file:
            data = file.read_nowait(position, size)
        if data is None:
            data = await self._read_slowly(segment, position, size)
        return memoryview(data)

    async def _read_slowly(self, segment: Segment, position: int, size: int) -> bytes:
        # The worker takes the file itself: this task may be cancelled while it waits.
        return await self._workers.submit(self._read_waiting, segment.path, position, size)

    def _read_waiting(self, path: str, position: int, size: int) -> bytes:
        with self._files.use(path) as file:
            return file.read(position, size)


def found_at(data: memoryview, at: int, runs: Sequence[int] | None) -> FoundBatch:
    """The stored batch that begins at `at` in `data`, with both checksums verified."""
    head, body, size = block.unpack(data, at)
    if not head.is_stored:
        raise MalformedError("envelope base_offsets", "missing in a stored block")
    return FoundBatch(data[at : at + size], Batch(head, body), runs)


def _is_described(head: Envelope, place: _BlockRead, key: TopicPartition) -> bool:
    """Whether a block is the one in which the index has these runs of a partition."""
    return (
        head.entry == place.entry
        and place.runs[-1] < head.run_count
        and head.topics[place.runs[0]] == key[0]
    )


def _served(
    found: Iterable[FoundBatch], is_served: IsServed, passed: list[PassedRun]
) -> Iterator[FoundBatch]:
    """The parts of these batches that readers get. A batch without any is left out."""
    for stored in found:
        head = stored.batch.envelope
        runs = served_runs(head, is_served)
        if runs is None:
            yield stored
            continue
        passed += passed_runs(head, runs)
        if runs:
            yield FoundBatch(stored.block, stored.batch, runs)


def _places(
    index: Index, key: TopicPartition, offset: int, is_served: IsServed
) -> Iterator[_BlockRead]:
    """The blocks to read for a partition, in order, each with all its wanted runs."""
    group: list[RunPlace] = []
    for place in index.runs_from(key, offset):
        entry, _, time_ns = index.block_place(place.block)
        if not is_served(key, place.base_offset + place.count, time_ns, entry):
            continue
        if group and group[0].block != place.block:
            yield _place(index, group)
            group = []
        group.append(place)
    if group:
        yield _place(index, group)


def _place(index: Index, group: Sequence[RunPlace]) -> _BlockRead:
    block = group[0].block
    begin, end = index.block_positions(block, block + 1)
    return _BlockRead(
        begin,
        end - begin,
        index.block_place(block)[0],
        group[0].base_offset,
        group[-1].base_offset + group[-1].count,
        tuple(place.run for place in group),
    )


def adjoining(
    places: Iterable[AnySpot], bytes_max: int = _READ_BYTES_MAX
) -> Iterator[list[AnySpot]]:
    """Group blocks, given in file order, for single reads of at most `bytes_max`, or of one larger block."""
    group: list[AnySpot] = []
    for place in places:
        if group and (
            place.position - (group[-1].position + group[-1].size) > _BRIDGE_BYTES
            or place.position + place.size - group[0].position > bytes_max
        ):
            yield group
            group = []
        group.append(place)
    if group:
        yield group
