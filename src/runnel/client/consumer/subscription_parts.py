"""The parts of a live subscription, one at each living node: connects what `PartMerge` decides with the links.

A node that comes gets a part, and one that goes loses it. A part is opened again whenever its link is connected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from runnel.client.connection import (
    Handle,
    Link,
    Timers,
    backoff_s,
)
from runnel.client.consumer.credit_shares import CreditShares
from runnel.client.consumer.part_merge import Attach, PartMerge
from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.errors import (
    ConnectionLostError,
    MalformedError,
    MovedError,
    RunnelError,
    SlowReaderError,
)
from runnel.formats import wire
from runnel.formats.batch import Batch, unpack_blocks

_UNREAD_NAMED_MAX: Final = 10


class PartDelivery(NamedTuple):
    """What counts of a delivery. Its credit is to be returned, as `size` bytes."""

    head: wire.Deliver
    batches: Sequence[Batch]
    tail: memoryview
    is_whole: bool  # the batches are all that the tail has

    @property
    def size(self) -> int:
        return len(self.tail)


class NodeLinks(Protocol):
    """The living nodes and the links to them: a client's `Router`."""

    @property
    def is_several(self) -> bool: ...
    @property
    def nodes(self) -> Sequence[wire.NodeState]: ...
    def node_addresses(self) -> Sequence[str]: ...
    def watch_nodes(self, on_change: Callable[[], object]) -> None: ...
    def unwatch_nodes(self, on_change: Callable[[], object]) -> None: ...
    def link(self, address: str) -> Link: ...


class PartsOwner(Protocol):
    """The subscription, as its parts see it. Each call only queues."""

    def part_delivered(self, part: int, delivery: PartDelivery) -> None: ...
    def part_missed(self, gap: wire.GapState) -> None: ...
    def parts_failed(self, error: RunnelError) -> None: ...
    def parts_changed(self) -> None:
        """More or fewer shards are read than before."""


class PartsRequest(msgspec.Struct, frozen=True):
    """What a subscription asks each node for."""

    number: int
    patterns: Sequence[str]
    start: wire.Start
    overflow: str
    buffer_bytes: int


