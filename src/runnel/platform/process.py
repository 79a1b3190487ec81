"""Figures of this process from the operating system: CPU time, memory, open files, start time."""

from __future__ import annotations

import os
import resource
import time
from typing import Final

# Read without a buffer: the broker reads these every second, and messages wait meanwhile.
_MEMORY: Final = "/proc/self/statm"
_OPEN_FILES: Final = "/proc/self/fd"
_PAGE_BYTES: Final = resource.getpagesize()
_STARTED_NS: Final = time.time_ns()


def cpu_time_ns() -> int:
    """CPU time of all threads, in user and kernel mode."""
    return time.process_time_ns()


def resident_bytes() -> int:
    """Resident memory. Where the system does not tell it, the maximum so far."""
    try:
        with open(_MEMORY, "rb", buffering=0) as told:
            fields = told.read(256).split()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(fields[1]) * _PAGE_BYTES


def open_files() -> int:
    """Open files and sockets; 0 where the system does not tell. Its cost grows with their number."""
    try:
        return len(os.listdir(_OPEN_FILES)) - 1  # without the descriptor of this listing
    except OSError:
        return 0


def open_files_max() -> int:
    """The limit of open files; 0: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else soft


def started_ns() -> int:
    """When this process began to run Runnel, by the wall clock."""
    return _STARTED_NS
