"""The log: the interfaces of every message store.

A log holds shards; a shard holds entries (stored batches, numbered 1, 2, 3 …); a topic-partition lives in one shard.
At any time at most one log object in the world serves a shard: its owner. Each stretch of ownership has an epoch.

Read in this order:

MessageLog      appends and reads messages, and finds the shards that this log serves
OwnedShard      one of them: the numbers that its owner knows exactly between two awaits
MetadataStore   what belongs to no shard: topics, named cursors, definitions of subscriptions, producers' terms
LogUpkeep       retention, reopening, statistics, checkpoints, closing; and what the store is capable of
ShardOwnership  begins and ends serving a shard
Store           all of these together: what the broker has for each place where topics are kept

A method that may have to wait for a device or for another machine is `async`. The others answer from memory, and the
answer stays right until the next await. The values that they take and return are in `values.py`, and exported here.
Two stores implement the interfaces, `disk` and `memory`; a remote one will. tests/log/contract runs against each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Protocol

from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.log.values import (
    SCAN_BYTES,
    Appended,
    Capabilities,
    Chosen,
    Cursor,
    CursorPosition,
    DamageGap,
    EntryPage,
    FoundBatch,
    Hold,
    Level,
    LogStatistics,
    LogTopic,
    ManyTopicsError,
    OffsetBounds,
    PartitionPage,
    PassedRun,
    Position,
    Recovered,
    ShardId,
    ShardStatistics,
    SomeMade,
    Trimmed,
    VisibleBatch,
)
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Difference, Policy

__all__ = [
    "SCAN_BYTES",
    "Appended",
    "Capabilities",
    "Chosen",
    "Creator",
    "Cursor",
    "CursorPosition",
    "CursorView",
    "DamageGap",
    "EntryPage",
    "FoundBatch",
    "Hold",
    "Level",
    "LogListener",
    "LogStatistics",
    "LogTopic",
    "LogUpkeep",
    "ManyTopicsError",
    "MessageLog",
    "MetadataStore",
    "NullListener",
    "OffsetBounds",
    "OwnedShard",
    "OwnershipCheck",
    "PartitionPage",
    "PassedRun",
    "Position",
    "Recovered",
    "ShardId",
    "ShardOwnership",
    "ShardStatistics",
    "SomeMade",
    "StateStore",
    "Store",
    "SubscriptionHolds",
    "TermRecords",
    "TopicView",
    "Trimmed",
    "Turn",
    "VisibleBatch",
]

# Awaited between two steps of a long count: lets other work of the loop run.
Turn = Callable[[], Awaitable[None]]


# --- What others hand to a log ---


class Creator(Protocol):
    """The client on whose account an append makes topics. Its name is recorded with them."""

    @property
    def name(self) -> str: ...
    def check_topic(self, name: str) -> None:
        """Raise QuotaExceededError if it already has as many topics as it may."""


class LogListener(Protocol):
    """Receives what happens in a log, on the loop and in order. It must not fail; only `before_release` may wait.

    What the log already has when it is opened is not announced: `MessageLog.shards` and `TopicView` list it.
    """

    def on_stored(self, shard: ShardId, batches: Sequence[VisibleBatch]) -> None:
        """These batches are visible from now on. Hot: once a group."""

    def on_synced(self, shard: ShardId, took_ns: int) -> None:
        """A group was written and synced."""

    def on_topic_made(self, topic: LogTopic) -> None:
        """A topic was made. Its shards are served if they lie here, also those that it is the first to use."""

    def on_topic_deleted(self, name: str) -> None:
        """A topic was deleted."""

    def on_term_taken(self, producer: str, term: int) -> None:
        """Another broker has given a named publisher this term: earlier ones may not publish any more."""

    def on_subscription_changed(self, name: str) -> None:
        """Another log that shares the metadata has set or removed this subscription's definition."""

    def on_shard_acquired(self, shard: OwnedShard) -> None:
        """`ShardOwnership.acquire` has begun a term of this shard: everything stored of it can be read."""

    async def before_release(self, shard: OwnedShard) -> None:
        """A term is about to end as planned: store here what must not be lost with it. `release` waits for this.

        The shard still takes and serves everything. `on_shard_released` follows, whatever happens in between.
        """

    def on_shard_released(self, shard: OwnedShard) -> None:
        """The term that this view stands for has ended, as planned or not: its methods raise MovedError.

        What was queued for the shard is answered. Forget here what you keep about it: another log may change it now.
        """


