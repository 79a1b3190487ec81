"""A `ClusterState` that answers late, loses changes or their answers, and shows changes of others late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

from runnel.cluster.memory import MemoryCluster
from runnel.cluster.state import ClusterView, Node, NodeLoad, OwnershipTerm
from runnel.errors import ClosedError, Unavailable
from runnel.log.log import ShardId
from tests.cluster.simulation.gate import Gate

T = TypeVar("T")


class Trouble:
    """How bad it is. All states of a history share it; `heal` ends it."""

    def __init__(self, random: Random, *, turns_max: int, failure_probability: float) -> None:
        self.random = random
        self.turns_max = turns_max
        self.failure_probability = failure_probability

    def heal(self) -> None:
        self.turns_max, self.failure_probability = 2, 0.0

    def fails(self) -> bool:
        return self.random.random() < self.failure_probability

    async def wait(self) -> None:
        for _ in range(self.random.randint(0, self.turns_max)):
            await asyncio.sleep(0)


class TroubledState:
    """One life of a node at the state of its cluster. After `end` it hears and says nothing."""

    def __init__(self, cluster: MemoryCluster, node: str, trouble: Trouble, gate: Gate) -> None:
        self._inner = cluster.state(node)
        self._trouble = trouble
        self._shown = cluster.view
        self._arrived: list[ClusterView] = []
        self._watchers: list[Callable[[ClusterView], None]] = []
        self._is_over = False
        self._gate = gate
        self._inner.watch(self._arrive)

    def end(self) -> None:
        self._is_over = True

    @property
    def node(self) -> str:
        return self._inner.node

    # --- The view ---

    def view(self) -> ClusterView:
        return self._shown

    def watch(self, on_change: Callable[[ClusterView], None]) -> None:
        self._watchers.append(on_change)

    def _arrive(self, view: ClusterView) -> None:
        self._arrived.append(view)
        self._show_later(self._trouble.random.randint(0, self._trouble.turns_max))

    def _show_later(self, turns: int) -> None:
        if self._is_over:
            return
        if turns > 0 or self._gate.is_paused:
            asyncio.get_running_loop().call_soon(self._show_later, turns - 1)
            return
        if self._arrived:
            self._show(self._arrived.pop(0))

    def _show(self, view: ClusterView) -> None:
        if view.version > self._shown.version:
            self._shown = view
            for watcher in self._watchers:
                self._gate.call(watcher, view)

    # --- Changes ---

    async def _change(self, change: Callable[[], Awaitable[T]]) -> T:
        """Make a change late, or not at all, or without an answer."""
        await self._trouble.wait()
        self._check()
        if self._trouble.fails():
            raise Unavailable("the state cannot be reached")
        done = await change()
        is_answer_lost = self._trouble.fails()
        await self._trouble.wait()
        self._check()
        if is_answer_lost:
            raise Unavailable("the state did not answer")
        # A node sees its own changes at once: they are read with the answer.
        self._show(self._inner.view())
        return done

    def _check(self) -> None:
        if self._is_over:
            raise ClosedError("the node is dead")

    async def join(self, address: str) -> Node:
        while True:
            try:
                return await self._change(lambda: self._inner.join(address))
            except Unavailable:
                self._check()

    async def leave(self) -> None:
        await self._change(self._inner.leave)

    async def declare_dead(self, name: str, incarnation: int) -> None:
        await self._change(lambda: self._inner.declare_dead(name, incarnation))

    async def set_draining(self, name: str, *, is_draining: bool) -> None:
        await self._change(lambda: self._inner.set_draining(name, is_draining=is_draining))

    async def begin_term(
        self, shard: ShardId, epoch: int, first_entry: int, *, has_lock: bool = True
    ) -> None:
        await self._change(
            lambda: self._inner.begin_term(shard, epoch, first_entry, has_lock=has_lock)
        )

    async def end_term(self, shard: ShardId, epoch: int, next_entry: int) -> None:
        await self._change(lambda: self._inner.end_term(shard, epoch, next_entry))

    async def want(self, shard: ShardId, node: str, reason: str) -> None:
        await self._change(lambda: self._inner.want(shard, node, reason))

    async def terms(self, shard: ShardId) -> Sequence[OwnershipTerm]:
        return await self._inner.terms(shard)

    async def report_load(self, load: NodeLoad) -> None:
        await self._change(lambda: self._inner.report_load(load))

    async def loads(self) -> Sequence[NodeLoad]:
        return await self._inner.loads()

    async def close(self) -> None:
        self.end()
