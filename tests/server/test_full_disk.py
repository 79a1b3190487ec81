"""A real server whose disk is full for a while, under clients that continue.

The test limits the size of the server's files: the system answers as for a full disk, and the limit can change while
the server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from pathlib import Path

import pytest

from runnel.client import Bus, connect
from runnel.errors import ClosedError, DiskFullError, TimeoutExpiredError
from tests.server.server_process import ServerProcess, running_server

pytestmark = pytest.mark.slow

SMALL_FILES = ("log.allocate_bytes=0", "log.disk_reserve_bytes=0")
PAYLOAD = b"." * 1000


def allow_files_of(server: ServerProcess, size: int) -> None:
    _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, hard))


async def fill(bus: Bus, topic: str = "a", *, deadline_s: float) -> None:
    """Publish until it is refused. Messages under way at the deadline may be stored or not."""
    publisher = bus.publisher(topic, deadline_s=deadline_s)
    try:
        while True:
            publisher.send(PAYLOAD)
            with contextlib.suppress(TimeoutExpiredError):
                await publisher.flush()
    finally:
        publisher.end(ClosedError("enough"))


def test_full_disk_is_a_retriable_error_and_publishing_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with (
            running_server(tmp_path, *SMALL_FILES) as server,
            connect(server.url) as bus,
            bus.subscribe("a") as subscription,
        ):
            await bus.publish("a", b"before")
            allow_files_of(server, 64 * 1024)
            with pytest.raises(DiskFullError) as refused:  # retried until its deadline
                await fill(bus, deadline_s=0.5)
            assert refused.value.retriable
            # Reads still work, and a publisher that does not wait for receipts waits for room.
            assert (await bus.fetch("a", 1)).messages[0].payload == b"before"
            async with (
                bus.publisher("a", name="named") as named,
                bus.publisher("a") as unnamed,
            ):
                for number in range(50):
                    named.send(b"named:%d" % number + PAYLOAD)
                    unnamed.send(b"unnamed:%d" % number + PAYLOAD)
                with pytest.raises(DiskFullError):  # also while others wait
                    await fill(bus, deadline_s=0.5)
                assert named.buffered_bytes > 0
                assert unnamed.buffered_bytes > 0
                allow_files_of(server, resource.RLIM_INFINITY)
                await named.flush()
                await unnamed.flush()
            end = (await bus.topic("a")).partitions[0].next_offset
            received = [await anext(subscription) for _ in range(1, end)]
            assert [message.offset for message in received] == list(range(1, end))
            names = [message.payload.rstrip(b".") for message in received]
            for name in (b"named", b"unnamed"):
                numbers = [each for each in names if each.startswith(name + b":")]
                assert numbers == [name + b":%d" % number for number in range(50)]
            await server.stop()

    asyncio.run(scenario())


def test_server_started_without_its_reserve_reads_and_refuses_until_it_has_it(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path) as server, connect(server.url) as bus:
            await bus.publish("a", b"1")
            await server.stop()
        async with (
            running_server(tmp_path, "log.disk_reserve_bytes=1000000TiB") as server,
            connect(server.url) as bus,
        ):
            with pytest.raises(DiskFullError, match="disk_reserve_bytes"):
                await fill(bus, deadline_s=0.5)
            assert (await bus.fetch("a", 1)).messages[0].payload == b"1"
            await server.stop()
        async with running_server(tmp_path) as server, connect(server.url) as bus:
            assert (await bus.publish("a", b"2")).offset == 2

    asyncio.run(scenario())
