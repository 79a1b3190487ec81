"""`ClusterNode`: one of several brokers that serve the shards of one set of topics.

It joins the cluster's state, watches it, and does what `Ownership` decides: it takes shards that nobody living owns and
that fall to this node, and gives up those that others should have. Terms are recorded while the store holds the shard
(`TermRecords`), so that nobody else begins one meanwhile.

The broker asks the node where a shard is (`locate`), and waits for one that this node is about to serve (`wait_here`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from runnel.cluster.ownership import Drop, GiveUp, Ownership, ShardPhase, Take
from runnel.cluster.planning import Wish, Wishes, is_news, is_planner, plan
from runnel.cluster.state import ClusterState, ClusterView, Node, NodeLoad
from runnel.errors import ClientFault, FencedError, MovedError, RunnelError, Unavailable
from runnel.log.log import ShardId
from runnel.log.metadata.shared_metadata import SharedMetadata
from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger
from runnel.platform.tasks import OwnedTasks

JOURNAL_SHARDS: Final = 16  # of new journals, unless the settings want more
_NS_PER_SECOND: Final = 1_000_000_000
# So long requests wait for a shard that is being taken, or that a living owner is to give up.
_WAIT_NS_MAX: Final = 10 * _NS_PER_SECOND
_SETTLE_NS: Final = _NS_PER_SECOND // 2
# A term's end is recorded before the shard's lock is released, so this delays the next owner.
_END_ATTEMPTS: Final = 5
_END_RETRY_S: Final = 0.05
_ROUND_S: Final = 2.0  # between two looks at this node's load, and at everybody's
_REPORT_NS_MAX: Final = 30 * _NS_PER_SECOND  # between two reports of a load that stays the same
_GIVEN_UP_AT_ONCE_MAX: Final = (
    4  # shards of a node that drains; each one pauses until it is served again
)

logger = get_logger("runnel")


class ShardHost(Protocol):
    """The stores of the broker of this node."""

    async def acquire(self, shard: ShardId, above: int) -> int:
        """See `ShardOwnership.acquire`. Returns the epoch of the term."""

    async def release(self, shard: ShardId) -> None:
        """See `ShardOwnership.release`."""

    async def drop(self, shard: ShardId) -> None:
        """See `ShardOwnership.drop`."""

    def used_shards(self) -> Iterable[ShardId]:
        """The shards that topics use which exist."""
        ...

    def load(self) -> tuple[float, Mapping[ShardId, float]]:
        """How late the event loop is, in ms, and the bytes/s in and out by shard, as measured last."""
        ...


class Place(NamedTuple):
    """Where a shard is served, or will be: the node's address ("": not known), and the epoch recorded last."""

    address: str
    epoch: int


class NodeObserver(Protocol):
    """Hears what this node does with its shards: for events and metrics."""

    def on_taken(self, shard: ShardId, epoch: int) -> None: ...
    def on_not_taken(self, shard: ShardId, error: BaseException) -> None: ...
    def on_given_up(self, shard: ShardId, reason: str, took_ns: int) -> None: ...
    def on_wish(self, wish: Wish) -> None: ...
    def on_fenced(self) -> None: ...


