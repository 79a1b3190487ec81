"""Sets of neighbouring offsets as the bits of one integer: bit i of a mask at `base` stands for offset base + i.

Python's integers make such sets small and quick: a thousand offsets take 133 bytes, and adding, removing or
comparing them is one operation on these bytes. A mask that could grow long is kept in blocks of BLOCK offsets, so
that changing one bit never copies more than half a kilobyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import compress
from typing import Final

SHIFT: Final = 12
BLOCK: Final = 1 << SHIFT
LOW: Final = BLOCK - 1
FULL: Final = (1 << BLOCK) - 1
"""The mask of a full block. All full blocks share this object."""

_BITS: Final = bytes(int(chr(digit) == "1") for digit in range(256))
_ONES: Final = re.compile("1+")


def runs(base: int, mask: int) -> list[tuple[int, int]]:
    """The offsets of a mask as ranges [begin, end), in order."""
    if not mask:
        return []
    low = (mask & -mask).bit_length() - 1
    rest = mask >> low
    base += low
    if not rest & (rest + 1):
        return [(base, base + rest.bit_length())]
    # One pass over the digits, lowest first: shifting run by run would copy the mask for each run.
    digits = f"{rest:b}"[::-1]
    return [(base + found.start(), base + found.end()) for found in _ONES.finditer(digits)]


def range_of(base: int, mask: int) -> tuple[int, int] | None:
    """The offsets of a mask as one range; None if they are scattered, or there are none."""
    low = mask & -mask
    if not mask or mask & (mask + low):
        return None
    return base + low.bit_length() - 1, base + mask.bit_length()


def to_bytes(mask: int) -> bytes:
    """The mask as bytes, lowest first."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def offsets(base: int, mask: int) -> list[int]:
    """The offsets of a mask, in order."""
    if not mask & (mask - 1):
        return [base + mask.bit_length() - 1] if mask else []
    digits = f"{mask:b}"[::-1].encode().translate(_BITS)
    return list(compress(range(base, base + len(digits)), digits))


def lowest(mask: int, count: int) -> int:
    """The lowest `count` set bits (1 or more); all bits if there are fewer."""
    if count == 1:
        return mask & -mask
    if mask.bit_count() <= count:
        return mask
    few, many = 0, mask.bit_length()  # numbers of digits that have too few, and enough, set bits
    while many - few > 1:
        middle = (few + many) // 2
        if (mask & ((1 << middle) - 1)).bit_count() < count:
            few = middle
        else:
            many = middle
    return mask & ((1 << many) - 1)


def pieces(base: int, mask: int) -> Iterator[tuple[int, int]]:
    """A mask at any offset as pairs (block, mask within the block)."""
    number = base >> SHIFT
    mask <<= base & LOW
    while mask:
        piece = mask & FULL
        if piece:
            yield number, piece
        mask >>= BLOCK
        number += 1


def spans(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """A range as pairs (block, mask within the block)."""
    while begin < end:
        number = begin >> SHIFT
        first = begin & LOW
        stop = min(end - (number << SHIFT), BLOCK)
        if stop - first == BLOCK:
            yield number, FULL
        else:
            yield number, ((1 << stop - first) - 1) << first
        begin = (number + 1) << SHIFT


def gather(blocks: Mapping[int, int], begin: int, end: int) -> int:
    """The bits of `blocks` in the range [begin, end), as a mask at `begin`."""
    if begin >= end:
        return 0
    first = begin >> SHIFT
    mask = blocks.get(first, 0) >> (begin & LOW)
    shift = BLOCK - (begin & LOW)
    for number in range(first + 1, ((end - 1) >> SHIFT) + 1):
        block = blocks.get(number)
        if block is not None:
            mask |= block << shift
        shift += BLOCK
    return mask & ((1 << end - begin) - 1)


def trailing_ones(mask: int) -> int:
    return (~mask & (mask + 1)).bit_length() - 1
