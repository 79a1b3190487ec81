"""Finds what a data directory has lost when it is opened: losses remembered from earlier starts, and new ones.

First, before the last segments are taken into account, `locate_breaks` finds the places in a shard where something is
missing. Later, when the next offset of every partition is known, `find_lost_messages` gets the lost offsets from all
indexes of such a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from runnel.errors import MalformedError
from runnel.log.disk.shard import DiskShard
from runnel.log.log import ShardId
from runnel.log.losses.missing_segments import (
    Break,
    PartitionEnds,
    SegmentSpan,
    find_breaks,
    find_lost_end,
    lost_runs,
    orphan_problem,
)
from runnel.log.losses.shard_losses import Loss, LossesFile, all_runs, is_mended, read_losses
from runnel.log.segments import paths
from runnel.log.segments.index import RunTable, SealedIndex
from runnel.log.segments.scan import Damage
from runnel.log.segments.segment import HEADER_BYTES
from runnel.log.segments.segments import OpenedSegment, SegmentFolder
from runnel.log.segments.synced_marks import Mark
from runnel.platform.disk import Disk, FileAccess
from runnel.topics.names import TopicPartition


class _BrokenShard(msgspec.Struct, frozen=True):
    """A shard with something missing, and its next offsets as recorded before its last segment was read."""

    breaks: Sequence[Break]
    opened: Sequence[OpenedSegment]
    recorded: Mapping[TopicPartition, int]


class LossRecovery:
    """Finds the losses of the shards that are opened. `keeps_account`: every removal by retention has been recorded."""

    def __init__(self, disk: Disk, *, keeps_account: bool) -> None:
        self._disk = disk
        self._keeps_account = keeps_account
        self._remembered: dict[ShardId, LossesFile] = {}
        self._broken: dict[ShardId, _BrokenShard] = {}
        self._lost_ends: set[ShardId] = set()

    def read(self, shard_id: ShardId, folder: SegmentFolder) -> list[Damage]:
        """Load the losses remembered in an opened folder, without those mended since. Runs in a worker.

        Returns the damage of the file of losses itself.
        """
        remembered, damage = read_losses(self._disk, folder.folder)
        losses = [
            loss for loss in remembered.losses if not is_mended(self._disk, folder.folder, loss)
        ]
        known = {(loss.file, loss.position) for loss in losses}
        losses += [
            loss for loss in _orphans(self._disk, folder) if (loss.file, loss.position) not in known
        ]
        self._remembered[shard_id] = msgspec.structs.replace(remembered, losses=tuple(losses))
        return [] if damage is None else [damage]

    def locate_breaks(
        self,
        shard: DiskShard,
        opened: Sequence[OpenedSegment],
        next_entry: int,
        recorded: Mapping[TopicPartition, int],
        mark: Mark,
        *,
        is_closed: bool,
    ) -> list[Damage]:
        """Find the places in a shard where something is missing. Returns the damage known from earlier starts.

        The catalogue knows entries before `next_entry` and the `recorded` next offsets. `mark` knows the segment
        written to last. `is_closed`: the catalogue knows where the shard ended.
        """
        remembered = self._remembered.get(shard.id, LossesFile())
        shard.losses.load(remembered)
        known = shard.losses.damage()
        spans = _spans(opened)
        lost_end = None if is_closed else find_lost_end(spans, remembered, *mark)
        # Catalogue and mark know the same segments, and the mark knows more of their content.
        breaks = find_breaks(spans, remembered, 0 if lost_end else next_entry)
        if breaks and not self._keeps_account:
            # The retention of an older Runnel may have removed these segments without recording it.
            shard.losses.settle(max(found.next_entry for found in breaks))
            breaks = []
        places = {(loss.file, loss.position) for loss in remembered.losses}
        breaks += [
            found for found in _unknown(opened) if (found.file, found.position) not in places
        ]
        if lost_end is not None:
            self._lost_ends.add(shard.id)
            breaks.append(lost_end)
        if breaks:
            self._broken[shard.id] = _BrokenShard(breaks, opened, recorded)
        for item in opened:
            if item.segment.growing is not None:
                for bad in item.damage:
                    if bad.position >= HEADER_BYTES:
                        shard.losses.add_place(item.segment.number, bad)
        return known

    def has_lost_end(self, shard: ShardId) -> bool:
        """Whether the segment written to last is gone, and with it the knowledge of which numbers it used."""
        return shard in self._lost_ends

    def is_broken(self, shard: ShardId) -> bool:
        """Whether something is missing in the shard: `find_lost_messages` tells which messages."""
        return shard in self._broken

    def find_lost_messages(
        self, shard: DiskShard, partitions: Mapping[TopicPartition, PartitionEnds]
    ) -> list[Damage]:
        """Find the missing messages of these partitions and add them to the shard's losses. Runs in a worker."""
        broken = self._broken[shard.id]
        end = shard.writer.next_entry
        breaks = [
            found if found.next_entry else found._replace(next_entry=end) for found in broken.breaks
        ]
        removed = shard.losses.remembered
        numbers = [item.segment.number for item in broken.opened]
        numbers += [found.missing[0] for found in breaks if found.missing[0]]
        is_begin_known = min(numbers) == 1 and not removed.settled_entry
        found = lost_runs(
            breaks,
            _tables(shard, broken.opened),
            partitions,
            is_begin_known=is_begin_known,
            recorded=broken.recorded,
        )
        losses = [each.loss(runs) for each, runs in zip(breaks, found, strict=True)]
        shard.losses.add(losses)
        return [loss.damage(shard.losses.folder) for loss in losses]


