"""What a history has established so far: messages, who holds them, what is done, how often each failed.

Facts follow from events and from the promises alone. Those that have to outlive a restart (what is done, failures,
where a partition begins) can be taken back event by event, for a restart keeps only what was stored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tests.group_rules.history import Failure, Place


class LogFacts:
    """The messages of one partition, which every group sees alike."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.first = self.end = 1
        self.queues: dict[bytes, list[int]] = defaultdict(list)
        self._bases: list[int] = []
        self._costs_bytes: list[int] = []
        self._keys: list[bytes | None] = []

    def publish(self, base: int, keys: list[bytes | None], cost_bytes: int) -> None:
        if not self._keys:
            self.first = self.end = base
        assert base == self.end, f"the history itself leaves out messages before {base}"
        self._bases.append(base)
        self._costs_bytes.append(cost_bytes)
        self._keys += keys
        self.end = base + len(keys)
        for offset, key in enumerate(keys, base):
            if key is not None:
                self.queues[key].append(offset)

    def key(self, offset: int) -> bytes | None:
        return self._keys[offset - self.first] if self.first <= offset < self.end else None

    @property
    def cost_bytes_max(self) -> int:
        return max(self._costs_bytes, default=0)

    def cost_bytes(self, offset: int) -> int:
        return self._costs_bytes[bisect_right(self._bases, offset) - 1]


class Lease:
    """A delivery: what of it is still being worked on, and what was asked back but is not back yet."""

    __slots__ = (
        "consumer",
        "cost_bytes",
        "deadline_ns",
        "delivery",
        "offsets",
        "place",
        "recalled",
    )

    def __init__(
        self,
        delivery: int,
        consumer: int,
        place: Place,
        deadline_ns: int,
        cost_bytes: int | None = None,
    ) -> None:
        """`cost_bytes` of each message; None: as much as when it was published."""
        self.cost_bytes = cost_bytes
        self.delivery = delivery
        self.consumer = consumer
        self.place = place
        self.deadline_ns = deadline_ns
        self.offsets: set[int] = set()
        self.recalled: set[int] = set()


class Count(NamedTuple):
    """How often a message failed, when it may come again, and when it was first delivered."""

    failures: int
    not_before_ns: int
    first_delivery_ns: int


def count_of(failure: Failure) -> Count:
    return Count(failure.failures, failure.not_before_ns, failure.first_delivery_ns)


class Consumer:
    __slots__ = ("bytes", "messages", "window_bytes", "window_messages")

    def __init__(self, window_messages: int, window_bytes: int) -> None:
        self.window_messages = window_messages
        self.window_bytes = window_bytes
        self.messages = 0  # with it at the moment, recalled ones too
        self.bytes = 0

    def has_room(self, cost_bytes: int) -> bool:
        if self.messages >= self.window_messages:
            return False
        return self.messages == 0 or self.bytes + cost_bytes <= self.window_bytes


