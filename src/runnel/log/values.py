"""The values that a log takes and returns. `log.py`, which has the interfaces, exports them too."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from runnel.errors import BusyError, ClientFault
from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.topics.hints import level_meant
from runnel.topics.names import TopicPartition
from runnel.topics.patterns import Pattern
from runnel.topics.policies import Difference, Policy

# A scan of a shard reads this much at a time: 3.8 GB/s to Arrow, and 3.0 with a quarter of it (bench/log.py, "read").
# Readers over a network choose the size of their pages.
SCAN_BYTES: Final = 4 * 2**20


class Level(enum.StrEnum):
    """When a publisher is answered."""

    NONE = "none"  # not at all
    RECEIVED = "received"  # once it is in memory
    STORED = "stored"  # once it has survived a sync

    @classmethod
    def checked(cls, level: str) -> Level:
        """The level of this name; ClientFault if there is none."""
        try:
            return cls(level)
        except ValueError:
            known, meant = ", ".join(cls), level_meant(level)
            hint = "" if meant is None else f"; did you mean {meant}?"
            raise ClientFault(
                f"{level!r} is no level of acknowledgement; {known} are{hint}"
            ) from None


class ShardId(msgspec.Struct, frozen=True, order=True):
    """The unit of writing, syncing, producer sequences, ownership and epoch."""

    journal: str
    shard: int = 0

    def __str__(self) -> str:
        return f"{self.journal}/{self.shard}"


class Position(msgspec.Struct, frozen=True, order=True):
    """A read position in a shard: the first message not yet read. Rewriting a segment does not change it.

    Epoch 0 stands for any epoch, as in `Position(0, 1)`, the beginning: no term of ownership has it.
    """

    epoch: int
    entry: int
    row: int = 0


class Appended(msgspec.Struct, frozen=True, gc=False):
    """The result of an append: the offset of each run's first message, and the level reached.

    A repeated batch of a named publisher has `is_repeated` and its original offsets, or none if the
    batch is known to be stored but lies too far back to look its offsets up.
    """

    base_offsets: Sequence[int]
    entry: int
    epoch: int
    receive_time_ns: int
    level: Level
    is_repeated: bool = False
    receivers: int | None = None  # on ephemeral topics: how many subscriptions it was sent to


class OffsetBounds(msgspec.Struct, frozen=True):
    """The first and the next offset of a partition; equal if it has no messages."""

    first_offset: int
    next_offset: int


class PassedRun(NamedTuple):
    """Messages that readers do not get: past their age, purged, or lost."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int


class DamageGap(msgspec.Struct, frozen=True):
    """Messages that a read skipped because their bytes are damaged."""

    path: str
    position: int
    problem: str
    first_offset: int  # of the partition read; of the entry when a shard is read
    next_offset: int
    lost: Sequence[PassedRun] = ()  # when a shard is read: the lost messages, as far as known


class FoundBatch(msgspec.Struct, frozen=True, gc=False):
    """A stored batch, its block, and the runs that were requested (None: all)."""

    block: memoryview
    batch: Batch
    runs: Sequence[int] | None = None

    def wanted(self) -> Batch:
        """The requested runs, cut out if the batch has others too."""
        return self.batch if self.runs is None else self.batch.cut(self.runs)

    @property
    def first_offset(self) -> int:
        """The offset of the first requested run."""
        head = self.batch.envelope
        return head.column64(head.base_offsets)[self.runs[0] if self.runs else 0]


class Chosen(msgspec.Struct, frozen=True, gc=False):
    """A stored batch, and the numbers of its requested rows, which rise."""

    batch: Batch
    rows: Sequence[int]

    def taken(self) -> Batch:
        """A batch of the requested rows. Slow for a compressed batch: not for the event loop."""
        return self.batch.take(self.rows)


class PartitionPage(msgspec.Struct, frozen=True):
    """Stored batches from one partition in order, and where the next page begins.

    The first batch may begin before the requested offset: a batch is stored whole.
    """

    found: Sequence[FoundBatch]
    next_offset: int
    gaps: Sequence[DamageGap] = ()

    @property
    def first_offset(self) -> int:
        """The first offset on the page, damage included; on an empty page, where the next one begins."""
        firsts = [gap.first_offset for gap in self.gaps[:1]]
        firsts += [found.first_offset for found in self.found[:1]]
        return min(firsts, default=self.next_offset)


class EntryPage(msgspec.Struct, frozen=True):
    """Stored batches of a shard in order, of all topics, and where the next page begins."""

    found: Sequence[FoundBatch]
    next_position: Position
    gaps: Sequence[DamageGap] = ()
    passed: Sequence[PassedRun] = ()


class VisibleBatch(NamedTuple):
    """A batch that readers may see from now on, with its block or the parts of it."""

    envelope: Envelope  # with its offsets
    body: bytes | memoryview
    encoded: bytes = b""  # the envelope's bytes
    packed: bytes = b""

    def block(self) -> Sequence[bytes | memoryview]:
        """The buffers of the block as it goes to readers."""
        return (self.packed,) if self.packed else block.pack(self.encoded, self.body)


