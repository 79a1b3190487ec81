"""Frames of the native protocol: a length, a msgpack head, and bytes that follow it untouched.

    0   4   frame_bytes   u32, everything after these 8 bytes
    4   4   head_bytes    u32, of the head without its padding
    8       head          msgpack, zero-padded to a multiple of 8
            tail          frame_bytes minus the padded head: blocks, or nothing

All little-endian. The tail begins on a multiple of 8 from the start of the frame, so that blocks in
it, and the columns in those, are aligned wherever the frame is.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from runnel.errors import LimitExceededError, MalformedError

PREFIX_BYTES: Final = 8

_PREFIX: Final = struct.Struct("<II")
_PADDING: Final = tuple(bytes(-length % 8) for length in range(8))


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One whole frame: the encoded head, and the tail, as views that nobody will overwrite."""

    head: memoryview
    tail: memoryview


def pack_head(head: bytes, tail_bytes: int = 0) -> bytes:
    """What goes out before a tail of so many bytes. The tail itself is passed on by reference."""
    padding = _PADDING[len(head) & 7]
    return b"".join((_PREFIX.pack(len(head) + len(padding) + tail_bytes, len(head)), head, padding))


class FrameReader:
    """Takes bytes as they come and gives whole frames.

    A frame's length is checked against the limit as soon as its 8 bytes are there, before room for
    it is made. After an error the stream has no meaning: the reader refuses all that follows.
    """

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._held = bytearray()
        self._needed = PREFIX_BYTES
        self._broken: str | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return len(self._held)

    def feed(self, chunk: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that this chunk completes. The chunk is copied: its memory may be reused.

        An error in the stream takes the frames before it in the same chunk with it.
        """
        if self._broken is not None:
            raise MalformedError("frame", f"follows an error in the stream: {self._broken}")
        if len(self._held) + len(chunk) < self._needed:
            self._held += chunk
            return []
        data: bytes | bytearray = bytes(chunk)
        if self._held:
            self._held += data
            data = self._held  # the frames keep it: from here on it is theirs
        frames, position = self._cut(data)
        self._held = bytearray(memoryview(data)[position:])
        return frames

    def _cut(self, data: bytes | bytearray) -> tuple[list[Frame], int]:
        frames: list[Frame] = []
        view = memoryview(data).toreadonly()
        position = 0
        while True:
            self._needed = PREFIX_BYTES
            if len(data) - position < PREFIX_BYTES:
                return frames, position
            frame_bytes, head_bytes = self._read_prefix(data, position)
            self._needed += frame_bytes
            if len(data) - position < self._needed:
                return frames, position
            begin = position + PREFIX_BYTES
            tail = begin + head_bytes + -head_bytes % 8
            position = begin + frame_bytes
            frames.append(Frame(view[begin : begin + head_bytes], view[tail:position]))

    def _read_prefix(self, data: bytes | bytearray, position: int) -> tuple[int, int]:
        frame_bytes, head_bytes = _PREFIX.unpack_from(data, position)
        if frame_bytes > self._frame_bytes_max:
            self._broken = (
                f"a frame of {frame_bytes} bytes; at most {self._frame_bytes_max} are allowed"
            )
            raise LimitExceededError(self._broken)
        if not 0 < head_bytes <= frame_bytes or head_bytes + -head_bytes % 8 > frame_bytes:
            self._broken = f"a head of {head_bytes} bytes does not fit a frame of {frame_bytes}"
            raise MalformedError("frame head_bytes", self._broken)
        return frame_bytes, head_bytes
