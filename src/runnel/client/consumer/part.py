"""A consumer's part at one node: joins the subscription there, takes leases, sends acks, and leaves.

With one broker a consumer has one part. With several nodes it has one at each of them, which serves the shards that the
node owns. Ids of deliveries are the node's, so each part has its own ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from runnel.client.connection import (
    BrokerConnection,
    Deadline,
    Link,
    OnAnswer,
    Timers,
)
from runnel.client.consumer.ack_sender import AckSender
from runnel.client.consumer.deliveries import HeldDelivery, LeaseHolder
from runnel.client.consumer.delivery_queue import DeliveryQueue
from runnel.client.consumer.lease_renewer import LeaseRenewer
from runnel.client.consumer.ledger import (
    CONNECTION_LOST,
    CONSUMER_CLOSED,
    CONSUMER_ENDED,
    BegunWork,
    Ledger,
)
from runnel.client.consumer.nack_barrier import NackBarrier
from runnel.client.consumer.reconnecting_reader import ReaderLinks, ReconnectingReader
from runnel.errors import LateAckError, MalformedError, MovedError, RunnelError
from runnel.formats import wire, work_heads
from runnel.formats.batch import unpack_blocks
from runnel.formats.work_heads import DeliveryPart, HeldLease, Lease
from runnel.topics.names import TopicPartition

_NS_PER_MS: Final = 1_000_000


class LinkState(Protocol):
    """Whether there is a connection, and its room."""

    @property
    def connection(self) -> BrokerConnection | None: ...


class LeasePart(Protocol):
    """Who has leased a delivery to the consumer. Hot: attributes, read for every ack."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def ack_sender(self) -> AckSender: ...

    @property
    def link(self) -> LinkState: ...

    @property
    def processing_ns_max(self) -> int: ...

    def hold_back(self, partition: TopicPartition) -> None:
        """Hand out nothing more of a partition until the node has received the nacks sent so far."""


class PartOwner(Protocol):
    """The consumer, as its parts see it."""

    @property
    def holder(self) -> LeaseHolder:
        """The consumer, as its messages see it."""
        ...

    @property
    def begun(self) -> BegunWork: ...

    @property
    def queue(self) -> DeliveryQueue: ...

    @property
    def renews_leases(self) -> bool:
        """Whether leases are renewed while messages are in processing."""
        ...

    def next_order(self) -> int:
        """The number of the next delivery that arrives, over all parts."""

    def wake(self) -> None: ...

    def part_accepted(self, part: ConsumerPart) -> None: ...

    def part_failed(self, part: ConsumerPart, error: RunnelError) -> None: ...

    def part_lost(self, part: ConsumerPart) -> None:
        """The connection, or the part, is lost: its leases are about to end."""

    def part_late(self, part: ConsumerPart, late: Sequence[DeliveryPart]) -> Sequence[DeliveryPart]:
        """The node has called these late. Returns those to be reported: not those whose shard moves."""

    def part_recalled(self, part: ConsumerPart) -> None:
        """Some messages are recalled."""

    def part_wants(self, part: ConsumerPart, *, is_wanting: bool) -> None: ...

    def part_settled(self, part: ConsumerPart) -> None: ...

    def part_moving(self, part: ConsumerPart, epoch: int, deliveries: Sequence[int]) -> None: ...

    def part_holds(self, part: ConsumerPart, leases: Sequence[HeldLease]) -> None: ...

    def part_arrived(self, part: ConsumerPart, delivery: HeldDelivery) -> None: ...

    def report_late(self, ledger: Ledger) -> object: ...


