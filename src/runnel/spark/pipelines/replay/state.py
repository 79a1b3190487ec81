"""A replay's directory: what it set out to do, how far its tasks are, and that it is done.

    replay.json         the options, and what they came to: the same rows in the same order, whenever it goes on
    progress/<task>     what the broker has acknowledged, told by the task itself

Every file is written under another name first, so that whoever reads finds a whole one. A task that cannot reach the
directory, because it runs on another machine, goes without: then more is sent again than needs be, and the broker
drops it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from runnel.errors import ClientFault
from runnel.spark.pipelines.replay.options import ReplayOptions, differences
from runnel.spark.pipelines.replay.plan import ReplayPart
from runnel.spark.pipelines.replay.timetable import Cut

VERSION: Final = 1
_STATE: Final = "replay.json"
_PROGRESS: Final = "progress"
_LOCAL: Final = "file:"


class ReplayState(msgspec.Struct, frozen=True, kw_only=True):
    """A replay as it was settled when it began."""

    version: int
    replay_id: str
    options: ReplayOptions
    parts: tuple[ReplayPart, ...]
    first_ns: int = 0  # of the timetable by event time
    last_ns: int = 0
    cuts: tuple[Cut, ...] = ()
    is_done: bool = False

    @property
    def rows(self) -> int:
        return sum(part.found.rows for part in self.parts)


class TaskProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What of a task has been acknowledged. `reached_ns`: everything due by then, in the timetable."""

    batches: int = 0
    rows: int = 0
    rows_repeated: int = 0  # of `rows`, those that were there before
    reached_ns: int = 0


class _Version(msgspec.Struct):
    version: int = 0


class StateDirectory(msgspec.Struct, frozen=True):
    """Where a replay keeps its state. It travels to the tasks."""

    path: str

    @classmethod
    def at(cls, checkpoint: str) -> StateDirectory:
        """Makes it, if it is not there."""
        local = checkpoint.removeprefix(_LOCAL + "//").removeprefix(_LOCAL)
        if "://" in local:
            raise ClientFault(
                f"checkpoint is {checkpoint!r}: a replay's state is in a directory of a file system; "
                "with a cluster, one that its machines share"
            )
        path = Path(local).resolve()
        try:
            (path / _PROGRESS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClientFault(f"checkpoint is {checkpoint!r}: {error.strerror}") from None
        return cls(str(path))

    def load(self, options: ReplayOptions) -> ReplayState | None:
        """What was begun here with these options; None if nothing was."""
        path = Path(self.path, _STATE)
        try:
            encoded = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            found = msgspec.json.decode(encoded, type=_Version)
            if found.version != VERSION:
                raise ClientFault(
                    f"{path} is of version {found.version}, and this Runnel knows {VERSION}: finish the replay "
                    "with the Runnel that began it, or give another directory"
                )
            state = msgspec.json.decode(encoded, type=ReplayState)
        except msgspec.DecodeError as error:
            raise ClientFault(f"{path} is not the state of a replay: {error}") from None
        if others := differences(state.options, options):
            raise ClientFault(
                f"{self.path} belongs to another replay: {'; '.join(others)}. Give another directory"
            )
        return state

    def begin(self, state: ReplayState) -> None:
        """Note a new replay. What another one left here, whose state somebody removed, says nothing of it."""
        for left in Path(self.path, _PROGRESS).iterdir():
            left.unlink()
        self.save(state)

    def save(self, state: ReplayState) -> None:
        _replace(Path(self.path, _STATE), msgspec.json.encode(state))

    # --- Progress ---

    @property
    def is_there(self) -> bool:
        """Whether this machine has it, or another did make it."""
        return Path(self.path, _STATE).exists()

    def report(self, task: int, progress: TaskProgress) -> None:
        _replace(Path(self.path, _PROGRESS, str(task)), msgspec.json.encode(progress))

    def progress(self, task: int) -> TaskProgress:
        try:
            encoded = Path(self.path, _PROGRESS, str(task)).read_bytes()
        except FileNotFoundError:
            return TaskProgress()
        return msgspec.json.decode(encoded, type=TaskProgress)


def _replace(path: Path, content: bytes) -> None:
    # By process: an attempt of a task that Spark has given up may still be writing.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
        raise
