"""`SqliteState`: nodes and owners of shards in `cluster.sqlite`."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from runnel.cluster import ownership_rows as rules
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
from runnel.log.metadata.sqlite.database import ClusterDatabase, Deliver
from runnel.log.metadata.sqlite.sqlite_metadata import forget_follower
from runnel.platform.clock import Clock

_NODE: Final = "SELECT name, incarnation, address, is_alive, is_draining FROM node"
_OWNER: Final = (
    "SELECT journal, shard, owner, incarnation, epoch, wanted, moved_ns, reason FROM owner"
)
_load_encoder: Final = msgspec.msgpack.Encoder()
_load_decoder: Final = msgspec.msgpack.Decoder(NodeLoad)


class SqliteState:
    """One node's access to what all nodes share: see `ClusterState`. Make one with `await SqliteState.open(…)`."""

    def __init__(self, database: ClusterDatabase, node: str, clock: Clock) -> None:
        self._database = database
        self._name = node
        self._clock = clock
        self._life: Node | None = None
        self._view = ClusterView(0, {}, {})
        self._read_version = 0  # of the rows that the worker has read
        self._watchers: list[Callable[[ClusterView], None]] = []
        self._is_closed = False

    @classmethod
    async def open(cls, database: ClusterDatabase, node: str, clock: Clock) -> SqliteState:
        """`database` is also that of the node's metadata. It is closed after this."""
        state = cls(database, node, clock)
        deliver = await database.read(state.read)
        if deliver is not None:
            deliver()
        database.follow(state)
        return state

    @property
    def node(self) -> str:
        return self._name

    # --- Nodes ---

    async def join(self, address: str) -> Node:
        def join(connection: sqlite3.Connection) -> Node:
            node = rules.next_life(_find_node(connection, self._name), self._name, address)
            _put_node(connection, node)
            return node

        self._check_open()
        node = self._life = await self._database.change(join)
        return node

    async def leave(self) -> None:
        def leave(connection: sqlite3.Connection, node: Node) -> None:
            _put_node(connection, msgspec.structs.replace(node, is_alive=False))
            connection.execute("DELETE FROM load WHERE node = ?", (node.name,))

        await self._change_in_life(leave)

    async def declare_dead(self, name: str, incarnation: int) -> None:
        def declare_dead(connection: sqlite3.Connection) -> None:
            found = _find_node(connection, name)
            if found is None or found.incarnation != incarnation or not found.is_alive:
                return
            _put_node(connection, msgspec.structs.replace(found, is_alive=False))
            connection.execute("DELETE FROM load WHERE node = ?", (name,))
            forget_follower(connection, name, incarnation)

        await self._change(declare_dead)

    async def set_draining(self, name: str, *, is_draining: bool) -> None:
        def set_draining(connection: sqlite3.Connection) -> None:
            found = rules.living(_find_node(connection, name), name)
            if found.is_draining != is_draining:
                _put_node(connection, msgspec.structs.replace(found, is_draining=is_draining))

        await self._change(set_draining)

    # --- Owners ---

    async def begin_term(
        self, shard: ShardId, epoch: int, first_entry: int, *, has_lock: bool = True
    ) -> None:
        now_ns = self._clock.time_ns()

        def begin_term(connection: sqlite3.Connection, node: Node) -> None:
            row = _find_owner(connection, shard)
            owner = _find_node(connection, row.owner)
            begun = rules.begin_term(row, owner, node, epoch, now_ns, has_lock=has_lock)
            if begun is row:
                return
            key = (shard.journal, shard.shard)
            connection.execute(
                "UPDATE term SET next_entry = ? WHERE journal = ? AND shard = ? AND epoch = ? AND next_entry = 0",
                (first_entry, *key, row.epoch),
            )
            connection.execute(
                "INSERT INTO term VALUES (?, ?, ?, ?, ?, ?, 0)",
                (*key, epoch, node.name, node.incarnation, first_entry),
            )
            connection.execute(
                "DELETE FROM term WHERE journal = ?1 AND shard = ?2 AND epoch <= (SELECT epoch FROM term WHERE "
                "journal = ?1 AND shard = ?2 ORDER BY epoch DESC LIMIT 1 OFFSET ?3)",
                (*key, TERMS_KEPT_MAX),
            )
            _put_owner(connection, begun)

        await self._change_in_life(begin_term)

    async def end_term(self, shard: ShardId, epoch: int, next_entry: int) -> None:
        now_ns = self._clock.time_ns()

        def end_term(connection: sqlite3.Connection, node: Node) -> None:
            row = _find_owner(connection, shard)
            ended = rules.end_term(row, node, epoch, now_ns)
            if ended is row:
                return
            connection.execute(
                "UPDATE term SET next_entry = ? WHERE journal = ? AND shard = ? AND epoch = ?",
                (next_entry, shard.journal, shard.shard, epoch),
            )
            _put_owner(connection, ended)

        await self._change_in_life(end_term)

    async def want(self, shard: ShardId, node: str, reason: str) -> None:
        def want(connection: sqlite3.Connection) -> None:
            if node:
                rules.living(_find_node(connection, node), node)
            row = _find_owner(connection, shard)
            wanted = rules.want(row, _find_node(connection, row.owner), node, reason)
            if wanted != row:
                _put_owner(connection, wanted)

        await self._change(want)

    async def terms(self, shard: ShardId) -> Sequence[OwnershipTerm]:
        def terms(connection: sqlite3.Connection) -> list[OwnershipTerm]:
            found = connection.execute(
                "SELECT epoch, node, incarnation, first_entry, next_entry FROM term "
                "WHERE journal = ? AND shard = ? ORDER BY epoch",
                (shard.journal, shard.shard),
            )
            return [OwnershipTerm(shard, *row) for row in found]

        self._check_open()
        return await self._database.read(terms)

    # --- Loads ---

    async def report_load(self, load: NodeLoad) -> None:
        content = _load_encoder.encode(load)

        def report(connection: sqlite3.Connection, node: Node) -> None:
            connection.execute(
                "INSERT OR REPLACE INTO load VALUES (?, ?, ?)",
                (node.name, node.incarnation, content),
            )

        await self._change_in_life(report)

    async def loads(self) -> Sequence[NodeLoad]:
        def loads(connection: sqlite3.Connection) -> list[NodeLoad]:
            found = connection.execute(
                "SELECT content FROM load JOIN node ON node.name = load.node AND node.is_alive "
                "AND node.incarnation = load.incarnation ORDER BY node"
            )
            return [_load_decoder.decode(content) for (content,) in found]

        self._check_open()
        return await self._database.read(loads)

    # --- The view ---

    def view(self) -> ClusterView:
        return self._view

    def watch(self, on_change: Callable[[ClusterView], None]) -> None:
        self._watchers.append(on_change)

    def read(self, connection: sqlite3.Connection) -> Deliver | None:
        """See `Follower`."""
        [version] = connection.execute("SELECT version FROM view").fetchone()
        if version == self._read_version:
            return None
        since = (self._read_version,)
        nodes = {
            node.name: node
            for node in map(_node_of, connection.execute(f"{_NODE} WHERE version > ?", since))
        }
        owners = {
            row.shard: row
            for row in map(_owner_of, connection.execute(f"{_OWNER} WHERE version > ?", since))
        }
        self._read_version = version
        return partial(self._show, version, nodes, owners)

    def _show(
        self, version: int, nodes: dict[str, Node], owners: dict[ShardId, ShardOwner]
    ) -> None:
        before = self._view
        self._view = ClusterView(version, {**before.nodes, **nodes}, {**before.owners, **owners})
        if not self._is_closed:
            for watcher in self._watchers:
                watcher(self._view)

    async def close(self) -> None:
        self._is_closed = True
        self._database.unfollow(self)

    # --- Changes ---

    async def _change(self, change: Callable[[sqlite3.Connection], None]) -> None:
        """A change by a node in its present life, or by a process that is no node."""

        def fenced(connection: sqlite3.Connection) -> None:
            if self._life is not None:
                rules.check_life(_find_node(connection, self._name), self._life)
            change(connection)

        self._check_open()
        await self._database.change(fenced)

    async def _change_in_life(self, change: Callable[[sqlite3.Connection, Node], None]) -> None:
        """A change that only a node makes. It gets the node's row."""
        life = self._life
        if life is None:
            raise FencedError(f"node {self._name} has not joined")

        def fenced(connection: sqlite3.Connection) -> None:
            found = _find_node(connection, self._name)
            change(connection, rules.check_life(found, life))

        self._check_open()
        await self._database.change(fenced)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the access to the cluster is closed")


