"""The live subscriptions of one connection: opens them, grants credit, and sends their messages to the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from runnel.broker.access import Access
from runnel.broker.broker import LiveDelivery, ShardId
from runnel.broker.live.subscription import LiveSubscription, OpenSubscription, SubscribeRequest
from runnel.errors import ClientFault, LimitExceededError, RunnelError
from runnel.formats import wire
from runnel.protocols.native.answers import ended_notice
from runnel.protocols.native.output import Output, say


class _OpeningSubscription(msgspec.Struct):
    """A subscription that the broker is still preparing, and the requests that came for it meanwhile."""

    credit_bytes: int = 0
    unsubscribe_ids: list[int] = msgspec.field(default_factory=list)


class Subscriptions:
    """All live subscriptions of one connection, by the client's numbers; the `Sink` of each."""

    __slots__ = ("_by_number", "_is_closed", "_is_paused", "_output", "messages_out")

    def __init__(self, output: Output) -> None:
        self._output = output
        self._by_number: dict[int, OpenSubscription | _OpeningSubscription] = {}
        self._is_paused = False
        self._is_closed = False
        self.messages_out = 0

    def __len__(self) -> int:
        return len(self._by_number)

    # --- Requests of the client ---

    def prepare(self, number: int, count_max: int) -> None:
        """Reserve the number for a subscription that is about to be opened."""
        if number in self._by_number:
            raise ClientFault(f"this connection has a subscription {number}; choose another number")
        if len(self._by_number) >= count_max:
            raise LimitExceededError(
                f"this connection has {count_max} subscriptions; no more are allowed "
                "(native.subscriptions_max)"
            )
        self._by_number[number] = _OpeningSubscription()

    async def open(
        self, access: Access, request: wire.Subscribe, *, is_in_parts: bool = False
    ) -> None:
        """Open the prepared subscription, and answer the client. `is_in_parts`: the client merges those of nodes."""
        number = request.subscription
        opening = self._by_number.get(number)
        if not isinstance(opening, _OpeningSubscription):
            return  # the connection was lost before this task began
        try:
            subscription = await access.subscribe(
                SubscribeRequest(
                    number,
                    self,
                    request.patterns,
                    request.start,
                    request.credit_bytes,
                    request.overflow,
                    self if is_in_parts else None,
                )
            )
        except BaseException:
            self._forget(number, opening)
            raise
        if self._is_closed:
            subscription.close()
            return
        subscribed = wire.Subscribed(
            request.id,
            number,
            subscription.partitions,
            subscription.shards,
            subscription.elsewhere,
        )
        say(self._output, subscribed)
        if is_in_parts:
            # Only a node's own subscription is in parts.
            self.shards_came(number, access.served_for(cast(LiveSubscription, subscription)))
        if opening.unsubscribe_ids:
            subscription.close()
            self._forget(number, opening)
            return
        self._by_number[number] = subscription
        if opening.credit_bytes:
            subscription.grant(opening.credit_bytes)
        if self._is_paused:
            subscription.pause()
        subscription.start()  # only now: the client has to know the subscription before its messages

    async def begin_shards(self, access: Access, request: wire.ShardsFrom) -> None:
        """Let a subscription in parts begin some shards, and answer the client."""
        number = request.subscription
        subscription = self._by_number.get(number)
        if isinstance(subscription, _OpeningSubscription) or (
            subscription is not None and subscription.parts is None
        ):
            raise ClientFault(f"subscription {number} has no shards to begin: it is not in parts")
        begun, own = None, cast("LiveSubscription | None", subscription)
        if own is not None:  # else it has just ended
            begun = await access.begin_shards(own, request.shards, request.start)
        if begun is None or own is None or own.is_closed:
            say(self._output, wire.Subscribed(request.id, number))
            return
        # No await since it has begun: its messages follow the answer.
        answer = wire.Subscribed(request.id, number, begun.partitions, begun.shards)
        say(self._output, answer)
        for shard, gap in begun.gaps:
            own.report_gap(gap, shard if own.places is not None else None)

    def grant(self, number: int, credit_bytes: int) -> None:
        """Add credit. No error for an unknown subscription: the request may have crossed the notice of its end."""
        subscription = self._by_number.get(number)
        if isinstance(subscription, _OpeningSubscription):
            subscription.credit_bytes += credit_bytes
        elif subscription is not None:
            subscription.grant(credit_bytes)

    def unsubscribe(self, request: wire.Unsubscribe) -> None:
        """End a subscription. Also answers `done` if it is unknown: the broker may just have ended it."""
        number = request.subscription
        subscription = self._by_number.get(number)
        if isinstance(subscription, _OpeningSubscription):
            subscription.unsubscribe_ids.append(request.id)  # answered once it is open
            return
        if subscription is not None:
            del self._by_number[number]
            subscription.close()
        say(self._output, wire.Done(request.id))

    def _forget(self, number: int, opening: _OpeningSubscription) -> None:
        self._by_number.pop(number, None)
        for request_id in opening.unsubscribe_ids:
            say(self._output, wire.Done(request_id))

    # --- Events of the connection ---

    def pause(self) -> None:
        """The client reads more slowly than the broker writes."""
        self._is_paused = True
        for subscription in self._by_number.values():
            if not isinstance(subscription, _OpeningSubscription):
                subscription.pause()

    def resume(self) -> None:
        self._is_paused = False
        for subscription in list(self._by_number.values()):
            if self._is_paused:
                return  # messages of the subscriptions before have filled the output again
            if not isinstance(subscription, _OpeningSubscription):
                subscription.resume()

    def close(self) -> None:
        self._is_closed = True
        for subscription in self._by_number.values():
            if not isinstance(subscription, _OpeningSubscription):
                subscription.close()
        self._by_number.clear()

    # --- Calls from the broker (Sink) ---

    @property
    def connection_id(self) -> int:
        return self._output.connection_id

    @property
    def peer(self) -> str:
        return self._output.peer

    def deliver(self, subscription: int, delivery: LiveDelivery) -> None:
        """Hot: called once for every batch and subscriber."""
        shard = delivery.shard
        head = wire.Deliver(
            subscription, shard.journal, shard.shard, delivery.epoch, delivery.next_entry
        )
        self.messages_out += delivery.messages
        self._output.send(wire.encode(head, delivery.size), delivery.buffers, delivery.size)

    def gap(self, subscription: int, gap: wire.GapState) -> None:
        say(self._output, wire.GapNotice(subscription, gap))

    def shards_came(self, subscription: int, shards: Sequence[wire.ShardTerm]) -> None:
        say(self._output, wire.ShardsCame(subscription, shards))

    def shards_left(self, subscription: int, shards: Sequence[wire.ShardTerm]) -> None:
        say(self._output, wire.ShardsLeft(subscription, shards))

    def gap_in(self, subscription: int, shard: ShardId, gap: wire.GapState) -> None:
        say(self._output, wire.GapNotice(subscription, gap, shard.journal, shard.shard))

    def ended(self, subscription: int, error: RunnelError) -> None:
        self._by_number.pop(subscription, None)
        say(self._output, ended_notice(subscription, error))
