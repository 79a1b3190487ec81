"""A node as the history sees it: a real broker and `ClusterNode` in a process that may pause, die and begin again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from random import Random
from typing import Any, TypeVar

from runnel.broker.broker import Broker
from runnel.cluster import ClusterNode
from runnel.cluster.memory import MemoryCluster
from runnel.config import Settings
from runnel.errors import ConnectionLostError
from runnel.log.log import ShardId
from runnel.log.metadata.records import MetadataRecord
from runnel.log.metadata.shared_metadata import Follow
from runnel.log.metadata.shared_records import MemberMetadata, SharedRecords
from runnel.platform.clock import Clock
from tests.cluster.simulation.gate import Gate
from tests.cluster.simulation.troubled_state import Trouble, TroubledState
from tests.fakes.disk import FakeDisk
from tests.fakes.power import PowerLoss
from tests.fakes.workers import SimulatedWorkers

T = TypeVar("T")


class _Metadata(MemberMetadata):
    """What others record is followed within this node."""

    def __init__(self, shared: SharedRecords, member: str, gate: Gate) -> None:
        super().__init__(shared, member)
        self._gate = gate

    async def load(self, follow: Follow) -> Sequence[MetadataRecord]:
        return await super().load(lambda records: self._gate.call(follow, records))


class NodeLife:
    """One process of a node, from its start to its end."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        cluster: MemoryCluster,
        records: SharedRecords,
        disk: FakeDisk,
        clock: Clock,
        trouble: Trouble,
        timing: Random,
        settle_ns: int,
    ) -> None:
        self.name = name
        self.disk = disk.beside()
        self.workers = SimulatedWorkers(timing)
        self.gate = Gate()
        self.state = TroubledState(cluster, name, trouble, self.gate)
        self.is_dead = False
        self.is_stopping = False
        metadata = _Metadata(records, name, self.gate)
        self.node = ClusterNode(self.state, metadata, clock, settle_ns=settle_ns)
        self._records = records
        self._settings = settings
        self._clock = clock
        self.broker: Broker

    def __repr__(self) -> str:
        return self.name

    async def open(self) -> None:
        await self.run(self._open())

    async def _open(self) -> None:
        self.broker = await Broker.open(
            self._settings,
            directory="data",
            disk=self.disk,
            clock=self._clock,
            workers=self.workers,
            node=self.node,
        )
        await self.node.start(self.name)  # its address is its name

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of something that runs in this process. ConnectionLostError if the process dies meanwhile."""
        if self.is_dead:
            work.close()
            raise ConnectionLostError(f"{self.name} is dead")
        task = self.gate.begin(work)
        await asyncio.wait({task})
        if self.is_dead or task.cancelled():
            if not task.cancelled():
                task.exception()
            raise ConnectionLostError(f"{self.name} died")
        result: T = task.result()
        return result

    async def stop(self) -> None:
        self.is_stopping = True
        await self.run(self.broker.close())
        self.workers.close()
        self.is_dead = True
        await self.gate.end()
        self.state.end()

    async def kill(self) -> None:
        """Nothing of it runs any more, its locks are free, and nobody knows it yet."""
        self.is_dead = True
        self.disk.kill()
        self.workers.power_lost = PowerLoss(f"{self.name} was killed")
        self.state.end()
        self._records.members.pop(self.name, None)
        await self.gate.end()

    def served(self) -> Iterator[ShardId]:
        """What this process serves now, whatever its node thinks."""
        if self.is_dead or not hasattr(self, "broker"):
            return
        stores = self.broker._stores
        for log in stores.kept:
            yield from log.shards()
        assert stores.live_shards is not None
        yield from stores.live_shards._owned