class SubscriptionParts:
    """All parts of one subscription."""

    def __init__(
        self,
        router: NodeLinks,
        timers: Timers,
        owner: PartsOwner,
        request: PartsRequest,
        position: SubscriptionPosition,
    ) -> None:
        self.merge: Final = PartMerge(position, request.start)
        self.shares: Final = CreditShares(request.buffer_bytes)
        self.request: Final = request
        self.numbers: Final = itertools.count(1)
        self.timers: Final = timers
        self.owner: Final = owner
        self._router = router
        self._nodes: dict[str, _NodePart] = {}
        self._retry: Handle | None = None
        self._retries = 0

    @property
    def is_covered(self) -> bool:
        return self.merge.is_covered

    @property
    def state(self) -> str:
        """For error messages: what is missing."""
        unread = sorted(self.merge.unread)
        if unread:
            named = ", ".join(f"{journal}/{shard}" for journal, shard in unread[:_UNREAD_NAMED_MAX])
            more = f" and {len(unread) - _UNREAD_NAMED_MAX} more" * (
                len(unread) > _UNREAD_NAMED_MAX
            )
            return f"no node that is connected delivers {named}{more}"
        return "; ".join(each.link.state for each in self._nodes.values()) or "no node is known"

    # --- Beginning and ending ---

    def open(self) -> None:
        self._router.watch_nodes(self._follow_nodes)
        self._follow_nodes()

    def close(self, on_done: Callable[[], object]) -> int:
        """End all parts. `on_done` is called for each that the broker has ended. Returns how many there are."""
        self._stop()
        asked = sum(part.unsubscribe(on_done) for part in self._nodes.values())
        self._nodes.clear()
        return asked

    def abandon(self) -> None:
        """End all parts without a request, because the connections end anyway."""
        self._stop()
        for part in self._nodes.values():
            part.detach()
        self._nodes.clear()

    def _stop(self) -> None:
        self._router.unwatch_nodes(self._follow_nodes)
        if self._retry is not None:
            self._retry.cancel()

    def _follow_nodes(self) -> None:
        """Have a part at each living node, as soon as the nodes are known."""
        if not self._router.is_several or not self._router.nodes:
            return
        addresses = list(self._router.node_addresses())
        for address in [each for each in self._nodes if each not in addresses]:
            part = self._nodes.pop(address)
            part.unsubscribe(lambda: None)
        self.merge.expect(addresses)
        for address in addresses:
            if address not in self._nodes:
                part = self._nodes[address] = _NodePart(self, address, self._router.link(address))
                part.attach()
        self.owner.parts_changed()

    # --- What parts report ---

    def ask(self, attaches: Iterable[Attach]) -> None:
        """Send the attaches that the merge has decided on."""
        parts = {part.number: part for part in self._nodes.values()}
        for attach in attaches:
            parts[attach.part].begin(attach)
        self.owner.parts_changed()

    def refused(self, attach: Attach) -> None:
        """A node could not begin shards now: ask again, unless they have gone elsewhere."""
        self.merge.refused(attach)
        self._retries += 1
        if self._retry is None:
            self._retry = self.timers.call_later(backoff_s(self._retries), self._ask_again)

    def _ask_again(self) -> None:
        self._retry = None
        self.ask(self.merge.retry())

    def placed(self, attach: Attach, answer: wire.Subscribed) -> None:
        self._retries = 0
        self.merge.placed(attach, answer)
        self.owner.parts_changed()

    def lost(self, number: int) -> None:
        """A part has ended."""
        self.merge.lost(number)
        self.shares.close(number)
        self.grant()
        self.owner.parts_changed()

    # --- Credit ---

    def consumed(self, part: int, size: int) -> None:
        """The program has read this much of a part."""
        self.shares.consumed(part, size)

    def grant(self) -> None:
        """Grant the credit that is due."""
        if due := self.shares.due():
            self.send_credit(due, {})

    def send_credit(self, more: Mapping[int, int], less: Mapping[int, int]) -> None:
        for part in self._nodes.values():
            if part.number in more or part.number in less:
                part.link.tell(
                    wire.Credit(
                        self.request.number, more.get(part.number, 0), less.get(part.number, 0)
                    )
                )


