"""Rights times verbs times listeners: what is not allowed is refused at every listener, and what is allowed works.

One table says what each verb needs; it is what docs/security.md promises. Everything is asked of topics `open/…`, once
for every right that a client may have: to these topics, to others, to all of them, and to the system's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from runnel.client import Bus
from runnel.errors import ForbiddenError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.guarded import EVERYTHING, LISTENERS, Guarded, run_guarded

Act = Callable[[Bus], Awaitable[object]]
STATUS = {"http": 403, "grpc": grpc.StatusCode.PERMISSION_DENIED}
RIGHTS = ("publish", "read", "consume", "admin")
# Which topics of a verb's a right to a pattern covers.
SCOPES = {
    "open/*": {"open"},
    "closed/*": {"closed"},
    "open/other": set[str](),
    "*": {"open", "closed"},
    "!*": {"system", "dead"},
    "!system/*": {"system"},
    "!dead/*": {"dead"},
}
ANY = frozenset(RIGHTS)


@dataclass(frozen=True)
class Verb:
    """`rights`: any of these will do, for the scope. `anywhere`: to whatever topics it is."""

    name: str
    act: Act
    rights: frozenset[str]
    scope: str = "open"
    also: tuple[str, str] | None = None  # another right that will do, with its own scope
    anywhere: bool = False
    listeners: tuple[str, ...] = LISTENERS

    def is_allowed(self, right: str, pattern: str) -> bool:
        scopes = SCOPES[pattern]
        if right in self.rights and (self.anywhere or self.scope in scopes):
            return True
        return self.also is not None and right == self.also[0] and self.also[1] in scopes


def verb(act: Act, *rights: str, **more: Any) -> Verb:
    return Verb(act.__name__, act, frozenset(rights), **more)


# --- What is asked ---


async def publish(bus: Bus) -> None:
    await bus.publish("open/a", b"x")


async def publish_a_batch(bus: Bus) -> None:
    await bus.publish_batch(Batch.from_messages([Message("open/a", b"x")]))


async def publish_many(bus: Bus) -> None:
    async with bus.publisher("open/a") as publisher:
        publisher.send(b"x")
        publisher.send(b"y")


async def publish_outside_a_stream(bus: Any) -> None:
    message = pb.Message(topic="open/a", payload=b"x")
    await bus.transport.ask(pb.PublishRequest(messages=[message]), pb.PublishResponse)


async def take_a_name(bus: Bus) -> None:
    await bus.publisher("open/a", name="p").open()


async def fetch(bus: Bus) -> None:
    assert (await bus.fetch("open/a")).messages


async def fetch_by_time(bus: Bus) -> None:
    assert (await bus.fetch("open/a", time=0)).messages


async def subscribe_to_a_topic(bus: Bus) -> None:
    async with bus.subscribe("open/a", start="earliest") as subscription:
        assert (await anext(subscription)).topic == "open/a"


async def subscribe_to_a_pattern(bus: Bus) -> None:
    async with bus.subscribe("open/*", start="last") as subscription:
        assert (await anext(subscription)).topic.startswith("open/")


async def list_shards(bus: Bus) -> None:
    assert await bus.shards("open/*")


async def fetch_a_shard(bus: Bus) -> None:
    page = await bus.fetch_shard("main", 0, 1, patterns=["open/*"])
    topics = {message.topic for batch in page.batches for message in batch}
    assert {topic.partition("/")[0] for topic in topics} == {"open"}


async def ask_for_routes(bus: Bus) -> None:
    assert await bus.routes("open/a")


async def ask_for_a_policy(bus: Any) -> None:
    assert await bus.transport.ask("GET", "/v1/policies", {"topic": "open/a"})


async def describe_a_topic(bus: Bus) -> None:
    assert (await bus.topic("open/a")).name == "open/a"


async def purge_a_topic(bus: Bus) -> None:
    await bus.purge_topic("open/b")


async def delete_a_topic(bus: Bus) -> None:
    await bus.delete_topic("open/c")


async def set_a_cursor(bus: Bus) -> None:
    await bus.set_cursor("open", {"open/a": 1})


async def set_a_cursor_over_patterns(bus: Bus) -> None:
    await bus.set_cursor("wide", [CursorPlace(journal="main", entry=1, patterns=("open/*",))])


async def remove_a_cursor(bus: Bus) -> None:
    await bus.remove_cursor("spare")


async def consume_anew(bus: Bus) -> None:
    async with bus.consume("new", "open/a") as consumer:
        await (await anext(consumer)).ack(stored=True)


async def consume_what_exists(bus: Bus) -> None:
    async with bus.consume("spare") as consumer:
        assert (await anext(consumer)).topic.startswith("open/")


async def make_a_subscription(bus: Bus) -> None:
    await bus.make_subscription("made", "open/*")


async def describe_a_subscription(bus: Bus) -> None:
    assert (await bus.subscription("mine")).name == "mine"


async def pause_a_subscription(bus: Bus) -> None:
    await bus.pause_subscription("mine")


async def resume_a_subscription(bus: Bus) -> None:
    await bus.resume_subscription("mine")


async def move_a_subscription(bus: Bus) -> None:
    await bus.move_subscription("mine", "earliest")


async def remove_a_member(bus: Bus) -> None:
    await bus.remove_member("many", "m")


async def delete_a_subscription(bus: Bus) -> None:
    await bus.delete_subscription("spare")


async def list_dead_letters(bus: Bus) -> None:
    assert [letter.payload async for letter in bus.dead_letters("mine")]


async def fetch_dead_letters(bus: Bus) -> None:
    assert (await bus.fetch("!dead/mine")).messages


async def send_dead_letters_back(bus: Bus) -> None:
    await bus.redrive("mine", [1])


async def drop_dead_letters(bus: Bus) -> None:
    await bus.drop_dead("mine", [2])


async def ask_for_statistics(bus: Bus) -> None:
    assert await bus.statistics()


async def list_connections(bus: Any) -> None:
    assert await bus.transport.ask("GET", "/v1/connections")


async def ask_for_metrics(bus: Any) -> None:
    answer = await bus.transport.listen("/metrics", ())
    await answer.aclose()


async def watch_the_system(bus: Bus) -> None:
    async with bus.subscribe("!system/events", start="last") as events:
        assert (await anext(events)).topic == "!system/events"


async def publish_what_pipelines_do(bus: Bus) -> None:
    await bus.publish("!system/stats/a", b"x")


NOT_HTTP = ("native", "grpc")
VERBS = (
    verb(publish, "publish"),
    verb(publish_a_batch, "publish"),
    verb(publish_many, "publish"),
    verb(publish_outside_a_stream, "publish", listeners=("grpc",)),
    verb(take_a_name, "publish", anywhere=True, listeners=NOT_HTTP),
    verb(publish_what_pipelines_do, "publish", scope="system"),
    verb(fetch, "read"),
    verb(fetch_by_time, "read"),
    verb(subscribe_to_a_topic, "read"),
    verb(subscribe_to_a_pattern, "read"),
    verb(watch_the_system, "read", scope="system"),
    verb(list_shards, "read", listeners=NOT_HTTP),
    verb(fetch_a_shard, "read", listeners=NOT_HTTP),
    verb(ask_for_routes, *ANY, listeners=NOT_HTTP),
    verb(ask_for_a_policy, *ANY, listeners=("http",)),
    verb(describe_a_topic, *ANY),
    verb(purge_a_topic, "admin"),
    verb(delete_a_topic, "admin"),
    verb(set_a_cursor, "read"),
    verb(set_a_cursor_over_patterns, "read"),
    verb(remove_a_cursor, "read", "admin"),
    verb(consume_anew, "consume"),
    verb(consume_what_exists, "consume"),
    verb(make_a_subscription, "consume"),
    verb(describe_a_subscription, "consume", "admin"),
    verb(pause_a_subscription, "admin"),
    verb(resume_a_subscription, "admin"),
    verb(move_a_subscription, "admin"),
    verb(remove_a_member, "admin"),
    verb(delete_a_subscription, "admin"),
    verb(list_dead_letters, "consume", "admin", also=("read", "dead")),
    verb(fetch_dead_letters, "read", scope="dead"),
    verb(send_dead_letters_back, "admin"),
    verb(drop_dead_letters, "admin"),
    verb(ask_for_statistics, "read", scope="system"),
    verb(list_connections, "read", scope="system", listeners=("http",)),
    verb(ask_for_metrics, "read", scope="system", listeners=("http",)),
)


async def refusal_of(asking: Awaitable[object]) -> ForbiddenError | None:
    """None: it was allowed, and worked."""
    try:
        await asking
    except ForbiddenError as error:
        return error
    return None


async def set_the_scene(root: Bus) -> None:
    """Everything that the verbs are about, of topics `open/…` and of others."""
    for place in ("open", "closed"):
        for topic in "abc":
            await root.publish(f"{place}/{topic}", topic.encode())
    for name, pattern in (("mine", "open/*"), ("theirs", "closed/*")):
        async with root.consume(name, pattern, deliveries_max=1) as consumer:
            for _ in range(3):
                await (await anext(consumer)).nack(reason="no")
            while len([letter async for letter in root.dead_letters(name)]) < 3:
                await root.ping()
    async with root.consume("many", "open/*", mode="multicast", member="m"):
        pass
    await root.make_subscription("spare", "open/*")
    await root.set_cursor("spare", {"open/a": 1})
    await root.set_cursor("theirs", {"closed/a": 1})


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("pattern", SCOPES)
@pytest.mark.parametrize("right", RIGHTS)
def test_what_a_right_allows(listener: str, right: str, pattern: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        await set_the_scene(await guarded.client("native", *EVERYTHING))
        bus = await guarded.client(listener, f"{right}:{pattern}")
        wrong = []
        for each in VERBS:
            if listener not in each.listeners:
                continue
            expected = each.is_allowed(right, pattern)
            refusal = await refusal_of(each.act(bus))
            is_allowed = refusal is None
            # Within a stream a refusal is an answer, and has no status.
            status = getattr(refusal, "status", STATUS.get(listener))
            assert status == STATUS.get(listener), each.name
            if is_allowed != expected:
                wrong.append(f"{each.name}: {'allowed' if is_allowed else 'refused'}")
        assert not wrong

    run_guarded(scenario, listener)


@pytest.mark.parametrize("listener", LISTENERS)
def test_whoever_has_every_right_can_do_everything(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        bus = await guarded.client(listener, *EVERYTHING)
        await set_the_scene(bus)
        for each in VERBS:
            if listener in each.listeners:
                await each.act(bus)

    run_guarded(scenario, listener)
