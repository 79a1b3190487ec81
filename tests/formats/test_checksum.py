"""The checksum is CRC-32C whatever computes it: files and clients of other makers depend on every bit."""

from __future__ import annotations

import random
from itertools import product

import pytest

from runnel.formats.checksum import crc32c

# The reflected polynomial. A bit at a time: slow, and plainly right.
POLYNOMIAL = 0x82F63B78


def naive(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE306_9283),
        # RFC 3720, B.4.
        (bytes(32), 0x8A91_36AA),
        (b"\xff" * 32, 0x62A8_AB43),
        (bytes(range(32)), 0x46DD_794E),
        (bytes(reversed(range(32))), 0x113F_DB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == naive(data) == expected


def test_every_length_where_libraries_change_their_method() -> None:
    data = random.Random(1).randbytes(700)
    for length in range(len(data)):
        assert crc32c(data[:length]) == naive(data[:length])


@pytest.mark.parametrize("length", [16_383, 16_384, 16_385, 40_001])
def test_long_input_that_is_computed_beside_other_threads(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert crc32c(data) == naive(data)


def test_parts_one_behind_the_other_are_the_whole() -> None:
    data = random.Random(2).randbytes(300)
    whole = crc32c(data)
    for cut in range(len(data) + 1):
        assert crc32c(data[cut:], crc32c(data[:cut])) == whole


def test_begun_anywhere_in_any_kind_of_buffer() -> None:
    data = random.Random(3).randbytes(1000)
    changeable = bytearray(data)
    for begin, length in product(range(17), (1, 20, 82, 512, 900)):
        expected = crc32c(data[begin : begin + length])
        assert crc32c(memoryview(data)[begin : begin + length]) == expected
        assert crc32c(memoryview(changeable)[begin : begin + length]) == expected
    changeable.append(0)  # nothing holds the buffer


def test_each_flipped_bit_shows() -> None:
    data = random.Random(4).randbytes(82)
    whole = crc32c(data)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert crc32c(flipped) != whole
