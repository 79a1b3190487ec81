"""Limits of the broker itself: how many may read live, and how much goes into one batch of single messages."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import BrokerSettings
from runnel.errors import LimitExceededError
from runnel.formats.message import Message
from tests.broker.scenes import At, scene


@scene(settings=BrokerSettings(subscriptions_max=2))
async def test_one_live_subscription_more_than_the_broker_takes_is_refused(at: At) -> None:
    await at.subscribe("a")
    _, second = await at.subscribe("b")
    with pytest.raises(LimitExceededError, match=r"broker\.subscriptions_max = 2"):
        await at.subscribe("c")
    second.close()
    await at.subscribe("c")


@scene(settings=BrokerSettings(gather_messages_max=10))
async def test_single_messages_leave_when_so_many_are_gathered(at: At) -> None:
    assert await _batches_of(at, 25, b"1") == 3


@scene(settings=BrokerSettings(gather_bytes_max=1000))
async def test_single_messages_leave_when_so_many_bytes_are_gathered(at: At) -> None:
    assert await _batches_of(at, 9, bytes(300)) == 3


async def _batches_of(at: At, count: int, payload: bytes) -> int:
    """How many batches reach a reader of single messages that were sent in one turn of the loop."""
    reader, subscription = await at.subscribe("a")
    await asyncio.gather(*(at.broker.send(Message("a", payload)) for _ in range(count)))
    await at.settle(subscription)
    assert len(reader.messages) == count
    return at.broker.metrics.counters.batches_in
