"""Deliberate mistakes in the log, which histories must find."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pytest

from runnel.errors import DiskFullError, RunnelError
from runnel.formats import block, checksum
from runnel.formats import envelope as envelopes
from runnel.log.disk.pending import PendingBatch
from runnel.log.disk.recovery import Recovery
from runnel.log.disk.shard import DiskShard
from runnel.log.disk.writer import ShardWriter
from runnel.log.group_store import STORED, BatchGroup, Failed, Outcome, Unknown
from runnel.log.log import Appended, Hold, Level
from runnel.log.metadata.catalogue import MetadataJournal, ShardCatalogue
from runnel.log.metadata.cursors import CursorTable
from runnel.log.metadata.producers import ProducerTable
from runnel.log.metadata.record_journal import RecordJournal
from runnel.log.metadata.topic_table import Partition, number_runs
from runnel.log.retention.holds import Holds, ShardHolds
from runnel.log.segments import paths
from runnel.topics.names import TopicPartition
from tests.fakes.disk import FakeDisk, FakeFile
from tests.fakes.lossy_store import LossyStore
from tests.simulation.mutants import Mutant

Patch = pytest.MonkeyPatch


def segments_are_not_synced(patch: Patch) -> None:
    write = FakeFile.write

    def write_unsynced(
        file: FakeFile, position: int, buffers: Sequence[bytes], *, sync: bool
    ) -> None:
        write(file, position, buffers, sync=sync and not file.path.endswith(".segment"))

    patch.setattr(FakeFile, "write", write_unsynced)


def directories_are_not_synced(patch: Patch) -> None:
    patch.setattr(FakeDisk, "sync_directory", lambda disk, path: None)


def next_offsets_are_not_recovered(patch: Patch) -> None:
    patch.setattr(Partition, "advance", lambda partition, next_offset: None)


def ends_of_segments_are_not_recorded(patch: Patch) -> None:
    async def checkpoint(writer: ShardWriter, segment: object) -> None:
        return

    patch.setattr(ShardWriter, "checkpoint", checkpoint)


def producers_are_not_replayed(patch: Patch) -> None:
    patch.setattr(DiskShard, "replay", lambda shard, found: None)


def producers_are_not_recorded(patch: Patch) -> None:
    patch.setattr(ProducerTable, "states", lambda table, used_since_ns=0: [])


def snapshots_forget_the_newest_records(patch: Patch) -> None:
    begin_file = RecordJournal._begin_file

    def begin_with_snapshot_alone(journal: RecordJournal[Any], records: Sequence[Any]) -> None:
        begin_file(journal, list(journal._snapshot()) if records else ())

    patch.setattr(MetadataJournal, "_begin_file", begin_with_snapshot_alone)
    patch.setattr(ShardCatalogue, "_begin_file", begin_with_snapshot_alone)


def purges_are_not_recovered(patch: Patch) -> None:
    restore = Recovery.restore

    async def restore_without_hiding(recovery: Recovery, *found: Any) -> list[DiskShard]:
        shards = await restore(recovery, *found)
        for shard in shards:
            shard.has_hidden = False
        return shards

    patch.setattr(Recovery, "restore", restore_without_hiding)


def cursors_hold_nothing(patch: Patch) -> None:
    def no_holds(table: CursorTable, shard: object) -> list[Hold]:
        return []

    patch.setattr(CursorTable, "holds_on", no_holds)


def owed_messages_go(patch: Patch) -> None:
    owed = ShardHolds.owed

    def owed_but_one(holds: ShardHolds, key: TopicPartition, begin: int, end: int) -> object:
        ranges = owed(holds, key, begin, end)
        return ranges and ranges[1:]

    patch.setattr(ShardHolds, "owed", owed_but_one)


def acknowledged_messages_go_before_cursors_have_passed_them(patch: Patch) -> None:
    patch.setattr(ShardHolds, "of_cursors", lambda holds: Holds(()))


def states_are_not_synced(patch: Patch) -> None:
    write = FakeFile.write

    def write_unsynced(
        file: FakeFile, position: int, buffers: Sequence[bytes], *, sync: bool
    ) -> None:
        write(file, position, buffers, sync=sync and f"/{paths.STATE}/" not in file.path)

    patch.setattr(FakeFile, "write", write_unsynced)


def bodies_are_not_verified(patch: Patch) -> None:
    class Fitting(int):
        """A checksum that no other differs from."""

        def __ne__(self, other: object) -> bool:
            return False

    def crc32c(data: bytes | memoryview, before: int = 0) -> int:
        found = checksum.crc32c(data, before)
        # Headers are checked alone or before their envelope; whatever else is checked alone is a body.
        return found if before or len(data) == block.HEADER_BYTES - 4 else Fitting(found)

    patch.setattr(block, "crc32c", crc32c)


def unknown_outcomes_are_taken_back(patch: Patch) -> None:
    async def settle(writer: ShardWriter, group: BatchGroup, outcome: Outcome) -> Outcome:
        return _failed_by_the_medium(writer)

    patch.setattr(ShardWriter, "_settle", settle)


def repetitions_that_fail_are_taken_back(patch: Patch) -> None:
    async def settle(writer: ShardWriter, group: BatchGroup, outcome: Outcome) -> Outcome:
        while isinstance(outcome, Unknown) and writer._group:
            await writer._parts.clock.sleep(0.1)
            outcome = await writer._store.store(group)
        return outcome

    patch.setattr(ShardWriter, "_settle", settle)


def unknown_outcomes_are_acknowledged(patch: Patch) -> None:
    async def settle(writer: ShardWriter, group: BatchGroup, outcome: Outcome) -> Outcome:
        return STORED

    patch.setattr(ShardWriter, "_settle", settle)


def batches_are_acknowledged_before_they_are_stored(patch: Patch) -> None:
    answer = ShardWriter._answer

    def answer_at_once(
        writer: ShardWriter, pending: PendingBatch, level: Level
    ) -> asyncio.Future[Appended]:
        future = answer(writer, pending, level)
        if not future.done():
            future.set_result(pending.answer(Level.STORED, is_repeated=False))
        return future

    patch.setattr(ShardWriter, "_answer", answer_at_once)


def groups_are_repeated_with_more_batches(patch: Patch) -> None:
    settle = ShardWriter._settle

    async def settle_more(writer: ShardWriter, group: BatchGroup, outcome: Outcome) -> Outcome:
        more = list(writer._queue)
        writer._queue.clear()
        writer._group += more  # the list that the group holds
        _set(group, next_entry=group.next_entry + len(more))
        _set(group, size=group.size + sum(pending.size for pending in more))
        return await settle(writer, group, outcome)

    patch.setattr(ShardWriter, "_settle", settle_more)


def groups_are_numbered_again_after_an_unknown_outcome(patch: Patch) -> None:
    settle = ShardWriter._settle

    async def settle_renumbered(
        writer: ShardWriter, group: BatchGroup, outcome: Outcome
    ) -> Outcome:
        """Those behind the group come first now."""
        batches = [*writer._queue, *writer._group]
        count = len(writer._group)
        for partition in {part for pending in batches for part in pending.partitions}:
            partition.next_offset = partition.visible_next
        for entry, pending in enumerate(batches, group.first_entry):
            head = pending.envelope
            before = pending.size
            pending.envelope = number_runs(
                head,
                pending.partitions,
                shard=head.shard,
                epoch=group.epoch,
                entry=entry,
                receive_time_ns=head.column64(head.receive_times)[0],
            )
            pending.encoded = envelopes.encode(pending.envelope)
            pending.size += (
                -(-len(pending.encoded) // 8) * 8 - -(-len(envelopes.encode(head)) // 8) * 8
            )
            writer.queued_bytes += pending.size - before
        writer._group[:] = batches[:count]
        writer._queue.clear()
        writer._queue.extend(batches[count:])
        _set(group, size=sum(pending.size for pending in writer._group))
        return await settle(writer, group, outcome)

    patch.setattr(ShardWriter, "_settle", settle_renumbered)


def dropped_batches_that_may_be_stored_are_called_failed(patch: Patch) -> None:
    drop = ShardWriter.drop

    def drop_as_failed(writer: ShardWriter, reason: RunnelError) -> None:
        writer._is_attempted = False
        drop(writer, reason)

    patch.setattr(ShardWriter, "drop", drop_as_failed)


def _failed_by_the_medium(writer: ShardWriter) -> Failed:
    store = writer._store
    assert isinstance(store, LossyStore)
    store.failures.append(DiskFullError("the mutant takes this back"))
    return Failed(store.failures[-1])


def _set(group: BatchGroup, **fields: int) -> None:
    for name, value in fields.items():
        msgspec.structs.force_setattr(group, name, value)


MUTANTS: Final[tuple[Mutant, ...]] = (
    segments_are_not_synced,
    directories_are_not_synced,
    next_offsets_are_not_recovered,
    ends_of_segments_are_not_recorded,
    producers_are_not_replayed,
    producers_are_not_recorded,
    snapshots_forget_the_newest_records,
    purges_are_not_recovered,
    cursors_hold_nothing,
    owed_messages_go,
    acknowledged_messages_go_before_cursors_have_passed_them,
    states_are_not_synced,
    bodies_are_not_verified,
    unknown_outcomes_are_taken_back,
    repetitions_that_fail_are_taken_back,
    unknown_outcomes_are_acknowledged,
    batches_are_acknowledged_before_they_are_stored,
    groups_are_repeated_with_more_batches,
    groups_are_numbered_again_after_an_unknown_outcome,
    dropped_batches_that_may_be_stored_are_called_failed,
)

# Seeds that show mutants which are rare.
SHOWN_BY: Final[dict[Mutant, int]] = {
    ends_of_segments_are_not_recorded: 35,
    producers_are_not_replayed: 44,
    cursors_hold_nothing: 136,
    acknowledged_messages_go_before_cursors_have_passed_them: 2286,
    unknown_outcomes_are_taken_back: 12,
    repetitions_that_fail_are_taken_back: 22,
    unknown_outcomes_are_acknowledged: 13,
}
