"""Verifies a data directory: every checksum and every index, in one pass.

Of a segment it checks the header; each block's header, envelope, body and padding against their checksums; that the
body's columns can be decoded; that entries rise, receive times do not go back, and the offsets of a topic-partition
rise (rewriting leaves holes); and the index against a rebuilt one. Of the metadata and of each shard's catalogue and
subscription state it checks each record. Of every folder with a synced mark it checks that the newest file is as long
as the mark.

A tail that was never known to be synced is no damage: a crash leaves such a tail, and recovery cuts it off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from runnel.errors import CorruptionError, MalformedError
from runnel.formats.batch import Batch
from runnel.log.metadata.catalogue import LoadedMetadata
from runnel.log.metadata.record_journal import LoadedRecords
from runnel.log.metadata.records import LastValue, Opened
from runnel.log.metadata.sqlite.offline import verify_file
from runnel.log.metadata.state_journal import read_state
from runnel.log.reading.catalogue_view import load_catalogue, load_format_one, load_metadata
from runnel.log.reading.offline_log import JournalInfo, OfflineLog
from runnel.log.reading.open_segment import (
    SegmentName,
    add_block,
    opened,
    short_segment,
)
from runnel.log.reading.report import torn_note
from runnel.log.segments import paths, segment
from runnel.log.segments.format_file import FIRST_FORMAT, SHARED_FORMAT
from runnel.log.segments.index import GrowingIndex, SealedIndex, decode_header
from runnel.log.segments.scan import Damage, Scanned, ScanWindow
from runnel.log.segments.segment import HEADER_BYTES, StoredBlock
from runnel.log.segments.segments import SEARCH_BYTES
from runnel.log.segments.synced_marks import Mark, missing_file, missing_marks
from runnel.platform.disk import Disk, File
from runnel.topics.names import TopicPartition

_SCANS_MAX: Final = 4

# Called with the number of bytes checked, and the total.
OnProgress = Callable[[int, int], None]


class Verified(msgspec.Struct, frozen=True):
    """What was checked, and what was found. `notes` are worth knowing, but no damage."""

    segments: int
    blocks: int
    messages: int
    bytes: int
    damage: list[Damage]
    damage_count: int  # more than are listed, if there are thousands
    notes: list[str]


class _ShardState(msgspec.Struct):
    """The last entry, time and offsets of a shard, which its next block must continue."""

    entry: int = 0
    time_ns: int = -(2**63)
    next_offsets: dict[TopicPartition, int] = {}


class _SegmentFindings(msgspec.Struct):
    """The result of one pass over one segment."""

    blocks: int = 0
    messages: int = 0
    damage: list[Damage] = []
    notes: list[str] = []


def verify(log: OfflineLog, on_progress: OnProgress = lambda _done, _total: None) -> Verified:
    """Check everything once. Damage does not stop it."""
    return _Verification(log, on_progress).run()


class _Verification:
    """One verification of a data directory."""

    def __init__(self, log: OfflineLog, on_progress: OnProgress) -> None:
        self._log = log
        self._disk: Disk = log.disk
        self._on_progress = on_progress
        self._notes: list[str] = []
        self._marks = dict(log.marks.marks)  # of folders that are not checked yet
        self._done_bytes = 0
        self._total_bytes = 0
        self._segments = self._blocks = self._messages = 0

    def run(self) -> Verified:
        journals = self._log.journals()
        # By folder: journals whose names are lost may have equal names.
        names = {journal.folder: self._log.segment_names(journal) for journal in journals}
        sizes = {name.path: self._size(name.path) for listed in names.values() for name in listed}
        self._total_bytes = sum(sizes.values())
        self._check_metadata()
        for journal in journals:
            self._note_leftovers(journal, names[journal.folder])
            for shard in journal.shards:
                self._check_catalogue(f"{journal.folder}/{shard}")
                self._check_state(f"{journal.folder}/{shard}")
                self._mark_of(f"{journal.folder}/{shard}")  # checked with the segments
                self._check_shard(
                    [name for name in names[journal.folder] if name.shard == shard], sizes
                )
        self._log.report_losses()
        report = self._log.report
        self._check_marks()
        return Verified(
            self._segments,
            self._blocks,
            self._messages,
            self._total_bytes,
            report.damage,
            report.damage_count,
            self._notes,
        )

    def _mark_of(self, folder: str) -> Mark | None:
        return self._marks.pop(folder.removeprefix(f"{self._log.directory}/"), None)

    def _size(self, path: str) -> int:
        try:
            with opened(self._disk, path) as file:
                return file.size()
        except FileNotFoundError:
            return 0

    # --- Metadata, catalogues, marks and subscription state ---

    def _check_metadata(self) -> None:
        log, marks = self._log, self._log.marks.marks
        has_marks_file = log.marks.is_present
        if log.format != FIRST_FORMAT:
            if log.format == SHARED_FORMAT:
                folder = f"{log.directory}/{paths.CLUSTER_FILE}"
                metadata = self._verified_file(folder)
            else:
                folder = f"{log.directory}/{paths.METADATA}"
                metadata = load_metadata(self._disk, log.directory, marks)
            is_there = metadata is not None
            if metadata is not None:
                self._take(metadata)
                if metadata.records and not has_marks_file and not log.is_live():
                    log.report.add_damage(missing_marks(log.directory))
        else:
            folder = f"{log.directory}/{paths.CATALOGUE}"
            former = load_format_one(self._disk, log.directory, marks)
            if former is not None:
                self._take(former)
                self._check_last_values(former, folder)
                has_marks = any(
                    isinstance(item, Opened) and item.has_marks for item in former.records
                )
                if has_marks and not has_marks_file and not log.is_live():
                    log.report.add_damage(missing_marks(log.directory))
            is_there = former is not None
        self._mark_of(folder)
        if not is_there:
            self._notes.append(f"{folder}: there is no metadata; purged messages cannot be told")

    def _verified_file(self, path: str) -> LoadedMetadata | None:
        try:
            return verify_file(path)
        except FileNotFoundError:
            self._log.report.add_damage(Damage(path, 0, 0, "missing, with all metadata"))
            return None

    def _check_catalogue(self, shard_folder: str) -> None:
        """Check the catalogue of a shard."""
        loaded = load_catalogue(
            self._disk, self._log.directory, shard_folder, self._log.marks.marks
        )
        folder = paths.catalogue_folder(shard_folder)
        self._mark_of(folder)
        if loaded is not None:
            self._take(loaded)
            self._check_last_values(loaded, folder)

    def _take(self, loaded: LoadedRecords[Any]) -> None:
        """Report what is damaged or torn in a journal of records."""
        self._log.report.add_damage(*loaded.damage)
        if loaded.torn is not None and not self._log.is_live():
            self._notes.append(torn_note(loaded.torn))

    def _check_last_values(self, loaded: LoadedRecords[Any], folder: str) -> None:
        for record in loaded.records:
            if isinstance(record, LastValue) and record.block:
                try:
                    Batch.unpack(record.block).messages()
                except MalformedError as error:
                    place = f"last value of {record.topic!r}[{record.partition}]: {error}"
                    self._log.report.add_damage(Damage(folder, 0, len(record.block), place))

    def _check_marks(self) -> None:
        """Report the marks that are left at the end: their folders are missing."""
        report, found = self._log.report, self._log.marks
        report.add_damage(*found.damage)
        if not self._log.is_live():
            self._notes += map(str, found.torn)
        for folder, mark in self._marks.items():
            report.add_damage(missing_file(f"{self._log.directory}/{folder}", mark))

    def _check_state(self, shard_folder: str) -> None:
        """Check a shard's subscription state; beside a broker, until two reads find the same damage."""
        mark = self._mark_of(paths.state_folder(shard_folder))
        loaded = read_state(self._disk, shard_folder, mark)
        for _ in range(_SCANS_MAX - 1):
            if loaded is None or not loaded.damage or not self._log.is_live():
                break
            former, loaded = loaded, read_state(self._disk, shard_folder, mark)
            if loaded is not None and loaded.damage == former.damage:
                break
        if loaded is not None:
            self._take(loaded)

    def _note_leftovers(self, journal: JournalInfo, names: list[SegmentName]) -> None:
        if self._log.is_live():
            return  # files come and go
        wanted = {name.path for name in names} | {name.index_path for name in names}
        for shard in journal.shards:
            folder = f"{journal.folder}/{shard}"
            wanted |= {paths.state_folder(folder), f"{folder}/{paths.LOSSES_FILE}"}
            wanted |= {paths.catalogue_folder(folder), f"{folder}/{paths.LOCK_FILE}"}
            listed = self._disk.list(folder)
            orphans = paths.orphaned_indexes(listed)  # reported as damage already
            for file_name in listed:
                if f"{folder}/{file_name}" not in wanted and file_name not in orphans:
                    self._notes.append(
                        f"{folder}/{file_name}: not in use; the next start removes it"
                    )

    # --- Segments ---

    def _check_shard(self, names: list[SegmentName], sizes: dict[str, int]) -> None:
        state = _ShardState()
        for name in names:
            is_last = name is names[-1]
            newest: SegmentName | None = name
            while newest is not None:
                try:
                    state = self._check_segment(newest, state, is_last=is_last)
                    break
                except FileNotFoundError:
                    newest = self._log.replacement(newest)
            self._done_bytes += sizes[name.path]
            self._on_progress(self._done_bytes, self._total_bytes)

    def _check_segment(
        self, name: SegmentName, state: _ShardState, *, is_last: bool
    ) -> _ShardState:
        """Check a segment; beside a broker, until two passes find the same: half a write looks like damage."""
        with opened(self._disk, name.path) as file:
            found, after = self._check_once(name, file, state, is_last=is_last)
            former: list[Damage] = []
            attempt = 1
            while (
                found.damage != former and is_last and self._log.is_live() and attempt < _SCANS_MAX
            ):
                former = found.damage
                found, after = self._check_once(name, file, state, is_last=is_last)
                attempt += 1
        self._segments += 1
        self._blocks += found.blocks
        self._messages += found.messages
        self._notes += found.notes
        self._log.report.add_damage(*found.damage)
        return after

    def _check_once(
        self, name: SegmentName, file: File, state: _ShardState, *, is_last: bool
    ) -> tuple[_SegmentFindings, _ShardState]:
        after = msgspec.structs.replace(state, next_offsets=dict(state.next_offsets))
        synced = self._log.synced_bytes(name)
        check = _SegmentCheck(self._disk, name, file, after, self._progress, synced)
        return check.run(is_last=is_last, is_live=self._log.is_live()), after

    def _progress(self, position: int) -> None:
        self._on_progress(self._done_bytes + position, self._total_bytes)


