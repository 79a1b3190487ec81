"""A cluster of three nodes, and clients that know nothing of nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from msgspec.structs import replace

from runnel.client import Bus
from runnel.config import HttpSettings, Keep, LogSettings, Settings, TopicRule
from runnel.protocols.http.listener import HttpListener
from runnel.testing import open_cluster
from runnel.testing.cluster import EmbeddedCluster, EmbeddedNode

RULES = (
    TopicRule(match="m/*", keep=Keep.MEMORY, journal="memory"),
    TopicRule(match="n/*", keep=Keep.NONE),
    TopicRule(match="p/*", partitions=8),
)
SETTINGS = Settings(topics=RULES, log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0))


def scenario(run: Callable[[EmbeddedCluster], Awaitable[None]]) -> Callable[[], None]:
    """A test with a cluster of its own."""

    def test() -> None:
        async def whole() -> None:
            async with asyncio.timeout(60), open_cluster(3, SETTINGS) as cluster:
                await run(cluster)

        asyncio.run(whole())

    test.__name__ = run.__name__
    test.__doc__ = run.__doc__
    return test


async def other_than_owner(cluster: EmbeddedCluster, topic: str) -> EmbeddedNode:
    """A node that does not serve the topic."""
    owner = cluster.owner(cluster.shard_of(topic))
    return next(node for node in cluster.nodes if node is not owner)


async def http_of(node: EmbeddedNode, opened: AsyncExitStack) -> str:
    """The URL of an HTTP listener at this node."""
    settings = replace(SETTINGS, http=HttpSettings(listen="127.0.0.1:0"))
    broker = node.broker
    listener = await HttpListener.open(
        broker._core, broker._authenticator, settings, broker.make_access
    )
    opened.push_async_callback(listener.close)
    return f"http://{listener.address}"


class Basic:
    """A client that stays with one node: it says nothing of parts in its hello, and follows no routes."""

    def __init__(self, node: EmbeddedNode) -> None:
        self._opening = node.connect()
        self._opening._identity = replace(self._opening._identity, features=())

    async def __aenter__(self) -> Bus:
        bus = await self._opening
        home = bus._router.home
        vars(bus._router)["link"] = lambda _address: home
        self._bus = bus
        return bus

    async def __aexit__(self, *_: object) -> None:
        await self._bus.close()
