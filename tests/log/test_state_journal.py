"""State journals: what subscriptions have done is there after a crash if it was answered for, and nothing torn is."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable
from contextlib import suppress
from random import Random
from typing import Generic, TypeVar

import pytest

from runnel.config import LogSettings, TopicRule
from runnel.errors import DiskFullError, ReadOnlyError
from runnel.log.log import ShardId, StateStore
from runnel.log.metadata.state_journal import StateJournal
from runnel.log.reading.offline_log import OfflineLog
from runnel.log.reading.verification import verify
from runnel.log.segments.synced_marks import SyncedMarks
from runnel.platform.disk import FileAccess
from runnel.platform.workers import ThreadWorkers
from tests.fakes.disk import FakeDisk, Kind, PowerLoss
from tests.fakes.workers import SimulatedWorkers
from tests.log.home import LOG, Home, run
from tests.log.samples import one, read_payloads

MAIN = ShardId("main")
FOLDER = "data/journals/main/0/state"


JournalT = TypeVar("JournalT", bound=StateStore)


class Keeper(Generic[JournalT]):
    """A user of a state journal: numbers under names, each of which a content states."""

    def __init__(self, journal: JournalT) -> None:
        self.journal = journal
        self.known: dict[str, int] = {}
        for content in journal.contents:
            name, _, number = content.decode().partition("=")
            self.known[name] = int(number)
        journal.contents.clear()
        journal.snapshot = self.snapshot
        self.snapshots = 0

    def snapshot(self) -> Iterable[bytes]:
        self.snapshots += 1
        return [f"{name}={number}".encode() for name, number in self.known.items()]

    def set(self, name: str, number: int) -> asyncio.Future[None]:
        self.known[name] = number
        return self.journal.add(f"{name}={number}".encode())


def journal_on(
    disk: FakeDisk, bytes_max: int = 10**6, workers: SimulatedWorkers | None = None
) -> StateJournal:
    return StateJournal(
        disk,
        workers or SimulatedWorkers(Random(1)),
        MAIN,
        FOLDER,
        marks=SyncedMarks(disk, "data"),
        bytes_max=bytes_max,
        make_shard_folder=lambda: None,
    )


def opened(disk: FakeDisk, bytes_max: int = 10**6) -> Keeper[StateJournal]:
    """As the next process finds it."""
    journal = journal_on(disk.restart(), bytes_max)
    journal.open()
    return Keeper(journal)


def the_file(disk: FakeDisk) -> str:
    [name] = disk.list(FOLDER)
    return f"{FOLDER}/{name}"


def test_what_is_stored_comes_back() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk))
        for number in range(50):
            await keeper.set(f"key {number % 7}", number)
        disk.crash()
        assert opened(disk).known == keeper.known

    run(scenario)


def test_there_is_no_file_before_the_first_content() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        journal = journal_on(disk)
        keeper = Keeper(journal)
        assert disk.list("data") == []
        await keeper.set("a", 1)
        assert len(disk.list(FOLDER)) == 1
        await journal.close()

    run(scenario)


def test_no_file_stays_open_between_writes() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk, bytes_max=100))
        for number in range(20):
            await keeper.set("a", number)
            file = keeper.journal._journal._file
            assert file is not None
            assert file._file is None
        assert keeper.snapshots > 2

    run(scenario)


def test_contents_added_together_share_one_write() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk))
        await keeper.set("first", 0)
        syncs = disk.sync_count
        await asyncio.gather(*(keeper.set(f"key {number}", number) for number in range(200)))
        assert disk.sync_count - syncs <= 2
        assert opened(disk).known == keeper.known

    run(scenario)


def test_grown_file_is_replaced_by_what_is_known() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk, bytes_max=500))
        for number in range(300):
            await keeper.set(f"key {number % 3}", number)
        assert 5 < keeper.snapshots < 100
        await keeper.journal.close()
        assert disk.open(the_file(disk), FileAccess.READ).size() < 1000
        assert opened(disk).known == {"key 0": 297, "key 1": 298, "key 2": 299}

    run(scenario)


def test_snapshot_may_be_made_while_it_is_gone_through() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk, bytes_max=100))
        keeper.journal.snapshot = lambda: (content for content in keeper.snapshot())
        for number in range(30):
            await keeper.set("a", number)
        assert opened(disk).known == {"a": 29}

    run(scenario)


def test_large_snapshot_is_written_in_pieces() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        journal = journal_on(disk, bytes_max=1)
        large = [bytes([number]) * (6 << 20) for number in range(5)]
        journal.snapshot = lambda: large
        await journal.add(b"")
        await journal.close()
        pieces = [
            operation.size for operation in disk.operations if operation.path.endswith(".new")
        ]
        assert max(size for size in pieces if size is not None) < 14 << 20
        reader = journal_on(disk.restart())
        reader.open()
        assert reader.contents == large

    run(scenario)


@pytest.mark.parametrize("seed", range(6))
def test_power_may_go_in_any_operation(seed: int) -> None:
    """A stored content is there afterwards, and nothing that was never added, whatever was snapshotted."""
    for operation in range(1, 90):
        disk = FakeDisk(seed)
        stored: dict[str, int] = {}
        added: dict[str, int] = {}

        async def scenario(
            disk: FakeDisk = disk,
            stored: dict[str, int] = stored,
            added: dict[str, int] = added,
            operation: int = operation,
        ) -> None:
            disk.crash_at(operation)
            keeper = Keeper(journal_on(disk, bytes_max=150))
            for number in range(12):
                names = [f"key {number % 4}", f"other {number % 3}"]
                added.update(dict.fromkeys(names, number))
                await asyncio.gather(*(keeper.set(name, number) for name in names))
                stored.update(dict.fromkeys(names, number))

        with suppress(PowerLoss):
            run(scenario)
        disk.crash()
        keeper = opened(disk)
        for name, number in stored.items():
            assert number <= keeper.known[name] <= added[name]
        for name, number in keeper.known.items():
            assert number <= added[name]
        run(lambda keeper=keeper: _goes_on(keeper))  # type: ignore[misc]


async def _goes_on(keeper: Keeper[StateJournal]) -> None:
    await keeper.set("after", 1)
    disk = keeper.journal._journal._disk
    assert isinstance(disk, FakeDisk)
    disk.crash()
    assert opened(disk).known == keeper.known


@pytest.mark.parametrize("seed", range(3))
def test_process_may_die_in_any_operation_and_the_power_go_later(seed: int) -> None:
    for operation in range(1, 60):
        disk = FakeDisk(seed)
        stored: dict[str, int] = {}

        async def scenario(
            disk: FakeDisk = disk, stored: dict[str, int] = stored, operation: int = operation
        ) -> None:
            disk.kill_at(operation)
            keeper = Keeper(journal_on(disk, bytes_max=150))
            for number in range(12):
                await keeper.set(f"key {number % 4}", number)
                stored[f"key {number % 4}"] = number

        with suppress(PowerLoss):
            run(scenario)
        keeper = opened(disk)
        assert all(keeper.known[name] >= number for name, number in stored.items())
        run(lambda keeper=keeper: _goes_on(keeper))  # type: ignore[misc]


# --- Failing disks ---


def test_full_disk_refuses_a_content_and_takes_the_next() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk))
        await keeper.set("a", 1)
        disk.fail(Kind.WRITE, errno.ENOSPC)
        with pytest.raises(DiskFullError, match="state journal of shard main/0"):
            await keeper.journal.add(b"a=2")
        await keeper.set("b", 3)
        assert opened(disk).known == {"a": 1, "b": 3}

    run(scenario)


def test_full_disk_at_the_first_content_is_no_end() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk))
        for kind in (Kind.CREATE, Kind.WRITE, Kind.RENAME, Kind.SYNC_DIRECTORY, Kind.OPEN):
            disk.fail(kind, errno.ENOSPC)
            with suppress(DiskFullError):
                await keeper.journal.add(b"refused=1")
        disk.heal()
        await keeper.set("a", 1)
        disk.crash()
        assert opened(disk).known["a"] == 1

    run(scenario)


def test_file_that_cannot_be_opened_for_a_moment_is_no_end() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk))
        await keeper.set("a", 1)
        disk.fail(Kind.OPEN, errno.EMFILE)
        with pytest.raises(DiskFullError):
            await keeper.journal.add(b"a=2")
        await keeper.set("a", 3)
        assert opened(disk).known == {"a": 3}

    run(scenario)


def test_content_that_cannot_be_taken_back_either_makes_it_read_only() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk))
        await keeper.set("a", 1)
        disk.fail(Kind.SYNC, errno.EIO, times=2)
        with pytest.raises(ReadOnlyError, match="main/0 is read-only until restart"):
            await keeper.set("a", 2)
        with pytest.raises(ReadOnlyError):
            await keeper.set("a", 3)

    run(scenario)


def test_snapshot_that_fails_leaves_the_old_file_in_use() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk, bytes_max=200))
        await keeper.set("a", 0)
        before = the_file(disk)
        disk.fail(Kind.CREATE, errno.ENOSPC, times=None)
        for number in range(20):
            await keeper.set(f"key {number}", number)
        assert the_file(disk) == before
        disk.heal()
        for number in range(20, 60):
            await keeper.set(f"key {number}", number)
        assert opened(disk).known == keeper.known
        assert keeper.snapshots > 1

    run(scenario)


def test_mistake_in_a_snapshot_leaves_nobody_waiting() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        told: list[BaseException | None] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: told.append(context.get("exception"))
        )
        keeper = Keeper(journal_on(disk, bytes_max=1))

        def fails() -> Iterable[bytes]:
            raise LookupError("a bug")

        def fails_later() -> Iterable[bytes]:
            yield b"half=1"
            raise LookupError("another bug")

        for snapshot in (fails, fails_later):
            keeper.journal.snapshot = snapshot
            await keeper.set("a", 1)
            await keeper.set("b", 2)
        await keeper.journal.close()
        assert len(told) >= 2
        assert all(isinstance(error, LookupError) for error in told)
        assert opened(disk).known == {"a": 1, "b": 2}

    run(scenario)


def test_damaged_content_is_reported_and_the_next_write_leaves_it_behind() -> None:
    disk = FakeDisk(1)

    async def scenario() -> None:
        keeper = Keeper(journal_on(disk))
        ends = []
        for number in range(4):
            await keeper.set(f"key {number}", number)
            ends.append(disk.open(the_file(disk), FileAccess.READ).size())
        disk.flip_bit(the_file(disk), ends[0] + 26, 1)
        after = disk.restart()
        journal = journal_on(after)
        [damage] = journal.open().damage
        assert damage.position == ends[0]
        keeper = Keeper(journal)
        assert keeper.known == {"key 0": 0, "key 2": 2, "key 3": 3}
        await keeper.set("key 1", 5)
        await keeper.journal.close()
        again = journal_on(after.restart())
        assert not again.open().damage
        assert Keeper(again).known == keeper.known

    run(scenario)


# --- In a data directory ---


def test_closing_stores_what_is_queued_and_takes_no_more() -> None:
    async def scenario() -> None:
        home = Home()
        log = await home.open()
        await log.metadata.ensure_topic("a")
        keeper = Keeper(log.shard(MAIN).state)
        waiting = keeper.set("a", 1)
        await log.close()
        assert waiting.done()
        with pytest.raises(ReadOnlyError, match="state journal of shard main/0 is closed"):
            await keeper.set("a", 2)
        log = await home.kill()
        assert Keeper(log.shard(MAIN).state).known == {"a": 1}
        await log.close()

    run(scenario)


def test_state_is_found_beside_segments_and_without_them() -> None:
    async def scenario() -> None:
        home = Home(TopicRule(match="u", journal="Ünused"))
        log = await home.open()
        await log.append(one("a", b"1"))
        await log.metadata.ensure_topic("u")
        shards = (MAIN, ShardId("Ünused"))
        for shard in shards:
            await Keeper(log.shard(shard).state).set("a", 1)
        log = await home.crash()
        assert log.recovered.damage == []
        for shard in shards:
            assert log.shard(shard).state.contents == [b"a=1"]
            assert log.shard(shard).state is log.shard(shard).state
        assert read_payloads(await log.read("a", 0, 1)) == [b"1"]
        log = await home.reopen(log)
        assert log.recovered.was_clean
        assert Keeper(log.shard(MAIN).state).known == {"a": 1}
        await log.close()

    run(scenario)


def test_first_segment_and_first_state_are_made_at_the_same_time() -> None:
    async def scenario() -> None:
        for seed in range(20):
            home = Home(disk=FakeDisk(seed))
            log = await home.open()
            await log.metadata.ensure_topic("a")
            keeper = Keeper(log.shard(MAIN).state)
            await asyncio.gather(log.append(one("a", b"1")), keeper.set("a", 1))
            log = await home.crash()
            assert Keeper(log.shard(MAIN).state).known == {"a": 1}
            assert read_payloads(await log.read("a", 0, 1)) == [b"1"]
            await log.close()

    run(scenario)


def test_torn_end_is_cut_and_reported() -> None:
    async def scenario() -> None:
        home = Home()
        log = await home.open()
        await log.metadata.ensure_topic("a")
        await Keeper(log.shard(MAIN).state).set("a", 1)
        path = the_file(home.disk)
        whole = home.content(path)
        await log.close()
        home.overwrite(path, whole + b"RNR\x01\x20\0\0\0torn")
        log = await home.open()
        [torn] = log.recovered.torn
        assert path in torn
        assert Keeper(log.shard(MAIN).state).known == {"a": 1}
        assert home.content(path) == whole
        await log.close()

    run(scenario)


def test_real_threads_store_what_many_add() -> None:
    async def scenario() -> None:
        workers = ThreadWorkers(2)
        try:
            disk = FakeDisk(1)
            journal = StateJournal(
                disk,
                workers,
                MAIN,
                FOLDER,
                marks=SyncedMarks(disk, "data"),
                bytes_max=2_000,
                make_shard_folder=lambda: None,
            )
            keeper = Keeper(journal)
            for turn in range(40):
                await asyncio.gather(*(keeper.set(f"key {n}", turn) for n in range(20)))
            await journal.close()
        finally:
            workers.close()
        assert keeper.snapshots > 2
        assert opened(disk).known == keeper.known

    run(scenario)


# --- Read offline ---


async def _home_with_state() -> Home:
    home = Home(log=LogSettings(allocate_bytes=LOG.allocate_bytes, disk_reserve_bytes=0))
    log = await home.open()
    await log.append(one("a", b"1"))
    await log.metadata.set_subscription("work", b"\x93")
    keeper = Keeper(log.shard(MAIN).state)
    for number in range(4):
        await keeper.set(f"key {number}", number)
    await log.close()
    return home


def test_offline_reader_passes_state_and_definitions() -> None:
    async def scenario() -> None:
        home = await _home_with_state()
        log = OfflineLog(home.directory, disk=home.disk, find_holder=lambda _: None)
        assert [batch.messages()[0].payload for batch in log.scan()] == [b"1"]
        verified = verify(log)
        assert (verified.damage, verified.notes) == ([], [])

    run(scenario)


def test_verifying_finds_damaged_and_torn_state() -> None:
    async def scenario() -> None:
        home = await _home_with_state()
        path = the_file(home.disk)
        home.disk.flip_bit(path, home.content(path).index(b"key 1"), 0)
        log = OfflineLog(home.directory, disk=home.disk, find_holder=lambda _: None)
        [damage] = verify(log).damage
        assert damage.path == path
        home = await _home_with_state()
        path = the_file(home.disk)
        home.overwrite(path, home.content(path) + b"RNR\x01 and no more")
        log = OfflineLog(home.directory, disk=home.disk, find_holder=lambda _: None)
        verified = verify(log)
        assert verified.damage == []
        [note] = verified.notes
        assert "torn tail" in note

    run(scenario)
