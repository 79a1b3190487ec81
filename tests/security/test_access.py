"""Every verb of the broker with rights: what it needs, what is refused without, and tricks that do not help."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from runnel.broker.access import Access
from runnel.broker.broker import Broker, LiveDelivery
from runnel.broker.consumer_groups import WorkDelivery
from runnel.broker.consumer_groups.dead_letter_queues import SettleRequest
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest
from runnel.broker.fetcher import FetchRequest
from runnel.broker.live.subscription import SubscribeRequest
from runnel.broker.shard_fetcher import ShardFetchRequest
from runnel.config import LogSettings, Settings
from runnel.errors import (
    ForbiddenError,
    RunnelError,
    UnknownSubscriptionError,
    UnknownTopicError,
)
from runnel.formats.batch import Batch, unpack_blocks
from runnel.formats.dead_letters import TOPIC_TAG
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, GapState, PartitionPlace, ShardPlace, Start
from runnel.formats.work_heads import Consume, DeliveryPart, WorkOptions
from runnel.log.log import ShardId
from runnel.platform.clock import SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.security.rights import Grant, Rights
from tests.protocols.native.talker import turn, until

SETTINGS = Settings(log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0))
MAIN = ShardId("main")


class Ear:
    """A `Sink` and a `WorkSink` that keeps the topics of what it is sent."""

    connection_id = 1
    peer = "a test"

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.ends: list[RunnelError] = []

    def deliver(self, subscription: int, delivery: LiveDelivery) -> None:
        self.topics += topics_in(delivery.buffers)

    def gap(self, subscription: int, gap: GapState) -> None:
        self.topics.append(f"gap of {gap.topic}")

    def ended(self, subscription: int, error: RunnelError) -> None:
        self.ends.append(error)

    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
        for delivery in deliveries:
            self.topics += topics_in(delivery.buffers)

    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None: ...

    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None: ...

    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None: ...

    def consumer_ended(self, consumer: int, error: RunnelError) -> None:
        self.ends.append(error)


def topics_in(buffers: Sequence[bytes | memoryview]) -> list[str]:
    blocks = unpack_blocks(memoryview(b"".join(buffers)))
    return [message.topic for each in blocks for message in each]


def batch(*topics: str, tags: dict[str, str] | None = None) -> Batch:
    return Batch.from_messages([Message(topic, b"1", tags=tags or {}) for topic in topics])


class Scene:
    """A broker in memory with a message each in a/1, a/2 and b/1."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.all = Access(broker, None)

    def access(self, *grants: str) -> Access:
        return Access(self.broker, Rights("tester", map(Grant.parse, grants)))

    async def publish(self, *topics: str, tags: dict[str, str] | None = None) -> None:
        await self.broker.publish(batch(*topics, tags=tags))


@asynccontextmanager
async def opened() -> AsyncIterator[Scene]:
    workers = ThreadWorkers(1)
    try:
        broker = await Broker.open(
            SETTINGS, directory=None, disk=RealDisk(), clock=SystemClock(), workers=workers
        )
        try:
            scene = Scene(broker)
            for topic in ("a/1", "a/2", "b/1"):
                await scene.publish(topic)
            yield scene
        finally:
            await broker.close()
    finally:
        workers.close()


def run(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), opened() as scene:
            await scenario(scene)

    asyncio.run(main())


async def refused(verb: Awaitable[object]) -> str:
    with pytest.raises(ForbiddenError) as refusal:
        await verb
    return str(refusal.value)


def consume(name: str, *patterns: str) -> Consume:
    return Consume(1, 1, name, patterns, "shared", window_messages=100, window_bytes=2**20)


async def joined(access: Access, name: str, *patterns: str) -> Ear:
    ear = Ear()
    (await access.consume(1, ear, consume(name, *patterns))).start()
    return ear


# --- Each verb, with the one right that is enough and with all the others ---

RIGHTS = ("publish", "read", "consume", "admin")
Verb = Callable[[Access], Awaitable[object]]


async def _publish(access: Access) -> None:
    await access.publish(batch("a/1", "a/3"))


async def _send(access: Access) -> None:
    await access.send(Message("a/1", b"2"))


async def _new_term(access: Access) -> None:
    await access.new_term("p")


async def _routes(access: Access) -> None:
    access.routes(["a/1", "a/new"])


