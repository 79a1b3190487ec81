"""Links to the other nodes of a cluster, with the tokens of callers: made when they are needed, closed when idle.

A relayed request has the rights of the caller whose token the link shows, and nothing else. There is no token of nodes.
Every link says `part_only`: the node at its other end answers for its own shards and relays nothing, so that no request
goes in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias, TypeVar

from runnel.client.connection import (
    BrokerConnection,
    Deadline,
    Dial,
    Handle,
    Identity,
    Link,
    OnAnswer,
    Timers,
)
from runnel.errors import (
    BusyError,
    ConnectionLostError,
    MalformedError,
    RunnelError,
    TimeoutExpiredError,
    Unavailable,
)
from runnel.formats import wire

_Wanted = TypeVar("_Wanted", bound=wire.Head)
Buffer: TypeAlias = bytes | memoryview
_Key: TypeAlias = tuple[str | None, str, int]

# Of one node to all others, for all tokens together. Each is a connection at the other node.
LINKS_MAX: Final = 1024
# Requests of one link that wait for a message: they must not use up what a connection may leave unanswered.
WAITING_PER_LINK_MAX: Final = 256
# Live subscriptions, or consumers, of one link: a connection may have so many (native.subscriptions_max).
STREAMS_PER_LINK_MAX: Final = 64
_CONNECT_TIMEOUT_S: Final = 5.0
_IDLE_S: Final = 30.0
_SWEEP_S: Final = 5.0
_NS_PER_S: Final = 1_000_000_000


class NodeLostError(Unavailable):
    """The other node is gone, or its connection was lost. What it was asked for may have been done or not."""


class Peer:
    """A link to another node, with one caller's token."""

    def __init__(self, link: Link, timers: Timers) -> None:
        self.link: Final = link
        self._timers = timers
        self.under_way = 0
        self.waiting = 0  # requests that wait for a message
        self.streams = 0  # live subscriptions and consumers
        self.used_ns = timers.monotonic_ns()

    @property
    def address(self) -> str:
        return self.link.address

    @property
    def connection(self) -> BrokerConnection | None:
        return self.link.connection

    def enter(self) -> None:
        """A request begins. The link stays until it has left."""
        self.under_way += 1

    def leave(self) -> None:
        self.under_way -= 1
        self.used_ns = self._timers.monotonic_ns()

    def enter_stream(self) -> None:
        self.streams += 1
        self.enter()

    def leave_stream(self) -> None:
        self.streams -= 1
        self.leave()

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """A request waits for a message at the other node."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def connected(self, deadline: Deadline, what: str) -> BrokerConnection:
        """The connection, once there is one. The node's refusal of the token is raised as it is."""
        try:
            return await self.link.wait_connected(deadline, what)
        except TimeoutExpiredError as error:
            raise NodeLostError(str(error)) from None
        except Unavailable as error:
            raise NodeLostError(f"{what}: another node cannot be reached: {error}") from None

    async def ask(
        self,
        kind: type[_Wanted],
        make: Callable[[int], wire.Head],
        *,
        deadline: Deadline,
        what: str,
        tail: Sequence[Buffer] = (),
        as_of: int | None = None,
    ) -> tuple[_Wanted, memoryview]:
        """Ask once. The node's errors are raised as they are; NodeLostError: it did not answer.

        `as_of`: MovedError unless the node serves exactly these shards (`stamps`), before and after.
        """
        self.enter()
        try:
            connection = await self.connected(deadline, what)
            number = self.link.next_number()
            answered: asyncio.Future[tuple[_Wanted, memoryview]]
            answered = asyncio.get_running_loop().create_future()
            if as_of is not None:
                connection.send(wire.encode(wire.AsOf(as_of)))
            connection.request(
                number, make(number), _settler(answered, kind), tail, sum(map(len, tail))
            )
            try:
                return await deadline.wait(answered, lambda: _not_answered(what, deadline))
            except ConnectionLostError as error:
                raise NodeLostError(f"{what}: {error}; it may have been done or not") from None
        finally:
            self.leave()


