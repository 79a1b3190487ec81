"""The state that all partitions of a group share: options, consumers, leases, delays, and turns of partitions."""

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
    """The time until which one message waits, or all messages of a key."""

    until_ns: int
    number: int  # delays of the same time end in the order in which they began
    key: TopicPartition
    offset: int  # 0: all messages of `queue_key`
    queue_key: bytes | None


class GroupState:
    """The options, consumers, leases, delays and counters of a group, and which partitions may have messages due."""

    def __init__(
        self, options: SubscriptionOptions, *, waiting_max: int, first_delivery_id: int
    ) -> None:
        self.options = options
        self.waiting_max = max(waiting_max, 1)
        self.consumers = ConsumerWindows()
        self.leases = LeaseTable(first_delivery_id)
        self.in_flight = 0  # messages that consumers have
        self.delayed = 0  # messages, or keys, that wait for a delay to end
        self.dying = 0  # messages that wait to be stored as dead letters
        self.waiting = 0  # messages of keys that cannot be delivered yet
        self.releases = 0  # messages that were delivered again
        self._was_crowded = False
        self._delays: list[Delay] = []
        self._delays_made = 0
        self._busy: OrderedDict[TopicPartition, None] = OrderedDict()
        self._stalled: OrderedDict[TopicPartition, None] = OrderedDict()

    # --- Turns of partitions ---

    def mark_busy(self, key: TopicPartition) -> None:
        """This partition may have messages that any consumer with room can take."""
        self._busy.setdefault(key)

    def mark_idle(self, key: TopicPartition) -> None:
        """This partition has no messages to deliver."""
        self._busy.pop(key, None)
        self._stalled.pop(key, None)

    def mark_stalled(self, key: TopicPartition) -> None:
        """This partition has only new messages, and the group is too crowded to read them."""
        self._busy.pop(key, None)
        self._stalled.setdefault(key)

    @property
    def is_crowded(self) -> bool:
        """Whether so many messages wait that the group reads no new ones, until a quarter of them is gone.

        Reading one more for each delivered one would read a whole range every time.
        """
        quarter = self.waiting_max // 4 if self._was_crowded else 0
        self._was_crowded = self.waiting >= self.waiting_max - quarter
        return self._was_crowded

    def next_busy(self) -> TopicPartition | None:
        """The partition that has waited longest for its turn. It moves to the end of the line."""
        if self._stalled and not self.is_crowded:
            # One at a time: the first may make the group crowded again.
            self.mark_busy(self._stalled.popitem(last=False)[0])
        for key in self._busy:
            self._busy.move_to_end(key)
            return key
        return None

    # --- Leases ---

    def open_lease(
        self, consumer: ConsumerWindow, key: TopicPartition, base: int, cost_bytes: int, now_ns: int
    ) -> LeasedRange:
        """An empty lease, which becomes valid with `deliver`."""
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

    def adopt(self, lease: LeasedRange, outstanding: int, recalled: int) -> None:
        """Continue a lease of the former owner. It may exceed the consumer's window."""
        lease.outstanding, lease.recalled = outstanding, recalled
        count = (outstanding | recalled).bit_count()
        if count:
            self.leases.add(lease)
            self.consumers.take(lease.consumer, count, count * lease.cost_bytes)
            self.in_flight += count

    def release(self, *released: Mapping[LeasedRange, int]) -> None:
        """Return the messages of these masks of leases to the windows of their consumers."""
        sums: dict[ConsumerWindow, list[int]] = {}
        for leases in released:
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
        """The next delay that is over. The partition checks whether it still applies."""
        if self._delays and self._delays[0].until_ns <= now_ns:
            return heappop(self._delays)
        return None
