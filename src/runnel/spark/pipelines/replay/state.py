"""A replay's directory: its plan, the progress of its tasks, and whether it is done.

    replay.json         the options and the plan, so that a resumed replay has the same rows in the same order
    progress/<task>     what the broker has acknowledged, written by the task itself

Every file is first written under another name, so that a reader never finds a partial file. A task on another machine
that cannot reach the directory works without it: it sends more than necessary again, and the broker drops that.
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
    """The plan of a replay, made when it began, and whether it is done."""

    version: int
    replay_id: str
    options: ReplayOptions
    parts: tuple[ReplayPart, ...]
    first_ns: int = 0  # the first and last due time, if paced by event time
    last_ns: int = 0
    cuts: tuple[Cut, ...] = ()
    is_done: bool = False

    @property
    def rows(self) -> int:
        return sum(part.found.rows for part in self.parts)


class TaskProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker has acknowledged of a task. `reached_ns`: everything due by this time of the timetable."""

    batches: int = 0
    rows: int = 0
    rows_repeated: int = 0  # rows among `rows` that an earlier attempt had stored
    reached_ns: int = 0


class _Version(msgspec.Struct):
    """The version of a state file, read before the rest."""

    version: int = 0


class StateDirectory(msgspec.Struct, frozen=True):
    """The directory of a replay's state. Spark sends it to the tasks."""

    path: str

    @classmethod
    def at(cls, checkpoint: str) -> StateDirectory:
        """Create it, if it does not exist."""
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
        """The replay that was begun here with these options; None if there is none."""
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
        """Record a new replay. Removes progress files of an earlier replay whose state file was deleted."""
        for left in Path(self.path, _PROGRESS).iterdir():
            left.unlink()
        self.save(state)

    def save(self, state: ReplayState) -> None:
        _replace(Path(self.path, _STATE), msgspec.json.encode(state))

    # --- Progress ---

    @property
    def is_there(self) -> bool:
        """Whether this machine can reach the directory with the replay's state."""
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
    # Named by process, because a task attempt that Spark has abandoned may still be writing.
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
