"""`ClusterState`: what the nodes of a cluster know together: nodes, owners of shards, terms of ownership, wishes.

A *node* is one broker process. Each life of a node has an *incarnation*, a number that rises. A *shard* is served by
one node at a time; each term of its ownership has an epoch.

What decides ownership is not this table: on one machine it is the lock on the shard's folder, which the kernel releases
when a process dies. A row says who owned the shard last, under which epoch, and only the holder of the lock changes it.
`wanted` is a wish of the planner or an operator; the owner ends its term for it, and nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from runnel.log.log import ShardId

TERMS_KEPT_MAX: Final = 100
"""Older terms of a shard are forgotten."""


class Node(msgspec.Struct, frozen=True):
    """A node, and its present or last life."""

    name: str
    incarnation: int
    address: str  # of its native listener, for routes; without a host: the host that the client has reached
    is_alive: bool = True
    is_draining: bool = False


class ShardOwner(msgspec.Struct, frozen=True):
    """Who serves a shard, as far as is recorded, and who should. A shard without a row was never served."""

    shard: ShardId
    owner: str = ""  # the node's name; "": nobody, the last term ended in good order
    incarnation: int = 0  # of the owner
    epoch: int = 0  # of the present or last term
    wanted: str = ""  # the node that should own it; "": any
    moved_ns: int = 0  # when the owner changed last, by the wall clock
    reason: str = ""  # of the wish, for people


class OwnershipTerm(msgspec.Struct, frozen=True):
    """One term of ownership. `next_entry` is 0 while it lasts, and after an end that nobody recorded."""

    shard: ShardId
    epoch: int
    node: str
    incarnation: int
    first_entry: int
    next_entry: int = 0


class NodeLoad(msgspec.Struct, frozen=True):
    """What a node measured: bytes per second in and out by shard, and how late its event loop is."""

    node: str
    loop_lag_ms: float
    bytes_per_s: dict[str, float]  # by shard, as `str(ShardId)`
    pid: int = 0  # of its process


class ClusterView(msgspec.Struct, frozen=True):
    """Everything about nodes and owners as of one moment. `version` rises with every change."""

    version: int
    nodes: dict[str, Node]
    owners: dict[ShardId, ShardOwner]

    def is_served(self, shard: ShardId) -> bool:
        """Whether a living node has recorded that it owns the shard."""
        return self.address(shard) is not None

    def address(self, shard: ShardId) -> str | None:
        """The address of the shard's owner, if that is a living node."""
        row = self.owners.get(shard)
        node = None if row is None else self.nodes.get(row.owner)
        if row is None or node is None or not node.is_alive or node.incarnation != row.incarnation:
            return None
        return node.address


class ClusterState(Protocol):
    """One node's access to what all nodes share. Every method but `view` may wait for a device or another machine.

    Once a later life of this node has begun, or another node has declared it dead, each change raises FencedError.
    Unavailable: the change was not made, or it is not known, and it may be repeated.

    A process that only watches over nodes, as the parent of several does, never joins: it may declare nodes dead, drain
    them and wish, and nothing fences it.
    """

    @property
    def node(self) -> str:
        """The name of this node."""
        ...

    async def join(self, address: str) -> Node:
        """Begin a life of this node under a new incarnation. A former life of it that has not ended is fenced."""

    async def leave(self) -> None:
        """End this life in good order: no terms are left."""

    def view(self) -> ClusterView:
        """What is known here now. It follows changes of other nodes within a moment."""
        ...

    def watch(self, on_change: Callable[[ClusterView], None]) -> None:
        """Call this on the loop after every change of nodes or owners, also those of this node."""

    async def declare_dead(self, name: str, incarnation: int) -> None:
        """Fence a node that has died in this incarnation: its rows no longer count."""

    async def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Say that a node should give up its shards, or that it may take some again.

        ClientFault if no such node lives.
        """

    async def begin_term(
        self, shard: ShardId, epoch: int, first_entry: int, *, has_lock: bool = True
    ) -> None:
        """Record that this node owns the shard from now on. It holds the shard's lock.

        Ends the term before it, if its owner did not, at `first_entry`. A wish for this node is fulfilled. Repeating it
        does nothing. MovedError if a term of this epoch or a later one is recorded: acquire with a higher epoch.

        Without a lock, as for shards in memory, the row itself decides: MovedError if it names another node that lives.
        """

    async def end_term(self, shard: ShardId, epoch: int, next_entry: int) -> None:
        """Record that this node's term has ended, before it gives up the shard's lock.

        Nothing is changed if the term is not this node's, or has ended before.
        """

    async def want(self, shard: ShardId, node: str, reason: str) -> None:
        """Wish that a shard moves to a node; "" takes the wish back. ClientFault if no such node lives."""

    async def terms(self, shard: ShardId) -> Sequence[OwnershipTerm]:
        """The last terms of a shard, oldest first; at most `TERMS_KEPT_MAX` of them."""

    async def report_load(self, load: NodeLoad) -> None:
        """Replace this node's measured load."""

    async def loads(self) -> Sequence[NodeLoad]:
        """The newest load of each living node."""

    async def close(self) -> None:
        """End the access. Does not leave."""
