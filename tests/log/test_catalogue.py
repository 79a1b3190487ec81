"""Metadata and catalogues: records that are stored when they are answered for, and snapshots in between."""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import suppress
from random import Random

import pytest

from runnel.config import Keep
from runnel.errors import DiskFullError, ReadOnlyError
from runnel.log.log import Cursor, CursorPosition, Position, ShardId
from runnel.log.metadata.catalogue import (
    LoadedCatalogue,
    LoadedMetadata,
    MetadataJournal,
    ShardCatalogue,
)
from runnel.log.metadata.producers import ProducerState
from runnel.log.metadata.records import (
    Closed,
    CursorRemoved,
    CursorSet,
    JournalMade,
    LastValue,
    MetadataRecord,
    Opened,
    PartitionAt,
    ShardAt,
    ShardRecord,
    SubscriptionRemoved,
    SubscriptionSet,
    TermTaken,
    TopicDeleted,
    TopicMade,
)
from runnel.log.segments.records import RecordFile
from runnel.log.segments.synced_marks import SyncedMarks
from runnel.platform.disk import FileAccess
from tests.fakes.disk import FakeDisk, Kind, PowerLoss
from tests.fakes.workers import SimulatedWorkers
from tests.log.home import run

FOLDER = "data/metadata"
SHARD = ShardId("main")
SHARD_FOLDER = "data/journals/main/0"
EVERY_KIND: list[MetadataRecord] = [
    Opened(5, 1_700_000_000 * 10**9),
    JournalMade("main", Keep.DISK, 16),
    TopicMade("größe", Keep.DISK, 3, "main"),
    TopicMade("again", Keep.DISK, 3, "main", "gateway", 2),
    TopicDeleted("a"),
    TermTaken("p", 2**40),
    CursorSet(
        Cursor(
            "c",
            (
                CursorPosition(topic="a", partition=1, offset=5),
                CursorPosition(shard=ShardId("main"), position=Position(1, 2, 3), patterns=("*",)),
            ),
            6,
        )
    ),
    CursorRemoved("c"),
    SubscriptionSet("billing", b"\0definition"),
    SubscriptionRemoved("billing"),
    Closed(5),
]
EVERY_KIND_IN_A_SHARD: list[ShardRecord] = [
    Opened(5, 1_700_000_000 * 10**9),
    PartitionAt("a", 2, 2**62, 7),
    PartitionAt("a", 2, 2**62, 7, 3),
    ShardAt("main", 0, 9, 8, [("a", 0, 7)], [ProducerState("p", 1, 2, 3, (4, 5))]),
    LastValue("a", 0, b"\0block"),
    Closed(5),
]


class GroupState:
    """A journal of metadata over a fake disk; `snapshot` is what its owner knows."""

    def __init__(self, disk: FakeDisk, bytes_max: int = 10**6) -> None:
        self.disk = disk
        self.known: list[MetadataRecord] = []
        self.catalogue = MetadataJournal(
            disk,
            SimulatedWorkers(Random(1)),
            FOLDER,
            marks=SyncedMarks(disk, "data"),
            bytes_max=bytes_max,
            snapshot=lambda: list(self.known),
        )

    def open(self) -> LoadedMetadata:
        return self.catalogue.open()

    async def add(self, record: MetadataRecord) -> None:
        await self.catalogue.add(record)
        self.known.append(record)

    def path(self) -> str:
        [name] = self.disk.list(FOLDER)
        return f"{FOLDER}/{name}"


def loaded_after(disk: FakeDisk) -> LoadedMetadata:
    return GroupState(disk.restart()).open()


def test_new_catalogue_is_empty() -> None:
    loaded = GroupState(FakeDisk(1)).open()
    assert list(loaded.records) == []
    assert loaded.torn is None


def test_records_of_every_kind_come_back_in_order() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk)
        group_state.open()
        for record in EVERY_KIND:
            await group_state.add(record)
        disk.crash()
        loaded = loaded_after(disk)
        assert list(loaded.records) == EVERY_KIND
        assert not loaded.damage

    run(scenario)


