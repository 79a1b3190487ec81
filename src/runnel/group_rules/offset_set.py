"""A set of offsets that finds its lowest offset quickly; kept as masks, in blocks."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from runnel.group_rules.masks import FULL, LOW, SHIFT, gather, pieces, spans

GAP_MAX: Final = 64
"""One read may skip up to this many unwanted offsets between wanted ones."""

_GAP: Final = "0" * GAP_MAX


class OffsetSet:
    """A set of offsets. Adding, removing and finding the lowest cost the same wherever the offsets lie."""

    __slots__ = ("_blocks", "_count", "_order", "_ordered")

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}  # no mask in it is 0
        self._order: list[int] = []  # a heap of block numbers, once each; some may have no block
        self._ordered: set[int] = set()  # the block numbers in the heap
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return self._count > 0

    def __contains__(self, offset: int) -> bool:
        block = self._blocks.get(offset >> SHIFT)
        return block is not None and bool(block >> (offset & LOW) & 1)

    def add(self, offset: int) -> None:
        self._put(offset >> SHIFT, 1 << (offset & LOW))

    def add_range(self, begin: int, end: int) -> None:
        for number, bits in spans(begin, end):
            self._put(number, bits)

    def add_mask(self, base: int, mask: int) -> None:
        for number, bits in pieces(base, mask):
            self._put(number, bits)

    def _put(self, number: int, bits: int) -> None:
        former = self._blocks.get(number)
        if former is None:
            self._blocks[number] = bits
            self._count += bits.bit_count()
            if number not in self._ordered:
                self._ordered.add(number)
                heappush(self._order, number)
            return
        block = former | bits
        self._blocks[number] = FULL if block == FULL else block
        self._count += (block ^ former).bit_count()

    def discard(self, offset: int) -> bool:
        """Remove an offset. False: it was not in the set."""
        return self._take(offset >> SHIFT, 1 << (offset & LOW)) > 0

    def discard_mask(self, base: int, mask: int) -> int:
        """Remove the offsets of a mask. Returns how many of them were in the set."""
        return sum(self._take(number, bits) for number, bits in pieces(base, mask))

    def discard_range(self, begin: int, end: int) -> int:
        """Remove a range. Returns how many offsets were in the set.

        The cost depends on the stored blocks, not on the range's length.
        """
        first, last = begin >> SHIFT, (end - 1) >> SHIFT
        if last - first >= len(self._blocks):
            kept = [number for number in self._blocks if first <= number <= last]
        else:
            kept = [number for number in range(first, last + 1) if number in self._blocks]
        count = 0
        for number in kept:
            start, stop = max(begin, number << SHIFT), min(end, (number + 1) << SHIFT)
            count += self._take(number, ((1 << stop - start) - 1) << (start & LOW))
        return count

    def _take(self, number: int, bits: int) -> int:
        former = self._blocks.get(number)
        if former is None:
            return 0
        block = former & ~bits
        if block:
            self._blocks[number] = block
        else:
            del self._blocks[number]
        count = (former ^ block).bit_count()
        self._count -= count
        return count

    def mask(self, begin: int, end: int) -> int:
        """A mask whose bit i says whether offset `begin` + i is in the set."""
        return gather(self._blocks, begin, end) if self._blocks else 0

    def stretch(self) -> tuple[int, int] | None:
        """The range that is worth reading at once, from the lowest offset on; None if the set is empty."""
        while self._order and self._order[0] not in self._blocks:
            self._ordered.discard(heappop(self._order))
        if not self._order:
            return None
        number = self._order[0]
        block = self._blocks[number]
        low = (block & -block).bit_length() - 1
        rest = block >> low
        digits = f"{rest:b}"[::-1]
        gap = digits.find(_GAP)
        begin = (number << SHIFT) + low
        return begin, begin + (gap if gap >= 0 else len(digits))
