"""What the operating system knows of this process: time on the processor, memory, open files, when it began."""

from __future__ import annotations

import os
import resource
import time
from typing import Final

# As text, and read without a buffer: a broker looks every second, and messages wait meanwhile.
_MEMORY: Final = "/proc/self/statm"
_OPEN_FILES: Final = "/proc/self/fd"
_PAGE_BYTES: Final = resource.getpagesize()
_STARTED_NS: Final = time.time_ns()


def cpu_time_ns() -> int:
    """Time on a processor, of all threads, in the process's own code and in the kernel's."""
    return time.process_time_ns()


def resident_bytes() -> int:
    """Memory that is really there. Where the system does not tell, the most that there ever was."""
    try:
        with open(_MEMORY, "rb", buffering=0) as told:
            fields = told.read(256).split()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(fields[1]) * _PAGE_BYTES


def open_files() -> int:
    """Files and sockets; 0 where the system does not tell. It takes the longer, the more there are."""
    try:
        return len(os.listdir(_OPEN_FILES)) - 1  # without the one that was opened to look
    except OSError:
        return 0


def open_files_max() -> int:
    """How many the system allows; 0: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else soft


def started_ns() -> int:
    """When this process began to run Runnel, by the wall clock."""
    return _STARTED_NS
