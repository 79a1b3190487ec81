"""What the catalogue says of topics and cursors, read beside its owner."""

from __future__ import annotations

from typing import Final

import msgspec

from runnel.log import catalogue as records
from runnel.log.catalogue import Loaded, Record
from runnel.log.index import Key
from runnel.log.log import Cursor
from runnel.log.reading.report import Report
from runnel.log.topic_table import Topic, TopicTable
from runnel.topics.policies import FixedPolicy, Policies
from runnel.world.disk import Disk

_ATTEMPTS: Final = 4
_TOPICS_MAX: Final = 2**62
# What rules would add to a recorded policy does not matter here.
_POLICIES: Final = Policies()


class Catalogued(msgspec.Struct, frozen=True):
    """Topics by name, deleted ones included; cursors; and whether there was a catalogue at all."""

    topics: dict[str, Topic]
    cursors: list[Cursor]
    epoch: int
    was_closed: bool
    is_present: bool

    def floor_of(self, key: Key) -> int | None:
        """The first offset that is not hidden; None if the topic was deleted.

        A topic that the catalogue does not know was made after it was read, or the catalogue is
        lost: either way nothing of it is known to be hidden.
        """
        topic = self.topics.get(key[0])
        if topic is None:
            return 1
        if topic.is_deleted:
            return None
        return topic.partitions[key[1]].floor if key[1] < len(topic.partitions) else 1


def read_catalogue(disk: Disk, folder: str, report: Report) -> Catalogued:
    """Damage goes to the report. Without a catalogue nothing is hidden, and nothing is named."""
    loaded = load_catalogue(disk, folder)
    if loaded is None:
        return Catalogued({}, [], epoch=0, was_closed=False, is_present=False)
    report.add_damage(*loaded.damage)
    table = TopicTable(_POLICIES, _TOPICS_MAX)
    cursors: dict[str, Cursor] = {}
    epoch = 0
    for record in loaded.records:
        _apply(record, table, cursors)
        if isinstance(record, records.Opened):
            epoch = max(epoch, record.epoch)
    return Catalogued(
        {topic.name: topic for topic in table},
        [cursors[name] for name in sorted(cursors)],
        epoch,
        was_closed=bool(loaded.records) and isinstance(loaded.records[-1], records.Closed),
        is_present=True,
    )


def load_catalogue(disk: Disk, folder: str) -> Loaded | None:
    """The newest file; None if there is none.

    Again if a newer file replaced it just now, or if a record under way looked like damage.
    """
    former: Loaded | None = None
    for _ in range(_ATTEMPTS):
        try:
            loaded = records.read_newest(disk, folder)
        except FileNotFoundError:
            continue
        if not loaded.damage or (former is not None and loaded.damage == former.damage):
            return loaded
        former = loaded
    return former


def _apply(record: Record, table: TopicTable, cursors: dict[str, Cursor]) -> None:
    match record:
        case records.TopicMade(name, keep, partitions, journal):
            fixed = FixedPolicy(keep=keep, partitions=partitions, journal=journal)
            table.restore(name, _POLICIES.for_recorded(name, fixed))
        case records.TopicDeleted(name):
            table.delete(name)
        case records.PartitionAt(topic, partition, next_offset, floor):
            at = table.recorded_partition(topic, partition)
            if at is not None:
                at.advance(next_offset)
                at.floor = max(at.floor, floor)
        case records.ShardAt():
            for topic, partition, next_offset in record.offsets:
                at = table.recorded_partition(topic, partition)
                if at is not None:
                    at.advance(next_offset)
        case records.CursorSet(cursor):
            cursors[cursor.name] = cursor
        case records.CursorRemoved(name):
            cursors.pop(name, None)
        case _:  # epochs, producers and last values: nothing that an offline reader needs
            pass
