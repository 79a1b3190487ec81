"""What a history of acknowledged work is made of: events, as a broker and its consumers meet them, and how they read.

A history is a list of events in the order in which they happened. Times are of one clock that never goes back, whatever
restarts. An event tells what was asked of a group of consumers and what the group answered (`Told`); nothing in it
knows how a group works. `checker.py` says whether a history kept the promises of its mode.

    0.000  published orders[0] @1 b'a', @2 b'b'
    0.000  consumer 1 joins, window of 2 messages, 100 bytes
    0.000  consumer 1 gets delivery 1: orders[0] @1 @2, leased until 30.000
    0.250  consumer 1 nacks 1@1; failed: orders[0]@1 (count 1, due at 1.250)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

# A topic and a partition of it.
Place: TypeAlias = tuple[str, int]
NS_PER_SECOND = 1_000_000_000
# An ack of a delivery that no consumer holds is late as a whole: from 0 to here.
WHOLE_END = 2**63 - 1


class Rules(msgspec.Struct, frozen=True):
    """The events of a subscription that its promises depend on."""

    is_keyed: bool
    lease_ns: int
    deliveries_max: int
    retry_delay_ns: int
    retry_delay_ns_max: int
    backoff: float

    def is_dead(self, failures: int) -> bool:
        """Whether a message that failed so often is not to be delivered again."""
        return 0 < self.deliveries_max <= failures

    def delay_ns(self, failures: int) -> int:
        """How long a message waits after so many failures, if its nack does not say."""
        return min(
            self.retry_delay_ns_max, int(self.retry_delay_ns * self.backoff ** (failures - 1))
        )


# --- Parts of events ---


class Stretch(msgspec.Struct, frozen=True, gc=False):
    """Offsets of one delivery: from `begin` on, and not `end`."""

    delivery: int
    begin: int
    end: int

    def __str__(self) -> str:
        if self.begin == 0 and self.end == WHOLE_END:
            return f"all of delivery {self.delivery}"
        return f"{self.delivery}{offsets_text(self.begin, self.end)}"


class Failure(msgspec.Struct, frozen=True, gc=False):
    """A message that failed: how often by now, when it may come again, when it was first delivered."""

    place: Place
    offset: int
    failures: int
    not_before_ns: int
    first_delivery_ns: int

    def how(self) -> str:
        return f"(count {self.failures}, due at {seconds(self.not_before_ns)})"


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """What a delivery says of a message that was delivered before."""

    offset: int
    failures: int
    first_delivery_ns: int


class GivenUp(msgspec.Struct, frozen=True, gc=False):
    """A message that failed too often: its dead letter has to be stored."""

    place: Place
    offset: int
    failures: int

    def how(self) -> str:
        return f"(count {self.failures})"


class Recall(msgspec.Struct, frozen=True, gc=False):
    consumer: int
    stretch: Stretch

    def __str__(self) -> str:
        return f"{self.stretch} from consumer {self.consumer}"


class Told(msgspec.Struct, frozen=True, gc=False):
    """What the group answered. `acked` has to be stored, and so has `failed`."""

    late: Sequence[Stretch] = ()
    recalls: Sequence[Recall] = ()
    dead_letters: Sequence[GivenUp] = ()
    failed: Sequence[Failure] = ()
    acked: Sequence[tuple[Place, int, int]] = ()
    expired: Sequence[tuple[int, int]] = ()
    """Consumer and delivery of each lease that ended by time."""

    def __str__(self) -> str:
        acked = [f"{place_text(place)} {offsets_text(b, e)}" for place, b, e in self.acked]
        return "".join(
            f"; {words} {', '.join(map(str, what))}"
            for words, what in (
                ("too late:", self.late),
                ("recalled:", self.recalls),
                ("failed:", _together(self.failed)),
                ("to be dead-lettered:", _together(self.dead_letters)),
                ("done:", acked),
                ("expired:", [f"delivery {delivery}" for _, delivery in self.expired]),
            )
            if what
        )


NOTHING_TOLD = Told()


# --- Events ---


class Event(msgspec.Struct, frozen=True):
    """`group` is the name of a multicast's member, and empty in other modes."""

    at_ns: int
    group: str = ""

    def what(self) -> str:
        raise NotImplementedError

    def told_of(self) -> Told:
        return NOTHING_TOLD

    def __str__(self) -> str:
        who = f"{self.group}: " if self.group else ""
        return f"{seconds(self.at_ns):>8}  {who}{self.what()}{self.told_of()}"


