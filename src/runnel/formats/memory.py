"""What becomes of the memory of batches that are let go."""

from __future__ import annotations

from typing import Final

# Twice as much may stay with the process. A batch, its frame and the columns in between have 1 MiB each at most.
_KEPT_BYTES: Final = 8 * 2**20


def keep_freed_memory() -> None:
    """Let the allocator keep what large buffers leave, for those that come next.

    glibc gives memory back to the system when a little more is free than the largest buffer so far had, and the next
    one is then faulted in again page by page: 150 times for a batch of 4,000 messages. It learns how large buffers are
    from one that is freed; this one is never touched, and so costs nothing. Other allocators do not mind.
    """
    bytes(_KEPT_BYTES)
