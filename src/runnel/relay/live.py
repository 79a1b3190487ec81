"""Live subscriptions of callers that do not merge: the parts of all nodes, merged here as a client merges them.

What arrives waits in a buffer as large as the caller's credit, divided among the parts. It goes on as stored blocks, in
the order in which it came, as far as the caller has credit. So a caller that does not read is served from the logs of
the nodes, and nothing piles up here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from runnel.broker.broker import LiveDelivery, ShardId
from runnel.broker.live.subscription import LivePartSink, SubscribeRequest
from runnel.client.connection import Handle
from runnel.client.consumer import (
    PartDelivery,
    PartsRequest,
    SubscriptionParts,
    SubscriptionPosition,
)
from runnel.errors import ClosedError, RunnelError, Unavailable
from runnel.formats import block, envelope, wire
from runnel.formats.batch import Batch
from runnel.formats.wire import GapState, Owner, PartitionPlace, ShardPlace
from runnel.relay.node_links import RelayedLinks
from runnel.relay.relays import RELAY_SECONDS_MAX, Relays
from runnel.topics.names import LIVE_JOURNAL, TopicPartition

_BUFFER_BYTES_MIN: Final = 64 * 2**10
_GAPS_MAX: Final = 1000
# How long a stream goes on without one of its shards, while a node takes the shard over.
_UNCOVERED_SECONDS_MAX: Final = 30.0

_LAST_SENT: Final = LiveDelivery(ShardId(LIVE_JOURNAL), 0, 0, (), 0, 0)


class _Position(SubscriptionPosition):
    """A position that keeps where the subscription began, and tells when all last values have come."""

    def __init__(
        self, patterns: Sequence[str], start: wire.Start, on_last_sent: Callable[[], None]
    ) -> None:
        super().__init__(patterns, start)
        self.partitions: Final[dict[TopicPartition, PartitionPlace]] = {}
        self.shards: Final[dict[tuple[str, int], ShardPlace]] = {}
        self._on_last_sent = on_last_sent
        self._has_last = start.kind in ("last", "resume_last")

    def begin(self, answer: wire.Subscribed) -> None:
        for place in answer.partitions:
            self.partitions.setdefault((place.topic, place.partition), place)
        for shard in answer.shards:
            self.shards.setdefault((shard.journal, shard.shard), shard)
        super().begin(answer)

    def end_last_values(self) -> None:
        super().end_last_values()
        if self._has_last:
            self._has_last = False
            self._on_last_sent()


class RelayedSubscription:
    """One live subscription over all nodes. For protocols it is what a `LiveSubscription` is."""

    elsewhere: Sequence[Owner] = ()
    parts: LivePartSink | None = None  # the caller merges nothing

    def __init__(self, relays: Relays, token: str | None, request: SubscribeRequest) -> None:
        self.is_closed = False
        self.partitions: Sequence[PartitionPlace] = ()
        self.shards: Sequence[ShardPlace] = ()
        self._relays = relays
        self._request = request
        self._credit_bytes = request.credit_bytes
        self._arrived: deque[tuple[int, LiveDelivery, int] | GapState] = deque()
        self._gaps_waiting = 0
        self._is_started = False
        self._is_paused = False
        self._is_open = False
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._uncovered: Handle | None = None
        self._links = RelayedLinks(relays, token)
        self._position = _Position(request.patterns, request.start, self._on_last_sent)
        self._parts = SubscriptionParts(
            self._links,
            relays.timers,
            self,
            PartsRequest(
                next(relays.stream_numbers),
                tuple(request.patterns),
                request.start,
                request.overflow,
                max(request.credit_bytes, _BUFFER_BYTES_MIN),
            ),
            self._position,
        )

    async def open(self) -> None:
        """Wait until every node has begun its part."""
        self._relays.readers[self._fail] = None
        timer = self._relays.timers.call_later(RELAY_SECONDS_MAX, self._not_opened)
        try:
            self._parts.open()
            await self._opened
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        self.partitions = tuple(self._position.partitions.values())
        self.shards = tuple(self._position.shards.values())

    def _not_opened(self) -> None:
        if not self._opened.done():
            self._opened.set_exception(
                Unavailable(
                    f"subscribing: not every node has begun within {RELAY_SECONDS_MAX:g} s: {self._parts.state}"
                )
            )

    # --- Called by protocols ---

    def start(self) -> None:
        """Begin to deliver."""
        self._is_started = True
        self._deliver()

    def grant(self, credit_bytes: int) -> None:
        self._credit_bytes += credit_bytes
        self._deliver()

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._deliver()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._relays.readers.pop(self._fail, None)
            if self._uncovered is not None:
                self._uncovered.cancel()
            self._parts.close(lambda: None)
            self._links.close()
            self._arrived.clear()
            if not self._opened.done():
                self._opened.set_exception(ClosedError("the subscription was closed"))
                self._opened.exception()

    # --- From the parts ---

    def part_delivered(self, part: int, delivery: PartDelivery) -> None:
        head = delivery.head
        buffers: Sequence[bytes | memoryview] = ()
        if delivery.is_whole:
            buffers = (delivery.tail,) if delivery.size else ()
        else:
            buffers = [piece for batch in delivery.batches for piece in _block_of(batch)]
        live = LiveDelivery(
            ShardId(head.journal, head.shard),
            head.epoch,
            head.next_entry,
            buffers,
            sum(map(len, buffers)),
            sum(map(len, delivery.batches)),
        )
        if not live.size and not live.next_entry:
            # Nothing is left of it. As a delivery it would say that all last values were sent.
            self._parts.consumed(part, delivery.size)
            self._parts.grant()
            return
        self._arrived.append((part, live, delivery.size))
        self._deliver()

    def part_missed(self, gap: GapState) -> None:
        if self._gaps_waiting >= _GAPS_MAX:
            last = self._arrived[-1]
            if isinstance(last, GapState):
                self._arrived.pop()
                self._gaps_waiting -= 1
                text = "several gaps, added up because nobody read them"
                gap = GapState(gap.reason, last.missed + gap.missed, text=text)
        self._gaps_waiting += 1
        self._arrived.append(gap)
        self._deliver()

    def parts_failed(self, error: RunnelError) -> None:
        self._fail(error)

    def parts_changed(self) -> None:
        """The subscription has begun; or a shard is not read for now."""
        if self.is_closed:
            return
        if self._parts.is_covered:
            if not self._opened.done():
                self._opened.set_result(None)
            if self._uncovered is not None:
                self._uncovered.cancel()
                self._uncovered = None
        elif self._opened.done() and self._uncovered is None:
            self._uncovered = self._relays.timers.call_later(_UNCOVERED_SECONDS_MAX, self._give_up)

    def _give_up(self) -> None:
        self._fail(
            Unavailable(
                f"for {_UNCOVERED_SECONDS_MAX:g} s not everything could be read; subscribe again: {self._parts.state}"
            )
        )

    def _on_last_sent(self) -> None:
        self._arrived.append((0, _LAST_SENT, 0))
        self._deliver()

    def _fail(self, error: RunnelError) -> None:
        if self.is_closed:
            return
        if not self._opened.done():
            self._opened.set_exception(error)
            return
        self.close()
        self._request.sink.ended(self._request.number, error)

    # --- To the caller ---

    def _deliver(self) -> None:
        """Pass on what the caller has credit for."""
        sink, number = self._request.sink, self._request.number
        while self._arrived and self._is_started and not self._is_paused and not self.is_closed:
            arrived = self._arrived[0]
            if isinstance(arrived, GapState):
                self._arrived.popleft()
                self._gaps_waiting -= 1
                sink.gap(number, arrived)
                continue
            part, delivery, received_bytes = arrived
            if delivery.size and self._credit_bytes <= 0:
                break
            self._arrived.popleft()
            self._credit_bytes -= delivery.size
            sink.deliver(number, delivery)
            if received_bytes:
                self._parts.consumed(part, received_bytes)
        if not self.is_closed:
            self._parts.grant()


def _block_of(batch: Batch) -> tuple[bytes | memoryview, ...]:
    return block.pack(envelope.encode(batch.envelope), batch.body)
