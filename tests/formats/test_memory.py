"""Memory that batches leave stays with the process, so that the next ones need not be given theirs page by page."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from runnel.formats.memory import keep_freed_memory

ROUNDS = 50

# A batch, its frame and what lies between them, at their largest; all gone before the next batch comes.
PROGRAM = f"""
import sys
from resource import RUSAGE_SELF, getrusage
from runnel.formats.memory import keep_freed_memory

if sys.argv[1:] == ["keep"]:
    keep_freed_memory()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    buffers = [b"x" * 2**20 for _ in range(4)]
    del buffers
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*words: str, **told: str) -> int:
    """Of a process of its own: what other tests have allocated would teach the allocator too."""
    untold = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))
    }
    command = [sys.executable, "-c", PROGRAM, *words]
    return int(subprocess.check_output(command, env=untold | told, timeout=60))


of_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other allocators keep memory by rules of their own"
)


@of_glibc
def test_memory_of_batches_is_faulted_in_once_and_not_for_each() -> None:
    assert page_faults("keep") < page_faults() / (ROUNDS / 4)


@of_glibc
def test_what_the_user_has_told_the_allocator_holds() -> None:
    told = {"MALLOC_TRIM_THRESHOLD_": "131072"}
    assert page_faults("keep", **told) > page_faults(**told) / 2


def test_it_is_no_error_with_any_allocator_and_may_be_asked_for_again() -> None:
    keep_freed_memory()
    keep_freed_memory()