class PartitionFacts:
    """What one group owes of one partition, and who works on it."""

    def __init__(self, log: LogFacts, floor: int) -> None:
        self.log = log
        self.floor = floor
        self.done: dict[int, str] = {}  # how: acknowledged, dead-lettered, gone
        self.is_away = False  # its shard is elsewhere
        self.gone_below = 1  # the topic was deleted when it had got so far
        self.ever_done: set[int] = set()  # at any time, whatever a crash made of it
        self.counts: dict[int, Count] = {}
        self.held: dict[int, Lease] = {}
        self.recalled: dict[int, Lease] = {}
        self.letters_under_way: set[int] = set()  # a dead letter is being stored
        self.letter_again_ns: dict[int, int] = {}  # one has to be, at this time
        self.first_delivery_ns: dict[int, int] = {}
        # Until when a delay holds a key, even if the message with the delay is gone.
        self.key_held_ns: dict[bytes, int] = {}
        # Sent back from among the dead letters: later ones of their keys may be out already.
        self.reopened: set[int] = set()

    @property
    def place(self) -> Place:
        return self.log.place

    def queue(self, offset: int) -> Sequence[int]:
        """All messages of the same key, in order; none for one without a key."""
        key = self.log.key(offset)
        return () if key is None else self.log.queues[key]

    def believe(self, floor: int, done: AbstractSet[int], failed: Mapping[int, Count]) -> None:
        """Of what is gone with a deleted topic, whatever is said."""
        if self.gone_below == 1:
            return
        owed = {offset for offset in range(floor, self.gone_below) if offset not in done}
        owed |= {offset for offset in self.owed() if offset >= self.gone_below}
        self.done = {
            offset: self.done.get(offset, "gone with its topic")
            for offset in range(1, max(self.log.end, self.floor))
            if offset not in owed
        }
        self.counts = {
            **{offset: count for offset, count in failed.items() if offset < self.gone_below},
            **{o: count for o, count in self.counts.items() if o >= self.gone_below},
        }
        self.floor = 1

    def is_owed(self, offset: int) -> bool:
        return offset >= self.floor and offset not in self.done

    def owed(self) -> Iterator[int]:
        return (offset for offset in range(self.floor, self.log.end) if offset not in self.done)

    def is_waiting(self, offset: int) -> bool:
        """Owed, not held by a consumer, and not about to become a dead letter."""
        return (
            self.is_owed(offset)
            and offset not in self.held
            and offset not in self.recalled
            and offset not in self.letters_under_way
            and offset not in self.letter_again_ns
        )

    def is_due(self, offset: int, looked_ns: int) -> bool:
        """No delay is in its way, as of when the group last looked at the clock."""
        count = self.counts.get(offset)
        return count is None or count.not_before_ns <= looked_ns

    def hold_key(self, offset: int, until_ns: int) -> None:
        """A delay of a message holds all of its key."""
        key = self.log.key(offset)
        if key is not None:
            self.key_held_ns[key] = max(until_ns, self.key_held_ns.get(key, 0))

    def forget_leases(self) -> None:
        """As after a restart: what was only in memory is gone."""
        self.held.clear()
        self.recalled.clear()
        self.letters_under_way.clear()
        self.letter_again_ns.clear()
        self.first_delivery_ns.clear()
        self.key_held_ns.clear()
        self.reopened.clear()


class Undo(NamedTuple):
    """How to take back what an event led to."""

    number: int
    partition: PartitionFacts
    undo: Callable[[], None]
    is_operators: bool = False  # they did it, and not consumers


