"""Applies retention to one shard on disk: ends, removes and rewrites segments."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Final

from runnel.config import Until
from runnel.errors import Unavailable
from runnel.log.disk.group_writer import NO_ROOM
from runnel.log.disk.reader import ShardReader
from runnel.log.disk.writer import ShardParts, ShardWriter
from runnel.log.log import ShardId, Trimmed
from runnel.log.losses.shard_losses import Loss, LostRun, ShardLosses
from runnel.log.metadata.topic_table import Partition
from runnel.log.retention import acked, rules
from runnel.log.retention.acked import PartitionSpan, Remainder
from runnel.log.retention.holds import Holds, ShardHolds
from runnel.log.retention.rewriter import KeepOffsets, Rewritten, rewrite
from runnel.log.retention.rules import IsServed, Removal, SegmentFacts
from runnel.log.segments.index import Index, runs_of_blocks
from runnel.log.segments.scan import Damage
from runnel.log.segments.segments import IndexCache, Segment, SegmentFolder
from runnel.topics.names import TopicPartition
from runnel.topics.policies import JournalPolicy

# Partitions looked up between two turns of the loop.
_PARTITIONS_AT_ONCE: Final = 100
# The offsets of each partition in a segment are remembered for segments with at most this many partitions.
_SPANS_KEPT_MAX: Final = 1000


class ShardTrimmer:
    """Runs rounds of retention. Each step of a round holds `at_work`; so does code that must exclude rounds.

    By age and size the oldest segments of the journal go first, so a round of one shard removes those of the others
    too. No step waits for two shards at once.
    """

    def __init__(
        self,
        shard: ShardId,
        parts: ShardParts,
        policy: JournalPolicy,
        folder: SegmentFolder,
        cache: IndexCache,
        segments: list[Segment],
        writer: ShardWriter,
        reader: ShardReader,
        losses: ShardLosses,
        *,
        of_journal: Callable[[], Sequence[ShardTrimmer]],
        find: Callable[[TopicPartition], Partition | None],
        shard_holds: ShardHolds,
        before_removal: Callable[[Sequence[Partition]], Awaitable[None]],
        on_damage: Callable[[Damage], None],
        on_removed: Callable[[], None],
    ) -> None:
        self.shard = shard
        self._of_journal = (
            of_journal  # the trimmers of all shards of the journal, this one included
        )
        self._parts = parts
        self._policy = policy
        self._folder = folder
        self._cache = cache
        self._segments = segments
        self._writer = writer
        self._reader = reader
        self._losses = losses
        self._find = find
        self._shard_holds = shard_holds
        self._before_removal = before_removal  # gets the partitions whose last messages go
        self._on_damage = on_damage
        self._on_removed = on_removed
        self._may_be_sparse = False  # messages have been hidden
        self._compact: set[str] = set()  # paths of segments in which little is hidden
        # By segment path: the version of the holds at the last check for acknowledged messages; end and spans.
        self._checked_at: dict[str, tuple[int, int]] = {}
        self._spans: dict[str, tuple[int, Sequence[PartitionSpan]]] = {}
        self._held: set[int] = set()  # numbers of segments that only a hold keeps
        # What was removed with older segments of the journal, until a round of this shard reports it.
        self._removed: list[Trimmed] = []
        self._stopped = False
        self.at_work = asyncio.Lock()

    def stop(self) -> None:
        """Begin no further step. A step that is under way holds `at_work`."""
        self._stopped = True

    def _is_stopped(self) -> bool:
        return self._stopped

    def use_policy(self, policy: JournalPolicy) -> None:
        """Use this policy from the next decision on."""
        self._policy = policy

    def recheck_all(self) -> None:
        """Check all segments again: more messages have been hidden, and segments may have become sparse."""
        self._may_be_sparse = True
        self._compact.clear()
        self._checked_at.clear()

    async def trim(self, served_at: Callable[[int], IsServed]) -> Trimmed:
        """Run one round: end an old active segment, remove segments, rewrite sparse ones."""
        now_ns = self._parts.clock.time_ns()
        async with self.at_work:
            if self._is_stopped():
                return Trimmed()
            with suppress(Unavailable):  # no room to record where it ends: removals below make some
                await self._end_old_active(now_ns)
            for segment in list(self._writer.unsealed):
                await self._writer.seal(segment)
            acknowledged, sparse = await self._remove_acked()
        await self._remove_old(now_ns)
        async with self.at_work:
            removed, self._removed = self._removed, []
            if self._is_stopped():
                return Trimmed.of([acknowledged, *removed])
            # Last: on a full disk the removals make the room that this needs.
            rewritten = await self._rewrite_unserved(served_at(now_ns))
            rewritten += await self._rewrite_acked(sparse)
            return Trimmed.of([acknowledged, *removed, Trimmed(segments_rewritten=rewritten)])

    def _sealed(self) -> list[Segment]:
        return [segment for segment in self._segments if segment.growing is None]

    async def _remove_old(self, now_ns: int) -> None:
        """Remove the segments of the journal that are past its age or size, in all its shards, oldest first."""
        trimmers = {trimmer.shard.shard: trimmer for trimmer in self._of_journal()}
        removal = Removal(
            sum(trimmer.stored_bytes for trimmer in trimmers.values()),
            self._policy.retain,
            self._policy.pin,
            now_ns,
        )
        holds: dict[int, Holds] = {}
        self._held.clear()
        for facts in heapq.merge(
            *(trimmer.facts() for trimmer in trimmers.values()), key=lambda each: each.age_order
        ):
            if not removal.is_due(facts):
                return
            trimmer = trimmers[facts.shard]
            if facts.shard not in holds:
                holds[facts.shard] = trimmer.holds()
            is_kept = await trimmer.remove_due(facts, removal, holds[facts.shard])
            if is_kept and trimmer is self:
                self._held.add(facts.number)

    @property
    def stored_bytes(self) -> int:
        return sum(segment.end for segment in self._segments)

    def facts(self) -> list[SegmentFacts]:
        """The sealed segments, without their holds."""
        shard = self.shard.shard
        return [
            SegmentFacts(segment.number, segment.end, segment.last_time_ns, shard=shard)
            for segment in self._sealed()
        ]

    def holds(self) -> Holds:
        """The holds of all readers on this shard."""
        return self._shard_holds.of_all_readers()

    async def remove_due(self, facts: SegmentFacts, removal: Removal, holds: Holds) -> bool:
        """Remove a segment that is due, unless it is held. Returns whether only a hold keeps it."""
        async with self.at_work:
            segment = next((each for each in self._sealed() if each.number == facts.number), None)
            if segment is None or self._is_stopped():
                return False
            held_by = await self._holders(segment, holds) if holds else set()
            if not removal.takes(facts, held_by):
                return True
            with suppress(Unavailable):  # no room for its last values: the others may make some
                await self._remove(segment)
                self._removed.append(Trimmed(1, segment.end))
            self._removed.append(Trimmed(holds_passed=sorted(held_by)))
            return False

    async def _rewrite_unserved(self, is_served: IsServed) -> int:
        """Rewrite segments that are held by few messages, or in which much is hidden."""
        holds = self.holds()
        rewritten = 0
        for segment in self._sealed():
            is_held = segment.number in self._held
            if is_held or (self._may_be_sparse and segment.path not in self._compact):
                held = holds if is_held else None
                rewritten += await self._rewrite_sparse(segment, is_served, held)
        return rewritten

    async def _end_old_active(self, now_ns: int) -> None:
        """Seal an active segment whose rotation period or retention age is over, even if nothing more arrives."""
        active = self._writer.active
        if active is None or active.is_empty or self._writer.queued_batches:
            return
        rotate, age_ns = self._policy.rotate, self._policy.retain.age_ns
        period = rules.rotation_period(now_ns, rotate.every_ns, rotate.at_ns)
        is_past = (
            rules.rotation_period(active.first_time_ns, rotate.every_ns, rotate.at_ns) < period
        )
        if is_past or (age_ns is not None and active.last_time_ns < now_ns - age_ns):
            await self._writer.end_active()

    async def _holders(self, segment: Segment, holds: Holds) -> set[str]:
        """The readers that hold messages in a segment."""
        held_by: set[str] = set()
        index = await self._reader.index(segment)
        for key in index.keys():  # noqa: SIM118 - not a dict
            end = index.next_offset(key)
            held_by |= holds.holders(key, end, segment.last_entry)
        return held_by

    async def _remove(self, segment: Segment) -> None:
        await self._before_removal(
            _partitions_ending_in(await self._reader.index(segment), self._find)
        )
        await self._note_removed(segment)
        self._segments.remove(segment)
        await self._discard(segment)

    async def _note_removed(self, segment: Segment) -> None:
        """Record a removal before it happens: otherwise the missing segment would be a loss. Unavailable: keep it."""
        first = next((each.number for each in self._segments if each is not segment), None)
        before = self._losses.remembered
        self._losses.note_removed(segment.number, first)
        submit = self._parts.workers.submit
        try:
            try:
                await submit(self._losses.save)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self._cache.drop(segment.path)
                await submit(self._folder.remove_index, segment)  # frees a little room
                await submit(self._losses.save)
        except OSError as error:
            self._losses.restore(before)
            raise Unavailable(f"{segment.path} cannot be removed: {error}") from error

    async def _discard(self, segment: Segment) -> None:
        """Remove the files and cached facts of a segment that has left the shard's list."""
        self._cache.drop(segment.path)
        self._checked_at.pop(segment.path, None)
        self._spans.pop(segment.path, None)
        self._on_removed()
        await self._parts.workers.submit(self._folder.remove, segment)

    # --- Acknowledged messages ---

    async def _remove_acked(self) -> tuple[Trimmed, list[tuple[Segment, Remainder]]]:
        """Remove segments without wanted messages. Returns the sparse ones with their wanted messages."""
        removed = removed_bytes = 0
        sparse: list[tuple[Segment, Remainder]] = []
        version = self._shard_holds.version() if self._policy.retain.until is Until.ACKED else None
        if version is None:
            return Trimmed(), []
        holds = self._shard_holds.of_cursors()
        for segment in self._sealed():
            if self._checked_at.get(segment.path) == version:
                continue
            left = await self._left_of(segment, holds)
            if left.is_nothing:
                with suppress(Unavailable):  # no room for its last values: the others may make some
                    await self._remove(segment)
                    removed += 1
                    removed_bytes += segment.end
            elif left.is_sparse:
                sparse.append((segment, left))
            else:
                self._checked_at[segment.path] = version
        return Trimmed(removed, removed_bytes), sparse

    async def _rewrite_acked(self, sparse: Sequence[tuple[Segment, Remainder]]) -> int:
        rewritten = 0
        for segment, left in sparse:
            if segment in self._segments:  # neither removed nor rewritten meanwhile
                await self._rewrite(segment, left.keep)
                rewritten += 1
        return rewritten

    async def _left_of(self, segment: Segment, holds: Holds) -> Remainder:
        """The messages that are owed, not passed by a cursor, or covered by no subscription."""
        messages = total = 0
        ranges: dict[TopicPartition, list[acked.Range]] = {}
        for number, span in enumerate(await self._spans_of(segment), 1):
            if number % _PARTITIONS_AT_ONCE == 0:
                await asyncio.sleep(0)
            key, first, end, count = span
            partition = self._find(key)
            if partition is None and self._may_be_sparse:
                left = []  # deleted
            else:
                left = acked.left_of(
                    first,
                    end,
                    owed=self._shard_holds.owed(key, first, end),
                    held_from=await self._held_from(segment, key, holds),
                    floor=1 if partition is None else partition.floor,
                )
            ranges[key] = left
            total += count
            messages += (
                await self._count(segment, left, key) if span.has_holes else acked.length(left)
            )
        return Remainder(messages, total, ranges)

    async def _spans_of(self, segment: Segment) -> Sequence[PartitionSpan]:
        end, spans = self._spans.get(segment.path, (0, ()))
        if end != segment.end:
            index = await self._reader.index(segment)
            spans = acked.spans_of(index.run_table(lambda _: True))
            if len(spans) <= _SPANS_KEPT_MAX:
                self._spans[segment.path] = (segment.end, spans)
        return spans

    async def _held_from(self, segment: Segment, key: TopicPartition, holds: Holds) -> int | None:
        """The offset from which on cursors hold a partition in this segment."""
        offset, entry = holds.lowest_offset(key), holds.lowest_entry(key)
        if entry is None:
            return offset
        index = await self._reader.index(segment)
        place = index.first_run_from_block(key, index.first_block_from_entry(entry))
        if place is None:
            return offset
        return place.base_offset if offset is None else min(offset, place.base_offset)

    async def _count(
        self, segment: Segment, ranges: Sequence[acked.Range], key: TopicPartition
    ) -> int:
        index = await self._reader.index(segment)
        return acked.count_there(ranges, index.run_table(lambda found: found == key))

    # --- Rewriting ---

    async def _rewrite_sparse(
        self, segment: Segment, is_served: IsServed, holds: Holds | None
    ) -> int:
        """Rewrite a segment if at most half of it is wanted: served to readers and, if `holds` is given, held."""

        def is_wanted(key: TopicPartition, next_offset: int, time_ns: int, entry: int) -> bool:
            if holds is not None and not holds.is_held(key, next_offset, entry):
                return False
            return is_served(key, next_offset, time_ns, entry)

        index = await self._reader.index(segment)
        total = wanted = 0
        for key in index.keys():  # noqa: SIM118 - not a dict
            for place in index.runs_from(key, 0):
                entry, _, time_ns = index.block_place(place.block)
                total += place.count
                if is_wanted(key, place.base_offset + place.count, time_ns, entry):
                    wanted += place.count
        if wanted * 2 > total:
            self._compact.add(segment.path)
            return 0
        await self._rewrite(
            segment,
            lambda key, base, count, time_ns, entry: (
                [(base, base + count)] if is_wanted(key, base + count, time_ns, entry) else []
            ),
        )
        return 1

    async def rewrite(self, keep: KeepOffsets) -> int:
        """Rewrite every sealed segment, keeping only these offsets. Returns the number of segments."""
        async with self.at_work:
            sealed = self._sealed()
            for segment in sealed:
                await self._rewrite(segment, keep)
            return len(sealed)

    async def _rewrite(self, segment: Segment, keep: KeepOffsets) -> None:
        parts = self._parts
        index = await self._reader.index(segment)
        await self._before_removal(
            [
                part
                for part in _partitions_ending_in(index, self._find)
                if not _keeps_end(index, part.key, keep)
            ]
        )

        def save_losses(met: AbstractSet[int]) -> None:
            """Store the losses before the old index goes: only it knows what could not be copied. Runs in a worker."""
            lost = _losses_of(segment, index, keep, met)
            if lost:
                self._losses.add(lost)
                self._losses.save()

        rewritten: Rewritten = await parts.workers.submit(
            rewrite,
            parts.disk,
            parts.files,
            self._folder.folder,
            segment,
            self.shard.shard,
            parts.epoch,
            keep,
            save_losses,
        )
        for damage in rewritten.scanned.damage:
            self._on_damage(damage)
        if rewritten.segment is None:
            try:
                await self._note_removed(segment)
            except Unavailable:
                return  # the segment stays for now
        place = self._segments.index(segment)
        self._segments[place : place + 1] = [rewritten.segment] if rewritten.segment else []
        await self._discard(segment)


