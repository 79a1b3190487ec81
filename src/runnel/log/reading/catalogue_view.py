"""The metadata and the shards' catalogues of a directory of any format, read while a broker may be writing them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from runnel.config import LimitSettings
from runnel.log.log import Cursor, ShardId
from runnel.log.metadata.catalogue import (
    LoadedCatalogue,
    LoadedMetadata,
    read_catalogue,
    read_format_one,
    read_metadata,
)
from runnel.log.metadata.format_one import FormatOne
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.metadata_state import MetadataState
from runnel.log.metadata.record_journal import LoadedRecords
from runnel.log.metadata.recorded_shard import RecordedShard
from runnel.log.metadata.records import Record
from runnel.log.metadata.sqlite.offline import read_file
from runnel.log.metadata.topic_table import Partition, Topic
from runnel.log.reading.report import Report
from runnel.log.segments import paths
from runnel.log.segments.format_file import SHARED_FORMAT, read_format
from runnel.log.segments.synced_marks import Mark
from runnel.platform.disk import Disk
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Policies

_ATTEMPTS: Final = 4
_UNLIMITED: Final = 2**62  # the broker that wrote it kept to the limits
_LIMITS: Final = LimitSettings(
    topics_max=_UNLIMITED, cursors_max=_UNLIMITED, durable_subscriptions_max=_UNLIMITED
)
# No rules: what they add to a recorded policy does not matter here.
_POLICIES: Final = Policies()
_ALL_HIDDEN: Final = 2**63 - 1

R = TypeVar("R")


class CatalogueView(msgspec.Struct, frozen=True):
    """The topics by name, deleted ones included; the cursors; and what is recorded of the shards."""

    topics: dict[str, Topic]
    cursors: list[Cursor]
    is_present: bool  # there is metadata
    was_closed: bool  # all of it, in good order
    epochs: dict[ShardId, int]  # the newest recorded
    closed: set[ShardId]  # in good order
    next_entries: dict[ShardId, int]  # of each shard, when it was last recorded
    shard_counts: dict[str, int]  # of each journal with several shards

    def floor_of(self, key: TopicPartition) -> int | None:
        """The first offset that is not hidden; None if the topic was deleted.

        A topic that is not known was made after the metadata was read, or the metadata is lost: either way none of its
        messages is known to be hidden.
        """
        topic = self.topics.get(key[0])
        if topic is None:
            return 1
        if topic.is_deleted:
            return None
        return topic.partitions[key[1]].floor if key[1] < len(topic.partitions) else 1


class CatalogueReader:
    """Reads them once for a view; damage goes to the report. `shards`: the folders of shards that there are."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        shards: Iterable[tuple[ShardId, str]],
        marks: Mapping[str, Mark],
        report: Report,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._shards = list(shards)
        self._marks = marks
        self._report = report
        self._tables = LogTables(_LIMITS, _POLICIES, lambda _: None)
        self._state = MetadataState(_POLICIES, self._tables)

    def read_format_one(self) -> CatalogueView:
        loaded = load_format_one(self._disk, self._directory, self._marks)
        if loaded is None:
            return self._view({}, is_present=False)
        self._report.add_damage(*loaded.damage)
        former = FormatOne(self._state, self._tables)
        former.apply_all(loaded.records)
        is_closed = self._state.is_closed
        recorded = former.recorded(is_closed=is_closed)
        for shard, _ in self._shards:
            recorded.setdefault(shard, RecordedShard(self._state.epoch, is_closed))
        return self._view(recorded, is_present=bool(loaded.records))

    def read(self) -> CatalogueView:
        """Without metadata no topic is known, and no message hidden."""
        loaded = load_metadata(self._disk, self._directory, self._marks)
        if loaded is not None:
            self._report.add_damage(*loaded.damage)
            self._state.apply_all(loaded.records)
        found: dict[ShardId, RecordedShard] = {}
        damaged: set[ShardId] = set()
        for shard, folder in self._shards:
            catalogue = load_catalogue(self._disk, self._directory, folder, self._marks)
            if catalogue is not None:
                self._report.add_damage(*catalogue.damage)
                found[shard] = RecordedShard.of(catalogue.records)
                if catalogue.damage:
                    damaged.add(shard)
        self._put_numbers(found, damaged)
        return self._view(found, is_present=loaded is not None and bool(loaded.records))

    def _put_numbers(
        self, found: Mapping[ShardId, RecordedShard], damaged: Container[ShardId]
    ) -> None:
        topics = self._tables.topics

        def partition_of(key: TopicPartition) -> Partition:
            unknown = Partition(
                key, self._shards[0][0]
            )  # of a topic that the metadata does not have
            return topics.recorded_partition(*key) or unknown

        for recorded in found.values():
            recorded.apply_numbers(partition_of)
        for topic in topics:
            for partition in topic.partitions if topic.generation > 1 else ():
                of_shard = found.get(partition.shard)
                if of_shard is None or partition.shard in damaged:
                    continue
                if of_shard.generations.get(partition.key, 1) < topic.generation:
                    partition.floor = _ALL_HIDDEN  # the shard has no message of this topic yet

    def _view(
        self, recorded: Mapping[ShardId, RecordedShard], *, is_present: bool
    ) -> CatalogueView:
        tables = self._tables
        journals = {topic.policy.journal for topic in tables.topics}
        counts = {journal: tables.topics.shard_count(journal) or 1 for journal in journals}
        return CatalogueView(
            {topic.name: topic for topic in tables.topics},
            sorted(tables.cursors.all(), key=lambda cursor: cursor.name),
            is_present,
            self._state.is_closed and all(each.is_closed for each in recorded.values()),
            {shard: each.epoch for shard, each in recorded.items()},
            {shard for shard, each in recorded.items() if each.is_closed and each.epoch},
            {shard: each.next_entry for shard, each in recorded.items() if each.checkpoints},
            {journal: count for journal, count in counts.items() if count > 1},
        )


def load_metadata(disk: Disk, directory: str, marks: Mapping[str, Mark]) -> LoadedMetadata | None:
    """Load the newest file of metadata; None if there is none."""
    if read_format(disk, directory).format == SHARED_FORMAT:
        try:
            return read_file(f"{directory}/{paths.CLUSTER_FILE}")
        except FileNotFoundError:
            return None
    return _load_settled(lambda: read_metadata(disk, directory, marks.get(paths.METADATA)))


def load_catalogue(
    disk: Disk, directory: str, shard_folder: str, marks: Mapping[str, Mark]
) -> LoadedCatalogue | None:
    """Load the newest catalogue file of a shard; None if there is none."""
    name = paths.catalogue_folder(shard_folder).removeprefix(f"{directory}/")
    return _load_settled(lambda: read_catalogue(disk, shard_folder, marks.get(name)))


def load_format_one(
    disk: Disk, directory: str, marks: Mapping[str, Mark]
) -> LoadedRecords[Record] | None:
    """Load the newest catalogue file of a directory of format 1; None if there is none."""
    return _load_settled(lambda: read_format_one(disk, directory, marks.get(paths.CATALOGUE)))


def _load_settled(load: Callable[[], LoadedRecords[R]]) -> LoadedRecords[R] | None:
    """Load again if a newer file has just replaced it, or if a half-written record may look like damage."""
    former: LoadedRecords[R] | None = None
    for _ in range(_ATTEMPTS):
        try:
            loaded = load()
        except FileNotFoundError:
            continue
        if not loaded.damage or (former is not None and loaded.damage == former.damage):
            return loaded
        former = loaded
    return former
