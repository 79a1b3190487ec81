"""The part of writing that blocks: room reserved, a group of batches written and synced, a failure cut back."""

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

# The disk says that there is no room: nothing is wrong with it otherwise.
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# The first room of a segment; it doubles from there to log.allocate_bytes.
_STEP_BYTES_MIN: Final = 64 * 1024


class GroupWriter:
    """Writes one shard's groups, one at a time, in a worker. Decides nothing.

    An OSError means that nothing of the group is stored; if its `__context__` is another OSError,
    removing what may be left of it has failed too.
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
        self._is_resting = is_resting  # no other group waits

    def write(
        self, active: Segment | None, header: SegmentHeader | None, group: list[PendingBatch]
    ) -> Segment:
        """Put the group on the disk, and return the segment it went to."""
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
        """Reserve room ahead: syncs then have no file size to write, and a full disk shows early."""
        step_max, reserve = self._settings.allocate_bytes, self._settings.disk_reserve_bytes
        step = _step(end, step_max)
        target = end if not step else -(-end // step) * step
        target = max(end, min(target, self.segment_bytes_max))
        free = self._disk.free_bytes(self._folder.folder)
        present = max(active.allocated, active.end)
        if free - (target - present) < reserve:
            target = end  # no room to reserve ahead: what is needed now may still fit
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
        """Remove what a failed write may have left, durably: no later scan may take it for a batch."""
        with self._files.use(active.path) as file:
            file.truncate(active.end)
            file.sync()
        active.allocated = active.end


def _step(end: int, step_max: int) -> int:
    """How far ahead a file of this size is allocated: as far as it is long, so that small journals stay small."""
    return min(step_max, max(_STEP_BYTES_MIN, 1 << (end - 1).bit_length()))


def _leave_mark(write: Callable[..., None], end: int) -> None:
    try:
        write(end, [block.pack_mark(end)], sync=False)
    except OSError:
        return  # only a hint to other processes; what was stored is stored
