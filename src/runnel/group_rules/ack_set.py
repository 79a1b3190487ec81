"""The set of acknowledged offsets of a partition: everything below a floor, and single offsets above it.

      done  done  done │ owed  done  done  owed  owed
                       floor

Above the floor, each block of offsets that has acknowledged ones has a bit mask. So one unacknowledged message makes
the millions of acknowledged messages behind it no more expensive, and acks cost the same in any order.
"""

from __future__ import annotations

from collections.abc import Iterable

from runnel.group_rules.masks import FULL, LOW, SHIFT, gather, pieces, runs, spans, trailing_ones


class AckSet:
    """The offsets that are done. The floor is the first offset that is not done.

    `snapshot` is consistent in any thread: the floor rises before the blocks below it are removed, and falls after
    the blocks above it are filled.
    """

    __slots__ = ("_blocks", "count_above", "floor")

    def __init__(self, floor: int = 1, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.floor = floor
        # Bits below the floor in the floor's own block have no meaning. Lower blocks are removed.
        self._blocks: dict[int, int] = {}
        self.count_above = 0
        for begin, end in ranges:
            self.add(begin, end)

    def copy(self) -> AckSet:
        twin = AckSet(self.floor)
        twin._blocks = self._blocks.copy()
        twin.count_above = self.count_above
        return twin

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AckSet) and self.snapshot() == other.snapshot()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"AckSet({self.floor}, {self.ranges()})"

    def __contains__(self, offset: int) -> bool:
        if offset < self.floor:
            return True
        block = self._blocks.get(offset >> SHIFT)
        return block is not None and bool(block >> (offset & LOW) & 1)

    def add(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Add a range. Returns the ranges of it that are new."""
        floor = self.floor
        if begin < floor:
            begin = floor
        if begin >= end:
            return []
        is_at_floor = begin == floor
        if is_at_floor and not self._blocks:
            self.floor = end
            return [(begin, end)]
        if begin >> SHIFT == (end - 1) >> SHIFT:
            added = self._add_in_block(begin, end)
        else:
            added = self.missing(begin, end)
            new = sum(stop - start for start, stop in added)
            if is_at_floor:  # do not fill blocks that the floor is about to pass
                self._move_floor(end)
                self.count_above -= end - begin - new
            else:
                self._set(begin, end)
                self.count_above += new
        if is_at_floor:
            self._raise_floor()
        return added

    def add_scattered(self, base: int, mask: int) -> int:
        """Add the offset `base` + i for each bit i of the mask. Returns the mask of those that are new."""
        new = mask & ~self.mask(base, base + mask.bit_length())
        for number, bits in pieces(base, new):
            block = self._blocks.get(number, 0) | bits
            self._blocks[number] = FULL if block == FULL else block
        self.count_above += new.bit_count()
        self._raise_floor()
        return new

    def _raise_floor(self) -> None:
        """Move the floor up if the offset at the floor is done by now."""
        floor = self.first_missing(self.floor)
        if floor > self.floor:
            self.count_above -= floor - self.floor
            self._move_floor(floor)

    def _add_in_block(self, begin: int, end: int) -> list[tuple[int, int]]:
        number = begin >> SHIFT
        bits = ((1 << end - begin) - 1) << (begin & LOW)
        former = self._blocks.get(number)
        if former is None:
            self._blocks[number] = bits
            self.count_above += end - begin
            return [(begin, end)]
        block = former | bits
        self._blocks[number] = FULL if block == FULL else block
        known = former & bits
        if not known:
            self.count_above += end - begin
            return [(begin, end)]
        self.count_above += end - begin - known.bit_count()
        return runs(number << SHIFT, bits ^ known)

    def _set(self, begin: int, end: int) -> None:
        for number, bits in spans(begin, end):
            block = self._blocks.get(number, 0) | bits
            self._blocks[number] = FULL if block == FULL else block

    def _move_floor(self, floor: int) -> None:
        """Set a higher floor. Removes the blocks that it passes, and its own block if that has no bits above it."""
        passed = self._kept_within(self.floor, floor)
        number = floor >> SHIFT
        self.floor = floor
        for behind in passed:
            if behind < number:
                del self._blocks[behind]
        block = self._blocks.get(number)
        if block is not None and not block >> (floor & LOW):
            del self._blocks[number]

    def discard(self, begin: int, end: int) -> None:
        """Remove a range: these offsets are not done."""
        if begin >= end:
            return
        if begin < self.floor:
            self._lower_floor(begin)
        for number in self._kept_within(begin, end):
            start, stop = max(begin, number << SHIFT), min(end, (number + 1) << SHIFT)
            bits = ((1 << stop - start) - 1) << (start & LOW)
            block = self._blocks[number] & ~bits
            self.count_above -= (self._blocks[number] ^ block).bit_count()
            if block:
                self._blocks[number] = block
            else:
                del self._blocks[number]

    def _lower_floor(self, floor: int) -> None:
        """Set a lower floor. Offsets between the two floors become bits."""
        former = self.floor
        number = floor >> SHIFT
        self._set(floor, former)
        self._blocks[number] &= FULL << (floor & LOW) & FULL
        self.count_above += former - floor
        self.floor = floor

    # --- Queries ---

    def mask(self, begin: int, end: int) -> int:
        """A mask whose bit i says whether offset `begin` + i is done."""
        if begin >= end:
            return 0
        above = max(begin, self.floor)
        if above >= end:
            return (1 << end - begin) - 1
        done = gather(self._blocks, above, end) if self._blocks else 0
        if above == begin:
            return done
        return done << (above - begin) | ((1 << above - begin) - 1)

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that are not done. The cost depends on the stored blocks, not on the range's length."""
        found: list[tuple[int, int]] = []
        position = begin = max(begin, self.floor)
        for number in self._kept_within(begin, end):
            start, stop = max(begin, number << SHIFT), min(end, (number + 1) << SHIFT)
            for first, last in runs(start, gather(self._blocks, start, stop)):
                if position < first:
                    found.append((position, first))
                position = last
        if position < end:
            found.append((position, end))
        return found

    def first_missing(self, from_offset: int) -> int:
        """The first offset at or after `from_offset` that is not done."""
        offset = max(from_offset, self.floor)
        while True:
            block = self._blocks.get(offset >> SHIFT)
            if block is None:
                return offset
            ones = trailing_ones(block >> (offset & LOW))
            offset += ones
            if not ones or offset & LOW:  # not at the end of its block
                return offset

    def ranges(self) -> list[tuple[int, int]]:
        """The ranges that are done above the floor."""
        return self.snapshot()[1]

    def snapshot(self) -> tuple[int, list[tuple[int, int]]]:
        """The floor, and the ranges that are done above it."""
        while True:
            floor = self.floor
            blocks = list(self._blocks.items())
            if floor == self.floor:
                break
        found: list[tuple[int, int]] = []
        for number, block in sorted(blocks):
            start = max(number << SHIFT, floor)
            for begin, end in runs(start, block >> (start - (number << SHIFT))):
                if found and found[-1][1] == begin:
                    found[-1] = (found[-1][0], end)
                else:
                    found.append((begin, end))
        return floor, found

    def _kept_within(self, begin: int, end: int) -> list[int]:
        """The stored blocks that overlap a range, in order."""
        first, last = begin >> SHIFT, (end - 1) >> SHIFT
        if last - first < len(self._blocks):
            return [number for number in range(first, last + 1) if number in self._blocks]
        return sorted(number for number in self._blocks if first <= number <= last)
