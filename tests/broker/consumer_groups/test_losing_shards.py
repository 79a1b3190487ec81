"""Shards that go and come under consumer groups: leases, acknowledgements, dead letters, and verbs of operators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from runnel.broker.consumer_groups.dead_letter_queues import SettleRequest
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest
from runnel.config import TopicRule
from runnel.errors import MovedError
from runnel.formats.heads import Start
from runnel.formats.work_heads import WorkOptions
from runnel.log.log import ShardId
from runnel.log.memory import MemoryLog
from tests.broker.consumer_groups.scenes import Scene, scene
from tests.broker.scenes import Store

MAIN, OTHER, DEAD = ShardId("main"), ShardId("other"), ShardId("dead")
RULES = (
    TopicRule(match="b*", journal="other"),
    TopicRule(match="!dead/*", journal="dead"),
    TopicRule(match="*", journal="main"),
)
MODES = ("shared", "key_shared", "multicast")

Lose = Callable[[Scene], Awaitable[None]]


def log_of(at: Scene) -> MemoryLog:
    log = at.broker._stores.main
    assert isinstance(log, MemoryLog)
    return log


async def release(at: Scene) -> None:
    await log_of(at).release(MAIN)


async def drop(at: Scene) -> None:
    await log_of(at).drop(MAIN)


async def acquire(at: Scene, shard: ShardId = MAIN) -> None:
    await log_of(at).acquire(shard)


def losing(run: Callable[[Scene, Lose], Awaitable[None]]) -> object:
    """A test that runs with a planned release, and with a loss without warning."""

    @pytest.mark.parametrize("lose", [release, drop])
    def test(lose: Lose) -> None:
        async def play(at: Scene) -> None:
            await run(at, lose)

        scene(*RULES, stores=[Store.MEMORY])(play)(Store.MEMORY)

    test.__name__ = run.__name__
    test.__doc__ = run.__doc__
    return test


def in_every_mode(run: Callable[[Scene, Lose, str], Awaitable[None]]) -> object:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("lose", [release, drop])
    def test(lose: Lose, mode: str) -> None:
        async def play(at: Scene) -> None:
            await run(at, lose, mode)

        scene(*RULES, stores=[Store.MEMORY])(play)(Store.MEMORY)

    test.__name__ = run.__name__
    test.__doc__ = run.__doc__
    return test


@in_every_mode
async def test_leases_end_consumers_stay_and_work_goes_on(at: Scene, lose: Lose, mode: str) -> None:
    member = "m" if mode == "multicast" else ""
    worker = await at.consume("*", mode=mode, member=member, window_messages=3)
    await at.publish("a", b"1", b"2", key=b"k")
    await at.publish("b", b"1", key=b"k")
    await at.settle()
    assert sorted(worker.payloads()) == [b"1", b"1", b"2"]
    part = worker.parts["a", 1]
    await lose(at)
    recalled = [offset for part in worker.recalls for offset in range(part.begin, part.end)]
    assert sorted(recalled) == [1, 2]
    assert worker.consumer.ack((), [part]) == [part]  # late
    assert worker.consumer.leased[0] == 1
    assert worker.error is None
    await worker.consumer.wait_stored()
    worker.ack(1, topic="b")
    await at.publish("b", b"2")
    await at.settle()
    assert worker.offsets("b") == [1, 2]
    await acquire(at)
    await at.publish("a", b"3", b"4")  # the window has room again for all of them
    await at.settle()
    assert worker.offsets("a")[2:] == [3, 4]
    worker.ack(3, 4)
    worker.ack(2, topic="b")
    await worker.consumer.wait_stored()
    assert await at.backlog() == 0
    counters = at.broker.metrics.counters
    assert counters.work_failed == 0


@losing
async def test_ack_of_a_lost_term_is_noted_nowhere(at: Scene, lose: Lose) -> None:
    worker = await at.consume("a")
    await at.publish("a", b"1", b"2")
    await at.settle()
    worker.ack(1)
    former = at.broker.consumer_groups._state.known(log_of(at).shard(MAIN))
    assert former is not None
    waiting = asyncio.ensure_future(worker.consumer.wait_stored())
    await asyncio.sleep(0)
    if lose is release:
        await lose(at)
        await waiting
    else:
        worker.ack(2)
        await lose(at)
        # What was noted before the loss may be lost. Whoever asks hears it, once.
        with pytest.raises(MovedError, match="acknowledgements may be lost"):
            await worker.consumer.wait_stored()
        await worker.consumer.wait_stored()
    with pytest.raises(MovedError):
        former.note_acked(1, "", ("a", 0), 1, 2)
    await acquire(at)
    assert at.broker.consumer_groups._state.known(log_of(at).shard(MAIN)) is not former
    await at.publish("a", b"3")
    await at.settle()
    assert worker.offsets()[-1] == 3


@losing
async def test_unnamed_member_keeps_what_it_has_acknowledged(at: Scene, lose: Lose) -> None:
    await at.publish("a", b"before it joined")
    worker = await at.consume("a", mode="multicast", start=Start("latest"))
    await at.publish("a", b"1", b"2")
    await at.settle()
    worker.ack(2)
    await lose(at)
    await acquire(at)
    await at.publish("a", b"3")
    await at.settle()
    assert worker.payloads() == [b"1", b"2", b"3"]
    worker.ack(4)
    assert await at.backlog() == 0


@losing
async def test_verbs_that_need_all_shards_refuse_before_they_change_anything(
    at: Scene, lose: Lose
) -> None:
    await at.publish("a", b"1")
    await at.publish("b", b"1")
    groups = at.broker.consumer_groups
    await groups.make_subscription(SubscriptionRequest("s", ("*",)))
    worker = await at.consume("*", subscription="m", mode="multicast", member="x")
    await lose(at)
    refused: list[Awaitable[object]] = [
        groups.move_subscription("s", Start("latest")),
        groups.delete_subscription("s"),
        groups.remove_member("m", "x"),
        groups.make_subscription(SubscriptionRequest("t", ("*",))),
        at.consume("*", subscription="m", mode="multicast", member="y"),
        at.consume("*", subscription="m", mode="multicast"),
    ]
    for request in refused:
        with pytest.raises(MovedError):
            await request
    assert worker.error is None
    assert [state.name for state in await groups.subscriptions()] == ["m", "s"]
    assert await at.backlog() == 1  # of the shard that is here
    assert [member.name for member in (await at.state("m")).members] == ["x"]
    # One that needs no state of the lost shard goes on; a consumer joins with what is here.
    await groups.pause_subscription("s", is_paused=False)
    joined = await at.consume(subscription="s")
    await at.settle()
    assert joined.payloads() == [b"1"]
    await acquire(at)
    await at.publish("a", b"2")
    await at.settle()
    assert joined.payloads() == [b"1", b"2"]
    await groups.delete_subscription("s")


@losing
async def test_group_without_consumers_covers_the_shard_when_it_is_used_again(
    at: Scene, lose: Lose
) -> None:
    worker = await at.consume("a")
    await at.publish("a", b"1")
    await at.settle()
    worker.consumer.close(is_clean=True)
    await lose(at)
    await acquire(at)
    await at.publish("a", b"2")
    again = await at.consume("a")
    await at.settle()
    assert again.payloads() == [b"2"]


@losing
async def test_reading_page_of_a_lost_term_changes_nothing(at: Scene, lose: Lose) -> None:
    """At every await of the read the shard is lost, and is there again."""
    for turns in range(8):
        name = f"s{turns}"
        await at.publish("a", b"1", b"2")
        at.broker.consumer_groups._subscriptions._parts.run_cache.forget(lambda key: True)
        worker = await at.consume("a", subscription=name)
        for _ in range(turns):
            await asyncio.sleep(0)
        await lose(at)
        await acquire(at)
        await at.publish("a", b"3")
        await at.settle()
        assert worker.payloads()[-1] == b"3"
        worker.ack(worker.offsets()[-1])
        assert await at.backlog(name) == 0
        worker.consumer.close(is_clean=True)


@scene(*RULES, stores=[Store.MEMORY])
async def test_planned_release_writes_no_dead_letter_twice(at: Scene) -> None:
    """The dead letter under way is awaited, and its message acknowledged in the term that ends."""
    noted: list[tuple[object, ...]] = []
    worker = await at.consume("a", options=WorkOptions(deliveries_max=1))
    await at.publish("a", b"1")
    await at.settle()
    state = at.broker.consumer_groups._state.known(log_of(at).shard(MAIN))
    assert state is not None
    state.note_acked = lambda *note: noted.append(note)  # type: ignore[method-assign]
    worker.nack(1)
    await release(at)
    assert [note[2:] for note in noted] == [(("a", 0), 1, 2)]
    assert (await at.state()).dead == 1


@losing
async def test_settling_dead_letters_needs_their_shard(at: Scene, lose: Lose) -> None:
    worker = await at.consume("a", options=WorkOptions(deliveries_max=1))
    await at.publish("a", b"1")
    await at.settle()
    worker.nack(1)
    await at.until_dead(1)
    await log_of(at).release(DEAD)
    groups = at.broker.consumer_groups
    assert (await at.state()).dead == 0
    for request in (groups.dead_letters("s", 0, 10), groups.settle_dead(SettleRequest("s", [1]))):
        with pytest.raises(MovedError):
            await request
    # A message that fails now is tried again until its dead letter can be stored.
    await at.publish("a", b"2")
    await at.settle()
    worker.nack(2)
    await at.settle()
    await acquire(at, DEAD)
    at.pass_time(3600)
    await at.settle()
    assert (await at.state()).dead == 1
    await lose(at)


@losing
async def test_holds_never_fall_back_with_a_shard(at: Scene, lose: Lose) -> None:
    """A cached answer about what is owed is not taken for a new one."""
    worker = await at.consume("a")
    await at.publish("a", b"1")
    await at.settle()
    worker.ack(1)
    await worker.consumer.wait_stored()
    holds = at.broker._holds
    version = holds.version
    await lose(at)
    assert holds.version > version
    assert holds.owed(("a", 0), 1, 2) == [(1, 2)]  # its next owner knows better
    version = holds.version
    await acquire(at)
    assert holds.version >= version
