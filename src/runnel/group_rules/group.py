"""The entry point of the rules: `Group` takes events and returns the effects that the broker carries out.

A subscription in shared or key_shared mode has one group, a multicast one for each member. `now_ns` is monotonic.
No request of a consumer is an error: messages that it does not have are reported as late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from runnel.formats.work_heads import DeliveryPart, Picked
from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.awaited_holders import AwaitedHolders
from runnel.group_rules.definition import DURATION_NS_MAX, SubscriptionOptions
from runnel.group_rules.effects import NOTHING, Adopted, Effects, Failure, LeasedDelivery, Want
from runnel.group_rules.group_state import GroupState
from runnel.group_rules.keyed_partition import KeyedPartition
from runnel.group_rules.lease_selection import LeaseSelection
from runnel.group_rules.leases import LeasedRange
from runnel.group_rules.records import PartitionAcks
from runnel.group_rules.shared_partition import SharedPartition
from runnel.group_rules.windows import ConsumerWindow
from runnel.topics.names import TopicPartition

_REASON_LENGTH_MAX: Final = 1_024
"""The limit of a reason, which is stored with every message that failed for it."""

_EXPIRED: Final = "the lease ended: not acknowledged in time"
_LEFT: Final = "the consumer was lost before it had acknowledged"


class Group:
    """The consumers of a subscription, or of a member of a multicast, and the messages owed to them."""

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
        self._partition_type: type[SharedPartition] = (
            KeyedPartition if is_keyed else SharedPartition
        )
        self._partitions: dict[TopicPartition, SharedPartition] = {}
        self._is_turn_of_heads = False
        self._awaiting: dict[TopicPartition, int] = {}  # until when partitions wait for holders

    @property
    def options(self) -> SubscriptionOptions:
        return self._group_state.options

    @options.setter
    def options(self, options: SubscriptionOptions) -> None:
        """Replace the options, for all events from now on."""
        self._group_state.options = options

    # --- Partitions ---

    def add_partition(
        self,
        key: TopicPartition,
        acked: AckSet,
        failures: Mapping[int, Failure] = {},
        *,
        now_ns: int,
        awaited: AwaitedHolders | None = None,
    ) -> None:
        """Owe all messages of a partition that are not acked. The group takes over the set.

        The times of failures are monotonic. Nothing is delivered before the awaited holders have come: see `adopt`.
        """
        if key in self._partitions:
            raise ValueError(f"{key[0]}[{key[1]}] is in the group already")
        self._partitions[key] = self._partition_type(
            key, acked, failures, self._group_state, now_ns
        )
        if awaited and awaited.until_ns > now_ns:
            self._partitions[key].awaited = awaited
            self._awaiting[key] = awaited.until_ns

    def awaited(self, key: TopicPartition) -> AwaitedHolders | None:
        """The holders that a partition waits for; None: it does not wait."""
        partition = self._partitions.get(key)
        return None if partition is None else partition.awaited

    @property
    def awaiting(self) -> list[TopicPartition]:
        """The partitions that wait for holders."""
        return list(self._awaiting)

    def adopt(
        self,
        key: TopicPartition,
        holder: str,
        consumer: int,
        now_ns: int,
        *,
        ahead_ns: int = 0,
        row_keys: Mapping[int, bytes | None] = {},
    ) -> list[Adopted]:
        """A holder has come, as this consumer: what it held is leased to it, as far as it is still owed.

        In key_shared mode `row_keys` has the keys of these messages. `ahead_ns` is what turns wall times into times of
        the group.
        """
        partition = self._partitions.get(key)
        window = self._group_state.consumers.get(consumer)
        awaited = None if partition is None else partition.awaited
        if partition is None or awaited is None or window is None:
            return []
        adopted = []
        for held in awaited.pop(holder):
            lease = self._group_state.open_lease(window, key, held.base, held.cost_bytes, now_ns)
            lease.delivered_ns = held.delivered_ns + ahead_ns
            outstanding, recalled = partition.adopt(
                lease,
                int.from_bytes(held.outstanding, "little"),
                int.from_bytes(held.recalled, "little"),
                row_keys,
            )
            self._group_state.adopt(lease, outstanding, recalled)
            adopted.append(Adopted(lease.id, held.delivery, held.base, outstanding, recalled))
        if not awaited:
            self._end_wait(key)
        return adopted

    def forgo(self, key: TopicPartition, holder: str) -> None:
        """A holder will not come: it has left. Its messages are owed again."""
        awaited = self.awaited(key)
        if awaited is not None:
            awaited.pop(holder)
            if not awaited:
                self._end_wait(key)

    def _end_wait(self, key: TopicPartition) -> None:
        del self._awaiting[key]
        self._partitions[key].end_wait()

    def leases_of(self, key: TopicPartition) -> list[LeasedRange]:
        """The leases of a partition, for its next owner."""
        return self._group_state.leases.of_partition(key)

    def remove_partition(self, key: TopicPartition) -> Effects:
        """Remove a partition: its topic is deleted, or its shard goes. Later acks and nacks of its leases are late."""
        partition = self._partitions.pop(key, None)
        if partition is None:
            return NOTHING
        self._awaiting.pop(key, None)
        effects = self._recall_all(key)
        partition.close()
        return effects.or_nothing()

    def reset_partition(self, key: TopicPartition, floor: int) -> Effects:
        """Owe everything from an offset on, and nothing before. Leases end and do not count as failures."""
        former = self._partitions.get(key)
        if former is None:
            return NOTHING
        effects = self.remove_partition(key)
        partition = self._partition_type(key, AckSet(max(floor, 1)), {}, self._group_state, 0)
        self._partitions[key] = partition
        partition.extend(former.end)
        return effects

    def _recall_all(self, key: TopicPartition) -> Effects:
        """End all leases on a partition, and recall their messages."""
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, 0, [])
        for lease in self._group_state.leases.of_partition(key):
            effects.recalls += [
                (lease.consumer.number, DeliveryPart(lease.id, begin, end))
                for begin, end in masks.runs(lease.base, lease.outstanding)
            ]
            selection.take_all(lease)
        self._group_state.release(selection.taken, selection.stopped)
        return effects

    def reopen(self, key: TopicPartition, offset: int) -> Effects:
        """Owe the message of a dead letter again, as if it had never been delivered."""
        partition = self._partitions.get(key)
        if partition is None or offset < 1:
            return NOTHING
        effects = Effects()
        partition.reopen(offset, effects)
        return effects.or_nothing()

    def extend(self, key: TopicPartition, end: int) -> None:
        """The messages of the partition below `end` are stored."""
        partition = self._partitions.get(key)
        if partition is not None:
            partition.extend(end)

    def gone(self, key: TopicPartition, begin: int, end: int) -> Effects:
        """These messages cannot be read any more: they count as acknowledged."""
        partition = self._partitions.get(key)
        if partition is None or begin >= end:
            return NOTHING
        effects = Effects()
        partition.gone(begin, end, effects)
        return effects.or_nothing()

    # --- Consumers ---

    def join(self, consumer: int, *, window_messages: int, window_bytes: int) -> None:
        """Add a consumer. Its number must be unique in this group."""
        self._group_state.consumers.add(ConsumerWindow(consumer, window_messages, window_bytes))

    def resize(self, consumer: int, *, window_messages: int, window_bytes: int) -> None:
        """Change a consumer's window. Messages leased beyond a smaller window stay leased."""
        found = self._group_state.consumers.get(consumer)
        if found is not None:
            self._group_state.consumers.resize(found, window_messages, window_bytes)

    def leave(self, consumer: int, now_ns: int, *, is_clean: bool) -> Effects:
        """Remove a consumer. Its messages are due again; unless it leaves cleanly, they count as failed."""
        found = self._group_state.consumers.get(consumer)
        if found is None:
            return NOTHING
        effects = Effects()
        self._group_state.consumers.remove(found)
        leases = self._group_state.leases.of_consumer(consumer)
        self._end(leases, now_ns, reason=None if is_clean else _LEFT, effects=effects)
        return effects.or_nothing()

    # --- Deliveries ---

    def next_want(self, now_ns: int) -> Want | None:  # noqa: ARG002 (`expire` has ended the delays)
        """The next read, whose messages are to be offered. None: no consumer has room for anything that is due."""
        group_state = self._group_state
        if not group_state.consumers.room_messages:
            return None
        # Messages reserved for one consumer, and partitions that any consumer may serve, take turns.
        self._is_turn_of_heads = not self._is_turn_of_heads
        if self._is_turn_of_heads and (want := self._want_of_heads()) is not None:
            return want
        while (key := group_state.next_busy()) is not None:
            want = self._partitions[key].want()
            if want is not None:
                return want
        return self._want_of_heads()

    def _want_of_heads(self) -> Want | None:
        consumer = self._group_state.consumers.next_with_heads()
        if consumer is None:
            return None
        key = next(iter(consumer.heads))
        consumer.heads.move_to_end(key)
        return self._partitions[key].want_for(consumer)

    def offer(
        self,
        key: TopicPartition,
        base: int,
        count: int,
        size_bytes: int,
        now_ns: int,
        row_keys: Sequence[bytes | None] | None = None,
    ) -> list[LeasedDelivery]:
        """Offer stored messages of consecutive offsets from `base` on. Returns what can be delivered now."""
        partition = self._partitions.get(key)
        if partition is None or count < 1:
            return []
        return partition.offer(base, count, -(-size_bytes // count), now_ns, row_keys)

    # --- Requests of consumers. A lease is valid until `expire` has ended it. ---

    def ack(
        self,
        consumer: int,
        deliveries: Sequence[int],
        parts: Sequence[DeliveryPart],
        now_ns: int,  # noqa: ARG002
        picked: Sequence[Picked] = (),
    ) -> Effects:
        """Acknowledge what is outstanding of whole deliveries, and parts of others."""
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, consumer, effects.late)
        selection.take_deliveries(deliveries)
        selection.take_parts(parts)
        if picked:
            selection.take_picked(picked)
        self._acknowledge(selection, effects)
        return effects.or_nothing()

    def ack_up_to(
        self,
        consumer: int,
        key: TopicPartition,
        offset: int,
        now_ns: int,  # noqa: ARG002
    ) -> Effects:
        """Acknowledge all messages of a partition that this consumer has, up to and including an offset."""
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, consumer, effects.late)
        for lease in self._group_state.leases.up_to(consumer, key, offset):
            selection.take_up_to(lease, offset)
        self._acknowledge(selection, effects)
        return effects.or_nothing()

    def _acknowledge(self, selection: LeaseSelection, effects: Effects) -> None:
        for lease, mask in selection.taken.items():
            self._partitions[lease.key].acknowledge(lease, mask, effects)
        self._release(selection)

    def nack(
        self,
        consumer: int,
        parts: Sequence[DeliveryPart],
        now_ns: int,
        *,
        delay_ns: int | None,
        reason: str,
    ) -> Effects:
        """Count these messages as failed. They are delivered again after `delay_ns`; None: the options' delay."""
        if delay_ns is not None:
            delay_ns = min(max(delay_ns, 0), DURATION_NS_MAX)
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, consumer, effects.late)
        selection.take_parts(parts)
        for partition, returned in self._by_partition(selection):
            partition.fail(
                returned,
                now_ns,
                delay_ns=delay_ns,
                reason=reason[:_REASON_LENGTH_MAX],
                effects=effects,
            )
        self._release(selection)
        return effects.or_nothing()

    def give_back(self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int) -> Effects:  # noqa: ARG002
        """Return messages on which no work has begun: they are due again at once, and no failure is counted.

        Messages that the consumer no longer has are ignored.
        """
        effects = Effects()
        selection = LeaseSelection(self._group_state.leases, consumer, [])
        selection.take_parts(parts)
        for partition, returned in self._by_partition(selection):
            partition.give_back(returned, effects)
        self._release(selection)
        return effects.or_nothing()

    def renew(
        self,
        consumer: int,
        deliveries: Sequence[int],
        now_ns: int,
        *,
        lease_ns: int | None = None,
    ) -> None:
        """Restart leases, for `lease_ns` or the options' duration. Leases that have ended are ignored."""
        if lease_ns is None:
            lease_ns = self.options.lease_ns
        deadline_ns = now_ns + min(max(lease_ns, 0), self.options.processing_ns_max)
        for delivery in deliveries:
            lease = self._group_state.leases.get(consumer, delivery)
            if lease is not None:
                self._group_state.leases.renew(lease, deadline_ns)

    def missing(self, consumer: int, parts: Sequence[DeliveryPart]) -> list[DeliveryPart]:
        """The parts of these that the consumer does not have, or no longer has."""
        selection = LeaseSelection(self._group_state.leases, consumer, [])
        selection.find_missing(parts)
        return selection.late

    def recalled(self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int) -> Effects:  # noqa: ARG002
        """The consumer confirms that it does not work, or no longer works, on these recalled messages."""
        selection = LeaseSelection(self._group_state.leases, consumer, [])
        selection.stop_recalled(parts)
        self._release(selection)
        return NOTHING

    # --- Dead letters ---

    def dead_letter_stored(self, key: TopicPartition, offset: int, now_ns: int) -> Effects:  # noqa: ARG002
        """The message's dead letter is stored: the message is done."""
        partition = self._partitions.get(key)
        if partition is None:
            return NOTHING
        effects = Effects()
        partition.dead_letter_stored(offset, effects)
        return effects.or_nothing()

    def dead_letter_failed(self, key: TopicPartition, offset: int, now_ns: int) -> Effects:
        """The message's dead letter could not be stored: the group asks for it again later."""
        partition = self._partitions.get(key)
        if partition is not None:
            partition.dead_letter_failed(offset, now_ns)
        return NOTHING

    # --- Time ---

    def expire(self, now_ns: int) -> Effects:
        """End the leases and delays whose time is up, and the waits for holders."""
        effects = Effects()
        for key in [key for key, until_ns in self._awaiting.items() if until_ns <= now_ns]:
            self._end_wait(key)
        ended = self._group_state.leases.ended(now_ns)
        if ended:
            effects.expired += [(lease.consumer.number, lease.id) for lease in ended]
            self._end(ended, now_ns, reason=_EXPIRED, effects=effects)
        while (delay := self._group_state.pop_delay(now_ns)) is not None:
            partition = self._partitions.get(delay.key)
            if partition is not None:
                partition.end_delay(delay, now_ns, effects)
        return effects.or_nothing()

    def next_time_ns(self) -> int | None:
        """When `expire` may next have something to do; None: never, as things are."""
        deadline_ns = self._group_state.leases.next_deadline_ns()
        delay_ns = self._group_state.next_delay_ns()
        if self._awaiting:
            until_ns = min(self._awaiting.values())
            delay_ns = until_ns if delay_ns is None else min(delay_ns, until_ns)
        if deadline_ns is None or delay_ns is None:
            return deadline_ns if delay_ns is None else delay_ns
        return min(deadline_ns, delay_ns)

    def _end(
        self, leases: Iterable[LeasedRange], now_ns: int, *, reason: str | None, effects: Effects
    ) -> None:
        """End leases. With a reason, their messages count as failed."""
        selection = LeaseSelection(self._group_state.leases, 0, [])
        for lease in leases:
            selection.take_all(lease)
        for partition, returned in self._by_partition(selection):
            if reason is None:
                partition.give_back(returned, effects)
            else:
                partition.fail(returned, now_ns, delay_ns=0, reason=reason, effects=effects)
        self._release(selection)

    def _by_partition(
        self, selection: LeaseSelection
    ) -> Iterator[tuple[SharedPartition, list[tuple[LeasedRange, int]]]]:
        """The taken messages by partition: a key's messages may be in several leases."""
        by_key: defaultdict[TopicPartition, list[tuple[LeasedRange, int]]] = defaultdict(list)
        for lease, mask in selection.taken.items():
            by_key[lease.key].append((lease, mask))
        for key, returned in by_key.items():
            yield self._partitions[key], returned

    def _release(self, selection: LeaseSelection) -> None:
        for lease, mask in selection.stopped.items():
            self._partitions[lease.key].confirm_recall(lease, mask)
        self._group_state.release(selection.taken, selection.stopped)

    # --- State ---

    @property
    def is_idle(self) -> bool:
        """Whether no message is in flight, delayed, or waiting to be stored as a dead letter."""
        return not (
            self._group_state.in_flight or self._group_state.delayed or self._group_state.dying
        )

    def has_room(self, consumer: int) -> bool:
        found = self._group_state.consumers.get(consumer)
        return found is not None and found.has_room

    def is_short(self, consumer: int) -> bool:
        """Whether messages are due that only more room at this consumer would let go."""
        consumers = self._group_state.consumers
        found = consumers.get(consumer)
        if found is None or found.has_room:
            return False
        return bool(found.heads) or (not consumers.room_messages and self._owes())

    def _owes(self) -> bool:
        """Whether a message is due for any consumer."""
        while (key := self._group_state.next_busy()) is not None:
            if self._partitions[key].want() is not None:
                return True
        return False

    def leased(self, consumer: int) -> tuple[int, int]:
        """How many messages and bytes a consumer has, including recalled ones."""
        found = self._group_state.consumers.get(consumer)
        return (0, 0) if found is None else (found.messages_leased, found.bytes_leased)

    @property
    def in_flight(self) -> int:
        return self._group_state.in_flight

    @property
    def delayed(self) -> int:
        """Messages that failed and wait for their delay to end; of each key only the first."""
        return self._group_state.delayed

    @property
    def waiting(self) -> int:
        """Messages that wait for earlier ones of their key, or for room at the consumer that has these."""
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
        """The acks and failures of a partition. Read-only: the set of acks is the group's own, and keeps changing."""
        partition = self._partitions.get(key)
        if partition is None:
            return None
        failures = {o: failure for o, failure in partition.failures.items() if failure.failures}
        return PartitionAcks(partition.acked, failures)

    def partition_in_flight(self, key: TopicPartition) -> int:
        """How many messages of a partition consumers have."""
        return sum(
            (lease.outstanding | lease.recalled).bit_count()
            for lease in self._group_state.leases.of_partition(key)
        )