async def _cursor(access: Access) -> None:
    await access.set_cursor("mine", [CursorPlace("a/1", 0, 1)])
    assert [cursor.name for cursor in (await access.cursors())[0]] == ["mine"]
    await access.remove_cursor("mine")


async def _shard_cursor(access: Access) -> None:
    place = CursorPlace(journal="main", entry=1, patterns=("a/*",))
    await access.set_cursor("mine", [place])
    await access.remove_cursor("mine")


async def _consume(access: Access) -> None:
    ear = await joined(access, "new", "a/*")
    await until(lambda: len(ear.topics) == 2)


VERBS: dict[str, tuple[Verb, tuple[str, ...]]] = {
    "publish": (_publish, ("publish",)),
    "send": (_send, ("publish",)),
    "new_term": (_new_term, ("publish",)),
    "fetch": (lambda access: access.fetch(FetchRequest("a/1", offset=1)), ("read",)),
    "shards": (lambda access: access.shards(["a/*"]), ("read",)),
    "fetch_shard": (
        lambda access: access.fetch_shard(ShardFetchRequest(MAIN, 1, patterns=["a/*"])),
        ("read",),
    ),
    "subscribe": (
        lambda access: access.subscribe(
            SubscribeRequest(1, Ear(), ["a/*"], Start("latest"), credit_bytes=1)
        ),
        ("read",),
    ),
    "routes": (_routes, RIGHTS),
    "describe_topic": (lambda access: access.describe_topic("a/1"), RIGHTS),
    "delete_topic": (lambda access: access.delete_topic("a/1"), ("admin",)),
    "purge_topic": (lambda access: access.purge_topic("a/1"), ("admin",)),
    "cursors": (_cursor, ("read",)),
    "shard cursors": (_shard_cursor, ("read",)),
    "consume": (_consume, ("consume",)),
    "consume what is there": (lambda access: joined(access, "work"), ("consume",)),
    "make_subscription": (
        lambda access: access.make_subscription(SubscriptionRequest("new", ["a/*"], "shared")),
        ("consume",),
    ),
    "delete_subscription": (lambda access: access.delete_subscription("work"), ("admin",)),
    "pause_subscription": (
        lambda access: access.pause_subscription("work", is_paused=True),
        ("admin",),
    ),
    "move_subscription": (
        lambda access: access.move_subscription("work", Start("latest")),
        ("admin",),
    ),
    "subscriptions": (lambda access: access.subscription("work"), ("consume", "admin")),
    "dead_letters": (lambda access: access.dead_letters("work", 1, 10), ("consume", "admin")),
    "settle_dead": (
        lambda access: access.settle_dead(SettleRequest("work", [], is_all=True, is_redriven=True)),
        ("admin",),
    ),
}


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_needs_its_right_and_no_other(name: str) -> None:
    verb, needed = VERBS[name]

    async def scenario(scene: Scene) -> None:
        await scene.all.make_subscription(SubscriptionRequest("work", ["a/*"], "shared"))
        for right in RIGHTS:
            elsewhere = (f"{other}:*" for other in RIGHTS if other not in needed)
            if right not in needed:
                assert "token 'tester' has no right to" in await refused(
                    verb(scene.access(f"{right}:*"))
                )
            elif name != "new_term":  # a producer's name belongs to no topic
                await refused(verb(scene.access(*elsewhere, f"{right}:b/*")))
                await refused(verb(scene.access(*elsewhere, f"{right}:a/1?")))
        await verb(scene.access(*(f"{right}:a/*" for right in needed[:1])))

    run(scenario)


@pytest.mark.parametrize("right", [right for right in RIGHTS if right != "read"])
def test_statistics_need_to_be_read_by_name(right: str) -> None:
    async def scenario(scene: Scene) -> None:
        for grants in ((f"{right}:!system/*",), ("read:*",), ("read:!system/events/*",)):
            with pytest.raises(ForbiddenError, match="!system/metrics/broker"):
                scene.access(*grants).statistics()
        assert scene.access("read:!system/*").statistics()

    run(scenario)