class ClusterNode:
    """This process among the nodes of a cluster. Give it to `Broker.open`, then `start` it, and `stop` it at the end.

    `clock` measures retries and waiting; it is the real one also where a test moves the broker's clock.
    """

    def __init__(
        self,
        state: ClusterState,
        metadata: SharedMetadata,
        clock: Clock,
        *,
        settle_ns: int = _SETTLE_NS,
        is_balanced: bool = True,
    ) -> None:
        """`is_balanced`: when it is this node's turn to plan, shards move so that loads are even."""
        self.state: Final = state
        self.metadata: Final = metadata
        self.name: Final = state.node
        self.on_nodes_changed: Final[list[Callable[[], None]]] = []
        """Called after nodes have come, gone or begun to drain."""
        self.on_fenced: Callable[[], None] = lambda: None
        """Called once, when another node has declared this one dead: it serves nothing any more."""
        self._clock = clock
        self._ownership = Ownership(state.node, settle_ns)
        self._host: ShardHost
        self._observer: NodeObserver
        self._is_balanced = is_balanced
        self._wishes = Wishes()
        self._rounds: asyncio.Task[None] | None = None
        self._reported: NodeLoad | None = None  # the load that the others know
        self._reported_ns = 0
        self._tasks = OwnedTasks("the cluster node")
        self._timer: asyncio.Task[None] | None = None
        self._changes: dict[ShardId, asyncio.Future[None]] = {}  # somebody waits for these shards
        self._idle = asyncio.Event()  # no shard is served, loaded or given up
        self._idle.set()
        self._giving_up = asyncio.Semaphore(_GIVEN_UP_AT_ONCE_MAX)
        self._nodes: Sequence[Node] = ()
        self._address = ""
        self._has_joined = False
        self._is_over = False

    def attach(self, host: ShardHost, observer: NodeObserver) -> None:
        """Serve shards with these stores. Nothing happens before `start`."""
        self._host = host
        self._observer = observer

    # --- Life ---

    async def start(self, address: str) -> None:
        """Join the cluster, and take shards from now on. Clients reach this node's native listener at `address`."""
        self.state.watch(self._on_view)
        me = await self.state.join(address)
        self._address = address
        self._has_joined = True
        self._ownership.known(self._host.used_shards())
        self._ownership.joined(me, self.state.view(), self._now_ns())
        self._on_view(self.state.view())
        self._rounds = self._tasks.start(self._run_rounds())

    async def drain(self) -> None:
        """Give up all shards to other nodes, and return when nothing is served here any more.

        Unavailable if there is no other node that would take them.
        """
        if not any(node.name != self.name and not node.is_draining for node in self._nodes):
            raise Unavailable(f"there is no other node that could take the shards of {self.name}")
        await self.state.set_draining(self.name, is_draining=True)
        await self.wait_idle()

    def take_no_more(self) -> None:
        """Take no more shards, and serve those that are here until `stop`: the others end too."""
        self._ownership.ending()
        self._run()

    async def stop(self) -> None:
        """Give up all shards, leave the cluster, and end all tasks."""
        if self._is_over:
            return
        self._ownership.stopping()
        self._run()
        await self.wait_idle()
        self._is_over = True
        if self._has_joined and not self._ownership.is_gone:
            try:
                await self.state.leave()
            except RunnelError as error:  # the others declare this node dead
                logger.warning("this node could not leave the cluster", error=str(error))
        await self._end_tasks()

    async def abandon(self) -> None:
        """End without telling anybody, as a process does that is killed. Nothing more is stored or recorded."""
        self._is_over = True
        self._ownership.fenced()
        served = self._ownership.in_phases(ShardPhase.LOADING, ShardPhase.OWNED, ShardPhase.ENDING)
        self._tasks.cancel()
        for shard in served:
            with suppress(RunnelError):
                await self._host.drop(shard)
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        self._wake_all()
        for task in (self._timer, self._rounds):
            if task is not None:
                task.cancel()
        await self._tasks.wait()

    async def wait_idle(self) -> None:
        """Wait until this node serves, loads and ends nothing."""
        await self._idle.wait()

    # --- What the broker asks ---

    @property
    def address(self) -> str:
        """The address of this node in routes."""
        return self._address

    @property
    def nodes(self) -> Sequence[Node]:
        """The living nodes, by name."""
        return self._nodes

    @property
    def view(self) -> ClusterView:
        return self._ownership.view

    def served(self) -> list[ShardId]:
        """The shards that this node serves now."""
        return self._ownership.in_phases(ShardPhase.OWNED)

    def serves(self, shard: ShardId) -> bool:
        """Whether this node serves the shard now."""
        return self._ownership.phase(shard) is ShardPhase.OWNED

    def locate(self, shard: ShardId) -> Place:
        """The node that serves the shard; if none does, the one that will."""
        view = self._ownership.view
        row = view.owners.get(shard)
        epoch = 0 if row is None else row.epoch
        name = self._ownership.owner(shard) or self._ownership.heir(shard)
        node = view.nodes.get(name)
        return Place("" if node is None else node.address, epoch)

    def is_coming(self, shard: ShardId) -> bool:
        """Whether this node will serve the shard in a moment; asking makes it hurry."""
        if not self._has_joined or self._is_over or not self._ownership.is_coming(shard):
            return False
        self._ownership.asked_for(shard)
        self._run()
        return True

    async def wait_here(self, shard: ShardId) -> None:
        """Wait until this node serves the shard. MovedError if it will not; Unavailable if it takes too long."""
        deadline_ns = self._now_ns() + _WAIT_NS_MAX
        while self._ownership.phase(shard) is not ShardPhase.OWNED:
            if not self.is_coming(shard):
                raise MovedError(f"shard {shard} is not served here")
            left_ns = deadline_ns - self._now_ns()
            if left_ns <= 0:
                raise Unavailable(f"shard {shard} is still not served here; try again")
            changed = self._changes.get(shard)
            if changed is None:
                changed = asyncio.get_running_loop().create_future()
                self._changes[shard] = changed
            timeout = asyncio.ensure_future(self._clock.sleep(left_ns / _NS_PER_SECOND))
            try:
                await asyncio.wait((changed, timeout), return_when=asyncio.FIRST_COMPLETED)
            finally:
                timeout.cancel()

    def use(self, shards: Iterable[ShardId]) -> None:
        """Topics use these shards: somebody has to serve them."""
        self._ownership.known(shards)
        if self._has_joined:
            self._run()

    # --- TermRecords ---

    async def begin(self, shard: ShardId, epoch: int, next_entry: int, *, has_lock: bool) -> None:
        """See `TermRecords`."""
        await self.state.begin_term(shard, epoch, next_entry, has_lock=has_lock)

    async def end(self, shard: ShardId, epoch: int, next_entry: int) -> None:
        """See `TermRecords`. Tries for a moment; what was not recorded is recorded by a next term of this node."""
        for attempt in range(_END_ATTEMPTS):
            try:
                await self.state.end_term(shard, epoch, next_entry)
            except FencedError:
                return  # the term was ended for this node
            except Unavailable as error:
                logger.warning(
                    "the end of a term could not be recorded", shard=str(shard), error=str(error)
                )
                if attempt + 1 < _END_ATTEMPTS:
                    await self._clock.sleep(_END_RETRY_S)
            else:
                return

    # --- Acting ---

    def _now_ns(self) -> int:
        return self._clock.monotonic_ns()

    def _on_view(self, view: ClusterView) -> None:
        if not self._has_joined or self._is_over:
            return
        self._ownership.seen(view, self._now_ns())
        self._run()
        nodes = sorted(
            (node for node in view.nodes.values() if node.is_alive), key=lambda node: node.name
        )
        if nodes != self._nodes:
            self._nodes = nodes
            for call in list(self.on_nodes_changed):
                call()

    def _run(self) -> None:
        """Begin everything that has to be done now."""
        was_gone = self._ownership.is_gone
        for action in self._ownership.decide(self._now_ns()):
            match action:
                case Take(shard, above):
                    self._begin(self._take(shard, above))
                case GiveUp(shard, reason):
                    self._begin(self._give_up(shard, reason))
                case Drop(shard):
                    self._begin(self._drop(shard))
        if self._ownership.is_gone and not was_gone:
            self._observer.on_fenced()
            self.on_fenced()
        self._note_idle()
        self._wake_changed()
        self._set_timer()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.start(work)

    async def _take(self, shard: ShardId, above: int) -> None:
        epoch = above
        try:
            epoch = await self._host.acquire(shard, above)
        except FencedError:
            self._ownership.fenced()
        except (RunnelError, OSError) as error:
            self._ownership.refused(shard, self._now_ns())
            if not isinstance(error, MovedError):  # whose lock is about to be released
                self._observer.on_not_taken(shard, error)
        else:
            self._ownership.taken(shard)
            self._observer.on_taken(shard, epoch)
        self._run()

    async def _give_up(self, shard: ShardId, reason: str) -> None:
        async with self._giving_up:
            began_ns = self._now_ns()
            try:
                await self._host.release(shard)
            except (RunnelError, OSError) as error:
                logger.warning("a shard did not end well", shard=str(shard), error=str(error))
                with suppress(RunnelError, OSError):
                    await self._host.drop(shard)
        self._ownership.given_up(shard)
        self._observer.on_given_up(shard, reason, self._now_ns() - began_ns)
        self._run()

    async def _drop(self, shard: ShardId) -> None:
        with suppress(RunnelError, OSError):
            await self._host.drop(shard)

    # --- Loads and plans ---

    async def _run_rounds(self) -> None:
        while not self._ownership.is_gone:
            await self._clock.sleep(_ROUND_S)
            try:
                await self.round()
            except FencedError:
                self._ownership.fenced()
                self._run()
            except Unavailable as error:  # the next round tries again
                logger.warning("loads could not be shared", error=str(error))

    def load(self) -> tuple[float, Mapping[ShardId, float]]:
        """See `ShardHost.load`."""
        return self._host.load()

    async def round(self) -> None:
        """Report this node's load. The node that plans also looks at everybody's, and at wishes that stay open."""
        lag_ms, by_shard = self.load()
        bytes_per_s = {str(shard): load for shard, load in by_shard.items()}
        load = NodeLoad(self.name, lag_ms, bytes_per_s, os.getpid())
        now_ns = self._now_ns()
        if (
            self._reported is None
            or is_news(self._reported, load)
            or now_ns - self._reported_ns >= _REPORT_NS_MAX
        ):
            await self.state.report_load(load)
            self._reported, self._reported_ns = load, now_ns
        view = self.state.view()
        if not is_planner(view, self.name):
            return
        wishes = self._wishes.overdue(view, self._now_ns())
        if not wishes and self._is_balanced:
            wishes = plan(view, await self.state.loads(), self._clock.time_ns())
        with suppress(ClientFault):  # the node has gone meanwhile
            await self.wish(wishes)

    async def wish(self, wishes: Iterable[Wish]) -> None:
        """Record wishes. ClientFault if no such node lives."""
        for wish in wishes:
            await self.state.want(*wish)
            self._observer.on_wish(wish)

    async def balance(self) -> Sequence[Wish]:
        """Wish for the moves of one round now, though shards were moved a moment ago. Returns them."""
        view = self.state.view()
        rested = {
            shard: msgspec.structs.replace(row, moved_ns=0) for shard, row in view.owners.items()
        }
        view = msgspec.structs.replace(view, owners=rested)
        wishes = plan(view, await self.state.loads(), self._clock.time_ns())
        await self.wish(wishes)
        return wishes

    # --- Waiting ---

    def _note_idle(self) -> None:
        busy = self._ownership.in_phases(ShardPhase.LOADING, ShardPhase.OWNED, ShardPhase.ENDING)
        if busy:
            self._idle.clear()
        else:
            self._idle.set()

    def _wake_changed(self) -> None:
        """Wake those who wait for a shard that is here, or is not coming any more."""
        for shard in list(self._changes):
            if not self._ownership.is_coming(shard):
                self._wake(shard)

    def _wake_all(self) -> None:
        for shard in list(self._changes):
            self._wake(shard)

    def _wake(self, shard: ShardId) -> None:
        changed = self._changes.pop(shard)
        if not changed.done():
            changed.set_result(None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ns = None if self._is_over else self._ownership.due_ns(self._now_ns())
        if due_ns is not None:
            delay_s = (due_ns - self._now_ns()) / _NS_PER_SECOND
            self._timer = asyncio.get_running_loop().create_task(self._run_later(delay_s))

    async def _run_later(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._timer = None
        self._run()