class Published(Event, frozen=True, kw_only=True):
    """Messages with consecutive offsets became visible. Each costs so many bytes of a window."""

    place: Place
    base: int
    keys: Sequence[bytes | None]
    cost_bytes: int

    def what(self) -> str:
        rows = ", ".join(
            f"@{self.base + row}{'' if key is None else f' {key!r}'}"
            for row, key in enumerate(self.keys)
        )
        return f"published {place_text(self.place)} {rows} ({self.cost_bytes} bytes each)"


class Began(Event, frozen=True, kw_only=True):
    """The group owes what this partition has from an offset on. Survives whatever comes."""

    place: Place
    floor: int
    # Of a topic that was deleted before: these are not owed, and those had failed. What the topic had then is gone, and
    # nobody cares whether it counts as owed after the next restart.
    is_again: bool = False
    done: Sequence[tuple[int, int]] = ()
    failed: Sequence[Failure] = ()

    def what(self) -> str:
        return f"{place_text(self.place)} is owed from @{self.floor} on{_but(self.done)}"


class Removed(Event, frozen=True, kw_only=True):
    """The topic is no more: nothing of it is owed, its leases are over."""

    place: Place
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return f"{place_text(self.place)} is removed"

    def told_of(self) -> Told:
        return self.told


class Parted(Event, frozen=True, kw_only=True):
    """The shard of this partition has gone: leases on it are over, and nothing is delivered until it is `Recovered`."""

    place: Place
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return f"{place_text(self.place)} goes with its shard"

    def told_of(self) -> Told:
        return self.told


class Forgotten(Event, frozen=True, kw_only=True):
    """The group itself is no more: its member was removed, its subscription deleted, or it was unnamed and left."""

    def what(self) -> str:
        return "nothing is owed any more"


class Joined(Event, frozen=True, kw_only=True):
    consumer: int
    window_messages: int
    window_bytes: int

    def what(self) -> str:
        return (
            f"consumer {self.consumer} joins, "
            f"window of {self.window_messages} messages, {self.window_bytes} bytes"
        )


class Resized(Event, frozen=True, kw_only=True):
    consumer: int
    window_messages: int
    window_bytes: int

    def what(self) -> str:
        return (
            f"consumer {self.consumer} now has a "
            f"window of {self.window_messages} messages, {self.window_bytes} bytes"
        )


class Left(Event, frozen=True, kw_only=True):
    consumer: int
    is_clean: bool
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return f"consumer {self.consumer} {'leaves' if self.is_clean else 'is gone without a word'}"

    def told_of(self) -> Told:
        return self.told


class Wanted(Event, frozen=True, kw_only=True):
    """The group asks for messages to be read, so that it can deliver them."""

    place: Place
    begin: int
    end: int

    def what(self) -> str:
        return f"wanted: {place_text(self.place)} {offsets_text(self.begin, self.end)}"


class Delivered(Event, frozen=True, kw_only=True):
    consumer: int
    delivery: int
    place: Place
    offsets: Sequence[int]
    size_bytes: int
    deadline_ns: int
    attempts: Sequence[Attempt] = ()
    cost_bytes: int | None = None  # of each message, if that depends on how it was read

    def what(self) -> str:
        failures = {attempt.offset: attempt.failures for attempt in self.attempts}
        rows = " ".join(
            f"@{offset}{f' (count {failures[offset]})' if failures.get(offset) else ''}"
            for offset in self.offsets
        )
        return (
            f"consumer {self.consumer} gets delivery {self.delivery}: "
            f"{place_text(self.place)} {rows}, leased until {seconds(self.deadline_ns)}"
        )