def test_every_verb_of_the_broker_is_one_of_access() -> None:
    """A verb that were added to the broker alone would be one that listeners are tempted to use directly."""
    from runnel.broker.consumer_groups import ConsumerGroups

    own = {name for name in vars(Access) if not name.startswith("_")}
    of_broker = {name for name in vars(Broker) if not name.startswith(("_", "on_"))}
    of_work = {name for name in vars(ConsumerGroups) if not name.startswith(("_", "on_"))}
    not_for_callers = {
        "before_release",  # an event of the logs that may wait
        "abandon",  # as the end of a process, for embedded clusters
        "open",
        "recovered",
        "sync",
        "close",
        "start",
        "patterns_of",
        "report",
        "known_cursors",
        "warn_of_habits",
        "owned_by",
        "tell_lost",
        "follow_rules",
        "cursor_page",  # `cursors` and `subscriptions` of callers
        "subscription_page",
    }
    assert of_broker | of_work <= own | not_for_callers


# --- Publishing ---


def test_one_topic_that_is_not_allowed_refuses_the_batch() -> None:
    async def scenario(scene: Scene) -> None:
        access = scene.access("publish:a/*")
        with pytest.raises(ForbiddenError, match="topic 'b/1'"):
            access.publish(batch("a/1", "b/1"))
        with pytest.raises(ForbiddenError, match="topic '!dead/work'"):
            access.publish(batch("!dead/work"))
        assert (await scene.all.fetch(FetchRequest("a/1", offset=1))).end_offset == 2

    run(scenario)


def test_system_topics_are_published_to_only_by_name_and_reserved_ones_never() -> None:
    async def scenario(scene: Scene) -> None:
        access = scene.access("publish:*", "publish:!*")
        await access.publish(batch("!dead/work"))
        with pytest.raises(RunnelError, match="are the system's"):
            access.publish(batch("!system/metrics/broker"))

    run(scenario)


# --- Reading ---


def test_what_matches_later_is_read_only_within_the_rights() -> None:
    async def scenario(scene: Scene) -> None:
        ear = Ear()
        subscription = await scene.access("read:a/*").subscribe(
            SubscribeRequest(1, ear, ["a/*"], Start("earliest"), credit_bytes=2**20)
        )
        subscription.start()
        await scene.publish("!dead/a")
        await scene.publish("b/2", "a/3")
        await until(lambda: len(ear.topics) == 3)
        await turn()
        assert ear.topics == ["a/1", "a/2", "a/3"]

    run(scenario)


@pytest.mark.parametrize(
    "start",
    [
        Start("resume", shards=(ShardPlace("main", 0, 0, 1),)),
        Start("resume", shards=(ShardPlace("main", 0, 0, 1, 0),), partitions=(PartitionPlace("b/1", 0, 1),)),
        Start("resume_last", shards=(ShardPlace("main", 0, 0, 1),)),
        Start("last"),
        Start("time", time_ns=1),
    ],
)  # fmt: skip
def test_resume_positions_read_no_more_than_the_patterns(start: Start) -> None:
    async def scenario(scene: Scene) -> None:
        ear = Ear()
        subscription = await scene.access("read:a/*").subscribe(
            SubscribeRequest(1, ear, ["a/*"], start, credit_bytes=2**20)
        )
        subscription.start()
        await scene.publish("a/3", "b/1")
        await until(lambda: "a/3" in ear.topics)
        await turn()
        assert {topic for topic in ear.topics if "a/" not in topic} == set()

    run(scenario)


def test_a_shard_is_read_only_as_far_as_the_patterns_go() -> None:
    async def scenario(scene: Scene) -> None:
        access = scene.access("read:a/*")
        fetched = await access.fetch_shard(ShardFetchRequest(MAIN, 1, patterns=["a/*"]))
        assert fetched.messages == 2
        for tricky in ((), ("*",), ("?/1",), ("a/*", "b/1"), ("[ab]/1",), ("!*",)):
            await refused(access.fetch_shard(ShardFetchRequest(MAIN, 1, patterns=tricky)))
            await refused(access.shards(tricky))
            await refused(
                access.subscribe(
                    SubscribeRequest(1, Ear(), tricky, Start("earliest"), credit_bytes=2**20)
                )
            )

    run(scenario)


# --- Topics and cursors ---


