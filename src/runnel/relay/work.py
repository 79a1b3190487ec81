"""Consumers of callers that do not merge: their parts at all nodes, merged here as a client merges them.

The caller sees one consumer. Ids of deliveries are the nodes', and change when a shard moves, so the caller gets the
numbers in which deliveries arrive here. Blocks are passed on as they came. Leases are the caller's affair: nothing is
renewed unless it says so, and what it has longer than its lease is forgotten here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from runnel.broker.consumer_groups import WorkDelivery, WorkSink
from runnel.client.connection import Handle
from runnel.client.consumer import (
    BEGUN,
    RECALLED,
    HeldDelivery,
    LateWork,
    LeasePart,
    Ledger,
)
from runnel.errors import ClosedError, RunnelError, Unavailable
from runnel.formats.work_heads import Consume, DeliveryPart, Lease, Picked
from runnel.group_rules.definition import Definition, Mode, SubscriptionOptions
from runnel.group_rules.effects import OFFSET_MAX
from runnel.relay.named_parts import joined_parts, named_parts, not_begun, unpicked
from runnel.relay.node_links import RelayedLinks
from runnel.relay.relays import RELAY_SECONDS_MAX, Relays
from runnel.relay.work_parts import LeaseTimers, WorkParts

_NS_PER_MS: Final = 1_000_000
# While so much waits for a caller that does not read, nodes lease nothing more to it.
_BUFFER_BYTES_MAX: Final = 2**20
# As much is passed on at a time, before it is looked whether the caller still reads.
_PASSED_BYTES_MAX: Final = 2**18
_CHECK_INTERVAL_S: Final = 0.5
# Later than at the node, whose word counts: a message is late when it says so.
_LEASE_MARGIN_NS: Final = 1_000_000_000
_LOST: Final = "the consumer was lost before it had acknowledged"


class RelayedConsumer:
    """One consumer over all nodes. For protocols it is what a `WorkConsumer` is."""

    def __init__(
        self, relays: Relays, token: str | None, number: int, sink: WorkSink, request: Consume
    ) -> None:
        self.is_closed = False
        self.member = ""
        self._definition: Definition
        self._relays = relays
        self._number = number
        self._sink = sink
        self._window = (request.window_messages, request.window_bytes)
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_started = self._is_paused = self._is_scheduled = False
        self._is_full = False  # nodes lease nothing: the caller does not read
        self._buffered_bytes = 0  # since the caller stopped reading
        # What the caller has, by the numbers that it knows.
        self._passed_on: dict[int, HeldDelivery] = {}
        self._told_recalled: dict[int, set[int]] = {}
        # For each call that waits until acks are stored: what came too late, as nodes have said meanwhile.
        self._storing: dict[object, list[DeliveryPart]] = {}
        self._checking: Handle | None = None
        self._links = RelayedLinks(relays, token)
        self._timers = LeaseTimers(relays.broker.clock, relays.timers)
        self._parts = WorkParts(
            self,
            self._links,
            self._timers,
            Consume(
                0,
                next(relays.stream_numbers),
                request.subscription,
                request.patterns,
                request.mode,
                request.window_messages,
                request.window_bytes,
                request.member,
                request.start,
                request.options,
            ),
        )

    async def open(self) -> None:
        """Wait until every node has accepted it."""
        self._relays.readers[self.failed] = None
        timer = self._relays.timers.call_later(RELAY_SECONDS_MAX, self._not_opened)
        try:
            self._parts.begin()
            await self._opened
        except BaseException:
            self.close(is_clean=True)
            raise
        finally:
            timer.cancel()
        accepted = self._parts.accepted
        assert accepted is not None
        self.member = accepted.member
        self._definition = Definition(
            0,
            accepted.subscription,
            tuple(accepted.patterns),
            Mode(accepted.mode),
            SubscriptionOptions.of(accepted.options),
        )

    def _not_opened(self) -> None:
        if not self._opened.done():
            self._opened.set_exception(
                Unavailable(
                    f"consuming: not every node has accepted it within {RELAY_SECONDS_MAX:g} s: {self._parts!r}"
                )
            )

    # --- Called by protocols ---

    @property
    def definition(self) -> Definition:
        return self._definition

    @property
    def leased(self) -> tuple[int, int]:
        held = [each for ledger in self._parts.ledgers() for each in ledger.deliveries.values()]
        return sum(each.left for each in held), sum(len(each.batch.body) for each in held)

    def start(self) -> None:
        self._is_started = True
        self._schedule()

    def ack(
        self,
        deliveries: Sequence[int],
        parts: Sequence[DeliveryPart],
        picked: Sequence[Picked] = (),
    ) -> Sequence[DeliveryPart]:
        late: list[DeliveryPart] = []
        touched: dict[LeasePart, None] = {}
        for number in deliveries:
            delivery = self._find(number)
            if delivery is None or not (BEGUN in delivery.states or RECALLED in delivery.states):
                late.append(DeliveryPart(number, 0, OFFSET_MAX))
                continue
            late += named_parts(number, delivery.ranges_in(RECALLED))
            self._ack(delivery, delivery.begin, delivery.end, touched)
        for part in (*parts, *unpicked(picked)):
            delivery = self._find(part.delivery)
            if delivery is None:
                late.append(part)
                continue
            late += not_begun(delivery, part)
            self._ack(delivery, part.begin, part.end, touched)
        self._send_acks(touched)
        return late

    def ack_up_to(self, topic: str, partition: int, offset: int) -> None:
        touched: dict[LeasePart, None] = {}
        for delivery in list(self._passed_on.values()):
            if (delivery.topic, delivery.partition) == (topic, partition):
                self._ack(delivery, delivery.begin, offset + 1, touched)
        self._send_acks(touched)

    def _ack(
        self, delivery: HeldDelivery, begin: int, end: int, touched: dict[LeasePart, None]
    ) -> None:
        part: LeasePart = delivery.part
        part.ledger.ack_range(delivery, begin, end)
        part.ledger.late.clear()  # the caller gets it as the result
        touched[part] = None
        self._forget_if_settled(delivery)

    def _send_acks(self, touched: Iterable[LeasePart]) -> None:
        for part in touched:
            part.ack_sender.schedule()

    def nack(
        self, parts: Sequence[DeliveryPart], *, delay_ns: int | None, reason: str
    ) -> Sequence[DeliveryPart]:
        late: list[DeliveryPart] = []
        delay_ms = None if delay_ns is None else delay_ns // _NS_PER_MS
        failed: dict[LeasePart, list[DeliveryPart]] = {}
        of_keys: list[_FailedMessages] = []
        for named in parts:
            delivery = self._find(named.delivery)
            if delivery is None:
                late.append(named)
                continue
            late += not_begun(delivery, named)
            item = _FailedMessages(delivery, named.begin, named.end)
            part: LeasePart = delivery.part
            sent = part.ledger.nack(item, delay_ms, reason)
            failed.setdefault(part, []).extend(sent)
            if sent and self._definition.mode is Mode.KEY_SHARED:
                of_keys.append(item)
            self._forget_if_settled(delivery)
        for part, sent in failed.items():
            part.ack_sender.nack(sent, delay_ms, reason)
        for item in of_keys:
            # The owner is about to recall these. The caller waits for this node's word only.
            part = item.delivery.part
            part.ledger.recall_later(item.delivery, item.begin, item.end)
            part.ack_sender.schedule()
            part.hold_back((item.delivery.topic, item.delivery.partition))
            self.tell_recalled(part.ledger)
        return late

    def give_back(self, parts: Sequence[DeliveryPart]) -> None:
        for named in parts:
            if (delivery := self._find(named.delivery)) is not None:
                part: LeasePart = delivery.part
                back = part.ledger.give_back(delivery, named.begin, named.end)
                part.ack_sender.give_back(back)
                self._forget_if_settled(delivery)

    def missing(self, parts: Sequence[DeliveryPart]) -> Sequence[DeliveryPart]:
        late: list[DeliveryPart] = []
        for part in parts:
            delivery = self._find(part.delivery)
            late += [part] if delivery is None else not_begun(delivery, part, RECALLED)
        return late

    def renew(self, deliveries: Sequence[int], *, lease_ns: int | None = None) -> None:
        options = self._definition.options
        wanted_ns = options.lease_ns if lease_ns is None else lease_ns
        until_ns = self._timers.monotonic_ns() + min(wanted_ns, options.processing_ns_max)
        by_part: dict[LeasePart, list[int]] = {}
        for number in deliveries:
            if (delivery := self._find(number)) is not None:
                delivery.deadline_ns = until_ns
                by_part.setdefault(delivery.part, []).append(delivery.id)
        lease_ms = None if lease_ns is None else lease_ns // _NS_PER_MS
        for part, ids in by_part.items():
            part.ack_sender.renew(ids, lease_ms)

    def recalled(self, parts: Sequence[DeliveryPart]) -> None:
        for named in parts:
            if (delivery := self._find(named.delivery)) is not None:
                part: LeasePart = delivery.part
                part.ledger.stop_recalled(delivery, named.begin, named.end)
                part.ack_sender.schedule()
                self._forget_if_settled(delivery)

    def resize(self, window_messages: int, window_bytes: int, moves_known: int = 0) -> None:  # noqa: ARG002 - the caller has no part
        self._window = (window_messages, window_bytes)
        if not (self._is_full or self.is_closed):
            self._parts.resize(*self._window)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._schedule()

    async def wait_stored(self) -> Sequence[DeliveryPart]:
        late: list[DeliveryPart] = []
        call = object()
        self._storing[call] = late
        try:
            await self._parts.flush()
        finally:
            del self._storing[call]
        return late

    def close(self, *, is_clean: bool) -> None:
        """Leave at every node. Leased messages go back; unless `is_clean`, what the caller has counts as failed."""
        if self.is_closed:
            return
        self._stop()
        if not is_clean:
            for delivery in self._passed_on.values():
                part: LeasePart = delivery.part
                failed = [
                    DeliveryPart(delivery.id, begin, end)
                    for begin, end in delivery.ranges_in(BEGUN)
                ]
                if failed and part.link.connection is not None:
                    part.ack_sender.nack(failed, 0, _LOST)
        self._passed_on.clear()
        if self._parts.is_stored:
            self._leave()
        else:
            self._parts.resize(0, 0)
            self._relays.tasks.start(self._leave_when_stored())

    async def _leave_when_stored(self) -> None:
        """Leave behind the acks so far, also those of shards that move now."""
        try:
            with suppress(RunnelError, TimeoutError):
                await asyncio.wait_for(self._parts.flush(), RELAY_SECONDS_MAX)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._parts.abandon()
        self._links.close()

    def _stop(self) -> None:
        """Pass nothing on any more."""
        self.is_closed = True
        self._relays.readers.pop(self.failed, None)
        if self._checking is not None:
            self._checking.cancel()
        self._told_recalled.clear()
        if not self._opened.done():
            self._opened.set_exception(ClosedError("the consumer was closed"))
            self._opened.exception()

    def _find(self, number: int) -> HeldDelivery | None:
        """What the caller has under this number; None if its lease is over, or all of it is settled."""
        delivery = self._passed_on.get(number)
        return None if delivery is None or delivery.loss else delivery

    def _forget_if_settled(self, delivery: HeldDelivery) -> None:
        if not delivery.left:
            self._passed_on.pop(delivery.order, None)
            self._told_recalled.pop(delivery.order, None)

    # --- To the caller ---

    def _schedule(self) -> None:
        if not (self._is_scheduled or self.is_closed):
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        """Pass on what has arrived, while the caller reads."""
        self._is_scheduled = False
        while self._is_started and not (self._is_paused or self.is_closed):
            works = self._take()
            if not works:
                break
            self._sink.deliver_work(self._number, works)
        if not (self._is_paused or self.is_closed):
            self._buffered_bytes = 0
            if self._is_full:
                self._is_full = False
                self._parts.resize(*self._window)

    def _take(self) -> list[WorkDelivery]:
        queue = self._parts.queue
        works: list[WorkDelivery] = []
        size = 0
        while size < _PASSED_BYTES_MAX and (delivery := queue.take_delivery_nowait()) is not None:
            batch = queue.begin_batch_nowait(delivery)
            if batch is None:
                continue  # recalled, or lost, meanwhile
            self._passed_on[delivery.order] = delivery
            lease = Lease(
                delivery.order,
                delivery.topic,
                delivery.partition,
                delivery.begin,
                delivery.end,
                tuple(delivery.attempts.values()),
            )
            work = WorkDelivery.whole(lease, batch)
            works.append(work)
            size += work.size
        return works

    def _check(self) -> None:
        """Forget what is settled, and what the caller has had for longer than its lease."""
        self._checking = None
        for delivery in list(self._passed_on.values()):
            if delivery.loss:
                self._passed_on.pop(delivery.order, None)
                self._told_recalled.pop(delivery.order, None)
            self._forget_if_settled(delivery)
        before_ns = self._timers.monotonic_ns() - _LEASE_MARGIN_NS
        over = self._parts.expire(before_ns)
        self._lose(over)
        if any(ledger.deliveries for ledger in self._parts.ledgers()):
            self._watch_leases()

    def _watch_leases(self) -> None:
        if self._checking is None and not self.is_closed:
            self._checking = self._relays.timers.call_later(_CHECK_INTERVAL_S, self._check)

    def _lose(self, deliveries: Iterable[HeldDelivery]) -> None:
        lost = [each.order for each in deliveries if self._passed_on.pop(each.order, None)]
        for order in lost:
            self._told_recalled.pop(order, None)
        if lost and not self.is_closed:
            self._sink.leases_expired(self._number, lost)

    # --- From the parts ---

    def woken(self) -> None:
        """Something has arrived, or a node has accepted the consumer."""
        if self.is_closed:
            return
        if not self._opened.done() and self._parts.is_open:
            self._opened.set_result(None)
        self._schedule()

    def arrived(self, delivery: HeldDelivery) -> None:
        self._watch_leases()
        if self._is_paused:
            self._buffered_bytes += len(delivery.batch.body)
            if self._buffered_bytes > _BUFFER_BYTES_MAX and not self._is_full:
                self._is_full = True
                self._parts.resize(0, 0)

    def tell_recalled(self, ledger: Ledger) -> None:
        """Pass on what is recalled, unless the caller has been told."""
        parts: list[DeliveryPart] = []
        for delivery in ledger.deliveries.values():
            if RECALLED not in delivery.states or delivery.order not in self._passed_on:
                continue
            told = self._told_recalled.setdefault(delivery.order, set())
            for begin, end in delivery.ranges_in(RECALLED):
                new = [offset for offset in range(begin, end) if offset not in told]
                told.update(new)
                parts += joined_parts(delivery.order, new)
        if parts and not self.is_closed:
            self._sink.recall(self._number, parts)

    def lost(self, ledger: Ledger) -> None:
        """The connection to a node is lost, and with it all its leases."""
        self._lose(ledger.deliveries.values())

    def reported_late(self, late: Sequence[LateWork]) -> None:
        parts = [DeliveryPart(each.order, each.begin, each.end) for each in late if each.order]
        if parts and self._storing:
            next(iter(self._storing.values())).extend(parts)
        elif parts and not self.is_closed:
            self._sink.late(self._number, parts)

    def failed(self, error: RunnelError) -> None:
        if self.is_closed:
            return
        if not self._opened.done():
            self._opened.set_exception(error)
            return
        self._stop()
        self._passed_on.clear()
        self._leave()
        self._sink.consumer_ended(self._number, error)


class _FailedMessages(NamedTuple):
    """Messages of one delivery that the caller reports as failed."""

    delivery: HeldDelivery
    begin: int
    end: int

    def ranges(self) -> Sequence[tuple[int, int]]:
        return ((self.begin, self.end),)
