"""Acknowledged work on a real server whose disk is full for a while.

Publishing leaves `log.disk_reserve_bytes` free, and acknowledgements are written there; they
wait only if other programs have taken that space, too. The space is a limit on the size of the server's files.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from runnel.client import Bus, Consumer, Work, connect
from runnel.errors import DiskFullError
from tests.server.server_process import ServerProcess, running_server
from tests.server.test_full_disk import SMALL_FILES, allow_files_of, fill

pytestmark = pytest.mark.slow

MESSAGES = 400
NO_ROOM_TO_PUBLISH = "log.disk_reserve_bytes=1000000TiB"


async def publish(bus: Bus, count: int) -> None:
    async with bus.publisher("a") as publisher:
        for number in range(1, count + 1):
            publisher.send(b"%d" % number)


async def take(consumer: Consumer, count: int) -> list[Work]:
    return [await anext(consumer) for _ in range(count)]


def stop_growth(server: ServerProcess) -> None:
    """No file of the server may be larger than its state journal is now."""
    (state,) = (server.directory / "data").glob("**/state/*")
    allow_files_of(server, state.stat().st_size)


async def ack_one_by_one(works: Sequence[Work]) -> None:
    """Acknowledge each with its own record, and wait until it is stored."""
    for work in works:
        await work.ack(stored=True)


def test_acknowledging_goes_on_while_there_is_no_room_to_publish(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path) as server, connect(server.url) as bus:
            await publish(bus, 3)
            await server.stop()
        async with (
            running_server(tmp_path, NO_ROOM_TO_PUBLISH) as server,
            connect(server.url) as bus,
        ):
            with pytest.raises(DiskFullError, match="disk_reserve_bytes"):
                await fill(bus, deadline_s=0.5)
            async with bus.consume("s", "a", deliveries_max=1) as consumer:
                first, second, third = await take(consumer, 3)
                await consumer.ack(first, third)
                await consumer.flush()
                await second.nack(reason="its dead letter cannot be stored")
            await server.stop()
        async with running_server(tmp_path) as server, connect(server.url) as bus:
            async with bus.consume("s"):  # now there is room for the dead letter
                while (await bus.subscription("s")).members[0].backlog:
                    await bus.ping()
            letters = [letter.payload async for letter in bus.dead_letters("s")]
            assert letters == [b"2"]
            await server.stop()

    asyncio.run(scenario())


def test_acks_that_find_no_room_at_all_are_told_so_and_stored_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            running_server(tmp_path, *SMALL_FILES) as server,
            connect(server.url) as bus,
            bus.consume("s", "a", window_messages=MESSAGES) as consumer,
        ):
            await publish(bus, MESSAGES + 50)
            works = await take(consumer, MESSAGES)
            await ack_one_by_one(works[:50])
            stop_growth(server)
            with pytest.raises(DiskFullError) as refused:
                await works[50].ack(stored=True)
            assert refused.value.retriable
            await consumer.ack(*works[51:200])  # does not wait
            with pytest.raises(DiskFullError):
                await consumer.flush()
            with pytest.raises(DiskFullError):  # each flush fails again
                await consumer.flush()
            with pytest.raises(DiskFullError):
                await fill(bus, "b", deadline_s=0.2)
            works += await take(consumer, 50)  # deliveries continue: acks make room in the window
            allow_files_of(server, resource.RLIM_INFINITY)
            await consumer.flush()
            server.kill()  # only stored acks survive
            await server.start()
            again = await take(consumer, len(works) - 200)
            assert [work.offset for work in again] == [work.offset for work in works[200:]]
            assert all(work.failures == 0 for work in again)
            await consumer.ack(*again, stored=True)
            assert (await bus.subscription("s")).members[0].backlog == 0

    asyncio.run(scenario())


def test_server_without_room_for_acks_ends_in_time_and_delivers_again_what_it_could_not_store(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, *SMALL_FILES) as server, connect(server.url) as bus:
            async with bus.consume("s", "a", window_messages=MESSAGES) as consumer:
                await publish(bus, MESSAGES)
                works = await take(consumer, MESSAGES)
                await ack_one_by_one(works[:50])
                stop_growth(server)
                await consumer.ack(*works[50:])
                with pytest.raises(DiskFullError):
                    await consumer.flush()
                server.send_signal(signal.SIGTERM)
                assert await server.wait_end() == 0, server.stderr
            await server.start()
            async with bus.consume("s", window_messages=MESSAGES) as consumer:
                again = await take(consumer, MESSAGES - 50)
                assert [work.offset for work in again] == list(range(51, MESSAGES + 1))
                assert all(work.failures == 0 for work in again)
                await consumer.ack(*again, stored=True)
            await server.stop()

    asyncio.run(scenario())