def _orphans(disk: Disk, folder: SegmentFolder) -> list[Loss]:
    """The losses of segments whose index is left, which says exactly what was in them."""
    losses: list[Loss] = []
    for missing in folder.missing:
        name = missing.path.rpartition("/")[2]
        numbered = paths.segment_number(name)
        assert numbered is not None
        with suppress(MalformedError):
            index = SealedIndex(_content(disk, paths.index_path(missing.path)))
            header = index.header
            losses.append(
                Loss(
                    numbered[0],
                    name,
                    0,
                    0,
                    orphan_problem(header.first_entry, header.last_entry),
                    header.first_entry,
                    header.last_entry + 1,
                    header.last_time_ns,
                    all_runs(index),
                )
            )
    return losses


def _content(disk: Disk, path: str) -> bytes:
    file = disk.open(path, FileAccess.READ)
    try:
        return file.read(0, file.size())
    finally:
        file.close()


def _spans(opened: Sequence[OpenedSegment]) -> list[SegmentSpan]:
    spans: list[SegmentSpan] = []
    for at, item in enumerate(opened):
        segment = item.segment
        is_headless = any(not bad.position for bad in item.damage)
        next_entry = segment.last_entry + 1
        following = opened[at + 1].segment.first_entry if at + 1 < len(opened) else 0
        if _ends_unknown(item):  # `_unknown` finds what is missing there
            next_entry = max(next_entry, following)
        spans.append(
            SegmentSpan(
                segment.number,
                segment.generation,
                0 if is_headless and segment.generation else segment.first_entry,
                next_entry,
                segment.end,
                segment.last_time_ns,
            )
        )
    return spans


def _ends_unknown(item: OpenedSegment) -> bool:
    growing = item.segment.growing
    return bool(
        item.unknown and growing is not None and item.unknown[-1].block == growing.block_count()
    )


def _unknown(opened: Sequence[OpenedSegment]) -> Iterator[Break]:
    """Damaged places in segments without even an envelope. Next entry 0: no block follows that could tell it."""
    for at, item in enumerate(opened):
        segment, growing = item.segment, item.segment.growing
        if growing is None:
            continue
        for unknown in item.unknown:
            block, bad = unknown.block, unknown.damage
            first_entry, time_ns = segment.first_entry, segment.last_time_ns
            if block:
                first_entry = growing.block_place(block - 1)[0] + 1
            if block < growing.block_count():
                next_entry, _, time_ns = growing.block_place(block)
            else:
                next_entry = opened[at + 1].segment.first_entry if at + 1 < len(opened) else 0
            name = segment.path.rpartition("/")[2]
            yield Break(
                segment.number,
                block,
                name,
                bad.position,
                bad.size,
                bad.problem,
                first_entry,
                next_entry,
                time_ns,
            )


def _tables(shard: DiskShard, opened: Sequence[OpenedSegment]) -> Iterator[tuple[int, RunTable]]:
    for item in opened:
        index = shard.index_of(item.segment)
        yield item.segment.number, index.run_table(lambda _: True)