class NullListener:
    """A `LogListener` that ignores everything."""

    def on_stored(self, shard: ShardId, batches: Sequence[VisibleBatch]) -> None:
        """Do nothing."""

    def on_synced(self, shard: ShardId, took_ns: int) -> None:
        """Do nothing."""

    def on_topic_made(self, topic: LogTopic) -> None:
        """Do nothing."""

    def on_topic_deleted(self, name: str) -> None:
        """Do nothing."""

    def on_term_taken(self, producer: str, term: int) -> None:
        """Do nothing."""

    def on_subscription_changed(self, name: str) -> None:
        """Do nothing."""

    def on_shard_acquired(self, shard: OwnedShard) -> None:
        """Do nothing."""

    async def before_release(self, shard: OwnedShard) -> None:
        """Do nothing."""

    def on_shard_released(self, shard: OwnedShard) -> None:
        """Do nothing."""


class SubscriptionHolds(Protocol):
    """The holds of all acknowledged subscriptions. A log gets it when it is opened, and asks it on the loop.

    A log without one removes nothing because of `until = "acked"`, and lets no subscription hold anything.
    """

    @property
    def version(self) -> int:
        """Rises when a subscription may owe less than before, or cover other topic-partitions."""
        ...

    @property
    def is_empty(self) -> bool:
        """There are no subscriptions."""
        ...

    def holds_of(self, key: TopicPartition) -> Sequence[Hold]:
        """For each subscription that covers this topic-partition, a hold from the lowest offset on that it owes."""
        ...

    def owed(self, key: TopicPartition, begin: int, end: int) -> Sequence[tuple[int, int]] | None:
        """Of these offsets, the ranges [begin, end) that any subscription has not acknowledged, in order.

        None: no subscription covers this topic-partition.
        """
        ...


# --- Messages ---


