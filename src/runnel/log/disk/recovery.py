"""Opens a data directory: locks it, opens and mends its shards, and restores the state of the log.

Usually the catalogue knows everything but the content of each shard's last segment, which is scanned. Where the
catalogue is damaged or gone, the segments tell what it may have known: topics, and offsets that must not be used again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from typing import Final

import msgspec

from runnel.config import Keep
from runnel.errors import DiskFullError, FormatVersionError, SettingsError
from runnel.formats import block
from runnel.formats.envelope import BODY_BYTES_CEILING
from runnel.log.disk.journal_shards import Found, restore_shard_count
from runnel.log.disk.loss_recovery import LossRecovery
from runnel.log.disk.shard import DiskShard
from runnel.log.log import Recovered, ShardId
from runnel.log.losses.missing_segments import PartitionEnds
from runnel.log.metadata.catalogue import LoadedCatalogue, PartitionAt, Record
from runnel.log.metadata.catalogue_state import CatalogueState
from runnel.log.metadata.state_journal import StateJournals
from runnel.log.metadata.topic_table import Partition, Topic
from runnel.log.segments import paths
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.index import GrowingIndex
from runnel.log.segments.scan import Damage
from runnel.log.segments.segments import OpenedSegment, SegmentFolder, write_whole
from runnel.log.segments.synced_marks import (
    Mark,
    MarksFound,
    SyncedMarks,
    missing_file,
    missing_marks,
)
from runnel.platform.disk import Disk, DiskLock, FileAccess
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition
from runnel.topics.policies import FixedPolicy, Policies

FORMAT: Final = 1
# A plain body has at least 4 bytes per message. A compressed one may have almost none, but no more messages than this.
_DAMAGED_MESSAGES_MAX: Final = BODY_BYTES_CEILING // 4
_NAMES_SHOWN_MAX: Final = 3


class _FormatFile(msgspec.Struct):
    """The file `runnel.json`. `keeps_account`: every removal by retention is recorded beside the remaining segments."""

    format: int
    keeps_account: bool = False


def checked_directory(directory: str | PathLike[str]) -> str:
    """The path as text. An empty path is refused: with a file name added it would mean the root of the file system."""
    try:
        text = fspath(directory)
    except TypeError:
        raise SettingsError(f"data directory {directory!r}: a path is needed") from None
    if not isinstance(text, str) or not text.rstrip("/") or "\0" in text:
        raise SettingsError(f"data directory {text!r}: a path below the root is needed")
    return text.rstrip("/")


def lock_directory(disk: Disk, directory: str) -> DiskLock:
    """Make the directory, or check its format, and lock it for this process. Runs in a worker."""
    try:
        disk.make_directory(directory)
        _refuse_foreign(directory, disk.list(directory))
        lock = disk.lock(f"{directory}/{paths.LOCK_FILE}")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"no room to make the data directory {directory}: {error}"
            ) from error
        raise SettingsError(f"{directory} cannot be used as a data directory: {error}") from error
    path = f"{directory}/{paths.FORMAT_FILE}"
    try:
        if paths.FORMAT_FILE in disk.list(directory):
            check_format(disk, path)
        else:
            # A directory with journals but without this file may come from an older Runnel.
            is_new = paths.JOURNALS not in disk.list(directory)
            _write_format(disk, directory, keeps_account=is_new)
    except BaseException:
        lock.release()
        raise
    return lock


def _refuse_foreign(directory: str, names: Sequence[str]) -> None:
    """Refuse a directory with foreign files before anything is written: the path may be mistyped."""
    foreign = [] if paths.FORMAT_FILE in names else paths.foreign_names(names)
    if foreign:
        shown = ", ".join(repr(name) for name in foreign[:_NAMES_SHOWN_MAX])
        more = len(foreign) - _NAMES_SHOWN_MAX
        raise SettingsError(
            f"{directory} is not a data directory of Runnel: it holds {shown}"
            f"{f' and {more} more' if more > 0 else ''}, and no {paths.FORMAT_FILE}; name an empty directory, or one "
            "that does not exist yet (nothing was written)"
        )


def _write_format(disk: Disk, directory: str, *, keeps_account: bool) -> None:
    content = msgspec.json.encode(_FormatFile(FORMAT, keeps_account))
    write_whole(disk, f"{directory}/{paths.FORMAT_FILE}", content)
    disk.sync_directory(directory)


def keeps_account(disk: Disk, directory: str) -> bool:
    """Whether removals are recorded, so that a missing segment without such a record is a loss."""
    return check_format(disk, f"{directory}/{paths.FORMAT_FILE}").keeps_account


def keep_account(disk: Disk, directory: str) -> None:
    """State that removals are recorded from now on. An older Runnel ignores this. Runs in a worker."""
    if not keeps_account(disk, directory):
        _write_format(disk, directory, keeps_account=True)


def check_format(disk: Disk, path: str) -> _FormatFile:
    """FormatVersionError unless this Runnel can read the data directory."""
    file = disk.open(path, FileAccess.READ)
    try:
        found = msgspec.json.decode(file.read(0, 4096), type=_FormatFile)
    except msgspec.DecodeError as error:
        raise FormatVersionError(
            f"{path} does not say which format this directory has: {error}"
        ) from None
    finally:
        file.close()
    if found.format != FORMAT:
        raise FormatVersionError(
            f"{path}: the directory has format {found.format}, this Runnel reads format {FORMAT}; "
            "use the Runnel that wrote it, or a newer one"
        )
    return found


class Recovery:
    """Restores a log from the records of its catalogue and the files of its shards."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        files: OpenFiles,
        policies: Policies,
        state: CatalogueState,
        loaded: LoadedCatalogue,
        shard: Callable[[ShardId], DiskShard],
        states: StateJournals,
        marks: SyncedMarks,
    ) -> None:
        self._directory = directory
        self._disk = disk
        self._files = files
        self._policies = policies
        self._state = state
        self._shard = shard
        self._states = states
        self._marks = marks
        # If records behind it are lost, the last one left does not tell how the process ended.
        self._is_closed = state.is_closed and not loaded.damage
        self._was_clean = self._is_closed or not loaded.records
        # A damaged record at the end looks like a torn one, and the whole file may be missing.
        self.is_incomplete = bool(loaded.damage or loaded.torn or not loaded.records)
        self._torn = [loaded.torn] if loaded.torn else []
        self._damage = list(loaded.damage)
        self._known_damage: list[Damage] = []  # from earlier starts
        # If an older Runnel ran here last, it may have removed segments and the records of removals.
        is_older = bool(state.epoch) and not state.has_marks
        self._losses = LossRecovery(
            disk,
            keeps_account=keeps_account(disk, directory) and not is_older,
            is_closed=self._is_closed,
        )

    def judge_marks(self, found: MarksFound) -> None:
        """Report synced marks that are damaged, torn or gone."""
        self._damage += found.damage
        self._torn += found.torn
        if self._state.has_marks and not found.is_present:
            self._damage.append(missing_marks(self._directory))

    def find_shards(self) -> list[tuple[ShardId, list[OpenedSegment]]]:
        """Open every shard on disk and its state; mend a last segment that a crash cut. Runs in a worker."""
        recorded = {paths.folder_name(topic.policy.journal): topic for topic in self._state.topics}
        found: list[tuple[ShardId, list[OpenedSegment]]] = []
        root = f"{self._directory}/{paths.JOURNALS}"
        for name in self._disk.list(root):
            folder = f"{root}/{name}"
            children = self._disk.list(folder)
            path = f"{folder}/{paths.NAME_FILE}"
            if paths.NAME_FILE in children:
                with self._files.use(path, FileAccess.READ) as file:
                    journal = file.read(0, file.size()).decode(errors="replace")
            elif any(child.isdecimal() for child in children):
                journal = ""  # lost: the name file is written before the shards' folders
            else:
                continue  # a crash came before anything was stored in it
            if paths.folder_name(journal) != name:
                known = recorded.get(name)
                problem = "does not name this folder" if journal else "missing"
                journal = known.policy.journal if known else paths.journal_name(name)
                problem += f"; the folder is read as journal {journal!r}"
                self._damage.append(Damage(path, 0, 0, problem))
            of_journal: list[Found] = []
            for child in children:
                if child.isdecimal():
                    shard = SegmentFolder(self._disk, self._files, f"{folder}/{child}")
                    mark = self._marks.get(shard.folder) or Mark(0, 0)
                    opened = shard.open_all(is_clean=self._is_closed, synced=mark)
                    self._damage += shard.missing
                    self._damage += self._losses.read(ShardId(journal, int(child)), shard)
                    of_journal.append((ShardId(journal, int(child)), shard, opened))
            found += [(shard_id, opened) for shard_id, _, opened in of_journal]
            self._restore_shard_count(journal, folder, of_journal)
        for state in self._states.open_found([shard_id for shard_id, _ in found]):
            self._torn += [state.torn] if state.torn else []
            self._damage += state.damage
        self._damage += [missing_file(*gone) for gone in self._marks.orphans()]
        # The catalogue or a mark may know a shard whose folder is gone.
        there = {shard_id for shard_id, _ in found}
        gone = [*self._state.checkpoints, *self._marked_shards(recorded)]
        for each in dict.fromkeys(gone):
            if each not in there:
                found.append((each, []))
                if (self._state.topics.shard_count(each.journal) or 0) <= each.shard:
                    self._state.topics.restore_journal(each.journal, each.shard + 1)
        return found

    def _restore_shard_count(self, journal: str, folder: str, found: Sequence[Found]) -> None:
        """Shards of the journal that the catalogue does not know any more are told by its folder."""
        topics = self._state.topics
        recorded = topics.shard_count(journal)
        damage = restore_shard_count(self._disk, topics, journal, folder, found)
        self._damage += [] if damage is None else [damage]
        if recorded is not None and topics.shard_count(journal) != recorded:
            self.is_incomplete = True

    def _marked_shards(self, recorded: Mapping[str, Topic]) -> Iterator[ShardId]:
        """Shards that have a synced mark and no folder."""
        for path, _ in self._marks.orphans():
            journal, _, shard = path.removeprefix(f"{self._directory}/").rpartition("/")
            name = journal.removeprefix(f"{paths.JOURNALS}/")
            if shard.isdecimal() and "/" not in name:
                known = recorded.get(name)
                yield ShardId(
                    known.policy.journal if known else paths.journal_name(name), int(shard)
                )

    def load(self, found: Sequence[tuple[ShardId, list[OpenedSegment]]]) -> list[Record]:
        """Restore the shards. Returns the records to add to the catalogue."""
        news: list[Record] = []
        for shard_id, checkpoints in self._state.checkpoints.items():
            for checkpoint in checkpoints:
                self._shard(shard_id).restore(checkpoint)
        partitions = self._partitions_by_shard()
        for shard_id, opened in found:
            shard = self._shard(shard_id)
            shard.load(opened)
            recorded = self._state.checkpoints.get(shard_id, ())
            next_entry = max([checkpoint.next_entry for checkpoint in recorded], default=1)
            offsets = {part.key: part.next_offset for part in partitions.get(shard_id, ())}
            mark = self._marks.get(shard.losses.folder) or Mark(0, 0)
            self._known_damage += self._losses.locate_breaks(
                shard, opened, next_entry, offsets, mark
            )
            for item in opened:
                # The end of a full segment is recorded before the next segment begins. A copy made file by file may
                # have an older catalogue, which does not know later segments.
                if item.segment.growing is None and item.segment.last_entry >= next_entry:
                    self.is_incomplete = True
                shard.replay(item)
                if item.segment.growing is not None:
                    self._advance(shard_id, item.segment.growing.next_offsets().items())
            if self._losses.has_lost_end(shard_id):
                news += self._skip_lost_segment(shard, mark.end)
            elif opened and opened[-1].damage:
                news += self._skip_damaged_numbers(shard, opened[-1])
            self._torn += [item.torn for item in opened if item.torn]
            self._damage += [bad for item in opened for bad in item.damage]
        return news

    async def remember_losses(self, workers: Workers, shards: Iterable[DiskShard]) -> None:
        """Find the lost messages of broken shards, and store them for every later start."""
        broken = self._losses.broken()
        partitions = self._partitions_by_shard() if broken else {}
        for shard_id in broken:
            ends = {
                part.key: PartitionEnds(part.floor, part.next_offset)
                for part in partitions.get(shard_id, ())
                if self._state.topics.find(part.key[0]) is not None
            }
            self._damage += await workers.submit(
                self._losses.find_lost_messages, self._shard(shard_id), ends
            )
        for shard in shards:
            await shard.save_losses()
        with suppress(OSError):  # then later starts do not report missing segments as losses
            await workers.submit(keep_account, self._disk, self._directory)

    def _partitions_by_shard(self) -> dict[ShardId, list[Partition]]:
        """All partitions, in a single pass: there may be as many shards as topics."""
        found: dict[ShardId, list[Partition]] = {}
        for topic in self._state.topics:
            for part in topic.partitions:
                found.setdefault(part.shard, []).append(part)
        return found

    def _partitions_in(self, shard: ShardId) -> Iterator[Partition]:
        for topic in self._state.topics:
            for part in topic.partitions:
                if part.shard == shard:
                    yield part

    def _advance(self, shard: ShardId, next_offsets: Iterable[tuple[TopicPartition, int]]) -> None:
        for key, next_offset in next_offsets:
            self._partition_found(shard, key).advance(next_offset)

    def _partition_found(self, shard: ShardId, key: TopicPartition) -> Partition:
        """The partition of messages found in a segment; restored if the catalogue has lost it."""
        partition = self._state.topics.recorded_partition(*key)
        return self._restore(shard, key) if partition is None else partition

    def _restore(self, shard: ShardId, key: TopicPartition) -> Partition:
        topic, number = key
        rules = self._policies.for_topic(topic)
        fixed = FixedPolicy(
            keep=Keep.DISK, partitions=max(rules.partitions, number + 1), journal=shard.journal
        )
        self._state.topics.undelete(topic)
        restored = self._state.topics.restore(topic, self._policies.for_recorded(topic, fixed))
        return restored.partitions[number]

    def _skip_damaged_numbers(self, shard: DiskShard, last: OpenedSegment) -> list[Record]:
        """Skip the numbers that damaged bytes of the last segment used or may have used.

        Earlier segments do not matter: the catalogue knows where each of them ended.
        """
        growing = last.segment.growing
        if growing is None or not (last.lost or last.unknown):
            return []
        if last.unknown:
            if last.unknown[-1].block == growing.block_count():  # no block follows the damage
                shard.writer.skip_entries(last.unknown_bytes // block.HEADER_BYTES + 1)
            self._skip_offsets(shard.id, growing, last)
        return self._position_records(shard)

    def _skip_lost_segment(self, shard: DiskShard, lost_bytes: int) -> list[Record]:
        """Skip the numbers of a lost last segment: any partition may have had messages in it."""
        shard.writer.skip_entries(lost_bytes // block.HEADER_BYTES + 1)
        for part in self._partitions_in(shard.id):
            part.advance(part.next_offset + lost_bytes // 4 + _DAMAGED_MESSAGES_MAX)
        return self._position_records(shard)

    def _position_records(self, shard: DiskShard) -> list[Record]:
        """Records of the next entry of a shard and the next offsets of its partitions."""
        partitions = self._partitions_in(shard.id)
        return [
            shard.checkpoint(),
            *(PartitionAt(*part.key, part.next_offset, part.floor) for part in partitions),
        ]

    def _skip_offsets(self, shard: ShardId, growing: GrowingIndex, last: OpenedSegment) -> None:
        """Skip offsets of every partition without a message behind the damage: it may have had some there."""
        begin = max(item.damage.position for item in last.unknown)
        skipped = last.unknown_bytes // 4 + _DAMAGED_MESSAGES_MAX
        for part in self._partitions_in(shard):
            if growing.last_position(part.key) < begin:
                part.advance(part.next_offset + skipped)

    async def reconcile(self, shards: Iterable[DiskShard]) -> None:
        """Restore from all segments what an incomplete catalogue may lack."""
        for shard in shards:
            for key, next_offset in await shard.next_offsets():
                partition = self._partition_found(shard.id, key)
                if next_offset > partition.floor and self._state.topics.find(key[0]) is None:
                    # Messages behind the end of a deleted topic: it was made again, and the record of that is lost.
                    partition = self._restore(shard.id, key)
                partition.advance(next_offset)

    def outcome(self) -> Recovered:
        differences = [
            difference
            for topic in self._state.topics
            if not topic.is_deleted
            for difference in self._policies.differences(topic.name, topic.policy.fixed)
        ]
        is_whole = not self._torn and not self._damage
        # Of two reports about one place the later one knows more.
        damage = {(bad.path, bad.position): bad for bad in (*self._damage, *self._known_damage)}
        return Recovered(
            self._was_clean and is_whole,
            [str(torn) for torn in self._torn],
            [str(bad) for bad in damage.values()],
            differences,
        )
