"""What clients get when a shard goes, and when it comes back. Other shards' clients notice nothing."""

from __future__ import annotations

import asyncio

import pytest

from runnel.broker.fetcher import FetchRequest
from runnel.config import TopicRule
from runnel.errors import MovedError
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace
from runnel.log.log import ShardId
from runnel.log.memory import MemoryLog
from tests.broker.consumer_groups import scenes as work
from tests.broker.scenes import EARLIEST, At, Store, scene

MAIN = ShardId("main")
OTHER = TopicRule(match="o*", journal="other")


def owner(at: At | work.Scene) -> MemoryLog:
    log = at.broker._stores.main
    assert isinstance(log, MemoryLog)
    return log


def test_live_readers_of_the_shard_have_to_look_for_it() -> None:
    @scene(OTHER)
    async def run(at: At) -> None:
        for topic in ("a", "o"):
            await at.publish(topic, b"1", b"2")
        live, _ = await at.subscribe("*")
        literal, _ = await at.subscribe("a")
        behind, _ = await at.subscribe("a*", start=EARLIEST, credit_bytes=0)
        other, _ = await at.subscribe("o*")
        await owner(at).release(MAIN)
        assert isinstance(behind.error, MovedError)  # at once: its feed knows the past of the shard
        await at.until(lambda: live.error is not None and literal.error is not None)
        assert isinstance(live.error, MovedError)
        assert isinstance(literal.error, MovedError)
        await at.publish("o", b"3")
        assert other.payloads() == [b"3"]
        assert other.error is None

    run(Store.MEMORY, "")


def test_reader_that_comes_with_the_next_term_stays() -> None:
    @scene(OTHER)
    async def run(at: At) -> None:
        await at.publish("a", b"1")
        await owner(at).release(MAIN)
        await owner(at).acquire(MAIN)
        reader, subscription = await at.subscribe("*")
        await at.settle(subscription)
        await at.publish("a", b"2")
        assert reader.error is None
        assert reader.payloads() == [b"2"]

    run(Store.MEMORY, "")


def test_fetch_that_waits_is_told_at_once() -> None:
    @scene(OTHER)
    async def run(at: At) -> None:
        for topic in ("a", "o"):
            await at.publish(topic, b"1")
        waiting = [
            asyncio.ensure_future(at.broker.fetch(FetchRequest(topic, offset=2, wait_ns=10**12)))
            for topic in ("a", "o")
        ]
        await at.until(lambda: at.broker._fetcher.waiting_count == 2)
        await owner(at).release(MAIN)
        with pytest.raises(MovedError):
            await waiting[0]
        assert not waiting[1].done()
        await at.publish("o", b"2")
        assert (await waiting[1]).messages == 1

    run(Store.MEMORY, "")


def test_messages_gathered_for_the_shard_are_refused_and_the_others_stored() -> None:
    @scene(OTHER)
    async def run(at: At) -> None:
        for topic in ("a", "o"):
            await at.publish(topic, b"1")
        gathered = [at.broker.send(Message(topic, b"2")) for topic in ("a", "o", "a")]
        await owner(at).release(MAIN)
        answers = await asyncio.gather(*gathered, return_exceptions=True)
        assert [type(answer) for answer in (answers[0], answers[2])] == [MovedError, MovedError]
        assert not isinstance(answers[1], BaseException)
        await owner(at).acquire(MAIN)
        assert (await at.broker.send(Message("a", b"3"))).base_offsets == [2]

    run(Store.MEMORY, "")


def test_lists_and_figures_leave_out_what_is_elsewhere() -> None:
    @scene(OTHER)
    async def run(at: At) -> None:
        for topic in ("a", "o"):
            await at.publish(topic, b"1", b"2")
            await at.broker.cursors.set(topic, [CursorPlace(topic, 0, 1)])
        await owner(at).release(MAIN)
        cursors = await at.broker.cursors.list()
        assert [(cursor.name, cursor.places[0].lag) for cursor in cursors] == [("a", 0), ("o", 2)]
        assert [shard.journal for shard in await at.broker.shards(["o"])] == ["other"]
        at.broker.statistics()

    run(Store.MEMORY, "")


# --- Acknowledged work ---


def test_consumer_works_on_in_other_shards_and_gets_the_next_term_of_this_one() -> None:
    @work.scene(OTHER, stores=(Store.MEMORY,))
    async def run(at: work.Scene) -> None:
        await at.publish("a", b"1", b"2")
        await at.publish("o", b"1")
        worker = await at.consume("*")
        await at.settle()
        assert sorted(worker.payloads()) == [b"1", b"1", b"2"]
        await owner(at).release(MAIN)
        assert worker.ack(1)  # too late: its lease has ended with the shard
        assert not worker.ack(1, topic="o")
        await worker.consumer.wait_stored()
        await at.publish("o", b"2")
        await at.settle()
        assert worker.offsets("o") == [1, 2]
        assert worker.error is None
        assert [part.topic for part in (await at.state()).partitions] == ["o"]
        await owner(at).acquire(MAIN)
        await at.settle()
        await at.publish("a", b"3")
        await at.settle()
        assert worker.offsets("a") == [1, 2, 3]
        assert not worker.ack(3)
        await worker.consumer.wait_stored()
        assert await at.backlog() == 1  # o's second

    run(Store.MEMORY)


def test_consumer_that_joins_while_the_shard_is_away_gets_it_when_it_comes() -> None:
    @work.scene(OTHER, stores=(Store.MEMORY,))
    async def run(at: work.Scene) -> None:
        await at.publish("a", b"1")
        await at.publish("o", b"1")
        await owner(at).release(MAIN)
        worker = await at.consume("*")
        await at.settle()
        assert worker.offsets("o") == [1]
        await owner(at).acquire(MAIN)
        await at.settle()
        await at.publish("a", b"2")
        await at.settle()
        assert worker.offsets("a") == [2]

    run(Store.MEMORY)
