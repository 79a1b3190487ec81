"""Finds the shards of a data directory when it is opened, and what belongs to none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from runnel.log.disk.journal_shards import restore_shard_count
from runnel.log.disk.recovery import FoundShard, Recovery
from runnel.log.log import ShardId
from runnel.log.metadata.record_journal import LoadedRecords
from runnel.log.metadata.recorded_shard import RecordedShard
from runnel.log.metadata.topic_table import Topic, TopicTable
from runnel.log.segments import paths
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.scan import Damage
from runnel.log.segments.synced_marks import (
    Mark,
    MarksFound,
    SyncedMarks,
    missing_file,
    missing_marks,
)
from runnel.platform.disk import Disk, FileAccess

# What format 1 knew of a shard; None: the shard's catalogue knows it.
Known = Callable[[ShardId], RecordedShard | None]


class DirectoryRecovery:
    """Adds to `recovery` what is found in the folders of journals."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        files: OpenFiles,
        topics: TopicTable,
        marks: SyncedMarks,
        recovery: Recovery,
    ) -> None:
        self._directory = directory
        self._disk = disk
        self._files = files
        self._topics = topics
        self._marks = marks
        self._recovery = recovery

    def judge_metadata(
        self, loaded: LoadedRecords[Any], marks: MarksFound, *, is_closed: bool, has_marks: bool
    ) -> None:
        """Take in how the records of metadata, and the synced marks, were found."""
        recovery = self._recovery
        recovery.was_clean = is_closed or not loaded.records
        # A damaged record at the end looks like a torn one, and the whole file may be missing.
        recovery.are_topics_incomplete = bool(loaded.damage or loaded.torn or not loaded.records)
        recovery.torn += [*([loaded.torn] if loaded.torn else []), *marks.torn]
        recovery.damage += [*loaded.damage, *marks.damage]
        if has_marks and not marks.is_present:
            recovery.damage.append(missing_marks(self._directory))

    def find(self, known: Known, known_shards: Iterable[ShardId]) -> list[FoundShard]:
        """Open every shard on disk; add those that only `known_shards` or a synced mark know. Runs in a worker."""
        recorded = {paths.folder_name(topic.policy.journal): topic for topic in self._topics}
        recovery = self._recovery
        found: list[FoundShard] = []
        root = f"{self._directory}/{paths.JOURNALS}"
        for name in self._disk.list(root):
            folder = f"{root}/{name}"
            children = self._disk.list(folder)
            shards = [int(child) for child in children if child.isdecimal()]
            if paths.NAME_FILE not in children and not shards:
                continue  # a crash came before anything was stored in it
            journal = self._journal_name(name, folder, children, recorded)
            of_journal = [
                recovery.read(
                    ShardId(journal, shard), f"{folder}/{shard}", known(ShardId(journal, shard))
                )
                for shard in shards
            ]
            found += of_journal
            self._restore_shard_count(journal, folder, of_journal)
        # A mark or an old catalogue may know a shard whose folder is gone.
        there = {each.id for each in found}
        gone = self._marks.orphans()
        recovery.damage += [missing_file(*each) for each in gone]
        for shard_id in dict.fromkeys([*known_shards, *self._marked_shards(gone, recorded)]):
            if shard_id not in there:
                path = paths.shard_folder(self._directory, shard_id.journal, shard_id.shard)
                found.append(recovery.read(shard_id, path, known(shard_id)))
                if (self._topics.shard_count(shard_id.journal) or 0) <= shard_id.shard:
                    self._topics.restore_journal(shard_id.journal, shard_id.shard + 1)
        return found

    def _journal_name(
        self, name: str, folder: str, children: Iterable[str], recorded: Mapping[str, Topic]
    ) -> str:
        """The journal of a folder: by its name file, which is written before the shards' folders."""
        path = f"{folder}/{paths.NAME_FILE}"
        journal = ""
        if paths.NAME_FILE in children:
            with self._files.use(path, FileAccess.READ) as file:
                journal = file.read(0, file.size()).decode(errors="replace")
        if paths.folder_name(journal) == name:
            return journal
        problem = "does not name this folder" if journal else "missing"
        known = recorded.get(name)
        journal = known.policy.journal if known else paths.journal_name(name)
        problem += f"; the folder is read as journal {journal!r}"
        self._recovery.damage.append(Damage(path, 0, 0, problem))
        return journal

    def _restore_shard_count(self, journal: str, folder: str, found: list[FoundShard]) -> None:
        """Shards of the journal that the metadata does not know any more are told by its folder."""
        recorded = self._topics.shard_count(journal)
        damage = restore_shard_count(self._disk, self._topics, journal, folder, found)
        self._recovery.damage += [] if damage is None else [damage]
        if recorded is not None and self._topics.shard_count(journal) != recorded:
            self._recovery.are_topics_incomplete = True

    def _marked_shards(
        self, gone: Iterable[tuple[str, Mark]], recorded: Mapping[str, Topic]
    ) -> Iterator[ShardId]:
        """Shards that have a synced mark and no folder."""
        for path, _ in gone:
            journal, _, shard = path.removeprefix(f"{self._directory}/").rpartition("/")
            name = journal.removeprefix(f"{paths.JOURNALS}/")
            if shard.isdecimal() and "/" not in name:
                known = recorded.get(name)
                yield ShardId(
                    known.policy.journal if known else paths.journal_name(name), int(shard)
                )
