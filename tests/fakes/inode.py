"""A file's content on the fake disk: on the platter, in memory, and after a crash.

Between two syncs a file has a history of changes, and each of its sectors reaches the platter
whenever the system likes: after a crash every sector shows its state at some moment of that
history, on its own, and so does the size. That is all it takes to lose writes, tear them, and let
later ones survive earlier ones; what cannot happen is a sector that mixes moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at a position. A pinned one was synced by itself, and survives whatever happens."""

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
    """A size that the file has at least."""

    size: int

    def apply(self, content: bytearray) -> None:
        content.extend(bytes(max(0, self.size - len(content))))


Change = Write | Truncate | Allocate


class Inode:
    """`content` is what the system sees; a crash leaves `durable` and some of `pending`."""

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
        """Some of it got out; the rest is forgotten, though memory shows it until the crash."""
        self.durable = self._survivors(random)
        self.pending.clear()

    def crash(self, random: Random) -> None:
        self.fail_sync(random)
        self.content = bytearray(self.durable)

    def flip_bit(self, position: int, bit: int) -> None:
        """Damage one bit wherever it is held."""
        self.content[position] ^= 1 << bit
        if position < len(self.durable):
            self.durable[position] ^= 1 << bit
        for index, change in enumerate(self.pending):
            if isinstance(change, Write) and 0 <= position - change.position < len(change.data):
                data = bytearray(change.data)
                data[position - change.position] ^= 1 << bit
                self.pending[index] = Write(change.position, bytes(data), change.pinned)

    def _survivors(self, random: Random) -> bytearray:
        """The content a crash leaves. Moment 0 is the durable state, k the one after change k."""
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
                    # What a surviving truncation cut off cannot come back by growing again.
                    cut = range(size // SECTOR_BYTES, -(-size_before // SECTOR_BYTES))
                    captured += [s for s in cut if sector_moments.get(s, 0) < moment]
            elif isinstance(change, Write) and change.pinned:
                # It needs a size that holds it, and nothing else of what happened to the size.
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
        """The moment that each changed sector shows; those not named show the durable state."""
        moments: dict[int, int] = {}
        # Often all or nothing survives: recovery has to be right about those too.
        common_fate: Fate | None = random.choice((_lose_all, _keep_all, None, None))
        for moment, change in enumerate(self.pending, start=1):
            if not isinstance(change, Write):
                continue
            fate = _keep_all if change.pinned else common_fate or random.choice(_FATES)
            for sector in fate(change.sectors(), random):
                moments[sector] = moment
        return moments


Fate = Callable[[range, Random], Iterable[int]]  # which of a write's sectors reach the platter


def _lose_all(sectors: range, random: Random) -> range:
    return sectors[:0]


def _keep_all(sectors: range, random: Random) -> range:
    return sectors


def _keep_beginning(sectors: range, random: Random) -> range:
    return sectors[: random.randint(0, len(sectors))]


def _keep_some(sectors: range, random: Random) -> list[int]:
    return [sector for sector in sectors if random.random() < 0.5]


_FATES: tuple[Fate, ...] = (_lose_all, _keep_all, _keep_beginning, _keep_some)