class _NodePart:
    """The part at one node, over the link to it. It has a number of its own for each connection; 0: it is not open."""

    def __init__(self, parts: SubscriptionParts, address: str, link: Link) -> None:
        self.link: Final = link
        self.number = 0
        self._parts = parts
        self._address = address
        self._refusals = 0
        self._retry: Handle | None = None

    # --- Opening and closing ---

    def attach(self) -> None:
        self.link.listeners[self] = None
        self._open()

    def detach(self) -> None:
        """Leave the link, without a request to the broker."""
        self.link.listeners.pop(self, None)
        if self._retry is not None:
            self._retry.cancel()
        if self.link.connection is not None:
            self.link.connection.receivers.pop(self._parts.request.number, None)

    def unsubscribe(self, on_done: Callable[[], object]) -> bool:
        """End the part. Returns whether the broker answers."""
        connection, number = self.link.connection, self._parts.request.number
        is_known = connection is not None and number in connection.receivers
        self.detach()
        self._close()
        if connection is not None and is_known:
            request_id = self.link.next_number()
            head = wire.Unsubscribe(request_id, number)

            def done(_answer: wire.Answer | RunnelError, _tail: memoryview) -> None:
                on_done()

            connection.request(request_id, head, done)
        return is_known

    def _open(self) -> None:
        connection, parts = self.link.connection, self._parts
        self._retry = None
        if connection is None or self.number or not _is_node(self.link):
            return
        request = parts.request
        if request.number in connection.receivers:
            return  # the answer to an unsubscribe is under way
        number = self.number = next(parts.numbers)
        start = parts.merge.open(number, self._address)
        credit_bytes, less = parts.shares.open(number)
        connection.receivers[request.number] = self
        request_id = self.link.next_number()
        head = wire.Subscribe(
            request_id, request.number, request.patterns, start, credit_bytes, request.overflow
        )
        connection.request(request_id, head, lambda answer, _: self._answered(number, answer))
        parts.send_credit({}, less)

    def _close(self) -> None:
        if self.number:
            number, self.number = self.number, 0
            self._parts.lost(number)

    def _answered(self, number: int, answer: wire.Answer | RunnelError) -> None:
        if number != self.number:
            return
        if isinstance(answer, wire.Subscribed):
            self._refusals = 0
            self._parts.merge.answered(answer.elsewhere)
        elif isinstance(answer, RunnelError):
            self._refused(answer)
        else:
            self._fail(MalformedError("answer", f"{answer!r:.200} to a subscribe"))

    def _refused(self, error: RunnelError) -> None:
        """The node has refused the part, or ended it."""
        if isinstance(error, ConnectionLostError):
            return  # `link_down` follows
        if not error.retriable or isinstance(error, SlowReaderError):
            self._fail(error)
            return
        if self.link.connection is not None:
            self.link.connection.receivers.pop(self._parts.request.number, None)
        self._close()
        self._refusals += 1
        if self._retry is None:
            pause_s = backoff_s(self._refusals)
            self._retry = self._parts.timers.call_later(pause_s, self._open)

    def _fail(self, error: RunnelError) -> None:
        self._parts.owner.parts_failed(error)

    # --- Shards ---

    def begin(self, attach: Attach) -> None:
        connection = self.link.connection
        if connection is None:
            return  # `link_down` follows
        request_id = self.link.next_number()
        head = wire.ShardsFrom(request_id, self._parts.request.number, attach.shards, attach.start)
        connection.request(request_id, head, lambda answer, _: self._begun(attach, answer))

    def _begun(self, attach: Attach, answer: wire.Answer | RunnelError) -> None:
        if attach.part != self.number:
            return
        if isinstance(answer, wire.Subscribed):
            self._parts.placed(attach, answer)
        elif isinstance(answer, ConnectionLostError):
            pass  # `link_down` follows
        elif isinstance(answer, RunnelError) and (
            answer.retriable or isinstance(answer, MovedError)
        ):
            self._parts.refused(attach)
        elif isinstance(answer, RunnelError):
            self._fail(answer)
        else:
            self._fail(MalformedError("answer", f"{answer!r:.200} to shards_from"))

    # --- Events of the link ---

    def link_up(self) -> None:
        self._open()

    def link_down(self) -> None:
        self._close()
        if self.link.failure is not None:
            self._fail(self.link.failure)

    def link_writable(self) -> None:
        """Nothing waits for room: credit frames are small, and are sent whenever they are due."""

    # --- Events of the connection ---

    def delivered(self, head: wire.Deliver, tail: memoryview) -> None:
        parts, number, size = self._parts, self.number, len(tail)
        parts.shares.delivered(number, size)
        given = unpack_blocks(tail)
        accepted = parts.merge.delivered(number, head, given)
        if accepted is None:
            if size:
                parts.shares.consumed(number, size)
                parts.grant()
            return
        for gap in accepted.gaps:
            parts.owner.part_missed(gap)
        delivery = PartDelivery(head, accepted.batches, tail, accepted.batches is given)
        parts.owner.part_delivered(number, delivery)

    def missed(self, notice: wire.GapNotice) -> None:
        for gap in self._parts.merge.missed(self.number, notice):
            self._parts.owner.part_missed(gap)

    def shards_came(self, shards: Sequence[wire.ShardTerm]) -> None:
        self._parts.ask(self._parts.merge.came(self.number, shards))

    def shards_left(self, shards: Sequence[wire.ShardTerm]) -> None:
        self._parts.merge.left(self.number, shards)
        self._parts.owner.parts_changed()

    def ended(self, error: RunnelError) -> None:
        self._refused(error)


def _is_node(link: Link) -> bool:
    """Whether the link leads to one of several nodes."""
    return link.welcome is not None and wire.NODES in link.welcome.features
