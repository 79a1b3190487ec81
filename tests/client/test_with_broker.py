"""The client and a real broker: over a socket, over a pipe in this process, and across a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from runnel.broker.broker import Broker
from runnel.client import Bus, connect, open_bus
from runnel.config import GrpcSettings, HttpSettings, Keep, NativeSettings, Settings, TopicRule
from runnel.errors import OffsetAheadError, UnknownTopicError
from runnel.formats.message import Message
from runnel.platform.clock import SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.protocols.native.native_server import NativeServer
from runnel.security.authenticator import Authenticator
from runnel.server import open_server
from tests.client.running import in_both_loops

TOPICS = (
    TopicRule(match="live/*", keep=Keep.NONE),
    TopicRule(match="memory/*", keep=Keep.MEMORY),
    TopicRule(match="parts/*", partitions=4),
)


def own_directory(directory: Path) -> Path:
    """A new one for each of the loops that a test runs in."""
    return directory / type(asyncio.get_running_loop()).__module__


Opening = Callable[[Path], AbstractAsyncContextManager[Bus]]


def settings_at(directory: Path, *, port: int = 0) -> Settings:
    listen = f"127.0.0.1:{port}"
    return Settings(
        data=str(directory),
        native=NativeSettings(listen=listen),
        http=HttpSettings(listen=None),
        grpc=GrpcSettings(listen=None),
        topics=TOPICS,
    )


@asynccontextmanager
async def over_tcp(directory: Path) -> AsyncIterator[Bus]:
    async with (
        open_server(settings_at(directory)) as server,
        connect(f"runnel://{server.addresses['native']}") as bus,
    ):
        yield bus


@asynccontextmanager
async def in_process(directory: Path) -> AsyncIterator[Bus]:
    settings = settings_at(directory)
    workers = ThreadWorkers(1)
    broker = await Broker.open(
        settings, directory=str(directory), disk=RealDisk(), clock=SystemClock(), workers=workers
    )
    listener = NativeServer(broker, settings, Authenticator.open(settings, broker.clock))

    async def dial(
        protocol_factory: Callable[[], asyncio.BufferedProtocol],
    ) -> asyncio.BaseTransport:
        return listener.connect(protocol_factory())

    try:
        async with open_bus(dial) as bus:
            yield bus
    finally:
        await listener.close()
        await broker.close()
        workers.close()


openings = pytest.mark.parametrize("opening", [over_tcp, in_process])


@openings
def test_messages_published_in_every_way_are_read_in_every_way(
    opening: Opening, tmp_path: Path
) -> None:
    @in_both_loops
    async def scenario() -> None:
        async with opening(own_directory(tmp_path)) as bus:
            topic = "sensors/a"
            await bus.publish(topic, b"0", key=b"k", tags={"unit": "C"})
            async with bus.subscribe("sensors/*", start="earliest") as subscription:
                async with bus.publisher(topic) as publisher:
                    for number in range(1, 3000):
                        publisher.send(b"%d" % number)
                expected = [(n + 1, b"%d" % n) for n in range(3000)]
                live = [await anext(subscription) for _ in range(3000)]
                assert [(m.offset, m.payload) for m in live] == expected
                assert (live[0].key, dict(live[0].tags)) == (b"k", {"unit": "C"})
            fetched: list[Message] = []
            offset = 1
            while len(fetched) < 3000:
                page = await bus.fetch(topic, offset)
                fetched += page.messages
                offset = page.next_offset
            assert [(m.offset, m.payload) for m in fetched] == expected
            with pytest.raises(OffsetAheadError):
                await bus.fetch(topic, 9999)
            with pytest.raises(UnknownTopicError):
                await bus.fetch("sensors/none")
            async with bus.subscribe(topic, start="last") as subscription:
                assert (await anext(subscription)).payload == b"2999"

    scenario()


async def live_through_a_restart(directory: Path) -> None:
    """A broker goes and comes back while a named publisher sends and subscriptions read."""
    async with open_server(settings_at(directory)) as server:
        port = int(server.addresses["native"].rpartition(":")[2])
        bus = await connect(f"runnel://127.0.0.1:{port}")
        by_name = await bus.subscribe("a", start="earliest").__aenter__()
        by_pattern = await bus.subscribe("a*", start="earliest").__aenter__()
        publisher = await bus.publisher("a", name="p", batch_messages_max=50).__aenter__()
        for number in range(500):
            publisher.send(b"%d" % number)
        seen = {
            sub: [(await anext(sub)).payload for _ in range(100)] for sub in (by_name, by_pattern)
        }
        for number in range(500, 1000):
            publisher.send(b"%d" % number)
    for number in range(1000, 1500):
        publisher.send(b"%d" % number)
    async with open_server(settings_at(directory, port=port)):
        await publisher.flush()
        expected = [b"%d" % number for number in range(1500)]
        for subscription, payloads in seen.items():
            payloads += [(await anext(subscription)).payload for _ in range(1400)]
            assert payloads == expected
            assert not subscription.gaps
        await bus.close()


def test_a_restart_repeats_and_loses_nothing(tmp_path: Path) -> None:
    @in_both_loops
    async def scenario() -> None:
        await live_through_a_restart(own_directory(tmp_path))

    scenario()
