"""The records of a data directory: of its metadata, and of the catalogue of each shard.

Metadata belongs to no shard: journals, topics, named cursors, definitions of subscriptions, terms of named publishers.
A shard's catalogue has what must outlive its segments: epochs, next offsets, floors, sequences of named publishers,
last values. It lies in the shard's folder, and moves with the shard.

A record states values, not changes: it may be applied twice without harm.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from runnel.config import Keep
from runnel.log.log import Cursor
from runnel.log.metadata.producers import ProducerState


class _Record(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The base of all records."""


# --- Both ---


class Opened(_Record, tag="opened", frozen=True):
    """In a shard: everything appended until the next one carries this epoch.

    In the metadata: the directory was opened; all epochs of its shards are above this one.
    """

    epoch: int
    time_ns: int
    has_marks: bool = False  # the directory has synced marks from here on


class Closed(_Record, tag="closed", frozen=True):
    """Closed in good order. Of a shard: its segments and their indexes are complete."""

    epoch: int


# --- Metadata ---


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
    generation: int = (
        1  # the first topic of this name has 1, the next one, made after its deletion, 2
    )


class TopicDeleted(_Record, tag="deleted", frozen=True):
    """A topic was deleted."""

    name: str


class CursorSet(_Record, tag="cursor", frozen=True):
    """A named cursor was set."""

    cursor: Cursor


class CursorRemoved(_Record, tag="uncursor", frozen=True):
    """A named cursor was removed."""

    name: str


class SubscriptionSet(_Record, tag="subscription", frozen=True):
    """A durable subscription was set. The log does not interpret its definition."""

    name: str
    content: bytes


class SubscriptionRemoved(_Record, tag="unsubscription", frozen=True):
    """A durable subscription was removed."""

    name: str


class TermTaken(_Record, tag="term", frozen=True):
    """A named publisher was given this term."""

    producer: str
    term: int


# --- Shards ---


class PartitionAt(_Record, tag="partition", frozen=True):
    """A partition's next offset, and the floor below which its messages are hidden.

    Messages from the floor on belong to the topic of this generation. While a shard has no record of a topic's
    generation, it has no message of it.
    """

    topic: str
    partition: int
    next_offset: int
    floor: int
    generation: int = 1


class ShardAt(_Record, tag="shard", frozen=True):
    """The state of a shard at the end of one of its segments."""

    journal: str
    shard: int
    next_entry: int
    last_time_ns: int
    offsets: list[tuple[str, int, int]]  # topic, partition, next offset
    producers: list[ProducerState]


class LastValue(_Record, tag="last", frozen=True):
    """The last message of a partition whose segment retention removes; an empty block: none."""

    topic: str
    partition: int
    block: bytes


MetadataRecord: TypeAlias = (
    Opened
    | Closed
    | JournalMade
    | TopicMade
    | TopicDeleted
    | CursorSet
    | CursorRemoved
    | SubscriptionSet
    | SubscriptionRemoved
    | TermTaken
)
ShardRecord: TypeAlias = Opened | Closed | PartitionAt | ShardAt | LastValue
# Format 1 had one catalogue for all of them.
Record: TypeAlias = MetadataRecord | ShardRecord
