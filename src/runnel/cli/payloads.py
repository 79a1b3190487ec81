"""The payloads of `runnel pub`: arguments, lines of standard input or of a file, or a whole input as one payload.

Payloads come in lists, as many as one read returned, so that input of any size needs little memory.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from runnel.cli.standard_streams import read_some
from runnel.errors import LimitExceededError

# No broker accepts a batch larger than this.
PAYLOAD_BYTES_CEILING: Final = 64 * 2**20

_FILE_STEP_BYTES: Final = 1 << 16

Read: TypeAlias = Callable[[], Awaitable[bytes]]
Payloads: TypeAlias = AsyncIterator[Sequence[bytes]]


class LineSplitter:
    """Splits bytes into lines, without their newlines. The last line needs no newline."""

    def __init__(self, line_bytes_max: int = PAYLOAD_BYTES_CEILING) -> None:
        self._line_bytes_max = line_bytes_max
        self._parts: list[bytes] = []  # of the line that has not ended yet
        self._parts_bytes = 0
        self._lines = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that end in `data`."""
        *ended, rest = data.split(b"\n")
        if ended:
            ended[0] = b"".join((*self._parts, ended[0]))
            self._parts.clear()
            self._parts_bytes = 0
        self._lines += len(ended)
        if rest:
            self._parts.append(rest)
            self._parts_bytes += len(rest)
        if self._parts_bytes > self._line_bytes_max:
            raise LimitExceededError(
                f"line {self._lines + 1} is longer than {self._line_bytes_max} bytes, the most that "
                "a message can have"
            )
        return ended

    def finish(self) -> list[bytes]:
        """Return the last line, if it does not end with a newline."""
        return [b"".join(self._parts)] if self._parts else []


async def of_arguments(arguments: Sequence[str]) -> Payloads:
    """Yield the arguments as bytes: an argument may contain bytes that are not UTF-8."""
    yield [os.fsencode(argument) for argument in arguments]


async def of_lines(read: Read) -> Payloads:
    """Yield each line as a payload."""
    splitter = LineSplitter()
    while data := await read():
        if lines := splitter.feed(data):
            yield lines
    if last := splitter.finish():
        yield last


async def of_whole(read: Read, source: str) -> Payloads:
    """Yield the whole input as one payload."""
    parts: list[bytes] = []
    size = 0
    while data := await read():
        parts.append(data)
        size += len(data)
        if size > PAYLOAD_BYTES_CEILING:
            raise LimitExceededError(
                f"{source} is longer than {PAYLOAD_BYTES_CEILING} bytes, the most that a message "
                "can have; without --raw each line is a message"
            )
    yield [b"".join(parts)]


def standard_input() -> Read:
    return lambda: read_some(0)


def file_reader(descriptor: int, on_read: Callable[[int], None]) -> Read:
    """Return a function that reads the file in steps; `on_read` gets the number of bytes of each."""

    async def read() -> bytes:
        # A file on a disk does not block for long. A named pipe does, and the user chose it.
        data = os.read(descriptor, _FILE_STEP_BYTES)
        on_read(len(data))
        return data

    return read
