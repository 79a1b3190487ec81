"""Returns memory to the system that glibc's allocator keeps after large releases. Other C libraries: does nothing."""

from __future__ import annotations

import ctypes
from typing import Final

from runnel.platform.process import resident_bytes

# Free memory that the process may keep for later use.
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
    """Watches the allocator's free memory and releases it. One thread at a time."""

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
        """Release memory that was free at two checks in a row, if it is much. Returns the bytes released.

        The allocator counts released memory as free. So the process must have grown since the last release, or
        memory that was in use then must be free now.
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
