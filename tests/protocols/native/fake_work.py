"""Acknowledged work that the test controls: consumers that record every call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from runnel.broker.consumer_groups import WorkConsumer, WorkDelivery, WorkSink
from runnel.broker.consumer_groups.dead_letter_queues import SettleRequest
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest
from runnel.broker.pages import ListRequest
from runnel.errors import RunnelError, UnknownSubscriptionError
from runnel.formats import wire, work_heads
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.group_rules.definition import Definition, Mode, SubscriptionOptions


@dataclass
class FakeDelivery:
    """A lease with whatever bytes the test wants as its block."""

    lease: work_heads.Lease
    buffers: Sequence[bytes]
    size: int
    messages: int = 1


@dataclass
class FakeConsumer:
    """Writes down what is done to it. Acks and nacks of `late_deliveries` come too late."""

    number: int
    sink: WorkSink
    request: work_heads.Consume
    calls: list[tuple[object, ...]] = field(default_factory=list)
    late_deliveries: set[int] = field(default_factory=set)
    may_store: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None  # of storing
    late_at_last: Sequence[work_heads.DeliveryPart] = ()  # said by other nodes

    def __post_init__(self) -> None:
        request = self.request
        self.may_store.set()
        self.definition = Definition(
            1,
            request.subscription,
            tuple(request.patterns),
            Mode(request.mode),
            SubscriptionOptions.of(request.options),
        )
        self.member = request.member

    def start(self) -> None:
        self.calls.append(("start",))

    def ack(
        self,
        deliveries: Sequence[int],
        parts: Sequence[work_heads.DeliveryPart],
        picked: Sequence[work_heads.Picked] = (),
    ) -> Sequence[work_heads.DeliveryPart]:
        self.calls.append(("ack", list(deliveries), list(parts), *picked))
        whole = [work_heads.DeliveryPart(each, 0, 0) for each in deliveries]
        return self._late([*whole, *parts])

    def ack_up_to(self, topic: str, partition: int, offset: int) -> None:
        self.calls.append(("ack_up_to", topic, partition, offset))

    def nack(
        self, parts: Sequence[work_heads.DeliveryPart], *, delay_ns: int | None, reason: str
    ) -> Sequence[work_heads.DeliveryPart]:
        self.calls.append(("nack", list(parts), delay_ns, reason))
        return self._late(parts)

    def _late(self, parts: Sequence[work_heads.DeliveryPart]) -> Sequence[work_heads.DeliveryPart]:
        return [part for part in parts if part.delivery in self.late_deliveries]

    def renew(self, deliveries: Sequence[int], *, lease_ns: int | None) -> None:
        self.calls.append(("renew", list(deliveries), lease_ns))

    def recalled(self, parts: Sequence[work_heads.DeliveryPart]) -> None:
        self.calls.append(("recalled", list(parts)))

    def resize(self, window_messages: int, window_bytes: int) -> None:
        self.calls.append(("resize", window_messages, window_bytes))

    def pause(self) -> None:
        self.calls.append(("pause",))

    def resume(self) -> None:
        self.calls.append(("resume",))

    async def wait_stored(self) -> Sequence[work_heads.DeliveryPart]:
        await self.may_store.wait()
        if self.failure is not None:
            raise self.failure
        return self.late_at_last

    def close(self, *, is_clean: bool) -> None:
        self.calls.append(("close", is_clean))

    def deliver(self, *payloads: bytes) -> None:
        """Each as a delivery of one message, with numbers from 1 on."""
        self.sink.deliver_work(
            self.number,
            [
                cast(WorkDelivery, FakeDelivery(_lease(number), (payload,), len(payload)))
                for number, payload in enumerate(payloads, 1)
            ],
        )


def _lease(number: int) -> work_heads.Lease:
    return work_heads.Lease(number, "a", 0, number, number + 1)


class FakeWork:
    """The verbs of acknowledged work."""

    def __init__(self) -> None:
        self.consumers: list[FakeConsumer] = []
        self.may_consume = asyncio.Event()
        self.may_consume.set()
        self.ends_consumers: RunnelError | None = None  # while they are being opened
        self.verbs: list[tuple[object, ...]] = []  # that were called, but for consume
        self.failure: Exception | None = None
        self.patterns: dict[str, list[str]] = {}  # of the subscriptions there are

    def patterns_of(self, name: str) -> Sequence[str]:
        if name not in self.patterns:
            raise UnknownSubscriptionError(f"subscription {name!r} does not exist")
        return self.patterns[name]

    async def consume(
        self,
        number: int,
        sink: WorkSink,
        request: work_heads.Consume,
        account: object = None,
        part: object = None,
    ) -> WorkConsumer:
        await self.may_consume.wait()
        self._check()
        consumer = FakeConsumer(number, sink, request)
        self.consumers.append(consumer)
        if self.ends_consumers is not None:
            sink.consumer_ended(number, self.ends_consumers)
        return cast(WorkConsumer, consumer)

    async def make_subscription(self, request: SubscriptionRequest, account: object = None) -> None:
        patterns = list(request.patterns)
        made = ("make", request.name, patterns, request.mode, request.start, request.options)
        self.verbs.append(made)

    async def delete_subscription(self, name: str) -> None:
        self._check()
        self.verbs.append(("delete", name))

    async def pause_subscription(self, name: str, *, is_paused: bool) -> None:
        self.verbs.append(("pause", name, is_paused))

    async def move_subscription(
        self, name: str, start: wire.Start, *, member: str | None = None
    ) -> None:
        self.verbs.append(("move", name, start, member))

    async def remove_member(self, name: str, member: str) -> None:
        self.verbs.append(("remove", name, member))

    async def subscriptions(
        self, name: str, **options: object
    ) -> list[work_heads.SubscriptionState]:
        return [_state(name)]

    async def subscription_page(
        self, request: ListRequest[Sequence[str]]
    ) -> tuple[list[work_heads.SubscriptionState], bool]:
        return [_state("all")], True

    async def dead_letters(
        self, subscription: str, offset: int, messages_max: int
    ) -> tuple[list[Batch], int]:
        batches = [Batch.from_messages([Message(f"!dead/{subscription}", b"1")])]
        return batches, offset + messages_max

    async def settle_dead(self, request: SettleRequest) -> int:
        offsets = list(request.offsets)
        self.verbs.append(
            ("settle", request.subscription, offsets, request.is_all, request.is_redriven)
        )
        return len(offsets)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


def _state(name: str) -> work_heads.SubscriptionState:
    return work_heads.SubscriptionState(
        name, "shared", ("*",), False, 7, SubscriptionOptions().to_wire(), (), 0, 0
    )
