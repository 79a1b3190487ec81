"""Shards that go and come under a broker: readers, fetches, publishers, cursors and listings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from runnel.broker.fetcher import FetchRequest, FetchResult
from runnel.broker.shard_fetcher import ShardFetchRequest
from runnel.config import TopicRule
from runnel.errors import MovedError, ProducerForgottenError
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, Owner, PartitionPlace, Start
from runnel.log.log import ShardId
from runnel.log.memory import MemoryLog
from tests.broker.scenes import EARLIEST, LAST, LIVE, At, Store, scene
from tests.log.samples import batch

MAIN, OTHER = ShardId("main"), ShardId("other")
RULES = (TopicRule(match="b*", journal="other"), LIVE, TopicRule(match="*", journal="main"))


def log_of(at: At) -> MemoryLog:
    log = at.broker._stores.main
    assert isinstance(log, MemoryLog)
    return log


async def release(at: At, shard: ShardId = MAIN) -> None:
    await log_of(at).release(shard)


async def drop(at: At, shard: ShardId = MAIN) -> None:
    await log_of(at).drop(shard)


async def acquire(at: At, shard: ShardId = MAIN) -> None:
    await log_of(at).acquire(shard)


def losing(run: Callable[[At, Callable[[At], Awaitable[None]]], Awaitable[None]]) -> object:
    """A test that runs with a planned release, and with a loss without warning."""

    @pytest.mark.parametrize("lose", [release, drop])
    def test(lose: Callable[[At], Awaitable[None]]) -> None:
        async def play(at: At) -> None:
            await run(at, lose)

        scene(*RULES)(play)(Store.MEMORY, "")

    test.__name__ = run.__name__
    test.__doc__ = run.__doc__
    return test


Lose = Callable[[At], Awaitable[None]]


# --- Publishing ---


@losing
async def test_publishers_are_told_where_the_shard_is(at: At, lose: Lose) -> None:
    known = at.broker._stores._owner_elsewhere
    at.broker._stores._owner_elsewhere = lambda shard: replace(  # type: ignore[method-assign]
        known(shard), address=f"node of {shard}"
    )
    await at.publish("a", b"1")
    await lose(at)
    with pytest.raises(MovedError, match="main/0") as caught:
        await at.publish("a", b"2")
    assert [route.owners for route in at.broker.routes(["a"])] == [
        [Owner("main", 0, 0, "node of main/0")]
    ]
    assert list(caught.value.routes) == at.broker.routes(["a"])
    with pytest.raises(MovedError) as caught:
        await at.broker.wait_room("a")
    assert list(caught.value.routes) == at.broker.routes(["a"])
    assert await at.publish("b", b"1") == [1]
    await acquire(at)
    assert await at.publish("a", b"2") == [2]


@losing
async def test_gathered_messages_fail_and_are_not_published_later(at: At, lose: Lose) -> None:
    await at.publish("a", b"1")
    view = log_of(at).shard(MAIN)
    answers = [at.broker.send(Message("a", b"x")), at.broker.send(Message("b", b"y"))]
    if lose is drop:
        await lose(at)
        with pytest.raises(MovedError, match="main/0"):
            await answers[0]
    else:  # what was gathered is stored before
        await lose(at)
        assert (await answers[0]).base_offsets == [2]
    assert (await answers[1]).base_offsets == [1]
    await acquire(at)
    assert log_of(at).shard(MAIN).epoch > view.epoch
    assert log_of(at).shard(MAIN).entries().next_offset == 1
    assert await at.publish("a", b"2") == [2 if lose is drop else 3]


# --- Live reading ---


@losing
async def test_subscriptions_that_read_the_shard_end_and_others_go_on(at: At, lose: Lose) -> None:
    await at.publish("a", b"1")
    await at.publish("b", b"1")
    literal, _ = await at.subscribe("a", start=EARLIEST)
    other, _ = await at.subscribe("b", start=EARLIEST)
    pattern, _ = await at.subscribe("b*", start=EARLIEST)
    ephemeral, _ = await at.subscribe("live/1")
    both, held = await at.subscribe("a", "b", start=EARLIEST, credit_bytes=0)
    for reader in (literal, other, pattern):
        await at.until(lambda reader=reader: bool(reader.messages))  # type: ignore[misc]
    await lose(at)
    assert [type(each.error) for each in (literal, pattern, both)] == [MovedError] * 3
    assert literal.error is not None
    assert literal.error.routes == at.broker.routes(["a"])  # type: ignore[attr-defined]
    assert held.is_closed
    assert "main" not in str(pattern.error)  # it may have no right to know
    await at.publish("b", b"2")
    await at.publish("live/1", b"1")
    assert other.payloads() == [b"1", b"2"]
    assert ephemeral.payloads() == [b"1"]
    assert pattern.payloads() == [b"1"]
    assert other.error is ephemeral.error is None


@losing
async def test_nobody_subscribes_to_a_shard_that_is_away(at: At, lose: Lose) -> None:
    await at.publish("a", b"1")
    await at.publish("b", b"1")
    await lose(at)
    for patterns in (("a",), ("a", "b"), ("b*",)):
        for kind in ("latest", "last", "earliest", "resume"):
            with pytest.raises(MovedError):
                await at.subscribe(*patterns, start=Start(kind))
    reader, _ = await at.subscribe("b", start=EARLIEST)
    await at.until(lambda: reader.payloads() == [b"1"])
    await acquire(at)
    _, subscription = await at.subscribe("*", start=EARLIEST)
    await at.settle(subscription)


@losing
async def test_feed_that_reads_when_the_shard_goes_sends_nothing_more(at: At, lose: Lose) -> None:
    for payload in range(20):
        await at.publish("a", b"%d" % payload * 1000)
    for start, patterns in ((EARLIEST, ("*",)), (EARLIEST, ("a",)), (LAST, ("*",))):
        for turns in range(8):
            reader, _ = await at.subscribe(*patterns, start=start)
            for _ in range(turns):
                await asyncio.sleep(0)
            await lose(at)
            seen = len(reader.messages), len(reader.gaps)
            await acquire(at)
            await at.publish("a", b"of the next term")
            for _ in range(20):
                await asyncio.sleep(0)
            assert isinstance(reader.error, MovedError)
            assert (len(reader.messages), len(reader.gaps)) == seen


@losing
async def test_look_ups_of_a_beginning_subscription_are_made_again(at: At, lose: Lose) -> None:
    """What it found in a lost term is not where it begins."""
    for patterns in (("a",), ("*",)):
        await at.publish("a", b"1")
        for turns in range(6):
            beginning = asyncio.ensure_future(at.subscribe(*patterns, start=EARLIEST))
            for _ in range(turns):
                await asyncio.sleep(0)
            await lose(at)
            await acquire(at)
            await at.publish("a", b"2")
            try:
                reader, subscription = await beginning
            except MovedError:
                continue  # it met the time in between
            if reader.error is None:
                await at.settle(subscription)
                assert reader.payloads()[-1:] == [b"2"]
                assert not reader.gaps


@losing
async def test_reader_resumes_with_a_gap_for_what_memory_has_lost(at: At, lose: Lose) -> None:
    await at.publish("a", b"1")
    _, first = await at.subscribe("a", start=EARLIEST)
    place = first.partitions[0]
    await lose(at)
    await acquire(at)
    await at.publish("a", b"2")
    resume = Start("resume", [PartitionPlace("a", 0, 2, place.epoch)])
    reader, subscription = await at.subscribe("a", start=resume)
    await at.settle(subscription)
    assert reader.offsets("a") == [2]
    assert [gap.reason for gap in reader.gaps] == ["restart"]


@scene(*RULES)
async def test_readers_resume_when_a_shard_comes_that_was_never_here(at: At) -> None:
    """It comes with messages, and they have no position in it."""
    await at.publish("a", b"1")
    await at.publish("b", b"1")
    literal, _ = await at.subscribe("a")
    other, _ = await at.subscribe("b")
    pattern, _ = await at.subscribe("*")
    at.broker.on_shard_acquired(at.broker._stores.main.shard(MAIN))
    assert isinstance(literal.error, MovedError)
    assert isinstance(pattern.error, MovedError)
    assert other.error is None


# --- Fetching ---


@losing
async def test_waiting_fetches_are_woken_with_moved(at: At, lose: Lose) -> None:
    await at.publish("a", b"1")
    await at.publish("b", b"1")
    request = FetchRequest("a", 0, offset=2, wait_ns=30 * 10**9)
    waiting = asyncio.ensure_future(at.broker.fetch(request))
    other = asyncio.ensure_future(at.broker.fetch(FetchRequest("b", 0, offset=2, wait_ns=10**9)))
    await at.until(lambda: at.broker._fetcher.waiting_count == 2)
    await lose(at)
    with pytest.raises(MovedError) as caught:
        await waiting
    assert list(caught.value.routes) == at.broker.routes(["a"])
    await at.publish("b", b"2")
    assert (await other).messages == 1
    with pytest.raises(MovedError):
        await at.broker.fetch(request)
    with pytest.raises(MovedError):
        await at.broker.fetch_shard(ShardFetchRequest(MAIN, 1))


@losing
async def test_fetch_that_has_not_begun_to_wait_does_not_wait_for_a_lost_shard(
    at: At, lose: Lose
) -> None:
    await at.publish("a", b"1")
    entered, may_wait = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        entered.set()
        await may_wait.wait()
        yield

    async def fetch() -> FetchResult:
        entered.clear()
        may_wait.clear()
        request = FetchRequest("a", 0, offset=2, wait_ns=30 * 10**9, while_waiting=slow)
        fetching = asyncio.ensure_future(at.broker.fetch(request))
        await entered.wait()
        await lose(at)
        if is_back:
            await acquire(at)
            await at.publish("a", b"2")
        may_wait.set()
        return await fetching

    is_back = False
    with pytest.raises(MovedError):
        await fetch()
    await acquire(at)
    is_back = True
    assert (await fetch()).messages == 1


# --- Listings and cursors ---


@losing
async def test_listings_leave_out_what_is_away(at: At, lose: Lose) -> None:
    await at.publish("a", b"1", b"2")
    await at.publish("b", b"1")
    await at.broker.cursors.set("c", [CursorPlace("a", 0, 1)])
    whole = CursorPlace(journal="main", entry=1, patterns=("*",))
    await at.broker.cursors.set("d", [whole])
    lags = [place.lag for cursor in await at.broker.cursors.list() for place in cursor.places]
    assert lags == [2, 2]
    await lose(at)
    topics, _ = await at.broker.topics.list()
    assert [(topic.name, topic.messages) for topic in topics] == [("a", 0), ("b", 1)]
    cursors = await at.broker.cursors.list()
    assert [place.lag for cursor in cursors for place in cursor.places] == lags  # the last known
    assert at.broker.statistics()
    refused: list[Awaitable[object]] = [
        at.broker.topics.describe("a"),
        at.broker.delete_topic("a"),
        at.broker.purge_topic("a"),
        at.broker.cursors.set("c", [CursorPlace("a", 0, 2)]),
        at.broker.shards(["*"]),
    ]
    for request in refused:
        with pytest.raises(MovedError):
            await request
    assert (await at.broker.cursors.list("c"))[0].places[0].offset == 1
    await acquire(at)
    assert (await at.broker.topics.describe("a")).partitions[0].next_offset == 3


@losing
async def test_lag_is_not_taken_from_a_lost_term(at: At, lose: Lose) -> None:
    """The next term of a shard in memory has the same entries again, with other messages."""
    await at.publish("b", b"1")
    await at.publish("a", b"1")
    place = CursorPlace(journal="main", entry=1, patterns=("a*",))
    await at.broker.cursors.set("c", [place])
    assert (await at.broker.cursors.list())[0].places[0].lag == 1
    await lose(at)
    await acquire(at)
    await at.publish("a", *[b"x"] * 7)
    assert (await at.broker.cursors.list())[0].places[0].lag >= 7


# --- Named publishers ---


@losing
async def test_named_publisher_continues_with_a_higher_term(at: At, lose: Lose) -> None:
    term = await at.broker.new_term("p")
    sent = [batch(("a", [b"%d" % n]), producer="p", term=term, number=n) for n in range(2)]
    await at.broker.publish(sent[0])
    await lose(at)
    with pytest.raises(MovedError):
        await at.broker.publish(sent[1])
    await acquire(at)
    # Memory has forgotten the publisher with its messages; a new term is higher than the former.
    with pytest.raises(ProducerForgottenError):
        await at.broker.publish(sent[1])
    later = batch(("a", [b"3"]), producer="p", term=await at.broker.new_term("p"), number=0)
    assert (await at.broker.publish(later)).base_offsets == [2]
