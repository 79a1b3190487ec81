"""The directory of the demo: a new one, or that of an earlier demo; never another directory with files."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_MARK: Final = "made-by-runnel-demo"


class PlaceError(Exception):
    """The demo cannot work there; the text says why."""


@contextmanager
def prepare(directory: Path) -> Iterator[None]:
    """Empty except for a mark, and locked against a second demo."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        mark = directory / _MARK
        if os.listdir(directory) and not mark.exists():
            raise PlaceError(
                f"--data {directory}: it is not empty, and not from an earlier demo, which would be replaced"
            )
        with mark.open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PlaceError(
                    f"--data {directory}: another demo is at work there; choose another directory"
                ) from None
            _clear(directory)
            (directory / ".gitignore").write_text("*\n")
            yield
    except OSError as error:
        raise PlaceError(f"--data {directory}: {error.strerror or error}") from error


def _clear(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _MARK:
            entry.unlink()
