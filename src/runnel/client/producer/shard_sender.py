"""The sender of one shard: it takes a publisher's rows in order, and sends them as batches until they are acknowledged.

A sender decides when a batch is cut and sent. It also decides what happens if the answer is an error, or does not come.
It acts through its link. The publisher that owns it counts the batches in flight.

After a refusal, a sender stops until everything in flight is answered. What it sends again then keeps its order.
(Without a name, a batch that was in flight behind the refused one may have overtaken it.)

A named publisher numbers its batches by their place in the queue, so the batches behind a refused one take its number.
The broker cannot have stored them: it takes numbers one after the other.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final, NamedTuple, Protocol

import msgspec

from runnel.client.connection import BrokerConnection, Handle, Link, Router, Timers, backoff_s
from runnel.client.producer.batch_builder import BuiltBatch, PendingRows, build_batch
from runnel.errors import (
    ConnectionLostError,
    MalformedError,
    MovedError,
    ProducerFault,
    ProducerFencedError,
    ProducerForgottenError,
    RunnelError,
    TimeoutExpiredError,
    Unavailable,
)
from runnel.formats import wire
from runnel.formats.envelope import Codec

# While fewer batches are in flight, a batch that is not full leaves at once.
_IN_FLIGHT_EAGER: Final = 16
# Batches of a named publisher in one shard. The broker remembers the offsets of the last 256 numbers: it would answer
# an older batch that is sent again without its offsets.
NUMBERED_MAX: Final = 128


class Flush(enum.Enum):
    """Which batches leave."""

    FULL = enum.auto()  # only full ones: more messages follow in this wake-up
    DUE = enum.auto()  # also others, while few are in flight, or after they have lingered
    ALL = enum.auto()


# Looking up an enum's member takes several times as long.
_FULL: Final = Flush.FULL
_DUE: Final = Flush.DUE
_ALL: Final = Flush.ALL


class SenderKey(NamedTuple):
    """What all messages of a batch have in common."""

    keep: str
    journal: str
    shard: int


class PublisherOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a publisher makes and sends its batches."""

    name: str | None
    term: int
    level: str | None
    batch_messages_max: int
    batch_bytes_max: int
    linger_s: float
    deadline_s: float | None
    codec: Codec


class SenderOwner(Protocol):
    """The publisher, as its senders see it."""

    batches_in_flight: int

    def seek_owner(self, sender: ShardSender) -> None: ...

    def settled(self, rows: PendingRows, error: RunnelError | None) -> None: ...

    def batch_answered(self) -> None: ...

    def refused_late(self, error: RunnelError) -> None: ...

    def sender_broken(self, error: RunnelError) -> None: ...


class _QueuedBatch(msgspec.Struct, eq=False):
    """A batch that waits or is in flight."""

    batch: BuiltBatch
    expires_ns: int
    is_in_flight: bool = False
    is_settled: bool = False


