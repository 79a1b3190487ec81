"""The losses file of a shard: it tells every start and every reader what the shard has lost for good.

An index tells readers where messages lie, damaged or not. The losses file lists the rest: blocks whose envelope
cannot be read, missing segments, and damaged blocks that rewriting has left out. It also lists the segments that
retention removed: a missing number that is not among them is a loss.

    0  4  magic    "RNL" 0x01
    4  4  crc      CRC-32C of the content
    8     content  msgpack: removed ranges of segment numbers, settled entry, losses

It is written whole. Without the file nothing was lost or removed. A damaged file says nothing, and is reported.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from runnel.errors import MalformedError
from runnel.formats import block
from runnel.formats.checksum import crc32c
from runnel.log.log import DamageGap, EntryPage, FoundBatch, PartitionPage, PassedRun, Position
from runnel.log.retention.rules import IsServed
from runnel.log.segments import paths
from runnel.log.segments.index import Index
from runnel.log.segments.scan import Damage
from runnel.log.segments.segments import write_whole
from runnel.platform.disk import Disk, FileAccess
from runnel.topics.names import TopicPartition

# Losses without runs are kept only for the next start: readers learn of them from the index.
_PLACES_MAX: Final = 1000
_SHOWN_RUNS_MAX: Final = 3
_MAGIC: Final = b"RNL\x01"
_HEADER: Final = struct.Struct("<4sI")

Range = tuple[int, int]  # [begin, end)


class LostRun(msgspec.Struct, frozen=True, array_like=True):
    """Offsets of one partition that are lost, or may be."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """One place of damage. `file` is the name of the segment's file when it was found.

    Without `runs`, readers learn of the lost messages from the segment's index.
    """

    segment: int
    file: str
    position: int
    size: int
    problem: str
    first_entry: int
    next_entry: int
    time_ns: int  # the receive time of the messages behind it, or before it
    runs: tuple[LostRun, ...] = ()

    def damage(self, folder: str) -> Damage:
        text = self.problem
        if self.runs:
            shown = ", ".join(
                f"{run.topic!r}[{run.partition}] {run.first_offset} to {run.next_offset - 1}"
                for run in self.runs[:_SHOWN_RUNS_MAX]
            )
            more = (
                f" and {len(self.runs) - _SHOWN_RUNS_MAX} more"
                if len(self.runs) > _SHOWN_RUNS_MAX
                else ""
            )
            text += f"; lost offsets: {shown}{more}"
        return Damage(f"{folder}/{self.file}", self.position, self.size, text)


class LossesFile(msgspec.Struct, frozen=True, array_like=True):
    """The file's content. `removed` are the numbers of the segments that retention removed.

    Entries that are missing before `settled_entry` are no losses: removals were not recorded then.
    """

    removed: tuple[Range, ...] = ()
    settled_entry: int = 0
    losses: tuple[Loss, ...] = ()

    @property
    def last_number(self) -> int:
        """The highest number of a removed or lost segment."""
        removed = self.removed[-1][1] - 1 if self.removed else 0
        return max([removed, *(loss.segment for loss in self.losses)])

    def was_removed(self, number: int) -> bool:
        at = bisect_right(self.removed, (number, 2**63)) - 1
        return at >= 0 and number < self.removed[at][1]

    def encode(self) -> bytes:
        content = msgspec.msgpack.encode(self)
        return _HEADER.pack(_MAGIC, crc32c(content)) + content


_decoder: Final = msgspec.msgpack.Decoder(LossesFile)


def decode(data: bytes) -> LossesFile:
    if len(data) < _HEADER.size:
        raise MalformedError("losses", f"{len(data)} bytes of {_HEADER.size}")
    magic, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC or crc32c(data[_HEADER.size :]) != crc:
        raise MalformedError("losses", "does not match its checksum")
    try:
        return _decoder.decode(data[_HEADER.size :])
    except msgspec.DecodeError as error:
        raise MalformedError("losses", str(error)) from None


def read_losses(disk: Disk, folder: str) -> tuple[LossesFile, Damage | None]:
    """The content of a shard's losses file, and the damage of the file itself."""
    path = f"{folder}/{paths.LOSSES_FILE}"
    try:
        file = disk.open(path, FileAccess.READ)
    except FileNotFoundError:
        return LossesFile(), None
    try:
        data = file.read(0, file.size())
    finally:
        file.close()
    try:
        return decode(data), None
    except MalformedError as error:
        text = f"{error}; what was lost or removed before is not known any more"
        return LossesFile(), Damage(path, 0, len(data), text)


