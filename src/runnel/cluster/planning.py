"""Who should have which shard. Pure: nodes, owners, loads and the time go in, wishes come out.

A plan is a wish: the owner carries it out, and if it does not within a while, the wish is dropped. So two planners, or
one with an old view, do no harm. The living node whose name comes first plans.

Balancing: in a round each node takes part in one move at most, from the fullest to the emptiest node. It is the shard
whose load is nearest to half of their difference, and only if that lowers the larger of the two loads by 15 % or more.
A shard rests 60 s after it was moved, and nothing is planned until the cluster was quiet for 10 s. A node that drains
counts as infinitely loaded; its shards need no rest, and nobody waits for quiet. A shard without load belongs to the
node that rendezvous hashing names, wherever it was left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from runnel.cluster.state import ClusterView, NodeLoad, ShardOwner
from runnel.log.log import ShardId

_NS_PER_SECOND: Final = 1_000_000_000
REST_NS: Final = 60 * _NS_PER_SECOND
QUIET_NS: Final = 10 * _NS_PER_SECOND
WISH_NS_MAX: Final = 10 * _NS_PER_SECOND
_FALL_MIN: Final = 0.15
_NEWS_SHARE: Final = 0.1
IDLE_BYTES_PER_S: Final = 1024.0
"""A shard with less has no load."""


class Wish(NamedTuple):
    """A shard should be at a node; "": the wish for it is taken back."""

    shard: ShardId
    node: str
    reason: str


# --- Who takes what nobody owns ---


def rendezvous(shard: ShardId, nodes: Iterable[str]) -> str:
    """The node that takes a shard which nobody owns: the one whose hash with it is the highest; "" without nodes.

    When a node goes, only its own shards get another one.
    """
    return max(nodes, key=lambda name: (_weight(shard, name), name), default="")


def _weight(shard: ShardId, name: str) -> int:
    return xxh3_64_intdigest(b"%b\0%b\0%d" % (name.encode(), shard.journal.encode(), shard.shard))


def eligible(view: ClusterView) -> list[str]:
    """The nodes that may take shards: those that live and do not drain; all that live, if all drain."""
    alive = [node for node in view.nodes.values() if node.is_alive]
    staying = [node.name for node in alive if not node.is_draining]
    return staying or [node.name for node in alive]


# --- Balancing ---


class _Loads:
    """The loads of the nodes that live, and of their shards."""

    def __init__(self, view: ClusterView, loads: Sequence[NodeLoad]) -> None:
        measured = {load.node: load.bytes_per_s for load in loads}
        self.is_complete = all(
            node.name in measured for node in view.nodes.values() if node.is_alive
        )
        self.by_node: dict[str, dict[ShardId, float]] = {
            node.name: {} for node in view.nodes.values() if node.is_alive
        }
        for shard in view.owners:
            if view.is_served(shard):
                owner = view.owners[shard].owner
                load = measured.get(owner, {}).get(str(shard), 0.0)
                self.by_node[owner][shard] = load if load >= IDLE_BYTES_PER_S else 0.0
        self.draining = {node.name for node in view.nodes.values() if node.is_draining}

    def of(self, node: str) -> float:
        return inf if node in self.draining else sum(self.by_node[node].values())

    def emptiest_last(self, nodes: Iterable[str]) -> list[str]:
        return sorted(nodes, key=lambda node: (-self.of(node), node))


def plan(view: ClusterView, loads: Sequence[NodeLoad], now_ns: int) -> list[Wish]:
    """The moves of this round, by the wall clock. None while the load of a living node is not known."""
    known = _Loads(view, loads)
    if not known.is_complete or any(row.wanted for row in view.owners.values()):
        return []
    is_quiet = all(_has_rested(row, now_ns, QUIET_NS) for row in view.owners.values())
    busy: set[str] = set()  # nodes that take part in a move
    wishes = [
        *_by_load(view, known, now_ns, busy, is_quiet=is_quiet),
        *(_by_hash(view, known, now_ns, busy) if is_quiet else ()),
    ]
    return [wish for wish in wishes if wish.node]


def _by_load(
    view: ClusterView, known: _Loads, now_ns: int, busy: set[str], *, is_quiet: bool
) -> Iterator[Wish]:
    """From the fullest to the emptiest of the nodes that are left, until a pair has nothing to move."""
    nodes = known.emptiest_last(known.by_node)
    while len(nodes) >= 2:
        source, target = nodes[0], nodes[-1]
        if target in known.draining:
            return
        nodes = nodes[1:]
        is_draining = source in known.draining
        if not is_draining and not is_quiet:
            return
        shards = known.by_node[source]
        movable = {
            shard: load
            for shard, load in shards.items()
            if is_draining or _has_rested(view.owners[shard], now_ns, REST_NS)
        }
        shard = _best(movable, known.of(source), known.of(target))
        if shard is None:
            if is_draining:
                continue
            return
        nodes = nodes[:-1]
        busy |= {source, target}
        yield Wish(shard, target, _reason(source, known.of(source), target, known.of(target)))


def _best(movable: Mapping[ShardId, float], full: float, empty: float) -> ShardId | None:
    """The shard whose move evens out two nodes best; None if none lowers the larger load enough."""
    half = (full - empty) / 2
    if full == inf:
        return max(movable, key=lambda shard: (movable[shard], str(shard)), default=None)
    loaded = [shard for shard, load in movable.items() if load > 0]
    shard = min(loaded, key=lambda each: (abs(movable[each] - half), str(each)), default=None)
    if shard is None:
        return None
    larger = max(full - movable[shard], empty + movable[shard])
    return shard if larger <= (1 - _FALL_MIN) * full else None


def _by_hash(view: ClusterView, known: _Loads, now_ns: int, busy: set[str]) -> Iterator[Wish]:
    """Shards without load go where hashing puts them."""
    nodes = eligible(view)
    for source in sorted(known.by_node):
        for shard, load in sorted(known.by_node[source].items()):
            target = rendezvous(shard, nodes)
            if (
                load == 0
                and target != source
                and not busy & {source, target}
                and _has_rested(view.owners[shard], now_ns, REST_NS)
            ):
                busy |= {source, target}
                yield Wish(shard, target, "it has no load, and hashing puts it there")


def _has_rested(row: ShardOwner, now_ns: int, rest_ns: int) -> bool:
    age_ns = now_ns - row.moved_ns
    return age_ns >= rest_ns or age_ns < 0  # the clock was set back


def _reason(source: str, full: float, target: str, empty: float) -> str:
    if full == inf:
        return f"{source} drains"
    return f"{source} has {full:.0f} bytes/s, {target} {empty:.0f}"


# --- Wishes that nobody fulfils ---


def is_news(last: NodeLoad, load: NodeLoad) -> bool:
    """Whether a load differs enough from the one reported last to be worth a commit."""
    return any(
        abs(load.bytes_per_s.get(shard, 0.0) - last.bytes_per_s.get(shard, 0.0))
        > IDLE_BYTES_PER_S + _NEWS_SHARE * last.bytes_per_s.get(shard, 0.0)
        for shard in load.bytes_per_s.keys() | last.bytes_per_s.keys()
    )


def is_planner(view: ClusterView, name: str) -> bool:
    """Whether this node plans: of those that live, its name comes first."""
    return name == min((node.name for node in view.nodes.values() if node.is_alive), default="")


class Wishes:
    """Remembers how long wishes are open. Time is the planner's own, which no clock setting changes."""

    def __init__(self) -> None:
        self._since_ns: dict[tuple[ShardId, str, int], int] = {}

    def overdue(self, view: ClusterView, now_ns: int) -> list[Wish]:
        """The wishes that have to be taken back: nobody has done anything about them."""
        open_now = {
            (shard, row.wanted, row.epoch) for shard, row in view.owners.items() if row.wanted
        }
        self._since_ns = {key: self._since_ns.get(key, now_ns) for key in open_now}
        return [
            Wish(shard, "", f"{wanted} did not get it in time")
            for (shard, wanted, _), since_ns in sorted(self._since_ns.items())
            if now_ns - since_ns >= WISH_NS_MAX
        ]