class ShardSender:
    """Rows that are collected, then batches that wait or are in flight, all of one shard."""

    def __init__(
        self,
        key: SenderKey,
        address: str,
        router: Router,
        owner: SenderOwner,
        options: PublisherOptions,
        timers: Timers,
    ) -> None:
        self.key: Final = key
        self._router = router
        self._owner = owner
        self._options = options
        self._timers = timers
        deadline_s = options.deadline_s
        self._deadline_ns = None if deadline_s is None else round(deadline_s * 1e9)
        self._link = router.link(address)
        self._link.listeners[self] = None
        self._rows: deque[PendingRows] = deque()
        self._rows_expire_ns = 0
        self._batches: deque[_QueuedBatch] = deque()
        self._in_flight = 0
        self._number = 0  # of the first batch in the queue
        self._is_stopped = False
        self._refusals = 0
        self._refusal: RunnelError | None = None
        self._restart: Handle | None = None
        self._linger: Handle | None = None
        self._has_lingered = False
        self._expiry_timer: Handle | None = None

    @property
    def link(self) -> Link:
        return self._link

    @property
    def is_empty(self) -> bool:
        return not self._rows and not self._batches

    # --- What the publisher calls ---

    def add(self, rows: PendingRows) -> None:
        """Append rows. `pump` sends them."""
        if not self._rows:
            self._rows_expire_ns = self._expiry_ns()
            self._rows.append(rows)
        elif self._rows[-1].generation == rows.generation:
            self._fill_up(rows)
        else:
            self._rows.append(rows)
        if self._expiry_timer is None:
            self._watch()

    def _fill_up(self, rows: PendingRows) -> None:
        """Append to rows of the same generation, up to one batch. Each cut off a longer list would move all of it."""
        last = self._rows[-1]
        last.extend(rows)
        count = last.count_within(self._options.batch_messages_max, self._options.batch_bytes_max)
        if count < len(last):
            self._rows[-1] = last.cut(count)
            self._rows.append(last)

    def pump(self, flush: Flush = Flush.DUE) -> None:
        """Send the batches that may leave now."""
        if not self._rows and not self._batches:
            return
        connection = self._link.connection
        if connection is None:
            self._fail_if_over()
            if self._router.is_several and not self.is_empty:
                self._owner.seek_owner(self)  # another node may own the shard now
            return
        if not connection.is_writable or (self._is_stopped and not self._may_go_on()):
            return
        if self._refusals and self._batches:
            # Nothing was accepted since a refusal. One batch tries first, so that none overtakes it.
            if not self._in_flight:
                self._send(self._batches[0], connection)
            return
        for queued in self._batches:
            if not queued.is_in_flight and not queued.is_settled:
                self._send(queued, connection)
        while self._rows and connection.is_writable and not self._is_stopped:
            if self._options.name is not None and len(self._batches) >= NUMBERED_MAX:
                return  # every answer pumps again
            if not self._is_due(flush):
                if flush is not _FULL:
                    self._begin_lingering()
                return
            self._send_next(connection)
        if self._linger is not None:
            self._end_lingering()

    def _is_due(self, flush: Flush) -> bool:
        """Whether the first rows should leave now."""
        if flush is _DUE and self._owner.batches_in_flight < _IN_FLIGHT_EAGER:
            return True
        if flush is _ALL or len(self._rows) > 1 or self._has_lingered:
            return True
        rows, options = self._rows[0], self._options
        return len(rows) >= options.batch_messages_max or rows.size >= options.batch_bytes_max

    def close(self, error: RunnelError) -> None:
        """Give up all rows and batches."""
        for timer in (self._restart, self._linger, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        self._link.listeners.pop(self, None)
        self._is_stopped = True
        self._settle_all(error)

    def _settle_all(self, error: RunnelError) -> None:
        while self._batches:
            self._settle(self._batches[0], error)
        while self._rows:
            self._owner.settled(self._rows.popleft(), error)

    def _fail_if_over(self) -> None:
        """Give up everything if the link has failed for good. Waiting for the deadline would not help."""
        failure = self._link.failure
        if failure is None:
            return
        if self._options.name is not None:
            self._owner.sender_broken(failure)
        else:
            self._settle_all(failure)

    # --- What the link reports (LinkListener) ---

    def link_up(self) -> None:
        self.pump()

    def link_down(self) -> None:
        """Batches in flight are answered with the loss, in this wake-up. The others wait for the next connection."""
        if self._link.failure is not None or self._router.is_several:
            self._timers.call_later(0, self.pump)

    def link_writable(self) -> None:
        self.pump()

    # --- Cutting and sending ---

    def _may_go_on(self) -> bool:
        """A sender that was stopped continues once nothing is in flight and its pause is over."""
        if self._is_stopped and not self._in_flight and self._restart is None:
            self._is_stopped = False
        return not self._is_stopped

    def _send_next(self, connection: BrokerConnection) -> None:
        """Cut the next batch off the rows, and send it."""
        rows = self._rows[0]
        options = self._options
        count = rows.count_within(options.batch_messages_max, options.batch_bytes_max)
        expires_ns = self._rows_expire_ns
        if count == len(rows.payloads):
            self._rows.popleft()
        else:
            rows = rows.cut(count)
        if self._rows:
            self._rows_expire_ns = self._expiry_ns()
        try:
            batch = build_batch(
                rows,
                transmit_time_ns=self._timers.time_ns(),
                shard=self.key.shard,
                producer=options.name,
                term=options.term,
                number=self._number + len(self._batches) if options.name is not None else 0,
                codec=options.codec,
            )
        except RunnelError as error:
            self._owner.settled(rows, error)
            return
        queued = _QueuedBatch(batch, expires_ns)
        self._batches.append(queued)
        self._send(queued, connection)

    def _send(self, queued: _QueuedBatch, connection: BrokerConnection) -> None:
        batch, link = queued.batch, self._link
        number = link.next_number()
        publish = wire.Publish(number, self._options.level)
        if self._options.level == "none":
            # Done once the transport has it. The next flush reports a refusal that still comes.
            self._leave(queued)
            connection.request_unanswered(
                number,
                publish,
                lambda answer, _: self._refused_late(answer),
                batch.block,
                batch.block_bytes,
            )
            batch.succeed(wire.Published(0, (), 0, 0, 0, "none"))
            self._owner.settled(batch.rows, None)
            return
        queued.is_in_flight = True
        self._in_flight += 1
        self._owner.batches_in_flight += 1
        connection.request(
            number,
            publish,
            lambda answer, _: self._answered(queued, answer, link),
            batch.block,
            batch.block_bytes,
        )

    def _refused_late(self, answer: wire.Answer | RunnelError) -> None:
        if isinstance(answer, RunnelError) and not isinstance(answer, ConnectionLostError):
            self._owner.refused_late(answer)

    # --- Answers ---

    def _answered(self, queued: _QueuedBatch, answer: wire.Answer | RunnelError, by: Link) -> None:
        queued.is_in_flight = False
        self._in_flight -= 1
        self._owner.batches_in_flight -= 1
        if queued.is_settled:
            pass  # it was given up before
        elif isinstance(answer, wire.Published):
            self._refusals = 0
            self._refusal = None
            queued.batch.succeed(answer)
            self._settle(queued, None)
        elif isinstance(answer, RunnelError):
            self._refused(queued, answer, by)
        else:
            self._settle(queued, MalformedError("answer", f"{answer!r:.200} to a publish"))
        if not self._in_flight and self._is_stopped:
            self.pump()
        self._owner.batch_answered()

    def _refused(self, queued: _QueuedBatch, error: RunnelError, by: Link) -> None:
        is_named = self._options.name is not None
        if isinstance(error, ConnectionLostError):
            # A named publisher sends it again, and the broker recognizes its number.
            if not is_named:
                self._settle(queued, _unsure(error))
        elif isinstance(error, ProducerFencedError | ProducerForgottenError):
            self._owner.sender_broken(error)
        elif isinstance(error, ProducerFault) and self._is_stopped:
            pass  # it was behind a refused batch, and is sent again with it
        elif isinstance(error, ProducerFault):
            self._owner.sender_broken(error)
        elif isinstance(error, MovedError):
            self._stop()
            self._move(error, by)
        elif isinstance(error, TimeoutExpiredError) and not is_named:
            self._settle(queued, error)  # it may have been stored
        elif error.retriable:
            self._refusal = error
            self._stop(with_pause=True)
        else:
            self._settle(queued, error)
            if is_named:
                self._stop()

    def _stop(self, *, with_pause: bool = False) -> None:
        """Send nothing until everything in flight is answered, and a pause is over."""
        self._is_stopped = True
        if self._restart is not None:
            return
        if with_pause:
            self._refusals += 1
            self._restart = self._timers.call_later(backoff_s(self._refusals), self._go_on)

    def _go_on(self) -> None:
        self._restart = None
        self.pump()

    def _move(self, error: MovedError, by: Link) -> None:
        """The shard has another owner: send there."""
        self._router.learn(error.routes, by)
        if by is not self._link:
            return  # it was sent before the sender moved
        for route in error.routes:
            assert isinstance(route, wire.Route)  # `learn` has checked it
            if self.follow(route.topic):
                if self._link is by:
                    self._stop(with_pause=True)  # the new owner does not know it yet
                return
        self._stop(with_pause=True)

    def follow(self, topic: str) -> bool:
        """Send to the owner that the topic's route names from now on. False: it does not name this shard."""
        route = self._router.routes.get(topic)
        for owner in () if route is None else route.owners:
            if (owner.journal, owner.shard) == (self.key.journal, self.key.shard):
                link = self._router.link(owner.address)
                if link is not self._link:
                    self._link.listeners.pop(self, None)
                    link.listeners[self] = None
                    self._link = link
                return True
        return False

    @property
    def a_topic(self) -> str | None:
        """A topic of what is waiting, whose route names the shard; None: nothing is waiting."""
        rows = self._batches[0].batch.rows if self._batches else None
        rows = rows or (self._rows[0] if self._rows else None)
        return None if rows is None else next(iter(rows.distinct_topics()), None)

    def _settle(self, queued: _QueuedBatch, error: RunnelError | None) -> None:
        queued.is_settled = True
        self._leave(queued, is_stored=error is None)
        if error is not None and not isinstance(error, Unavailable):
            self._router.forget(queued.batch.rows.distinct_topics())
        self._owner.settled(queued.batch.rows, error)
        if self._expiry_timer is None:
            self._watch()

    def _leave(self, queued: _QueuedBatch, *, is_stored: bool = True) -> None:
        """Remove a batch, and keep the numbers of the others consecutive."""
        if is_stored:
            queued.is_settled = True
        else:
            place = self._batches.index(queued)
            del self._batches[place]
            if self._options.name is not None:
                for number, later in enumerate(self._batches, self._number):
                    if number >= self._number + place:
                        later.batch.renumber(number)
        # Answers may overtake each other (those to repeated batches do): a number is done once all before it are.
        while self._batches and self._batches[0].is_settled:
            self._batches.popleft()
            self._number += 1

    # --- Time ---

    def _begin_lingering(self) -> None:
        if self._linger is None:
            self._linger = self._timers.call_later(self._options.linger_s, self._linger_over)

    def _linger_over(self) -> None:
        self._linger = None
        self._has_lingered = True
        self.pump()
        self._has_lingered = False

    def _end_lingering(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _expiry_ns(self) -> int:
        deadline_ns = self._deadline_ns
        return 0 if deadline_ns is None else self._timers.monotonic_ns() + deadline_ns

    def _watch(self) -> None:
        """Set the timer for the oldest batch. It may fire late: setting it for every batch would cost more."""
        if self._expiry_timer is None and self._deadline_ns is not None and not self.is_empty:
            left_ns = self._oldest_expiry_ns() - self._timers.monotonic_ns()
            self._expiry_timer = self._timers.call_later(max(0.0, left_ns / 1e9), self._expire)

    def _oldest_expiry_ns(self) -> int:
        return self._batches[0].expires_ns if self._batches else self._rows_expire_ns

    def _expire(self) -> None:
        self._expiry_timer = None
        now_ns = self._timers.monotonic_ns()
        while not self.is_empty and self._oldest_expiry_ns() <= now_ns:
            error = self._why_expired()
            if self._options.name is not None:
                self._owner.sender_broken(error)  # the batches behind it could not be numbered
                return
            if self._batches:
                self._settle(self._batches[0], error)
            else:
                self._owner.settled(self._rows.popleft(), error)
                self._rows_expire_ns = self._expiry_ns()
        self._watch()

    def _why_expired(self) -> RunnelError:
        """The error for the oldest batch. If it is in flight again, it may be stored after all."""
        refusal = self._refusal
        if refusal is not None and not (self._batches and self._batches[0].is_in_flight):
            return refusal
        refused = "" if refusal is None else f"; before, it was refused: {refusal}"
        error = TimeoutExpiredError(
            f"publishing to journal {self.key.journal}: not acknowledged within "
            f"{self._options.deadline_s:g} s; {self._link.state}{refused}"
        )
        error.__cause__ = refusal
        return error


def _unsure(error: ConnectionLostError) -> ConnectionLostError:
    return ConnectionLostError(
        f"{error}; what was sent and not yet acknowledged may have been stored or not"
    )
