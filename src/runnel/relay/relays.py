"""A node's relays: what the accesses of its callers share. Read `access.py` for what they do with it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

from runnel.broker.broker import Broker, ShardId
from runnel.client.connection import Deadline, Dial, LoopTimers, Timers, backoff_s, sleep
from runnel.cluster.state import ClusterView, Node
from runnel.errors import ClosedError, MovedError, RunnelError, Unavailable
from runnel.formats import wire
from runnel.platform.tasks import OwnedTasks
from runnel.relay.peers import NodeLostError, Peer, Peers
from runnel.relay.publish_lines import PublishLine
from runnel.relay.stamps import expected_stamps, served_stamp

_Wanted = TypeVar("_Wanted", bound=wire.Head)
_T = TypeVar("_T")

# How long a caller waits for other nodes. A shard that moves, or whose node has died, is served again before that.
RELAY_SECONDS_MAX: Final = 10.0


class ThisNode(Protocol):
    """What the relays ask the node for: `ClusterNode`."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def nodes(self) -> Sequence[Node]: ...
    @property
    def view(self) -> ClusterView: ...
    @property
    def on_nodes_changed(self) -> list[Callable[[], None]]: ...
    def served(self) -> Sequence[ShardId]: ...


class Relays:
    """The links to other nodes, and what is on its way to them."""

    def __init__(
        self,
        broker: Broker,
        node: ThisNode,
        dial_to: Callable[[str], Dial],
        timers: Timers | None = None,
    ) -> None:
        """`timers` measure real time by default, also where a test moves the broker's clock."""
        timers = timers or LoopTimers()
        self.broker: Final = broker
        self.node: Final = node
        self.timers: Final = timers
        self.peers: Final = Peers(dial_to, timers, node.name)
        self.tasks: Final = OwnedTasks("the relays")
        self._lines: dict[tuple[str | None, ShardId], PublishLine] = {}
        self.stream_numbers: Final = itertools.count(1)  # of live subscriptions, on all links
        self.watchers: Final[dict[Callable[[], object], None]] = {}
        """Called after nodes have come or gone."""
        self.readers: Final[dict[Callable[[RunnelError], object], None]] = {}
        """How the streams that are relayed are ended, when this node closes."""
        self.node_names: Final[dict[str, None]] = {}
        """All nodes that have lived at the same time as this one, whether they do now or not."""
        self._is_closed = False
        self._learn_names()
        node.on_nodes_changed.append(self._on_nodes_changed)

    def _learn_names(self) -> None:
        self.node_names.update(dict.fromkeys(node.name for node in self.node.nodes))

    def _on_nodes_changed(self) -> None:
        self._learn_names()
        self.peers.keep_only({node.address for node in self.node.nodes})
        for watcher in list(self.watchers):
            watcher()

    def deadline(self, extra_s: float = 0.0) -> Deadline:
        return Deadline(self.timers, RELAY_SECONDS_MAX + extra_s)

    def served_stamp(self) -> int:
        """A hash over what this node serves at this moment."""
        return served_stamp(self.node.view, self.node.served())

    # --- To the owner of a shard ---

    def owner_of(self, topic: str, partition: int) -> wire.Owner:
        """The owner of a topic-partition, as far as this node knows; of one that does not exist, that of the last."""
        owners = self.broker.routes([topic])[0].owners
        return owners[min(partition, len(owners) - 1)]

    def peer_at(self, token: str | None, address: str) -> Peer | None:
        """The link to the node at an address; None if that is this node. Unavailable: no node has the shard now."""
        if address == self.node.address:
            return None
        if not address:
            raise MovedError("a shard is served by no node now")
        return self.peers.get(token, address)

    async def at_owner(
        self,
        address_of: Callable[[], str],
        here: Callable[[], Awaitable[_T]],
        there: Callable[[str], Awaitable[_T]],
        deadline: Deadline,
    ) -> _T:
        """Read something at the node that owns a shard, here or there, and again while the shard moves."""
        attempt = 0
        while True:
            address = address_of()
            try:
                if address == self.node.address:
                    return await here()
                if not address:
                    raise MovedError("a shard is served by no node now")
                return await there(address)
            except (MovedError, ClosedError, NodeLostError) as error:
                if self._is_closed or (
                    isinstance(error, ClosedError) and address == self.node.address
                ):
                    raise
                pause_s = backoff_s(min(attempt, 3))
                attempt += 1
                if pause_s >= deadline.left_s:
                    raise _still_moving(error) from error
                await sleep(self.timers, pause_s)

    # --- To all nodes ---

    async def everywhere(
        self,
        token: str | None,
        own: Callable[[], Awaitable[_T]],
        kind: type[_Wanted],
        make: Callable[[int], wire.Head],
        what: str,
        may_lack: tuple[type[RunnelError], ...] = (),
        hears_later: tuple[type[RunnelError], ...] = (),
    ) -> tuple[_T | None, list[tuple[_Wanted, memoryview]]]:
        """Have every node do its part, each for the shards that it serves; again if a shard moved meanwhile.

        `may_lack`: errors of nodes that have nothing of it. If all of them say so, this node's error is raised; but not
        if one has done its part in an earlier attempt, and so has nothing of it any more.
        `hears_later`: errors of nodes that have not heard yet of what this node knows.
        Nothing is left out silently: if a node does not answer, or the parts do not add up in time, it is Unavailable.
        """
        deadline, parts_done = self.deadline(), _PartsDone()
        while True:
            try:
                return await self._everywhere_once(
                    token, own, kind, make, what, may_lack, hears_later, deadline, parts_done
                )
            except (MovedError, NodeLostError, ClosedError) as error:
                pause_s = backoff_s(0)  # a move takes less; there may be another one right after it
                if self._is_closed or pause_s >= deadline.left_s:
                    raise Unavailable(
                        f"{what}: not every part was answered within {RELAY_SECONDS_MAX:g} s; ask again: {error}"
                    ) from error
                await sleep(self.timers, pause_s)

    async def until(
        self, ask: Callable[[], Awaitable[_T]], is_whole: Callable[[_T], bool], what: str
    ) -> _T:
        """Ask until the answer is whole: what one node has recorded others hear of a moment later."""
        deadline = self.deadline()
        while True:
            answer = await ask()
            if is_whole(answer):
                return answer
            pause_s = backoff_s(0)
            if pause_s >= deadline.left_s:
                raise Unavailable(f"{what}: a node has not heard of it yet; ask again")
            await sleep(self.timers, pause_s)

    async def _everywhere_once(
        self,
        token: str | None,
        own: Callable[[], Awaitable[_T]],
        kind: type[_Wanted],
        make: Callable[[int], wire.Head],
        what: str,
        may_lack: tuple[type[RunnelError], ...],
        hears_later: tuple[type[RunnelError], ...],
        deadline: Deadline,
        parts_done: _PartsDone,
    ) -> tuple[_T | None, list[tuple[_Wanted, memoryview]]]:
        stamps = expected_stamps(self.node.view)
        if stamps is None:
            raise MovedError("a shard is served by no node now")
        if self.served_stamp() != stamps.get(self.node.name):
            raise MovedError("a shard of this node is about to come or go")
        others = [node for node in self.node.nodes if node.name != self.node.name]
        lacking: RunnelError | None = None
        mine: _T | None = None
        # This node's own part comes first: it checks the caller's rights.
        try:
            mine = await own()
            parts_done.is_any = True
        except may_lack as error:
            lacking = error
        if self.served_stamp() != stamps.get(self.node.name):
            raise MovedError("a shard of this node has come or gone")
        asked = [
            self.tasks.start_awaited(
                self.peers.get(token, node.address).ask(
                    kind, make, deadline=deadline, what=what, as_of=stamps.get(node.name, 0)
                )
            )
            for node in others
        ]
        answers = await _all_of(asked)
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        parts_done.is_any = parts_done.is_any or bool(found)
        for answer in answers:
            if isinstance(answer, BaseException):
                if isinstance(answer, hears_later):
                    raise MovedError(str(answer)) from answer
                if not isinstance(answer, may_lack):
                    raise answer
        if lacking is not None and not parts_done.is_any:
            raise lacking
        return mine, found

    # --- Publishing ---

    def line(self, token: str | None, shard: ShardId, topic: str, partition: int) -> PublishLine:
        """The line of publishes with this token to the shard in which this topic-partition lies."""
        key = (token, shard)
        line = self._lines.get(key)
        if line is None:

            def peer_of() -> Peer | None:
                return self.peer_at(token, self.owner_of(topic, partition).address)

            line = self._lines[key] = PublishLine(
                shard,
                peer_of,
                lambda: self.broker.wait_room(topic, partition),
                self.timers,
                self.tasks,
                lambda: self._lines.pop(key, None),
            )
        return line

    def known_line(self, token: str | None, shard: ShardId) -> PublishLine | None:
        """The line to this shard, while something is on its way in it."""
        return self._lines.get((token, shard))

    # --- The end ---

    async def close(self) -> None:
        """Close all links. What is on its way fails."""
        self._is_closed = True
        if self._on_nodes_changed in self.node.on_nodes_changed:
            self.node.on_nodes_changed.remove(self._on_nodes_changed)
        closed = ClosedError("this node is shutting down; connect again later")
        for line in list(self._lines.values()):
            line.close(closed)
        for end in list(self.readers):
            end(closed)
        await self.peers.close()
        self.tasks.cancel()
        await self.tasks.wait()


class _PartsDone:
    """Whether any node has done its part of a request, also in an attempt that has to be made again."""

    __slots__ = ("is_any",)

    def __init__(self) -> None:
        self.is_any = False


async def _all_of(
    asked: Sequence[asyncio.Task[tuple[_Wanted, memoryview]]],
) -> list[tuple[_Wanted, memoryview] | BaseException]:
    """The results of all tasks. If the caller is cancelled, so are they."""
    try:
        return await asyncio.gather(*asked, return_exceptions=True)
    finally:
        for task in asked:
            task.cancel()


def _still_moving(error: RunnelError) -> RunnelError:
    if isinstance(error, NodeLostError):
        return error
    return Unavailable(f"no node has served it for {RELAY_SECONDS_MAX:g} s; try again: {error}")
