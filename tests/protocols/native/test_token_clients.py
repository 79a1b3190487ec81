"""The Python client with tokens: it sends them, and reports a revocation to every waiting call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import runnel
from runnel.client import Opening
from runnel.client.connection import Identity
from runnel.config import (
    Authentication,
    LogSettings,
    NativeSettings,
    SecuritySettings,
    Settings,
)
from runnel.errors import ForbiddenError, SettingsError, UnauthenticatedError, Unavailable
from tests.security.keyring import Keyring

LOG = LogSettings(allocate_bytes=0, disk_reserve_bytes=0)
SECONDS_MAX = 30


class Scene:
    """A broker that asks for tokens, at a socket."""

    def __init__(self, keys: Keyring, broker: runnel.Broker, url: str) -> None:
        self.keys = keys
        self.broker = broker
        self.url = url

    def connect(self, *allow: str, name: str = "tester", deadline_s: float | None = 20) -> Opening:
        text = self.keys.texts.get(name) or self.keys.add(name, *allow)
        return runnel.connect(self.url, token=text, deadline_s=deadline_s)


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Scene]:
    keys = Keyring(directory)
    settings = keys.settings(
        Settings(data="memory:", log=LOG, native=NativeSettings(listen="127.0.0.1:0"))
    )
    async with runnel.Broker.open(settings) as broker, broker.listen() as url:
        yield Scene(keys, broker, url)


def scenario(test: Callable[[Scene], Awaitable[None]]) -> Callable[[Path], None]:
    @functools.wraps(test)
    def run(tmp_path: Path) -> None:
        async def main() -> None:
            async with asyncio.timeout(SECONDS_MAX), opened(tmp_path) as scene:
                await test(scene)

        asyncio.run(main())

    del run.__wrapped__  # what pytest would take the names of fixtures from
    return run


@scenario
async def test_a_client_does_what_its_token_allows_and_nothing_else(scene: Scene) -> None:
    async with scene.connect("publish:a/*", "read:a/*", "consume:a/*") as bus:
        await bus.publish("a/1", b"1")
        assert [message.payload for message in (await bus.fetch("a/1", 1)).messages] == [b"1"]
        async with bus.consume("work", "a/*") as consumer:
            async for item in consumer:
                await consumer.ack(item)
                break
        with pytest.raises(ForbiddenError, match="token 'tester' has no right to topic 'b/1'"):
            await bus.publish("b/1", b"1")
        with pytest.raises(ForbiddenError, match="no right to read for pattern"):
            async for _ in bus.subscribe("*"):
                pass
        async with bus.publisher() as publisher:
            publisher.send(b"1", "b/1")
            with pytest.raises(ForbiddenError):
                await publisher.flush()
        await bus.publish("a/1", b"2")  # over the same connection as ever


@scenario
async def test_within_the_process_no_token_is_needed(scene: Scene) -> None:
    async with scene.broker.connect() as bus:
        await bus.publish("!dead/x", b"1")


@scenario
async def test_without_a_token_or_with_a_wrong_one_connecting_fails_clearly(scene: Scene) -> None:
    for token, problem in ((None, "none was shown"), ("runnel_1_x", "not known here")):
        with pytest.raises(UnauthenticatedError, match=problem):
            await runnel.connect(scene.url, token=token)


@scenario
async def test_one_connection_too_many_is_told_so(scene: Scene) -> None:
    text = scene.keys.add("few", "read:*", connections_max=1)
    async with runnel.connect(scene.url, token=text):
        with pytest.raises(Unavailable, match="token 'few' has 1 connections or calls under way"):
            await runnel.connect(scene.url, token=text)
    async with runnel.connect(scene.url, token=text):
        pass


@scenario
async def test_whoever_waits_hears_that_its_token_was_revoked(scene: Scene) -> None:
    """All callers, at once, although none of them has a deadline."""
    async with scene.connect("publish:*", "read:*", "consume:*", deadline_s=None) as bus:
        begun = asyncio.Barrier(6)

        async def subscribe() -> None:
            subscription = bus.subscribe("a/*")
            await subscription.open()
            await begun.wait()
            async for _ in subscription:
                pass

        async def consume() -> None:
            async with bus.consume("work", "a/*") as consumer:
                await begun.wait()
                async for _ in consumer:
                    pass

        async def fetch() -> None:
            await begun.wait()
            while True:
                await bus.fetch("a/1", 2, wait_s=20)

        async def publish(name: str | None) -> None:
            async with bus.publisher("b/1", name=name) as publisher:
                await begun.wait()
                while True:
                    publisher.send(b"1")
                    await publisher.flush()

        await bus.publish("a/1", b"1")
        tasks = [
            asyncio.ensure_future(each)
            for each in (subscribe(), consume(), fetch(), publish(None), publish("p"))
        ]
        await begun.wait()
        scene.keys.revoke("tester")
        for task in tasks:
            with pytest.raises(
                (UnauthenticatedError, Unavailable), match="token 'tester' was revoked"
            ):
                await task
        with pytest.raises(UnauthenticatedError, match="token 'tester' was revoked"):
            await bus.publish("a/1", b"1")
        with pytest.raises(UnauthenticatedError, match="token 'tester' was revoked"):
            async for _ in bus.subscribe("a/*"):
                pass


@scenario
async def test_a_client_whose_rights_are_changed_comes_again_by_itself(scene: Scene) -> None:
    async with scene.connect("publish:a/*", "read:a/*") as bus:
        await bus.publish("a/1", b"1")
        subscription = bus.subscribe("a/*", start="earliest")
        messages = aiter(subscription)
        assert (await anext(messages)).payload == b"1"
        scene.keys.change("tester", "publish:b/*", "read:a/*")
        while True:
            try:
                await bus.publish("b/1", b"2")
                break
            except ForbiddenError:
                await asyncio.sleep(0.01)
        async with scene.broker.connect() as other:
            await other.publish("a/1", b"3")
        assert (await anext(messages)).payload == b"3"
        await subscription.close()


def test_the_token_is_that_of_the_variable_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path) as scene:
            monkeypatch.setenv("RUNNEL_TOKEN", scene.keys.add("ours", "publish:a") + "\n")
            async with runnel.connect(scene.url) as bus:
                await bus.publish("a", b"1")
            other = scene.keys.add("other", "publish:b")
            async with runnel.connect(scene.url, token=other) as bus:
                await bus.publish("b", b"1")

            def publish_blocking() -> None:
                with runnel.connect_blocking(scene.url) as blocking:
                    blocking.publish("a", b"2")

            await asyncio.to_thread(publish_blocking)

    asyncio.run(main())


def test_a_client_shows_its_token_to_nobody_else() -> None:
    identity = Identity(client="me", token="runnel_1_secret")
    assert "secret" not in repr(identity)
    assert "secret" not in repr(runnel.connect("runnel://127.0.0.1:1", token="runnel_1_secret"))


def test_a_broker_in_memory_needs_a_place_for_tokens() -> None:
    async def main() -> None:
        asking = SecuritySettings(authentication=Authentication.TOKEN)
        async with runnel.Broker.open(Settings(data="memory:", security=asking)):
            pass

    with pytest.raises(SettingsError, match=r"set security\.tokens_file as well"):
        asyncio.run(main())
