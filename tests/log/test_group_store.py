"""The writer of a shard, with group stores whose answers fail, stay unknown, or come late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from runnel.config import LogSettings, Rotate, TopicRule
from runnel.errors import BusyError, ClosedError, DiskFullError, MovedError, Unavailable
from runnel.log.disk.disk_log import DiskLog
from runnel.log.disk.group_writer import FileGroupStore, GroupWriter
from runnel.log.disk.writer import (
    REPEAT_SECONDS_MAX,
    REPEAT_SECONDS_MIN,
    UNKNOWN_SECONDS_MAX,
    ShardWriter,
)
from runnel.log.group_store import BatchGroup, GroupStore, Outcome, Stored
from runnel.log.log import Appended, Level, OffsetBounds, ShardId
from tests.fakes.clock import NS_PER_SECOND
from tests.fakes.lossy_store import Fate, LossyStore
from tests.log.home import Home, run
from tests.log.samples import batch, numbered, one, read_all

MAIN = ShardId("main")
EVERY_BATCH = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1))
LOST, LOST_AFTER, FAILED, HANGS = Fate.LOST_BEFORE, Fate.LOST_AFTER, Fate.FAILED, Fate.HANGS


class Bench:
    """A directory and a medium whose attempts have the fates of a list, and are stored when that is over."""

    def __init__(self, *fates: Fate, log: LogSettings | None = None, rule: TopicRule | None = None):
        self.home = Home(*([] if rule is None else [rule]))
        if log is not None:
            self.home = Home(log=log)
        self.fates = list(fates)
        self._store: LossyStore | None = None

    @property
    def store(self) -> LossyStore:
        assert self._store is not None
        return self._store

    async def open(self) -> DiskLog:
        return await self.home.open(self._make)

    def _make(self, shard: ShardId, writer: GroupWriter) -> LossyStore:
        inner = FileGroupStore(shard, writer, self.home.workers)
        self._store = LossyStore(inner, lambda group, _: self._next())
        return self._store

    def _next(self) -> Fate:
        return self.fates.pop(0) if self.fates else Fate.STORED

    async def attempts(self, count: int) -> None:
        """Wait until so many attempts have been made."""
        await until(lambda: len(self.store.attempts) >= count)

    def groups(self) -> list[tuple[int, bytes]]:
        """The first entry and the bytes of what was given to the medium, attempt by attempt."""
        return [
            (group.first_entry, b"".join(map(bytes, group.blocks())))
            for group, _ in self.store.attempts
        ]


async def turns(count: int = 60) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], object]) -> None:
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


def writer_of(log: DiskLog) -> ShardWriter:
    return log._owned.shards[MAIN].writer


async def payloads(log: DiskLog) -> list[bytes]:
    return [message.payload for message in await read_all(log, "a")]


async def failures(futures: Sequence[asyncio.Future[Appended]]) -> list[BaseException | Appended]:
    return await asyncio.gather(*futures, return_exceptions=True)


# --- Unknown ---


@pytest.mark.parametrize("lost", [LOST, LOST_AFTER], ids=["before", "after"])
def test_same_group_is_stored_again_until_the_outcome_is_known(lost: Fate) -> None:
    bench = Bench(Fate.STORED, lost, lost, lost)

    async def scenario() -> None:
        log = await bench.open()
        await log.append(one("a", b"0"))
        first = [log.append(numbered("p", number, payload=b"%d" % number)) for number in range(3)]
        await bench.attempts(2)
        behind = log.append(one("a", b"behind"))
        await bench.attempts(3)  # the second attempt follows at once
        for _ in range(2):
            assert not any(future.done() for future in (*first, behind))
            assert await log.bounds("a", 0) == OffsetBounds(1, 2)  # not visible
            assert await payloads(log) == [b"0"]
            await turns()
            bench.home.clock.advance(round(REPEAT_SECONDS_MAX * NS_PER_SECOND))
            await turns()
        assert [(await future).entry for future in (*first, behind)] == [2, 3, 4, 5]
        assert [(await future).base_offsets for future in (*first, behind)] == [[2], [3], [4], [5]]
        groups = bench.groups()
        assert groups[1:5] == [groups[1]] * 4
        assert groups[1][0] == 2
        assert [group[0] for group in groups[5:]] == [5]
        assert await payloads(log) == [b"0", b"0", b"1", b"2", b"behind"]
        assert log.statistics().shards[0].unknown_outcomes == 3
        assert log.statistics().shards[0].failed_batches == 0
        log = await bench.home.reopen(log)
        assert log.recovered.was_clean
        assert await payloads(log) == [b"0", b"0", b"1", b"2", b"behind"]
        await log.close()

    run(scenario)


def test_delay_before_a_repetition_grows_up_to_its_bound() -> None:
    bench = Bench(*[LOST] * 12)

    async def scenario() -> None:
        log = await bench.open()
        future = log.append(one("a", b"1"))
        await bench.attempts(2)
        delays: list[float] = []
        while not future.done():
            await turns()
            wake_ns = bench.home.clock.next_wake_ns
            if wake_ns is not None:
                delays.append(wake_ns / NS_PER_SECOND)
                bench.home.clock.advance(wake_ns)
                await turns()
        assert delays[:4] == [REPEAT_SECONDS_MIN * factor for factor in (1, 2, 4, 8)]
        assert delays[-1] == delays[-2] == REPEAT_SECONDS_MAX
        assert len(delays) == 11
        await log.close()

    run(scenario)


def test_group_that_was_unknown_is_not_taken_back_when_a_repetition_fails() -> None:
    bench = Bench(LOST_AFTER, FAILED, FAILED)

    async def scenario() -> None:
        log = await bench.open()
        futures = [log.append(one("a", b"1")), log.append(one("a", b"2"))]
        for _ in range(2):
            await turns()
            assert not any(future.done() for future in futures)
            bench.home.clock.advance(NS_PER_SECOND)
        assert [(await future).base_offsets for future in futures] == [[1], [2]]
        assert [entry for entry, _ in bench.groups()] == [1, 1, 1, 1]
        await log.close()

    run(scenario)


def test_group_that_failed_at_once_gives_its_numbers_back() -> None:
    bench = Bench(FAILED)

    async def scenario() -> None:
        log = await bench.open()
        futures = [log.append(numbered("p", number)) for number in range(3)]
        assert {type(error) for error in await failures(futures)} == {DiskFullError}
        again = await log.append(numbered("p", 0))
        assert (again.base_offsets, again.entry, again.is_repeated) == ([1], 1, False)
        await log.close()

    run(scenario)


def test_publisher_that_repeats_while_the_outcome_is_unknown_gets_the_same_answer() -> None:
    bench = Bench(LOST_AFTER, LOST)

    async def scenario() -> None:
        log = await bench.open()
        first = log.append(numbered("p", 0))
        await bench.attempts(2)
        second = log.append(numbered("p", 0))
        await turns()
        assert not second.done()
        bench.home.clock.advance(NS_PER_SECOND)
        assert ((await first).is_repeated, (await second).is_repeated) == (False, True)
        assert (await first).base_offsets == (await second).base_offsets == [1]
        assert await payloads(log) == [b"x"]
        await log.close()

    run(scenario)


def test_batches_behind_an_unknown_outcome_queue_up_to_the_limit() -> None:
    bench = Bench(LOST, LOST, log=LogSettings(disk_reserve_bytes=0, write_queue_batches_max=3))

    async def scenario() -> None:
        log = await bench.open()
        futures = [log.append(one("a", b"1"))]
        await bench.attempts(2)
        futures += [log.append(one("a", b"2")), log.append(one("a", b"3"))]
        with pytest.raises(BusyError, match="3 batches"):
            log.append(one("a", b"4"))
        room = asyncio.ensure_future(log.wait_room(MAIN))
        await turns()
        assert not room.done()
        bench.home.clock.advance(NS_PER_SECOND)
        await room
        futures.append(log.append(one("a", b"4")))
        assert [(await future).entry for future in futures] == [1, 2, 3, 4]
        await log.close()

    run(scenario)


def test_rotation_waits_with_its_group_for_an_unknown_outcome() -> None:
    bench = Bench(Fate.STORED, LOST_AFTER, LOST, Fate.STORED, LOST, rule=EVERY_BATCH)

    async def scenario() -> None:
        log = await bench.open()
        futures = [log.append(one("a", b"%d" % number)) for number in range(4)]
        while not futures[-1].done():
            await turns(10)
            if (wake_ns := bench.home.clock.next_wake_ns) is not None:
                bench.home.clock.advance(wake_ns)
        assert [(await future).entry for future in futures] == [1, 2, 3, 4]
        assert log.statistics().shards[0].segments == 4
        log = await bench.home.crash()
        assert not log.recovered.damage
        assert await payloads(log) == [b"0", b"1", b"2", b"3"]
        await log.close()

    run(scenario)


def test_publisher_that_stops_waiting_changes_nothing() -> None:
    bench = Bench(HANGS, LOST_AFTER, LOST)

    async def scenario() -> None:
        log = await bench.open()
        futures = [log.append(one("a", b"%d" % number)) for number in range(2)]
        await bench.attempts(1)
        futures += [log.append(one("a", b"%d" % number)) for number in range(2, 4)]
        futures[0].cancel()
        syncing = asyncio.ensure_future(log.sync())
        await turns()
        syncing.cancel()
        bench.store.tell()
        await bench.attempts(2)
        futures[2].cancel()
        bench.home.clock.advance(NS_PER_SECOND)
        await turns()
        bench.home.clock.advance(NS_PER_SECOND)
        await log.sync()
        assert [future.cancelled() for future in futures] == [True, False, True, False]
        assert await payloads(log) == [b"0", b"1", b"2", b"3"]
        await log.close()

    run(scenario)


def test_checkpoint_that_is_cancelled_while_it_waits_for_a_group_leaves_no_writer_paused() -> None:
    bench = Bench(Fate.STORED, HANGS)

    async def scenario() -> None:
        log = await bench.open()
        await log.append(one("a", b"1"))
        under_way = log.append(one("a", b"2"))
        await bench.attempts(2)
        checkpoint = asyncio.ensure_future(log.checkpoint())
        await turns()
        checkpoint.cancel()
        await asyncio.wait([checkpoint])
        bench.store.tell()
        await under_way
        behind = log.append(one("a", b"3"))
        await turns()
        assert behind.done()
        await log.close()

    run(scenario)


def test_process_that_dies_with_an_unknown_outcome_leaves_the_whole_group_or_nothing() -> None:
    for lost, found in ((LOST, []), (LOST_AFTER, [b"1", b"2"])):
        bench = Bench(lost, LOST)

        async def scenario(bench: Bench = bench, found: list[bytes] = found) -> None:
            log = await bench.open()
            log.append(batch(("a", [b"1", b"2"])))
            await bench.attempts(2)
            log = await bench.home.crash()
            assert not log.recovered.damage
            assert await payloads(log) == found
            done = await log.append(one("a", b"3"))
            assert done.base_offsets == [len(found) + 1]
            await log.close()

        run(scenario)


# --- Giving up ---


@pytest.mark.parametrize("fate", [LOST, LOST_AFTER, HANGS])
def test_dropped_shard_answers_at_once_and_says_what_is_unknown(fate: Fate) -> None:
    bench = Bench(Fate.STORED, fate, *[LOST] * 20)

    async def scenario() -> None:
        log = await bench.open()
        await log.append(one("a", b"0"))
        under_way = log.append(numbered("p", 0))
        await bench.attempts(2)
        await turns()
        queued = log.append(one("a", b"queued"))
        room = asyncio.ensure_future(log.wait_room(MAIN))
        syncing = asyncio.ensure_future(log.sync())
        await turns()
        writer_of(log).drop(MovedError("shard main/0 is elsewhere now"))
        [error] = await failures([under_way])
        assert type(error) is Unavailable
        assert "unknown whether this batch is stored" in str(error)
        assert "elsewhere now" in str(error)
        assert [type(error) for error in await failures([queued])] == [MovedError]
        await syncing
        await room
        with pytest.raises(MovedError):
            log.append(one("a", b"later"))
        with pytest.raises(MovedError):
            await log.reopen(MAIN)  # it would take back what may be stored
        assert (queued_of(log), log.statistics().shards[0].failed_batches) == ((0, 0), 2)
        assert await payloads(log) == [b"0"]
        await turns()
        count = len(bench.store.attempts)
        bench.home.clock.advance(100 * NS_PER_SECOND)
        await turns()
        assert len(bench.store.attempts) == count
        with pytest.raises(MovedError):
            await log.close()
        bench.home.disk = bench.home.disk.restart()
        log = await bench.home.open()
        assert not log.recovered.damage
        assert await payloads(log) == ([b"0", b"x"] if fate is LOST_AFTER else [b"0"])
        again = await log.append(numbered("p", 0))  # a named publisher repeats safely
        assert again.is_repeated == (fate is LOST_AFTER)
        assert again.base_offsets == [2]
        await log.close()

    run(scenario)


def queued_of(log: DiskLog) -> tuple[int, int]:
    shard = log.statistics().shards[0]
    return shard.queued_batches, shard.queued_bytes


def test_dropped_shard_answers_what_waits_for_the_catalogue() -> None:
    bench = Bench()

    async def scenario() -> None:
        log = await bench.open()
        future = log.append(one("a", b"1"))  # its topic has to be recorded first
        await asyncio.sleep(0)
        writer_of(log).drop(MovedError("elsewhere"))
        assert [type(error) for error in await failures([future])] == [MovedError]
        await writer_of(log).wait_idle()
        assert bench.store.attempts == []
        with pytest.raises(MovedError):
            await log.close()

    run(scenario)


def test_dropped_shard_reports_batches_that_no_publisher_waits_for() -> None:
    bench = Bench(HANGS)

    async def scenario() -> None:
        log = await bench.open()
        log.append(one("a", b"1"), Level.RECEIVED)
        await bench.attempts(1)
        writer_of(log).drop(MovedError("elsewhere"))
        with pytest.raises(Unavailable, match="unknown whether"):
            await log.sync()
        with pytest.raises(MovedError):
            await log.close()

    run(scenario)


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_closing_gives_up_an_unknown_outcome_after_a_while(has_checkpoint: bool) -> None:
    bench = Bench(Fate.STORED, *[LOST_AFTER] * 50)

    async def scenario() -> None:
        log = await bench.open()
        await log.append(one("a", b"0"))
        future = log.append(one("a", b"1"))
        await bench.attempts(2)
        behind = log.append(one("a", b"2"))
        checkpoint = asyncio.ensure_future(log.checkpoint()) if has_checkpoint else None
        await turns()
        closing = asyncio.ensure_future(log.close())
        await turns()
        bench.home.clock.advance(round(UNKNOWN_SECONDS_MAX * NS_PER_SECOND) - 1)
        await turns()
        assert not future.done()
        assert not closing.done()
        bench.home.clock.advance(1)
        with pytest.raises(ClosedError):
            await closing
        assert [type(error) for error in await failures([future, behind])] == [
            Unavailable,
            ClosedError,
        ]
        if checkpoint is not None:
            await asyncio.wait([checkpoint])
            checkpoint.exception()
        bench.home.disk = bench.home.disk.restart()
        log = await bench.home.open()
        assert not log.recovered.was_clean
        assert not log.recovered.damage
        assert await payloads(log) == [b"0", b"1"]
        await log.close()

    run(scenario)


def test_closing_waits_for_an_outcome_that_becomes_known() -> None:
    bench = Bench(LOST_AFTER, LOST, HANGS)

    async def scenario() -> None:
        log = await bench.open()
        future = log.append(one("a", b"1"))
        await bench.attempts(2)
        closing = asyncio.ensure_future(log.close())
        await turns()
        bench.home.clock.advance(NS_PER_SECOND)
        await bench.attempts(3)
        bench.store.tell()
        await closing
        assert (await future).base_offsets == [1]
        log = await bench.home.kill()
        assert log.recovered.was_clean
        await log.close()

    run(scenario)


# --- Two steps: durable, then in the segment file ---


class CommittingStore:
    """Makes groups durable by a commit, here a list of rows, and writes them into the segment file afterwards."""

    def __init__(self, inner: GroupStore) -> None:
        self._inner = inner
        self.rows: list[tuple[int, bytes]] = []
        self.may_write = asyncio.Event()
        self._writing = asyncio.Lock()  # one group at a time, in their order

    def store(self, group: BatchGroup) -> asyncio.Future[Outcome]:
        self.rows.append((group.first_entry, b"".join(map(bytes, group.blocks()))))
        committed: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        committed.set_result(Stored(asyncio.ensure_future(self._write(group))))
        return committed

    def abandon(self) -> None:
        self.may_write.set()

    async def _write(self, group: BatchGroup) -> None:
        await self.may_write.wait()
        async with self._writing:
            assert isinstance(await self._inner.store(group), Stored)


def test_durable_group_is_visible_when_it_lies_in_the_segment_file() -> None:
    home = Home()
    made: list[CommittingStore] = []

    def make(shard: ShardId, writer: GroupWriter) -> CommittingStore:
        made.append(CommittingStore(FileGroupStore(shard, writer, home.workers)))
        return made[-1]

    async def scenario() -> None:
        log = await home.open(make)
        first = log.append(one("a", b"0"))
        await until(lambda: made and made[0].rows)
        [store] = made
        store.may_write.set()
        await first
        store.may_write.clear()
        futures = [log.append(one("a", b"1"))]
        await until(lambda: len(store.rows) == 2)
        futures.append(log.append(one("a", b"2")))
        await until(lambda: len(store.rows) == 3)  # the next commit does not wait for the file
        await turns()
        assert not any(future.done() for future in futures)
        assert await payloads(log) == [b"0"]
        store.may_write.set()
        assert [(await future).base_offsets for future in futures] == [[2], [3]]
        assert await payloads(log) == [b"0", b"1", b"2"]
        path = home.shard_files(".segment")[0]
        content = home.content(path)
        position = 64
        for _, row in store.rows:
            assert content[position : position + len(row)] == row
            position += len(row)
        await log.close()

    run(scenario)