def shard_catalogue(disk: FakeDisk) -> ShardCatalogue:
    return ShardCatalogue(
        disk,
        SimulatedWorkers(Random(1)),
        SHARD,
        SHARD_FOLDER,
        marks=SyncedMarks(disk, "data"),
        bytes_max=10**6,
        make_shard_folder=lambda: disk.make_directory(SHARD_FOLDER),
    )


def test_catalogue_of_a_shard_has_no_file_before_its_first_record() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        catalogue = shard_catalogue(disk)
        assert not catalogue.is_made
        assert disk.list(SHARD_FOLDER) == []
        for record in EVERY_KIND_IN_A_SHARD:
            await catalogue.add(record)
        disk.crash()
        again = shard_catalogue(disk.restart())
        assert again.is_made
        loaded: LoadedCatalogue = again.open()
        assert list(loaded.records) == EVERY_KIND_IN_A_SHARD
        assert not loaded.damage

    run(scenario)


def test_catalogue_that_nothing_was_added_to_is_closed_without_a_record() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        await shard_catalogue(disk).end(7)
        assert disk.list(SHARD_FOLDER) == []
        catalogue = shard_catalogue(disk)
        await catalogue.add(Opened(7, 0))
        await catalogue.end(7)
        assert list(shard_catalogue(disk).open().records) == [Opened(7, 0), Closed(7)]

    run(scenario)


def test_abandoned_journal_fails_what_is_queued_and_writes_nothing_more() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        catalogue = shard_catalogue(disk)
        await catalogue.add(Opened(1, 0))
        under_way = catalogue.add(Opened(2, 0))
        for _ in range(2):
            await asyncio.sleep(0)  # it is being written
        queued = catalogue.add(Opened(3, 0))
        await catalogue.abandon()
        assert under_way.done()
        with pytest.raises(ReadOnlyError, match="closed"):
            await queued
        with pytest.raises(ReadOnlyError, match="closed"):
            await catalogue.add(Opened(4, 0))
        epochs = [record.epoch for record in shard_catalogue(disk).open().records]  # type: ignore[union-attr]
        assert epochs == [1, 2]

    run(scenario)


def test_records_added_together_share_one_write() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk)
        group_state.open()
        syncs = disk.sync_count
        await asyncio.gather(*(group_state.catalogue.add(Opened(n, 0)) for n in range(100)))
        assert disk.sync_count - syncs <= 2
        assert [record.epoch for record in loaded_after(disk).records] == list(range(100))  # type: ignore[union-attr]

    run(scenario)


def test_records_can_be_made_by_the_worker_that_writes_them() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk)
        group_state.open()
        made: list[str] = []

        def make() -> list[MetadataRecord]:
            made.append("now")
            return [Closed(1), Closed(2)]

        future = group_state.catalogue.add_made(make)
        assert made == []
        await future
        assert made == ["now"]
        assert list(loaded_after(disk).records) == [Closed(1), Closed(2)]

    run(scenario)


def test_closing_writes_what_is_queued_and_takes_no_more() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk)
        group_state.open()
        waiting = group_state.catalogue.add(Opened(1, 2))
        await group_state.catalogue.close(Closed(1))
        assert waiting.done()
        with pytest.raises(ReadOnlyError, match="closed"):
            await group_state.catalogue.add(Closed(2))
        assert list(loaded_after(disk).records) == [Opened(1, 2), Closed(1)]

    run(scenario)


def test_grown_file_is_replaced_by_a_snapshot_of_what_is_known() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk, bytes_max=500)
        group_state.open()
        first = group_state.path()
        group_state.known.append(TopicMade("kept", Keep.DISK, 1, "main"))
        for number in range(100):
            await group_state.catalogue.add(CursorSet(Cursor("c", (), number)))
            group_state.known[1:] = [CursorSet(Cursor("c", (), number))]
        assert group_state.path() != first
        assert disk.open(group_state.path(), FileAccess.READ).size() < 1200
        records = list(loaded_after(disk).records)
        assert records[0] == TopicMade("kept", Keep.DISK, 1, "main")
        assert records[-1] == CursorSet(Cursor("c", (), 99))

    run(scenario)


