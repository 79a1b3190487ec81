"""A real server that gets SIGTERM while clients publish."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from runnel.client import connect
from runnel.errors import ConnectionLostError, Unavailable
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.frames import FrameReader
from runnel.formats.message import Message
from tests.server.load import SMALL, ClientLoad, read_stored
from tests.server.server_process import ServerProcess, running_server
from tests.server.test_sigkill import check_order, check_places

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DRAIN_SECONDS = 5.0
# On a busy machine, the end of Python itself comes on top of draining.
GRACE_SECONDS = 10.0
DRAINING = f"native.drain_timeout={DRAIN_SECONDS:g}s"


async def end_in_time(server: ServerProcess) -> None:
    begin = time.monotonic()
    server.send_signal(signal.SIGTERM)
    assert await server.wait_end() == 0, server.stderr
    assert time.monotonic() - begin < DRAIN_SECONDS + GRACE_SECONDS


def test_sigterm_under_load_answers_what_was_accepted_and_named_publishers_go_on(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, *SMALL, DRAINING) as server:
            load = ClientLoad(server.url, seed=7)
            try:
                await load.subscribe("*")
                await load.subscribe("a", "parts/q")
                await load.publish_named("named-0")
                await load.publish_named("named-1")
                await load.publish_unnamed("unnamed")
                await load.publish_singly("single")
                for wanted in (500, 1500):
                    await load.wait_for(lambda: load.acknowledged >= wanted)  # noqa: B023
                    await end_in_time(server)
                    await server.start()
                await load.end_publishing()
                async with connect(server.url) as bus:
                    stored = await read_stored(bus)
                places = check_places(stored)
                check_order(stored)
                assert load.named.failures == []
                # Every message was answered: it is stored, or it failed.
                acknowledged = load.named.acknowledged | load.unnamed.acknowledged
                assert acknowledged == places
                await load.end_reading(stored)
                for reading in load.readings:
                    expected = {place: stored[place] for place in stored if reading.covers(place)}
                    assert dict(reading.found) == expected, reading.name
            finally:
                await load.close()
        assert "Traceback" not in server.stderr, server.stderr

    asyncio.run(scenario())


def test_sigterm_answers_a_pipeline_tells_its_client_and_stores_exactly_what_it_said(
    tmp_path: Path,
) -> None:
    requests = 3000

    async def scenario() -> None:
        async with running_server(tmp_path, DRAINING) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            frames = [wire.encode(wire.Hello(1, 1))]
            for number in range(2, requests + 2):
                block = Batch.from_messages([Message("a", b"%d" % number)]).pack()
                frames += [wire.encode(wire.Publish(number, "stored"), len(block)), block]
            writer.writelines(frames)
            assembler = FrameReader(2**20)
            heard: list[wire.Answer] = []
            while len(heard) < 50:
                heard += map(wire.decode_answer, assembler.feed(await reader.read(2**16)))
            server.send_signal(signal.SIGTERM)
            while data := await reader.read(2**16):
                heard += map(wire.decode_answer, assembler.feed(data))
            writer.close()
            assert await server.wait_end() == 0, server.stderr
            assert any(isinstance(answer, wire.Closing) for answer in heard)
            published = [answer.id for answer in heard if isinstance(answer, wire.Published)]
            refused = [answer for answer in heard if isinstance(answer, wire.Error)]
            assert all(error.code == "closed" and error.retriable for error in refused)
            answered = published + [error.id for error in refused]
            # Requests begin in order, so those without an answer are the last that were sent.
            assert sorted(answered) == list(range(2, len(answered) + 2))
            await server.start()
            async with connect(server.url) as bus:
                stored = (await read_stored(bus, ["a"]))["a", 0]  # type: ignore[index]
            assert [int(payload) for _, payload in stored] == published

    asyncio.run(scenario())


def test_clients_are_told_that_the_server_is_going(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path) as server, connect(server.url, deadline_s=1) as bus:
            await bus.publish("a", b"1")
            waiting = asyncio.create_task(bus.fetch("a", 2, wait_s=60))
            await bus.ping()  # the broker has the fetch by then
            await end_in_time(server)
            with pytest.raises(Unavailable, match=r"closing|shutting down|refused"):
                await bus.publish("a", b"2")
            waiting.cancel()
            with pytest.raises((asyncio.CancelledError, ConnectionLostError)):
                await waiting

    asyncio.run(scenario())
