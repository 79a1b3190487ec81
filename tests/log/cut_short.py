"""Converts a data directory for several logs, and is killed before each step of it in turn.

python -m tests.log.cut_short FOLDER

A step is a change of the file system or a statement of SQLite. After each kill the directory is opened, in turn by a
single log and by a parent of several, which have to find everything that was in it. Prints the format that each kill
left behind. Each life is a fork: this process has no threads at that moment.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runnel.log.disk import cluster_directory
from runnel.log.segments.format_file import read_format
from runnel.platform.disk import File, FileAccess, RealDisk
from tests.log.cluster_home import ClusterHome, fill, known


class MortalDisk(RealDisk):
    """Calls `step` before each change."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def open(self, path: str, access: FileAccess) -> File:
        if access is not FileAccess.READ:
            self._step()
        return super().open(path, access)

    def rename(self, source: str, target: str) -> None:
        self._step()
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._step()
        super().remove(path)

    def sync_directory(self, path: str) -> None:
        self._step()
        super().sync_directory(path)


class Life:
    """The life of a process that ends at one step of the conversion."""

    def __init__(self, last: int) -> None:
        self._left = last
        self._is_converting = False

    def step(self) -> None:
        if self._is_converting:
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1

    def live(self, folder: Path) -> None:
        share, connect = cluster_directory._share, sqlite3.connect

        def mortal_share(*arguments: Any) -> None:
            self._is_converting = True
            share(*arguments)

        def mortal_connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **options)
            connection.set_trace_callback(lambda _: self.step())
            return connection

        cluster_directory._share = mortal_share  # type: ignore[assignment]
        sqlite3.connect = mortal_connect  # type: ignore[assignment]

        async def convert(home: ClusterHome) -> None:
            home.disk = MortalDisk(self.step)
            await home.parent()

        in_folder(folder, convert)


def in_folder(folder: Path, act: Callable[[ClusterHome], Any]) -> Any:
    async def run() -> Any:
        home = ClusterHome(folder)
        try:
            return await act(home)
        finally:
            await home.close()

    return asyncio.run(run())


def was_killed(folder: Path, last: int) -> bool:
    child = os.fork()
    if not child:
        try:
            Life(last).live(folder)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status)
    return os.WIFSIGNALED(status)


async def made(home: ClusterHome) -> set[str]:
    log = await home.alone()
    await fill(log)
    return known(log)


async def found_alone(home: ClusterHome) -> tuple[set[str], object]:
    log = await home.alone()
    return known(log), log.recovered.damage


async def found_by_several(home: ClusterHome) -> tuple[set[str], object]:
    parent = await home.parent()
    return known(await home.node("node-1")), parent.recovered.damage


def main(folder: Path) -> None:
    content = in_folder(folder / "original", made)
    openings = itertools.cycle((found_alone, found_by_several))
    for last in itertools.count():
        copy = folder / f"killed-{last}"
        shutil.copytree(folder / "original", copy)
        if not was_killed(copy, last):
            break
        print(read_format(RealDisk(), str(copy / "data")).format, flush=True)
        found, damage = in_folder(copy, next(openings))
        assert found == content, (last, found ^ content)
        assert not damage, (last, damage)
        if (
            last % 10 == 0
        ):  # whatever it was before, it can be served by several now, and by one again
            for again in (found_by_several, found_alone):
                assert in_folder(copy, again) == (content, []), last
        left = {path.name for path in (copy / "data").iterdir()}
        stores = {name for name in left if name.startswith(("metadata", "cluster.sqlite"))}
        assert stores in ({"metadata"}, {"cluster.sqlite"}), (last, left)
        shutil.rmtree(copy)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
