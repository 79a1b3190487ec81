"""What a log keeps for subscriptions: their definitions, and a place for what they have done."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import LimitSettings
from runnel.errors import ClosedError, InvalidNameError, LimitExceededError
from runnel.log.log import ShardId
from tests.log.contract.stores import At, scenario

MAIN = ShardId("main")


@scenario()
async def test_definitions_are_set_replaced_listed_and_removed(at: At) -> None:
    assert at.log.subscriptions() == {}
    await at.log.set_subscription("billing", b"\x01")
    await at.log.set_subscription("größe", b"")
    assert at.log.subscriptions() == {"billing": b"\x01", "größe": b""}
    await at.log.set_subscription("billing", b"\x02")
    await at.log.remove_subscription("größe")
    await at.log.remove_subscription("never there")
    assert at.log.subscriptions() == {"billing": b"\x02"}


@scenario()
async def test_what_is_listed_is_a_copy(at: At) -> None:
    await at.log.set_subscription("billing", b"\x01")
    at.log.subscriptions().clear()
    assert at.log.subscriptions() == {"billing": b"\x01"}


@scenario(limits=LimitSettings(durable_subscriptions_max=2))
async def test_one_subscription_more_than_allowed_is_refused(at: At) -> None:
    await at.log.set_subscription("one", b"")
    await at.log.set_subscription("two", b"")
    with pytest.raises(
        LimitExceededError, match=r"'three' .* limits.durable_subscriptions_max = 2"
    ):
        await at.log.set_subscription("three", b"")
    await at.log.set_subscription("two", b"other")
    await at.log.remove_subscription("one")
    await at.log.set_subscription("three", b"")
    assert sorted(at.log.subscriptions()) == ["three", "two"]


@scenario()
async def test_name_that_leaves_no_room_for_its_dead_letters_is_refused(at: At) -> None:
    with pytest.raises(InvalidNameError, match="dead-letter topic"):
        await at.log.set_subscription("x" * 250, b"")
    with pytest.raises(InvalidNameError, match="empty"):
        await at.log.set_subscription("", b"")


@scenario()
async def test_closed_log_takes_no_definitions(at: At) -> None:
    await at.log.close()
    with pytest.raises(ClosedError):
        await at.log.set_subscription("a", b"")
    with pytest.raises(ClosedError):
        await at.log.remove_subscription("a")


@scenario()
async def test_state_is_taken_down_for_each_shard(at: At) -> None:
    state = at.log.state(MAIN)
    assert state is at.log.state(MAIN)
    assert state is not at.log.state(ShardId("other"))
    assert state.contents == []
    state.snapshot = lambda: [b"everything"]
    futures = [state.add(b"%d" % number) for number in range(100)]
    await asyncio.gather(*futures)
    await state.close()
