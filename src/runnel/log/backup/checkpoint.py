"""A checkpoint: every file of a data directory as of one moment, ready to be copied.

It lies in the data directory, under `checkpoint/`. Segments and indexes are hard links: bytes before a segment's end
never change, and a file that retention removes stays in the checkpoint. `CONTENTS_FILE` records the ends of the
segments that still grow. All other files are small, and are copied. The log is at rest while a checkpoint is made, so
the files fit together, as if a process was killed at that moment. All functions block: for a worker.
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
# The lock file belongs to the broker that has the directory open, and a checkpoint does not contain another one.
_LEFT_OUT: Final = frozenset((paths.LOCK_FILE, paths.CHECKPOINT, paths.NODES))


class Contents(msgspec.Struct, frozen=True):
    """A checkpoint's description. `ends`: the ends of segments that still grow, by path within the directory."""

    id: str
    made_ns: int
    ends: Mapping[str, int]


def make(directory: str, contents: Contents) -> str:
    """Make the checkpoint of a log that is at rest; returns its path. It replaces an earlier one."""
    source = Path(directory).absolute()
    target = source / paths.CHECKPOINT
    discard(directory)
    target.mkdir(mode=0o700)
    try:
        _link_or_copy(source, target)
        content = msgspec.json.encode(contents)
        (target / CONTENTS_FILE).write_bytes(content)
    except BaseException:
        discard(directory)
        raise
    return str(target)


def _link_or_copy(source: Path, target: Path) -> None:
    for entry in os.scandir(source):
        # The database is copied by who has it open.
        if paths.is_cluster_file(entry.name) or entry.name.endswith(paths.UNFINISHED_SUFFIX):
            continue
        if entry.name in _LEFT_OUT:
            continue
        copied = target / entry.name
        # A reader may be replacing an index at this moment. The broker that opens the copy makes it again.
        with suppress(FileNotFoundError):
            if entry.is_dir():
                copied.mkdir(mode=0o700)
                _link_or_copy(Path(entry.path), copied)
            elif entry.name.endswith(_LINKED):
                os.link(entry.path, copied)
            elif entry.is_file():
                shutil.copyfile(entry.path, copied)


def discard(directory: str) -> None:
    """Remove the checkpoint, if there is one."""
    with suppress(FileNotFoundError):
        shutil.rmtree(Path(directory) / paths.CHECKPOINT)


def read_contents(checkpoint: Path) -> Contents:
    """Read the description. FileNotFoundError if the checkpoint was removed, or is on another machine."""
    return msgspec.json.decode((checkpoint / CONTENTS_FILE).read_bytes(), type=Contents)


def files_of(checkpoint: Path) -> Iterator[tuple[str, int]]:
    """Each file by its path within the directory, and how many of its bytes belong to the copy; parents first."""
    ends = read_contents(checkpoint).ends
    for folder, folders, names in os.walk(checkpoint):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            relative = str(path.relative_to(checkpoint))
            if relative != CONTENTS_FILE:
                yield relative, ends.get(relative, path.stat().st_size)
