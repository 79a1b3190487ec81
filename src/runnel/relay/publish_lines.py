"""Publishes for shards of other nodes, in the order in which they came: a line for each shard.

What a line holds is sent at once, one behind the other over one link. When the node answers `moved`, or is lost, the
line stops. It waits for the answers that are still to come, and sends again from the first that was not done, to the
shard's new owner, which may be this node itself. Blocks are passed on as they are; nothing is decoded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from runnel.broker.broker import Level, Published, ShardId
from runnel.client.connection import Deadline, Handle, Timers, backoff_s, sleep
from runnel.errors import (
    BusyError,
    ClosedError,
    ConnectionLostError,
    MovedError,
    RunnelError,
    Unavailable,
)
from runnel.formats import wire
from runnel.platform.tasks import OwnedTasks
from runnel.relay.peers import Buffer, NodeLostError, Peer

# Of one line: what the other node has not answered yet. A single batch may be larger.
LINE_BYTES_MAX: Final = 8 * 2**20
LINE_ITEMS_MAX: Final = 1024
# A publish that waits longer fails; it may have been stored or not.
RELAY_SECONDS_MAX: Final = 30.0
_NS_PER_S: Final = 1_000_000_000
# What the owner's node answers before it has done anything: the shard, or the node, is going.
_NOTHING_DONE: Final = (MovedError, ClosedError)


class RelayedPublish:
    """One publish: how to do it here, how to ask another node for it, and its result."""

    __slots__ = ("append", "done", "expires_ns", "is_numbered", "level", "make", "size", "tail")

    def __init__(
        self,
        append: Callable[[], asyncio.Future[Published]],
        make: Callable[[int], wire.Head],
        tail: Sequence[Buffer],
        size: int,
        level: Level | None,
        *,
        is_numbered: bool,
    ) -> None:
        """`is_numbered`: it may be sent twice, for its owner recognises it by a named publisher's number."""
        self.append: Final = append
        self.make: Final = make
        self.tail: Final = tail
        self.size: Final = size
        self.level: Final = level
        self.is_numbered: Final = is_numbered
        self.done: Final[asyncio.Future[Published]] = asyncio.get_running_loop().create_future()
        self.expires_ns = 0

    def succeed(self, published: Published) -> None:
        if not self.done.done():
            self.done.set_result(published)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # nobody may be waiting any more, or not yet


