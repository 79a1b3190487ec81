"""A file's content on the fake disk: on the platter, in memory, and after a crash.

Between two syncs a file has a history of changes. The system writes each sector to the platter at any time, so after a
crash every sector shows its state at some moment of that history, independently, and so does the size. Writes are lost
and torn in this way, and later ones survive earlier ones. A sector never mixes moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at a position. A pinned write was synced by itself, and survives every crash."""

    position: int
    data: bytes
    pinned: bool = False

    def apply(self, content: bytearray) -> None:
        if not self.data:
            return
        if len(content) < self.position:
            content.extend(bytes(self.position - len(content)))
        content[self.position : self.position + len(self.data)] = self.data

    def sectors(self) -> range:
        if not self.data:
            return range(0)
        last = (self.position + len(self.data) - 1) // SECTOR_BYTES
        return range(self.position // SECTOR_BYTES, last + 1)


@dataclass(frozen=True, slots=True)
class Truncate:
    """A new size, smaller or larger."""

    size: int

    def apply(self, content: bytearray) -> None:
        del content[self.size :]
        content.extend(bytes(self.size - len(content)))


@dataclass(frozen=True, slots=True)
class Allocate:
    """A minimal size of the file."""

    size: int

    def apply(self, content: bytearray) -> None:
        content.extend(bytes(max(0, self.size - len(content))))


Change = Write | Truncate | Allocate


class Inode:
    """A file: the system sees `content`; a crash leaves `durable` and some of `pending`."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = bytearray()
        self.pending: list[Change] = []

    def change(self, change: Change) -> None:
        change.apply(self.content)
        if isinstance(change, Write) and change.pinned and not self.pending:
            change.apply(self.durable)
        else:
            # A pinned write behind others waits with them, or their later sync would undo it.
            self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            change.apply(self.durable)
        self.pending.clear()

    def fail_sync(self, random: Random) -> None:
        """A part of the changes reaches the platter; the rest is forgotten, though memory shows it until a crash.

        A smaller size is not forgotten: file systems journal it, and the next sync stores it.
        """
        self._keep_survivors(random)
        if len(self.durable) > len(self.content):
            self.pending.append(Truncate(len(self.content)))

    def crash(self, random: Random) -> None:
        self._keep_survivors(random)
        self.content = bytearray(self.durable)

    def _keep_survivors(self, random: Random) -> None:
        self.durable = self._survivors(random)
        self.pending.clear()

    def flip_bit(self, position: int, bit: int) -> None:
        """Flip one bit in memory, on the platter and in pending writes."""
        self.content[position] ^= 1 << bit
        if position < len(self.durable):
            self.durable[position] ^= 1 << bit
        for index, change in enumerate(self.pending):
            if isinstance(change, Write) and 0 <= position - change.position < len(change.data):
                data = bytearray(change.data)
                data[position - change.position] ^= 1 << bit
                self.pending[index] = Write(change.position, bytes(data), change.pinned)

    def _survivors(self, random: Random) -> bytearray:
        """The content that a crash leaves. Moment 0 is the durable state, moment k the state after change k."""
        if not self.pending:
            return self.durable
        sector_moments = self._choose_sector_moments(random)
        newest = max(sector_moments.values(), default=0)
        size_moment = random.choice((newest, random.randint(0, len(self.pending))))
        sectors_of_moment = defaultdict(list)
        for sector, moment in sector_moments.items():
            sectors_of_moment[moment].append(sector)

        content = bytearray(self.durable)
        sectors: dict[int, bytes] = {}
        size = len(content)
        for moment, change in enumerate(self.pending, start=1):
            size_before = len(content)
            change.apply(content)
            captured = sectors_of_moment[moment]
            if moment <= size_moment:
                size = len(content)
                if size < size_before:
                    # Bytes that a surviving truncation removed do not come back when the file grows.
                    cut = range(size // SECTOR_BYTES, -(-size_before // SECTOR_BYTES))
                    captured += [s for s in cut if sector_moments.get(s, 0) < moment]
            elif isinstance(change, Write) and change.pinned:
                # The size has to hold this write; other changes of the size may be lost.
                size = max(size, change.position + len(change.data))
            for sector in captured:
                start = sector * SECTOR_BYTES
                sectors[sector] = bytes(content[start : start + SECTOR_BYTES])

        image = bytearray(self.durable)
        for sector, data in sectors.items():
            Write(sector * SECTOR_BYTES, data.ljust(SECTOR_BYTES, b"\0")).apply(image)
        Truncate(size).apply(image)
        return image

    def _choose_sector_moments(self, random: Random) -> dict[int, int]:
        """The moment that each changed sector shows. The other sectors show the durable state."""
        moments: dict[int, int] = {}
        # Often everything or nothing survives: recovery has to handle that too.
        common_fate: Fate | None = random.choice((_lose_all, _keep_all, None, None))
        for moment, change in enumerate(self.pending, start=1):
            if not isinstance(change, Write):
                continue
            fate = _keep_all if change.pinned else common_fate or random.choice(_FATES)
            for sector in fate(change.sectors(), random):
                moments[sector] = moment
        return moments


# Which sectors of a write reach the platter.
Fate = Callable[[range, Random], Iterable[int]]


def _lose_all(sectors: range, random: Random) -> range:
    return sectors[:0]


def _keep_all(sectors: range, random: Random) -> range:
    return sectors


def _keep_beginning(sectors: range, random: Random) -> range:
    return sectors[: random.randint(0, len(sectors))]


def _keep_some(sectors: range, random: Random) -> list[int]:
    return [sector for sector in sectors if random.random() < 0.5]


_FATES: tuple[Fate, ...] = (_lose_all, _keep_all, _keep_beginning, _keep_some)
