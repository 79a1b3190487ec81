"""Deliberate mistakes in how the logs of a directory hand shards to each other, which histories must find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import pytest

from runnel.errors import RunnelError
from runnel.log.disk.disk_log import DiskLog
from runnel.log.disk.owned_shards import OwnedShards
from runnel.log.disk.recovery import FoundShard
from runnel.log.disk.shard import DiskShard
from runnel.log.disk.writer import ShardWriter
from runnel.log.log import ShardId
from runnel.log.metadata.catalogue import ShardCatalogue
from runnel.log.metadata.metadata_state import MetadataState
from runnel.log.metadata.recorded_shard import RecordedShard
from runnel.log.metadata.records import Closed, Opened, ShardRecord
from runnel.log.metadata.shared_metadata import Apply
from runnel.log.metadata.shared_records import MemberMetadata
from runnel.log.metadata.state_journal import StateJournals
from runnel.log.metadata.topic_table import Partition
from runnel.platform.disk import DiskLock
from runnel.topics.names import TopicPartition
from tests.simulation.mutants import Mutant

Patch = pytest.MonkeyPatch


def terms_begin_with_the_epoch_before(patch: Patch) -> None:
    make = DiskLog._make_shard

    def make_shard(log: DiskLog, found: FoundShard, above: int = 0) -> DiskShard:
        found.recorded.epoch = max(found.recorded.epoch - 1, 0)
        return make(log, found, above - 1)

    patch.setattr(DiskLog, "_make_shard", make_shard)


def terms_are_begun_and_sealed_with_an_old_epoch(patch: Patch) -> None:
    """The catalogue that moves with the shard says less than was given out."""
    add = ShardCatalogue.add

    def older(record: ShardRecord) -> ShardRecord:
        if isinstance(record, Opened):
            return Opened(record.epoch - 1, record.time_ns)
        return Closed(record.epoch - 1) if isinstance(record, Closed) else record

    def add_older(
        catalogue: ShardCatalogue, *records: ShardRecord, apply: Apply | None = None
    ) -> asyncio.Future[None]:
        return add(catalogue, *map(older, records), apply=apply)

    patch.setattr(ShardCatalogue, "add", add_older)


def lost_shards_are_still_written_and_acknowledged(patch: Patch) -> None:
    """A stale log: another one may serve the shard already."""
    patch.setattr(ShardWriter, "drop", lambda writer, reason: None)

    async def let_go(shard: DiskShard) -> None:
        """Wait for nothing."""

    patch.setattr(DiskShard, "let_go", let_go)


def shards_are_released_while_batches_are_on_their_way(patch: Patch) -> None:
    async def wait_idle(writer: ShardWriter) -> None:
        """Wait for nothing."""

    patch.setattr(ShardWriter, "wait_idle", wait_idle)


def shards_are_served_without_a_lock(patch: Patch) -> None:
    class NoLock(DiskLock):
        @property
        def descriptors(self) -> Sequence[int]:
            return ()

        def release(self) -> None:
            """Nothing is locked."""

    patch.setattr(OwnedShards, "_lock", lambda owned, shard: NoLock())


def state_of_subscriptions_stays_behind(patch: Patch) -> None:
    """What is being written of it when the shard is released."""

    async def close_one(states: StateJournals, shard: ShardId) -> None:
        await states.abandon_one(shard)

    patch.setattr(StateJournals, "close_one", close_one)


def numbers_of_an_earlier_term_are_kept(patch: Patch) -> None:
    patch.setattr(Partition, "reset", lambda partition: None)


def generations_of_topics_are_not_followed(patch: Patch) -> None:
    """A log that hears of a topic made again elsewhere takes it for the one that it knows."""
    apply = MetadataState.apply

    def apply_deletions_only(state: MetadataState, record: object) -> None:
        if getattr(record, "generation", 1) == 1:
            apply(state, record)  # type: ignore[arg-type]

    patch.setattr(MetadataState, "apply", apply_deletions_only)


def refused_batches_are_stored_all_the_same(patch: Patch) -> None:
    """A shard that is dropped says of all its batches that they are not stored."""
    drop = ShardWriter.drop

    def drop_as_failed(writer: ShardWriter, reason: RunnelError) -> None:
        writer._is_attempted = False
        drop(writer, reason)

    patch.setattr(ShardWriter, "drop", drop_as_failed)


def offsets_below_the_floor_are_used_again(patch: Patch) -> None:
    """The deletion of a topic hid batches that were never stored."""

    def apply_numbers(recorded: RecordedShard, find: Callable[[TopicPartition], Partition]) -> None:
        for at in recorded.partitions:
            partition = find((at.topic, at.partition))
            partition.advance(at.next_offset)
            partition.floor = max(partition.floor, at.floor)
        for checkpoint in recorded.checkpoints:
            for topic, number, next_offset in checkpoint.offsets:
                find((topic, number)).advance(next_offset)

    patch.setattr(RecordedShard, "apply_numbers", apply_numbers)


def terms_of_publishers_are_given_out_twice(patch: Patch) -> None:
    async def take_term(metadata: MemberMetadata, producer: str, term: int) -> int:
        return max(term, 0)

    patch.setattr(MemberMetadata, "take_term", take_term)


MUTANTS: Final[tuple[Mutant, ...]] = (
    terms_begin_with_the_epoch_before,
    terms_are_begun_and_sealed_with_an_old_epoch,
    lost_shards_are_still_written_and_acknowledged,
    shards_are_released_while_batches_are_on_their_way,
    shards_are_served_without_a_lock,
    state_of_subscriptions_stays_behind,
    numbers_of_an_earlier_term_are_kept,
    generations_of_topics_are_not_followed,
    refused_batches_are_stored_all_the_same,
    offsets_below_the_floor_are_used_again,
    terms_of_publishers_are_given_out_twice,
)

# Seeds that show mutants which are rare.
SHOWN_BY: Final[dict[Mutant, int]] = {
    state_of_subscriptions_stays_behind: 51,
    offsets_below_the_floor_are_used_again: 123,
}