class Acked(Event, frozen=True, kw_only=True):
    """Whole deliveries and parts of others."""

    consumer: int
    deliveries: Sequence[int] = ()
    parts: Sequence[Stretch] = ()
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        whole = [f"delivery {delivery}" for delivery in self.deliveries]
        return f"consumer {self.consumer} acks {', '.join([*whole, *map(str, self.parts)])}"

    def told_of(self) -> Told:
        return self.told


class AckedUpTo(Event, frozen=True, kw_only=True):
    consumer: int
    place: Place
    offset: int
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return f"consumer {self.consumer} acks {place_text(self.place)} up to @{self.offset}"

    def told_of(self) -> Told:
        return self.told


class Nacked(Event, frozen=True, kw_only=True):
    consumer: int
    parts: Sequence[Stretch]
    delay_ns: int | None = None
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        delay = "" if self.delay_ns is None else f" for {seconds(self.delay_ns)} s"
        return f"consumer {self.consumer} nacks {', '.join(map(str, self.parts))}{delay}"

    def told_of(self) -> Told:
        return self.told


class Renewed(Event, frozen=True, kw_only=True):
    consumer: int
    deliveries: Sequence[int]
    lease_ns: int | None = None

    def what(self) -> str:
        length = "" if self.lease_ns is None else f" for {seconds(self.lease_ns)} s"
        return f"consumer {self.consumer} renews {', '.join(map(str, self.deliveries))}{length}"


class GaveBack(Event, frozen=True, kw_only=True):
    """A consumer confirms that it does not work on what was recalled."""

    consumer: int
    parts: Sequence[Stretch]
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return f"consumer {self.consumer} gives back {', '.join(map(str, self.parts))}"

    def told_of(self) -> Told:
        return self.told


class Returned(Event, frozen=True, kw_only=True):
    """A consumer returns messages on which it has not begun to work. That does not count as a failure."""

    consumer: int
    parts: Sequence[Stretch]
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return f"consumer {self.consumer} returns {', '.join(map(str, self.parts))} unbegun"

    def told_of(self) -> Told:
        return self.told


class Expired(Event, frozen=True, kw_only=True):
    """The group was told the time: leases whose deadline has come are over."""

    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return "the clock is looked at"

    def told_of(self) -> Told:
        return self.told


class DeadLetterSettled(Event, frozen=True, kw_only=True):
    """The dead letter of a message was stored, or could not be."""

    place: Place
    offset: int
    is_stored: bool
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        outcome = "is stored" if self.is_stored else "could not be stored"
        return f"the dead letter of {message_text(self.place, self.offset)} {outcome}"

    def told_of(self) -> Told:
        return self.told


class Moved(Event, frozen=True, kw_only=True):
    """A partition is owed from another offset on, all of it; leases on it are over."""

    place: Place
    floor: int
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return f"{place_text(self.place)} is moved to @{self.floor}"

    def told_of(self) -> Told:
        return self.told


class Reopened(Event, frozen=True, kw_only=True):
    """A dead letter was sent back: its message is owed again.

    `is_forgiven`: if it is owed already, because a crash undid that it was done, its failures are forgotten all the
    same. So it is while there is no group, and only written down.
    """

    place: Place
    offset: int
    is_forgiven: bool = False
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return f"{message_text(self.place, self.offset)} is sent back"

    def told_of(self) -> Told:
        return self.told


class Gone(Event, frozen=True, kw_only=True):
    """Messages that retention removed: no consumer will read them."""

    place: Place
    begin: int
    end: int
    told: Told = NOTHING_TOLD

    def what(self) -> str:
        return f"{place_text(self.place)} {offsets_text(self.begin, self.end)} are gone"

    def told_of(self) -> Told:
        return self.told