def test_lists_show_what_there_is_any_right_to() -> None:
    async def scenario(scene: Scene) -> None:
        access = scene.access("publish:a/1", "consume:b/*")
        topics, is_complete = await access.topics()
        assert ([topic.name for topic in topics], is_complete) == (["a/1", "b/1"], True)
        topics, is_complete = await access.topics(limit=1)
        assert ([topic.name for topic in topics], is_complete) == (["a/1"], False)
        topics, is_complete = await access.topics(after="a/1", limit=1)
        assert ([topic.name for topic in topics], is_complete) == (["b/1"], True)
        assert await scene.access("read:c/*").topics() == ([], True)

    run(scenario)


def test_a_list_goes_on_over_pages_of_what_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runnel.broker.topics._TOPICS_PER_STEP", 2)

    async def scenario(scene: Scene) -> None:
        for number in range(10):
            await scene.publish(f"a/x{number}")
        await scene.publish("z/1", "z/2")
        topics, is_complete = await scene.access("read:z/*").topics(limit=1)
        assert ([topic.name for topic in topics], is_complete) == (["z/1"], False)
        topics, is_complete = await scene.access("read:z/*").topics(after="z/1")
        assert ([topic.name for topic in topics], is_complete) == (["z/2"], True)

    run(scenario)


def test_a_topic_without_rights_is_refused_whether_it_exists_or_not() -> None:
    async def scenario(scene: Scene) -> None:
        access = scene.access("read:a/*", "admin:a/*")
        verbs: Sequence[Callable[[str], Awaitable[object]]] = (
            access.describe_topic,
            access.delete_topic,
            access.purge_topic,
            lambda topic: access.fetch(FetchRequest(topic)),
        )
        for verb in verbs:
            there, missing = await refused(verb("b/1")), await refused(verb("b/9"))
            assert there.replace("b/1", "b/9") == missing

    run(scenario)


def test_cursors_of_others_are_neither_seen_nor_moved_nor_removed() -> None:
    async def scenario(scene: Scene) -> None:
        access = scene.access("read:a/*")
        await scene.all.set_cursor("theirs", [CursorPlace("a/1", 0, 1), CursorPlace("b/1", 0, 1)])
        whole = CursorPlace(journal="main", entry=1, patterns=("*",))
        await scene.all.set_cursor("whole", [whole])
        blind = CursorPlace(journal="main", entry=1)
        await scene.all.set_cursor("blind", [blind])
        assert await access.cursors() == ([], True)
        assert await access.cursor("theirs") == []
        for name in ("theirs", "whole", "blind"):
            await refused(access.set_cursor(name, [CursorPlace("a/1", 0, 1)]))
            await refused(access.remove_cursor(name))
        await refused(access.set_cursor("mine", [whole]))
        await refused(access.set_cursor("mine", [blind]))
        await refused(access.set_cursor("mine", [CursorPlace("a/1", 0, 1), whole]))
        admin = scene.access("admin:*")
        assert [cursor.name for cursor in (await admin.cursors())[0]] == [
            "blind",
            "theirs",
            "whole",
        ]
        await admin.remove_cursor("theirs")

    run(scenario)


# --- Acknowledged work ---


def test_a_subscription_over_more_than_the_rights_is_not_joined_by_its_name() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.all.make_subscription(SubscriptionRequest("work", ["a/*", "b/*"], "shared"))
        access = scene.access("consume:a/*", "admin:a/*")
        for patterns in ((), ("a/*",), ("a/*", "b/*")):
            await refused(access.consume(1, Ear(), consume("work", *patterns)))
        await refused(access.make_subscription(SubscriptionRequest("work", ["a/*"], "shared")))
        await refused(access.delete_subscription("work"))
        await refused(access.dead_letters("work", 1, 10))
        assert await access.subscriptions() == ([], True)
        assert [each.name for each in (await scene.access("admin:*").subscriptions())[0]] == [
            "work"
        ]

    run(scenario)


