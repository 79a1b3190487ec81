"""Deliberate mistakes in the log, to see that histories find them. Each is a function of pytest's monkeypatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

from runnel.formats import block, checksum
from runnel.log import paths
from runnel.log.catalogue import Catalogue
from runnel.log.cursors import CursorTable
from runnel.log.pins import ShardPins
from runnel.log.producers import ProducerTable
from runnel.log.removing import TopicRemoval
from runnel.log.retention import Hold, Holds
from runnel.log.shard import Shard
from runnel.log.topic_table import Partition
from runnel.log.writer import ShardWriter
from runnel.topics.names import TopicPartition
from tests.fakes.disk import FakeDisk, FakeFile

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


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
    patch.setattr(Shard, "replay", lambda shard, found: None)


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
    owed = ShardPins.owed

    def owed_but_one(pins: ShardPins, key: TopicPartition, begin: int, end: int) -> object:
        ranges = owed(pins, key, begin, end)
        return ranges and ranges[1:]

    patch.setattr(ShardPins, "owed", owed_but_one)


def acknowledged_messages_go_before_cursors_have_passed_them(patch: Patch) -> None:
    patch.setattr(ShardPins, "cursors", lambda pins: Holds(()))


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
