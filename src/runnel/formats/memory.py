"""Makes the allocator keep the memory of freed batches."""

from __future__ import annotations

from typing import Final

# Twice as much may stay with the process. A batch, its frame and the columns in between have 1 MiB each at most.
_KEPT_BYTES: Final = 8 * 2**20


def keep_freed_memory() -> None:
    """Make the allocator keep the memory of freed large buffers for the next ones.

    glibc returns memory to the system when a little more is free than the largest buffer freed so far. The next buffer
    then faults in again page by page: 150 faults for a batch of 4,000 messages. Freeing one large buffer here raises
    that limit. The buffer is never touched, and so costs nothing. Other allocators are not affected.
    """
    bytes(_KEPT_BYTES)
