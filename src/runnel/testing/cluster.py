"""Several brokers over one set of topics, in one event loop and a temporary directory: for tests of programs.

async with open_cluster(nodes=3) as cluster, cluster.connect() as bus:
    ...
    await cluster.move(shard, "node-2")
    await cluster.kill("node-1")
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import msgspec

from runnel.client import Opening, connect
from runnel.cluster import ClusterNode
from runnel.cluster.memory import MemoryCluster
from runnel.config import LogSettings, Settings
from runnel.embedded import NodeBroker, open_log
from runnel.log.log import ShardId
from runnel.log.metadata.shared_records import SharedRecords
from runnel.platform.clock import Clock, SystemClock
from runnel.testing.clock import VirtualClock

_SMALL: Final = LogSettings(allocate_bytes=0)


class EmbeddedNode:
    """One broker of a `EmbeddedCluster`, which may be started again after it was killed or stopped."""

    def __init__(self, name: str, cluster: EmbeddedCluster) -> None:
        self.name: Final = name
        self._cluster = cluster
        self._stack: AsyncExitStack | None = None
        self._broker: NodeBroker
        self._node: ClusterNode
        self.url = ""
        """Where clients of any process reach it, while it runs: runnel://host:port."""

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not stopped or killed since."""
        return self._stack is not None

    @property
    def broker(self) -> NodeBroker:
        """The broker of this node, while it runs."""
        if self._stack is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._broker

    @property
    def node(self) -> ClusterNode:
        """Its part in the cluster, for tests of Runnel itself."""
        return self._node

    def connect(self, *, name: str | None = None) -> Opening:
        """Connect a client to this node: `async with cluster.nodes[0].connect() as bus`."""
        return connect(self.url, name=name)

    def shards(self) -> list[ShardId]:
        """The shards that this node serves now."""
        return self._node.served()

    async def start(self) -> None:
        """Begin a life of this node, which joins the others."""
        cluster = self._cluster
        self._node = ClusterNode(
            cluster.state.state(self.name),
            cluster.records.member(self.name),
            SystemClock(),
            settle_ns=0,
        )
        settings = msgspec.structs.replace(
            cluster.settings,
            data=cluster.directory,
            cluster=msgspec.structs.replace(cluster.settings.cluster, node=self.name),
        )
        async with AsyncExitStack() as stack:
            opening = NodeBroker.open_node(settings, self._node, cluster.clock)
            self._broker = await stack.enter_async_context(opening)
            self.url = await stack.enter_async_context(self._broker.listen())
            await self._node.start(self.url.removeprefix("runnel://"))
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """End in good order: give up all shards, leave the cluster, and close."""
        if self._stack is not None:
            await self._node.stop()
            stack, self._stack = self._stack, None
            await stack.aclose()

    async def kill(self) -> None:
        """End without a good end. What was not stored is lost; the others learn of it at once."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            self._broker.abort_connections()
            await self._node.abandon()
            dead = self._cluster.state.view.nodes[self.name]
            await self._cluster.observer.declare_dead(self.name, dead.incarnation)
            await stack.aclose()


class EmbeddedCluster:
    """Brokers that serve one directory together. Make one with `open_cluster`."""

    def __init__(self, directory: str, settings: Settings, clock: Clock, nodes: int) -> None:
        self.directory: Final = directory
        self.settings = settings
        self.clock: Final = clock
        self.state: Final = MemoryCluster(SystemClock())
        self.observer: Final = self.state.state("observer")  # as the parent of several processes
        self.records: Final = SharedRecords()
        self.nodes: Final = [EmbeddedNode(f"node-{number + 1}", self) for number in range(nodes)]

    def node(self, name: str) -> EmbeddedNode:
        """The node of this name: `node-1`, `node-2` and so on."""
        return next(node for node in self.nodes if node.name == name)

    def connect(self, *, name: str | None = None) -> Opening:
        """Connect a client to the first node that runs."""
        return next(node for node in self.nodes if node.is_running).connect(name=name)

    def owner(self, shard: ShardId) -> EmbeddedNode | None:
        """The node that serves a shard now."""
        return next((n for n in self.nodes if n.is_running and shard in n.shards()), None)

    def shard_of(self, topic: str, partition: int = 0) -> ShardId:
        """The shard that a topic-partition lies in, or will."""
        running = next(node for node in self.nodes if node.is_running)
        owner = running.broker.routes([topic])[0].owners[partition]
        return ShardId(owner.journal, owner.shard)

    async def move(self, shard: ShardId, node: str) -> None:
        """Move a shard to a node, as planned, and wait until it is served there."""
        await self.observer.want(shard, node, "a test")
        await self.until(lambda: shard in self.node(node).shards())

    async def kill(self, node: str) -> None:
        """End a node as a process does that is killed."""
        await self.node(node).kill()

    async def stop(self, node: str) -> None:
        """End a node in good order."""
        await self.node(node).stop()

    async def start(self, node: str) -> None:
        """Start a node again."""
        await self.node(node).start()

    async def drain(self, node: str) -> None:
        """Let a node give up all its shards. It runs on, without shards."""
        await self.node(node).node.drain()

    async def settled(self) -> None:
        """Wait until every shard that was ever served is served by somebody."""
        await self.until(
            lambda: all(self.owner(shard) is not None for shard in self.state.view.owners)
        )

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until something holds."""
        while not is_true():  # noqa: ASYNC110 - of anything in the cluster
            await asyncio.sleep(0.001)


@asynccontextmanager
async def open_cluster(
    nodes: int = 3, settings: Settings | None = None, *, clock: VirtualClock | None = None
) -> AsyncIterator[EmbeddedCluster]:
    """Open a cluster of several brokers. With a clock, time stands still for them until the clock is advanced.

    The nodes themselves use the real time: a shard that nobody serves is taken at once.
    """
    settings = settings or Settings(log=_SMALL)
    with tempfile.TemporaryDirectory(prefix="runnel-cluster-") as directory:
        async with open_log(directory, settings):
            pass  # makes the directory
        cluster = EmbeddedCluster(directory, settings, clock or SystemClock(), nodes)
        try:
            for node in cluster.nodes:
                await node.start()
            # A node that has not heard of another one yet could not give its shards to it.
            await cluster.until(
                lambda: all(len(node.node.nodes) == nodes for node in cluster.nodes)
            )
            yield cluster
        finally:
            for node in cluster.nodes:
                await node.stop()