def _partitions_ending_in(
    index: Index, find: Callable[[TopicPartition], Partition | None]
) -> list[Partition]:
    """The partitions whose last message lies in this segment."""
    return [
        partition
        for key in index.keys()  # noqa: SIM118 - not a dict
        if (partition := find(key)) is not None and index.next_offset(key) == partition.visible_next
    ]


def _losses_of(
    segment: Segment, index: Index, keep: KeepOffsets, met: AbstractSet[int]
) -> list[Loss]:
    """The messages that the index has and the segment has not, as far as they would be kept."""
    if len(met) == index.block_count():
        return []
    places = {number: index.block_place(number) for number in range(index.block_count())}
    missing = [number for number, (entry, _, _) in places.items() if entry not in met]
    found: list[Loss] = []
    for number, runs in runs_of_blocks(index, missing).items():
        entry, position, time_ns = places[number]
        begin, end = index.block_positions(number, number + 1)
        lost = tuple(
            LostRun(*key, first, following)
            for key, base, count in runs
            for first, following in keep(key, base, count, time_ns, entry)
        )
        if lost:
            name = segment.path.rpartition("/")[2]
            text = "damaged, and left out when the segment was rewritten"
            size = end - begin
            place = (segment.number, name, position, size, text, entry, entry + 1, time_ns)
            found.append(Loss(*place, lost))
    return found


def _keeps_end(index: Index, key: TopicPartition, keep: KeepOffsets) -> bool:
    """Whether a topic-partition's last message in a segment would stay."""
    end = index.next_offset(key)
    for place in index.runs_from(key, end - 1):
        entry, _, time_ns = index.block_place(place.block)
        kept = keep(key, place.base_offset, place.count, time_ns, entry)
        return bool(kept) and kept[-1][1] == end
    return False