# --- Rows ---


def _find_node(connection: sqlite3.Connection, name: str) -> Node | None:
    found = connection.execute(f"{_NODE} WHERE name = ?", (name,)).fetchone()
    return None if found is None else _node_of(found)


def _node_of(row: tuple[str, int, str, int, int]) -> Node:
    name, incarnation, address, is_alive, is_draining = row
    return Node(name, incarnation, address, bool(is_alive), bool(is_draining))


def _put_node(connection: sqlite3.Connection, node: Node) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO node VALUES (?, ?, ?, ?, ?, ?)",
        (
            node.name,
            node.incarnation,
            node.address,
            node.is_alive,
            node.is_draining,
            _next_version(connection),
        ),
    )


def _find_owner(connection: sqlite3.Connection, shard: ShardId) -> ShardOwner:
    found = connection.execute(
        f"{_OWNER} WHERE journal = ? AND shard = ?", (shard.journal, shard.shard)
    ).fetchone()
    return rules.unowned(shard) if found is None else _owner_of(found)


def _owner_of(row: tuple[str, int, str, int, int, str, int, str]) -> ShardOwner:
    journal, shard, owner, incarnation, epoch, wanted, moved_ns, reason = row
    return ShardOwner(ShardId(journal, shard), owner, incarnation, epoch, wanted, moved_ns, reason)


def _put_owner(connection: sqlite3.Connection, row: ShardOwner) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO owner VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            row.shard.journal,
            row.shard.shard,
            row.owner,
            row.incarnation,
            row.epoch,
            row.wanted,
            row.moved_ns,
            row.reason,
            _next_version(connection),
        ),
    )


def _next_version(connection: sqlite3.Connection) -> int:
    """The version of a change of nodes or owners."""
    connection.execute("UPDATE view SET version = version + 1")
    [version] = connection.execute("SELECT version FROM view").fetchone()
    return int(version)
