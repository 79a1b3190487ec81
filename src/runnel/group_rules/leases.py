"""The leases of a group, by id, consumer, partition and deadline. Acks and failures are decided elsewhere."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from runnel.group_rules.windows import ConsumerWindow
from runnel.topics.names import TopicPartition

# How many entries of ended leases a heap may have beyond twice the number of leases.
_STALE_MAX: Final = 1_024


class LeasedRange:
    """Messages of a partition that are leased to a consumer: bit i of a mask stands for offset `base` + i."""

    __slots__ = (
        "base",
        "consumer",
        "cost_bytes",
        "deadline_ns",
        "delivered_ns",
        "id",
        "key",
        "outstanding",
        "recalled",
        "woken_ns",
    )

    def __init__(
        self,
        lease_id: int,
        consumer: ConsumerWindow,
        key: TopicPartition,
        base: int,
        cost_bytes: int,
        delivered_ns: int,
        deadline_ns: int,
    ) -> None:
        self.id = lease_id
        self.consumer = consumer
        self.key = key
        self.base = base
        self.cost_bytes = cost_bytes  # of each message
        self.delivered_ns = delivered_ns
        self.deadline_ns = deadline_ns
        self.woken_ns = 0  # the time of its heap entry: not after the deadline
        self.outstanding = 0
        self.recalled = 0  # and the consumer has not confirmed yet that it stopped work on them

    @property
    def last(self) -> int:
        """The highest offset that the consumer still has."""
        return self.base + (self.outstanding | self.recalled).bit_length() - 1


class PartitionLeases:
    """The leases of one consumer in one partition."""

    __slots__ = ("_by_base", "leases")

    def __init__(self) -> None:
        self.leases: dict[int, LeasedRange] = {}
        self._by_base: list[tuple[int, int]] | None = None  # a heap, from the first `up_to` on

    def add(self, lease: LeasedRange) -> None:
        self.leases[lease.id] = lease
        if self._by_base is not None:
            heappush(self._by_base, (lease.base, lease.id))

    def up_to(self, offset: int) -> list[LeasedRange]:
        """The leases with messages up to an offset. The caller must take these messages from them."""
        heap = self._by_base
        if heap is None or len(heap) > 2 * len(self.leases) + _STALE_MAX:
            heap = [(lease.base, lease.id) for lease in self.leases.values()]
            heapify(heap)
            self._by_base = heap
        found = []
        beyond = []
        while heap and heap[0][0] <= offset:
            entry = heappop(heap)
            lease = self.leases.get(entry[1])
            if lease is not None:
                found.append(lease)
                if lease.last > offset:
                    beyond.append(entry)
        for entry in beyond:
            heappush(heap, entry)
        return found


class LeaseTable:
    """All leases of a group by id, consumer, partition and deadline."""

    def __init__(self, first_id: int) -> None:
        self.next_id = first_id
        self._leases: dict[int, LeasedRange] = {}
        self._of_consumer: dict[int, dict[TopicPartition, PartitionLeases]] = {}
        self._of_partition: dict[TopicPartition, dict[int, PartitionLeases]] = {}
        # A heap of (time, lease id). The entry of a renewed lease stays, and is replaced when its time comes.
        self._deadlines: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def get(self, consumer: int, lease_id: int) -> LeasedRange | None:
        """The consumer's lease with this id; None if there is none, or another consumer has it."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.consumer.number == consumer else None

    def add(self, lease: LeasedRange) -> None:
        number, key = lease.consumer.number, lease.key
        self._leases[lease.id] = lease
        shares = self._of_consumer.setdefault(number, {})
        share = shares.get(key)
        if share is None:
            share = shares[key] = PartitionLeases()
            self._of_partition.setdefault(key, {})[number] = share
        share.add(lease)
        self._wake(lease)
        self._compact()

    def discard(self, lease: LeasedRange) -> None:
        if self._leases.pop(lease.id, None) is None:
            return
        number, key = lease.consumer.number, lease.key
        shares = self._of_consumer[number]
        share = shares[key]
        del share.leases[lease.id]
        if not share.leases:
            del shares[key]
            if not shares:
                del self._of_consumer[number]
            holders = self._of_partition[key]
            del holders[number]
            if not holders:
                del self._of_partition[key]

    def of_consumer(self, consumer: int) -> list[LeasedRange]:
        shares = self._of_consumer.get(consumer, {})
        return [lease for share in shares.values() for lease in share.leases.values()]

    def of_partition(self, key: TopicPartition) -> list[LeasedRange]:
        shares = self._of_partition.get(key, {})
        return [lease for share in shares.values() for lease in share.leases.values()]

    def up_to(self, consumer: int, key: TopicPartition, offset: int) -> list[LeasedRange]:
        """A consumer's leases in a partition with messages up to an offset. The caller must take these messages."""
        share = self._of_consumer.get(consumer, {}).get(key)
        return [] if share is None else share.up_to(offset)

    # --- Time ---

    def renew(self, lease: LeasedRange, deadline_ns: int) -> None:
        lease.deadline_ns = deadline_ns
        if deadline_ns < lease.woken_ns:
            self._wake(lease)
            self._compact()

    def _wake(self, lease: LeasedRange) -> None:
        lease.woken_ns = lease.deadline_ns
        heappush(self._deadlines, (lease.deadline_ns, lease.id))

    def _compact(self) -> None:
        heap = self._deadlines
        if len(heap) > 2 * len(self._leases) + _STALE_MAX:
            heap[:] = [(lease.woken_ns, lease.id) for lease in self._leases.values()]
            heapify(heap)

    def next_deadline_ns(self) -> int | None:
        """When the next lease ends, unless it is renewed."""
        heap = self._deadlines
        while heap:
            when_ns, lease_id = heap[0]
            lease = self._leases.get(lease_id)
            if lease is not None and lease.woken_ns == when_ns:
                if lease.deadline_ns == when_ns:
                    return when_ns
                heappop(heap)
                self._wake(lease)
            else:
                heappop(heap)
        return None

    def ended(self, now_ns: int) -> list[LeasedRange]:
        """The leases whose time is up. Each is returned once: the caller must end it."""
        found = []
        while (when_ns := self.next_deadline_ns()) is not None and when_ns <= now_ns:
            lease = self._leases[heappop(self._deadlines)[1]]
            lease.woken_ns = 0  # makes other entries of this lease stale
            found.append(lease)
        return found