def test_crash_at_any_operation_loses_nothing_that_was_answered_for() -> None:
    for seed in range(4):
        for operation in range(3, 60):
            disk = FakeDisk(seed)
            answered: list[int] = []

            async def scenario(disk: FakeDisk = disk, answered: list[int] = answered) -> None:
                group_state = GroupState(disk, bytes_max=120)
                group_state.open()
                disk.crash_at(operation)  # noqa: B023 - run in this round
                for number in range(8):
                    await group_state.add(Opened(number, 0))
                    answered.append(number)

            with suppress(PowerLoss):
                run(scenario)
            disk.crash()
            records = loaded_after(disk).records
            epochs = [record.epoch for record in records if isinstance(record, Opened)]
            assert set(answered) <= set(epochs)
            assert max(epochs, default=-1) <= len(answered)


def test_damaged_record_is_reported_and_the_others_are_read() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk)
        group_state.open()
        ends = []
        for number in range(4):
            await group_state.add(Opened(number, 0))
            ends.append(disk.open(group_state.path(), FileAccess.READ).size())
        disk.flip_bit(group_state.path(), ends[0] + 26, 1)
        loaded = loaded_after(disk)
        assert [record.epoch for record in loaded.records] == [0, 2, 3]  # type: ignore[union-attr]
        [damage] = loaded.damage
        assert damage.position == ends[0]

    run(scenario)


def test_record_of_an_unknown_kind_is_damage_and_not_a_crash() -> None:
    disk = FakeDisk(1)
    disk.make_directory(FOLDER)
    file = RecordFile.create(disk, f"{FOLDER}/00000000000000000001")
    file.append(b"\x91\x92\xa7unknown\x01")
    file.append(b"\x91\x92\xa6closed\x05")
    loaded = GroupState(disk).open()
    assert list(loaded.records) == [Closed(5)]
    assert len(loaded.damage) == 1


def test_full_disk_refuses_a_record_and_takes_the_next() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk)
        group_state.open()
        await group_state.add(Opened(1, 0))
        disk.fail(Kind.WRITE, errno.ENOSPC)
        with pytest.raises(DiskFullError, match=rf"written: {os.strerror(errno.ENOSPC)}$"):
            await group_state.add(Opened(2, 0))
        await group_state.add(Opened(3, 0))
        assert list(loaded_after(disk).records) == [Opened(1, 0), Opened(3, 0)]

    run(scenario)


def test_record_that_cannot_be_taken_back_either_makes_it_read_only() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk)
        group_state.open()
        await group_state.add(Opened(1, 0))
        disk.fail(Kind.WRITE, errno.EIO)
        disk.fail(Kind.TRUNCATE, errno.EIO)
        with pytest.raises(ReadOnlyError, match="read-only until restart"):
            await group_state.add(Opened(2, 0))
        with pytest.raises(ReadOnlyError):
            await group_state.add(Opened(3, 0))

    run(scenario)


def test_snapshot_that_fails_leaves_the_old_file_in_use() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk, bytes_max=100)
        group_state.open()
        before = group_state.path()
        disk.fail(Kind.CREATE, errno.ENOSPC, times=None)
        for number in range(20):
            await group_state.add(Opened(number, 0))
        assert group_state.path() == before
        disk.heal()
        for number in range(20, 60):
            await group_state.add(Opened(number, 0))
        assert group_state.path() != before
        epochs = {record.epoch for record in loaded_after(disk).records}  # type: ignore[union-attr]
        assert epochs == set(range(60))

    run(scenario)


def test_whoever_stops_waiting_changes_nothing() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk)
        group_state.open()
        futures = [group_state.catalogue.add(Opened(number, 0)) for number in range(3)]
        futures[1].cancel()
        await asyncio.gather(futures[0], futures[2])
        assert len(loaded_after(disk).records) == 3

    run(scenario)


def test_leftovers_of_a_crash_are_removed() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        group_state = GroupState(disk)
        group_state.open()
        await group_state.add(Opened(1, 0))
        for name in ("00000000000000000000", "00000000000000000002.new"):
            disk.open(f"{FOLDER}/{name}", FileAccess.CREATE)
        assert list(loaded_after(disk).records) == [Opened(1, 0)]

    run(scenario)