class _SegmentCheck:
    """One pass over one segment."""

    def __init__(
        self,
        disk: Disk,
        name: SegmentName,
        file: File,
        state: _ShardState,
        on_position: Callable[[int], None],
        synced: int,
    ) -> None:
        self._synced = synced  # bytes of it that were synced before the check
        self._disk = disk
        self._name = name
        self._file = file
        self._state = state
        self._on_position = on_position
        self._found = _SegmentFindings()

    def run(self, *, is_last: bool, is_live: bool) -> _SegmentFindings:
        name, file, found = self._name, self._file, self._found
        index_data = self._read_index(is_last=is_last, is_live=is_live)
        file_bytes = file.size()
        short = self._find_short(index_data, file_bytes)
        if short is not None:
            found.damage.append(short)
        if is_last and file_bytes < HEADER_BYTES and short is None and not self._synced:
            if not is_live:
                found.notes.append(
                    f"{name.path}:0: torn while it was made; nothing was stored in it"
                )
            return found
        self._check_header()
        covered, durable = self._covered_bytes(index_data, file_bytes)
        durable = max(durable, self._synced)
        scanner = segment.scanner(
            name.path, ScanWindow(file.read, file_bytes), search_bytes=SEARCH_BYTES, durable=durable
        )
        rebuilt = GrowingIndex(HEADER_BYTES)
        for unit in scanner:
            assert unit.content is not None
            self._check_block(unit.position, unit.size, unit.content)
            if unit.position < covered:
                add_block(rebuilt, unit, unit.content)
            self._on_position(unit.position + unit.size)
        scanned = scanner.result()
        if short is not None:
            # The lost end is reported, and the index is right about it.
            found.damage += scanned.damage
            return found
        self._add_scanned(scanned, is_last=is_last, is_live=is_live)
        is_damaged = any(bad.position < covered for bad in found.damage)
        if index_data is not None:
            self._compare(index_data, None if is_damaged else rebuilt)
        return found

    def _add(self, path: str, position: int, size: int, problem: str) -> None:
        self._found.damage.append(Damage(path, position, size, problem))

    def _check_header(self) -> None:
        name = self._name
        try:
            header = segment.decode_header(self._file.read(0, HEADER_BYTES), name.path)
        except CorruptionError as error:
            self._add(name.path, 0, HEADER_BYTES, error.problem)
            return
        for field, position, written, named in (
            ("shard", 4, header.shard, name.shard),
            ("number", 8, header.number, name.number),
            ("generation", 24, header.generation, name.generation),
        ):
            if written != named:
                self._add(
                    name.path, position, 8, f"header says {field} {written}, its name {named}"
                )

    def _read_index(self, *, is_last: bool, is_live: bool) -> bytes | None:
        try:
            with opened(self._disk, self._name.index_path) as file:
                return file.read(0, file.size())
        except FileNotFoundError:
            if not is_last and not is_live:
                self._found.notes.append(
                    f"{self._name.index_path}: missing; it is made anew when needed"
                )
            return None

    def _find_short(self, index_data: bytes | None, file_bytes: int) -> Damage | None:
        try:
            header = None if index_data is None else decode_header(index_data)
        except MalformedError:
            return None  # `_compare` reports it
        if header is None or header.generation != self._name.generation:
            return None
        if header.covered_bytes <= file_bytes:
            return None
        return short_segment(self._name.path, file_bytes, header.covered_bytes)

    def _covered_bytes(self, index_data: bytes | None, file_bytes: int) -> tuple[int, int]:
        """How many bytes of the segment to compare with its index, and how many the index vouches for."""
        try:
            header = None if index_data is None else decode_header(index_data)
        except MalformedError:
            return file_bytes, 0
        if header is None or header.covered_bytes > file_bytes:
            return file_bytes, 0
        return header.covered_bytes, header.covered_bytes

    def _check_block(self, position: int, size: int, stored: StoredBlock) -> None:
        head, state = stored.envelope, self._state
        problems = []
        try:
            columns = Batch(head, stored.body).columns
            self._found.messages += columns.count
        except MalformedError as error:
            problems.append(f"checksums match, but the body cannot be read: {error}")
        if head.shard != self._name.shard:
            problems.append(f"batch of shard {head.shard} in a segment of shard {self._name.shard}")
        if head.entry <= state.entry:
            problems.append(f"entry {head.entry} after entry {state.entry}")
        first_ns = min(head.column64(head.receive_times))
        if first_ns < state.time_ns:
            problems.append(f"receive time {first_ns} after {state.time_ns}")
        state.entry = max(state.entry, head.entry)
        state.time_ns = max(state.time_ns, *head.column64(head.receive_times))
        for topic, partition, base, count in zip(
            head.topics,
            head.column32(head.partitions),
            head.column64(head.base_offsets),
            head.column32(head.counts),
            strict=True,
        ):
            expected = state.next_offsets.get((topic, partition), 1)
            if base < expected:
                problems.append(
                    f"{topic!r}[{partition}] goes back to offset {base} from {expected}"
                )
            state.next_offsets[topic, partition] = max(expected, base + count)
        self._found.blocks += 1
        if problems:
            self._add(self._name.path, position, size, "; ".join(problems))

    def _add_scanned(self, scanned: Scanned, *, is_last: bool, is_live: bool) -> None:
        self._found.damage += scanned.damage
        torn = scanned.torn
        if torn is None or is_live:
            return
        if is_last:
            self._found.notes.append(torn_note(torn))
        else:
            self._found.damage.append(torn)

    def _compare(self, stored: bytes, rebuilt: GrowingIndex | None) -> None:
        """Compare the index with a rebuilt one; of a damaged segment, check the index's checksums alone."""
        path = self._name.index_path
        problem = None
        try:
            index = SealedIndex(stored)
            if index.header.generation != self._name.generation:
                problem = f"index of generation {index.header.generation}"
        except MalformedError as error:
            problem = str(error)
        position = 0
        if rebuilt is not None:
            expected = rebuilt.encode(self._name.generation)
            if stored == expected:
                return
            problem = problem or "index does not describe its segment"
            position = _first_difference(stored, expected)
        if problem is not None:
            problem += "; remove the file to have it made anew"
            self._add(path, position, len(stored) - position, problem)


def _first_difference(one: bytes, other: bytes) -> int:
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(
        np.frombuffer(one, np.uint8, shorter) != np.frombuffer(other, np.uint8, shorter)
    )
    return int(differing[0]) if len(differing) else shorter
