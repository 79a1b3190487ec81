"""Scans a file that may be torn or damaged and finds its whole units. Every recovery relies on it.

A file is a sequence of units (blocks of a segment, records of a catalogue) at multiples of 8. Each unit carries
`durable_position`: how much of the file was synced when the unit was written. A whole unit therefore vouches for
everything before its durable position. When bytes do not form a unit:

- if a later whole unit vouches for them, they were stored once and are damaged now. The scan reports the damage and
  continues behind it, and nothing else is lost;
- otherwise they were never acknowledged: they are a torn tail. The file ends there, whatever follows.

Zeros are preallocated room, not a unit. Behind a torn place the scan searches one group of writes for a unit that
vouches, because no such unit lies further away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from runnel.errors import MalformedError

_CHUNK_BYTES: Final = 4 * 2**20
_UNIT_BYTES: Final = 24  # enough to know a unit's size


T = TypeVar("T")


class ScanUnit(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """A whole unit: its position, size, durable position and content.

    `content` is None for a mark, which only says how far the file is durable.
    """

    position: int
    size: int
    durable_position: int
    content: T | None


class Damage(msgspec.Struct, frozen=True):
    """Bytes that were stored once and cannot be read any more."""

    path: str
    position: int
    size: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}:{self.position}: {self.problem}"


class Scanned(msgspec.Struct, frozen=True):
    """The outcome of a scan: where the file ends, how far it is certainly durable, its torn tail, its damage."""

    end: int
    durable: int
    torn: Damage | None
    damage: tuple[Damage, ...]


ReadAt = Callable[[int, int], bytes]
# Reads the unit at the start of a view, which begins at a position of the file. MalformedError if there is no unit;
# TooShort if the view ends before the unit.
UnitReader = Callable[[memoryview, int], ScanUnit[T]]


class TooShort(Exception):
    """The view ends before the unit, which has `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class ScanWindow:
    """A sliding view of a file."""

    def __init__(self, read: ReadAt, file_bytes: int) -> None:
        self._read = read
        self.file_bytes = file_bytes
        self._start = 0
        self._data = memoryview(b"")

    def at(self, position: int, size: int) -> memoryview:
        """At least `size` bytes from a position on; fewer only at the end of the file."""
        begin = position - self._start
        if begin < 0 or begin + size > len(self._data):
            wanted = min(max(size, _CHUNK_BYTES), self.file_bytes - position)
            self._data = memoryview(self._read(position, max(wanted, 0)))
            self._start = position
            begin = 0
        return self._data[begin:]


class Scanner(Generic[T]):
    """Iterates over a file's whole units. Afterwards `result()` has the outcome."""

    def __init__(
        self,
        path: str,
        window: ScanWindow,
        read_unit: UnitReader[T],
        magic: re.Pattern[bytes],
        *,
        start: int,
        search_bytes: int,
        durable: int = 0,
    ) -> None:
        self._path = path
        self._window = window
        self._read_unit = read_unit
        self._magic = magic
        self._search_bytes = search_bytes
        self._position = start
        self._durable = max(durable, start)
        self._damage: list[Damage] = []
        self._torn: Damage | None = None

    def __iter__(self) -> Iterator[ScanUnit[T]]:
        """Yield whole units in order. A mark ends the file: the next group is written over it."""
        while self._position < self._window.file_bytes:
            try:
                unit = self._unit_at(self._position)
            except MalformedError as error:
                if not self._pass_damage(str(error)):
                    return
                continue
            self._durable = max(self._durable, unit.durable_position)
            if unit.content is None:
                break
            yield unit
            self._position += unit.size
        self._pass_missing()

    @property
    def damage(self) -> Sequence[Damage]:
        """The damage skipped so far, in the order of the file."""
        return self._damage

    def result(self) -> Scanned:
        return Scanned(self._position, self._durable, self._torn, tuple(self._damage))

    def _unit_at(self, position: int) -> ScanUnit[T]:
        unit = self._read_at(position)
        if unit.durable_position > position:
            # Whole, but of another file: for example a message's payload behind a torn header.
            raise MalformedError("unit", f"at {position} vouches for {unit.durable_position} bytes")
        return unit

    def _read_at(self, position: int) -> ScanUnit[T]:
        try:
            return self._read_unit(self._window.at(position, _UNIT_BYTES), position)
        except TooShort as short:
            view = self._window.at(position, short.size)
            if len(view) < short.size:
                raise MalformedError("unit", f"{len(view)} bytes of {short.size}") from None
            return self._read_unit(view, position)

    def _pass_damage(self, problem: str) -> bool:
        """Skip a bad place if a later unit vouches for it; otherwise the file ends here."""
        begin = self._position
        following = self._find_vouched(begin)
        if following is not None:
            self._damage.append(Damage(self._path, begin, following - begin, problem))
            self._position = following
            return True
        size = self._window.file_bytes - begin
        if self._durable > begin:
            # Known to have been stored, yet no whole unit follows: writing continues behind it.
            self._damage.append(Damage(self._path, begin, self._durable - begin, problem))
            self._position = self._durable
        elif not self._is_unwritten(begin):
            self._torn = Damage(self._path, begin, size, f"torn tail cut: {problem}")
        return False

    def _pass_missing(self) -> None:
        """Report a missing tail: the caller may know that the file was longer."""
        lost = self._durable - self._position
        if lost > 0:
            problem = f"{lost} bytes are missing that had been stored"
            self._damage.append(Damage(self._path, self._position, lost, problem))
            self._position = self._durable

    def _find_vouched(self, begin: int) -> int | None:
        """The position of the next whole unit, if a unit in reach vouches for the bytes at `begin`.

        Whole units of the same group may follow a torn one. They do not vouch for it.
        """
        first: int | None = None
        candidate = self._next_magic(begin + 8, begin)
        while candidate is not None:
            try:
                unit = self._unit_at(candidate)
            except MalformedError:
                candidate = self._next_magic(candidate + 8, begin)
                continue
            first = candidate if first is None else first
            if max(unit.durable_position, self._durable) > begin:
                return first
            if unit.content is None:
                return None
            candidate = self._next_magic(candidate + unit.size, begin)
        return None

    def _next_magic(self, position: int, begin: int) -> int | None:
        limit = min(self._window.file_bytes, begin + self._search_bytes)
        while position < limit:
            view = self._window.at(position, min(_CHUNK_BYTES, limit - position))
            for match in self._magic.finditer(view):
                if (position + match.start()) % 8 == 0:
                    found = position + match.start()
                    return found if found < limit else None
            # Search the last bytes again: a magic may cross the end of the view.
            position += max(len(view) - 8, 8) // 8 * 8
        return None

    def _is_unwritten(self, begin: int) -> bool:
        """Whether only preallocated zeros follow."""
        size = min(self._search_bytes, self._window.file_bytes - begin)
        return not self._window.at(begin, size)[:size].tobytes().strip(b"\0")
