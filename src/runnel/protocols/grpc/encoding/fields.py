"""Protobuf's fields as bytes, where it is too slow to make an object of each: numbers, lengths, and what has one."""

from __future__ import annotations


def varint(data: bytes, position: int) -> tuple[int, int]:
    """A number, and where it ends. IndexError: the bytes end before, or it takes more than ten of them."""
    byte = data[position]
    position += 1
    if byte < 0x80:
        return byte, position
    value = byte & 0x7F
    for shift in range(7, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError("a number of more than ten bytes")


def field(tag: int, value: bytes) -> bytes:
    """A tag of one byte, the value's length, and the value."""
    length = len(value)
    head = bytearray((tag,))
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + value


def field_bytes(length: int) -> int:
    """How long the field of a value is that is so long."""
    return 1 + max(1, (length.bit_length() + 6) // 7) + length
