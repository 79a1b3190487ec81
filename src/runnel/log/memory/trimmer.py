"""Applies retention to a shard in memory. Each batch counts as a segment does on disk.

Age and size are of the journal: the oldest batches of all its shards go first. Between two rounds of retention a
journal never holds more bytes than its cap: `retain.bytes` or `log.memory_journal_bytes_max`, whichever is more. Beyond
the cap the oldest batches go. A reader that holds them meets a gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from runnel.config import LogSettings, Until
from runnel.formats.batch import Batch
from runnel.log.log import Trimmed
from runnel.log.memory.batch_store import BatchStore, JournalSize
from runnel.log.memory.stored_batch import PartitionSlice, StoredBatch
from runnel.log.metadata.topic_table import Partition
from runnel.log.retention.acked import Range, left_of, within
from runnel.log.retention.holds import Holds, ShardHolds
from runnel.log.retention.rules import Removal, SegmentFacts
from runnel.platform.clock import Clock
from runnel.topics.names import TopicPartition
from runnel.topics.policies import JournalPolicy

# Above its cap a journal sheds this part (1/16) of the cap at once, so that the next appends need not shed again.
_SHED_PART: Final = 16


class MemoryJournal:
    """What the shards of one journal share: its size, and the trimmers of all of them by shard."""

    def __init__(self) -> None:
        self.size = JournalSize()
        self.trimmers: dict[int, MemoryTrimmer] = {}

    def remove(self, shard: int, stored_bytes: int) -> None:
        """Forget a shard that is not served any more."""
        del self.trimmers[shard]
        self.size.stored_bytes -= stored_bytes


class MemoryTrimmer:
    """Removes batches from one shard's store: by age and size, when acknowledged, when purged, and above the cap.

    `find` returns a partition by its name and number. `keep_last` gets a batch that is about to be removed, and
    the partitions whose last message is in it.
    """

    def __init__(
        self,
        shard: int,
        journal: MemoryJournal,
        store: BatchStore,
        policy: JournalPolicy,
        clock: Clock,
        settings: LogSettings,
        *,
        find: Callable[[TopicPartition], Partition | None],
        shard_holds: ShardHolds,
        keep_last: Callable[[Batch, Sequence[Partition]], None],
    ) -> None:
        self._shard = shard
        self._journal = journal
        journal.trimmers[shard] = self
        self._store = store
        self._clock = clock
        self._find = find
        self._shard_holds = shard_holds
        self._keep_last = keep_last
        self._journal_bytes_max = settings.memory_journal_bytes_max
        self.use_policy(policy)
        self.has_hidden = False  # purged messages may be in the store
        self.hide_count = 0  # rises whenever messages are hidden
        self._is_sparse = False  # there may be purged messages that have not been cut out
        # At the last check for acknowledged messages: the version of the holds, and the next entry.
        self._checked_at: tuple[tuple[int, int], int] | None = None
        # What was removed with older batches of the journal, or shed; the next round of retention reports it.
        self._removed_batches = self._removed_bytes = 0
        self._holders_passed: set[str] = set()

    def use_policy(self, policy: JournalPolicy) -> None:
        """Use this policy. Readers may hold more than `retain.bytes`, but never more than the cap."""
        bytes_max = policy.retain.bytes_max or self._journal_bytes_max
        self.bytes_cap = max(bytes_max, self._journal_bytes_max)
        self.policy = msgspec.structs.replace(
            policy,
            retain=msgspec.structs.replace(policy.retain, bytes_max=bytes_max),
            pin=msgspec.structs.replace(
                policy.pin, bytes_max=min(policy.pin.bytes_max or self.bytes_cap, self.bytes_cap)
            ),
        )

    def hide(self, partition: Partition) -> None:
        """Remove messages below the partition's floor. `trim` cuts them out of batches shared with other partitions."""
        if self._store.slices(partition.key) is None:
            return
        self.has_hidden = self._is_sparse = True
        self.hide_count += 1
        self._checked_at = None
        self._store.drop_below(partition.key, partition.floor)

    def floor_of(self, key: TopicPartition) -> int | None:
        """The offset below which messages are hidden; None: all of them are."""
        partition = self._find(key)
        return None if partition is None else partition.floor

    def shed(self) -> None:
        """Remove the oldest batches of a journal above its cap at once, down to the newest batch if need be."""
        size = self._journal.size
        target = self.bytes_cap - self.bytes_cap // _SHED_PART
        trimmers = self._journal.trimmers
        holds: dict[int, Holds] = {}
        oldest = [each.oldest for each in trimmers.values() if each.oldest is not None]
        heapq.heapify(oldest)
        while size.stored_bytes > target:
            shard = oldest[0][1]
            if len(oldest) == 1 and trimmers[shard].has_one_batch:
                return
            if shard not in holds:
                holds[shard] = trimmers[shard].holds()
            following = trimmers[shard].shed_first(holds[shard])
            if following is None:
                heapq.heappop(oldest)
            else:
                heapq.heapreplace(oldest, following)

    @property
    def oldest(self) -> tuple[int, int] | None:
        """The time of the oldest batch, and the shard."""
        return (self._store.first.time_ns, self._shard) if len(self._store) else None

    @property
    def has_one_batch(self) -> bool:
        return len(self._store) == 1

    def shed_first(self, holds: Holds) -> tuple[int, int] | None:
        """Remove the oldest batch. Returns what is the `oldest` then."""
        first = self._store.first
        self._holders_passed |= _holders(first, holds)
        self._removed_batches += 1
        self._removed_bytes += len(first.packed)
        self._drop_first()
        return self.oldest

    def trim(self, next_entry: int) -> Trimmed:
        """One round of retention, and what was removed since the last. `next_entry` is the shard's."""
        acknowledged = self._trim_acked(next_entry)
        self._remove_old()
        rewritten = self._rewrite_sparse() if self._is_sparse else 0
        trimmed = Trimmed(
            self._removed_batches, self._removed_bytes, rewritten, sorted(self._holders_passed)
        )
        self._removed_batches = self._removed_bytes = 0
        self._holders_passed.clear()
        return Trimmed.of([acknowledged, trimmed])

    def _remove_old(self) -> None:
        """Remove the batches of the journal that are past its age or size, in all its shards, oldest first."""
        trimmers = self._journal.trimmers
        stored_bytes = self._journal.size.stored_bytes
        policy = self.policy
        removal = Removal(stored_bytes, policy.retain, policy.pin, self._clock.time_ns())
        holds: dict[int, Holds] = {}
        removed: dict[int, list[StoredBatch]] = {}
        for facts, stored in heapq.merge(
            *(trimmer.facts() for trimmer in trimmers.values()), key=lambda each: each[0].age_order
        ):
            if not removal.is_due(facts):
                break
            shard = facts.shard
            if shard not in holds:
                holds[shard] = trimmers[shard].holds()
            if removal.takes(facts, _holders(stored, holds[shard])):
                removed.setdefault(shard, []).append(stored)
        for shard, some in removed.items():
            trimmers[shard].remove(some, holds[shard])

    def facts(self) -> Iterator[tuple[SegmentFacts, StoredBatch]]:
        """The batches in their order."""
        for stored in self._store:
            size = len(stored.packed)
            yield SegmentFacts(stored.entry, size, stored.time_ns, self._shard), stored

    def holds(self) -> Holds:
        """The holds of all readers on this shard."""
        return self._shard_holds.of_all_readers()

    def remove(self, batches: Sequence[StoredBatch], holds: Holds) -> None:
        """Remove batches that are past age or size."""
        for stored in batches:
            self._holders_passed |= _holders(stored, holds)
        bytes_before = self._store.stored_bytes
        self._remove({stored.entry for stored in batches})
        self._removed_batches += len(batches)
        self._removed_bytes += bytes_before - self._store.stored_bytes

    def _remove(self, entries: set[int]) -> None:
        store = self._store
        while len(store) and store.first.entry in entries:
            entries.discard(store.first.entry)
            self._drop_first()
        if entries:  # a reader holds an older batch: these leave from the middle
            for stored in store:
                if stored.entry in entries:
                    self._hand_over_last(stored)
            store.drop(entries)

    def _drop_first(self) -> None:
        self._hand_over_last(self._store.first)
        self._store.drop_first()

    def _hand_over_last(
        self, stored: StoredBatch, left: Mapping[TopicPartition, Sequence[Range]] | None = None
    ) -> None:
        """Before a batch is removed: hand over the last messages of its partitions, which may be kept.

        If some of its messages stay, `left` has their offsets.
        """
        partitions = []
        for key in dict.fromkeys(stored.keys):
            partition = self._find(key)
            if partition is None or not self._store.is_last(stored, key):
                continue
            end = partition.visible_next
            if left is None or not within(left[key], end - 1, end):
                partitions.append(partition)
        if partitions:
            self._keep_last(stored.batch(), partitions)

    def _rewrite_sparse(self) -> int:
        """Cut purged messages out of batches that consist of them by half or more."""
        self._is_sparse = False
        cut: dict[int, StoredBatch] = {}
        for stored in self._store:
            if stored.messages * 2 <= stored.envelope.message_count:
                slices = self._unpurged(stored).values()
                cut[stored.entry] = stored.cut(sorted(run for part in slices for run in part.runs))
        self._store.replace(cut, self._unpurged)
        return len(cut)

    def _unpurged(self, stored: StoredBatch) -> dict[TopicPartition, PartitionSlice]:
        return {
            key: part
            for key, part in stored.slices().items()
            if (floor := self.floor_of(key)) is not None and part.next_offset > floor
        }

    # --- Acknowledged messages ---

    def _trim_acked(self, next_entry: int) -> Trimmed:
        """Remove batches without wanted messages; cut batches of which at most half is wanted."""
        version = self._shard_holds.version() if self.policy.retain.until is Until.ACKED else None
        if version is None or self._checked_at == (version, next_entry):
            return Trimmed()
        self._checked_at = (version, next_entry)
        left = self._wanted()
        unwanted: dict[StoredBatch, int] = {}
        for key, ranges in left.items():
            for part in self._store.slices(key) or ():
                lost = part.messages - part.count_in(ranges)
                if lost:
                    unwanted[part.stored] = unwanted.get(part.stored, 0) + lost
        gone: set[int] = set()
        cut: dict[int, StoredBatch] = {}
        for stored, lost in unwanted.items():
            if lost == stored.messages:
                gone.add(stored.entry)
            elif (stored.messages - lost) * 2 <= stored.envelope.message_count:
                self._hand_over_last(stored, left)
                cut[stored.entry] = stored.taken(self._unpurged(stored), left)
        bytes_before, removed = self._store.stored_bytes, len(gone)
        self._remove(gone)
        bytes_removed = bytes_before - self._store.stored_bytes
        if cut:
            self._store.replace(cut, self._unpurged)
        return Trimmed(removed, bytes_removed, len(cut))

    def _wanted(self) -> dict[TopicPartition, list[Range]]:
        """The offsets of every partition that are owed, not passed by a cursor, or covered by no subscription."""
        holds = self._shard_holds.of_cursors()
        wanted: dict[TopicPartition, list[Range]] = {}
        for key in self._store.keys():  # noqa: SIM118 - not a dict
            begin, end = self._store.offsets(key)
            partition = self._find(key)
            wanted[key] = left_of(
                begin,
                end,
                owed=self._shard_holds.owed(key, begin, end),
                held_from=self._held_from(holds, key),
                floor=1 if partition is None else partition.floor,
            )
        return wanted

    def _held_from(self, holds: Holds, key: TopicPartition) -> int | None:
        """The offset from which on cursors hold a partition."""
        offset, entry = holds.lowest_offset(key), holds.lowest_entry(key)
        part = None if entry is None else self._store.slice_from_entry(key, entry)
        if part is None:
            return offset
        return part.base_offset if offset is None else min(offset, part.base_offset)


def _holders(stored: StoredBatch, holds: Holds) -> set[str]:
    """The readers that hold messages of a batch."""
    held_by: set[str] = set()
    if holds:
        for key, part in stored.slices().items():
            held_by |= holds.holders(key, part.next_offset, stored.entry)
    return held_by
