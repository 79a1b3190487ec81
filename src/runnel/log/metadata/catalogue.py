"""The catalogue: records of topics, next offsets, producers, last values, cursors and subscriptions.

It keeps what must outlive segments. It is a journal of records (`record_journal`) whose owner's memory follows the
file: a snapshot contains what the file said before the write that triggers the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from runnel.config import Keep
from runnel.log.log import Cursor
from runnel.log.metadata import record_journal
from runnel.log.metadata.producers import ProducerState
from runnel.log.metadata.record_journal import RecordJournal
from runnel.log.segments.synced_marks import Mark, SyncedMarks
from runnel.platform.disk import Disk
from runnel.platform.workers import Workers


class _Record(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The base of all records of the catalogue."""


class JournalMade(_Record, tag="journal", frozen=True):
    """A journal was made with this number of shards. A journal without this record has one."""

    name: str
    keep: Keep
    shards: int


class TopicMade(_Record, tag="topic", frozen=True):
    """A topic was made, with this fixed policy."""

    name: str
    keep: Keep
    partitions: int
    journal: str
    owner: str = ""  # the token that made it; empty: none did, or the topic is older than quotas


class TopicDeleted(_Record, tag="deleted", frozen=True):
    """A topic was deleted."""

    name: str


class PartitionAt(_Record, tag="partition", frozen=True):
    """A partition's next offset, and the floor below which its messages are hidden."""

    topic: str
    partition: int
    next_offset: int
    floor: int


class Opened(_Record, tag="opened", frozen=True):
    """The log was opened: everything appended until it is closed carries this epoch."""

    epoch: int
    time_ns: int
    has_marks: bool = False  # the directory has synced marks from here on


class Closed(_Record, tag="closed", frozen=True):
    """The log was closed in good order: segments and their indexes are complete."""

    epoch: int


class ShardAt(_Record, tag="shard", frozen=True):
    """The state of a shard at the end of one of its segments."""

    journal: str
    shard: int
    next_entry: int
    last_time_ns: int
    offsets: list[tuple[str, int, int]]  # topic, partition, next offset
    producers: list[ProducerState]


class CursorSet(_Record, tag="cursor", frozen=True):
    """A named cursor was set."""

    cursor: Cursor


class CursorRemoved(_Record, tag="uncursor", frozen=True):
    """A named cursor was removed."""

    name: str


class LastValue(_Record, tag="last", frozen=True):
    """The last message of a partition whose segment retention removes; an empty block: none."""

    topic: str
    partition: int
    block: bytes


class SubscriptionSet(_Record, tag="subscription", frozen=True):
    """A durable subscription was set. The log does not interpret its definition."""

    name: str
    content: bytes


class SubscriptionRemoved(_Record, tag="unsubscription", frozen=True):
    """A durable subscription was removed."""

    name: str


Record = (
    JournalMade
    | TopicMade
    | TopicDeleted
    | PartitionAt
    | Opened
    | Closed
    | ShardAt
    | CursorSet
    | CursorRemoved
    | LastValue
    | SubscriptionSet
    | SubscriptionRemoved
)

LoadedCatalogue = record_journal.LoadedRecords[Record]

_decoder: Final = msgspec.msgpack.Decoder(list[Record])


class Catalogue(RecordJournal[Record]):
    """The catalogue, for the process that writes it."""

    def __init__(
        self,
        disk: Disk,
        workers: Workers,
        folder: str,
        *,
        marks: SyncedMarks,
        bytes_max: int,
        snapshot: Callable[[], Sequence[Record]],
    ) -> None:
        super().__init__(
            disk,
            workers,
            folder,
            _decoder,
            marks=marks,
            name="the catalogue",
            bytes_max=bytes_max,
            snapshot=snapshot,
        )


def read_newest(disk: Disk, folder: str, mark: Mark | None = None) -> LoadedCatalogue:
    """Read the newest file, for readers beside the owner: see `record_journal.read_newest`."""
    return record_journal.read_newest(disk, folder, _decoder, mark)
