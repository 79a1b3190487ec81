"""When each message of a replay is sent: timetables, the slots that they cut rows into, and waiting. Pure.

Times are nanoseconds since the begin of the replay, on one clock for all its tasks. All rows of a slot are sent when
its last row is due: never early, and late by less than a slot. Slots depend only on the rows and the timetable, so that
rows that are sent again are cut where they were cut before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SLOT_NS: Final = 50_000_000
# A slot with more rows is cut. Changing either number would change repeated batches: see write/chunks.py.
SLOT_ROWS_MAX: Final = 10_000
# The column with a row's due time: its event time, but never before its predecessor's.
DUE: Final = "due_ns"
_NS_PER_SECOND: Final = 10**9


class Cut(msgspec.Struct, frozen=True):
    """A shortened gap: from `from_ns` on, everything is due `earlier_ns` earlier."""

    from_ns: int
    earlier_ns: int


class ByEventTime(msgspec.Struct, frozen=True, tag="event_time"):
    """A timetable at `speed` times the pace of event times, from `first_ns` on. `cuts` are in order and cumulative."""

    first_ns: int
    speed: float
    cuts: tuple[Cut, ...] = ()

    def times(self, rows: pa.RecordBatch, _: int) -> NDArray[np.int64]:
        due: NDArray[np.int64] = rows.column(DUE).to_numpy()
        since = due - self.first_ns
        if self.cuts:
            edges = np.array([cut.from_ns for cut in self.cuts], np.int64)
            earlier = np.array([0, *(cut.earlier_ns for cut in self.cuts)], np.int64)
            since = since - earlier[np.searchsorted(edges, due, side="right")]
        return since if self.speed == 1 else (since / self.speed).astype(np.int64)


class ByRate(msgspec.Struct, frozen=True, tag="rate"):
    """A timetable with a constant number of messages per second, for one task."""

    per_second: float

    def times(self, rows: pa.RecordBatch, rows_before: int) -> NDArray[np.int64]:
        numbers = np.arange(rows_before, rows_before + rows.num_rows, dtype=np.float64)
        return (numbers * (_NS_PER_SECOND / self.per_second)).astype(np.int64)


Timetable: TypeAlias = ByEventTime | ByRate


def shortened(gaps: Iterable[tuple[int, int]], longest_ns: int) -> tuple[Cut, ...]:
    """The cuts that shorten gaps, given as (last row before, first row behind), to `longest_ns`."""
    cuts, earlier_ns = [], 0
    for last_ns, next_ns in sorted(gaps):
        earlier_ns += next_ns - last_ns - longest_ns
        cuts.append(Cut(next_ns, earlier_ns))
    return tuple(cuts)


# --- Slots ---


class Slot(NamedTuple):
    """Rows that are sent together, and when."""

    at_ns: int
    rows: pa.RecordBatch


def slots(incoming: Iterable[pa.RecordBatch], timetable: Timetable) -> Iterator[Slot]:
    """All rows in their order, cut into slots. How Spark groups the rows does not matter."""
    held: list[pa.RecordBatch] = []
    held_rows = seen_rows = at_ns = 0
    for rows in incoming:
        times = timetable.times(rows, seen_rows)
        seen_rows += rows.num_rows
        begin = 0
        while begin < rows.num_rows:
            if held_rows and (
                held_rows == SLOT_ROWS_MAX or times[begin] // SLOT_NS != at_ns // SLOT_NS
            ):
                yield Slot(at_ns, _joined(held))
                held, held_rows = [], 0
            next_slot_ns = (times[begin] // SLOT_NS + 1) * SLOT_NS
            behind = int(np.searchsorted(times, next_slot_ns, side="left"))
            end = min(max(behind, begin + 1), begin + SLOT_ROWS_MAX - held_rows)
            held.append(rows.slice(begin, end - begin))
            held_rows += end - begin
            at_ns = int(times[end - 1])
            begin = end
    if held_rows:
        yield Slot(at_ns, _joined(held))


def _joined(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)


# --- Waiting ---


class PacerClock(Protocol):
    """A clock that can wait."""

    def monotonic_ns(self) -> int: ...

    def sleep(self, seconds: float) -> None: ...


class Pacer:
    """The clock of a replay. It starts at `begin_ns` of the timetable when it is made."""

    def __init__(self, clock: PacerClock, begin_ns: int, look_every_s: float = 1.0) -> None:
        self._clock = clock
        self._zero_ns = clock.monotonic_ns() - begin_ns
        self._look_every_s = look_every_s

    @property
    def now_ns(self) -> int:
        return self._clock.monotonic_ns() - self._zero_ns

    def bursts(
        self, coming: Iterator[Slot], waiting: Callable[[int], object]
    ) -> Iterator[Iterator[Slot]]:
        """Groups of slots that are due. Each group has to be sent before the next one is requested.

        Calls `waiting` while it waits, with a time: everything due by then has been sent.
        """
        ahead = next(coming, None)

        def due() -> Iterator[Slot]:
            nonlocal ahead
            while ahead is not None and ahead.at_ns <= self.now_ns:
                slot, ahead = ahead, next(coming, None)
                yield slot

        while ahead is not None:
            self._wait(ahead.at_ns, waiting)
            yield due()

    def _wait(self, until_ns: int, waiting: Callable[[int], object]) -> None:
        while (now_ns := self.now_ns) < until_ns:
            waiting(now_ns)
            left_s = (until_ns - now_ns) / _NS_PER_SECOND
            self._clock.sleep(min(left_s, self._look_every_s))
