"""Acknowledged work over the native protocol with a real broker, frame by frame, as a client author sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from runnel.broker.broker import Broker
from runnel.config import Settings
from runnel.formats import block, wire
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.work_heads import (
    Ack,
    AckedHead,
    Consume,
    Consuming,
    DeliveryPart,
    Late,
    Lease,
    ListSubscriptions,
    Nack,
    Recall,
    Recalled,
    SubscriptionListHead,
    SubscriptionState,
    WorkHead,
    WorkOptions,
)
from runnel.platform.clock import SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.protocols.native.native_server import NativeServer
from runnel.security.authenticator import Authenticator
from tests.protocols.native.talker import Talker

SECONDS_MAX = 30
QUICK = WorkOptions(retry_delay_ms=0)
Told = list[tuple[Lease, list[Message]]]


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[NativeServer]:
    settings = Settings(data=str(directory))
    workers = ThreadWorkers(1)
    try:
        broker = await Broker.open(
            settings,
            directory=str(directory),
            disk=RealDisk(),
            clock=SystemClock(),
            workers=workers,
        )
        try:
            listener = NativeServer(broker, settings, Authenticator.open(settings, broker.clock))
            try:
                yield listener
            finally:
                await listener.close()
        finally:
            await broker.close()
    finally:
        workers.close()


def run(directory: Path, *scenarios: Callable[[NativeServer], Awaitable[None]]) -> None:
    """Each with a broker of its own over the same data: in between it is closed and opened again."""

    async def main() -> None:
        async with asyncio.timeout(SECONDS_MAX):
            for scenario in scenarios:
                async with opened(directory) as listener:
                    await scenario(listener)

    asyncio.run(main())


async def connected(listener: NativeServer) -> Talker:
    talker = Talker()
    listener.connect(talker)
    await talker.greet()
    return talker


async def consuming(
    listener: NativeServer,
    mode: str = "shared",
    *,
    window: int = 256,
    options: WorkOptions | None = QUICK,
) -> Talker:
    talker = await connected(listener)
    head = Consume(2, 1, "billing", ["orders/*"], mode, window_messages=window, options=options)
    told = await talker.ask(head, Consuming)
    assert (told.subscription, told.mode) == ("billing", mode)
    return talker


async def publish(listener: NativeServer, *payloads: bytes, key: bytes | None = None) -> None:
    messages = [Message("orders/eu", payload, key=key) for payload in payloads]
    await listener.broker.publish(Batch.from_messages(messages))


async def hear_work(talker: Talker, count: int) -> Told:
    """Deliveries, until there are so many messages."""
    told: Told = []
    while sum(len(messages) for _, messages in told) < count:
        work, tail = await talker.hear_all()
        assert isinstance(work, WorkHead), work
        position = 0
        for lease in work.leases:
            envelope, body, block_bytes = block.unpack(memoryview(tail)[position:])
            told.append((lease, Batch(envelope, body).messages()))
            position += block_bytes
        assert position == len(tail)
    return told


def offsets(told: Told) -> list[int]:
    return [message.offset for _, messages in told for message in messages]


def failures(told: Told) -> dict[int, int]:
    """Of messages that failed before, how often."""
    attempts = [attempt for lease, _ in told for attempt in lease.attempts]
    return {attempt.offset: attempt.failures for attempt in attempts if attempt.failures}


async def state_of(talker: Talker) -> SubscriptionState:
    (state,) = (
        await talker.ask(ListSubscriptions(99, "billing"), SubscriptionListHead)
    ).subscriptions
    return state


def test_an_ack_that_names_nothing_waits_for_those_before_it(tmp_path: Path) -> None:
    async def scenario(listener: NativeServer) -> None:
        await publish(listener, b"1", b"2")
        talker = await consuming(listener)
        ((lease, _),) = await hear_work(talker, 2)
        talker.say(Ack(3, 1, [lease.delivery]), Ack(4, 1))
        assert [(await talker.hear(AckedHead)).id for _ in range(2)] == [3, 4]

    run(tmp_path / "data", scenario)


def test_a_lost_connection_gives_back_at_once_and_it_counts(tmp_path: Path) -> None:
    async def scenario(listener: NativeServer) -> None:
        await publish(listener, b"1", b"2")
        first = await consuming(listener)
        (lease, _), *_ = await hear_work(first, 2)
        await first.ask(Ack(3, 1, [], [DeliveryPart(lease.delivery, 1, 2)]), AckedHead)
        second = await consuming(listener)
        first.transport.abort()
        told = await hear_work(second, 1)
        assert (offsets(told), failures(told)) == ([2], {2: 1})

    run(tmp_path / "data", scenario)


def test_refused_messages_come_again_and_a_late_ack_is_reported(tmp_path: Path) -> None:
    async def scenario(listener: NativeServer) -> None:
        await publish(listener, b"1", b"2")
        talker = await consuming(listener)
        ((lease, _),) = await hear_work(talker, 2)
        refused = DeliveryPart(lease.delivery, 2, 3)
        talker.say(Nack(1, [refused], 0, "no such customer"))
        again = await hear_work(talker, 1)
        assert (offsets(again), failures(again)) == ([2], {2: 1})
        talker.say(Ack(0, 1, [lease.delivery], []), Ack(0, 1, [], [refused]))
        late = await talker.hear(Late)
        assert [part.delivery for part in late.parts] == [lease.delivery]
        acked = await talker.ask(
            Ack(3, 1, [999], [DeliveryPart(again[0][0].delivery, 2, 3)]), AckedHead
        )
        assert list(acked.late) == [DeliveryPart(999, 0, 0)]

    run(tmp_path / "data", scenario)


def test_a_keys_later_messages_are_recalled_and_come_again_in_order(tmp_path: Path) -> None:
    async def scenario(listener: NativeServer) -> None:
        await publish(listener, b"1", b"2", b"3", key=b"k")
        talker = await consuming(listener, "key_shared")
        ((lease, _),) = await hear_work(talker, 3)
        talker.say(Nack(1, [DeliveryPart(lease.delivery, 1, 2)], 0))
        recall = await talker.hear(Recall)
        assert list(recall.parts) == [DeliveryPart(lease.delivery, 2, 4)]
        await talker.ask(wire.Ping(3), wire.Pong)  # no consumer gets the key's messages until then
        talker.say(Recalled(1, recall.parts))
        told = await hear_work(talker, 3)
        assert (offsets(told), failures(told)) == ([1, 2, 3], {1: 1})

    run(tmp_path / "data", scenario)


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (Consume(2, 1, "nobody"), "unknown_subscription"),
        (Consume(2, 1, "billing", ["orders/*"], "solo"), "bad_request"),
        (Consume(2, 1, "billing", ["["], "shared"), "invalid_name"),
        (Consume(2, 1, "", ["*"], "shared"), "invalid_name"),
        (Consume(2, 1, "b", ["*"], "shared", options=WorkOptions(lease_ms=1)), "bad_request"),
        (Consume(2, 1, "b", ["*"], "shared", start=wire.Start("last")), "bad_request"),
        (Consume(2, 1, "b", ["*"], "shared", member="m"), "bad_request"),
    ],
)
def test_what_is_wrong_with_a_consumer_is_told(tmp_path: Path, head: Consume, code: str) -> None:
    async def scenario(listener: NativeServer) -> None:
        talker = await connected(listener)
        error = await talker.ask(head, wire.Error)
        assert (error.id, error.code) == (2, code)
        right = Consume(3, 1, "billing", ["orders/*"], "shared")
        await talker.ask(right, Consuming)
        differs = msgspec.structs.replace(right, id=4, consumer=2, patterns=["others"])
        assert (await talker.ask(differs, wire.Error)).code == "subscription_differs"

    run(tmp_path / "data", scenario)


HUGE = 2**63 - 1


def test_huge_numbers_hurt_nobody(tmp_path: Path) -> None:
    async def scenario(listener: NativeServer) -> None:
        await publish(listener, b"1", b"2")
        talker = await consuming(listener)
        ((lease, _),) = await hear_work(talker, 2)
        everything = DeliveryPart(lease.delivery, 0, HUGE)
        talker.say(
            Ack(0, 1, [HUGE], [DeliveryPart(HUGE, 0, HUGE), DeliveryPart(lease.delivery, HUGE, 0)]),
            Nack(1, [DeliveryPart(lease.delivery, 1, 2)], HUGE, "x" * 100_000),
        )
        await talker.hear(Late)
        acked = await talker.ask(Ack(3, 1, [], [everything]), AckedHead)
        assert all(part.delivery == lease.delivery for part in acked.late)
        assert (await state_of(talker)).members[0].backlog == 1

    run(tmp_path / "data", scenario)
