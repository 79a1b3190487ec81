"""Standard input and output beside an event loop: they wait without holding it up, and Ctrl-C ends the wait.

A thread that is stuck in a read or a write cannot be ended, and setting a shared terminal or pipe to
non-blocking would change it for others too. So the system is asked before each step whether it would wait.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
from typing import Final

# What a pipe that is ready surely takes without waiting.
_STEP_BYTES: Final = select.PIPE_BUF
_READ_BYTES: Final = 1 << 16


async def read_some(descriptor: int) -> bytes:
    """The next bytes, as soon as there are any; none at the end."""
    if not select.select((descriptor,), (), (), 0)[0]:
        await _wait_readable(descriptor)
    return os.read(descriptor, _READ_BYTES)


async def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, as fast as whoever reads it takes it."""
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