class ShardLosses:
    """The losses of one shard in memory, for its readers. Both the loop and workers change them.

    Each change builds new tables and swaps them in with one step, so that readers can look up losses meanwhile.
    """

    def __init__(self, disk: Disk, folder: str, make_folder: Callable[[], None]) -> None:
        self._disk = disk
        self.folder = folder
        self._make_folder = make_folder
        self._changing = threading.Lock()
        self._remembered = LossesFile()
        self._by_key: Mapping[TopicPartition, Sequence[tuple[LostRun, Loss]]] = {}
        self._by_entry: Sequence[Loss] = ()
        self._is_saved = True

    def __bool__(self) -> bool:
        return bool(self._by_entry)

    @property
    def is_saved(self) -> bool:
        return self._is_saved

    @property
    def remembered(self) -> LossesFile:
        return self._remembered

    @property
    def first_entry(self) -> int:
        """The first entry of the first loss; 0 if there is none."""
        return self._by_entry[0].first_entry if self._by_entry else 0

    def damage(self) -> list[Damage]:
        return [loss.damage(self.folder) for loss in self._remembered.losses]

    # --- Changes ---

    def load(self, remembered: LossesFile) -> None:
        self._put(remembered)
        self._is_saved = True

    def add(self, losses: Iterable[Loss]) -> None:
        """Add the losses that are not known yet. Losses without runs are places; a limited number of them is kept."""
        with self._changing:
            known = {(loss.file, loss.position): loss for loss in self._remembered.losses}
            places = sum(not loss.runs for loss in known.values())
            for loss in losses:
                former = known.get((loss.file, loss.position))
                if former is not None and (former.runs or not loss.runs):
                    continue
                if not loss.runs:
                    if places >= _PLACES_MAX:
                        continue
                    places += 1
                known[loss.file, loss.position] = loss
            self._replace(losses=tuple(known.values()))

    def add_place(self, segment: int, damage: Damage) -> None:
        """Add damage that readers learn of from the index of its segment."""
        name = damage.path.rpartition("/")[2]
        place = Loss(segment, name, damage.position, damage.size, damage.problem, 0, 0, 0)
        self.add([place])

    def settle(self, entry: int) -> None:
        """Do not count entries that are missing before this one as losses."""
        with self._changing:
            self._replace(settled_entry=entry)

    def note_removed(self, number: int, first_number: int | None) -> None:
        """Note that retention removes this segment. Losses before the first segment that stays are dropped."""
        end = number + 1 if first_number is None else first_number
        with self._changing:
            removed = _with_number(self._remembered.removed, number)
            losses = [loss for loss in self._remembered.losses if loss.segment >= end]
            self._replace(removed=removed, losses=tuple(losses))

    def restore(self, remembered: LossesFile) -> None:
        """Undo a change that could not be stored."""
        self._put(remembered)

    def _replace(self, **changes: object) -> None:
        changed = msgspec.structs.replace(self._remembered, **changes)
        if changed != self._remembered:
            self._put(changed)
            self._is_saved = False

    def _put(self, remembered: LossesFile) -> None:
        by_key: dict[TopicPartition, list[tuple[LostRun, Loss]]] = {}
        for loss in remembered.losses:
            for run in loss.runs:
                by_key.setdefault((run.topic, run.partition), []).append((run, loss))
        for lost in by_key.values():
            lost.sort(key=lambda item: item[0].first_offset)
        self._remembered = remembered
        self._by_key = by_key
        self._by_entry = sorted(
            (loss for loss in remembered.losses if loss.runs or loss.next_entry),
            key=lambda loss: loss.first_entry,
        )

    def save(self) -> None:
        """Store the changes. Blocks: for a worker. After a failure they are stored with the next change."""
        if not self._is_saved:
            self._is_saved = True
            try:
                self._make_folder()
                path = f"{self.folder}/{paths.LOSSES_FILE}"
                write_whole(self._disk, path, self._remembered.encode())
                self._disk.sync_directory(self.folder)
            except OSError:
                self._is_saved = False
                raise

    # --- Readers ---

    def first_offset(self, key: TopicPartition, floor: int, is_served: IsServed) -> int | None:
        """The offset of the first lost message that readers of the partition must learn of."""
        for run, loss in self._by_key.get(key, ()):
            if run.next_offset > floor and _is_reported(run, loss, is_served):
                return max(run.first_offset, floor)
        return None

    def add_gaps(
        self,
        page: PartitionPage,
        key: TopicPartition,
        offset: int,
        end_offset: int,
        floor: int,
        is_served: IsServed,
    ) -> PartitionPage:
        """The page with gaps for the messages lost between its beginning and its end."""
        begin, end = max(offset, floor), min(page.next_offset, end_offset)
        lost = [
            (run, loss)
            for run, loss in self._by_key.get(key, ())
            if run.first_offset < end
            and run.next_offset > begin
            and _is_reported(run, loss, is_served)
        ]
        if not lost:
            return page
        covered = sorted(
            [(gap.first_offset, gap.next_offset) for gap in page.gaps] + _runs_found(page.found)
        )
        gaps = list(page.gaps)
        for run, loss in lost:
            for first, following in without((run.first_offset, run.next_offset), covered):
                if first < end and following > begin:
                    path = f"{self.folder}/{loss.file}"
                    gap = DamageGap(path, loss.position, loss.problem, max(first, begin), following)
                    gaps.append(gap)
        gaps.sort(key=lambda gap: gap.first_offset)
        return PartitionPage(page.found, page.next_offset, gaps)

    def add_entry_gaps(self, page: EntryPage, begin: Position) -> EntryPage:
        """The same for a page of the shard's entries. Each gap lists the lost offsets."""
        end = page.next_position.entry
        covered = {found.batch.envelope.entry for found in page.found}
        covered.update(gap.first_offset for gap in page.gaps)
        gaps = [
            DamageGap(
                f"{self.folder}/{loss.file}",
                loss.position,
                loss.problem,
                loss.first_entry,
                loss.next_entry,
                tuple(PassedRun(*msgspec.structs.astuple(run)) for run in loss.runs),
            )
            for loss in self._by_entry
            if loss.first_entry < end
            and loss.next_entry > begin.entry
            and _is_missing(loss, covered)
        ]
        if not gaps:
            return page
        gaps = sorted([*page.gaps, *gaps], key=lambda gap: gap.first_offset)
        return msgspec.structs.replace(page, gaps=gaps)


