"""Finds the process that holds a directory's lock, without ever taking that lock.

A shared flock would answer too, but a broker that starts at that moment would find the directory locked. Instead:
the holder of a `FileLock` keeps its file open for writing, and Linux grants a read lease only on a file that no process
has open for writing. A process that opens the file while we hold the lease waits a microsecond and never fails.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec

# The pid namespace that sees every process of the machine has a fixed number.
_FIRST_NAMESPACE: Final = "pid:[4026531836]"


class LockHolder(msgspec.Struct, frozen=True):
    """A process that has a directory open, with the pid that it wrote (as its own pid namespace counts)."""

    pid: int | None  # None: the file has none
    is_certain: bool  # False: the system does not tell, so it counts as running


def find_lock_holder(path: str) -> LockHolder | None:
    """The process that holds the `FileLock` on this file; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        written = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        if not written:
            # Never locked, released, or locked a moment ago: its holder has done nothing yet.
            return None
        pid = int(written) if written.isdecimal() else None
        is_open = _is_open_for_writing(descriptor)
        if is_open is None:
            is_open = _is_listed(descriptor)
        if is_open is False:
            return None  # its holder was killed
        return LockHolder(pid, is_certain=is_open is True)
    finally:
        os.close(descriptor)


if sys.platform == "linux":

    def _is_open_for_writing(descriptor: int) -> bool | None:
        """None if the system does not say: not our file, or a file system without leases."""
        try:
            # If a process opens the file meanwhile, we get SIGURG, which does nothing, instead of SIGIO.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            return True if error.errno == errno.EAGAIN else None
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def _is_listed(descriptor: int) -> bool | None:
        """Search the kernel's list of locks, which shows those of the processes that we can see."""
        try:
            lines = Path("/proc/locks").read_text().splitlines()
            sees_all = str(Path("/proc/self/ns/pid").readlink()) == _FIRST_NAMESPACE
        except OSError:
            return None
        inode = str(os.fstat(descriptor).st_ino)
        # The device is left out: some file systems show another one here than to stat.
        for line in lines:
            fields = line.split()
            if "FLOCK" in fields and any(field.split(":")[2:] == [inode] for field in fields):
                return True
        return False if sees_all else None

else:

    def _is_open_for_writing(descriptor: int) -> bool | None:  # noqa: ARG001
        return None

    def _is_listed(descriptor: int) -> bool | None:  # noqa: ARG001
        return None
