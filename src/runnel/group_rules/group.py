"""Consumers that share what is owed: the face of the rules. The broker tells it what happens, and does what it says.

A subscription in shared or key_shared mode has one group, a multicast one for each member. `now_ns` is monotonic.
Nothing a consumer says is an error: what it does not have is late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from runnel.formats.work_heads import DeliveryPart, Picked
from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.definition import DURATION_NS_MAX, SubscriptionOptions
from runnel.group_rules.effects import NOTHING, Effects, Failure, LeasedDelivery, Want
from runnel.group_rules.group_state import GroupState
from runnel.group_rules.keyed_partition import KeyedPartition
from runnel.group_rules.lease_selection import LeaseSelection
from runnel.group_rules.leases import LeasedRange
from runnel.group_rules.records import PartitionAcks
from runnel.group_rules.shared_partition import SharedPartition
from runnel.group_rules.windows import ConsumerWindow
from runnel.topics.names import TopicPartition

_REASON_LENGTH_MAX: Final = 1_024
"""A reason is stored with every message that failed for it."""

_EXPIRED: Final = "the lease ended: not acknowledged in time"
_LEFT: Final = "the consumer was lost before it had acknowledged"


class Group:
    """The consumers of a subscription, or of a member of a multicast, and what is owed to them."""

    def __init__(
        self,
        options: SubscriptionOptions,
        *,
        is_keyed: bool,
        waiting_max: int = 65_536,
        first_delivery_id: int = 1,
    ) -> None:
        self._group_state = GroupState(
            options, waiting_max=waiting_max, first_delivery_id=first_delivery_id
        )
        self._kind: type[SharedPartition] = KeyedPartition if is_keyed else SharedPartition
        self._works: dict[TopicPartition, SharedPartition] = {}
        self._is_callers_turn = False

    @property
    def options(self) -> SubscriptionOptions:
        return self._group_state.options

    @options.setter
    def options(self, options: SubscriptionOptions) -> None:
        """Other options, for what happens from now on."""
        self._group_state.options = options

    # --- Partitions ---

    def add_partition(
        self,
        key: TopicPartition,
        acked: AckSet,
        failures: Mapping[int, Failure] = {},
        *,
        now_ns: int,
    ) -> None:
        """Owe what is not acked of a partition. The set is the group's from now on; failures' times are monotonic."""
        if key in self._works:
            raise ValueError(f"{key[0]}[{key[1]}] is in the group already")
        self._works[key] = self._kind(key, acked, failures, self._group_state, now_ns)

    def remove_partition(self, key: TopicPartition) -> Effects:
        """Its topic is gone. Leases on it end: what consumers say of them is late."""
        work = self._works.pop(key, None)
        if work is None:
            return NOTHING
        effects = self._take_all_from(key)
        work.close()
        return effects.or_nothing()

    def reset_partition(self, key: TopicPartition, floor: int) -> Effects:
        """Owe everything from an offset on, and nothing before. Leases end and do not count."""
        former = self._works.get(key)
        if former is None:
            return NOTHING
        effects = self.remove_partition(key)
        work = self._works[key] = self._kind(key, AckSet(max(floor, 1)), {}, self._group_state, 0)
        work.extend(former.end)
        return effects

    def _take_all_from(self, key: TopicPartition) -> Effects:
        """End the leases on a partition that is about to be forgotten; their holders had better stop."""
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, 0, [])
        for lease in self._group_state.leases.of_partition(key):
            effects.recalls += [
                (lease.consumer.number, DeliveryPart(lease.id, begin, end))
                for begin, end in masks.runs(lease.base, lease.outstanding)
            ]
            selection.all_of(lease)
        self._group_state.release(selection.taken, selection.stopped)
        return effects

    def reopen(self, key: TopicPartition, offset: int) -> Effects:
        """A dead letter is sent back: its message is owed again, as if it had never been delivered."""
        work = self._works.get(key)
        if work is None or offset < 1:
            return NOTHING
        effects = Effects()
        work.reopen(offset, effects)
        return effects.or_nothing()

    def extend(self, key: TopicPartition, end: int) -> None:
        """The messages below `end` are there."""
        work = self._works.get(key)
        if work is not None:
            work.extend(end)

    def gone(self, key: TopicPartition, begin: int, end: int) -> Effects:
        """These will never come (again): they count as acknowledged."""
        work = self._works.get(key)
        if work is None or begin >= end:
            return NOTHING
        effects = Effects()
        work.gone(begin, end, effects)
        return effects.or_nothing()

    # --- Consumers ---

    def join(self, consumer: int, *, window_messages: int, window_bytes: int) -> None:
        """A consumer is there. Its number must be no other's in this group."""
        self._group_state.consumers.add(ConsumerWindow(consumer, window_messages, window_bytes))

    def resize(self, consumer: int, *, window_messages: int, window_bytes: int) -> None:
        """A consumer's window is another. What it has beyond it stays leased."""
        found = self._group_state.consumers.get(consumer)
        if found is not None:
            self._group_state.consumers.resize(found, window_messages, window_bytes)

    def leave(self, consumer: int, now_ns: int, *, is_clean: bool) -> Effects:
        """A consumer is there no more. What it has comes back; unless it left in order that counts as failed."""
        found = self._group_state.consumers.get(consumer)
        if found is None:
            return NOTHING
        effects = Effects()
        self._group_state.consumers.remove(found)
        leases = self._group_state.leases.of_consumer(consumer)
        self._end(leases, now_ns, reason=None if is_clean else _LEFT, effects=effects)
        return effects.or_nothing()

    # --- Delivering ---

    def next_want(self, now_ns: int) -> Want | None:  # noqa: ARG002 (what is due has been told by expire)
        """What to read next, and to offer. None: nothing that anybody has room for."""
        group_state = self._group_state
        if not group_state.consumers.room_messages:
            return None
        # Those whose keys wait for them alone, and partitions that anybody may serve, take turns.
        self._is_callers_turn = not self._is_callers_turn
        if self._is_callers_turn and (want := self._want_of_called()) is not None:
            return want
        while (key := group_state.next_busy()) is not None:
            want = self._works[key].want()
            if want is not None:
                return want
        return self._want_of_called()

    def _want_of_called(self) -> Want | None:
        consumer = self._group_state.consumers.next_called()
        if consumer is None:
            return None
        key = next(iter(consumer.heads))
        consumer.heads.move_to_end(key)
        return self._works[key].want_for(consumer)

    def offer(
        self,
        key: TopicPartition,
        base: int,
        count: int,
        size_bytes: int,
        now_ns: int,
        row_keys: Sequence[bytes | None] | None = None,
    ) -> list[LeasedDelivery]:
        """Stored messages, of consecutive offsets from `base` on. Takes what can be delivered now."""
        work = self._works.get(key)
        if work is None or count < 1:
            return []
        return work.offer(base, count, -(-size_bytes // count), now_ns, row_keys)

    # --- What consumers say. A lease counts until `expire` has ended it. ---

    def ack(
        self,
        consumer: int,
        deliveries: Sequence[int],
        parts: Sequence[DeliveryPart],
        now_ns: int,  # noqa: ARG002
        picked: Sequence[Picked] = (),
    ) -> Effects:
        """These are done: whole deliveries, as far as they are outstanding, and parts of others."""
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, consumer, effects.late)
        selection.wholes(deliveries)
        selection.parts(parts)
        if picked:
            selection.picked(picked)
        self._acknowledge(selection, effects)
        return effects.or_nothing()

    def ack_up_to(
        self,
        consumer: int,
        key: TopicPartition,
        offset: int,
        now_ns: int,  # noqa: ARG002
    ) -> Effects:
        """Everything of a partition that this consumer has, up to an offset and with it, is done."""
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, consumer, effects.late)
        for lease in self._group_state.leases.up_to(consumer, key, offset):
            selection.up_to(lease, offset)
        self._acknowledge(selection, effects)
        return effects.or_nothing()

    def _acknowledge(self, selection: LeaseSelection, effects: Effects) -> None:
        for lease, mask in selection.taken.items():
            self._works[lease.key].acknowledge(lease, mask, effects)
        self._let_go(selection)

    def nack(
        self,
        consumer: int,
        parts: Sequence[DeliveryPart],
        now_ns: int,
        *,
        delay_ns: int | None,
        reason: str,
    ) -> Effects:
        """These have failed. They come again after this delay, or without one after the options' own."""
        if delay_ns is not None:
            delay_ns = min(max(delay_ns, 0), DURATION_NS_MAX)
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, consumer, effects.late)
        selection.parts(parts)
        for work, returned in self._by_work(selection):
            work.fail(
                returned,
                now_ns,
                delay_ns=delay_ns,
                reason=reason[:_REASON_LENGTH_MAX],
                effects=effects,
            )
        self._let_go(selection)
        return effects.or_nothing()

    def give_back(self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int) -> Effects:  # noqa: ARG002
        """Nobody has worked on these: they come again at once, and no delivery is counted.

        What the consumer does not have any more is passed over.
        """
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, consumer, [])
        selection.parts(parts)
        for work, returned in self._by_work(selection):
            work.give_back(returned, effects)
        self._let_go(selection)
        return effects.or_nothing()

    def renew(
        self,
        consumer: int,
        deliveries: Sequence[int],
        now_ns: int,
        *,
        lease_ns: int | None = None,
    ) -> None:
        """These leases begin anew, for so long or as the options say. Those that have ended are passed over."""
        if lease_ns is None:
            lease_ns = self.options.lease_ns
        deadline_ns = now_ns + min(max(lease_ns, 0), self.options.processing_ns_max)
        for delivery in deliveries:
            lease = self._group_state.leases.get(consumer, delivery)
            if lease is not None:
                self._group_state.leases.renew(lease, deadline_ns)

    def missing(self, consumer: int, parts: Sequence[DeliveryPart]) -> list[DeliveryPart]:
        """Which of these the consumer does not have, or does not have any more."""
        selection = LeaseSelection(self._group_state.leases, consumer, [])
        selection.missing(parts)
        return selection.late

    def recalled(self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int) -> Effects:  # noqa: ARG002
        """Of what was recalled, the consumer does not work on these, or does no more."""
        selection = LeaseSelection(self._group_state.leases, consumer, [])
        selection.recalled(parts)
        self._let_go(selection)
        return NOTHING

    # --- Dead letters ---

    def dead_letter_stored(self, key: TopicPartition, offset: int, now_ns: int) -> Effects:  # noqa: ARG002
        """The message's dead letter is stored: it is done."""
        work = self._works.get(key)
        if work is None:
            return NOTHING
        effects = Effects()
        work.dead_letter_stored(offset, effects)
        return effects.or_nothing()

    def dead_letter_failed(self, key: TopicPartition, offset: int, now_ns: int) -> Effects:
        """Its dead letter could not be stored: it is asked for again later."""
        work = self._works.get(key)
        if work is not None:
            work.dead_letter_failed(offset, now_ns)
        return NOTHING

    # --- Time ---

    def expire(self, now_ns: int) -> Effects:
        """End the leases whose time is up; what was delayed until now is due."""
        effects = Effects()
        ended = self._group_state.leases.ended(now_ns)
        if ended:
            effects.expired += [(lease.consumer.number, lease.id) for lease in ended]
            self._end(ended, now_ns, reason=_EXPIRED, effects=effects)
        while (delay := self._group_state.pop_delay(now_ns)) is not None:
            work = self._works.get(delay.key)
            if work is not None:
                work.ripen(delay, now_ns, effects)
        return effects.or_nothing()

    def next_time_ns(self) -> int | None:
        """When `expire` may have something to do."""
        deadline_ns = self._group_state.leases.next_deadline_ns()
        delay_ns = self._group_state.next_delay_ns()
        if deadline_ns is None or delay_ns is None:
            return deadline_ns if delay_ns is None else delay_ns
        return min(deadline_ns, delay_ns)

    def _end(
        self, leases: Iterable[LeasedRange], now_ns: int, *, reason: str | None, effects: Effects
    ) -> None:
        """Take everything from these leases. Without a reason that counts for nothing."""
        selection = LeaseSelection(self._group_state.leases, 0, [])
        for lease in leases:
            selection.all_of(lease)
        for work, returned in self._by_work(selection):
            if reason is None:
                work.give_back(returned, effects)
            else:
                work.fail(returned, now_ns, delay_ns=0, reason=reason, effects=effects)
        self._let_go(selection)

    def _by_work(
        self, selection: LeaseSelection
    ) -> Iterator[tuple[SharedPartition, list[tuple[LeasedRange, int]]]]:
        """What was taken, by partition: a key's messages may be in several leases."""
        by_key: defaultdict[TopicPartition, list[tuple[LeasedRange, int]]] = defaultdict(list)
        for lease, mask in selection.taken.items():
            by_key[lease.key].append((lease, mask))
        for key, returned in by_key.items():
            yield self._works[key], returned

    def _let_go(self, selection: LeaseSelection) -> None:
        for lease, mask in selection.stopped.items():
            self._works[lease.key].confirm(lease, mask)
        self._group_state.release(selection.taken, selection.stopped)

    # --- Telling ---

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight, delayed, or on its way to the dead letters."""
        return not (
            self._group_state.in_flight or self._group_state.delayed or self._group_state.dying
        )

    def leased(self, consumer: int) -> tuple[int, int]:
        """How many messages and bytes a consumer has, recalled ones included."""
        found = self._group_state.consumers.get(consumer)
        return (0, 0) if found is None else (found.messages_leased, found.bytes_leased)

    @property
    def in_flight(self) -> int:
        return self._group_state.in_flight

    @property
    def delayed(self) -> int:
        """Messages that failed and wait for their time; of a key only the first."""
        return self._group_state.delayed

    @property
    def waiting(self) -> int:
        """Messages that wait for others of their key, or for the consumer that has those."""
        return self._group_state.waiting

    @property
    def consumers(self) -> int:
        return len(self._group_state.consumers)

    @property
    def releases(self) -> int:
        """Messages that were delivered again."""
        return self._group_state.releases

    @property
    def next_delivery_id(self) -> int:
        return self._group_state.leases.next_id

    def partition_state(self, key: TopicPartition) -> PartitionAcks | None:
        """What is done and what failed in a partition. Only to be looked at: it goes on changing."""
        work = self._works.get(key)
        if work is None:
            return None
        failures = {o: failure for o, failure in work.failures.items() if failure.failures}
        return PartitionAcks(work.acked, failures)

    def partition_in_flight(self, key: TopicPartition) -> int:
        """Messages of a partition that consumers have."""
        return sum(
            (lease.outstanding | lease.recalled).bit_count()
            for lease in self._group_state.leases.of_partition(key)
        )