def _is_reported(run: LostRun, loss: Loss, is_served: IsServed) -> bool:
    key = (run.topic, run.partition)
    return is_served(key, run.next_offset, loss.time_ns, loss.next_entry - 1)


def _is_missing(loss: Loss, covered: set[int]) -> bool:
    known = sum(loss.first_entry <= entry < loss.next_entry for entry in covered)
    return known < loss.next_entry - loss.first_entry


def _runs_found(found: Sequence[FoundBatch]) -> list[Range]:
    """The offsets of the requested runs."""
    ranges: list[Range] = []
    for stored in found:
        head = stored.batch.envelope
        bases, counts = head.column64(head.base_offsets), head.column32(head.counts)
        runs = range(head.run_count) if stored.runs is None else stored.runs
        ranges += [(bases[run], bases[run] + counts[run]) for run in runs]
    return ranges


def without(whole: Range, parts: Sequence[Range]) -> Iterator[Range]:
    """The ranges that remain of `whole` without `parts`, which are in order."""
    begin, end = whole
    for first, following in parts:
        if following <= begin:
            continue
        if first >= end:
            break
        if first > begin:
            yield begin, first
        begin = max(begin, following)
    if begin < end:
        yield begin, end


def _with_number(ranges: Sequence[Range], number: int) -> tuple[Range, ...]:
    merged: list[Range] = []
    for begin, end in sorted([*ranges, (number, number + 1)]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


# --- Lost messages of a segment ---


def all_runs(index: Index) -> tuple[LostRun, ...]:
    """All messages of a segment by its index; neighbouring runs of a partition are merged."""
    table = index.run_table(lambda _: True)
    lost: list[LostRun] = []
    begin = 0
    for key, end in zip(table.keys, table.ends.tolist(), strict=True):
        first = following = 0
        for base, count in zip(
            table.base_offsets[begin:end].tolist(), table.counts[begin:end].tolist(), strict=True
        ):
            if base != following:
                if following:
                    lost.append(LostRun(*key, first, following))
                first = base
            following = base + count
        lost.append(LostRun(*key, first, following))
        begin = end
    return tuple(lost)


def is_mended(disk: Disk, folder: str, loss: Loss) -> bool:
    """Whether the lost bytes are whole again, because the file was restored."""
    try:
        file = disk.open(f"{folder}/{loss.file}", FileAccess.READ)
    except FileNotFoundError:
        return False
    try:
        if not loss.size:  # the file was missing, or its end
            return not loss.position or file.size() > loss.position
        head, _, _ = block.unpack(file.read(loss.position, loss.size))
    except MalformedError:
        return False
    finally:
        file.close()
    return not loss.next_entry or loss.first_entry <= head.entry < loss.next_entry