class MessageLog(Protocol):
    """Stores batches in shards, and reads them.

    For a shard that another log serves, every method raises MovedError. For a topic that does not exist, or a shard
    that no topic uses, it raises UnknownTopicError, except `append`, which makes topics, and `wait_room`.
    """

    def append(
        self,
        batch: Batch,
        level: Level = Level.STORED,
        creator: Creator | None = None,
        *,
        topics_made_max: int | None = None,
    ) -> asyncio.Future[Appended]:
        """Give every run its offsets and store the batch, whole or not at all.

        Returns at once; the future is done when `level` is reached. The shard keeps the order of the calls. BusyError
        when the shard's queue is full: await `wait_room` and call again. ManyTopicsError if the batch needs more than
        `topics_made_max` new topics.
        """

    async def wait_room(self, shard: ShardId) -> None:
        """Wait until the shard's queue takes another batch. There is room in a shard that does not exist yet."""

    async def sync(self) -> None:
        """Wait until everything appended so far is stored.

        Raises, once and to the first caller, if a batch that was answered before it was stored could not be stored.
        """

    async def read(
        self, topic: str, partition: int, offset: int, *, bytes_max: int = 2**20
    ) -> PartitionPage:
        """Batches from this offset on: at least one if there is any, then up to `bytes_max`.

        OffsetGoneError and OffsetAheadError for offsets outside `bounds`. The read skips holes that
        deletion left. At the end the page is empty.
        """

    async def read_shard(
        self, shard: ShardId, position: Position, *, bytes_max: int = SCAN_BYTES
    ) -> EntryPage:
        """Everything in the shard from this position on, in the order in which it was stored.

        A page before the end may be short, or empty where nothing is served any more. At the end
        `next_position` equals `position`. A store that does not keep positions (`Capabilities`) raises OffsetGoneError
        for a position of another epoch.
        """

    async def bounds(self, topic: str, partition: int) -> OffsetBounds:
        """The first offset that a reader gets, damage included, and the next one."""

    async def offset_at(self, topic: str, partition: int, time_ns: int) -> int:
        """The first offset that was received at this time or later; the next offset if none was."""

    async def entry_at(self, shard: ShardId, time_ns: int) -> int:
        """The shard's first entry that was received at this time or later; the next one if none was."""

    def messages_at(
        self, shard: ShardId, wanted: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[Sequence[Chosen], None]:
        """Find messages of one shard, one offset per partition; yield the batches that hold them, a few at a time.

        Each batch is read once, however many of its messages are wanted. Missing messages are left out. The last
        message of a topic that keeps last values is found however old it is.
        """

    async def count(self, shard: ShardId, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        """Count a shard's messages from an entry on whose topics match. The count is exact or too high.

        While `OwnedShard.count_stamp` stays the same, an earlier count stays right or becomes too high.
        """

    def shard(self, shard: ShardId) -> OwnedShard:
        """The view of a shard that this log serves. Keep it while working on the shard: it is one term of ownership."""

    def shards(self) -> Sequence[ShardId]:
        """The shards that this log serves now."""


class OwnedShard(Protocol):
    """What the owner of a shard knows of it: local, and exact between two awaits.

    It stands for one term of ownership. When that ends, every method raises MovedError from then on, so that no caller
    continues with numbers from the past; `id` and `epoch` stay readable. A later term has another view.
    """

    @property
    def id(self) -> ShardId:
        """Which shard it is."""
        ...

    @property
    def epoch(self) -> int:
        """The number of this term. Every batch that is appended in it carries it, and later terms have higher ones."""
        ...

    @property
    def state(self) -> StateStore:
        """Where subscriptions record their progress in this shard."""
        ...

    def entries(self) -> OffsetBounds:
        """The first entry of the shard, and its next one."""
        ...

    def next_offset(self, topic: str, partition: int) -> int:
        """The offset behind the partition's last message that readers can see. UnknownTopicError if it is not here."""
        ...

    def floor(self, topic: str, partition: int) -> int:
        """Messages below this offset are hidden: purged, or of a deleted topic of the same name."""
        ...

    def count_stamp(self) -> tuple[int, int]:
        """A value that changes whenever `MessageLog.count` of the shard may rise."""
        ...


class StateStore(Protocol):
    """Keeps the progress of subscriptions in one shard, as contents that only its user interprets.

    The user reads and clears `contents`, sets `snapshot`, and only then adds. From the moment it is added, `snapshot`
    must include a content. A content may be added twice without harm.
    """

    contents: list[bytes]
    """What an earlier term of ownership has left."""
    snapshot: Callable[[], Iterable[bytes]] | None
    """Returns everything that is known now. It is called on the loop; a worker iterates over the result."""

    def add(self, content: bytes) -> asyncio.Future[None]:
        """Add a content; it is stored when the future is done. Contents added during one write share the next.

        DiskFullError: nothing of it is stored, and the caller may retry. ReadOnlyError: a retry needs a restart.
        """


# --- Metadata ---


class TopicView(Protocol):
    """The topics of a store, as known here now. A look-up waits for nothing."""

    def has(self, name: str) -> bool:
        """Whether the topic exists. Hot: once for each batch that is published."""

    def find(self, name: str) -> LogTopic | None:
        """The topic; None if it does not exist."""

    def get(self, name: str) -> LogTopic:
        """The topic. UnknownTopicError if it does not exist."""

    def policy(self, name: str) -> Policy:
        """The policy of a topic, which was fixed when it was made. UnknownTopicError if it does not exist."""

    def shard_of(self, name: str, partition: int) -> ShardId:
        """The shard that a topic-partition lies in. UnknownTopicError if it does not exist."""

    def shards_for(self, name: str, policy: Policy) -> Sequence[ShardId]:
        """The shards, by partition, that a topic will have when it is made with this policy."""

    def names(self) -> Sequence[str]:
        """The names of all topics."""

    def owned_by(self, owner: str) -> int:
        """The number of topics that this token made."""


class CursorView(Protocol):
    """The named cursors of a store, as known here now."""

    def all(self) -> Sequence[Cursor]:
        """All cursors."""

    def find(self, name: str) -> Cursor | None:
        """The cursor; None if it does not exist."""

    def owned_by(self, owner: str) -> int:
        """The number of cursors that this token made."""


class MetadataStore(Protocol):
    """What belongs to no shard: topics, named cursors, definitions of subscriptions, producers' terms.

    The views answer at once, from what is known here. A change is recorded when its method returns.
    """

    @property
    def topics(self) -> TopicView:
        """The topics: which exist, and their policies and shards."""
        ...

    @property
    def cursors(self) -> CursorView:
        """The named cursors."""
        ...

    @property
    def member(self) -> str:
        """The name of this log among those that share the metadata; "": it has the metadata for itself."""
        ...

    def subscriptions(self) -> dict[str, bytes]:
        """The definitions of durable subscriptions, by name. A copy, made in one step."""

    def subscription(self, name: str) -> bytes | None:
        """The definition of a durable subscription; None if it does not exist."""

    async def ensure_topic(self, name: str) -> LogTopic:
        """Get the topic, or make it."""

    async def make_topics(
        self, envelope: Envelope, run: int, made_max: int, creator: Creator | None = None
    ) -> SomeMade:
        """Make up to `made_max` topics of a batch, from run `run` on, before the batch is appended.

        They may still have to be recorded when this returns: a batch of theirs is stored after their record.
        """

    async def purge_topic(self, name: str, *, part_only: bool = False) -> None:
        """Hide all messages that are stored now. Retention frees their room later.

        MovedError, before anything is hidden, if a partition is not served here; `part_only`: those stay as they are.
        """

    async def delete_topic(self, name: str, *, part_only: bool = False) -> None:
        """Hide the topic and its messages. A new topic of this name continues after the last offset.

        MovedError if a partition is not served here; `part_only`: its owner hides it when it hears of the deletion.
        """

    async def set_cursor(
        self, name: str, positions: Sequence[CursorPosition], owner: str = ""
    ) -> None:
        """Store a named cursor. It holds the messages behind its positions until it is removed."""

    async def remove_cursor(self, name: str) -> None:
        """Remove a named cursor, if it exists."""

    async def set_subscription(
        self, name: str, content: bytes, *, replaces: bytes | EllipsisType | None = ...
    ) -> None:
        """Store or replace the definition of a durable subscription.

        With `replaces`, only if that is the definition now (None: there is none). Otherwise another log has changed it,
        and this is Unavailable: look again.
        """

    async def remove_subscription(self, name: str) -> None:
        """Remove the definition of a durable subscription, if it exists."""

    async def take_term(self, producer: str, above: int = -1) -> int:
        """A term for a named publisher, higher than `above` and than every term that was taken or stored before."""


# --- Upkeep and ownership ---


class LogUpkeep(Protocol):
    """What keeps a log in good order. `capabilities` says which of it this store can do."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do that others cannot."""
        ...

    @property
    def recovered(self) -> Recovered:
        """What opening the log found."""
        ...

    async def follow_rules(self) -> Sequence[Difference]:
        """Apply the current rules to rotation and retention. Returns where existing topics differ from the rules."""

    async def trim_shard(self, shard: ShardId) -> Trimmed:
        """Apply retention to one shard, by the clock's time."""

    async def reopen(self, shard: ShardId) -> Sequence[str]:
        """Recover a shard that became read-only. Returns the damage found."""

    def statistics(self) -> LogStatistics:
        """Counters and sizes of the log, and of the shards that it serves."""

    async def checkpoint(self) -> tuple[str, str]:
        """Make a checkpoint: everything as of one moment, in a folder of the data directory. Returns its path and id.

        It stays until `drop_checkpoint`. ClientFault if one exists already, or if this store makes none.
        """

    async def drop_checkpoint(self) -> None:
        """Remove the checkpoint, if there is one."""

    async def close(self) -> None:
        """Store what is queued, then release everything. What is not stored fails as ClosedError."""


class OwnershipCheck(Protocol):
    """Tells an owner from one that was replaced and does not know it yet."""

    async def is_still_mine(self, shard: ShardId) -> bool:
        """Whether this log still owns the shard, by a look at what settles it, not at what is remembered here.

        False also if that cannot be found out now.
        """


class ShardOwnership(OwnershipCheck, Protocol):
    """Begins and ends serving a shard. A shard without an owner comes to the log that stores a first batch there."""

    async def acquire(self, shard: ShardId, above: int = 0) -> OwnedShard:
        """Begin a term of ownership: load the shard, and serve it under a higher epoch, also higher than `above`.

        Tells the listener. Returns the present view if the shard is served here already. MovedError if another log has
        it.
        """

    async def release(self, shard: ShardId) -> None:
        """End the term of ownership, if there is one, as planned: nothing that was accepted is lost.

        First `LogListener.before_release`; then appends are refused as MovedError. Waits until what is queued is stored
        and answered, tells the listener, then writes and closes what belongs to the shard, so that another log can
        acquire it.
        """

    async def drop(self, shard: ShardId) -> None:
        """End the term of ownership, if there is one, without warning: another log may have the shard already.

        Nothing more is written. What is queued fails as Unavailable, and may be stored or not. Tells the listener.
        """


class TermRecords(Protocol):
    """Where the terms of shards are recorded, if several logs serve them in turn."""

    async def begin(self, shard: ShardId, epoch: int, next_entry: int, *, has_lock: bool) -> None:
        """Record a term before it serves anything. If this fails, it does not begin. MovedError: another log has it.

        `has_lock`: the store holds a lock on the shard. Without one, as in memory, the record decides who has it.
        """

    async def end(self, shard: ShardId, epoch: int, next_entry: int) -> None:
        """Record that a term has ended as planned, while no other can begin. It ends, whether this succeeds or not."""


class Store(MessageLog, LogUpkeep, ShardOwnership, Protocol):
    """A log with its metadata: all that the broker has of each place where topics are kept."""

    @property
    def metadata(self) -> MetadataStore:
        """The topics, cursors and subscriptions of this store."""
        ...
