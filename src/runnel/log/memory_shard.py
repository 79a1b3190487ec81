"""One shard in memory: packed batches in order, and for each partition where its runs are.

A batch is the same bytes here as on disk. It is visible at once and answered for as `received`: nothing here outlives
the process. Retention looks at each batch as it looks at a segment on disk. Between its rounds the shard never holds
more than its cap, `retain.bytes` or `log.memory_journal_bytes_max`, whichever is more: beyond it the oldest batches go,
whoever still wants them, and readers are told the gap.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from runnel.config import LogSettings, Until
from runnel.errors import OffsetAheadError, OffsetGoneError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.log import acked, retention
from runnel.log.acked import Range
from runnel.log.counting import KEYS_PER_STEP, Turn, floors
from runnel.log.log import (
    Appended,
    Bounds,
    Chosen,
    Found,
    Level,
    Listener,
    Page,
    Passed,
    Position,
    ShardId,
    ShardPage,
    ShardStatistics,
    Stored,
    Trimmed,
)
from runnel.log.memory_batches import Place, Row, StoredBatch
from runnel.log.pins import ShardPins
from runnel.log.producers import ProducerTable, check_same_batch
from runnel.log.retention import Holds, IsServed, SegmentFacts, passed_runs, served_runs
from runnel.log.topic_table import Partition, number_runs
from runnel.platform.clock import Clock
from runnel.topics.names import TopicPartition
from runnel.topics.policies import JournalPolicy

# Above its cap a shard gives up this part of it at once, so that the next appends need not look again.
_SHED_PART: Final = 16


def _entry(stored: StoredBatch) -> int:
    return stored.entry


def _batch_time(stored: StoredBatch) -> int:
    return stored.time_ns


def _place_end(place: Place) -> int:
    return place.next_offset


def _place_time(place: Place) -> int:
    return place.stored.time_ns


def _place_entry(place: Place) -> int:
    return place.stored.entry


class MemoryShard:
    """See the module's first lines. `find` finds a partition, `pins` tells what readers claim here."""

    def __init__(
        self,
        shard: ShardId,
        policy: JournalPolicy,
        clock: Clock,
        producers: ProducerTable,
        settings: LogSettings,
        epoch: int,
        *,
        find: Callable[[TopicPartition], Partition | None],
        pins: ShardPins,
        keep_last: Callable[[Batch, Sequence[Partition]], None],
        listener: Listener,
    ) -> None:
        self._listener = listener
        self.id = shard
        self._clock = clock
        self._producers = producers
        self._epoch = epoch
        self._find = find
        self.hidings = 0  # rises when messages have been hidden
        self._pins = pins
        self._keep_last = keep_last
        self._journal_bytes_max = settings.memory_journal_bytes_max
        self.use_policy(policy)
        self._row: Row[StoredBatch] = Row()
        self._places: dict[TopicPartition, Row[Place]] = {}
        self._stored_bytes = 0
        self._next_entry = 1
        self._last_time_ns = 0
        self._has_hidden = False  # purged messages may lie here
        self._is_sparse = False  # and have not been looked for yet
        # When acknowledged messages were last looked for: the version of the pins, and the next entry then.
        self._looked_at: tuple[tuple[int, int], int] | None = None
        self._entries = self._messages = self._bytes = 0  # since the log was made
        # What was shed between two rounds of retention, told by the next.
        self._shed_batches = self._shed_bytes = 0
        self._shed_pins: set[str] = set()

    def use_policy(self, policy: JournalPolicy) -> None:
        """Pins may hold more than `retain.bytes`, but never more than there is room for."""
        bytes_max = policy.retain.bytes_max or self._journal_bytes_max
        self._bytes_cap = max(bytes_max, self._journal_bytes_max)
        self._policy = msgspec.structs.replace(
            policy,
            retain=msgspec.structs.replace(policy.retain, bytes_max=bytes_max),
            pin=msgspec.structs.replace(
                policy.pin, bytes_max=min(policy.pin.bytes_max or self._bytes_cap, self._bytes_cap)
            ),
        )

    # --- Appending ---

    def append(self, batch: Batch, partitions: Sequence[Partition], level: Level) -> Appended:
        head = batch.envelope
        if head.producer is not None:
            repeated = self._producers.check(head.producer, head.term, head.number)
            if repeated is not None:
                return self._repeat(repeated.entry, head)
        self._last_time_ns = max(self._last_time_ns, self._clock.time_ns())
        entry = self._next_entry
        if head.producer is not None:
            self._producers.accept(head.producer, head.term, head.number, entry, self._last_time_ns)
            level = Level.RECEIVED
        numbered = number_runs(
            head,
            partitions,
            shard=self.id.shard,
            epoch=self._epoch,
            entry=entry,
            receive_time_ns=self._last_time_ns,
        )
        self._next_entry = entry + 1
        keys = [partition.key for partition in partitions]
        stored = StoredBatch(Batch(numbered, batch.body), keys)
        self._add(stored, stored.places())
        for partition in partitions:
            partition.visible_next = partition.next_offset
        self._entries += 1
        self._messages += stored.messages
        self._bytes += len(stored.packed)
        if self._stored_bytes > self._bytes_cap:
            self._shed()
        self._listener.on_stored(self.id, (Stored(numbered, stored.body, packed=stored.packed),))
        return _answer(stored, Level.NONE if level is Level.NONE else Level.RECEIVED)

    def _add(self, stored: StoredBatch, places: Mapping[TopicPartition, Place]) -> None:
        self._row.append(stored)
        self._stored_bytes += len(stored.packed)
        for key, place in places.items():
            row = self._places.get(key)
            if row is None:
                row = self._places[key] = Row()
            row.append(place)

    def _repeat(self, entry: int | None, repeated: Envelope) -> Appended:
        """The original answer; without offsets if the batch is no longer there in full."""
        stored = self._at_entry(entry) if entry is not None else None
        if stored is None or stored.envelope.rows:
            return Appended((), entry or 0, 0, 0, Level.RECEIVED, is_repeated=True)
        check_same_batch(stored.envelope, repeated)
        return msgspec.structs.replace(_answer(stored, Level.RECEIVED), is_repeated=True)

    def _at_entry(self, entry: int) -> StoredBatch | None:
        found = next(self._row.from_number(self._row.number_from(entry, _entry)), None)
        return found if found is not None and found.entry == entry else None

    # --- Reading ---

    def _is_served(self) -> IsServed:
        return retention.served_at(
            self._clock.time_ns(),
            self._policy,
            floor_of=self._floor_of if self._has_hidden else None,
            holds=self._pins.holds,
        )

    def _floor_of(self, key: TopicPartition) -> int | None:
        partition = self._find(key)
        return None if partition is None else partition.floor

    def _served(self, partition: Partition, offset: int, is_served: IsServed) -> Iterator[Place]:
        """The partition's places that end behind an offset, as far as they are served."""
        row = self._places.get(partition.key)
        if row is None:
            return
        for place in row.from_number(row.number_above(offset, _place_end)):
            if is_served(
                partition.key, place.next_offset, place.stored.time_ns, place.stored.entry
            ):
                yield place

    def bounds(self, partition: Partition) -> Bounds:
        return self._bounds(partition, self._is_served())

    def _bounds(self, partition: Partition, is_served: IsServed) -> Bounds:
        next_offset = partition.visible_next
        first = next(self._served(partition, partition.floor, is_served), None)
        if first is None:
            return Bounds(next_offset, next_offset)
        return Bounds(max(first.base_offset, partition.floor), next_offset)

    def offset_at(self, partition: Partition, time_ns: int) -> int:
        bounds = self.bounds(partition)
        row = self._places.get(partition.key)
        if row is None:
            return bounds.next_offset
        later = next(row.from_number(row.number_from(time_ns, _place_time)), None)
        return bounds.next_offset if later is None else max(later.base_offset, bounds.first_offset)

    def entry_at(self, time_ns: int) -> int:
        """The first entry received at this time or later; the next one if none was."""
        number = self._row.number_from(time_ns, _batch_time)
        later = next(self._row.from_number(number), None)
        return self._next_entry if later is None else later.entry

    def newest_term(self, producer: str) -> int:
        return self._producers.term(producer)

    def read(self, partition: Partition, offset: int, bytes_max: int) -> Page:
        is_served = self._is_served()  # by one time, or what passes its age meanwhile is missed
        bounds = self._bounds(partition, is_served)
        if offset > bounds.next_offset:
            raise OffsetAheadError(*partition.key, offset, bounds.next_offset)
        if offset < bounds.first_offset:
            raise OffsetGoneError(*partition.key, offset, bounds.first_offset)
        found: list[Found] = []
        size = 0
        next_offset = bounds.next_offset
        for place in self._served(partition, offset, is_served):
            size += len(place.stored.packed)
            if found and size > bytes_max:
                break
            found.append(place.stored.found(place.runs))
            next_offset = place.next_offset
        return Page(found, next_offset)

    def entries(self) -> Bounds:
        first = self._row.first.entry if len(self._row) else self._next_entry
        return Bounds(first, self._next_entry)

    async def count(self, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        """Messages from this entry on whose topics match: right, or too high."""
        floor_of = floors(patterns, self._find)
        keys = list(self._places)
        total = 0
        for begin in range(0, len(keys), KEYS_PER_STEP):
            await turn()
            for key in keys[begin : begin + KEYS_PER_STEP]:
                floor, row = floor_of(key), self._places.get(key)
                if floor is None or not row:
                    continue
                first = next(row.from_number(row.number_from(entry, _place_entry)), None)
                if first is not None:
                    total += max(0, row.last.next_offset - max(first.base_offset, floor))
        return total

    def read_entries(self, position: Position, bytes_max: int) -> ShardPage:
        bounds = self.entries()
        first = bounds.first_offset
        if position.epoch not in (0, self._epoch):
            # Of another epoch: its number says nothing about this one's entries.
            raise OffsetGoneError(str(self.id), self.id.shard, min(position.entry, first), first)
        if position.entry > bounds.next_offset:
            raise OffsetAheadError(str(self.id), self.id.shard, position.entry, bounds.next_offset)
        if position.entry < first:
            raise OffsetGoneError(str(self.id), self.id.shard, position.entry, first)
        needs_filter = self._has_hidden or self._policy.retain.age_ns is not None
        is_served = self._is_served() if needs_filter else None
        found: list[Found] = []
        passed: list[Passed] = []
        size = 0
        next_entry = bounds.next_offset
        for stored in self._row.from_number(self._row.number_from(position.entry, _entry)):
            if size and size + len(stored.packed) > bytes_max:
                next_entry = stored.entry
                break
            size += len(stored.packed)
            runs = None if is_served is None else served_runs(stored.envelope, is_served)
            if runs is None or runs:
                found.append(stored.found(runs))
            if runs is not None:
                passed += passed_runs(stored.envelope, runs)
        return ShardPage(found, Position(self._epoch, next_entry), (), passed)

    def entries_with(self, wanted: Mapping[TopicPartition, int]) -> dict[int, list[TopicPartition]]:
        """In which entries these messages lie, one offset a partition; those not here are left out."""
        entries: dict[int, list[TopicPartition]] = {}
        for key, offset in wanted.items():
            place = self._place_of(key, offset)
            if place is not None:
                entries.setdefault(place.stored.entry, []).append(key)
        return entries

    def choose(
        self,
        entry: int,
        keys: Sequence[TopicPartition],
        wanted: Mapping[TopicPartition, int],
        left: dict[TopicPartition, int],
        lasting: Container[TopicPartition],
    ) -> Sequence[Chosen]:
        """The messages of one entry, as far as they are still here; they are taken out of `left`.

        Of the partitions in `lasting` also what has passed its age.
        """
        is_served = self._is_served()
        places: dict[TopicPartition, Place] = {}
        for key in keys:
            place, partition = self._place_of(key, wanted[key]), self._find(key)
            if place is None or partition is None or wanted[key] < partition.floor:
                continue
            if key in lasting or is_served(key, place.next_offset, place.stored.time_ns, entry):
                places[key] = place
                del left[key]
        if not places:
            return ()
        stored = next(iter(places.values())).stored
        head = stored.envelope
        starts, bases = head.run_starts(), head.vector64(head.base_offsets)
        rows: list[int] = []
        for key, place in places.items():
            # Of a key's runs, the last that begins before the message has it.
            run = max(run for run in place.runs if bases[run] <= wanted[key])
            rows.append(int(starts[run] + wanted[key] - bases[run]))
        return (Chosen(stored.batch(), sorted(rows)),)

    def _place_of(self, key: TopicPartition, offset: int) -> Place | None:
        row = self._places.get(key)
        if row is None:
            return None
        place = next(row.from_number(row.number_above(offset, _place_end)), None)
        return place if place is not None and place.has(offset) else None

    # --- Retention ---

    def hide(self, partition: Partition) -> None:
        """Let go of what lies below the partition's floor; of batches shared with others, in `trim`."""
        row = self._places.get(partition.key)
        if row is None:
            return
        self._has_hidden = self._is_sparse = True
        self.hidings += 1
        self._looked_at = None
        while row and row.first.next_offset <= partition.floor:
            row.first.stored.messages -= row.first.messages
            row.drop_first()
        if not row:
            del self._places[partition.key]
        self._row = Row(stored for stored in self._row if stored.messages)
        self._stored_bytes = sum(len(stored.packed) for stored in self._row)

    def trim(self) -> Trimmed:
        """One round of retention, and what was shed since the last."""
        acknowledged = self._trim_acked()
        holds = self._pins.holds()
        decision = retention.decide(
            (self._facts(stored, holds) for stored in self._row),
            self._stored_bytes,
            self._policy.retain,
            self._policy.pin,
            self._clock.time_ns(),
        )
        bytes_before = self._stored_bytes
        self._remove(set(decision.remove))
        bytes_removed = bytes_before - self._stored_bytes
        rewritten = self._rewrite_sparse() if self._is_sparse else 0
        trimmed = Trimmed(
            len(decision.remove) + self._shed_batches,
            bytes_removed + self._shed_bytes,
            rewritten,
            sorted(decision.pins_passed | self._shed_pins),
        )
        self._shed_batches = self._shed_bytes = 0
        self._shed_pins.clear()
        return Trimmed.of([acknowledged, trimmed])

    def _facts(self, stored: StoredBatch, holds: Holds) -> SegmentFacts:
        held_by: set[str] = set()
        if holds:
            for key, place in stored.places().items():
                held_by |= holds.holders(key, place.next_offset, stored.entry)
        size = len(stored.packed)
        return SegmentFacts(stored.entry, size, stored.time_ns, frozenset(held_by))

    def _remove(self, entries: set[int]) -> None:
        while len(self._row) and self._row.first.entry in entries:
            entries.discard(self._row.first.entry)
            self._drop_first()
        if not entries:
            return
        # A pin holds something older: these leave from the middle.
        leaving = [stored for stored in self._row if stored.entry in entries]
        self._row = Row(stored for stored in self._row if stored.entry not in entries)
        for stored in leaving:
            self._hand_over_last(stored)
        for key in {key for stored in leaving for key in stored.keys}:
            left = [
                place for place in self._places.get(key, ()) if place.stored.entry not in entries
            ]
            self._set_places(key, left)
        self._stored_bytes = sum(len(stored.packed) for stored in self._row)

    def _drop_first(self) -> None:
        stored = self._row.first
        self._row.drop_first()
        self._stored_bytes -= len(stored.packed)
        self._hand_over_last(stored)
        for key in dict.fromkeys(stored.keys):
            row = self._places.get(key)
            if row is None or row.first.stored is not stored:
                continue  # purged
            row.drop_first()
            if not row:
                del self._places[key]

    def _hand_over_last(
        self, stored: StoredBatch, left: Mapping[TopicPartition, Sequence[Range]] | None = None
    ) -> None:
        """A batch leaves: the last messages of partitions that are in it may be kept beyond retention.

        If some of it stays, `left` tells what does.
        """
        partitions = []
        for key in dict.fromkeys(stored.keys):
            partition, row = self._find(key), self._places.get(key)
            if partition is None or not row or row.last.stored is not stored:
                continue
            end = partition.visible_next
            if left is None or not acked.within(left[key], end - 1, end):
                partitions.append(partition)
        if partitions:
            self._keep_last(stored.batch(), partitions)

    def _set_places(self, key: TopicPartition, places: Sequence[Place]) -> None:
        if places:
            self._places[key] = Row(places)
        else:
            self._places.pop(key, None)

    def _shed(self) -> None:
        """Too much: the oldest go at once, all but the newest batch if need be."""
        holds = self._pins.holds()
        target = self._bytes_cap - self._bytes_cap // _SHED_PART
        bytes_before, batches_before = self._stored_bytes, len(self._row)
        while self._stored_bytes > target and len(self._row) > 1:
            self._shed_pins |= self._facts(self._row.first, holds).held_by
            self._drop_first()
        self._shed_bytes += bytes_before - self._stored_bytes
        self._shed_batches += batches_before - len(self._row)

    def _rewrite_sparse(self) -> int:
        """Cut the purged messages out of batches of which they are half or more."""
        self._is_sparse = False
        cut: dict[int, StoredBatch] = {}
        for stored in self._row:
            if stored.messages * 2 <= stored.envelope.message_count:
                places = self._left_of(stored).values()
                cut[stored.entry] = stored.cut(sorted(run for at in places for run in at.runs))
        self._replace(cut)
        return len(cut)

    def _replace(self, cut: Mapping[int, StoredBatch]) -> None:
        """Put these in the place of the batches with their entries."""
        former, self._row, self._places = self._row, Row(), {}
        self._stored_bytes = 0
        for stored in former:
            new = cut.get(stored.entry)
            if new is None:
                self._add(stored, self._left_of(stored))
            else:
                self._add(new, new.places())

    def _left_of(self, stored: StoredBatch) -> dict[TopicPartition, Place]:
        """What has not been purged of a batch."""
        return {
            key: place
            for key, place in stored.places().items()
            if (floor := self._floor_of(key)) is not None and place.next_offset > floor
        }

    # --- What subscriptions have acknowledged ---

    def _trim_acked(self) -> Trimmed:
        """Remove batches of which nothing is wanted any more; cut those of which half or less is."""
        version = self._pins.version() if self._policy.retain.until is Until.ACKED else None
        if version is None or self._looked_at == (version, self._next_entry):
            return Trimmed()
        self._looked_at = (version, self._next_entry)
        left = self._wanted()
        unwanted: dict[StoredBatch, int] = {}
        for key, ranges in left.items():
            for place in self._places[key]:
                lost = place.messages - place.count_in(ranges)
                if lost:
                    unwanted[place.stored] = unwanted.get(place.stored, 0) + lost
        gone: set[int] = set()
        cut: dict[int, StoredBatch] = {}
        for stored, lost in unwanted.items():
            if lost == stored.messages:
                gone.add(stored.entry)
            elif (stored.messages - lost) * 2 <= stored.envelope.message_count:
                self._hand_over_last(stored, left)
                cut[stored.entry] = stored.taken(self._left_of(stored), left)
        bytes_before, removed = self._stored_bytes, len(gone)
        self._remove(gone)
        bytes_removed = bytes_before - self._stored_bytes
        if cut:
            self._replace(cut)
        return Trimmed(removed, bytes_removed, len(cut))

    def _wanted(self) -> dict[TopicPartition, list[Range]]:
        """What is owed, not passed by a cursor, or covered by no subscription, of every partition."""
        holds = self._pins.cursors()
        wanted: dict[TopicPartition, list[Range]] = {}
        for key, row in self._places.items():
            begin, end = row.first.base_offset, row.last.next_offset
            partition = self._find(key)
            wanted[key] = acked.left_of(
                begin,
                end,
                owed=self._pins.owed(key, begin, end),
                held_from=_held_from(holds, key, row),
                floor=1 if partition is None else partition.floor,
            )
        return wanted

    # --- Telling ---

    def statistics(self) -> ShardStatistics:
        return ShardStatistics(
            shard=self.id,
            entries=self._entries,
            messages=self._messages,
            bytes=self._bytes,
            stored_bytes=self._stored_bytes,
            segments=len(self._row),
            syncs=0,
            sync_time_ns=0,
            sync_time_max_ns=0,
            queued_batches=0,
            queued_bytes=0,
            failed_batches=0,
            is_read_only=False,
            producers=len(self._producers),
        )


def _held_from(holds: Holds, key: TopicPartition, row: Row[Place]) -> int | None:
    """From which offset on cursors hold a partition."""
    offset, entry = holds.lowest_offset(key), holds.lowest_entry(key)
    if entry is None:
        return offset
    place = next(row.from_number(row.number_from(entry, _place_entry)), None)
    if place is None:
        return offset
    return place.base_offset if offset is None else min(offset, place.base_offset)


def _answer(stored: StoredBatch, level: Level) -> Appended:
    head = stored.envelope
    return Appended(
        base_offsets=head.column64(head.base_offsets),
        entry=stored.entry,
        epoch=head.column64(head.epochs)[0],
        receive_time_ns=stored.time_ns,
        level=level,
    )
