"""Quotas of tokens at every listener: counts refuse, rates slow down, and other tokens notice nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runnel.client import Bus
from runnel.config import SecuritySettings, TopicRule
from runnel.errors import RunnelError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.security.rights import TokenQuotas
from tests.protocols.guarded import EVERYTHING, LISTENERS, Guarded, open_guarded, run_guarded

SECOND_NS = 1_000_000_000


async def over_quota(asking: Any) -> str:
    with pytest.raises(RunnelError) as refusal:
        await asking
    assert refusal.value.code == "quota_exceeded"
    return str(refusal.value)


async def counter(root: Bus, name: str) -> int:
    totals = (await root.statistics())["totals"]
    value: int = totals[name]
    return value


# --- Counts ---


@pytest.mark.parametrize("listener", LISTENERS)
def test_counts_refuse_one_more_of_this_token_alone_and_deleting_makes_room(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        own = TokenQuotas(topics_max=0, cursors_max=1)
        async with (
            guarded.connecting(listener, guarded.token(*EVERYTHING, name="one")) as bus,
            guarded.connecting(
                listener, guarded.token(*EVERYTHING, name="two", quotas=own)
            ) as other,
            root.subscribe("!system/events") as events,
        ):
            for topic in ("a", "b"):
                await bus.publish(topic, b"1")
            told = await over_quota(bus.publish("c", b"1"))
            assert "'one'" in told
            assert "security.token_topics_max = 2" in told
            await bus.publish("a", b"2")  # it is there
            for topic in ("c", "d", "e"):
                await other.publish(topic, b"1")
            event = await next_event(events, "quota_reached")
            assert (event["subject"], event["quota"], event["limit"], event["effect"]) == (
                "one", "topics_max", 2, "refused",
            )  # fmt: skip
            await bus.delete_topic("a")
            await bus.publish("f", b"1")
            await over_quota(bus.publish("a", b"1"))

            for name in ("x", "y"):
                await bus.set_cursor(name, {"b": 1})
            assert "security.token_cursors_max = 2" in await over_quota(
                bus.set_cursor("z", {"b": 1})
            )
            await bus.set_cursor("x", {"b": 2})  # it is there
            await other.set_cursor("theirs", {"b": 1})
            assert "its quota cursors_max = 1" in await over_quota(other.set_cursor("z", {"b": 1}))
            await other.set_cursor("x", {"b": 2})  # which stays on the account of its maker
            await bus.remove_cursor("x")
            await bus.set_cursor("z", {"b": 1})

            for name in ("p", "q"):
                await bus.make_subscription(name, "*")
            assert "security.token_subscriptions_max = 2" in await over_quota(
                bus.make_subscription("r", "*")
            )
            with pytest.raises(RunnelError, match="token_subscriptions_max"):
                async with bus.consume("r", "*"):
                    pass
            await bus.make_subscription("p", "*")
            await other.make_subscription("r", "*")
            await bus.delete_subscription("p")
            async with bus.consume("s", "*"):
                pass
        assert await counter(root, "quota_refusals") >= 6

    security = SecuritySettings(token_topics_max=2, token_cursors_max=2, token_subscriptions_max=2)
    run_guarded(scenario, listener, security=security)


async def next_event(events: Any, kind: str) -> dict[str, Any]:
    async for message in events:
        document: dict[str, Any] = msgspec.json.decode(message.payload)
        if document["kind"] == kind:
            return document
    raise AssertionError(kind)


def test_topics_of_a_batch_and_journals_of_their_own_count() -> None:
    async def scenario(guarded: Guarded) -> None:
        bus = await guarded.client("native", *EVERYTHING)
        async with bus.publisher() as publisher:
            for number in range(3):
                publisher.send(b"1", f"own/{number}")
            await publisher.flush()
            publisher.send(b"1", "own/3")
            with pytest.raises(RunnelError, match="token_topics_max"):
                await publisher.flush()
        with pytest.raises(RunnelError, match="token_topics_max"):
            await bus.publish("main/1", b"1")
        # Topics that are not kept count against no token.
        for number in range(5):
            await bus.publish(f"live/{number}", b"1")

    run_guarded(
        scenario,
        security=SecuritySettings(token_topics_max=3),
        topics=(
            TopicRule(match="own/*", journal="{topic}"),
            TopicRule(match="live/*", keep="none"),  # type: ignore[arg-type]
        ),
    )


def test_a_wide_batch_over_the_quota_is_refused_and_the_same_of_another_token_is_not() -> None:
    async def scenario(guarded: Guarded) -> None:
        batch = Batch.from_messages([Message(f"wide/{number:04}", b"1") for number in range(400)])
        own = TokenQuotas(topics_max=300)
        async with guarded.connecting("native", guarded.token(*EVERYTHING, quotas=own)) as bus:
            assert "topics_max = 300" in await over_quota(bus.publish_batch(batch))
            assert len(await bus.topics("wide/*")) == 300
        other = await guarded.client("native", *EVERYTHING)
        await other.publish_batch(batch)
        assert len(await other.topics("wide/*")) == 400

    run_guarded(scenario)


def test_counts_hold_after_a_restart(tmp_path: Path) -> None:
    security = SecuritySettings(token_topics_max=1, token_cursors_max=1, token_subscriptions_max=1)
    texts: list[str] = []

    async def before() -> None:
        async with open_guarded(tmp_path, security=security) as guarded:
            texts.append(guarded.token(*EVERYTHING, name="one"))
            async with guarded.connecting("native", texts[0]) as bus:
                await bus.publish("a", b"1")
                await bus.set_cursor("c", {"a": 1})
                await bus.make_subscription("s", "*")

    async def after() -> None:
        async with (
            open_guarded(tmp_path, security=security) as guarded,
            guarded.connecting("native", texts[0]) as bus,
        ):
            await over_quota(bus.publish("b", b"1"))
            await over_quota(bus.set_cursor("d", {"a": 1}))
            await over_quota(bus.make_subscription("t", "*"))
            await bus.delete_topic("a")
            await bus.remove_cursor("c")
            await bus.delete_subscription("s")
            await bus.publish("b", b"1")
            await bus.set_cursor("d", {"b": 1})
            await bus.make_subscription("t", "*")

    asyncio.run(before())
    asyncio.run(after())
    asyncio.run(restarted_again(tmp_path, security, texts[0]))


async def restarted_again(directory: Path, security: SecuritySettings, token: str) -> None:
    async with (
        open_guarded(directory, security=security) as guarded,
        guarded.connecting("native", token) as bus,
    ):
        await over_quota(bus.publish("a", b"1"))


def test_many_cursors_at_once_do_not_pass_the_quota() -> None:
    async def scenario(guarded: Guarded) -> None:
        bus = await guarded.client("native", *EVERYTHING)
        await bus.publish("a", b"1")
        setting = [bus.set_cursor(f"c{number}", {"a": 1}) for number in range(50)]
        outcomes = await asyncio.gather(*setting, return_exceptions=True)
        assert sum(outcome is None for outcome in outcomes) == 5
        assert len(await bus.cursors()) == 5

    run_guarded(scenario, security=SecuritySettings(token_cursors_max=5))


# --- Rates. The clock of these brokers goes ten times as fast as ours. ---


@pytest.mark.parametrize("listener", LISTENERS)
def test_who_publishes_faster_than_its_rate_waits_and_others_do_not(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        slow = guarded.token(*EVERYTHING, name="slow", quotas=TokenQuotas(messages_in_per_s=2))
        root = await guarded.client("native", *EVERYTHING)
        async with guarded.connecting(listener, slow) as bus:
            began_ns = guarded.clock.monotonic_ns()
            publishing = asyncio.ensure_future(publish_some(bus, 14))
            while await counter(root, "quota_waits") == 0:
                await root.publish("free", b"1")
            assert not publishing.done()
            for _ in range(20):
                await root.publish("free", b"1")
            await publishing
            # Two or three at once, and the others by and by.
            assert guarded.clock.monotonic_ns() - began_ns >= 5 * SECOND_NS
            assert (await root.fetch("slow", offset=1)).next_offset == 15

    run_guarded(scenario, listener)


async def publish_some(bus: Bus, count: int) -> None:
    for number in range(count):
        await bus.publish("slow", str(number).encode())


@pytest.mark.parametrize("listener", LISTENERS)
def test_who_fetches_faster_than_its_rate_waits(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        await publish_some(root, 40)
        token = guarded.token(*EVERYTHING, quotas=TokenQuotas(messages_out_per_s=10))
        async with guarded.connecting(listener, token) as bus:
            began_ns = guarded.clock.monotonic_ns()
            offset, pages = 1, 0
            while offset <= 40:
                page = await bus.fetch("slow", offset=offset)
                offset, pages = page.next_offset, pages + 1
            assert pages >= 4  # a page is no more than a second's worth
            assert guarded.clock.monotonic_ns() - began_ns >= 2 * SECOND_NS
        assert await counter(root, "quota_waits") >= 1

    run_guarded(scenario, listener)


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_live_reader_over_its_rate_is_slowed_and_misses_nothing(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        token = guarded.token(*EVERYTHING, quotas=TokenQuotas(messages_out_per_s=10))
        async with (
            guarded.connecting(listener, token) as bus,
            bus.subscribe("slow") as slowed,
            root.subscribe("slow") as free,
        ):
            began_ns = guarded.clock.monotonic_ns()
            await publish_some(root, 60)
            assert [(await anext(free)).payload for _ in range(60)] == numbers(60)
            assert [(await anext(slowed)).payload for _ in range(60)] == numbers(60)
            await root.publish("slow", b"last")
            assert (await anext(slowed)).payload == b"last"
            # What came in one page is paid for before the next.
            assert guarded.clock.monotonic_ns() - began_ns >= 4 * SECOND_NS
        assert await counter(root, "quota_waits") >= 1

    run_guarded(scenario, listener)


def numbers(count: int) -> list[bytes]:
    return [str(number).encode() for number in range(count)]


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_consumer_over_its_rate_is_slowed_and_gets_everything(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        await publish_some(root, 5)
        token = guarded.token(*EVERYTHING, quotas=TokenQuotas(messages_out_per_s=5))
        async with (
            guarded.connecting(listener, token) as bus,
            bus.consume("work", "slow") as consumer,
        ):
            began_ns = guarded.clock.monotonic_ns()
            for number in range(30):
                if number >= 5:
                    await root.publish("slow", str(number).encode())
                message = await anext(consumer)
                assert message.payload == str(number).encode()
                await message.ack()
            assert guarded.clock.monotonic_ns() - began_ns >= 2 * SECOND_NS
        assert await counter(root, "quota_waits") >= 1

    run_guarded(scenario, listener)


def test_a_publish_that_waits_for_its_rate_ends_with_its_connection() -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        token = guarded.token(*EVERYTHING, quotas=TokenQuotas(bytes_in_per_s=1))
        async with guarded.connecting("native", token) as bus:
            await bus.publish("slow", bytes(10_000))  # hours of debt
            waiting = asyncio.ensure_future(bus.publish("slow", b"1"))
            while await counter(root, "quota_waits") == 0:
                await root.ping()
            waiting.cancel()
        assert (await root.fetch("slow", offset=1)).next_offset == 2

    run_guarded(scenario)


@pytest.mark.parametrize("listener", LISTENERS)
def test_fetches_that_wait_for_their_rate_end_with_their_connection(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        token = guarded.token(*EVERYTHING, name="one", quotas=TokenQuotas(bytes_out_per_s=1))
        async with (
            guarded.connecting(listener, token) as bus,
            bus.subscribe("slow") as subscription,
        ):
            await root.publish("slow", bytes(10_000))
            await anext(subscription)  # hours of debt
        for _ in range(3):
            waits = await counter(root, "quota_waits")
            async with guarded.connecting(listener, token) as bus:
                waiting = [asyncio.ensure_future(bus.fetch("slow", offset=1)) for _ in range(4)]
                while await counter(root, "quota_waits") < waits + 4:
                    await root.ping()
                for each in waiting:
                    each.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
        while guarded.has_waiting_reads("one"):
            await root.ping()

    run_guarded(scenario, listener)