class LogTopic(msgspec.Struct, frozen=True):
    """A topic, the policy that was fixed when it was made, and its shards."""

    name: str
    policy: Policy
    shards: Sequence[ShardId]  # by partition


class ManyTopicsError(BusyError):
    """A batch has more new topics than are made in one step: `MetadataStore.make_topics` makes the others."""


class SomeMade(NamedTuple):
    """The run from which on a batch's topics are still to be made, or the fault of the topic there."""

    next_run: int
    fault: ClientFault | None = None


class CursorPosition(msgspec.Struct, frozen=True):
    """A named cursor's position in one topic-partition, or in one shard for some patterns."""

    topic: str | None = None
    partition: int = 0
    offset: int = 0
    shard: ShardId | None = None
    position: Position | None = None
    patterns: tuple[str, ...] = ()


class Cursor(msgspec.Struct, frozen=True):
    """A named read position that outlives its reader. It holds what it has not passed against retention."""

    name: str
    positions: tuple[CursorPosition, ...]
    updated_ns: int
    owner: str = ""  # the token that made it; empty: no token did, or it is older than quotas


class Hold(msgspec.Struct, frozen=True):
    """One reader's hold on a shard: a topic-partition from an offset on, or patterns from an entry on."""

    holder: str  # the cursor's name, or "subscription NAME"
    key: TopicPartition | None
    offset: int
    entry: int
    patterns: tuple[str, ...]

    def holds(self, key: TopicPartition, next_offset: int, last_entry: int) -> bool:
        """Whether messages of this topic-partition that end before `next_offset`, in `last_entry`, are held."""
        if self.key is not None:
            return key == self.key and next_offset > self.offset
        return last_entry >= self.entry and any(
            _pattern(text).matches(key[0]) for text in self.patterns
        )


@lru_cache(maxsize=4096)
def _pattern(text: str) -> Pattern:
    return Pattern(text)


class Trimmed(msgspec.Struct, frozen=True):
    """The result of one round of retention. In memory each batch counts as a segment."""

    segments_removed: int = 0
    bytes_removed: int = 0
    segments_rewritten: int = 0
    holds_passed: Sequence[str] = ()  # cursors whose ceiling was reached: they will meet a gap

    @classmethod
    def of(cls, parts: Sequence[Trimmed]) -> Trimmed:
        """The sum of the results of several shards."""
        return cls(
            sum(part.segments_removed for part in parts),
            sum(part.bytes_removed for part in parts),
            sum(part.segments_rewritten for part in parts),
            sorted({name for part in parts for name in part.holds_passed}),
        )


class ShardStatistics(msgspec.Struct, frozen=True):
    """Counters and sizes of one shard."""

    shard: ShardId
    entries: int  # appended since the log was opened
    messages: int
    bytes: int
    stored_bytes: int
    segments: int
    syncs: int
    sync_time_ns: int
    sync_time_max_ns: int
    queued_batches: int
    queued_bytes: int
    failed_batches: int
    is_read_only: bool
    producers: int = 0  # named publishers that the shard knows
    unknown_outcomes: int = 0
    """Attempts to store a group after which it was not known whether it is stored."""


class LogStatistics(msgspec.Struct, frozen=True):
    """Counters of a log and of its shards."""

    topics: int
    shards: Sequence[ShardStatistics]
    open_files: int
    damage: Sequence[str]  # "path:position: problem", found since the log was opened
    ended: Sequence[ShardStatistics] = ()
    """Counters of shards that the log served before and serves no more, one for each journal."""


class Recovered(msgspec.Struct, frozen=True):
    """What opening a log found. After a clean close there is nothing to report."""

    was_clean: bool = True
    torn: Sequence[str] = ()  # tails that a crash left and that were cut off
    damage: Sequence[str] = ()  # stored bytes that are unreadable now
    differences: Sequence[Difference] = ()  # topics whose fixed policy differs from the rules

    @property
    def lines(self) -> Sequence[str]:
        """All of it, as lines for an operator; empty if there is nothing to report."""
        return [
            *([] if self.was_clean else ["the last run did not end cleanly; recovered"]),
            *(f"torn tail cut: {torn}" for torn in self.torn),
            *(f"damaged: {bad}" for bad in self.damage),
            *(difference.text for difference in self.differences),
        ]


class Capabilities(msgspec.Struct, frozen=True):
    """What a store can do that others cannot. Callers decide by these values, not by the kind of store."""

    is_durable: bool
    """Messages, cursors and subscriptions are still there after a restart."""
    is_reopenable: bool
    """A failed sync makes a shard read-only, and `LogUpkeep.reopen` recovers it."""
    has_segment_files: bool
    """A segment is a file that many batches share. Otherwise each batch counts as one."""
    has_free_space: bool
    """Messages lie on a device that reports its free space. Otherwise they take memory of this process."""
    keeps_positions: bool
    """A position of an older epoch still names the same message. Otherwise each epoch begins without messages."""
