"""A checkpoint: every file of a data directory as of one moment, for somebody who copies it at leisure.

It lies in the data directory itself, under `checkpoint/`. Segments and indexes are hard links: nothing in front of a
segment's end ever changes, and what retention removes stays here. How far the segments that grow reached is written
beside them. Everything else is small, and copied. The log is at rest while a checkpoint is made, so all of it fits
together: it is what a process would leave that is killed in that moment. All functions block: for a worker.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from runnel.log.segments import paths

CONTENTS_FILE: Final = "checkpoint.json"

_LINKED: Final = (paths.SEGMENT_SUFFIX, paths.INDEX_SUFFIX)
# Of the data directory: who has it open is nobody else's business, and a checkpoint does not hold another.
_LEFT_OUT: Final = frozenset((paths.LOCK_FILE, paths.CHECKPOINT))


class Contents(msgspec.Struct, frozen=True):
    """What a checkpoint says of itself. `ends`: of segments that still grow, by path within the directory."""

    id: str
    made_ns: int
    ends: Mapping[str, int]


def make(directory: str, contents: Contents) -> str:
    """Make the checkpoint of a log that is at rest, in the place of what an earlier one left; returns its path."""
    source = Path(directory).absolute()
    target = source / paths.CHECKPOINT
    discard(directory)
    target.mkdir(mode=0o700)
    try:
        _share(source, target)
        content = msgspec.json.encode(contents)
        (target / CONTENTS_FILE).write_bytes(content)
    except BaseException:
        discard(directory)
        raise
    return str(target)


def _share(source: Path, target: Path) -> None:
    for entry in os.scandir(source):
        if entry.name in _LEFT_OUT or entry.name.endswith(paths.UNFINISHED_SUFFIX):
            continue
        there = target / entry.name
        # An index may be made anew by a reader in this moment; whoever opens the copy makes it again.
        with suppress(FileNotFoundError):
            if entry.is_dir():
                there.mkdir(mode=0o700)
                _share(Path(entry.path), there)
            elif entry.name.endswith(_LINKED):
                os.link(entry.path, there)
            elif entry.is_file():
                shutil.copyfile(entry.path, there)


def discard(directory: str) -> None:
    """Remove the checkpoint, if there is one."""
    with suppress(FileNotFoundError):
        shutil.rmtree(Path(directory) / paths.CHECKPOINT)


def read_contents(checkpoint: Path) -> Contents:
    """FileNotFoundError if it is gone, or on another machine."""
    return msgspec.json.decode((checkpoint / CONTENTS_FILE).read_bytes(), type=Contents)


def files_of(checkpoint: Path) -> Iterator[tuple[str, int]]:
    """Each file by its path within the directory, and how many bytes of it belong to the copy; parents first."""
    ends = read_contents(checkpoint).ends
    for folder, folders, names in os.walk(checkpoint):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            relative = str(path.relative_to(checkpoint))
            if relative != CONTENTS_FILE:
                yield relative, ends.get(relative, path.stat().st_size)
