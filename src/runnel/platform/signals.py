"""Signals of this process: handlers for the duration of a block, and what a hangup means."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def handled_signals(reactions: Mapping[int, Callable[[], object]]) -> Iterator[None]:
    """Install these signal handlers for the duration of the block."""
    loop = asyncio.get_running_loop()
    for number, react in reactions.items():
        loop.add_signal_handler(number, react)
    try:
        yield
    finally:
        for number in reactions:
            loop.remove_signal_handler(number)


def hangup_ends() -> bool:
    """Whether SIGHUP means that the terminal was closed, rather than "reload the settings".

    It does if one of the three standard streams is a terminal, unless nohup (which ignores the signal) started the
    process. Call it at the start: a closed terminal is no longer recognised as one.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return False
    return any(map(os.isatty, range(3)))