def test_whether_a_subscription_or_cursor_of_others_exists_cannot_be_told() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.all.make_subscription(SubscriptionRequest("theirs", ["b/*"], "shared"))
        await scene.all.set_cursor("theirs", [CursorPlace("b/1", 0, 1)])
        access = scene.access("admin:a/*", "consume:a/*", "read:a/*")
        verbs: list[Callable[[str], Awaitable[object]]] = [
            access.delete_subscription,
            access.subscription,
            lambda name: access.pause_subscription(name, is_paused=True),
            lambda name: access.move_subscription(name, Start("earliest")),
            lambda name: access.remove_member(name, "m"),
            lambda name: access.dead_letters(name, 1, 10),
            lambda name: access.settle_dead(SettleRequest(name, (), is_all=True, is_redriven=True)),
            lambda name: access.consume(1, Ear(), consume(name)),
            access.remove_cursor,
        ]
        for verb in verbs:
            told = await refused(verb("theirs"))
            assert told.replace("theirs", "none") == await refused(verb("none"))
            assert "b/" not in told
        told = await refused(access.set_cursor("theirs", [CursorPlace("a/1", 0, 1)]))
        assert "b/" not in told

    run(scenario)


def test_who_has_a_right_to_all_topics_is_told_that_something_does_not_exist() -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(UnknownSubscriptionError):
            await scene.access("admin:*").delete_subscription("none")
        with pytest.raises(UnknownTopicError):
            await scene.access("read:*").remove_cursor("none")
        await refused(scene.access("read:*").delete_subscription("none"))

    run(scenario)


def test_one_made_anew_over_other_topics_while_it_is_joined_delivers_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.all.make_subscription(SubscriptionRequest("work", ["a/*"], "shared"))
        ear = Ear()
        deleting = asyncio.ensure_future(scene.all.delete_subscription("work"))
        making = asyncio.ensure_future(
            scene.all.make_subscription(SubscriptionRequest("work", ["b/*"], "shared"))
        )
        joining = asyncio.ensure_future(
            scene.access("consume:a/*").consume(1, ear, consume("work"))
        )
        await asyncio.gather(deleting, making)
        assert "all patterns of subscription 'work'" in await refused(joining)
        await turn()
        assert ear.topics == []
        state = await scene.all.subscription("work")
        assert sum(member.consumers for member in state.members) == 0

    run(scenario)


def test_topics_made_later_come_only_within_the_patterns() -> None:
    async def scenario(scene: Scene) -> None:
        ear = await joined(scene.access("consume:a/*"), "work", "a/*")
        await scene.publish("b/2", "a/3")
        await until(lambda: len(ear.topics) == 3)
        assert sorted(ear.topics) == ["a/1", "a/2", "a/3"]

    run(scenario)


def test_acknowledging_what_the_subscription_does_not_cover_changes_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.all.make_subscription(SubscriptionRequest("theirs", ["b/*"], "shared"))
        consumer = await scene.access("consume:a/*").consume(1, Ear(), consume("mine", "a/*"))
        consumer.ack_up_to("b/1", 0, 2)
        ear = await joined(scene.all, "theirs")
        await until(lambda: ear.topics)
        assert ear.topics == ["b/1"]

    run(scenario)


def test_dead_letters_of_a_namesake_are_not_shown() -> None:
    """They outlive their subscription: one of the same name over other topics does not open them."""

    async def scenario(scene: Scene) -> None:
        await scene.publish("!dead/work", tags={TOPIC_TAG: "b/1"})
        await scene.publish("!dead/work", tags={TOPIC_TAG: "a/1"})
        await scene.publish("!dead/work")
        access = scene.access("consume:a/*")
        await access.make_subscription(SubscriptionRequest("work", ["a/*"], "shared"))

        async def shown(by: Access) -> list[str]:
            batches, _ = await by.dead_letters("work", 1, 10)
            return [letter.tags.get(TOPIC_TAG, "") for each in batches for letter in each]

        assert await shown(access) == ["a/1"]
        assert await shown(scene.access("admin:a/*")) == ["a/1"]
        assert await shown(scene.access("read:!dead/*")) == ["b/1", "a/1", ""]
        assert await shown(scene.all) == ["b/1", "a/1", ""]
        await refused(scene.access("read:*").dead_letters("work", 1, 10))

    run(scenario)


def test_options_of_a_subscription_are_changed_by_those_who_may_consume_it() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.all.make_subscription(SubscriptionRequest("work", ["a/*"], "shared"))
        wanted = msgspec.structs.replace(
            consume("work"), options=WorkOptions(deliveries_max=7), patterns=("a/*",)
        )
        await refused(scene.access("consume:b/*").consume(1, Ear(), wanted))
        consumer = await scene.access("consume:a/*").consume(1, Ear(), wanted)
        assert consumer.definition.options.deliveries_max == 7

    run(scenario)