class Peers:
    """All links of a node to the others."""

    def __init__(self, dial_to: Callable[[str], Dial], timers: Timers, name: str) -> None:
        """`name` is this node's, for the listings of the others."""
        self._dial_to = dial_to
        self._timers = timers
        self._name = name
        self._peers: dict[_Key, Peer] = {}
        self._sweeping: Handle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, token: str | None, address: str) -> Peer:
        """The link to the node at this address with this token, for requests that are answered at once."""
        return self._get((token, address, 0))

    def for_waiting(self, token: str | None, address: str) -> Peer:
        """A link for a request that waits for a message. It shares none with requests that are answered at once."""
        lane = 1
        while True:
            peer = self._get((token, address, lane))
            if peer.waiting < WAITING_PER_LINK_MAX:
                return peer
            lane += 1

    def for_streams(self, token: str | None, address: str) -> Peer:
        """A link for a live subscription or a consumer: what they deliver does not delay answers."""
        lane = -1
        while True:
            peer = self._get((token, address, lane))
            if peer.streams < STREAMS_PER_LINK_MAX:
                return peer
            lane -= 1

    def _get(self, key: _Key) -> Peer:
        token, address, _ = key
        peer = self._peers.get(key)
        if peer is not None and not peer.link.is_ended:
            peer.used_ns = self._timers.monotonic_ns()
            return peer
        if peer is None and len(self._peers) >= LINKS_MAX:
            self._make_room()
        link = Link(
            address,
            self._dial_to(address),
            Identity(client=f"runnel node {self._name}", token=token, features=(wire.PART_ONLY,)),
            self._timers,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )
        link.keep_connected()
        peer = self._peers[key] = Peer(link, self._timers)
        if self._sweeping is None:
            self._sweeping = self._timers.call_later(_SWEEP_S, self._sweep)
        return peer

    def _make_room(self) -> None:
        idle = [key for key, peer in self._peers.items() if not peer.under_way]
        if not idle:
            raise BusyError(
                f"this node relays over {LINKS_MAX} connections to others, and all of them are in use; try again later"
            )
        self._drop(min(idle, key=lambda key: self._peers[key].used_ns))

    def keep_only(self, addresses: Collection[str]) -> None:
        """Close the links to all other nodes: they have died. Requests under way fail at once."""
        for key in [key for key in self._peers if key[1] not in addresses]:
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        task = asyncio.get_running_loop().create_task(self._peers.pop(key).link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _sweep(self) -> None:
        """Close links that are idle, and those whose token was refused, as after it was revoked."""
        self._sweeping = None
        idle_since_ns = self._timers.monotonic_ns() - round(_IDLE_S * _NS_PER_S)
        for key, peer in list(self._peers.items()):
            if peer.link.is_ended or (not peer.under_way and peer.used_ns <= idle_since_ns):
                self._drop(key)
        if self._peers:
            self._sweeping = self._timers.call_later(_SWEEP_S, self._sweep)

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for key in list(self._peers):
            self._drop(key)
        while self._closing:
            await asyncio.wait(self._closing)


def _not_answered(what: str, deadline: Deadline) -> NodeLostError:
    return NodeLostError(
        f"{what}: another node did not answer within {deadline.seconds:g} s; it may have been done or not"
    )


def _settler(future: asyncio.Future[tuple[_Wanted, memoryview]], kind: type[_Wanted]) -> OnAnswer:
    def settle(answer: wire.Answer | RunnelError, tail: memoryview) -> None:
        if future.done():
            return
        if isinstance(answer, kind):
            future.set_result((answer, tail))
        elif isinstance(answer, RunnelError):
            future.set_exception(answer)
        else:
            future.set_exception(
                MalformedError("answer", f"{type(answer).__name__}, not {kind.__name__}")
            )

    return settle
