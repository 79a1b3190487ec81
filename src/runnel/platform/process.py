"""Figures of this process from the operating system: CPU time, memory, open files, start time."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Final

# Read without a buffer: the broker reads these every second, and messages wait meanwhile.
_MEMORY: Final = "/proc/self/statm"
_OPEN_FILES: Final = "/proc/self/fd"
_CPU_QUOTA: Final = "/sys/fs/cgroup/cpu.max"
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


def available_cores() -> int:
    """How many cores this process may use: fewer than the machine has, if a container or an affinity says so."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores, _cores_of_container()))


def _cores_of_container() -> int:
    """The whole cores of the quota of CPU time: the file says `max 100000`, or `150000 100000` for one and a half."""
    try:
        quota, period = Path(_CPU_QUOTA).read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # not in a container, or without a quota
        return sys.maxsize


def started_ns() -> int:
    """When this process began to run Runnel, by the wall clock."""
    return _STARTED_NS
