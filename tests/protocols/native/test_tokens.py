"""Tokens at the native listener: hello carries one, which decides the connection's rights and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runnel.config import NativeSettings, Settings
from runnel.errors import BusyError, ForbiddenError, UnauthenticatedError
from runnel.formats import wire
from runnel.formats import work_heads as work
from runnel.protocols.native.native_server import NativeServer
from runnel.protocols.native.pipe import connect_pipe
from runnel.security.authenticator import Authenticator
from tests.protocols.native.fake_broker import FakeBroker
from tests.protocols.native.talker import (
    HELLO,
    Talker,
    in_loop,
    packed,
    publish,
    subscribe,
    turn,
    until,
)
from tests.security.keyring import Keyring

SECOND_NS = 1_000_000_000


def hello(token: str | None) -> wire.Hello:
    return wire.Hello(1, 1, (), "test", token)


class Scene:
    """A native server that asks for tokens, with a fake broker, and clients that connect through pipes."""

    def __init__(
        self, directory: Path, native: NativeSettings | None, connections_max: int
    ) -> None:
        self.broker = FakeBroker()
        self.keys = Keyring(directory)
        base = Settings(native=native or NativeSettings())
        settings = self.keys.settings(base, connections_max=connections_max)
        self.authenticator = Authenticator.open(settings, self.broker.clock)
        self.server = NativeServer(self.broker.as_broker, settings, self.authenticator)

    def connect(self) -> Talker:
        talker = Talker()
        connect_pipe(asyncio.get_running_loop(), self.server.new_connection(), talker)
        return talker

    async def greeted(self, *allow: str, name: str = "tester") -> Talker:
        talker = self.connect()
        text = self.keys.texts.get(name) or self.keys.add(name, *allow)
        await talker.ask(hello(text), wire.Welcome)
        return talker

    async def pass_time(self, seconds: float, step_seconds: float = 0.05) -> None:
        for _ in range(round(seconds / step_seconds)):
            self.broker.clock.advance(round(step_seconds * SECOND_NS))
            await turn()


@asynccontextmanager
async def opened(
    directory: Path, native: NativeSettings | None = None, connections_max: int = 1000
) -> AsyncIterator[Scene]:
    scene = Scene(directory, native, connections_max)
    scene.authenticator.start()
    await turn()
    try:
        yield scene
    finally:
        await scene.server.close()
        await scene.authenticator.close()
        assert not scene.server.connections
        assert not scene.server.tasks


# --- Coming in ---


@in_loop
async def test_whoever_shows_a_token_is_let_in_at_once_and_named_in_the_metrics(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as scene:
        await scene.greeted("publish:*", name="gateway")
        (row,) = scene.broker.rows()
        assert (row.token, row.client) == ("gateway", "test")


@in_loop
async def test_nobody_comes_in_without_a_token_or_with_a_wrong_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        right = scene.keys.add("a", "publish:*")
        for wrong in (None, "", "x", right[:-1], right.upper()):
            talker = scene.connect()
            talker.say(hello(wrong), publish(2, b"sneaked in"), wire.Ping(3))
            await scene.pass_time(6)
            (answer,) = await talker.hear_end()
            assert isinstance(answer, wire.Error)
            assert (answer.id, answer.code, answer.retriable) == (
                1,
                UnauthenticatedError.code,
                False,
            )
        assert scene.broker.published == []
        assert scene.broker.metrics.counters.connections_refused == 5
        assert scene.broker.metrics.counters.connections_opened == 0


@in_loop
async def test_a_wrong_token_is_answered_late_and_a_right_one_from_there_at_once(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as scene:
        right = scene.keys.add("a", "publish:*")
        for wait in (0.1, 0.2, 0.4):
            talker = scene.connect()
            talker.say(hello("wrong"))
            await scene.pass_time(wait - 0.05)
            assert not talker.answers
            await (other := scene.connect()).ask(hello(right), wire.Welcome)
            other.transport.close()
            await scene.pass_time(0.1)
            assert len(talker.answers) == 1


@in_loop
async def test_a_missing_token_is_answered_at_once_however_often(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        for _ in range(10):
            talker = scene.connect()
            talker.say(hello(None))
            (answer,) = await talker.hear_end()
            assert isinstance(answer, wire.Error)
            assert "none was shown" in answer.text
        wrong = scene.connect()
        wrong.say(hello("wrong"))
        await scene.pass_time(0.15)
        await wrong.hear_end()  # the first from there, and no later than a first one


@in_loop
async def test_a_penalty_is_no_silence(tmp_path: Path) -> None:
    """It may last longer than a client is given to say hello, and is not called a missing hello."""
    quick = NativeSettings(handshake_timeout_ns=SECOND_NS // 10, idle_timeout_ns=SECOND_NS // 10)
    async with opened(tmp_path, quick) as scene:
        for _ in range(8):
            talker = scene.connect()
            talker.say(hello("wrong"))
            await scene.pass_time(6)
            (answer,) = await talker.hear_end()
            assert isinstance(answer, wire.Error)
            assert answer.code == UnauthenticatedError.code


@in_loop
async def test_who_leaves_during_a_penalty_leaves_nothing_behind(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        talker = scene.connect()
        talker.say(hello("wrong"))
        await turn()
        talker.transport.abort()
        await until(lambda: not scene.server.connections)
        await scene.pass_time(1)
        assert not scene.server.tasks


@in_loop
async def test_of_many_wrong_ones_at_a_time_few_wait(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        talkers = [scene.connect() for _ in range(100)]
        for talker in talkers:
            talker.say(hello("wrong"))
        await turn(50)
        assert sum(bool(talker.answers) for talker in talkers) == 92
        assert len(scene.server.tasks) == 8


@in_loop
async def test_draining_does_not_wait_for_penalties(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        talker = scene.connect()
        talker.say(hello("wrong"))
        await turn()
        drained = asyncio.ensure_future(scene.server.drain())
        (answer,) = await talker.hear_end()
        assert isinstance(answer, wire.Error)
        assert answer.code == "closed"
        assert await drained


@in_loop
async def test_hello_is_tried_once(tmp_path: Path) -> None:
    async with opened(tmp_path, connections_max=1) as scene:
        text = scene.keys.add("a", "publish:*")
        await scene.greeted(name="a")
        talker = scene.connect()
        talker.say(hello(text), hello(text))
        (answer,) = await talker.hear_end()
        assert isinstance(answer, wire.Error)
        assert (answer.id, answer.code) == (1, "limit_exceeded")
        assert "token 'a' has 1 connections or calls under way" in answer.text


@in_loop
async def test_a_connection_that_has_ended_is_counted_no_more(tmp_path: Path) -> None:
    async with opened(tmp_path, connections_max=1) as scene:
        leaving: list[Callable[[Talker], None]] = [
            lambda talker: talker.transport.abort(),
            lambda talker: talker.transport.close(),
            lambda talker: talker.say(b"\xff" * 64),
        ]
        for leave in leaving:
            talker = await scene.greeted("publish:*", name="a")
            leave(talker)
            await talker.hear_end()
            await until(lambda: not scene.server.connections)


@in_loop
async def test_within_the_process_no_token_is_needed(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        talker = Talker()
        scene.server.connect(talker)
        await talker.ask(HELLO, wire.Welcome)
        await talker.ask(publish(2, b"1", topic="!dead/x"), wire.Published)


# --- Rights ---

REQUESTS: dict[str, Callable[[int], bytes]] = {
    "publish": lambda number: publish(number, b"1", topic="b"),
    "send": lambda number: packed(wire.Send(number, None, "b", b"1")),
    "producer": lambda number: packed(wire.Producer(number, "p")),
    "routes": lambda number: packed(wire.Routes(number, ("b",))),
    "fetch": lambda number: packed(wire.Fetch(number, "b", offset=1)),
    "shards": lambda number: packed(wire.Shards(number, ("b",))),
    "fetch_shard": lambda number: packed(wire.FetchShard(number, "main", 0, 1, patterns=("b",))),
    "subscribe": lambda number: subscribe(number, number, "b"),
    "describe": lambda number: packed(wire.DescribeTopic(number, "b")),
    "delete": lambda number: packed(wire.DeleteTopic(number, "b")),
    "purge": lambda number: packed(wire.PurgeTopic(number, "b")),
    "set_cursor": lambda number: packed(
        wire.SetCursor(number, "c", (wire.CursorPlace("b", 0, 1),))
    ),
    "statistics": lambda number: packed(wire.Statistics(number)),
    "metrics": lambda number: packed(wire.MetricsHead(number)),
    "consume": lambda number: packed(work.Consume(number, number, "s", ("b",), "shared")),
    "make": lambda number: packed(work.MakeSubscription(number, "s", ("b",), "shared")),
    "delete_subscription": lambda number: packed(work.DeleteSubscription(number, "s")),
    "pause": lambda number: packed(work.PauseSubscription(number, "s", True)),
    "move": lambda number: packed(work.MoveSubscription(number, "s", wire.Start("latest"))),
    "remove_member": lambda number: packed(work.RemoveMember(number, "s", "m")),
    "dead": lambda number: packed(work.DeadLettersHead(number, "s")),
    "settle": lambda number: packed(work.SettleDead(number, "s", True, is_all=True)),
    "subscriptions": lambda number: packed(work.ListSubscriptions(number, "s")),
}


@in_loop
async def test_each_request_without_its_right_is_answered_forbidden_and_the_connection_goes_on(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as scene:
        scene.broker.consumer_groups.patterns = {"s": ["b"]}
        talker = await scene.greeted("read:a", "consume:a")
        for number, (name, request) in enumerate(REQUESTS.items(), 2):
            answer = await talker.ask(request(number), wire.Error)
            assert (name, answer.id, answer.code) == (name, number, ForbiddenError.code)
            assert "token 'tester' has no right to" in answer.text
        await talker.ask(wire.Ping(1000), wire.Pong)
        assert scene.broker.published == []
        assert scene.broker.subscriptions == []
        assert scene.broker.topics_deleted == []
        assert scene.broker.consumer_groups.consumers == []
        assert scene.broker.consumer_groups.verbs == []


@in_loop
async def test_what_is_not_answered_is_not_done_either(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        talker = await scene.greeted("publish:a")
        talker.say(publish(2, b"1", level="none", topic="b"), publish(3, b"2", level="none"))
        error = await talker.hear(wire.Error)
        assert (error.id, error.code) == (2, ForbiddenError.code)
        await talker.ask(wire.Ping(4), wire.Pong)
        assert scene.broker.published == [b"2"]


# --- The token's end ---


@in_loop
async def test_a_revoked_token_ends_its_connections_at_once_and_no_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        first, second = await scene.greeted("read:*", name="a"), await scene.greeted(name="a")
        other = await scene.greeted("read:*", name="b")
        await first.ask(subscribe(2, 1, "x"), wire.Subscribed)
        second.say(wire.Fetch(2, "x", offset=1, wait_ms=60_000))
        await turn()
        scene.keys.revoke("a")
        await scene.pass_time(0.3)
        for talker in (first, second):
            *_, answer = await talker.hear_end()
            assert isinstance(answer, wire.Error)
            assert (answer.id, answer.code) == (0, UnauthenticatedError.code)
            assert answer.text == "token 'a' was revoked"
        assert scene.broker.subscriptions[0].calls[-1] == "close"
        await other.ask(wire.Ping(2), wire.Pong)
        assert [row.token for row in scene.broker.rows()] == ["b"]


@in_loop
async def test_nothing_of_a_revoked_token_is_begun_any_more(tmp_path: Path) -> None:
    """Not what waits for room either: it comes back to life with the room, and the token does not."""
    async with opened(tmp_path) as scene:
        talker = await scene.greeted("publish:*")
        scene.broker.refusals.append(BusyError("full"))
        talker.say(publish(2, b"waits"), publish(3, b"behind it"))
        await until(lambda: scene.broker.room_waits)
        scene.keys.revoke("tester")
        await scene.pass_time(0.3)
        scene.broker.room.set()
        await turn()
        assert scene.broker.published == []
        *_, answer = await talker.hear_end()
        assert isinstance(answer, wire.Error)
        assert answer.code == UnauthenticatedError.code


@in_loop
async def test_work_of_a_revoked_token_goes_back_without_having_failed(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        talker = await scene.greeted("consume:*")
        scene.broker.consumer_groups.patterns = {"s": ["a"]}
        await talker.ask(work.Consume(2, 1, "s", ("a",), "shared"), work.Consuming)
        scene.keys.revoke("tester")
        await scene.pass_time(0.3)
        await talker.hear_end()
        (consumer,) = scene.broker.consumer_groups.consumers
        assert consumer.calls[-1] == ("close", True)


@in_loop
async def test_changed_rights_ask_a_client_to_come_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        talker = await scene.greeted("publish:a")
        await talker.ask(publish(2, b"1", topic="b"), wire.Error)
        scene.keys.change("tester", "publish:b")
        await scene.pass_time(0.3)
        *_, answer = await talker.hear_end()
        assert isinstance(answer, wire.Error)
        assert (answer.id, answer.code, answer.retriable) == (0, "closed", True)
        talker = await scene.greeted()
        await talker.ask(publish(2, b"1", topic="b"), wire.Published)
        await talker.ask(publish(3, b"1", topic="a"), wire.Error)


@in_loop
async def test_no_secret_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with opened(tmp_path) as scene:
        right = scene.keys.add("a", "read:a")
        talker = await scene.greeted(name="a")
        talker.say(subscribe(2, 1, "b"), wire.Ping(3))
        wrong = scene.connect()
        wrong.say(hello(right[:-1]))
        await scene.pass_time(1)
        scene.keys.revoke("a")
        await scene.pass_time(1)
        told = [*await talker.hear_end(), *await wrong.hear_end(), *scene.broker.rows()]
        (secret,) = scene.keys.secrets
        for text in (caplog.text, repr(told), repr(scene.authenticator), repr(vars(scene.server))):
            assert secret[:-1] not in text
