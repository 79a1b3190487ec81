"""Restores shards from their files: of a whole data directory when it is opened, of one shard when it is acquired.

Usually the catalogue of a shard knows everything but the content of its last segment, which is scanned. Where the
metadata or a catalogue is damaged or gone, the segments tell what it may have known: topics, and offsets that must not
be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from runnel.config import Keep
from runnel.formats import block
from runnel.formats.envelope import BODY_BYTES_CEILING
from runnel.log.disk.loss_recovery import LossRecovery
from runnel.log.disk.shard import DiskShard
from runnel.log.log import ShardId
from runnel.log.losses.missing_segments import PartitionEnds
from runnel.log.metadata.catalogue import ShardCatalogue
from runnel.log.metadata.recorded_shard import RecordedShard
from runnel.log.metadata.records import PartitionAt, ShardRecord
from runnel.log.metadata.state_journal import StateJournals
from runnel.log.metadata.topic_table import Partition, Topic, TopicTable
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.index import GrowingIndex
from runnel.log.segments.scan import Damage
from runnel.log.segments.segments import OpenedSegment, SegmentFolder
from runnel.log.segments.synced_marks import Mark, SyncedMarks
from runnel.platform.disk import Disk
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition
from runnel.topics.policies import FixedPolicy, Policies

# A plain body has at least 4 bytes per message. A compressed one may have almost none, but no more messages than this.
_DAMAGED_MESSAGES_MAX: Final = BODY_BYTES_CEILING // 4


class FoundShard(msgspec.Struct, eq=False):
    """A shard by its files: its catalogue, its opened segments, and the mark of the segment written to last."""

    id: ShardId
    folder: SegmentFolder
    catalogue: ShardCatalogue
    recorded: RecordedShard
    opened: Sequence[OpenedSegment]
    mark: Mark
    is_incomplete: bool = False  # the catalogue may have forgotten something
    is_lost: bool = False  # the catalogue is damaged, or gone: even its newest epoch may be
    has_former: bool = (
        False  # messages of deleted topics, whose names are those of topics elsewhere now
    )


class Recovery:
    """Restores the shards that one opening, or one acquisition, has found.

    First `read` each of them, in a worker; then `restore` them together. Both are called once for a shard.
    """

    def __init__(
        self,
        disk: Disk,
        files: OpenFiles,
        workers: Workers,
        policies: Policies,
        topics: TopicTable,
        marks: SyncedMarks,
        states: StateJournals,
        make_catalogue: Callable[[ShardId], ShardCatalogue],
        *,
        keeps_account: bool,
    ) -> None:
        self._disk = disk
        self._files = files
        self._workers = workers
        self._policies = policies
        self._topics = topics
        self._marks = marks
        self._states = states
        self._make_catalogue = make_catalogue
        self._losses = LossRecovery(disk, keeps_account=keeps_account)
        self.are_topics_incomplete = False
        """The metadata may have forgotten topics: those in the segments exist."""
        self.has_format_one = False
        """Floors say what was deleted: format 1 had no generations of topics."""
        self.was_clean = True
        self.torn: list[Damage] = []
        self.damage: list[Damage] = []
        self._known_damage: list[Damage] = []  # from earlier starts
        self._has_restored_topics = False

    # --- Reading: blocking, for a worker ---

    def read(self, shard_id: ShardId, path: str, known: RecordedShard | None = None) -> FoundShard:
        """Open a shard's files; mend a last segment that a crash cut. `known` stands for the catalogue."""
        folder = SegmentFolder(self._disk, self._files, path)
        catalogue = self._make_catalogue(shard_id)
        found = FoundShard(shard_id, folder, catalogue, known or RecordedShard(), (), Mark(0, 0))
        if known is None and catalogue.is_made:
            loaded = catalogue.open()
            found.recorded = RecordedShard.of(loaded.records)
            # A damaged record at the end looks like a torn one, and the whole file may be missing.
            found.is_incomplete = bool(loaded.damage or loaded.torn)
            found.is_lost = bool(loaded.damage)
            found.recorded.is_closed &= not loaded.damage
            self.torn += [loaded.torn] if loaded.torn else []
            self.damage += loaded.damage
            catalogue.is_changed = not found.recorded.is_closed  # so that a clean end is recorded
        found.mark = self._marks.get(path) or Mark(0, 0)
        is_unrecorded = known is None and not found.recorded.epoch
        is_closed = found.recorded.is_closed and not is_unrecorded
        found.opened = folder.open_all(is_clean=is_closed, synced=found.mark)
        if is_unrecorded and (found.opened or found.mark.number):
            # Nothing is stored in a shard before its first epoch is recorded.
            found.recorded.is_closed = False
            found.is_incomplete = found.is_lost = True
        self.damage += folder.missing
        self.damage += self._losses.read(shard_id, folder)
        for state in self._states.open_found([shard_id]):
            self.torn += [state.torn] if state.torn else []
            self.damage += state.damage
        self.was_clean &= found.recorded.is_closed
        return found

    # --- Restoring ---

    async def restore(
        self, found: Sequence[FoundShard], make_shard: Callable[[FoundShard], DiskShard]
    ) -> list[DiskShard]:
        """Make the shards with all numbers as they were, ready to take batches. What is lost is remembered."""
        submit = self._workers.submit
        for each in found:
            each.recorded.apply_numbers(partial(self._partition_found, each))
            if self.are_topics_incomplete:
                for key, generation in each.recorded.generations.items():
                    self._topics.found_generation(key[0], generation)
        self._has_restored_topics = False
        partitions = self._partitions_by_shard([each.id for each in found])
        news: dict[DiskShard, list[ShardRecord]] = {}
        shards: list[DiskShard] = []
        for each in found:
            shard = make_shard(each)
            shards.append(shard)
            shard.restore(each.recorded)
            news[shard] = self._load(each, shard, partitions.get(each.id, ()))
        for each, shard in zip(found, shards, strict=True):
            if each.is_incomplete or self.are_topics_incomplete:
                await self._reconcile(each, shard)
        if self._has_restored_topics:
            partitions = self._partitions_by_shard([each.id for each in found])
        broken = [shard for shard in shards if self._losses.is_broken(shard.id)]
        for shard in broken:
            ends = {
                part.key: PartitionEnds(part.floor, part.next_offset)
                for topic, part in partitions.get(shard.id, ())
                if not topic.is_deleted
            }
            self.damage += await submit(self._losses.find_lost_messages, shard, ends)
        for each, shard in zip(found, shards, strict=True):
            await shard.save_losses()
            of_shard = partitions.get(shard.id, ())
            news[shard] += _begin_generations(each, of_shard)
            await submit(shard.resume)
            if each.has_former or any(
                topic.is_deleted or part.floor > 1 for topic, part in of_shard
            ):
                shard.hide()
            if each.is_incomplete:
                with suppress(OSError):  # then the next start finds it damaged again
                    await submit(shard.catalogue.renew)
            if news[shard]:
                await shard.catalogue.add(*news[shard])
        return shards

    def _load(
        self, found: FoundShard, shard: DiskShard, partitions: Sequence[tuple[Topic, Partition]]
    ) -> list[ShardRecord]:
        """Take over the segments of a shard. Returns the records to add to its catalogue."""
        opened, mark = found.opened, found.mark
        shard.load(opened)
        next_entry = found.recorded.next_entry
        offsets = {part.key: part.next_offset for _, part in partitions}
        self._known_damage += self._losses.locate_breaks(
            shard, opened, next_entry, offsets, mark, is_closed=found.recorded.is_closed
        )
        for item in opened:
            # The end of a full segment is recorded before the next segment begins. A copy made file by file may
            # have an older catalogue, which does not know later segments.
            if item.segment.growing is None and item.segment.last_entry >= next_entry:
                found.is_incomplete = True
            shard.replay(item)
            if item.segment.growing is not None:
                for key, next_offset in item.segment.growing.next_offsets().items():
                    self._partition_found(found, key).advance(next_offset)
        self.torn += [item.torn for item in opened if item.torn]
        self.damage += [bad for item in opened for bad in item.damage]
        if self._losses.has_lost_end(shard.id):
            lost_bytes = mark.end
            if found.is_lost:  # nobody knows the earlier segments either: they were full
                lost_bytes += (mark.number - 1) * shard.policy.rotate.bytes_max
            return self._skip_lost_segments(shard, lost_bytes)
        if opened and opened[-1].damage:
            return self._skip_damaged_numbers(shard, opened[-1])
        return []

    def _partitions_by_shard(
        self, shards: Sequence[ShardId]
    ) -> Mapping[ShardId, Sequence[tuple[Topic, Partition]]]:
        """The partitions of these shards, in a single pass: there may be as many shards as topics."""
        found: dict[ShardId, list[tuple[Topic, Partition]]] = {shard: [] for shard in shards}
        for topic in self._topics:
            for part in topic.partitions:
                of_shard = found.get(part.shard)
                if of_shard is not None:
                    of_shard.append((topic, part))
        return found

    def _partition_found(self, found: FoundShard, key: TopicPartition) -> Partition:
        """The partition that a catalogue or a segment names; restored if the metadata has lost it."""
        partition = self._topics.recorded_partition(*key)
        if partition is None:
            return self._restore_topic(found.id, key)
        found.has_former |= partition.shard != found.id
        return partition

    def _restore_topic(self, shard: ShardId, key: TopicPartition) -> Partition:
        self._has_restored_topics = True
        topic, number = key
        rules = self._policies.for_topic(topic)
        fixed = FixedPolicy(
            keep=Keep.DISK, partitions=max(rules.partitions, number + 1), journal=shard.journal
        )
        self._topics.undelete(topic)
        restored = self._topics.restore(topic, self._policies.for_recorded(topic, fixed))
        return restored.partitions[number]

    # --- Numbers that may have been used ---

    def _skip_damaged_numbers(self, shard: DiskShard, last: OpenedSegment) -> list[ShardRecord]:
        """Skip the numbers that damaged bytes of the last segment used or may have used.

        Earlier segments do not matter: the catalogue knows where each of them ended.
        """
        growing = last.segment.growing
        if growing is None or not (last.lost or last.unknown):
            return []
        if last.unknown:
            if last.unknown[-1].block == growing.block_count():  # no block follows the damage
                shard.writer.skip_entries(last.unknown_bytes // block.HEADER_BYTES + 1)
            self._skip_offsets(shard.id, growing, last)
        return self._position_records(shard)

    def _skip_lost_segments(self, shard: DiskShard, lost_bytes: int) -> list[ShardRecord]:
        """Skip the numbers of a lost last segment: any partition may have had messages in it."""
        shard.writer.skip_entries(lost_bytes // block.HEADER_BYTES + 1)
        for _, part in self._topics.partitions_in(shard.id):
            part.advance(part.next_offset + lost_bytes // 4 + _DAMAGED_MESSAGES_MAX)
        return self._position_records(shard)

    def _position_records(self, shard: DiskShard) -> list[ShardRecord]:
        """Records of the next entry of a shard and the next offsets of its partitions."""
        return [
            shard.checkpoint(),
            *(
                PartitionAt(*part.key, part.next_offset, part.floor)
                for _, part in self._topics.partitions_in(shard.id)
            ),
        ]

    def _skip_offsets(self, shard: ShardId, growing: GrowingIndex, last: OpenedSegment) -> None:
        """Skip offsets of every partition without a message behind the damage: it may have had some there."""
        begin = max(item.damage.position for item in last.unknown)
        skipped = last.unknown_bytes // 4 + _DAMAGED_MESSAGES_MAX
        for _, part in self._topics.partitions_in(shard):
            if growing.last_position(part.key) < begin:
                part.advance(part.next_offset + skipped)

    async def _reconcile(self, found: FoundShard, shard: DiskShard) -> None:
        """Restore from all segments of a shard what its catalogue or the metadata may lack."""
        for key, next_offset in await shard.next_offsets():
            partition = self._partition_found(found, key)
            if (
                self.has_format_one
                and next_offset > partition.floor
                and self._topics.find(key[0]) is None
            ):
                # Messages behind the end of a deleted topic: it was made again, and the record of that is lost.
                partition = self._restore_topic(shard.id, key)
            partition.advance(next_offset)

    # --- Report ---

    def all_damage(self) -> list[Damage]:
        """Of two reports about one place the later one knows more."""
        places = {(bad.path, bad.position): bad for bad in (*self.damage, *self._known_damage)}
        return list(places.values())


def _begin_generations(
    found: FoundShard, partitions: Iterable[tuple[Topic, Partition]]
) -> list[PartitionAt]:
    """Hide what lies in the shard of the deleted topics of the same names. Returns the records that say so.

    A shard learns a topic's generation before it stores a message of it. A catalogue that is lost may have known it:
    then nothing is hidden.
    """
    begun: list[PartitionAt] = []
    for topic, part in partitions:
        if topic.generation == 1:  # almost all
            continue
        if found.recorded.generations.get(part.key, 1) < topic.generation:
            if not found.is_lost:
                part.floor = max(part.floor, part.next_offset)
            begun.append(PartitionAt(*part.key, part.next_offset, part.floor, topic.generation))
    return begun
