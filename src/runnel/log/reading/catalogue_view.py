"""The topics and cursors of the catalogue, read while a broker may be writing it."""

from __future__ import annotations

from typing import Final

import msgspec

from runnel.log.log import Cursor, ShardId
from runnel.log.metadata import catalogue as records
from runnel.log.metadata.catalogue import LoadedCatalogue
from runnel.log.metadata.catalogue_state import CatalogueState
from runnel.log.metadata.cursors import CursorTable
from runnel.log.metadata.definitions import DefinitionTable
from runnel.log.metadata.last_values import LastValues
from runnel.log.metadata.topic_table import Topic, TopicTable
from runnel.log.reading.report import Report
from runnel.log.segments.synced_marks import Mark
from runnel.platform.disk import Disk
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Policies

_ATTEMPTS: Final = 4
_UNLIMITED: Final = 2**62  # the broker that wrote it kept to the limits
# No rules: what they add to a recorded policy does not matter here.
_POLICIES: Final = Policies()


class CatalogueView(msgspec.Struct, frozen=True):
    """The catalogue's topics by name, deleted ones included; its cursors; and whether there is a catalogue."""

    topics: dict[str, Topic]
    cursors: list[Cursor]
    epoch: int
    was_closed: bool
    is_present: bool
    next_entries: dict[ShardId, int] = {}  # of each shard, when it was last recorded
    shard_counts: dict[str, int] = {}  # of each journal with several shards

    def floor_of(self, key: TopicPartition) -> int | None:
        """The first offset that is not hidden; None if the topic was deleted.

        A topic that the catalogue does not know was made after it was read, or the catalogue is
        lost: either way none of its messages is known to be hidden.
        """
        topic = self.topics.get(key[0])
        if topic is None:
            return 1
        if topic.is_deleted:
            return None
        return topic.partitions[key[1]].floor if key[1] < len(topic.partitions) else 1


def read_catalogue(disk: Disk, folder: str, report: Report, mark: Mark | None) -> CatalogueView:
    """Read the catalogue; damage goes to the report. Without one, no message is hidden and no topic known."""
    loaded = load_catalogue(disk, folder, mark)
    if loaded is None:
        return CatalogueView({}, [], epoch=0, was_closed=False, is_present=False)
    report.add_damage(*loaded.damage)
    state = CatalogueState(
        _POLICIES,
        TopicTable(_POLICIES, _UNLIMITED),
        CursorTable(_UNLIMITED, lambda _: None),
        LastValues(),
        DefinitionTable(_UNLIMITED),
    )
    state.apply_all(loaded.records)
    return CatalogueView(
        {topic.name: topic for topic in state.topics},
        sorted(state.cursors.all(), key=lambda cursor: cursor.name),
        state.epoch,
        was_closed=state.is_closed,
        is_present=bool(loaded.records),
        next_entries={
            shard: max(checkpoint.next_entry for checkpoint in checkpoints)
            for shard, checkpoints in state.checkpoints.items()
        },
        shard_counts={
            record.name: record.shards
            for record in loaded.records
            if isinstance(record, records.JournalMade)
        },
    )


def load_catalogue(disk: Disk, folder: str, mark: Mark | None) -> LoadedCatalogue | None:
    """Load the newest catalogue file; None if there is none.

    Loads again if a newer file has just replaced it, or if a half-written record may look like damage.
    """
    former: LoadedCatalogue | None = None
    for _ in range(_ATTEMPTS):
        try:
            loaded = records.read_newest(disk, folder, mark)
        except FileNotFoundError:
            continue
        if not loaded.damage or (former is not None and loaded.damage == former.damage):
            return loaded
        former = loaded
    return former
