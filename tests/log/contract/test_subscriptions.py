"""What a log keeps for subscriptions: their definitions, and a place for what they have done."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import LimitSettings, TopicRule
from runnel.errors import ClosedError, InvalidNameError, LimitExceededError
from runnel.log.log import ShardId
from tests.log.contract.stores import At, scenario

MAIN = ShardId("main")


@scenario()
async def test_definitions_are_set_replaced_listed_and_removed(at: At) -> None:
    assert at.log.metadata.subscriptions() == {}
    await at.log.metadata.set_subscription("billing", b"\x01")
    await at.log.metadata.set_subscription("größe", b"")
    assert at.log.metadata.subscriptions() == {"billing": b"\x01", "größe": b""}
    await at.log.metadata.set_subscription("billing", b"\x02")
    await at.log.metadata.remove_subscription("größe")
    await at.log.metadata.remove_subscription("never there")
    assert at.log.metadata.subscriptions() == {"billing": b"\x02"}


@scenario()
async def test_what_is_listed_is_a_copy(at: At) -> None:
    await at.log.metadata.set_subscription("billing", b"\x01")
    at.log.metadata.subscriptions().clear()
    assert at.log.metadata.subscriptions() == {"billing": b"\x01"}


@scenario(limits=LimitSettings(durable_subscriptions_max=2))
async def test_one_subscription_more_than_allowed_is_refused(at: At) -> None:
    await at.log.metadata.set_subscription("one", b"")
    await at.log.metadata.set_subscription("two", b"")
    with pytest.raises(
        LimitExceededError, match=r"'three' .* limits.durable_subscriptions_max = 2"
    ):
        await at.log.metadata.set_subscription("three", b"")
    await at.log.metadata.set_subscription("two", b"other")
    await at.log.metadata.remove_subscription("one")
    await at.log.metadata.set_subscription("three", b"")
    assert sorted(at.log.metadata.subscriptions()) == ["three", "two"]


@scenario()
async def test_name_that_leaves_no_room_for_its_dead_letters_is_refused(at: At) -> None:
    with pytest.raises(InvalidNameError, match="dead-letter topic"):
        await at.log.metadata.set_subscription("x" * 250, b"")
    with pytest.raises(InvalidNameError, match="empty"):
        await at.log.metadata.set_subscription("", b"")


@scenario()
async def test_closed_log_takes_no_definitions(at: At) -> None:
    await at.log.close()
    with pytest.raises(ClosedError):
        await at.log.metadata.set_subscription("a", b"")
    with pytest.raises(ClosedError):
        await at.log.metadata.remove_subscription("a")


@scenario(TopicRule(match="other", journal="other"))
async def test_state_is_taken_down_for_each_shard(at: At) -> None:
    await at.log.metadata.ensure_topic("a")
    await at.log.metadata.ensure_topic("other")
    state = at.log.shard(MAIN).state
    assert state is at.log.shard(MAIN).state
    assert state is not at.log.shard(ShardId("other")).state
    assert state.contents == []
    state.snapshot = lambda: [b"everything"]
    futures = [state.add(b"%d" % number) for number in range(100)]
    await asyncio.gather(*futures)
