"""Reads a data directory without a broker: its journals, segments, topics, losses, and selected messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import msgspec

from runnel.errors import ClientFault, CorruptionError, MalformedError
from runnel.formats import block as blocks
from runnel.formats.batch import Batch
from runnel.log.log import Cursor, ShardId
from runnel.log.losses.missing_segments import (
    UNKNOWN_ENTRY,
    SegmentSpan,
    find_breaks,
    find_lost_end,
)
from runnel.log.losses.shard_losses import LossesFile, is_mended, read_losses
from runnel.log.reading.block_plan import PlannedBlock, Stretch, plan_blocks, stretches
from runnel.log.reading.catalogue_view import CatalogueReader, CatalogueView
from runnel.log.reading.open_segment import (
    OpenSegment,
    SegmentInfo,
    SegmentName,
    info_of,
    open_segment,
    opened,
    sealed_info,
)
from runnel.log.reading.report import Report
from runnel.log.reading.selection import Matcher, Selection
from runnel.log.reading.summaries import TopicInfo, TopicSummaries
from runnel.log.segments import paths
from runnel.log.segments.format_file import FIRST_FORMAT, SHARED_FORMAT, read_format
from runnel.log.segments.index import StaleIndexError
from runnel.log.segments.scan import Damage
from runnel.log.segments.segment import HEADER_BYTES, decode_header
from runnel.log.segments.segments import PIECE_BYTES
from runnel.log.segments.shards_file import read_shards
from runnel.log.segments.synced_marks import Mark, missing_file, read_marks
from runnel.platform.disk import Disk, File, RealDisk
from runnel.platform.lock_holder import LockHolder, find_lock_holder


class JournalInfo(msgspec.Struct, frozen=True):
    """A journal, its folder, and its shards that have a folder."""

    name: str
    folder: str
    shards: tuple[int, ...]


class OfflineLog:
    """A data directory, or a copy of one, open for reading. There is nothing to close.

    Metadata and catalogues are read once, when first needed. Each call lists the segments anew, and a scan reads
    those that existed when it began. Damage is skipped, and listed in `report`.
    """

    def __init__(
        self,
        directory: str,
        *,
        disk: Disk | None = None,
        find_holder: Callable[[str], LockHolder | None] = find_lock_holder,
    ) -> None:
        """ClientFault if this is no data directory, FormatVersionError if a newer Runnel wrote it."""
        if not directory:
            # It comes from an unset $DIR, which does not mean the current directory.
            raise ClientFault("the data directory is an empty text")
        self.directory = directory.rstrip("/") or "/"
        self.disk = RealDisk() if disk is None else disk
        self.report = Report()
        self._find_holder = find_holder
        if paths.FORMAT_FILE not in self.disk.list(self.directory):
            raise ClientFault(
                f"{directory} is not a data directory of Runnel: there is no {paths.FORMAT_FILE} in it"
            )
        found = read_format(self.disk, self.directory)
        self.format = found.format
        self._keeps_account = found.keeps_account
        self._was_live = self.holder() is not None
        self.marks = read_marks(self.disk, self.directory)  # before the files that they describe
        if self.format != FIRST_FORMAT:
            self.marks.marks.pop(paths.CATALOGUE, None)  # of format 1, before its migration ended
        if self.format == SHARED_FORMAT:
            self.marks.marks.pop(paths.METADATA, None)  # of format 2, in the same way

    def holder(self) -> LockHolder | None:
        """The process that has the directory open now."""
        return self._find_holder(f"{self.directory}/{paths.LOCK_FILE}")

    def is_live(self) -> bool:
        """Whether a process has it open now, or had when this object was made."""
        return self._was_live or self.holder() is not None

    # --- Contents ---

    @cached_property
    def catalogued(self) -> CatalogueView:
        """The metadata, and the catalogues of the shards, read once."""
        shards = [
            (ShardId(journal.name, shard), f"{journal.folder}/{shard}")
            for journal in self.journals()
            for shard in journal.shards
        ]
        reader = CatalogueReader(self.disk, self.directory, shards, self.marks.marks, self.report)
        return reader.read_format_one() if self.format == FIRST_FORMAT else reader.read()

    def cursors(self) -> list[Cursor]:
        """The named cursors."""
        return self.catalogued.cursors

    def journals(self) -> list[JournalInfo]:
        """The journals, by name."""
        found = []
        root = f"{self.directory}/{paths.JOURNALS}"
        for folder_name in self.disk.list(root):
            folder = f"{root}/{folder_name}"
            children = self.disk.list(folder)
            shards = tuple(sorted(int(child) for child in children if child.isdecimal()))
            if paths.NAME_FILE not in children and not self._has_segments(folder, shards):
                continue  # a crash before anything was stored in it
            found.append(JournalInfo(self._journal_name(folder, folder_name), folder, shards))
        return sorted(found, key=lambda journal: (journal.name, journal.folder))

    def _report_shard_count(self, journal: JournalInfo) -> None:
        """Report a file that does not say how many shards the journal has."""
        written = read_shards(self.disk, journal.folder)
        recorded = self.catalogued.shard_counts.get(journal.name)
        is_missed = written is None and (recorded is not None or max(journal.shards, default=0) > 0)
        if journal.shards and (is_missed or (recorded is not None and written != recorded)):
            known = "" if recorded is None else f"; the metadata says {recorded}"
            problem = f"does not say how many shards the journal has{known}"
            self.report.add_damage(Damage(f"{journal.folder}/{paths.SHARDS_FILE}", 0, 0, problem))

    def _has_segments(self, folder: str, shards: Sequence[int]) -> bool:
        return any(
            paths.segment_number(file_name)
            for shard in shards
            for file_name in self.disk.list(f"{folder}/{shard}")
        )

    def _journal_name(self, folder: str, folder_name: str) -> str:
        """The name in the journal's file; if that is lost, the name that its folder was made from."""
        path = f"{folder}/{paths.NAME_FILE}"
        fallback = paths.journal_name(folder_name)
        try:
            with opened(self.disk, path) as file:
                name = file.read(0, file.size()).decode(errors="replace")
        except FileNotFoundError:
            problem = f"missing; the folder is read as journal {fallback!r}"
            self.report.add_damage(Damage(path, 0, 0, problem))
            return fallback
        if paths.folder_name(name) != folder_name:
            self.report.add_damage(Damage(path, 0, len(name), "does not name this folder"))
            return fallback
        return name

    def segment_names(self, journal: JournalInfo) -> list[SegmentName]:
        """The segments by shard and number. Of each number the highest generation counts."""
        names = []
        for shard in journal.shards:
            folder = f"{journal.folder}/{shard}"
            newest: dict[int, int] = {}
            listed = self.disk.list(folder)
            for file_name in listed:
                numbered = paths.segment_number(file_name)
                if numbered is not None:
                    newest[numbered[0]] = max(newest.get(numbered[0], 0), numbered[1])
            self._report_missing(folder, listed)
            names += [
                SegmentName(
                    journal.name,
                    shard,
                    number,
                    newest[number],
                    paths.segment_path(folder, number, newest[number]),
                )
                for number in sorted(newest)
            ]
        return names

    def _report_missing(self, folder: str, listed: Sequence[str]) -> None:
        """Report indexes without a segment: retention removes the index first, so that segment is lost."""
        if not paths.orphaned_indexes(listed):
            return
        # A broker may have removed both while the folder was listed; then the index is gone by now.
        for file_name in paths.orphaned_indexes(self.disk.list(folder)):
            if file_name in listed:
                path = f"{folder}/{paths.segment_of_index(file_name)}"
                self.report.add_damage(Damage(path, 0, 0, "segment is missing, its index is there"))

    def segments(self, journal: JournalInfo) -> list[SegmentInfo]:
        """The segments, by the headers of their indexes. Segments that are not sealed are scanned."""
        found = []
        for name, is_last in self._shard_ends(self.segment_names(journal)):
            info = self._segment_info(name, is_last=is_last)
            if info is not None:
                found.append(info)
        return found

    def _segment_info(self, name: SegmentName, *, is_last: bool) -> SegmentInfo | None:
        newest: SegmentName | None = name
        while newest is not None:
            try:
                info = sealed_info(self.disk, newest)
                if info is not None:
                    return info
                with self._open(newest, is_last=is_last) as segment:
                    return info_of(segment)
            except FileNotFoundError:
                newest = self.replacement(newest)
        return None

    @staticmethod
    def _shard_ends(names: Sequence[SegmentName]) -> list[tuple[SegmentName, bool]]:
        """Each segment, and whether it is the last of its shard, which a broker may be writing."""
        last = {name.shard: name.number for name in names}
        return [(name, last[name.shard] == name.number) for name in names]

    def replacement(self, gone: SegmentName) -> SegmentName | None:
        """The segment of a higher generation that replaced this one; None if retention removed it."""
        folder = gone.path.rpartition("/")[0]
        generations = [
            numbered[1]
            for file_name in self.disk.list(folder)
            if (numbered := paths.segment_number(file_name)) and numbered[0] == gone.number
        ]
        if not generations or max(generations) <= gone.generation:
            self.report.add_gone(gone.path)
            return None
        path = paths.segment_path(folder, gone.number, max(generations))
        return msgspec.structs.replace(gone, generation=max(generations), path=path)

    def _open(
        self, name: SegmentName, *, is_last: bool, trust_index: bool = True
    ) -> AbstractContextManager[OpenSegment]:
        return open_segment(
            self.disk,
            name,
            self.report,
            is_last=is_last,
            is_live=self.is_live,
            trust_index=trust_index,
            synced=self.synced_bytes(name),
        )

    def synced_bytes(self, name: SegmentName) -> int:
        """How many bytes of a segment are known to be synced, by the mark of its shard."""
        mark = self._mark(name.path.rpartition("/")[0])
        return mark.end if mark.number == name.number and not name.generation else 0

    def _mark(self, shard_folder: str) -> Mark:
        """The synced mark of a shard's folder; without one, as if nothing was stored."""
        name = shard_folder.removeprefix(f"{self.directory}/")
        return self.marks.marks.get(name, Mark(0, 0))

    def topics(self, patterns: Sequence[str] = ("*", "!*")) -> list[TopicInfo]:
        """Topics by name: those with messages, and empty ones that the catalogue knows."""
        matcher = self._matcher(Selection(topics=tuple(patterns)))
        summaries = TopicSummaries(matcher, self.catalogued)
        self.report_losses(matcher)
        for name, is_last in self._all_segments():
            for segment in self._each_opened(name, is_last=is_last):
                summaries.add(name.journal, segment.index)
        return summaries.topics()

    def _all_segments(self) -> list[tuple[SegmentName, bool]]:
        return [
            found
            for journal in self.journals()
            for found in self._shard_ends(self.segment_names(journal))
        ]

    def _each_opened(self, name: SegmentName, *, is_last: bool) -> Iterator[OpenSegment]:
        """Open the segment, or its replacement; yields nothing if it is gone."""
        newest: SegmentName | None = name
        while newest is not None:
            try:
                with self._open(newest, is_last=is_last) as segment:
                    yield segment
                return
            except FileNotFoundError:
                newest = self.replacement(newest)

    # --- Losses ---

    def report_losses(self, matcher: Matcher | None = None) -> None:
        """Report what the shards have lost, as a broker does; with a matcher, losses of wanted messages only."""
        seen: set[ShardId] = set()
        for journal in self.journals():
            self._report_shard_count(journal)
            names = self.segment_names(journal)
            for shard in journal.shards:
                shard_id = ShardId(journal.name, shard)
                seen.add(shard_id)
                folder = f"{journal.folder}/{shard}"
                of_shard = [name for name in names if name.shard == shard]
                # Read after the names: a broker records a removal before it removes the segment.
                remembered, damage = read_losses(self.disk, folder)
                if damage is not None:
                    self.report.add_damage(damage)
                self._report_remembered(folder, remembered, matcher)
                self._report_breaks(shard_id, folder, of_shard, remembered)
        folders = {paths.shard_folder(self.directory, each.journal, each.shard) for each in seen}
        for shard_id in self.catalogued.next_entries.keys() - seen:
            folder = paths.shard_folder(self.directory, shard_id.journal, shard_id.shard)
            self._report_breaks(shard_id, folder, [], LossesFile())
            folders.add(folder)
        for name, mark in self.marks.marks.items():
            folder = f"{self.directory}/{name}"
            is_shard = name.rpartition("/")[2].isdecimal() and name.startswith(paths.JOURNALS)
            if is_shard and folder not in folders:
                self.report.add_damage(missing_file(folder, mark))

    def _report_remembered(
        self, folder: str, remembered: LossesFile, matcher: Matcher | None
    ) -> None:
        for loss in remembered.losses:
            is_wanted = matcher is None or any(
                matcher.wants_any((run.topic, run.partition), run.first_offset, run.next_offset)
                for run in loss.runs
            )
            # Without runs and entries, the index reports the loss. With entries only, its messages are not known.
            is_wanted = is_wanted or bool(loss.next_entry and not loss.runs)
            if is_wanted and not is_mended(self.disk, folder, loss):
                self.report.add_damage(loss.damage(folder))

    def _report_breaks(
        self,
        shard_id: ShardId,
        folder: str,
        names: Sequence[SegmentName],
        remembered: LossesFile,
    ) -> None:
        if not self._keeps_account:
            return
        next_entry = self.catalogued.next_entries.get(shard_id, 1)
        spans = self._spans(names)
        lost_end = None
        if shard_id not in self.catalogued.closed:
            lost_end = find_lost_end(spans, remembered, *self._mark(folder))
        breaks = find_breaks(spans, remembered, 0 if lost_end else next_entry)
        for found in (*breaks, *([] if lost_end is None else [lost_end])):
            self.report.add_damage(found.loss(()).damage(folder))

    def _spans(self, names: Sequence[SegmentName]) -> list[SegmentSpan]:
        """The spans by headers alone. The end of an unsealed segment is left open: a read of it finds the end."""
        spans: list[SegmentSpan] = []
        for name in reversed(names):
            following = spans[-1].first_entry if spans else UNKNOWN_ENTRY
            try:
                with opened(self.disk, name.path) as file:
                    header = file.read(0, HEADER_BYTES)
                info = sealed_info(self.disk, name)
            except FileNotFoundError:
                continue  # retention has removed it
            try:
                first_entry = decode_header(header, name.path).first_entry
            except CorruptionError:
                first_entry = 0
            next_entry = following if info is None else info.last_entry + 1
            if info is not None and not info.entries:
                next_entry = first_entry
            spans.append(
                SegmentSpan(
                    name.number,
                    name.generation,
                    first_entry,
                    next_entry,
                    0 if info is None else info.used_bytes,
                    0 if info is None else info.last_time_ns,
                )
            )
        return spans[::-1]

    # --- Messages ---

    def _matcher(self, selection: Selection) -> Matcher:
        return Matcher(selection, self.catalogued.floor_of)

    def scan(self, selection: Selection | None = None) -> Iterator[Batch]:
        """Every batch with wanted messages, cut to them: shard by shard, each in stored order."""
        matcher = self._matcher(selection or Selection())
        self.report_losses(matcher)
        for name, is_last in self._all_segments():
            yield from self._scan_segment(name, matcher, 0, None, is_last=is_last)

    def plan(self, selection: Selection | None = None) -> Iterator[Stretch]:
        """The reads that a scan would do, in its order. Each can be sent to another process and `read` there."""
        matcher = self._matcher(selection or Selection())
        self.report_losses(matcher)
        for name, is_last in self._all_segments():
            if self._is_outside(name, matcher):
                continue
            for segment in self._each_opened(name, is_last=is_last):
                yield from stretches(segment.name, plan_blocks(segment.index, matcher, 0, None))

    def read(self, stretch: Stretch, selection: Selection | None = None) -> Iterator[Batch]:
        """The wanted messages of one piece of a plan, even if its segment was replaced since."""
        matcher = self._matcher(selection or Selection())
        begin_entry, end_entry = stretch.blocks[0].entry, stretch.blocks[-1].entry + 1
        segment: SegmentName | None = stretch.segment
        try:
            with opened(self.disk, stretch.path) as file:
                for entry, batch in self._read_stretch(file, stretch, matcher, is_certain=False):
                    begin_entry = entry + 1
                    yield batch
                return
        except FileNotFoundError:
            segment = self.replacement(stretch.segment)
        except StaleIndexError:
            pass
        if segment is not None:
            # Opened like the last segment, so that nothing is served that may not be synced.
            yield from self._scan_segment(segment, matcher, begin_entry, end_entry, is_last=True)

    def _is_outside(self, name: SegmentName, matcher: Matcher) -> bool:
        """Whether the times in a sealed segment's header exclude all of its messages."""
        if matcher.since_ns is None and matcher.until_ns is None:
            return False
        try:
            info = sealed_info(self.disk, name)
        except FileNotFoundError:
            return False  # opening it finds its replacement
        return info is not None and not matcher.may_want(info.first_time_ns, info.last_time_ns)

    def _scan_segment(
        self,
        name: SegmentName,
        matcher: Matcher,
        begin_entry: int,
        end_entry: int | None,
        *,
        is_last: bool,
    ) -> Iterator[Batch]:
        segment: SegmentName | None = name
        trust_index = True
        while segment is not None:
            if self._is_outside(segment, matcher):
                return
            try:
                with self._open(segment, is_last=is_last, trust_index=trust_index) as found:
                    blocks = plan_blocks(found.index, matcher, begin_entry, end_entry)
                    for stretch in stretches(segment, blocks):
                        for entry, batch in self._read_stretch(
                            found.file, stretch, matcher, is_certain=not trust_index
                        ):
                            begin_entry = entry + 1
                            yield batch
                return
            except FileNotFoundError:
                segment = self.replacement(segment)
            except StaleIndexError:
                if not trust_index:
                    raise
                trust_index = False

    def _read_stretch(
        self, file: File, stretch: Stretch, matcher: Matcher, *, is_certain: bool
    ) -> Iterator[tuple[int, Batch]]:
        """Entries, and the wanted messages of each.

        An unreadable block may be the fault of an index that is not certain: then StaleIndexError, and the
        caller scans the segment. Otherwise the block is damaged.
        """
        for piece in stretch.pieces(PIECE_BYTES):
            data = memoryview(file.read(piece.position, piece.size))
            for block in piece.blocks:
                try:
                    head, body, _ = blocks.unpack(data, block.position - piece.position)
                    if not head.is_stored:
                        raise MalformedError("envelope base_offsets", "missing in a stored block")
                except MalformedError as error:
                    if not is_certain:
                        raise StaleIndexError from None
                    self._report_block(stretch, block, error)
                    continue
                if head.entry != block.entry:
                    raise StaleIndexError
                try:
                    wanted = matcher.select(Batch(head, body), block.runs)
                except MalformedError as error:
                    # Its checksums are right: the publisher sent columns that make no sense.
                    self._report_block(stretch, block, error)
                    continue
                if wanted is not None:
                    yield block.entry, wanted

    def _report_block(self, stretch: Stretch, block: PlannedBlock, error: MalformedError) -> None:
        self.report.add_damage(Damage(stretch.path, block.position, block.size, str(error)))
