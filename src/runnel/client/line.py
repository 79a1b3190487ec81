"""The line of one shard: what a publisher has for it, in order, from gathered rows to acknowledged batches.

A line decides when a batch is cut and sent, and what becomes of it when the answer is an error or does not come. It
acts through its link; the publisher that owns it counts what is under way.

A line that was refused something stops until everything under way is answered: what is sent again then keeps its
order. (Without a name, a batch that was under way behind the refused one may have overtaken it.)

A named publisher's batches are numbered by their place in the line, so those behind a refused one take its number;
the broker cannot have stored them, because it takes numbers one after the other.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final, NamedTuple, Protocol

import msgspec

from runnel.client.connection import Connection
from runnel.client.gathering import Gathered, Rows, gather
from runnel.client.link import Link, backoff_s
from runnel.client.routing import Router
from runnel.client.timers import Handle, Timers
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

# So many batches may be unacknowledged before a batch that is not full waits for company.
_UNDER_WAY_EAGER: Final = 16
# Of a named publisher, in one shard. The broker remembers where it put the last 256 numbers: an older one that is sent
# again would be answered without its offsets.
NUMBERED_MAX: Final = 128


class Haste(enum.Enum):
    """Which batches leave that are not full."""

    NONE = enum.auto()  # none: more is coming in this wake-up
    USUAL = enum.auto()  # while few are under way, or after a while
    FLUSH = enum.auto()  # all


# An enum's member takes several times as long to look up.
_NONE: Final = Haste.NONE
_USUAL: Final = Haste.USUAL
_FLUSH: Final = Haste.FLUSH


class ShardKey(NamedTuple):
    """What a batch may not mix."""

    keep: str
    journal: str
    shard: int


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How a publisher wants its batches made and sent."""

    name: str | None
    term: int
    level: str | None
    batch_messages_max: int
    batch_bytes_max: int
    linger_s: float
    deadline_s: float | None
    codec: Codec


class LineOwner(Protocol):
    """The publisher, as its lines see it."""

    batches_under_way: int

    def settled(self, rows: Rows, error: RunnelError | None) -> None: ...

    def batch_answered(self) -> None: ...

    def refused_late(self, error: RunnelError) -> None: ...

    def line_broken(self, error: RunnelError) -> None: ...


class _Outgoing(msgspec.Struct, eq=False):
    """A batch in the line."""

    gathered: Gathered
    expires_ns: int
    is_under_way: bool = False
    is_settled: bool = False


