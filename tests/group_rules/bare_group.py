"""A group with nothing around it but messages: what it wants is offered at once, whole runs at a time."""

from __future__ import annotations

from collections.abc import Sequence

from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.definition import SubscriptionOptions
from runnel.group_rules.effects import DeliveryPart, LeasedDelivery, Want
from runnel.group_rules.group import Group
from runnel.topics.names import TopicPartition

SECOND = 1_000_000_000
ORDERS: TopicPartition = ("orders", 0)
PLAIN = SubscriptionOptions(
    retry_delay_ns=SECOND, retry_delay_ns_max=10 * SECOND, lease_ns=30 * SECOND
)


def offsets(delivery: LeasedDelivery) -> list[int]:
    return [
        delivery.base + bit for bit in range(delivery.mask.bit_length()) if delivery.mask >> bit & 1
    ]


def part(delivery: LeasedDelivery, first: int, last: int | None = None) -> DeliveryPart:
    """From one offset of a delivery to another, that one included."""
    return DeliveryPart(delivery.id, first, (first if last is None else last) + 1)


class BareGroup:
    """Its messages are all of one size. The clock stands still unless a test moves it."""

    def __init__(
        self,
        options: SubscriptionOptions = PLAIN,
        *,
        is_keyed: bool = False,
        message_bytes: int = 10,
        waiting_max: int = 65_536,
    ) -> None:
        self.now_ns = SECOND
        self.group = Group(options, is_keyed=is_keyed, waiting_max=waiting_max)
        self.is_keyed = is_keyed
        self.message_bytes = message_bytes
        self.keys: dict[TopicPartition, list[bytes | None]] = {}
        self.wants: list[Want] = []

    def add(self, key: TopicPartition = ORDERS, acked: AckSet | None = None) -> None:
        self.keys[key] = [None]  # offsets begin at 1
        self.group.add_partition(key, acked or AckSet(), now_ns=self.now_ns)

    def publish(
        self, *row_keys: bytes | None, count: int = 0, key: TopicPartition = ORDERS
    ) -> None:
        if key not in self.keys:
            self.add(key)
        self.keys[key] += row_keys or [None] * count
        self.group.extend(key, len(self.keys[key]))

    def join(self, consumer: int, messages: int = 100, size_bytes: int = 1_000_000) -> None:
        self.group.join(consumer, window_messages=messages, window_bytes=size_bytes)

    def read(self, want: Want) -> list[LeasedDelivery]:
        """Offer exactly what was wanted."""
        self.wants.append(want)
        count = min(want.end - want.begin, max(want.messages_max, 1))
        return self.offer(want.begin, count, key=want.key)

    def offer(self, base: int, count: int, *, key: TopicPartition = ORDERS) -> list[LeasedDelivery]:
        row_keys: Sequence[bytes | None] = self.keys[key][base : base + count]
        return self.group.offer(
            key,
            base,
            count,
            count * self.message_bytes,
            self.now_ns,
            row_keys if self.is_keyed else None,
        )

    def pump(self) -> list[LeasedDelivery]:
        """Read and offer until nothing more is wanted."""
        deliveries: list[LeasedDelivery] = []
        for _ in range(1_000):
            want = self.group.next_want(self.now_ns)
            if want is None:
                return deliveries
            deliveries += self.read(want)
        raise AssertionError("it never wants enough")

    def pumped(self) -> list[tuple[int, list[int]]]:
        """The same, as (consumer, offsets)."""
        return [(delivery.consumer, offsets(delivery)) for delivery in self.pump()]

    def only(self) -> LeasedDelivery:
        """The same, where one delivery is all that comes."""
        (delivery,) = self.pump()
        return delivery

    def acked(self, key: TopicPartition = ORDERS) -> AckSet:
        state = self.group.partition_state(key)
        assert state is not None
        return state.acked
