"""Storing groups in segment files: `FileGroupStore`, the local medium, and `GroupWriter`, the blocking part of it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Final, TypeAlias

from runnel.config import LogSettings
from runnel.errors import ClosedError, DiskFullError, ReadOnlyError
from runnel.formats import block
from runnel.log.group_store import STORED, BatchGroup, Failed, GroupStore, Outcome
from runnel.log.log import ShardId
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.segment import SegmentHeader
from runnel.log.segments.segments import Segment, SegmentFolder
from runnel.log.segments.synced_marks import SyncedMarks
from runnel.platform.disk import Disk
from runnel.platform.workers import Workers

# Errors of a disk that is full but otherwise healthy.
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# The first room reserved for a segment; it doubles from here up to log.allocate_bytes.
_STEP_BYTES_MIN: Final = 64 * 1024


class GroupWriter:
    """Writes one shard's groups into its segment files, one at a time, in a worker. It decides nothing.

    An OSError means that nothing of the group is stored. If its `__context__` is another OSError, removing the
    remains of the group has failed too. In any case the same group can be written again.
    """

    def __init__(
        self,
        disk: Disk,
        files: OpenFiles,
        settings: LogSettings,
        folder: SegmentFolder,
        segment_bytes_max: int,
        marks: SyncedMarks,
        *,
        make_folder: Callable[[], None],
        is_resting: Callable[[], bool],
    ) -> None:
        self._disk = disk
        self._files = files
        self._settings = settings
        self._folder = folder
        self.segment_bytes_max = segment_bytes_max
        self._marks = marks
        self._make_folder = make_folder
        self._is_resting = is_resting  # whether no other group waits
        self._remains: SegmentHeader | None = None  # of a new segment that could not be discarded

    def write(self, group: BatchGroup) -> None:
        """Write and sync the group, in a new segment file if it has a header."""
        segment, header = group.segment, group.header
        if header is not None:
            self._make_folder()
            if self._remains is not None:
                self._discard(self._remains)
            try:
                self._folder.begin(segment, header)
            except OSError:
                self._discard(header)
                raise
        end = group.position + group.size
        try:
            with self._files.use(segment.path) as file:
                if end > segment.allocated:
                    self._allocate(segment, end)
                file.write(group.position, group.blocks(), sync=True)
                self._marks.note(self._folder.folder, segment.number, end)
                if self._is_resting():
                    _leave_mark(file.write, end)
        except OSError as error:
            if header is not None:
                segment.allocated = 0
                self._discard(header)
            elif error.errno in NO_ROOM:
                self._cut_back(segment)
            raise

    def _discard(self, header: SegmentHeader) -> None:
        self._remains = header
        self._folder.discard(header)
        self._remains = None

    def _allocate(self, active: Segment, end: int) -> None:
        """Reserve room ahead: syncs then need not write a file size, and a full disk shows early."""
        step_max, reserve = self._settings.allocate_bytes, self._settings.disk_reserve_bytes
        step = _step(end, step_max)
        target = end if not step else -(-end // step) * step
        target = max(end, min(target, self.segment_bytes_max))
        free = self._disk.free_bytes(self._folder.folder)
        present = max(active.allocated, active.end)
        if free - (target - present) < reserve:
            target = end  # no room to reserve ahead, but this group may still fit
        if free - (target - present) < reserve:
            raise OSError(
                errno.ENOSPC,
                f"{target - present} more bytes are needed, {free} are free, and "
                f"log.disk_reserve_bytes = {reserve} of them stay free",
                active.path,
            )
        if step:
            with self._files.use(active.path) as file:
                file.allocate(target)
            active.allocated = target

    def _cut_back(self, active: Segment) -> None:
        """Remove the remains of a failed write, durably, so that no later scan takes them for a batch."""
        with self._files.use(active.path) as file:
            file.truncate(active.end)
            file.sync()
        active.allocated = active.end


class FileGroupStore:
    """Stores groups in the shard's segment files. One write and sync, in a worker, is both of a store's steps."""

    def __init__(self, shard: ShardId, writer: GroupWriter, workers: Workers) -> None:
        self._shard = shard
        self._writer = writer
        self._workers = workers

    def store(self, group: BatchGroup) -> asyncio.Future[Outcome]:
        try:
            return self._workers.submit(self._store, group)
        except ClosedError as error:
            refused: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            refused.set_result(Failed(error))
            return refused

    def abandon(self) -> None:
        """Do nothing: a write that is under way ends by itself."""

    def _store(self, group: BatchGroup) -> Outcome:
        try:
            self._writer.write(group)
        except OSError as error:
            return self._judge(error)
        return STORED

    def _judge(self, error: OSError) -> Failed:
        is_cut = not isinstance(error.__context__, OSError)
        reason = error.strerror or error  # without the file's path: clients see this
        if error.errno in NO_ROOM and is_cut:
            return Failed(
                DiskFullError(f"shard {self._shard}: no room to store the batch: {reason}")
            )
        return Failed(
            ReadOnlyError(
                f"shard {self._shard} takes no more batches until it has been reopened: {reason}"
            ),
            needs_reopening=True,
        )


# Makes the store of a shard from what writes its segment files.
MakeGroupStore: TypeAlias = Callable[[ShardId, GroupWriter], GroupStore]


def _step(end: int, step_max: int) -> int:
    """How far ahead to allocate: as much as the file is long, so that small journals stay small."""
    return min(step_max, max(_STEP_BYTES_MIN, 1 << (end - 1).bit_length()))


def _leave_mark(write: Callable[..., None], end: int) -> None:
    try:
        write(end, [block.pack_mark(end)], sync=False)
    except OSError:
        return  # the mark is only a hint to other processes; the group is stored
