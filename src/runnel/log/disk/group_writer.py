"""The blocking part of writing: reserves room, writes and syncs a group of batches, cuts back after a failure."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final

from runnel.config import LogSettings
from runnel.formats import block
from runnel.log.disk.pending import PendingBatch
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.segment import SegmentHeader
from runnel.log.segments.segments import Segment, SegmentFolder
from runnel.log.segments.synced_marks import SyncedMarks
from runnel.platform.disk import Buffer, Disk

# Errors of a disk that is full but otherwise healthy.
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# The first room reserved for a segment; it doubles from here up to log.allocate_bytes.
_STEP_BYTES_MIN: Final = 64 * 1024


class GroupWriter:
    """Writes one shard's groups, one at a time, in a worker. It decides nothing.

    An OSError means that nothing of the group is stored. If its `__context__` is another OSError, removing the
    remains of the group has failed too.
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

    def write(
        self, active: Segment | None, header: SegmentHeader | None, group: list[PendingBatch]
    ) -> Segment:
        """Write and sync the group. Returns its segment: a new one if `header` is given."""
        if header is not None:
            self._make_folder()
            try:
                active = self._folder.begin(header)
            except OSError:
                self._folder.discard(header)
                raise
        assert active is not None
        buffers: list[Buffer] = []
        for pending in group:
            buffers += block.pack(pending.encoded, pending.body, durable_position=active.end)
        end = active.end + sum(pending.size for pending in group)
        try:
            with self._files.use(active.path) as file:
                if end > active.allocated:
                    self._allocate(active, end)
                file.write(active.end, buffers, sync=True)
                self._marks.note(self._folder.folder, active.number, end)
                if self._is_resting():
                    _leave_mark(file.write, end)
        except OSError as error:
            if header is not None:
                self._folder.discard(header)
            elif error.errno in NO_ROOM:
                self._cut_back(active)
            raise
        return active

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


def _step(end: int, step_max: int) -> int:
    """How far ahead to allocate: as much as the file is long, so that small journals stay small."""
    return min(step_max, max(_STEP_BYTES_MIN, 1 << (end - 1).bit_length()))


def _leave_mark(write: Callable[..., None], end: int) -> None:
    try:
        write(end, [block.pack_mark(end)], sync=False)
    except OSError:
        return  # the mark is only a hint to other processes; the group is stored
