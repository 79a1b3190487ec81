"""Gives memory back to the system that the C library's allocator keeps after large releases. glibc only."""

from __future__ import annotations

import ctypes
from typing import Final

from runnel.platform.process import resident_bytes

# So much may be free within the process, for what comes next.
KEPT_BYTES_MAX: Final = 64 * 2**20


class _Statistics(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Statistics
        library.malloc_trim.argtypes = (ctypes.c_size_t,)
    except (OSError, AttributeError):  # another C library, or one older than 2.33
        return None
    return library


class Heap:
    """The allocator's free memory, to be looked at now and then, by one thread at a time."""

    def __init__(self) -> None:
        self._library = _glibc()
        self._was_large = False
        self._begun_bytes = resident_bytes()
        # After the last release: what the process had, and what of the heap was in use.
        self._left_bytes = self._begun_bytes
        self._used_bytes = 0

    @property
    def can_release(self) -> bool:
        return self._library is not None

    def look(self) -> int:
        """Release what has been free at two looks in a row, if it is worth it. Returns how many bytes were.

        The allocator counts memory as free that it has released. So the process must have grown since the last time, or
        what was in use then must be free now.
        """
        before = resident_bytes()
        if self._library is None or before - self._begun_bytes <= KEPT_BYTES_MAX:
            return 0
        statistics = self._library.mallinfo2()
        grown_bytes = before - self._left_bytes
        freed_bytes = self._used_bytes - statistics.uordblks
        news_bytes = max(grown_bytes, freed_bytes)
        is_large = min(news_bytes, statistics.fordblks) > KEPT_BYTES_MAX
        was_large, self._was_large = self._was_large, is_large
        if not (is_large and was_large):
            return 0
        self._library.malloc_trim(0)
        self._was_large = False
        self._left_bytes = resident_bytes()
        self._used_bytes = statistics.uordblks
        return before - self._left_bytes
