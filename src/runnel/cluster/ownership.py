"""`Ownership`: which shards a node takes and gives up. Pure: views, requests and `now_ns` go in, actions come out.

The states of a shard at a node:

FREE     not served here, and nothing is under way
LOADING  being taken: the store loads it and records the term
OWNED    served here
ENDING   being given up as planned: what is queued is stored, then the term ends
GONE     the life of this node is over: nothing is served here, and nothing will be

        take              taken             give up            given up
  FREE ──────▶ LOADING ──────────▶ OWNED ──────────▶ ENDING ─────────────▶ FREE
                  │ refused or failed: FREE, and again a little later       any of them ─fenced─▶ GONE

A shard that nobody living owns has one *heir*: the node that is wished for it, else the one that rendezvous hashing
names. The heir takes it. An owner gives it up for a wish, when its node drains, and when its node stops; nobody takes
a shard from a living node.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from runnel.cluster.planning import eligible, rendezvous
from runnel.cluster.state import ClusterView, Node
from runnel.log.log import ShardId

_NS_PER_MS: Final = 1_000_000
# Between two attempts to take a shard. What refuses the first one is often a lock that is just being released.
_RETRY_NS_MIN: Final = 2 * _NS_PER_MS
_RETRY_NS_MAX: Final = 1_000 * _NS_PER_MS


class ShardPhase(enum.Enum):
    """The state of a shard at this node."""

    FREE = "free"
    LOADING = "loading"
    OWNED = "owned"
    ENDING = "ending"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Take:
    """Load the shard and begin a term with an epoch above this one. Then `taken`, `refused` or `failed`."""

    shard: ShardId
    above: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the term as planned. Then `given_up`."""

    shard: ShardId
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop serving the shard at once: another node may have it."""

    shard: ShardId


Action: TypeAlias = Take | GiveUp | Drop


class _Shard:
    """What a node knows of one shard."""

    __slots__ = ("is_asked_for", "phase", "retry_at_ns", "retry_ns", "was_served")

    def __init__(self) -> None:
        self.phase = ShardPhase.FREE
        self.is_asked_for = False  # a client waits for it
        self.was_served = False  # by a living node, in this node's life
        self.retry_at_ns = 0
        self.retry_ns = 0


class Ownership:
    """The shards of one node. Call `decide` after every event, and at `due_ns`.

    `settle_ns`: so long after a node has come, nobody takes shards that nobody asks for. Nodes that start together
    share them, and the first one does not take all.
    """

    def __init__(self, name: str, settle_ns: int) -> None:
        self._name = name
        self._settle_ns = settle_ns
        self._settled_at_ns = 0
        self._me: Node | None = None
        self._view = ClusterView(0, {}, {})
        self._alive: dict[str, int] = {}  # the incarnations of living nodes
        self._shards: dict[ShardId, _Shard] = {}
        self._heirs: dict[ShardId, str] = {}  # as of this view
        self._is_stopping = False
        self._takes_nothing = False
        self._is_gone = False

    # --- Events ---

    def joined(self, me: Node, view: ClusterView, now_ns: int) -> None:
        """This node's life has begun."""
        self._me = me
        self.seen(view, now_ns)

    def seen(self, view: ClusterView, now_ns: int) -> None:
        """The nodes and owners are these now."""
        self._view = view
        self._heirs.clear()
        alive = {node.name: node.incarnation for node in view.nodes.values() if node.is_alive}
        if any(self._alive.get(name) != incarnation for name, incarnation in alive.items()):
            self._settled_at_ns = now_ns + self._settle_ns
        self._alive = alive
        for shard in view.owners:
            if view.is_served(shard):
                self._of(shard).was_served = True
            else:
                self._of(shard)

    def known(self, shards: Iterable[ShardId]) -> None:
        """Topics use these shards."""
        for shard in shards:
            self._of(shard)

    def asked_for(self, shard: ShardId) -> None:
        """A client waits for a shard: it is taken at once if this node is the heir."""
        self._of(shard).is_asked_for = True

    def taken(self, shard: ShardId) -> None:
        known = self._of(shard)
        if known.phase is ShardPhase.LOADING:
            known.phase, known.is_asked_for, known.retry_ns = ShardPhase.OWNED, False, 0

    def refused(self, shard: ShardId, now_ns: int) -> None:
        """The shard could not be taken: somebody has it still, or loading it failed."""
        known = self._of(shard)
        if known.phase is ShardPhase.LOADING:
            known.phase = ShardPhase.FREE
            known.retry_ns = min(_RETRY_NS_MAX, max(_RETRY_NS_MIN, 2 * known.retry_ns))
            known.retry_at_ns = now_ns + known.retry_ns

    def given_up(self, shard: ShardId) -> None:
        """The term is over, recorded or not."""
        known = self._of(shard)
        if known.phase is ShardPhase.ENDING:
            known.phase = ShardPhase.FREE
            known.was_served = True

    def ending(self) -> None:
        """This node is about to stop: it takes nothing more, and serves what it has."""
        self._takes_nothing = True

    def stopping(self) -> None:
        """This node ends in good order: it gives up everything, and takes nothing more."""
        self._is_stopping = self._takes_nothing = True

    def fenced(self) -> None:
        """This life is over."""
        self._is_gone = True

    # --- What is known ---

    @property
    def view(self) -> ClusterView:
        return self._view

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    @property
    def is_draining(self) -> bool:
        me = self._view.nodes.get(self._name)
        return me is not None and me.is_draining

    def phase(self, shard: ShardId) -> ShardPhase:
        known = self._shards.get(shard)
        return ShardPhase.FREE if known is None else known.phase

    def in_phases(self, *phases: ShardPhase) -> list[ShardId]:
        return [shard for shard, known in self._shards.items() if known.phase in phases]

    def heir(self, shard: ShardId) -> str:
        """The node that takes the shard when nobody living owns it; "": there is none."""
        heir = self._heirs.get(shard)
        if heir is None:
            row = self._view.owners.get(shard)
            if row is not None and row.wanted in self._alive:
                heir = row.wanted
            else:
                heir = rendezvous(shard, eligible(self._view))
            self._heirs[shard] = heir
        return heir

    def owner(self, shard: ShardId) -> str:
        """The living node that serves the shard, as far as is known here; "": nobody.

        What this node serves it knows better than the view.
        """
        phase = self.phase(shard)
        if phase is ShardPhase.OWNED:
            return self._name
        row = self._view.owners.get(shard)
        if row is None or row.owner == self._name or not self._view.is_served(shard):
            return ""
        return row.owner

    def is_coming(self, shard: ShardId) -> bool:
        """Whether this node serves the shard soon: it loads it, or is to take it from nobody or from a living owner."""
        if self._is_gone or self._takes_nothing or self._me is None:
            return False
        phase = self.phase(shard)
        if phase is ShardPhase.LOADING:
            return True
        if phase is not ShardPhase.FREE:
            return False
        if not self.owner(shard):
            return self.heir(shard) == self._name
        return self._view.owners[shard].wanted == self._name

    # --- Decisions ---

    def decide(self, now_ns: int) -> Sequence[Action]:
        """What has to be done now."""
        if self._me is None:
            return ()
        self._look_for_end()
        if self._is_gone:
            return list(self._end())
        return [
            action
            for shard, known in self._shards.items()
            if (action := self._decide(shard, known, now_ns)) is not None
        ]

    def due_ns(self, now_ns: int) -> int | None:
        """When `decide` has to be called again though nothing has happened; None: never."""
        if self._me is None or self._is_gone or self._takes_nothing:
            return None
        times = [
            max(known.retry_at_ns, self._may_take_at_ns(known))
            for shard, known in self._shards.items()
            if known.phase is ShardPhase.FREE and self._should_take(shard)
        ]
        return max(now_ns, min(times)) if times else None

    def _of(self, shard: ShardId) -> _Shard:
        known = self._shards.get(shard)
        if known is None:
            known = self._shards[shard] = _Shard()
        return known

    def _look_for_end(self) -> None:
        """This life is over once the state shows this node dead, or in a later life."""
        assert self._me is not None
        found = self._view.nodes.get(self._name)
        if found is not None and (
            found.incarnation > self._me.incarnation
            or (found.incarnation == self._me.incarnation and not found.is_alive)
        ):
            self._is_gone = True

    def _end(self) -> Iterator[Action]:
        for shard, known in self._shards.items():
            if known.phase in (ShardPhase.OWNED, ShardPhase.LOADING, ShardPhase.ENDING):
                yield Drop(shard)
            known.phase = ShardPhase.GONE

    def _decide(self, shard: ShardId, known: _Shard, now_ns: int) -> Action | None:
        if known.phase is ShardPhase.FREE:
            if (
                not self._takes_nothing
                and now_ns >= known.retry_at_ns
                and now_ns >= self._may_take_at_ns(known)
                and self._should_take(shard)
            ):
                known.phase = ShardPhase.LOADING
                row = self._view.owners.get(shard)
                return Take(shard, 0 if row is None else row.epoch)
        elif known.phase is ShardPhase.OWNED:
            reason = self._reason_to_give_up(shard)
            if reason:
                known.phase = ShardPhase.ENDING
                return GiveUp(shard, reason)
        return None

    def _should_take(self, shard: ShardId) -> bool:
        row = self._view.owners.get(shard)
        if row is not None and row.owner == self._name and self._view.is_served(shard):
            return True  # it is recorded as this node's, so nobody else takes it: a term was not recorded as ended
        return not self.owner(shard) and self.heir(shard) == self._name

    def _may_take_at_ns(self, known: _Shard) -> int:
        return 0 if known.is_asked_for or known.was_served else self._settled_at_ns

    def _reason_to_give_up(self, shard: ShardId) -> str:
        if self._is_stopping:
            return "the node stops"
        row = self._view.owners.get(shard)
        wanted = "" if row is None else row.wanted
        if wanted and wanted != self._name and wanted in self._alive:
            reason = f": {row.reason}" if row is not None and row.reason else ""
            return f"{wanted} should have it{reason}"
        if self.is_draining and wanted != self._name and self._name not in eligible(self._view):
            return "the node drains"
        return ""
