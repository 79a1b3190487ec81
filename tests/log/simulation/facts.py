"""What a model of the log remembers: batches sent, messages found, topics and partitions. No checks here."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from zlib import crc32

from runnel.log.log import Level, ShardId
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Policy


class Fate(enum.Enum):
    PENDING = enum.auto()
    STORED = enum.auto()
    RECEIVED = enum.auto()  # answered before it was stored: may be lost
    UNKNOWN = enum.auto()  # no answer, or one that leaves it open
    REFUSED = enum.auto()  # told that nothing of it is stored


@dataclass(slots=True, eq=False)
class Sent:
    """A batch that was given to the log; a repetition is the same one again."""

    number: int
    keys: list[TopicPartition]  # by row
    payloads: list[bytes]
    births: list[
        int | None
    ]  # by row: which topic of that name; None: the deleted one or its follower
    shard: ShardId
    level: Level
    producer: str | None = None
    term: int = 0
    sequence: int = 0
    fate: Fate = Fate.PENDING
    offsets: list[int] | None = None  # by row, once the log has told

    def __str__(self) -> str:
        who = f" {self.producer}:{self.term}.{self.sequence}" if self.producer else ""
        return f"#{self.number}{who}"


@dataclass(slots=True)
class Known:
    """A message whose offset is established."""

    sent: Sent
    row: int
    time_ns: int
    entry: int


@dataclass(slots=True)
class PartitionModel:
    key: TopicPartition
    known: dict[int, Known] = field(default_factory=dict)
    required: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # retention took them before anything held them
    floor: int = 1  # below it everything is hidden
    floor_max: int = 1  # below it things may be hidden: the outcome of a purge is unknown
    next_min: int = 1


@dataclass(slots=True)
class TopicModel:
    """`birth` rises when a deletion was acknowledged; until it is published to again the topic is absent."""

    name: str
    policy: Policy
    birth: int = 0
    is_required: bool = False  # something of it was acknowledged or seen
    is_deleted: bool = False
    deletion_is_open: bool = False


@dataclass(slots=True)
class Dropping:
    """A rewriting that may have dropped messages below the offsets of its moment."""

    salt: int
    below: dict[TopicPartition, int]


def drops(salt: int, key: TopicPartition, offset: int) -> bool:
    """Which messages a rewriting with this salt leaves out."""
    return crc32(f"{salt}:{key}:{offset}".encode()) % 3 == 0
