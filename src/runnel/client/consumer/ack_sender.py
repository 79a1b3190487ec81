"""Sends the frames of a consumer: acks, collected into one frame per wake-up; nacks, renewals, given-up messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from runnel.client.connection import Deadline, Link, OnAnswer
from runnel.client.consumer.ledger import Acks, Ledger
from runnel.errors import MalformedError, RunnelError
from runnel.formats import wire
from runnel.formats.work_heads import (
    Ack,
    AckedHead,
    DeliveryPart,
    GiveBack,
    Nack,
    Picked,
    Recalled,
    Renew,
)

_T = TypeVar("_T")

_FRAME_ITEMS_MAX: Final = 1000  # deliveries, parts and picked
_REASON_CHARS_MAX: Final = 1000


class AckSender:
    """Sends acks, nacks, renewals and given-up messages of a consumer to one node. Only `wait_stored` waits."""

    def __init__(
        self,
        ledger: Ledger,
        link: Callable[[], Link],
        number: int,
        on_late: Callable[[Sequence[DeliveryPart]], object],
        on_sent: Callable[[], object] | None = None,
    ) -> None:
        self.is_scheduled = False
        self._ledger = ledger
        self._link = link
        self._number = number
        self._on_late = on_late
        self._on_sent = on_sent
        self._loop = asyncio.get_running_loop()
        # Frames with acks: sent, and known to be stored.
        self._sent_frames = self._stored_frames = 0

    @property
    def is_stored(self) -> bool:
        """Whether everything acked so far is known to be stored."""
        return self._sent_frames == self._stored_frames and not self._ledger.unsent

    def forget(self) -> bool:
        """Expect no more answers: the connection is lost. Returns whether acks may be lost with it."""
        may_have_lost_acks = self._sent_frames > self._stored_frames
        self._stored_frames = self._sent_frames
        return may_have_lost_acks

    def schedule(self) -> None:
        """Send collected acks and given-up messages at the end of the wake-up, or now if there are many."""
        if self._ledger.is_send_due:
            self.send()
        elif not self.is_scheduled and (self._ledger.unsent or self._ledger.given_up):
            self.is_scheduled = True
            self._loop.call_soon(self._send_scheduled)

    def _send_scheduled(self) -> None:
        self.is_scheduled = False
        self.send()

    def send(self, answered: asyncio.Future[None] | None = None) -> None:
        """Send all acks, then all given-up messages. `answered` resolves once all acks so far are stored."""
        link = self._link()
        connection = link.connection
        if connection is None:
            return  # losing the connection has made all acks late
        if self._ledger.unsent or answered is not None:
            self._sent_frames += 1
            *others, last = _frames(self._ledger.take_acks())
            for frame in others:
                link.tell(Ack(0, self._number, *frame))
            if answered is None:
                link.tell(Ack(0, self._number, *last))
            else:
                number = link.next_number()
                settle = self._settle_function(answered, self._sent_frames)
                connection.request(number, Ack(number, self._number, *last), settle)
        if self._ledger.given_up:
            for chunk in _chunks(self._ledger.take_given_up()):
                link.tell(Recalled(self._number, chunk))
        if self._on_sent is not None:
            self._on_sent()

    def nack(self, parts: Sequence[DeliveryPart], delay_ms: int | None, reason: str) -> None:
        """Send nacks behind the acks so far; otherwise messages acked before might come again with the failed ones.

        The reason must be valid UTF-8 and the delay fit 64 bits: if encoding failed, what is taken here would be lost.
        """
        given_up = self._ledger.take_given_up()
        self.send()
        for chunk in _chunks(parts):
            self._link().tell(Nack(self._number, chunk, delay_ms, reason[:_REASON_CHARS_MAX]))
        self._ledger.given_up += given_up  # the broker expects them behind their nack
        self.send()

    def ack_parts(self, parts: Sequence[DeliveryPart]) -> None:
        """Acknowledge messages that the ledger no longer has: their first ack was lost on a move."""
        for chunk in _chunks(parts):
            self._sent_frames += 1
            self._link().tell(Ack(0, self._number, (), chunk))

    def give_back(self, parts: Sequence[DeliveryPart]) -> None:
        """Return messages on which no work has begun."""
        for chunk in _chunks(parts):
            self._link().tell(GiveBack(self._number, chunk))

    def stop(self, parts: Sequence[DeliveryPart]) -> None:
        """Confirm that work on recalled messages has ended."""
        for chunk in _chunks(parts):
            self._link().tell(Recalled(self._number, chunk))

    def renew(self, deliveries: Sequence[int], lease_ms: int | None = None) -> None:
        """Renew the leases of deliveries; by default for the subscription's lease time."""
        for chunk in _chunks(deliveries):
            self._link().tell(Renew(self._number, chunk, lease_ms))

    async def wait_stored(self, deadline: Deadline, what: str) -> None:
        """Send all acks, and wait until they are stored. Late ones have been reported by then."""
        answered: asyncio.Future[None] = self._loop.create_future()
        self.send(answered)
        await deadline.wait(answered, lambda: self._link().expired(what, deadline))

    def _settle_function(self, answered: asyncio.Future[None], sent_frames: int) -> OnAnswer:
        def settle(answer: wire.Answer | RunnelError, _: memoryview) -> None:
            if isinstance(answer, AckedHead):
                self._stored_frames = max(self._stored_frames, sent_frames)
                self._on_late(answer.late)
                if not answered.done():
                    answered.set_result(None)
            elif not answered.done():
                answered.set_exception(
                    answer
                    if isinstance(answer, RunnelError)
                    else MalformedError("answer", f"{answer!r:.200} to an ack")
                )

        return settle


def _chunks(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for begin in range(0, len(items), _FRAME_ITEMS_MAX):
        yield items[begin : begin + _FRAME_ITEMS_MAX]


def _frames(acks: Acks) -> list[tuple[Sequence[int], Sequence[DeliveryPart], Sequence[Picked]]]:
    """The contents of the frames; at least one, which may be empty."""
    if len(acks.deliveries) + len(acks.parts) + len(acks.picked) <= _FRAME_ITEMS_MAX:
        return [acks]
    return [
        *((chunk, (), ()) for chunk in _chunks(acks.deliveries)),
        *(((), chunk, ()) for chunk in _chunks(acks.parts)),
        *(((), (), chunk) for chunk in _chunks(acks.picked)),
    ]