class GroupFacts:
    """One group: its partitions, consumers, deliveries."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.partitions: dict[Place, PartitionFacts] = {}
        self.consumers: dict[int, Consumer] = {}
        self.leases: dict[int, Lease] = {}
        self.last_delivery = 0
        self.looked_ns = -1  # when the group last looked at the clock: delays end by that
        # How to take back what is not known to be stored, with the number of the event that led to it.
        self._undo: list[Undo] = []

    def stored(self, events: int, *, is_consumers: bool = False) -> None:
        """`is_consumers`: what they have done is; what operators did, if it came before that in the same partition."""
        last = {
            entry.partition: entry.number
            for entry in self._undo
            if entry.number <= events and not (is_consumers and entry.is_operators)
        }
        self._undo = [entry for entry in self._undo if entry.number > last.get(entry.partition, 0)]

    def restart(self, events: int | None) -> None:
        """None: what is left of unstored records is given for each partition."""
        if events is not None:
            for entry in reversed(self._undo):
                if entry.number > events:
                    entry.undo()
            self._undo.clear()
        self.consumers.clear()
        self.leases.clear()
        self.looked_ns = -1
        if events is None:
            self.last_delivery = 0  # a broker begins anew with its ids
        for partition in self.partitions.values():
            partition.forget_leases()
            partition.is_away = False

    def recover(self, partition: PartitionFacts, is_as_told: Callable[[], bool]) -> bool:
        """Take back what is not stored of a partition, the last first, until it is as was told; whether it ever is."""
        own = [entry for entry in self._undo if entry.partition is partition]
        self._undo = [entry for entry in self._undo if entry.partition is not partition]
        while not is_as_told():
            if not own:
                return False
            last = own.pop()
            last.undo()
            # What one event led to was written down together.
            while own and own[-1].number == last.number:
                own.pop().undo()
        return True

    # --- Leases ---

    def lease(self, lease: Lease, offset: int) -> None:
        partition = self.partitions[lease.place]
        lease.offsets.add(offset)
        partition.held[offset] = lease
        consumer = self.consumers[lease.consumer]
        consumer.messages += 1
        consumer.bytes += cost_bytes(partition, lease, offset)

    def release(self, lease: Lease, offset: int) -> None:
        """Of a message that is held: it is no longer."""
        partition = self.partitions[lease.place]
        lease.offsets.remove(offset)
        del partition.held[offset]
        self._let_go(lease, offset)

    def recall(self, lease: Lease, offset: int) -> None:
        """Of a message that is held: its consumer is to stop, and counts as having it until it says that it has."""
        partition = self.partitions[lease.place]
        lease.offsets.remove(offset)
        lease.recalled.add(offset)
        partition.recalled[offset] = partition.held.pop(offset)

    def give_back(self, lease: Lease, offset: int) -> None:
        """Of a message that was recalled: its consumer is done with it."""
        lease.recalled.remove(offset)
        del self.partitions[lease.place].recalled[offset]
        self._let_go(lease, offset)

    def _let_go(self, lease: Lease, offset: int) -> None:
        consumer = self.consumers[lease.consumer]
        consumer.messages -= 1
        consumer.bytes -= cost_bytes(self.partitions[lease.place], lease, offset)
        if not lease.offsets and not lease.recalled:
            self.leases.pop(lease.delivery, None)

    def end_leases(self, partition: PartitionFacts) -> None:
        for offset, lease in list(partition.held.items()):
            self.release(lease, offset)
        for offset, lease in list(partition.recalled.items()):
            self.give_back(lease, offset)

    # --- What outlives a restart, once it is stored ---

    def settle(self, partition: PartitionFacts, offset: int, how: str, number: int) -> None:
        partition.done[offset] = how
        partition.ever_done.add(offset)
        count = partition.counts.pop(offset, None)

        def undo() -> None:
            del partition.done[offset]
            if count is not None:
                partition.counts[offset] = count

        self._undo.append(Undo(number, partition, undo))

    def count(self, partition: PartitionFacts, offset: int, count: Count, number: int) -> None:
        before = partition.counts.get(offset)
        partition.counts[offset] = count

        def undo() -> None:
            if before is None:
                partition.counts.pop(offset, None)
            else:
                partition.counts[offset] = before

        self._undo.append(Undo(number, partition, undo))

    def forgive(self, partition: PartitionFacts, offset: int, number: int) -> None:
        count = partition.counts.pop(offset, None)
        if count is not None:
            forgiven = count

            def undo() -> None:
                partition.counts[offset] = forgiven

            self._undo.append(Undo(number, partition, undo, is_operators=True))

    def reopen(self, partition: PartitionFacts, offset: int, number: int) -> None:
        floor = partition.floor
        how = partition.done.pop(offset, None)
        if offset < floor:
            # Everything else before the floor stays done.
            partition.floor = offset
            for other in range(offset + 1, floor):
                partition.done[other] = "passed"

        def undo() -> None:
            for other in range(offset + 1, floor):
                del partition.done[other]
            partition.floor = floor
            if how is not None:
                partition.done[offset] = how

        self._undo.append(Undo(number, partition, undo, is_operators=True))

    def move(self, partition: PartitionFacts, floor: int, number: int) -> None:
        before = (partition.floor, partition.done, partition.counts)
        partition.floor, partition.done, partition.counts = floor, {}, {}
        partition.forget_leases()

        def undo() -> None:
            partition.floor, partition.done, partition.counts = before

        self._undo.append(Undo(number, partition, undo, is_operators=True))


def cost_bytes(partition: PartitionFacts, lease: Lease, offset: int) -> int:
    """What a message takes of a window while it is leased."""
    return partition.log.cost_bytes(offset) if lease.cost_bytes is None else lease.cost_bytes
