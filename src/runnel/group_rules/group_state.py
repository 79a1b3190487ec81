"""The state that all partitions of a group share: options, consumers, leases, delays, who may have work."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from runnel.group_rules.definition import SubscriptionOptions
from runnel.group_rules.effects import LeasedDelivery
from runnel.group_rules.leases import LeasedRange, LeaseTable
from runnel.group_rules.windows import ConsumerWindow, ConsumerWindows
from runnel.topics.names import TopicPartition


class Delay(NamedTuple):
    """A time until which something waits: one message, or without an offset all of a key."""

    until_ns: int
    number: int  # those of the same time are over in the order in which they began
    key: TopicPartition
    offset: int
    queue_key: bytes | None


class GroupState:
    def __init__(
        self, options: SubscriptionOptions, *, waiting_max: int, first_delivery_id: int
    ) -> None:
        self.options = options
        self.waiting_max = max(waiting_max, 1)
        self.consumers = ConsumerWindows()
        self.leases = LeaseTable(first_delivery_id)
        self.in_flight = 0  # messages that consumers have
        self.delayed = 0  # messages, or keys, that wait for their time
        self.dying = 0  # messages that wait to be stored as dead letters
        self.waiting = 0  # messages of keys that cannot be delivered yet
        self.releases = 0  # messages that were delivered again
        self._was_crowded = False
        self._delays: list[Delay] = []
        self._delays_made = 0
        self._busy: OrderedDict[TopicPartition, None] = OrderedDict()
        self._stalled: OrderedDict[TopicPartition, None] = OrderedDict()

    # --- Partitions in turn ---

    def call(self, key: TopicPartition) -> None:
        """This partition may have something to deliver to whomever has room."""
        self._busy.setdefault(key)

    def rest(self, key: TopicPartition) -> None:
        """It has nothing."""
        self._busy.pop(key, None)
        self._stalled.pop(key, None)

    def stall(self, key: TopicPartition) -> None:
        """It has nothing but new messages, and too many wait to look at those."""
        self._busy.pop(key, None)
        self._stalled.setdefault(key)

    @property
    def is_crowded(self) -> bool:
        """Too many wait to look at new messages, until a quarter of them has gone.

        Looking at one more whenever one has gone would read a whole stretch for each.
        """
        quarter = self.waiting_max // 4 if self._was_crowded else 0
        self._was_crowded = self.waiting >= self.waiting_max - quarter
        return self._was_crowded

    def next_busy(self) -> TopicPartition | None:
        """The partition that has waited longest for its turn, which it has now."""
        if self._stalled and not self.is_crowded:
            # One at a time: the first may fill the room that there is.
            self.call(self._stalled.popitem(last=False)[0])
        for key in self._busy:
            self._busy.move_to_end(key)
            return key
        return None

    # --- Leases ---

    def open_lease(
        self, consumer: ConsumerWindow, key: TopicPartition, base: int, cost_bytes: int, now_ns: int
    ) -> LeasedRange:
        """A lease with nothing in it yet, which nobody knows of until it is delivered."""
        deadline_ns = now_ns + self.options.lease_ns
        lease_id = self.leases.new_id()
        return LeasedRange(lease_id, consumer, key, base, cost_bytes, now_ns, deadline_ns)

    def deliver(
        self, lease: LeasedRange, mask: int, attempts: list[tuple[int, int, int]]
    ) -> LeasedDelivery:
        count = mask.bit_count()
        size_bytes = count * lease.cost_bytes
        lease.outstanding = mask
        self.leases.add(lease)
        self.consumers.take(lease.consumer, count, size_bytes)
        self.in_flight += count
        self.releases += len(attempts)
        return LeasedDelivery(
            lease.id,
            lease.consumer.number,
            lease.key,
            lease.base,
            mask,
            count,
            size_bytes,
            lease.deadline_ns,
            attempts,
        )

    def release(self, *let_go: Mapping[LeasedRange, int]) -> None:
        """Consumers have let go of these masks of their leases."""
        sums: dict[ConsumerWindow, list[int]] = {}
        for leases in let_go:
            for lease, mask in leases.items():
                count = mask.bit_count()
                summed = sums.get(lease.consumer)
                if summed is None:
                    summed = sums[lease.consumer] = [0, 0]
                summed[0] += count
                summed[1] += count * lease.cost_bytes
                if not lease.outstanding and not lease.recalled:
                    self.leases.discard(lease)
        for consumer, (messages, size_bytes) in sums.items():
            self.in_flight -= messages
            self.consumers.give_back(consumer, messages, size_bytes)

    # --- Delays ---

    def delay(
        self, until_ns: int, key: TopicPartition, offset: int = 0, queue_key: bytes | None = None
    ) -> None:
        self._delays_made += 1
        heappush(self._delays, Delay(until_ns, self._delays_made, key, offset, queue_key))

    def next_delay_ns(self) -> int | None:
        return self._delays[0].until_ns if self._delays else None

    def pop_delay(self, now_ns: int) -> Delay | None:
        """A delay that is over. What it was for may have changed since: the partition knows."""
        if self._delays and self._delays[0].until_ns <= now_ns:
            return heappop(self._delays)
        return None
