"""Shards that come and go: what a released shard refuses, and what a later term of it has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from runnel.broker.monitoring.store_statistics import StoreReading
from runnel.config import TopicRule
from runnel.errors import (
    MovedError,
    OffsetGoneError,
    ProducerFault,
    ProducerForgottenError,
    UnknownTopicError,
)
from runnel.log.log import CursorPosition, OffsetBounds, OwnedShard, Position, ShardId
from tests.log.contract.stores import At, scenario
from tests.log.samples import batch, numbered, one, read_payloads

MAIN = ShardId("main")
OTHER = ShardId("other")
TWO_JOURNALS = TopicRule(match="b*", journal="other")


async def refuses_everything(at: At) -> None:
    """Topic `a` lies in the shard main/0, which is not served here."""
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: at.log.wait_room(MAIN),
        lambda: at.log.read("a", 0, 1),
        lambda: at.log.read_shard(MAIN, Position(0, 1)),
        lambda: at.log.bounds("a", 0),
        lambda: at.log.offset_at("a", 0, 0),
        lambda: at.log.entry_at(MAIN, 0),
        lambda: at.log.trim_shard(MAIN),
        lambda: at.log.reopen(MAIN),
        lambda: at.log.metadata.purge_topic("a"),
        lambda: at.log.metadata.delete_topic("a"),
        lambda: anext(at.log.messages_at(MAIN, {("a", 0): 1})),
    ]
    for call in calls:
        with pytest.raises(MovedError, match="main/0"):
            await call()
    with pytest.raises(MovedError):
        at.log.append(one("a", b"refused"))
    with pytest.raises(MovedError):
        at.log.shard(MAIN)


@scenario(TWO_JOURNALS)
async def test_released_shard_refuses_everything_and_the_others_go_on(at: At) -> None:
    await at.log.append(one("a", b"1"))
    await at.log.append(one("b", b"1"))
    view = at.log.shard(MAIN)
    await at.owner.release(MAIN)
    await refuses_everything(at)
    assert at.log.shards() == [OTHER]
    assert [shard.shard for shard in at.log.statistics().shards] == [OTHER]
    assert not await at.log.is_still_mine(MAIN)
    assert await at.log.is_still_mine(OTHER)
    assert (await at.log.append(one("b", b"2"))).base_offsets == [2]
    # What belongs to no shard is still known.
    assert at.log.metadata.topics.get("a").shards == [MAIN]
    assert at.listener.heard == [("released", MAIN, view.epoch)]


@scenario(TWO_JOURNALS)
async def test_counters_of_a_log_do_not_fall_when_shards_go(at: At) -> None:
    for _ in range(3):
        await at.log.append(one("a", b"1", b"2"))
        await at.log.append(one("b", b"1"))
        await at.owner.release(MAIN)
        await at.owner.acquire(MAIN)
    await at.owner.drop(MAIN)
    statistics = at.log.statistics()
    assert [(each.shard, each.messages) for each in statistics.shards] == [(OTHER, 3)]
    [ended] = statistics.ended
    assert (ended.shard.journal, ended.entries, ended.messages) == ("main", 3, 6)
    assert (ended.stored_bytes, ended.segments, ended.queued_batches) == (0, 0, 0)
    reading = StoreReading.of({"disk": statistics})
    assert (reading.total.messages, reading.total.shards) == (9, 1)
    assert reading.journals["main"].messages == 6


@scenario()
async def test_view_ends_with_its_term(at: At) -> None:
    await at.log.append(one("a", b"1"))
    view = at.log.shard(MAIN)
    await at.owner.release(MAIN)
    for _ in range(2):
        for ask in (
            view.entries,
            view.count_stamp,
            lambda: view.next_offset("a", 0),
            lambda: view.floor("a", 0),
            lambda: view.state,
        ):
            with pytest.raises(MovedError, match="main/0"):
                ask()
        assert view.id == MAIN
        await at.owner.acquire(MAIN)  # the later term has another view
    assert at.log.shard(MAIN) is not view
    assert at.log.shard(MAIN).epoch > view.epoch


@scenario()
async def test_each_term_has_a_higher_epoch_and_both_ends_are_reported(at: At) -> None:
    epochs = [(await at.log.append(one("a", b"1"))).epoch]
    for _ in range(3):
        await at.owner.release(MAIN)
        shard = await at.owner.acquire(MAIN)
        assert at.log.shard(MAIN) is shard
        assert (await at.log.append(one("a", b"1"))).epoch == shard.epoch
        epochs.append(shard.epoch)
    assert epochs == sorted(set(epochs))
    assert at.listener.heard == [
        each
        for before, after in pairwise(epochs)
        for each in (("released", MAIN, before), ("acquired", MAIN, after))
    ]


@scenario()
async def test_acquiring_what_is_here_and_releasing_what_is_not_change_nothing(at: At) -> None:
    await at.log.append(one("a", b"1"))
    view = at.log.shard(MAIN)
    assert await at.owner.acquire(MAIN) is view
    await at.owner.release(OTHER)
    assert at.listener.heard == []
    await at.owner.release(MAIN)
    await at.owner.release(MAIN)
    assert [what for what, _, _ in at.listener.heard] == ["released"]


@scenario(TWO_JOURNALS)
async def test_epoch_belongs_to_the_shard(at: At) -> None:
    for topic in ("a", "b"):
        await at.log.append(one(topic, b"1"))
    former = at.log.shard(OTHER).epoch
    for _ in range(2):
        await at.owner.release(MAIN)
        await at.owner.acquire(MAIN)
    assert at.log.shard(OTHER).epoch == former
    for topic, shard in (("a", MAIN), ("b", OTHER)):
        assert (await at.log.append(one(topic, b"2"))).epoch == at.log.shard(shard).epoch


@scenario()
async def test_epoch_is_above_the_one_that_is_asked_for(at: At) -> None:
    """Whoever decides about ownership may know of terms that left nothing in the shard."""
    first = (await at.log.append(one("a", b"1"))).epoch
    await at.owner.release(MAIN)
    shard = await at.owner.acquire(MAIN, above=first + 40)
    assert shard.epoch > first + 40


@scenario(TopicRule(match="p", partitions=2, journal="main"))
async def test_no_offset_names_two_messages_over_several_terms(at: At) -> None:
    await at.log.append(batch(("p", [b"1", b"2"]), ("p", [b"3"], 1)))
    old = Position(at.log.shard(MAIN).epoch, 1)
    await at.owner.release(MAIN)
    shard = await at.owner.acquire(MAIN)
    if at.keeps_what_it_releases:
        assert await at.log.bounds("p", 0) == OffsetBounds(1, 3)
        assert read_payloads(await at.log.read("p", 0, 1)) == [b"1", b"2"]
        assert read_payloads(await at.log.read_shard(MAIN, old)) == [b"1", b"2", b"3"]
        assert shard.floor("p", 0) == 1
    else:
        assert await at.log.bounds("p", 0) == OffsetBounds(3, 3)
        with pytest.raises(OffsetGoneError):
            await at.log.read("p", 0, 1)
        with pytest.raises(OffsetGoneError):
            await at.log.read_shard(MAIN, old)
        assert shard.floor("p", 0) == 3
    assert (shard.next_offset("p", 0), shard.next_offset("p", 1)) == (3, 2)
    entry = shard.entries().next_offset
    assert (await at.log.append(one("p", b"4"))).base_offsets == [3]
    assert read_payloads(await at.log.read("p", 0, 3)) == [b"4"]
    page = await at.log.read_shard(MAIN, Position(shard.epoch, entry))
    assert read_payloads(page) == [b"4"]


@scenario(TopicRule(match="a", journal="main", last_value=True))
async def test_last_value_is_found_in_a_later_term_if_the_store_keeps_it(at: At) -> None:
    await at.log.append(one("a", b"1"))
    await at.owner.release(MAIN)
    await at.owner.acquire(MAIN)
    found = [each async for each in at.log.messages_at(MAIN, {("a", 0): 1}) if each]
    assert len(found) == at.keeps_what_it_releases


@scenario()
async def test_named_publisher_continues_in_a_later_term_or_has_to_begin_anew(at: At) -> None:
    await at.log.append(numbered("p", 0, term=7))
    await at.owner.release(MAIN)
    await at.owner.acquire(MAIN)
    if at.keeps_what_it_releases:
        assert (await at.log.append(numbered("p", 0, term=7))).is_repeated
        assert (await at.log.append(numbered("p", 1, term=7))).base_offsets == [2]
        with pytest.raises(ProducerFault):
            await at.log.append(numbered("p", 0, term=6))
    else:
        with pytest.raises(ProducerForgottenError):
            await at.log.append(numbered("p", 1, term=7))


@scenario()
async def test_progress_of_subscriptions_is_there_in_a_later_term_if_the_store_keeps_it(
    at: At,
) -> None:
    await at.log.append(one("a", b"1"))
    state = at.log.shard(MAIN).state
    state.snapshot = lambda: [b"everything"]
    await state.add(b"one acknowledgement")
    await state.add(b"another")
    await at.owner.release(MAIN)
    contents = (await at.owner.acquire(MAIN)).state.contents
    assert contents == ([b"one acknowledgement", b"another"] if at.keeps_what_it_releases else [])


@scenario()
async def test_topic_that_was_made_again_hides_what_was_before_in_every_term(at: At) -> None:
    await at.log.append(one("a", b"1", b"2"))
    await at.log.append(one("b", b"1"))
    await at.log.metadata.delete_topic("a")
    await at.log.append(one("a", b"3"))
    await at.owner.release(MAIN)
    await at.owner.acquire(MAIN)
    bounds = await at.log.bounds("a", 0)
    assert bounds == OffsetBounds(3 if at.keeps_what_it_releases else 4, 4)


@scenario()
async def test_cursor_stays_when_its_shard_goes(at: At) -> None:
    await at.log.append(one("a", b"1", b"2"))
    await at.log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=2)])
    await at.owner.release(MAIN)
    assert [cursor.name for cursor in at.log.metadata.cursors.all()] == ["c"]
    await at.log.metadata.remove_cursor("c")
    assert at.log.metadata.cursors.find("c") is None


@scenario()
async def test_release_in_the_middle_of_a_stream_loses_no_answer(at: At) -> None:
    """Every batch is stored or refused, and what was answered as stored was visible before the end of the term."""
    answers: list[asyncio.Future[object]] = []

    async def publish() -> None:
        for number in range(40):
            try:
                await at.log.append(one("a", b"%d" % number))
            except MovedError:
                answers.append(asyncio.get_running_loop().create_future())
                await at.owner.acquire(MAIN)
            await asyncio.sleep(0)

    async def release() -> None:
        for _ in range(5):
            for _ in range(6):
                await asyncio.sleep(0)
            await at.owner.release(MAIN)

    await asyncio.gather(publish(), release())
    shard = await at.owner.acquire(MAIN)
    assert shard.next_offset("a", 0) == 41 - len(answers)
    assert len(answers) >= 4


@scenario(TWO_JOURNALS)
async def test_shard_can_be_acquired_before_it_has_a_topic(at: At) -> None:
    shard = await at.owner.acquire(OTHER)
    assert at.log.shards() == [OTHER]
    with pytest.raises(UnknownTopicError):
        shard.next_offset("b", 0)
    assert (await at.log.append(one("b", b"1"))).epoch == shard.epoch
    assert at.log.shard(OTHER) is shard


@scenario()
async def test_planned_release_waits_for_its_listener_and_serves_the_shard_meanwhile(
    at: At,
) -> None:
    await at.log.append(one("a", b"1"))
    view = at.log.shard(MAIN)
    seen: list[int] = []

    async def asked(shard: OwnedShard) -> None:
        assert shard is view
        for _ in range(3):
            await asyncio.sleep(0)
        await at.log.append(one("a", b"2"))
        shard.state.snapshot = lambda: [b"an acknowledgement"]
        await shard.state.add(b"an acknowledgement")
        seen.append(shard.next_offset("a", 0))

    at.listener.asked = asked
    await at.owner.release(MAIN)
    assert seen == [3]
    assert at.listener.heard == [("released", MAIN, view.epoch)]
    with pytest.raises(MovedError):
        view.entries()


@scenario()
async def test_loss_without_warning_asks_nobody_and_is_announced(at: At) -> None:
    await at.log.append(one("a", b"1"))
    view = at.log.shard(MAIN)

    async def asked(shard: OwnedShard) -> None:
        pytest.fail(f"{shard} goes without warning")

    at.listener.asked = asked
    await at.owner.drop(MAIN)
    await at.owner.drop(MAIN)  # there is nothing to end
    assert at.listener.heard == [("released", MAIN, view.epoch)]
    await refuses_everything(at)
    assert (await at.owner.acquire(MAIN)).epoch > view.epoch


@scenario()
async def test_loss_in_the_middle_of_a_planned_release_ends_the_term_once(at: At) -> None:
    await at.log.append(one("a", b"1"))
    view = at.log.shard(MAIN)

    losing: list[asyncio.Future[None]] = []

    async def asked(shard: OwnedShard) -> None:
        losing.append(asyncio.ensure_future(at.owner.drop(shard.id)))
        while at.log.shards():  # noqa: ASYNC110 - what is waited for is the log's doing
            await asyncio.sleep(0)

    at.listener.asked = asked
    await at.owner.release(MAIN)
    await losing[0]
    assert at.listener.heard == [("released", MAIN, view.epoch)]