class Paused(Event, frozen=True, kw_only=True):
    is_paused: bool

    def what(self) -> str:
        return "deliveries are paused" if self.is_paused else "deliveries go on"


class Stored(Event, frozen=True, kw_only=True):
    """What the first so many events of this history led to is on disk: those of one group, if it has a name."""

    events: int
    is_consumers: bool = False  # what they did, and what came before that

    def what(self) -> str:
        what = "consumers did" if self.is_consumers else "was told"
        return f"what {what} in the first {self.events} lines is stored"


class Restarted(Event, frozen=True, kw_only=True):
    """The broker died and came back, with what the first so many events led to. No consumer is there.

    None: with some of what was not stored, and each partition is `Recovered` next. With a group's name: it was let go
    while nobody consumed, and is made anew.
    """

    events: int | None

    def what(self) -> str:
        if self.events is None:
            return "the broker starts again, with what is left"
        return f"the broker starts again, with what the first {self.events} lines told"


class Recovered(Event, frozen=True, kw_only=True):
    """A partition is taken up from what was written down: what is done, and what failed how often.

    After a restart that is how it stood at some time, and `is_exact` is how it stands.
    """

    place: Place
    floor: int
    done: Sequence[tuple[int, int]] = ()
    failed: Sequence[Failure] = ()
    is_exact: bool = False

    def what(self) -> str:
        failed = ", ".join(_together(self.failed))
        return (
            f"{place_text(self.place)} is taken up: owed from @{self.floor} on{_but(self.done)}"
            f"{f'; failed before: {failed}' if failed else ''}"
        )


class Stated(Event, frozen=True, kw_only=True):
    """What the group says of a partition when asked: what is done, and how many messages are leased."""

    place: Place
    floor: int
    done: Sequence[tuple[int, int]]
    in_flight: int

    def what(self) -> str:
        done = " ".join(offsets_text(begin, end) for begin, end in self.done)
        return (
            f"{place_text(self.place)} as told: done below @{self.floor}"
            f"{f' and {done}' if done else ''}, {self.in_flight} in flight"
        )


class Rested(Event, frozen=True, kw_only=True):
    """The group was asked for more until it wanted nothing: whatever can be delivered, was."""

    def what(self) -> str:
        return "nothing more can be delivered"


class Finished(Event, frozen=True, kw_only=True):
    """Everything works again and had its time: all that is owed must be done."""

    def what(self) -> str:
        return "everything has come to its end"


# --- How it reads ---


def seconds(time_ns: int) -> str:
    return f"{time_ns / NS_PER_SECOND:.3f}"


def place_text(place: Place) -> str:
    return f"{place[0]}[{place[1]}]"


def message_text(place: Place, offset: int) -> str:
    return f"{place_text(place)}@{offset}"


def offsets_text(begin: int, end: int) -> str:
    return f"@{begin}" if end == begin + 1 else f"@{begin}-{end - 1}"


def _but(done: Sequence[tuple[int, int]]) -> str:
    return f" but for {' '.join(offsets_text(*span) for span in done)}" if done else ""


def _together(failures: Iterable[Failure | GivenUp]) -> list[str]:
    """Neighbours that fared alike are told as one."""
    spans: list[tuple[Place, int, int, str]] = []
    for failure in failures:
        place, offset, how = failure.place, failure.offset, failure.how()
        if spans and spans[-1][0] == place and spans[-1][2] == offset and spans[-1][3] == how:
            spans[-1] = (place, spans[-1][1], offset + 1, how)
        else:
            spans.append((place, offset, offset + 1, how))
    return [f"{place_text(place)}{offsets_text(b, e)} {how}" for place, b, e, how in spans]


def numbered(events: Iterable[Event]) -> list[str]:
    """The lines of a transcript, numbered as `Stored` and `Restarted` count them."""
    return [f"{number:4} {event}" for number, event in enumerate(events, 1)]
