"""Reads and writes standard streams in an event loop: waiting does not block the loop, and Ctrl-C ends it.

A thread that is blocked in a read or a write cannot be ended, and making a shared terminal or pipe non-blocking
changes it for other processes too. So each step first asks the system whether it would block.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
from typing import Final

# A pipe that is ready accepts this much without blocking.
_STEP_BYTES: Final = select.PIPE_BUF
_READ_BYTES: Final = 1 << 16


async def read_some(descriptor: int) -> bytes:
    """Return the next bytes as soon as there are some; no bytes at the end of the input."""
    if not select.select((descriptor,), (), (), 0)[0]:
        await _wait_readable(descriptor)
    return os.read(descriptor, _READ_BYTES)


async def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, as fast as the reader accepts it."""
    rest = memoryview(data)
    step = len(rest) if stat.S_ISREG(os.fstat(descriptor).st_mode) else _STEP_BYTES
    while rest:
        if not select.select((), (descriptor,), (), 0)[1]:
            await _wait_writable(descriptor)
        rest = rest[os.write(descriptor, rest[:step]) :]


async def _wait_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def _wait_writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(descriptor)