class ShardLine:
    """Rows that gather, then batches that wait or are under way, all of one shard."""

    def __init__(
        self,
        key: ShardKey,
        address: str,
        router: Router,
        owner: LineOwner,
        terms: Terms,
        timers: Timers,
    ) -> None:
        self.key: Final = key
        self._router = router
        self._owner = owner
        self._terms = terms
        self._timers = timers
        deadline_s = terms.deadline_s
        self._deadline_ns = None if deadline_s is None else round(deadline_s * 1e9)
        self._link = router.link(address)
        self._link.listeners[self] = None
        self._rows: deque[Rows] = deque()
        self._rows_expire_ns = 0
        self._batches: deque[_Outgoing] = deque()
        self._under_way = 0
        self._number = 0  # of the first batch in the line
        self._is_stopped = False
        self._refusals = 0
        self._refusal: RunnelError | None = None
        self._restart: Handle | None = None
        self._linger: Handle | None = None
        self._has_lingered = False
        self._alarm: Handle | None = None

    @property
    def link(self) -> Link:
        return self._link

    @property
    def is_empty(self) -> bool:
        return not self._rows and not self._batches

    # --- What the publisher calls ---

    def add(self, rows: Rows) -> None:
        """Put rows at the end of the line. `pump` sends them."""
        if not self._rows:
            self._rows_expire_ns = self._expiry_ns()
            self._rows.append(rows)
        elif self._rows[-1].generation == rows.generation:
            self._fill_up(rows)
        else:
            self._rows.append(rows)
        if self._alarm is None:
            self._watch()

    def _fill_up(self, rows: Rows) -> None:
        """Behind others of their generation, a batch's worth at a time: cut off a long line, each cut would move it."""
        last = self._rows[-1]
        last.extend(rows)
        count = last.count_within(self._terms.batch_messages_max, self._terms.batch_bytes_max)
        if count < len(last):
            self._rows[-1] = last.cut(count)
            self._rows.append(last)

    def pump(self, haste: Haste = Haste.USUAL) -> None:
        """Send what may be sent now."""
        if not self._rows and not self._batches:
            return
        connection = self._link.connection
        if connection is None:
            self._fail_if_over()
            return
        if not connection.is_writable or (self._is_stopped and not self._may_go_on()):
            return
        if self._refusals and self._batches:
            # Nothing was accepted since a refusal: one batch tries first, so that none overtakes it.
            if not self._under_way:
                self._send(self._batches[0], connection)
            return
        for outgoing in self._batches:
            if not outgoing.is_under_way and not outgoing.is_settled:
                self._send(outgoing, connection)
        while self._rows and connection.is_writable and not self._is_stopped:
            if self._terms.name is not None and len(self._batches) >= NUMBERED_MAX:
                return  # every answer pumps again
            if not self._is_due(haste):
                if haste is not _NONE:
                    self._begin_lingering()
                return
            self._send_next(connection)
        if self._linger is not None:
            self._end_lingering()

    def _is_due(self, haste: Haste) -> bool:
        """Whether the first rows should leave as they are."""
        if haste is _USUAL and self._owner.batches_under_way < _UNDER_WAY_EAGER:
            return True
        if haste is _FLUSH or len(self._rows) > 1 or self._has_lingered:
            return True
        rows, terms = self._rows[0], self._terms
        return len(rows) >= terms.batch_messages_max or rows.size >= terms.batch_bytes_max

    def close(self, error: RunnelError) -> None:
        """Give up everything that is in the line."""
        for timer in (self._restart, self._linger, self._alarm):
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
        """Without any hope of a connection nothing waits until its time is up."""
        failure = self._link.failure
        if failure is None:
            return
        if self._terms.name is not None:
            self._owner.line_broken(failure)
        else:
            self._settle_all(failure)

    # --- What the link tells ---

    def link_up(self) -> None:
        self.pump()

    def link_down(self) -> None:
        """What is under way is answered with the loss in this turn; what waits goes with the next connection."""
        if self._link.failure is not None:
            self._timers.call_later(0, self.pump)

    def link_writable(self) -> None:
        self.pump()

    # --- Cutting and sending ---

    def _may_go_on(self) -> bool:
        """A line that was stopped goes on once nothing is under way and its pause is over."""
        if self._is_stopped and not self._under_way and self._restart is None:
            self._is_stopped = False
        return not self._is_stopped

    def _send_next(self, connection: Connection) -> None:
        """Cut the next batch off the rows, and send it."""
        rows = self._rows[0]
        terms = self._terms
        count = rows.count_within(terms.batch_messages_max, terms.batch_bytes_max)
        expires_ns = self._rows_expire_ns
        if count == len(rows.payloads):
            self._rows.popleft()
        else:
            rows = rows.cut(count)
        if self._rows:
            self._rows_expire_ns = self._expiry_ns()
        try:
            gathered = gather(
                rows,
                transmit_time_ns=self._timers.time_ns(),
                shard=self.key.shard,
                producer=terms.name,
                term=terms.term,
                number=self._number + len(self._batches) if terms.name is not None else 0,
                codec=terms.codec,
            )
        except RunnelError as error:
            self._owner.settled(rows, error)
            return
        outgoing = _Outgoing(gathered, expires_ns)
        self._batches.append(outgoing)
        self._send(outgoing, connection)

    def _send(self, outgoing: _Outgoing, connection: Connection) -> None:
        gathered = outgoing.gathered
        number = self._link.next_number()
        publish = wire.Publish(number, self._terms.level)
        if self._terms.level == "none":
            # Done once the transport has it; a refusal that still comes is told at the next flush.
            self._leave(outgoing)
            connection.request_unanswered(
                number,
                publish,
                lambda answer, _: self._refused_late(answer),
                gathered.block,
                gathered.block_bytes,
            )
            gathered.succeed(wire.Published(0, (), 0, 0, 0, "none"))
            self._owner.settled(gathered.rows, None)
            return
        outgoing.is_under_way = True
        self._under_way += 1
        self._owner.batches_under_way += 1
        connection.request(
            number,
            publish,
            lambda answer, _: self._answered(outgoing, answer),
            gathered.block,
            gathered.block_bytes,
        )

    def _refused_late(self, answer: wire.Answer | RunnelError) -> None:
        if isinstance(answer, RunnelError) and not isinstance(answer, ConnectionLostError):
            self._owner.refused_late(answer)

    # --- Answers ---

    def _answered(self, outgoing: _Outgoing, answer: wire.Answer | RunnelError) -> None:
        outgoing.is_under_way = False
        self._under_way -= 1
        self._owner.batches_under_way -= 1
        if outgoing.is_settled:
            pass  # given up long ago
        elif isinstance(answer, wire.Published):
            self._refusals = 0
            self._refusal = None
            outgoing.gathered.succeed(answer)
            self._settle(outgoing, None)
        elif isinstance(answer, RunnelError):
            self._refused(outgoing, answer)
        else:
            self._settle(outgoing, MalformedError("answer", f"{answer!r:.200} to a publish"))
        if not self._under_way and self._is_stopped:
            self.pump()
        self._owner.batch_answered()

    def _refused(self, outgoing: _Outgoing, error: RunnelError) -> None:
        is_named = self._terms.name is not None
        if isinstance(error, ConnectionLostError):
            # Whoever has a name sends it again, and the broker knows it by its number.
            if not is_named:
                self._settle(outgoing, _unsure(error))
        elif isinstance(error, ProducerFencedError | ProducerForgottenError):
            self._owner.line_broken(error)
        elif isinstance(error, ProducerFault) and self._is_stopped:
            pass  # it came behind one that was refused, and is sent again with it
        elif isinstance(error, ProducerFault):
            self._owner.line_broken(error)
        elif isinstance(error, MovedError):
            self._stop()
            self._move(error)
        elif isinstance(error, TimeoutExpiredError) and not is_named:
            self._settle(outgoing, error)  # it may have been stored all the same
        elif error.retriable:
            self._refusal = error
            self._stop(with_pause=True)
        else:
            self._settle(outgoing, error)
            if is_named:
                self._stop()

    def _stop(self, *, with_pause: bool = False) -> None:
        """Send nothing before everything under way is answered, and a pause is over."""
        self._is_stopped = True
        if self._restart is not None:
            return
        if with_pause:
            self._refusals += 1
            self._restart = self._timers.call_later(backoff_s(self._refusals), self._go_on)

    def _go_on(self) -> None:
        self._restart = None
        self.pump()

    def _move(self, error: MovedError) -> None:
        """The shard has another owner: the line goes there."""
        self._router.learn(error.routes)
        for route in error.routes:
            assert isinstance(route, wire.Route)  # learn has looked
            for owner in route.owners:
                if (owner.journal, owner.shard) == (self.key.journal, self.key.shard):
                    link = self._router.link(owner.address)
                    if link is self._link:
                        self._stop(with_pause=True)  # it does not know it yet
                    self._link.listeners.pop(self, None)
                    link.listeners[self] = None
                    self._link = link
                    return
        self._stop(with_pause=True)

    def _settle(self, outgoing: _Outgoing, error: RunnelError | None) -> None:
        outgoing.is_settled = True
        self._leave(outgoing, is_stored=error is None)
        if error is not None and not isinstance(error, Unavailable):
            self._router.forget(outgoing.gathered.rows.distinct_topics())
        self._owner.settled(outgoing.gathered.rows, error)
        if self._alarm is None:
            self._watch()

    def _leave(self, outgoing: _Outgoing, *, is_stored: bool = True) -> None:
        """Take a batch out of the line, and keep the numbers of the rest one after the other."""
        if is_stored:
            outgoing.is_settled = True
        else:
            place = self._batches.index(outgoing)
            del self._batches[place]
            if self._terms.name is not None:
                for number, later in enumerate(self._batches, self._number):
                    if number >= self._number + place:
                        later.gathered.renumber(number)
        # Answers may overtake each other (those to repeated batches do): a number is passed once all before it are.
        while self._batches and self._batches[0].is_settled:
            self._batches.popleft()
            self._number += 1

    # --- Time ---

    def _begin_lingering(self) -> None:
        if self._linger is None:
            self._linger = self._timers.call_later(self._terms.linger_s, self._linger_over)

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
        """Set the alarm for the oldest in the line. It rings late rather than be set for every batch."""
        if self._alarm is None and self._deadline_ns is not None and not self.is_empty:
            left_ns = self._oldest_expiry_ns() - self._timers.monotonic_ns()
            self._alarm = self._timers.call_later(max(0.0, left_ns / 1e9), self._expire)

    def _oldest_expiry_ns(self) -> int:
        return self._batches[0].expires_ns if self._batches else self._rows_expire_ns

    def _expire(self) -> None:
        self._alarm = None
        now_ns = self._timers.monotonic_ns()
        while not self.is_empty and self._oldest_expiry_ns() <= now_ns:
            error = self._why_expired()
            if self._terms.name is not None:
                self._owner.line_broken(error)  # what follows could not be numbered
                return
            if self._batches:
                self._settle(self._batches[0], error)
            else:
                self._owner.settled(self._rows.popleft(), error)
                self._rows_expire_ns = self._expiry_ns()
        self._watch()

    def _why_expired(self) -> RunnelError:
        """What the oldest is given up with. If it is under way again, it may be stored after all."""
        refusal = self._refusal
        if refusal is not None and not (self._batches and self._batches[0].is_under_way):
            return refusal
        refused = "" if refusal is None else f"; before, it was refused: {refusal}"
        error = TimeoutExpiredError(
            f"publishing to journal {self.key.journal}: not acknowledged within "
            f"{self._terms.deadline_s:g} s; {self._link.state}{refused}"
        )
        error.__cause__ = refusal
        return error


def _unsure(error: ConnectionLostError) -> ConnectionLostError:
    return ConnectionLostError(
        f"{error}; what was sent and not yet acknowledged may have been stored or not"
    )
