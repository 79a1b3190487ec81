"""Reads and writes Protobuf fields as bytes, where an object for each message is too slow."""

from __future__ import annotations


def varint(data: bytes, position: int) -> tuple[int, int]:
    """A number, and the position of its end. IndexError: the bytes end before, or it has more than ten of them."""
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
    """The bytes of a field whose value has this length."""
    return 1 + max(1, (length.bit_length() + 6) // 7) + length