class PublishLine:
    """The publishes of one caller's token to one shard of another node."""

    def __init__(
        self,
        shard: ShardId,
        peer_of: Callable[[], Peer | None],
        wait_room_here: Callable[[], Awaitable[None]],
        timers: Timers,
        tasks: OwnedTasks,
        on_empty: Callable[[], object],
    ) -> None:
        """`peer_of`: the link to the shard's owner; None if that is this node."""
        self._shard = shard
        self._peer_of = peer_of
        self._wait_room_here = wait_room_here
        self._timers = timers
        self._tasks = tasks
        self._on_empty = on_empty
        self._waiting: deque[RelayedPublish] = deque()  # not sent, or to be sent again
        self._sent: deque[RelayedPublish] = deque()  # in the order in which they were sent
        self._unanswered = 0
        self._again: set[RelayedPublish] = set()  # of those sent: not done, and to be sent again
        self._bytes = 0
        self._items = 0
        self._peer: Peer | None = None
        self._sender: asyncio.Task[None] | None = None
        self._room: set[asyncio.Future[None]] = set()
        self._expiry: Handle | None = None

    @property
    def is_full(self) -> bool:
        return self._items >= LINE_ITEMS_MAX or self._bytes >= LINE_BYTES_MAX

    def push(self, item: RelayedPublish) -> asyncio.Future[Published]:
        """Publish behind all others. BusyError: await `wait_room`, and push again."""
        if self.is_full:
            raise BusyError(
                f"shard {self._shard} is served by another node, which has not answered yet; wait for room"
            )
        return self.push_again(item)

    def push_again(self, item: RelayedPublish) -> asyncio.Future[Published]:
        """The same for a publish that was accepted here already, before the shard went."""
        self._items += 1
        self._bytes += item.size
        item.expires_ns = self._timers.monotonic_ns() + round(RELAY_SECONDS_MAX * _NS_PER_S)
        item.done.add_done_callback(partial(self._on_done, item))
        self._waiting.append(item)
        self._watch()
        peer = self._peer
        if self._sender is None and not self._again:
            if peer is not None and peer.connection is not None:
                self._send_waiting(peer)
            else:
                self._find_owner()
        if item.level is Level.NONE:
            answered: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
            answered.set_result(Published((), 0, 0, 0, Level.NONE))
            return answered
        return item.done

    async def wait_room(self) -> None:
        while self.is_full:
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.add(room)
            try:
                await room
            finally:
                self._room.discard(room)

    def _on_done(self, item: RelayedPublish, _: asyncio.Future[Published]) -> None:
        self._items -= 1
        self._bytes -= item.size
        if not self.is_full:
            for room in self._room:
                if not room.done():
                    room.set_result(None)
        if not self._items:
            if self._expiry is not None:
                self._expiry.cancel()
                self._expiry = None
            self._on_empty()

    def close(self, error: RunnelError) -> None:
        """Fail everything that is not done."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for item in [*self._sent, *self._waiting]:
            item.fail(error)
        self._waiting.clear()

    # --- Sending ---

    def _send_waiting(self, peer: Peer) -> None:
        """Send everything that waits, over the link's connection."""
        connection = peer.connection
        while connection is not None and self._waiting:
            item = self._waiting.popleft()
            if item.done.done():
                continue  # it waited too long
            self._enter(item)
            peer.enter()
            number = peer.link.next_number()
            size = sum(map(len, item.tail))
            connection.request(
                number, item.make(number), partial(self._on_answer, item, peer), item.tail, size
            )

    def _append_waiting(self) -> None:
        """Publish what waits here: this node has become the shard's owner. Raises what `append` raises at once."""
        while self._waiting:
            item = self._waiting[0]
            if not item.done.done():
                try:
                    published = item.append()
                except (BusyError, *_NOTHING_DONE):
                    raise
                except RunnelError as error:
                    item.fail(error)
                else:
                    self._enter(item)
                    published.add_done_callback(partial(self._on_appended, item))
            self._waiting.popleft()

    def _enter(self, item: RelayedPublish) -> None:
        self._sent.append(item)
        self._unanswered += 1

    def _on_answer(
        self, item: RelayedPublish, peer: Peer, answer: wire.Answer | RunnelError, _: memoryview
    ) -> None:
        peer.leave()
        if isinstance(answer, wire.Published):
            item.succeed(_published(answer))
            self._settle(item)
        elif isinstance(answer, RunnelError):
            self._on_error(item, answer)
        else:
            self._on_error(
                item, Unavailable(f"another node answered a publish with {answer!r:.100}")
            )

    def _on_appended(self, item: RelayedPublish, published: asyncio.Future[Published]) -> None:
        if published.cancelled():
            self._on_error(item, ClosedError("the broker was closed before it was stored"))
        elif (error := published.exception()) is None:
            item.succeed(published.result())
            self._settle(item)
        elif isinstance(error, RunnelError):
            self._on_error(item, error)
        else:
            item.fail(error)
            self._settle(item)

    def _on_error(self, item: RelayedPublish, error: RunnelError) -> None:
        is_lost = isinstance(error, ConnectionLostError)
        if isinstance(error, _NOTHING_DONE) or (is_lost and item.is_numbered):
            self._again.add(item)
        elif is_lost:
            item.fail(NodeLostError(f"publishing: {error}; it may have been stored or not"))
        else:
            item.fail(error)
        self._settle(item)

    def _settle(self, item: RelayedPublish) -> None:
        """An answer has come. Once all have, those to be sent again are in front of those that wait."""
        self._unanswered -= 1
        if not self._again:
            if self._sent and self._sent[0] is item:
                self._sent.popleft()
            else:
                self._sent.remove(item)
            return
        if self._unanswered:
            return
        self._waiting.extendleft(reversed([each for each in self._sent if each in self._again]))
        self._sent.clear()
        self._again.clear()
        self._peer = None
        self._find_owner()

    # --- The shard's owner ---

    def _find_owner(self) -> None:
        if self._sender is None:
            self._sender = self._tasks.start(self._send_when_found())

    async def _send_when_found(self) -> None:
        """Look for the owner, until everything that waits was sent to it, or has waited too long."""
        attempt = 0
        try:
            while self._waiting and not self._again:
                if attempt:
                    await sleep(self._timers, backoff_s(min(attempt, 3)))
                attempt += 1
                try:
                    peer = self._peer_of()
                    if peer is None:
                        await self._append_here()
                    else:
                        await peer.connected(self._deadline(), "publishing")
                        self._peer = peer
                        self._send_waiting(peer)
                except (*_NOTHING_DONE, NodeLostError, BusyError) as error:
                    self._expire(error)
                except RunnelError as error:
                    self._fail_waiting(error)
        finally:
            self._sender = None

    async def _append_here(self) -> None:
        try:
            self._append_waiting()
        except BusyError:
            await self._wait_room_here()

    def _deadline(self) -> Deadline:
        left_ns = self._waiting[0].expires_ns - self._timers.monotonic_ns()
        return Deadline(self._timers, max(0.0, left_ns / _NS_PER_S))

    def _fail_waiting(self, error: RunnelError) -> None:
        while self._waiting:
            self._waiting.popleft().fail(error)

    # --- Time ---

    def _watch(self) -> None:
        if self._expiry is None:
            self._expiry = self._timers.call_later(1.0, self._check_times)

    def _check_times(self) -> None:
        self._expiry = None
        self._expire(None)
        if self._items:
            self._watch()

    def _expire(self, why: RunnelError | None) -> None:
        """Fail what has waited too long."""
        now_ns = self._timers.monotonic_ns()
        for item in list(self._sent):
            if item.expires_ns <= now_ns:
                item.fail(
                    NodeLostError(
                        f"publishing: another node did not answer within {RELAY_SECONDS_MAX:g} s; "
                        "it may have been stored or not"
                    )
                )
        while self._waiting and self._waiting[0].expires_ns <= now_ns:
            reason = "" if why is None else f": {why}"
            self._waiting.popleft().fail(
                Unavailable(
                    f"shard {self._shard} was served by no node for {RELAY_SECONDS_MAX:g} s{reason}; try again"
                )
            )


def _published(answer: wire.Published) -> Published:
    return Published(
        answer.base_offsets,
        answer.entry,
        answer.epoch,
        answer.receive_time_ns,
        Level(answer.level),
        answer.is_repeated,
        answer.receivers,
    )