class ConsumerPart(ReconnectingReader):
    """The part of a consumer that one node serves. `link` is the link to the node."""

    def __init__(
        self,
        owner: PartOwner,
        router: ReaderLinks,
        link: Link,
        timers: Timers,
        request: work_heads.Consume | work_heads.ConsumePart,
        *,
        deadline_s: float | None,
        is_at_home: bool,
    ) -> None:
        what = f"consuming from {request.subscription!r}"
        super().__init__(
            router, timers, what=what, deadline_s=deadline_s, patterns=request.patterns
        )
        self._link = link
        self.link: Link = link  # an attribute: it is read for every ack
        self.is_at_home: Final = is_at_home  # the broker is alone: `moved` says where to go
        self.accepted: work_heads.Consuming | None = None
        self.window = (request.window_messages, request.window_bytes)
        self.ledger: Final = Ledger(owner.begun)
        self.barrier: Final = NackBarrier(owner.queue)
        self.ack_sender: Final = AckSender(
            self.ledger,
            lambda: self.link,
            request.consumer,
            self.reported_late,
            None if is_at_home else lambda: owner.part_settled(self),
        )
        self.renewer: Final = LeaseRenewer(
            self.ledger,
            owner.begun,
            timers,
            self.ack_sender.renew if owner.renews_leases else None,
        )
        self.may_have_lost_acks = False
        self._moves = 0  # `moving` frames of the node, over this connection
        self._owner = owner
        self._number = request.consumer
        self._request = request

    @property
    def processing_ns_max(self) -> int:
        return self.renewer.processing_ns_max

    def hold_back(self, partition: TopicPartition) -> None:
        self.barrier.hold(partition, self.link)

    @property
    def is_attached(self) -> bool:
        """Whether the node has accepted it over the present connection."""
        return self._is_attached

    @property
    def has_asked(self) -> bool:
        """Whether the node has, or is about to have, the part."""
        connection = self.link.connection
        return connection is not None and self._number in connection.consumers

    @property
    def was_attached(self) -> bool:
        return self._was_attached

    @property
    def error(self) -> RunnelError | None:
        return self._error

    # --- Beginning and ending ---

    def begin(self) -> None:
        self._begin()

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        if not self._is_closed:
            self.leave(_ignore_answer)

    def leave(self, on_answer: OnAnswer, reason: str = CONSUMER_CLOSED) -> bool:
        """Leave, and ask the node to remove the part if it has it. Returns whether an answer follows."""
        self.ack_sender.send()
        connection = self.link.connection
        is_known = (
            connection is not None and connection.consumers.pop(self._number, None) is not None
        )
        self._drop_everything(reason)
        self._detach()
        if connection is None or not is_known:
            return False
        number = self.link.next_number()
        connection.request(number, work_heads.Leave(number, self._number), on_answer)
        return True

    def _drop_everything(self, reason: str) -> None:
        self._owner.part_lost(self)
        self._owner.queue.drop(self.ledger)
        self.barrier.clear()
        self.renewer.stop()
        self.ledger.lose(reason)
        self.may_have_lost_acks |= self.ack_sender.forget()
        self._owner.report_late(self.ledger)

    # --- Events of the link and the connection ---

    def _ask(self, connection: BrokerConnection) -> None:
        if self._number in connection.consumers:
            return
        connection.consumers[self._number] = self
        self._moves = 0
        number = self.link.next_number()
        messages, size_bytes = self.window
        head = msgspec.structs.replace(
            self._request, id=number, window_messages=messages, window_bytes=size_bytes
        )
        connection.request(number, head, lambda answer, _: self._answered(answer))

    def _answered(self, answer: wire.Answer | RunnelError) -> None:
        if isinstance(answer, work_heads.Consuming):
            self.accepted = answer
            options = answer.options
            self.renewer.lease_ns = (options.lease_ms or 0) * _NS_PER_MS
            self.renewer.processing_ns_max = (options.processing_ms_max or 0) * _NS_PER_MS
            self._accepted()
            return
        if connection := self.link.connection:
            connection.consumers.pop(self._number, None)
        if isinstance(answer, RunnelError):
            self._refused(answer)
        else:
            self._fail(MalformedError("answer", f"{answer!r:.200} to a consume"))

    def _accepted(self) -> None:
        self._owner.part_accepted(self)
        super()._accepted()

    def _move(self, error: MovedError) -> None:
        if self.is_at_home:  # else it asks its node again: there is a part at each
            super()._move(error)
            self.link = self._link

    def _fail(self, error: RunnelError) -> None:
        super()._fail(error)
        self._owner.part_failed(self, error)

    def wake(self) -> None:
        super().wake()
        self._owner.wake()

    def link_down(self) -> None:
        self._drop_everything(CONNECTION_LOST)
        super().link_down()
        self.wake()  # also calls that wait for room

    def link_writable(self) -> None:
        self.wake()

    def leased(self, leases: Sequence[Lease], tail: memoryview) -> None:
        """Take messages that the node has leased to the consumer."""
        batches = unpack_blocks(tail)
        if len(batches) != len(leases):
            raise MalformedError("work", f"{len(leases)} leases, {len(batches)} blocks")
        owner = self._owner
        now_ns = self._timers.monotonic_ns()
        time_ns = self._timers.time_ns()
        for lease, batch in zip(leases, batches, strict=True):
            delivery = HeldDelivery(
                lease,
                batch,
                owner.holder,
                self,
                order=owner.next_order(),
                now_ns=now_ns,
                time_ns=time_ns,
                lease_ns=self.renewer.lease_ns,
            )
            self.ledger.add(delivery)
            owner.part_arrived(self, delivery)
            self.barrier.add(delivery)
        self.renewer.watch()

    def recalled(self, parts: Sequence[DeliveryPart]) -> None:
        self.ledger.recall(parts)
        self._owner.part_recalled(self)
        self.ack_sender.send()

    def reported_late(self, parts: Sequence[DeliveryPart]) -> None:
        self.ledger.reported_late(self._owner.part_late(self, parts))
        self._owner.report_late(self.ledger)

    def moving(self, epoch: int, deliveries: Sequence[int]) -> None:
        self._moves += 1
        self._owner.part_moving(self, epoch, deliveries)

    def held(self, leases: Sequence[HeldLease]) -> None:
        self._owner.part_holds(self, leases)

    def wants(self, *, is_wanting: bool) -> None:
        self._owner.part_wants(self, is_wanting=is_wanting)

    def ended(self, error: RunnelError) -> None:
        self._drop_everything(CONSUMER_ENDED)
        self._refused(error)
        self.wake()

    # --- Windows ---

    def resize(self, messages: int, size_bytes: int) -> None:
        """Change the share of the window. A part that has not asked to join will ask with it."""
        self.window = (messages, size_bytes)
        if self.has_asked:
            share = work_heads.WindowShare(self._number, messages, size_bytes, self._moves)
            self.link.tell(share)

    def ping(self, on_answer: OnAnswer) -> bool:
        """Ask for an answer behind all that the node has sent so far. False: it does not know the part."""
        connection = self.link.connection
        if connection is None or not self.has_asked:
            return False
        number = self.link.next_number()
        connection.request(number, wire.Ping(number), on_answer)
        return True

    # --- Stored acks ---

    async def flush(self) -> None:
        """Wait until everything acked here so far is stored, as far as the node can tell."""
        if not self.ack_sender.is_stored:
            try:
                await self.wait_stored()
            except LateAckError:  # the broker has just ended the consumer
                self.may_have_lost_acks = True

    async def wait_stored(self) -> None:
        if self._is_attached:  # otherwise every ack is late
            deadline = Deadline(self._timers, self._deadline_s)
            what = f"storing acks in {self._request.subscription!r}"
            await self.ack_sender.wait_stored(deadline, what)


def _ignore_answer(answer: wire.Answer | RunnelError, tail: memoryview) -> None:
    """The callback of a request whose answer is not awaited."""
