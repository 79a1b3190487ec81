"""A consumer group at work: joins the group's rules to the log, the clock, the state journal and the listeners.

A consumer group belongs to a subscription; a multicast has one for each member. It is active while it has consumers:
then it learns of stored messages, reads the messages that are wanted, and sends what the group's rules decide. The code
between two awaits sees one state. After a read, the runs are offered to the rules, which take the messages that can be
delivered by then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Final

import msgspec

from runnel.broker.consumer_groups.ack_journals import AckJournals, ShardAckJournal
from runnel.broker.consumer_groups.dead_letter_writer import DeadLetterWriter, LetterIdentity
from runnel.broker.consumer_groups.errands import Errands
from runnel.broker.consumer_groups.run_cache import RunCache, StoredRun
from runnel.broker.consumer_groups.run_reader import Missing, RunsRead, read_runs
from runnel.broker.consumer_groups.sink import HeldPart, WorkDelivery, WorkSink
from runnel.broker.consumer_groups.timer_queue import TimerQueue
from runnel.broker.limits.fair_semaphore import FairSemaphore
from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.monitoring.events import EventKind, Events
from runnel.broker.monitoring.metrics import Metrics
from runnel.broker.stores import Stores, moved
from runnel.errors import MovedError, RunnelError, Unavailable, UnknownTopicError
from runnel.formats.heads import Start
from runnel.formats.work_heads import Attempt, DeliveryPart, HeldLease, Lease, Picked
from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.awaited_holders import HOLDERS_WAIT_NS, AwaitedHolders
from runnel.group_rules.definition import Definition, Mode
from runnel.group_rules.effects import OFFSET_MAX, DeadLetter, Effects, Failure, LeasedDelivery
from runnel.group_rules.group import Group
from runnel.group_rules.records import (
    FailedRecord,
    HeldBy,
    HeldRecord,
    PartitionAcks,
    PickedRecord,
    at_record,
)
from runnel.log.log import OwnedShard
from runnel.platform.clock import Clock
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition

# Offers before the event loop gets to other work.
_OFFERS_PER_TURN: Final = 32
_PAGE_BYTES_MIN: Final = 2**16
_PAGE_BYTES_MAX: Final = 2**20
_READ_RETRY_NS: Final = 1_000_000_000
# Only moves that were under way when they left concern them.
_LEFT_HOLDERS_MAX: Final = 1_000


class ConsumerGroupParts(msgspec.Struct, frozen=True):
    """The parts that all consumer groups share."""

    stores: Stores
    state: AckJournals
    run_cache: RunCache
    timers: TimerQueue
    clock: Clock
    workers: Workers
    reads: FairSemaphore
    tasks: OwnedTasks
    metrics: Metrics
    events: Events
    dead_letter_writer: DeadLetterWriter
    errands: Errands
    left_holders: OrderedDict[
        str, None
    ]  # consumers that join at every node and have left for good, latest last
    share: LoopShare


class _GroupConsumer(msgspec.Struct):
    """A consumer as its consumer group sees it."""

    number: int  # the client's
    sink: WorkSink
    window_messages: int
    window_bytes: int
    part: HeldPart | None = None  # it joins at every node
    is_started: bool = False
    is_paused: bool = False
    is_wanting: bool = False  # as it was told last
    moved: list[int] = []  # for each `moving`: how many messages it kept


class ConsumerGroup:
    """The consumers of a subscription, or of one member of a multicast, with their leases and deliveries."""

    def __init__(
        self,
        definition: Definition,
        member: str,
        parts: ConsumerGroupParts,
        *,
        is_durable: bool = True,
    ) -> None:
        self.definition = definition  # `redefine` replaces it
        self.member: Final = member
        self.is_durable: Final = is_durable  # an unnamed member's state ends with its connection
        self.group: Final = Group(definition.options, is_keyed=definition.mode is Mode.KEY_SHARED)
        # The first offsets of partitions that have no stored state.
        self.begins: dict[TopicPartition, int] = {}
        self.later_start = Start("earliest")  # of a member without a name, in shards that come
        self._parts = parts
        self._consumers: dict[int, _GroupConsumer] = {}
        self._last_consumer = 0
        self._shards: dict[TopicPartition, ShardAckJournal] = {}  # of the partitions it covers
        self._touched: set[ShardAckJournal] = set()  # noted to since the last wait
        # Consumers that have not heard yet that acknowledgements, perhaps theirs, were lost with a shard.
        self._lost_acks: dict[int, MovedError] = {}
        # The state of an unnamed member in partitions whose shard is away: nothing else has it.
        self._set_aside: dict[TopicPartition, PartitionAcks] = {}
        self._has_holders = False  # a consumer has joined that joins at every node
        self._letters_under_way = 0
        self._timer_ns: int | None = None
        self._is_reading = False
        self._is_turn_due = False
        self._is_delivering = False
        self._is_drained = (
            False  # when it delivered last, nothing was due that any consumer had room for
        )
        self._is_closed = False
        self._former_epochs: dict[TopicPartition, int] = {}  # of partitions that wait for holders

    def acked(self, key: TopicPartition) -> AckSet | None:
        """The acknowledged offsets of a partition, read-only; None if the group does not cover it."""
        state = self.group.partition_state(key)
        return None if state is None else state.acked

    @property
    def consumers(self) -> int:
        return len(self._consumers)

    @property
    def is_at_rest(self) -> bool:
        """Whether the group could be rebuilt from stored state without losing anything."""
        return (
            not self._consumers
            and not self._letters_under_way
            and not self._is_reading
            and all(shard.is_stored for shard in self._touched)
        )

    # --- Partitions ---

    def cover(self, key: TopicPartition, shard: OwnedShard) -> None:
        """Cover a partition of a matching topic, or update the end of one that is covered already.

        MovedError if the shard's term is over, or about to end.
        """
        if key not in self._shards:
            journal = self._parts.state.of_shard(shard)
            if journal.is_leaving:
                raise moved(shard.id)
            self._shards[key] = journal
            now_ns = self._parts.clock.monotonic_ns()
            acked, failures = self._stored_state(key, shard.floor(*key))
            awaited = self._awaited(key, journal)
            self.group.add_partition(key, acked, failures, now_ns=now_ns, awaited=awaited)
            if awaited is not None:
                self._adopt_present(key)
                for holder in awaited.holders():
                    if holder in self._parts.left_holders:
                        self.group.forgo(key, holder)
        self.group.extend(key, shard.next_offset(*key))

    def _stored_state(self, key: TopicPartition, floor: int) -> tuple[AckSet, dict[int, Failure]]:
        state = (
            self._shards[key].table.get(self.definition.id, self.member, key)
            if self.is_durable or self._parts.errands.is_shared
            else None
        )
        if state is None:
            aside = self._set_aside.pop(key, None)
            if aside is None:
                return AckSet(max(self.begins.get(key, 1), floor)), {}
            aside.acked.add(1, floor)
            return aside.acked, {o: each for o, each in aside.failures.items() if o >= floor}
        clock = self._parts.clock
        ahead_ns = clock.monotonic_ns() - clock.time_ns()
        failures = {
            offset: Failure(
                failed.failures,
                failed.not_before_ns + ahead_ns,
                failed.first_delivery_ns and failed.first_delivery_ns + ahead_ns,
                failed.reason,
            )
            for offset, failed in state.failures.items()
            if offset >= floor
        }
        acked = state.acked.copy()
        acked.add(1, floor)  # messages from before the topic was deleted are not owed
        return acked, failures

    # --- Partitions that move between nodes ---

    def _awaited(self, key: TopicPartition, journal: ShardAckJournal) -> AwaitedHolders | None:
        """The consumers that had messages of a partition at its former owner; None: nobody is to be waited for."""
        state = journal.table.get(self.definition.id, self.member, key)
        if state is None or state.held is None:
            return None
        # Once: after this term ends without warning, everything is owed again.
        epoch, held = state.held.epoch, state.held.held
        journal.note(HeldRecord(self.definition.id, self.member, *key, epoch, []))
        state.held = None
        self._former_epochs[key] = epoch
        return AwaitedHolders(held, journal.began_ns + HOLDERS_WAIT_NS)

    def _adopt_present(self, key: TopicPartition) -> None:
        for consumer_id, known in self._consumers.items():
            if known.is_started and known.part is not None:
                self._adopt(key, consumer_id, known)

    def _adopt(self, key: TopicPartition, consumer_id: int, known: _GroupConsumer) -> None:
        """Lease to a consumer what it had of a partition at the former owner."""
        awaited = self.group.awaited(key)
        held = () if awaited is None or known.part is None else awaited.of(known.part.holder)
        if not held:
            return
        if self.definition.mode is Mode.KEY_SHARED:
            offsets = [
                offset
                for each in held
                for mask in (each.outstanding, each.recalled)
                for offset in masks.offsets(each.base, int.from_bytes(mask, "little"))
            ]
            self._parts.tasks.start(self._adopt_keyed(key, consumer_id, known, sorted(offsets)))
        else:
            self._adopt_now(key, consumer_id, known, {})

    async def _adopt_keyed(
        self, key: TopicPartition, consumer_id: int, known: _GroupConsumer, offsets: Sequence[int]
    ) -> None:
        """Read the keys of these messages first: later messages of the keys have to wait."""
        journal, row_keys = self._shards.get(key), dict[int, bytes | None]()
        try:
            for offset in offsets:
                if offset not in row_keys and (run := await self._run_at(key, offset)) is not None:
                    row_keys |= enumerate(run.row_keys(), run.base)
        except (RunnelError, OSError):
            return  # when the wait is over its messages are delivered anew
        if self._shards.get(key) is journal and self._consumers.get(consumer_id) is known:
            self._adopt_now(key, consumer_id, known, row_keys)

    async def _run_at(self, key: TopicPartition, offset: int) -> StoredRun | None:
        run_cache = self._parts.run_cache
        if (run := run_cache.find(key, offset)) is None:
            read = await self._read_page(key, offset, _PAGE_BYTES_MIN)
            run = next((each for each in read.runs if each.base <= offset < each.end), None)
        return run

    def _adopt_now(
        self,
        key: TopicPartition,
        consumer_id: int,
        known: _GroupConsumer,
        row_keys: Mapping[int, bytes | None],
    ) -> None:
        clock = self._parts.clock
        now_ns = clock.monotonic_ns()
        assert known.part is not None
        adopted = self.group.adopt(
            key,
            known.part.holder,
            consumer_id,
            now_ns,
            ahead_ns=now_ns - clock.time_ns(),
            row_keys=row_keys,
        )
        if adopted:
            epoch = self._former_epochs[key]
            leases = [
                HeldLease(
                    each.delivery,
                    *key,
                    epoch,
                    each.former,
                    each.base,
                    masks.to_bytes(each.outstanding),
                    masks.to_bytes(each.recalled),
                )
                for each in adopted
            ]
            known.part.sink.held(known.number, leases)
            self.wake()

    def _pass_on(self, key: TopicPartition, journal: ShardAckJournal) -> None:
        """Note what consumers have of a partition, for its next owner, and tell them that it moves."""
        held: list[HeldBy] = []
        moving: dict[int, list[int]] = {}
        behind_ns = self._parts.clock.time_ns() - self._parts.clock.monotonic_ns()
        for lease in self.group.leases_of(key):
            known = self._consumers.get(lease.consumer.number)
            if known is not None and known.part is not None:
                moving.setdefault(lease.consumer.number, []).append(lease.id)
                held.append(
                    HeldBy(
                        known.part.holder,
                        lease.id,
                        lease.base,
                        masks.to_bytes(lease.outstanding),
                        masks.to_bytes(lease.recalled),
                        lease.cost_bytes,
                        lease.delivered_ns + behind_ns,
                    )
                )
        if (awaited := self.group.awaited(key)) is not None:
            # Consumers that have not come yet may come to the next owner. It waits anew.
            held += [each for holder in awaited.holders() for each in awaited.of(holder)]
        if held:
            record = HeldRecord(self.definition.id, self.member, *key, journal.epoch, held)
            journal.note(record)
        for consumer_id, deliveries in moving.items():
            known = self._consumers[consumer_id]
            self._shrink_window(consumer_id, known, key, deliveries)
            if known.part is not None:
                known.part.sink.moving(known.number, journal.epoch, deliveries)

    def _note_state(
        self, key: TopicPartition, journal: ShardAckJournal, state: PartitionAcks
    ) -> None:
        """Store the state of a member without a name, which only its groups have, for the next owner."""
        behind_ns = self._parts.clock.time_ns() - self._parts.clock.monotonic_ns()
        failures = {
            offset: Failure(
                each.failures,
                each.not_before_ns + behind_ns,
                each.first_delivery_ns and each.first_delivery_ns + behind_ns,
                each.reason,
            )
            for offset, each in state.failures.items()
        }
        stored = PartitionAcks(state.acked, failures)
        journal.note(at_record(self.definition.id, self.member, key, stored))

    def _shrink_window(
        self,
        consumer_id: int,
        known: _GroupConsumer,
        key: TopicPartition,
        deliveries: Collection[int],
    ) -> None:
        """What a consumer keeps of a shard that moves still takes room in its window over all nodes."""
        leases = [each for each in self.group.leases_of(key) if each.id in deliveries]
        messages = sum((each.outstanding | each.recalled).bit_count() for each in leases)
        known.moved.append(messages)
        known.window_messages = max(0, known.window_messages - messages)
        self._resize(consumer_id, known, is_smaller=True)

    def uncover_topic(self, topic: str) -> None:
        for key in [key for key in self._shards if key[0] == topic]:
            self.uncover(key)
        self.wake()  # its leases have made room

    def uncover(self, key: TopicPartition, *, is_passed_on: bool = False) -> None:
        """Drop a partition whose topic was deleted, or whose shard goes."""
        if self._shards.pop(key, None) is not None:
            effects = self.group.remove_partition(key)
            if (
                is_passed_on and effects.recalls
            ):  # those that join at every node keep their messages
                effects.recalls = [
                    recall for recall in effects.recalls if self._consumers[recall[0]].part is None
                ]
            self._apply(effects)

    def release(self, journal: ShardAckJournal, *, is_planned: bool) -> None:
        """Drop the partitions of a shard that goes. Leases end, and that does not count as a failure.

        After a planned end, consumers that have a part at every node keep what they have: see `_pass_on`.
        """
        is_passed_on = is_planned and self._has_holders
        keys = [key for key, covered in self._shards.items() if covered is journal]
        for key in keys:
            state = self.group.partition_state(key)
            if not self.is_durable and state is not None:
                if is_passed_on:
                    self._note_state(key, journal, state)
                else:
                    self._set_aside[key] = PartitionAcks(state.acked.copy(), state.failures)
            if is_passed_on:
                self._pass_on(key, journal)
            self.uncover(key, is_passed_on=is_passed_on)
        if keys:
            self.wake()  # its leases have made room

    def lose_acks(self, journal: ShardAckJournal, error: MovedError) -> None:
        """Acknowledgements in a shard are lost with it: tell those who ask whether theirs are stored."""
        if journal in self._touched:
            self._touched.discard(journal)
            self._lost_acks |= dict.fromkeys(self._consumers, error)

    def reset(self, key: TopicPartition, floor: int) -> None:
        """Begin a partition elsewhere: the subscription was moved."""
        if key in self._shards:
            self._apply(self.group.reset_partition(key, floor))
            self.wake()

    def reopen(self, key: TopicPartition, offset: int) -> None:
        """Owe a message again: its dead letter was sent back."""
        if key in self._shards:
            self._apply(self.group.reopen(key, offset))
            self.wake()

    def extend(self, key: TopicPartition, end: int) -> None:
        """Hot: messages of a covered partition have become visible. The caller calls `wake` afterwards."""
        self.group.extend(key, end)

    # --- Consumers ---

    def join(
        self,
        number: int,
        sink: WorkSink,
        window_messages: int,
        window_bytes: int,
        part: HeldPart | None = None,
    ) -> int:
        """Add a consumer, which gets nothing before `start`. Returns its id."""
        self._last_consumer += 1
        if part is not None:
            self._has_holders = True
            self._parts.left_holders.pop(part.holder, None)
        self._consumers[self._last_consumer] = _GroupConsumer(
            number, sink, window_messages, window_bytes, part
        )
        self.group.join(self._last_consumer, window_messages=0, window_bytes=0)
        return self._last_consumer

    def start(self, consumer_id: int) -> None:
        # None: the broker has ended the consumer meanwhile.
        if (known := self._consumers.get(consumer_id)) is not None:
            known.is_started = True
            if known.part is not None:
                for key in self.group.awaiting:
                    self._adopt(key, consumer_id, known)
            self._resize(consumer_id, known)

    def resize(
        self, consumer_id: int, window_messages: int, window_bytes: int, moves_known: int = 0
    ) -> None:
        """Change a consumer's window. What moved behind the first `moves_known` of its `moving` still takes room."""
        if (known := self._consumers.get(consumer_id)) is not None:
            window_messages = max(0, window_messages - sum(known.moved[moves_known:]))
            is_smaller = (
                window_messages <= known.window_messages and window_bytes <= known.window_bytes
            )
            known.window_messages = window_messages
            known.window_bytes = window_bytes
            self._resize(consumer_id, known, is_smaller=is_smaller)

    def pause(self, consumer_id: int) -> None:
        """Deliver nothing more to a consumer for now."""
        if (known := self._consumers.get(consumer_id)) is not None:
            known.is_paused = True
            self._resize(consumer_id, known)

    def resume(self, consumer_id: int) -> None:
        if (known := self._consumers.get(consumer_id)) is not None:
            known.is_paused = False
            self._resize(consumer_id, known)

    def _resize(self, consumer_id: int, known: _GroupConsumer, *, is_smaller: bool = False) -> None:
        has_room = known.is_started and not known.is_paused
        self.group.resize(
            consumer_id,
            window_messages=known.window_messages if has_room else 0,
            window_bytes=known.window_bytes if has_room else 0,
        )
        if not is_smaller:  # a smaller window lets nothing more be delivered
            self.wake()

    def leave(self, consumer_id: int, *, is_clean: bool) -> bool:
        """Remove a consumer. Returns False if the broker has ended it before."""
        known = self._consumers.pop(consumer_id, None)
        if known is None:
            return False
        if known.part is not None and is_clean:
            self._note_left(known.part.holder)
        self._lost_acks.pop(consumer_id, None)
        # All that an unnamed member is owed ends with it, so nothing has failed.
        is_clean = is_clean or not self.is_durable
        now_ns = self._parts.clock.monotonic_ns()
        self._apply(self.group.leave(consumer_id, now_ns, is_clean=is_clean))
        self.wake()
        return True

    def _note_left(self, holder: str) -> None:
        """A consumer leaves every node at about the same time: what it held elsewhere, it does not come for."""
        left = self._parts.left_holders
        left[holder] = None
        if len(left) > _LEFT_HOLDERS_MAX:
            left.popitem(last=False)
        for key in self.group.awaiting:
            self.group.forgo(key, holder)

    def dismiss(self, error: RunnelError) -> None:
        """End all consumers. Their leased messages go back, and that does not count as a failure."""
        for consumer_id, known in list(self._consumers.items()):
            self.leave(consumer_id, is_clean=True)
            known.sink.consumer_ended(known.number, error)

    def end(self, error: RunnelError) -> None:
        """End all consumers for good: the subscription or the member was removed."""
        self._is_closed = True
        self.dismiss(error)

    def rest(self) -> None:
        """Stop because the broker closes. Leased messages will be delivered again; consumers get no notice."""
        self._is_closed = True
        self._consumers.clear()

    def redefine(self, definition: Definition) -> None:
        """Apply a changed definition: the subscription was paused or resumed, or has other options."""
        self.definition = definition
        self.group.options = definition.options
        self.wake()

    # --- Requests of consumers ---

    def ack(
        self,
        consumer_id: int,
        deliveries: Sequence[int],
        parts: Sequence[DeliveryPart],
        picked: Sequence[Picked] = (),
    ) -> Sequence[DeliveryPart]:
        """Acknowledge messages. Returns the parts that came too late; a whole late delivery is a part from 0 to 0."""
        now_ns = self._parts.clock.monotonic_ns()
        late = self._apply(self.group.ack(consumer_id, deliveries, parts, now_ns, picked))
        self.wake()
        return [_late_part(part) for part in late]

    def ack_up_to(self, consumer_id: int, key: TopicPartition, offset: int) -> None:
        now_ns = self._parts.clock.monotonic_ns()
        self._apply(self.group.ack_up_to(consumer_id, key, offset, now_ns))
        self.wake()

    def nack(
        self, consumer_id: int, parts: Sequence[DeliveryPart], *, delay_ns: int | None, reason: str
    ) -> Sequence[DeliveryPart]:
        now_ns = self._parts.clock.monotonic_ns()
        late = self._apply(
            self.group.nack(consumer_id, parts, now_ns, delay_ns=delay_ns, reason=reason)
        )
        self.wake()
        return late

    def give_back(self, consumer_id: int, parts: Sequence[DeliveryPart]) -> None:
        self._apply(self.group.give_back(consumer_id, parts, self._parts.clock.monotonic_ns()))
        self.wake()

    def renew(self, consumer_id: int, deliveries: Sequence[int], *, lease_ns: int | None) -> None:
        self.group.renew(
            consumer_id, deliveries, self._parts.clock.monotonic_ns(), lease_ns=lease_ns
        )
        self._set_timer()  # a lease may have become shorter

    def recalled(self, consumer_id: int, parts: Sequence[DeliveryPart]) -> None:
        self._apply(self.group.recalled(consumer_id, parts, self._parts.clock.monotonic_ns()))
        self.wake()

    async def wait_stored(self, consumer_id: int) -> None:
        """Wait until every acknowledgement so far is stored. Raises the error if storing fails.

        MovedError, once, if acknowledgements since the last call may have been lost with their shard.
        """
        if (error := self._lost_acks.pop(consumer_id, None)) is not None:
            raise error
        self._touched = {shard for shard in self._touched if not shard.is_stored}
        if self._touched:
            await asyncio.gather(*[shard.wait_stored() for shard in self._touched])

    # --- Effects of the group's rules ---

    def _apply(self, effects: Effects) -> Sequence[DeliveryPart]:
        counters = self._parts.metrics.counters
        if effects.acked or effects.picked or effects.failed:
            counters.work_acked += sum([end - begin for _, begin, end in effects.acked])
            counters.work_acked += sum([mask.bit_count() for _, _, mask in effects.picked])
            counters.work_failed += len(effects.failed)
            self._note(effects)
        if effects.late:
            counters.work_late += len(effects.late)
        for consumer_id, recalls in groupby(effects.recalls, key=lambda recall: recall[0]):
            known = self._consumers.get(consumer_id)
            if known is not None:
                known.sink.recall(known.number, [part for _, part in recalls])
        for consumer_id, expired in groupby(effects.expired, key=lambda lease: lease[0]):
            known = self._consumers.get(consumer_id)
            if known is not None:
                known.sink.leases_expired(known.number, [delivery for _, delivery in expired])
        for dead_letter in effects.dead_letters:
            journal = self._shards[dead_letter.key]
            self._letters_under_way += 1
            journal.letter_begins()
            self._parts.tasks.start(self._write_dead_letter(dead_letter, journal))
        return effects.late

    def _note(self, effects: Effects) -> None:
        if not self.is_durable:
            self._parts.state.change()
            return
        subscription, member = self.definition.id, self.member
        for key, begin, end in effects.acked:
            shard = self._shards.get(key)
            if shard is not None:  # else the topic was deleted, and its state is not needed
                shard.note_acked(subscription, member, key, begin, end)
                self._touched.add(shard)
        for key, base, mask in effects.picked:
            shard = self._shards.get(key)
            if shard is not None:
                bits = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
                shard.note(PickedRecord(subscription, member, *key, base, bits))
                self._touched.add(shard)
        if effects.failed:
            clock = self._parts.clock
            behind_ns = clock.time_ns() - clock.monotonic_ns()
            for key, offset, failures, not_before_ns, first_ns, reason in effects.failed:
                shard = self._shards.get(key)
                if shard is None:
                    continue
                shard.note(
                    FailedRecord(
                        subscription,
                        member,
                        *key,
                        offset,
                        failures,
                        not_before_ns + behind_ns,
                        first_ns and first_ns + behind_ns,
                        reason,
                    )
                )
                self._touched.add(shard)

    async def _write_dead_letter(self, dead_letter: DeadLetter, journal: ShardAckJournal) -> None:
        """Store a dead letter, and only then acknowledge the message."""
        is_stored = False
        try:
            with suppress(RunnelError):  # its failure could not be stored: it is asked for again
                identity = await self._letter_identity(dead_letter, journal)
                is_stored = await self._parts.dead_letter_writer.write(
                    self.definition.name, self.member, dead_letter, identity
                )
            self._parts.metrics.counters.dead_letters += is_stored
            self._settle_dead_letter(dead_letter, journal, is_stored=is_stored)
        finally:
            self._letters_under_way -= 1
            journal.letter_ends()

    async def _letter_identity(
        self, dead_letter: DeadLetter, journal: ShardAckJournal
    ) -> LetterIdentity | None:
        """With several nodes, which letter it is, as the next owner of the shard would say too: its failure is stored.

        None: a letter whose repetition nothing recognises, as that of a broker that is alone.
        """
        if not (self._parts.errands.is_shared and self.is_durable):
            return None
        await journal.wait_stored()
        key, offset = dead_letter.key, dead_letter.offset
        state = journal.table.get(self.definition.id, self.member, key)
        failure = None if state is None else state.failures.get(offset)
        if failure is None:
            raise Unavailable(
                "the failure is not stored any more: the message was moved or is done"
            )
        failed_ns = failure.not_before_ns
        return LetterIdentity.of(self.definition.id, self.member, key, offset, failed_ns)

    def _settle_dead_letter(
        self, dead_letter: DeadLetter, journal: ShardAckJournal, *, is_stored: bool
    ) -> None:
        if self._is_closed:
            return
        key, offset = dead_letter.key, dead_letter.offset
        covered = self._shards.get(key)
        if covered is journal:
            settle = self.group.dead_letter_stored if is_stored else self.group.dead_letter_failed
            self._apply(settle(key, offset, self._parts.clock.monotonic_ns()))
            self.wake()
        elif covered is None and is_stored and journal.is_being_released:
            # The shard is being released, and waits for this: else the dead letter would be written twice.
            if self.is_durable or self._has_holders:
                journal.note_acked(self.definition.id, self.member, key, offset, offset + 1)
            elif (aside := self._set_aside.get(key)) is not None:
                aside.acked.add(offset, offset + 1)
                aside.failures.pop(offset, None)

    # --- Delivery ---

    def wake(self) -> None:
        """Deliver the messages that are cached, and start to read the others."""
        if self._is_closed or not self._consumers:
            return
        if self._is_delivering:  # re-entered: a connection has just become full, or has room again
            self._take_turn_soon()
            return
        self._expire_due()
        if not (self._is_reading or self._is_turn_due or self.definition.is_paused):
            self._is_delivering = True
            try:
                self._deliver()
            finally:
                self._is_delivering = False
        if self._has_holders:
            self._tell_wants()
        self._set_timer()

    def _tell_wants(self) -> None:
        """Tell consumers that join at every node whether they should give more of their window to this one."""
        is_drained = self._is_drained and not self._is_reading and not self._is_turn_due
        for consumer_id, known in self._consumers.items():
            if known.part is None or not known.is_started or known.is_paused:
                continue
            is_wanting = known.is_wanting
            if self.group.is_short(consumer_id):
                is_wanting = True
            elif is_drained and self.group.has_room(consumer_id):
                is_wanting = False
            if is_wanting != known.is_wanting:
                known.is_wanting = is_wanting
                known.part.sink.wants(known.number, is_wanting=is_wanting)

    def _take_turn_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._is_turn_due = False
        self.wake()

    def _deliver(self) -> None:
        """Offer a few runs of the run cache. Sending comes last, so that nothing overtakes what was decided."""
        group, run_cache, clock = self.group, self._parts.run_cache, self._parts.clock
        decided: dict[int, list[WorkDelivery]] = {}
        for _ in range(_OFFERS_PER_TURN):
            now_ns = clock.monotonic_ns()
            want = group.next_want(now_ns)
            self._is_drained = want is None
            if want is None:
                break
            run = run_cache.find(want.key, want.begin)
            if run is None:
                self._is_reading = True
                self._parts.tasks.start(self._read(want.key, want.begin, want.bytes_max))
                break
            row_keys = run.row_keys() if self.definition.mode is Mode.KEY_SHARED else None
            offer = group.offer(want.key, run.base, run.count, run.size, now_ns, row_keys)
            for delivery in offer:
                decided.setdefault(delivery.consumer, []).append(self._packed(delivery, run))
            if offer:
                self._observe_age(run)
        else:
            self._take_turn_soon()
        for consumer_id, deliveries in decided.items():
            known = self._consumers[consumer_id]
            known.sink.deliver_work(known.number, deliveries)

    def _packed(self, delivery: LeasedDelivery, run: StoredRun) -> WorkDelivery:
        """A leased delivery as its sink gets it. Hot: once a delivery."""
        topic, partition = delivery.key
        attempts: Sequence[Attempt] = ()
        if delivery.attempts:
            clock = self._parts.clock
            behind_ns = clock.time_ns() - clock.monotonic_ns()
            attempts = [
                Attempt(offset, failures, first_ns and first_ns + behind_ns)
                for offset, failures, first_ns in delivery.attempts
            ]
        mask = delivery.mask
        begin = delivery.base + (mask & -mask).bit_length() - 1
        end = delivery.base + mask.bit_length()
        lease = Lease(delivery.id, topic, partition, begin, end, attempts)
        sent = WorkDelivery(lease, run, delivery.base, mask, delivery.count)
        counters = self._parts.metrics.counters
        counters.messages_out += sent.messages
        counters.work_delivered += sent.messages
        counters.bytes_out += sent.size
        self._parts.metrics.traffic.count_out(topic, sent.messages, sent.size)
        return sent

    def _observe_age(self, run: StoredRun) -> None:
        """Measure how old a run's first message is. Called once for each run that is delivered, also in part."""
        parts, event_time_ns = self._parts, run.event_time_ns
        if event_time_ns > 0:
            parts.metrics.work_age.observe(parts.clock.time_ns() - event_time_ns)

    async def _read(self, key: TopicPartition, offset: int, bytes_max: int) -> None:
        """Read a page of a partition into the run cache, then continue to deliver."""
        run_cache = self._parts.run_cache
        forgotten, journal = run_cache.forgotten, self._shards.get(key)
        try:
            read = await self._read_page(key, offset, bytes_max)
        except UnknownTopicError:
            # Else the topic was made again, and is covered.
            if self._parts.stores.log_of(key[0]) is None:
                self.uncover(key)
        except MovedError:
            if self._shards.get(key) is journal:  # else it has come back, and is covered anew
                self.uncover(key)
        except (RunnelError, OSError) as error:
            self._report_unreadable(key, offset, error)
            return
        else:
            for run in read.runs if run_cache.forgotten == forgotten else ():
                run_cache.put(key, run)
            if self._shards.get(key) is journal:  # else this is of a lost term
                for missing in read.missing:
                    self._pass_over(key, missing)
        finally:
            self._is_reading = False
        self.wake()  # at once, before runs of other groups evict these from the run cache

    async def _read_page(self, key: TopicPartition, offset: int, bytes_max: int) -> RunsRead:
        parts = self._parts
        log = parts.stores.existing(key[0])
        first = next(iter(self._consumers.values()), None)
        async with parts.reads.of(0 if first is None else first.sink.connection_id):
            page_bytes = max(_PAGE_BYTES_MIN, min(bytes_max, _PAGE_BYTES_MAX))
            return await read_runs(log, key, offset, page_bytes, parts.workers)

    def _pass_over(self, key: TopicPartition, missing: Missing) -> None:
        """Acknowledge offsets that will never come, and report owed messages that are lost."""
        if key not in self._shards:
            return
        gone = self.group.gone(key, missing.begin, missing.end)
        lost = sum(end - begin for _, begin, end in gone.acked)
        self._apply(gone)
        if missing.reason and lost:
            self._parts.events.emit(
                EventKind.WORK_LOST,
                self.definition.name,
                topic=key[0],
                partition=key[1],
                first_offset=missing.begin,
                next_offset=missing.end,
                messages=lost,
                reason=missing.reason,
            )

    def _report_unreadable(self, key: TopicPartition, offset: int, error: Exception) -> None:
        """Report a page that cannot be read, and try again after a while."""
        self._parts.events.emit(
            EventKind.WORK_UNREADABLE,
            self.definition.name,
            topic=key[0],
            partition=key[1],
            offset=offset,
            error=str(error),
        )
        self._parts.timers.set(self._parts.clock.monotonic_ns() + _READ_RETRY_NS, self.wake)

    # --- Timers ---

    def _expire_due(self) -> None:
        due_ns = self.group.next_time_ns()
        now_ns = self._parts.clock.monotonic_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._apply(self.group.expire(now_ns))

    def _set_timer(self) -> None:
        due_ns = self.group.next_time_ns()
        if due_ns is not None and (self._timer_ns is None or due_ns < self._timer_ns):
            self._timer_ns = due_ns
            self._parts.timers.set(due_ns, self._fire)

    def _fire(self) -> None:
        self._timer_ns = None
        self.wake()


def _late_part(late: DeliveryPart) -> DeliveryPart:
    """A late part as its consumer gets it: the offsets of a whole delivery are no longer known, and become 0."""
    is_whole = not late.begin and late.end == OFFSET_MAX
    return DeliveryPart(late.delivery, 0, 0) if is_whole else late
