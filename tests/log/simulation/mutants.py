"""Deliberate mistakes in the log, which histories must find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from runnel.formats import block, checksum
from runnel.log.disk.shard import DiskShard
from runnel.log.disk.topic_removal import TopicRemoval
from runnel.log.disk.writer import ShardWriter
from runnel.log.metadata.catalogue import Catalogue
from runnel.log.metadata.cursors import CursorTable
from runnel.log.metadata.producers import ProducerTable
from runnel.log.metadata.topic_table import Partition
from runnel.log.retention.holds import Hold, Holds, ShardHolds
from runnel.log.segments import paths
from runnel.topics.names import TopicPartition
from tests.fakes.disk import FakeDisk, FakeFile
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
    begin_file = Catalogue._begin_file

    def begin_with_snapshot_alone(catalogue: Catalogue, records: Sequence[Any]) -> None:
        begin_file(catalogue, list(catalogue._snapshot()) if records else ())

    patch.setattr(Catalogue, "_begin_file", begin_with_snapshot_alone)


def purges_are_not_recovered(patch: Patch) -> None:
    patch.setattr(TopicRemoval, "hide_again", lambda removal, shards: None)


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
)

# Seeds that show mutants which are rare.
SHOWN_BY: Final[dict[Mutant, int]] = {
    ends_of_segments_are_not_recorded: 35,
    producers_are_not_replayed: 44,
    cursors_hold_nothing: 363,
    acknowledged_messages_go_before_cursors_have_passed_them: 1263,
}
