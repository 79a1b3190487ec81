"""No request holds the loop, however much there is to walk over and however many ask at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import cast

import msgspec
import pytest

from runnel.broker.access import Access
from runnel.broker.access_rules import AccessRules
from runnel.broker.broker import Broker
from runnel.broker.connections import ReadRows
from runnel.broker.consumer_groups.ack_journals import AckJournals
from runnel.broker.consumer_groups.group_stats import GroupStats
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest
from runnel.broker.cursors import CursorStore
from runnel.broker.fetcher import FetchRequest
from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.live.ephemeral_topics import EphemeralTopics
from runnel.broker.live.start_positions import SHARDS_PER_STEP
from runnel.broker.monitoring.metric_tables import ConnectionStats
from runnel.broker.monitoring.topic_traffic import Flow
from runnel.broker.pages import PAGE_MAX
from runnel.broker.topic_creator import TOPICS_PER_STEP
from runnel.broker.topics import TopicDirectory, TopicListRequest
from runnel.config import Keep, TopicRule
from runnel.errors import ForbiddenError, InvalidNameError, LimitExceededError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, Start
from runnel.log.memory import MemoryLog
from runnel.log.metadata.topic_table import TopicTable
from runnel.log.shard_view import ShardView
from runnel.security.rights import Grant, Rights
from runnel.topics.pattern_index import SLICE_COMPARISONS
from runnel.topics.patterns import Pattern
from tests.broker.loop_probe import LoopProbe
from tests.broker.scenes import EARLIEST, LIVE, At, Store, publish_batch, scene

TOPICS = 20_000


def names(count: int, folder: str = "t") -> list[str]:
    return [f"{folder}/{number:05}" for number in range(count)]


async def publish(access: Access | Broker, topics: list[str]) -> None:
    """One batch with a message for each topic."""
    await publish_batch(access, Batch.from_messages([Message(topic, b"x") for topic in topics]))


def token(name: str, *grants: str) -> Rights:
    return Rights(name, map(Grant.parse, grants))


# --- Turns ---


def test_all_walks_together_do_one_step_between_two_turns_of_the_loop() -> None:
    async def run() -> None:
        share = LoopShare()
        turn = 0
        steps: list[int] = []

        async def walk(owner: int) -> None:
            async for _ in share.steps(range(20), owner, 5):
                steps.append(turn)  # noqa: PERF401 - `turn` changes meanwhile

        walks = asyncio.gather(*(walk(number) for number in range(30)))
        while not walks.done():
            await asyncio.sleep(0)
            turn += 1
        assert len(steps) == 30 * 4
        assert len(set(steps)) == len(steps)
        assert share.waiting == 0

    asyncio.run(run())


def test_owners_take_turns_however_many_walks_each_has() -> None:
    async def run() -> None:
        share = LoopShare()
        done: list[str] = []

        async def walk(owner: str, name: str) -> None:
            await share.turn(owner)
            done.append(name)

        crowd = [walk("crowd", f"crowd {number}") for number in range(50)]
        await asyncio.gather(*crowd, walk("single", "single"))
        assert done.index("single") == 1

    asyncio.run(run())


def test_turn_of_a_cancelled_walk_goes_to_the_next() -> None:
    async def run() -> None:
        share = LoopShare()
        waiting = [asyncio.ensure_future(share.turn(number)) for number in range(4)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        waiting[2].cancel()
        await waiting[3]
        assert waiting[0].done()
        await share.turn("later")

    asyncio.run(run())


def test_what_is_walked_over_may_change_between_steps() -> None:
    async def run() -> None:
        share = LoopShare()
        walked = dict.fromkeys(range(10))
        seen: list[int] = []
        async for some in share.steps(walked, "me", 3):
            seen += some
            walked.clear()
            walked[100] = None
        assert seen == list(range(10))

    asyncio.run(run())


# --- Topics ---


@pytest.mark.parametrize("at_once", [1, 60])
@pytest.mark.parametrize(
    "grant", ["read:t/0001?", "read:*/00017"], ids=["with a prefix", "without a prefix"]
)
def test_topics_of_a_token_that_sees_few_are_one_page_and_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, grant: str, at_once: int
) -> None:
    @scene()
    async def run(at: At) -> None:
        topics = names(TOPICS if at_once == 1 else 4000)
        await publish(at.broker, topics)
        probe = LoopProbe(monkeypatch)
        probe.count(Pattern, "matches")
        few = Access(at.broker, token("few", grant))
        async with probe:
            pages = await asyncio.gather(*(few.topics("*") for _ in range(at_once)))
        expected = [name for name in topics if Pattern(grant.removeprefix("read:")).matches(name)]
        for page, is_complete in pages:
            assert ([topic.name for topic in page], is_complete) == (expected, True)
        assert probe.most <= SLICE_COMPARISONS + 100
        if "*" not in grant:  # names that it cannot see are not looked at
            assert probe.total <= 100 * at_once

    run(Store.MEMORY, "")


@scene()
async def test_pages_of_topics_are_bounded_and_lead_to_all_that_is_visible(at: At) -> None:
    topics = names(2 * PAGE_MAX + 10) + names(3, "u")
    await publish(at.broker, topics)
    seen = Access(at.broker, token("some", "read:t/*", "publish:u/00001", "read:t/00001"))
    found: list[str] = []
    is_complete = False
    while not is_complete:
        page, is_complete = await seen.topics("*", after=found[-1] if found else "", limit=10_000)
        assert len(page) <= PAGE_MAX
        found += [topic.name for topic in page]
    assert found == [name for name in topics if name.startswith("t/") or name == "u/00001"]


@scene()
async def test_topics_that_come_and_go_between_pages_neither_repeat_nor_hide_others(at: At) -> None:
    topics = names(20)
    await publish(at.broker, topics)
    access = Access(at.broker, token("all", "read:t/*"))
    first, _ = await access.topics("t/*", limit=10)
    await at.broker.delete_topic(first[-1].name)  # the place that the next page begins behind
    await publish(at.broker, ["t/00009x", "t/00000x"])
    rest, is_complete = await access.topics("t/*", after=first[-1].name)
    assert [topic.name for topic in rest] == ["t/00009x", *topics[10:]]
    assert is_complete


def test_describing_topics_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    @scene()
    async def run(at: At) -> None:
        await publish(at.broker, names(PAGE_MAX))
        probe = LoopProbe(monkeypatch)
        probe.count(TopicDirectory, "_state")
        access = Access(at.broker, None)
        async with probe:
            await asyncio.gather(*(access.topics("*") for _ in range(20)))
        assert probe.total >= 20 * PAGE_MAX
        assert probe.most <= 64

    run(Store.MEMORY, "")


# --- Publishing ---


@pytest.mark.parametrize("store", list(Store), ids=lambda store: store.value)
def test_topics_of_a_wide_batch_are_made_in_steps_and_the_batch_is_stored_whole(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    @scene()
    async def run(at: At) -> None:
        reader, subscription = await at.subscribe("t/*")
        probe = LoopProbe(monkeypatch)
        probe.count(TopicTable, "ensure")
        topics = names(3000)
        async with probe:
            await publish(at.broker, topics)
        assert probe.total >= len(topics)
        assert probe.most <= 2 * TOPICS_PER_STEP
        await at.settle(subscription)
        assert [message.topic for message in reader.messages] == topics
        assert {message.offset for message in reader.messages} == {1}
        assert len(reader.deliveries) == 1

    run(store, "")


@scene()
async def test_wide_batch_with_a_topic_that_cannot_be_made_is_refused_and_not_tried_for_ever(
    at: At,
) -> None:
    topics = [*names(1000), "t/bad\n", *names(1000, "u")]
    batch = Batch.from_messages([Message("t/a", b"x")] * len(topics))
    head = msgspec.structs.replace(
        batch.envelope,
        topics=topics,
        partitions=bytes(4 * len(topics)),
        counts=(1).to_bytes(4, "little") * len(topics),
    )
    wide = Batch(head, batch.body)
    for _ in range(2):
        with pytest.raises(InvalidNameError, match="run 1000: "):
            await publish_batch(at.broker, wide)
    found = await at.broker.fetch(FetchRequest("t/00000"))
    assert not found.batches


@scene()
async def test_two_wide_batches_that_begin_with_the_same_topic_are_both_stored(at: At) -> None:
    batches = [["t/first", *names(500)], ["t/first", *names(500, "u")]]
    await asyncio.gather(*(publish(at.broker, topics) for topics in batches))
    assert (await at.broker.topics.describe("t/first")).messages == 2
    assert (await at.broker.topics.describe("u/00499")).messages == 1


@scene(LIVE)
async def test_wide_batch_of_new_topics_that_are_not_kept_reaches_its_readers_in_order(
    at: At,
) -> None:
    """More of them than names without a reader are remembered."""
    reader, subscription = await at.subscribe("live/*")
    topics = names(12_000, "live")
    await publish(at.broker, topics)
    await publish(at.broker, topics)
    await at.settle(subscription)
    assert [message.topic for message in reader.messages] == [*topics, *topics]
    assert [message.offset for message in reader.messages] == [1] * 12_000 + [2] * 12_000


@scene(LIVE)
async def test_wide_batch_of_topics_that_nobody_reads_goes_nowhere(at: At) -> None:
    await publish(at.broker, names(12_000, "live"))
    assert (await at.broker.topics.list(TopicListRequest("live/*")))[0] == []


def test_topics_that_are_not_kept_are_made_and_swept_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @scene(LIVE)
    async def run(at: At) -> None:
        topics = names(3000, "live")
        _, subscription = await at.subscribe("live/*")
        probe = LoopProbe(monkeypatch)
        probe.count(EphemeralTopics, "make")
        probe.count(EphemeralTopics, "vanish")
        async with probe:
            await publish(at.broker, topics)
            assert len((await at.broker.topics.list(TopicListRequest("live/*")))[0]) == PAGE_MAX
            subscription.close()
            await at.subscribe("live/0000?")  # waits for the sweep
            assert (await at.broker.topics.list(TopicListRequest("live/*")))[0] == []
        assert probe.total >= 2 * len(topics)
        assert probe.most <= 2 * TOPICS_PER_STEP

    run(Store.MEMORY, "")


@scene(LIVE)
async def test_new_readers_get_in_however_many_leave_meanwhile(at: At) -> None:
    _, first = await at.subscribe("live/*")
    await publish(at.broker, names(1000, "live"))
    first.close()
    is_over = False

    async def churn() -> None:
        while not is_over:
            _, subscription = await at.subscribe("other")
            subscription.close()

    churning = [asyncio.ensure_future(churn()) for _ in range(5)]
    await asyncio.wait_for(at.subscribe("live/*"), 30)
    is_over = True
    await asyncio.gather(*churning)


def test_subscriptions_over_many_topics_are_listed_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @scene()
    async def run(at: At) -> None:
        await publish(at.broker, names(3000))
        for name, pattern in (("mine", "t/0000*"), ("all", "t/*")):
            await at.broker.consumer_groups.make_subscription(
                SubscriptionRequest(name, [pattern], "shared", EARLIEST)
            )
        probe = LoopProbe(monkeypatch)
        probe.count(AckJournals, "find")
        access = Access(at.broker, None)
        async with probe:
            listed = await asyncio.gather(*(access.subscriptions() for _ in range(10)))
        assert [each.members[0].backlog for each in listed[0][0]] == [3000, 10]
        assert probe.total >= 10 * 3000
        assert probe.most <= 200
        few = Access(at.broker, token("few", "consume:t/0000*"))
        async with probe:
            before = probe.total
            assert [each.name for each in (await few.subscriptions())[0]] == ["mine"]
        assert probe.total - before <= 20  # what it may not see is not looked at

    run(Store.MEMORY, "")


# --- Lists in pages ---


async def make_cursors(at: At, count: int) -> list[str]:
    await publish(at.broker, ["t/0", "u/0"])
    known = [f"c{number:04}" for number in range(count)]
    for number, name in enumerate(known):
        await at.broker.cursors.set(name, [CursorPlace("tu"[number % 2] + "/0", 0, 1)])
    return known


def test_cursors_are_listed_in_pages_and_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    @scene()
    async def run(at: At) -> None:
        known = await make_cursors(at, 2 * PAGE_MAX + 600)
        visible = known[::2]
        access = Access(at.broker, token("some", "read:t/*"))
        probe = LoopProbe(monkeypatch)
        probe.count(CursorStore, "_lag")
        probe.count(AccessRules, "sees_cursor")
        async with probe:
            first, is_complete = await access.cursors(limit=10_000)
        assert ([each.name for each in first], is_complete) == (visible[:PAGE_MAX], False)
        assert probe.most <= 64
        await at.broker.cursors.remove(first[-1].name)  # the place that the next page begins behind
        async with probe:
            rest, is_complete = await access.cursors(after=first[-1].name, limit=PAGE_MAX)
        assert ([each.name for each in rest], is_complete) == (visible[PAGE_MAX:], True)
        assert {place.lag for each in rest for place in each.places} == {1}
        page, is_complete = await access.cursors(after=known[-3], limit=1)
        assert ([each.name for each in page], is_complete) == (visible[-1:], True)

    run(Store.MEMORY, "")


def test_subscriptions_are_listed_in_pages_and_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    @scene()
    async def run(at: At) -> None:
        known = [f"s{number:04}" for number in range(PAGE_MAX + 400)]
        for number, name in enumerate(known):
            pattern = "tu"[number % 2] + "/*"
            await at.broker.consumer_groups.make_subscription(
                SubscriptionRequest(name, [pattern], "shared", EARLIEST)
            )
        probe = LoopProbe(monkeypatch)
        probe.count(GroupStats, "_state_of")
        probe.count(AccessRules, "sees_subscription")
        everything = Access(at.broker, None)
        async with probe:
            first, is_complete = await everything.subscriptions(limit=10_000)
            assert ([each.name for each in first], is_complete) == (known[:PAGE_MAX], False)
            await at.broker.consumer_groups.delete_subscription(first[-1].name)
            rest, is_complete = await everything.subscriptions(after=first[-1].name, limit=1000)
            assert ([each.name for each in rest], is_complete) == (known[PAGE_MAX:], True)
            some = Access(at.broker, token("some", "consume:t/*"))
            page, is_complete = await some.subscriptions(limit=3)
            assert ([each.name for each in page], is_complete) == (known[:6:2], False)
        assert probe.most <= 64

    run(Store.MEMORY, "")


def test_connections_are_listed_in_pages_and_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listener:
        """Two of them have every other connection."""

        def __init__(self, first: int) -> None:
            self._ids = range(first, 5001, 2)

        def rows(self) -> ReadRows:
            return {number: partial(self.read, number) for number in self._ids}

        def read(self, number: int) -> ConnectionStats:
            return ConnectionStats(number, "native", "peer", "", 0, number % 7, 0, Flow())

    @scene()
    async def run(at: At) -> None:
        at.broker.connections.listeners += [Listener(2).rows, Listener(1).rows]
        probe = LoopProbe(monkeypatch)
        probe.count(Listener, "read")
        access = Access(at.broker, token("watcher", "read:!system/metrics/*"))
        found: list[int] = []
        is_complete = False
        async with probe:
            while not is_complete:
                after = found[-1] if found else 0
                page, is_complete = await access.connections(after=after, limit=10_000)
                assert len(page) <= PAGE_MAX
                found += [row.id for row in page]
            assert probe.total < 2 * 5000  # a page reads what it shows, not what lies behind it
            await at.broker.monitor.refresh()
        assert found == list(range(1, 5001))
        assert probe.most <= 128
        limits = cast("dict[str, dict[str, object]]", at.broker.statistics()["limits"])
        assert limits["native.subscriptions_max"]["used"] == 6
        with pytest.raises(ForbiddenError):
            await Access(at.broker, token("other", "read:t/*")).connections()

    run(Store.MEMORY, "")


def test_answer_that_is_not_paged_is_whole_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @scene()
    async def run(at: At) -> None:
        known = await make_cursors(at, 20)
        access = Access(at.broker, None)
        monkeypatch.setattr("runnel.broker.pages.PARTS_MAX", 20)
        listed, is_complete = await access.cursors()
        assert ([each.name for each in listed], is_complete) == (known, True)
        await at.broker.cursors.set("d", [CursorPlace("t/0", 0, 1)])
        with pytest.raises(LimitExceededError, match=r"too many cursors for one answer.*in pages"):
            await access.cursors()
        page, is_complete = await access.cursors(limit=100)
        assert ([each.name for each in page], is_complete) == (known, False)

    run(Store.MEMORY, "")


# --- Shards ---


OWN_JOURNALS = TopicRule(match="t/*", keep=Keep.MEMORY, journal="{topic}")


async def publish_each(at: At, topics: Sequence[str]) -> None:
    for topic in topics:  # a batch has one journal
        await publish(at.broker, [topic])


def test_shards_are_looked_at_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    @scene(OWN_JOURNALS)
    async def run(at: At) -> None:
        topics = names(1500)
        await publish_each(at, topics)
        probe = LoopProbe(monkeypatch)
        probe.count(ShardView, "entries")
        probe.count(MemoryLog, "entry_at")
        access = Access(at.broker, None)
        async with probe:
            listed = await asyncio.gather(*(access.shards(["t/*"], 0) for _ in range(5)))
        for shards in listed:
            assert [(each.journal, each.next_entry) for each in shards] == [
                (name, 2) for name in topics
            ]
        assert probe.total == 5 * 2 * len(topics)
        assert probe.most <= 2 * SHARDS_PER_STEP

    run(Store.MEMORY, "")


def test_beginning_at_a_time_looks_at_shards_in_steps_and_misses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @scene(OWN_JOURNALS)
    async def run(at: At) -> None:
        topics = names(1500)
        await publish_each(at, topics)
        probe = LoopProbe(monkeypatch)
        probe.count(MemoryLog, "entry_at")
        async with probe:
            beginning = asyncio.ensure_future(at.subscribe("t/*", start=Start("time", time_ns=0)))
            await at.until(lambda: probe.total >= 300 or beginning.done())
            assert not beginning.done()  # it is among the shards
            await publish_each(at, ["t/00000", "t/01499", "t/new"])
            reader, subscription = await beginning
        assert probe.total == len(topics)
        assert probe.most <= SHARDS_PER_STEP
        await publish_each(at, ["t/00001"])
        await at.settle(subscription)
        found = Counter(message.topic for message in reader.messages)
        assert found == Counter([*topics, "t/00000", "t/01499", "t/new", "t/00001"])

    run(Store.MEMORY, "")
