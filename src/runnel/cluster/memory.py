"""`MemoryClusterState`: a cluster whose nodes run in one process, for tests, simulations and embedded clusters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from runnel.cluster import ownership_rows as rows
from runnel.cluster.state import (
    TERMS_KEPT_MAX,
    ClusterView,
    Node,
    NodeLoad,
    OwnershipTerm,
    ShardOwner,
)
from runnel.errors import ClosedError, FencedError
from runnel.log.log import ShardId
from runnel.platform.clock import Clock

# Called before each change with the node's name and the method's: a simulation waits here, or raises Unavailable.
BeforeChange = Callable[[str, str], Awaitable[None]]


class MemoryCluster:
    """What the nodes share. `state(name)` is one node's access to it; a node that died just gets another one."""

    def __init__(self, clock: Clock, before_change: BeforeChange | None = None) -> None:
        self.clock = clock
        self.before_change = before_change
        self.view = ClusterView(0, {}, {})
        self.loads: dict[str, NodeLoad] = {}
        self._terms: dict[ShardId, list[OwnershipTerm]] = {}
        self._states: dict[MemoryClusterState, None] = {}  # in order: a set's order differs

    def state(self, node: str) -> MemoryClusterState:
        """A node's access. It sees changes of others one turn of the loop later."""
        state = MemoryClusterState(self, node)
        self._states[state] = None
        return state

    def forget(self, state: MemoryClusterState) -> None:
        """Tell this access of no more changes."""
        self._states.pop(state, None)

    def terms(self, shard: ShardId) -> list[OwnershipTerm]:
        return self._terms.setdefault(shard, [])

    def put_node(self, node: Node) -> None:
        nodes = {**self.view.nodes, node.name: node}
        self._change(msgspec.structs.replace(self.view, nodes=nodes))

    def put_owner(self, row: ShardOwner) -> None:
        owners = {**self.view.owners, row.shard: row}
        self._change(msgspec.structs.replace(self.view, owners=owners))

    def _change(self, view: ClusterView) -> None:
        self.view = msgspec.structs.replace(view, version=self.view.version + 1)
        for state in self._states:
            asyncio.get_running_loop().call_soon(state.show, self.view)


class MemoryClusterState:
    """One node's access to a `MemoryCluster`. See `ClusterState`."""

    def __init__(self, cluster: MemoryCluster, node: str) -> None:
        self._cluster = cluster
        self._name = node
        self._life: Node | None = None
        self._view = cluster.view
        self._watchers: list[Callable[[ClusterView], None]] = []
        self._is_closed = False

    @property
    def node(self) -> str:
        return self._name

    # --- Nodes ---

    async def join(self, address: str) -> Node:
        await self._begin("join")
        node = rows.next_life(self._cluster.view.nodes.get(self._name), self._name, address)
        self._life = node
        self._cluster.loads.pop(self._name, None)
        self._cluster.put_node(node)
        self.show(self._cluster.view)
        return node

    async def leave(self) -> None:
        node = await self._begin_in_life("leave")
        self._cluster.put_node(msgspec.structs.replace(node, is_alive=False))
        self._cluster.loads.pop(self._name, None)
        self.show(self._cluster.view)

    async def declare_dead(self, name: str, incarnation: int) -> None:
        await self._begin("declare_dead")
        found = self._cluster.view.nodes.get(name)
        if found is not None and found.incarnation == incarnation and found.is_alive:
            self._cluster.put_node(msgspec.structs.replace(found, is_alive=False))
            self._cluster.loads.pop(name, None)
            self.show(self._cluster.view)

    async def set_draining(self, name: str, *, is_draining: bool) -> None:
        await self._begin("set_draining")
        found = rows.living(self._cluster.view.nodes.get(name), name)
        if found.is_draining != is_draining:
            self._cluster.put_node(msgspec.structs.replace(found, is_draining=is_draining))
            self.show(self._cluster.view)

    # --- Owners ---

    async def begin_term(
        self, shard: ShardId, epoch: int, first_entry: int, *, has_lock: bool = True
    ) -> None:
        node = await self._begin_in_life("begin_term")
        cluster = self._cluster
        row, owner = self._row(shard)
        begun = rows.begin_term(row, owner, node, epoch, cluster.clock.time_ns(), has_lock=has_lock)
        if begun is row:
            return
        terms = cluster.terms(shard)
        if terms and not terms[-1].next_entry:
            terms[-1] = msgspec.structs.replace(terms[-1], next_entry=first_entry)
        terms.append(OwnershipTerm(shard, epoch, node.name, node.incarnation, first_entry))
        del terms[:-TERMS_KEPT_MAX]
        cluster.put_owner(begun)
        self.show(cluster.view)

    async def end_term(self, shard: ShardId, epoch: int, next_entry: int) -> None:
        node = await self._begin_in_life("end_term")
        cluster = self._cluster
        row, _ = self._row(shard)
        ended = rows.end_term(row, node, epoch, cluster.clock.time_ns())
        if ended is row:
            return
        terms = cluster.terms(shard)
        terms[-1] = msgspec.structs.replace(terms[-1], next_entry=next_entry)
        cluster.put_owner(ended)
        self.show(cluster.view)

    async def want(self, shard: ShardId, node: str, reason: str) -> None:
        await self._begin("want")
        if node:
            rows.living(self._cluster.view.nodes.get(node), node)
        row, owner = self._row(shard)
        wanted = rows.want(row, owner, node, reason)
        if wanted != row:
            self._cluster.put_owner(wanted)
            self.show(self._cluster.view)

    def _row(self, shard: ShardId) -> tuple[ShardOwner, Node | None]:
        """The shard's row, and that of the node which it names."""
        view = self._cluster.view
        row = view.owners.get(shard) or rows.unowned(shard)
        return row, view.nodes.get(row.owner)

    async def terms(self, shard: ShardId) -> Sequence[OwnershipTerm]:
        await self._begin("terms", is_change=False)
        return list(self._cluster.terms(shard))

    # --- Loads ---

    async def report_load(self, load: NodeLoad) -> None:
        await self._begin_in_life("report_load")
        self._cluster.loads[self._name] = load

    async def loads(self) -> Sequence[NodeLoad]:
        await self._begin("loads", is_change=False)
        nodes = self._cluster.view.nodes
        return [load for name, load in self._cluster.loads.items() if nodes[name].is_alive]

    # --- The view ---

    def view(self) -> ClusterView:
        return self._view

    def watch(self, on_change: Callable[[ClusterView], None]) -> None:
        self._watchers.append(on_change)

    def show(self, view: ClusterView) -> None:
        """Take in a newer view, and tell the watchers."""
        if view.version > self._view.version and not self._is_closed:
            self._view = view
            for watcher in self._watchers:
                watcher(view)

    async def close(self) -> None:
        self._is_closed = True
        self._cluster.forget(self)

    # --- Changes ---

    async def _begin(self, method: str, *, is_change: bool = True) -> None:
        """Wait for the turn of a change, which is then made before the next await."""
        self._check_open()
        if self._cluster.before_change is None:
            await asyncio.sleep(0)
        else:
            await self._cluster.before_change(self._name, method)
        self._check_open()
        if is_change and self._life is not None and method != "join":
            rows.check_life(self._cluster.view.nodes.get(self._name), self._life)

    async def _begin_in_life(self, method: str) -> Node:
        """The same for a change that only a node makes. Returns the node's row."""
        if self._life is None:
            raise FencedError(f"node {self._name} has not joined")
        await self._begin(method)
        return self._cluster.view.nodes[self._name]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the access to the cluster is closed")
