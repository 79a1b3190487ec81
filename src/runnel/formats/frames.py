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
from typing import Final, TypeAlias

import msgspec
import numpy as np

from runnel.errors import LimitExceededError, MalformedError

PREFIX_BYTES: Final = 8

_PREFIX: Final = struct.Struct("<II")
_PADDING: Final = tuple(bytes(-length % 8) for length in range(8))

# A frame that lacks this much is received into a buffer of its own.
_LARGE_BYTES: Final = 64 * 1024
# At least this much is allocated for the beginning of a frame, if the frame is as long.
_HELD_BYTES_MIN: Final = 4096

_Memory: TypeAlias = bytearray | memoryview


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One whole frame: views of the encoded head and the tail, whose memory is not reused."""

    head: memoryview
    tail: memoryview


def pack_head(head: bytes, tail_bytes: int = 0) -> bytes:
    """The bytes of a frame before a tail of `tail_bytes`. The caller sends the tail, without a copy."""
    head_bytes = len(head)
    padded_bytes = (head_bytes + 7) & -8
    return _PREFIX.pack(padded_bytes + tail_bytes, head_bytes) + head + _PADDING[head_bytes & 7]


class FrameReader:
    """Turns received bytes into whole frames.

    A frame's length is checked against the limit as soon as its prefix of 8 bytes has arrived, before any memory is
    allocated for it. That memory grows with the bytes that arrive, not with the announced length; only `trusted_bytes`
    are allocated at once, if the frame is as long. After an error the stream has no meaning: the reader refuses all
    that follows.

    Bytes are copied once: `feed` copies a chunk, whose memory may be reused. A caller that can receive into any memory
    calls `room` first: it then receives the rest of a large frame in its final place, and tells `fill` how much.
    """

    __slots__ = ("_broken", "_filled", "_frame_bytes_max", "_held", "_needed", "_trusted_bytes")

    def __init__(self, frame_bytes_max: int, *, trusted_bytes: int = 0) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._trusted_bytes = trusted_bytes
        self._broken: str | None = None
        # The beginning of a frame that has not arrived whole: the first `_filled` bytes of `_held`. The next step
        # needs `_needed` of them: first the prefix, then the frame.
        self._held: _Memory = bytearray()
        self._filled = 0
        self._needed = PREFIX_BYTES

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return self._filled

    @property
    def missing_bytes(self) -> int:
        """The number of bytes that complete a prefix or a frame, without any byte of the next frame."""
        return self._needed - self._filled

    def feed(self, chunk: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that this chunk completes. The chunk is copied: its memory may be reused.

        An error in the stream also loses the frames before it in the same chunk.
        """
        if self._broken is not None:
            raise self._broken_error()
        if not self._filled and len(chunk) >= PREFIX_BYTES:
            # Messages that come one by one are one whole frame each: this takes half the time (bench/latency.py).
            frame_bytes, head_bytes = self._read_prefix(chunk, 0)
            if frame_bytes == len(chunk) - PREFIX_BYTES:
                view = memoryview(bytes(chunk))
                head_end = PREFIX_BYTES + head_bytes
                return [Frame(view[PREFIX_BYTES:head_end], view[(head_end + 7) & -8 :])]
        frames: list[Frame] = []
        begin = 0
        while self._filled and begin < len(chunk):
            end = min(begin + self._needed - self._filled, len(chunk))
            self._make_room(self._filled + end - begin)
            self._held[self._filled : self._filled + end - begin] = chunk[begin:end]
            self._filled += end - begin
            begin = end
            frames += self._completed()
        if begin < len(chunk):
            rest = memoryview(chunk)[begin:]
            # The mere beginning of a large frame is copied only once, into the frame's buffer.
            is_cut = len(rest) < _LARGE_BYTES or self._begins_whole(rest)
            position = self._cut(bytes(rest), frames) if is_cut else 0
            if position < len(rest):
                self._hold(rest[position:])
        return frames

    def room(self) -> memoryview | None:
        """The memory to receive the rest of a large frame into; None: receive anywhere, and call `feed`."""
        if self._needed - self._filled < _LARGE_BYTES:
            return None
        if len(self._held) - self._filled < min(_LARGE_BYTES, self._needed - self._filled):
            self._make_room(min(self._filled + _LARGE_BYTES, self._needed))
        return memoryview(self._held)[self._filled :]

    def fill(self, received_bytes: int) -> list[Frame]:
        """The frame that these bytes, received into `room`, complete; or none."""
        if self._broken is not None:
            raise self._broken_error()
        self._filled += received_bytes
        return self._completed()

    def _broken_error(self) -> MalformedError:
        return MalformedError("frame", f"follows an error in the stream: {self._broken}")

    def _make_room(self, size_bytes: int) -> None:
        """Copy what is held into a buffer of twice the size: the old one may be lent out, and cannot grow."""
        if size_bytes > len(self._held):
            wanted = max(size_bytes, 2 * len(self._held), _HELD_BYTES_MIN, self._trusted_bytes)
            larger = _memory(min(wanted, max(self._needed, size_bytes)))
            larger[: self._filled] = memoryview(self._held)[: self._filled]
            self._held = larger

    def _completed(self) -> list[Frame]:
        """The held frame, if it is whole; if only its prefix is, sets `_needed` to the size of the frame."""
        if self._filled < self._needed:
            return []
        frames: list[Frame] = []
        held = self._held  # a frame keeps it: from here on it is the frame's
        position = self._cut(held, frames, self._filled)
        if position:
            self._held = bytearray()
            self._filled = 0
        return frames

    def _begins_whole(self, data: memoryview) -> bool:
        """Whether the frame that begins here is whole; sets `_needed` to its size."""
        self._needed = PREFIX_BYTES + self._read_prefix(data, 0)[0]
        return len(data) >= self._needed

    def _hold(self, beginning: memoryview) -> None:
        self._held = bytearray()
        self._filled = 0
        self._make_room(len(beginning))
        self._held[: len(beginning)] = beginning
        self._filled = len(beginning)

    def _cut(self, data: bytes | _Memory, frames: list[Frame], end: int | None = None) -> int:
        """Add the whole frames in `data` to `frames`; returns where they end."""
        end = len(data) if end is None else end
        view = memoryview(data).toreadonly()
        position = 0
        while end - position >= PREFIX_BYTES:
            frame_bytes, head_bytes = self._read_prefix(data, position)
            begin = position + PREFIX_BYTES
            if end - begin < frame_bytes:
                self._needed = PREFIX_BYTES + frame_bytes
                return position
            tail = begin + ((head_bytes + 7) & -8)
            position = begin + frame_bytes
            frames.append(Frame(view[begin : begin + head_bytes], view[tail:position]))
        self._needed = PREFIX_BYTES
        return position

    def _read_prefix(self, data: bytes | _Memory, position: int) -> tuple[int, int]:
        frame_bytes, head_bytes = _PREFIX.unpack_from(data, position)
        if frame_bytes > self._frame_bytes_max:
            self._broken = (
                f"a frame of {frame_bytes} bytes; at most {self._frame_bytes_max} are allowed"
            )
            raise LimitExceededError(self._broken)
        if not head_bytes or (head_bytes + 7) & -8 > frame_bytes:
            self._broken = f"a head of {head_bytes} bytes does not fit a frame of {frame_bytes}"
            raise MalformedError("frame head_bytes", self._broken)
        return frame_bytes, head_bytes


def _memory(size_bytes: int) -> _Memory:
    """Memory to fill. A large one is not cleared first: that took a tenth of a client's time for a page."""
    if size_bytes < _LARGE_BYTES:
        return bytearray(size_bytes)
    return np.empty(size_bytes, np.uint8).data
