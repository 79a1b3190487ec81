"""Free memory goes back to the system. The test uses a process of its own, whose heap does nothing else."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
from runnel.platform.heap import Heap
from runnel.platform.process import resident_bytes

heap = Heap()
begun = resident_bytes()
assert heap.look() == heap.look() == 0  # nothing is there to be released
# Small enough not to be given back one by one, and held together by those that stay.
blocks = [bytearray(100_000) for _ in range(6000)]
grown = resident_bytes() - begun
assert grown > 500_000_000, grown
assert heap.look() == heap.look() == 0  # all of it is in use
del blocks[:3000]
kept = resident_bytes() - begun
assert kept > 500_000_000, kept  # the allocator keeps it by itself
assert heap.look() == 0  # it may be needed again at once
assert heap.look() > 250_000_000
assert heap.look() == heap.look() == 0  # the rest is in use
del blocks[:-1]
assert heap.look() == 0
assert heap.look() > 250_000_000
assert resident_bytes() - begun < 20_000_000
assert heap.look() == heap.look() == 0  # once is enough
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked")
def test_memory_that_stays_free_is_released_once() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, check=False, text=True
    )
    assert ended.returncode == 0, ended.stderr
