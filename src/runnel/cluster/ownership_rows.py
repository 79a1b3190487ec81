"""How the rows of nodes and owners change: the rules that every `ClusterState` shares. Pure."""

from __future__ import annotations

import msgspec

from runnel.cluster.state import Node, ShardOwner
from runnel.errors import ClientFault, FencedError, MovedError
from runnel.log.log import ShardId


def next_life(former: Node | None, name: str, address: str) -> Node:
    """The life that begins when this node joins."""
    return Node(name, 1 if former is None else former.incarnation + 1, address)


def check_life(found: Node | None, life: Node) -> Node:
    """The row of the node, `found`. FencedError unless this life of it still lasts."""
    if found is None or found.incarnation != life.incarnation or not found.is_alive:
        raise FencedError(
            f"node {life.name}, incarnation {life.incarnation}, was declared dead or started again; it has to join anew"
        )
    return found


def living(found: Node | None, name: str) -> Node:
    """The row of a node that lives. ClientFault if there is none."""
    if found is None or not found.is_alive:
        raise ClientFault(f"there is no node {name!r} that lives")
    return found


def is_served(row: ShardOwner, owner: Node | None) -> bool:
    """Whether the node that the row names is alive in that life. `owner` is the row of its name."""
    return owner is not None and owner.is_alive and owner.incarnation == row.incarnation


def begin_term(
    row: ShardOwner, owner: Node | None, node: Node, epoch: int, now_ns: int, *, has_lock: bool
) -> ShardOwner:
    """The row once `node` has begun this term: the same one if it has begun already. `owner`: see `is_served`."""
    is_mine = (row.owner, row.incarnation) == (node.name, node.incarnation)
    if is_mine and row.epoch == epoch:
        return row
    if not has_lock and not is_mine and is_served(row, owner):
        raise MovedError(f"node {row.owner} serves shard {row.shard}")
    if epoch <= row.epoch:
        raise MovedError(
            f"shard {row.shard} has had epoch {row.epoch}, and cannot begin epoch {epoch} after it"
        )
    is_fulfilled = row.wanted == node.name
    return ShardOwner(
        row.shard,
        node.name,
        node.incarnation,
        epoch,
        "" if is_fulfilled else row.wanted,
        now_ns,
        "" if is_fulfilled else row.reason,
    )


def end_term(row: ShardOwner, node: Node, epoch: int, now_ns: int) -> ShardOwner:
    """The row once `node` has ended this term: the same one if the term is not its own, or has ended."""
    if (row.owner, row.incarnation, row.epoch) != (node.name, node.incarnation, epoch):
        return row
    return msgspec.structs.replace(row, owner="", incarnation=0, moved_ns=now_ns)


def want(row: ShardOwner, owner: Node | None, node: str, reason: str) -> ShardOwner:
    """The row with this wish. A wish for the node that serves the shard is none. `owner`: see `is_served`."""
    is_there = row.owner == node and is_served(row, owner)
    wanted = "" if is_there else node
    return msgspec.structs.replace(row, wanted=wanted, reason=reason if wanted else "")


def unowned(shard: ShardId) -> ShardOwner:
    """The row of a shard that was never served."""
    return ShardOwner(shard)
