"""Histories that once failed, each told as the behaviour that was missing, and a few of their neighbours."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from runnel.errors import DiskFullError, ReadOnlyError, Unavailable, UnknownTopicError
from runnel.log.log import CursorPosition, Position, ShardId
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk, Kind
from tests.log.images import batch, open_log, payloads, the_path
from tests.log.images import image_of as files_of
from tests.log.samples import last_message, trim_log

ALL = ShardId("all")
BIG = b"x" * 400

Scenario = Callable[[], Coroutine[Any, Any, None]]


def played(scenario: Scenario) -> Callable[[], None]:
    """A scenario is a coroutine; whatever it leaves running dies with its loop, as with a process."""

    def test() -> None:
        asyncio.run(scenario())

    test.__name__ = scenario.__name__
    test.__doc__ = scenario.__doc__
    return test


def drop_everything(*_: object) -> list[tuple[int, int]]:
    return []


# --- The catalogue ---


@played
async def test_cursor_set_in_the_write_that_leads_to_a_snapshot_survives() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk, catalogue_log_bytes_max=1)
    await log.append(batch("a", b"one"))
    await log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=1)])
    disk = _killed(disk)
    assert [cursor.name for cursor in (await open_log(disk)).metadata.cursors.all()] == ["c"]


@played
async def test_definitions_of_subscriptions_survive_crashes_and_snapshots() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk, catalogue_log_bytes_max=300)
    await log.metadata.set_subscription("removed", b"gone")
    for number in range(40):
        await log.metadata.set_subscription(f"work {number % 3}", b"%d" % number)
    await log.metadata.remove_subscription("removed")
    disk.crash()
    log = await open_log(disk.restart())
    assert log.metadata.subscriptions() == {"work 0": b"39", "work 1": b"37", "work 2": b"38"}


@played
async def test_purge_and_deletion_survive_the_snapshots_that_they_lead_to() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk, catalogue_log_bytes_max=1)
    await log.append(batch("a", b"purged"))
    await log.append(batch("b", b"deleted"))
    await log.metadata.purge_topic("a")
    await log.metadata.delete_topic("b")
    log = await open_log(_killed(disk))
    assert await payloads(log, "a") == {}
    with pytest.raises(UnknownTopicError):
        await log.bounds("b", 0)


@played
async def test_snapshot_whose_name_could_not_be_stored_is_not_what_a_restart_reads() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk, catalogue_log_bytes_max=400)
    disk.fail(Kind.SYNC_DIRECTORY, errno.EIO, path=lambda path: path.endswith("metadata"))
    for offset in range(1, 20):
        await log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=offset)])
    [cursor] = (await open_log(_killed(disk))).metadata.cursors.all()
    assert cursor.positions[0].offset == 19


@played
async def test_publishing_works_again_after_a_topic_could_not_be_recorded() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    await log.append(batch("a", b"one"))
    disk.fail(Kind.WRITE, errno.ENOSPC, path=lambda path: "metadata" in path)
    with pytest.raises(DiskFullError):
        await log.append(batch("b", b"refused"))
    await log.append(batch("a", b"two"))
    await log.append(batch("b", b"stored"))
    assert await payloads(log, "b") == {1: b"stored"}


@played
async def test_topic_that_could_not_be_recorded_gets_no_messages_by_way_of_a_later_topic() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    disk.fail(Kind.WRITE, errno.ENOSPC, path=lambda path: "metadata" in path)
    made = asyncio.ensure_future(log.metadata.ensure_topic("a"))
    await asyncio.sleep(0)  # it has begun
    appended = log.append(batch("a", b"refused"))
    with pytest.raises(DiskFullError):
        await made
    with pytest.raises(DiskFullError):
        await appended
    assert (await log.append(batch("a", b"stored"))).base_offsets == [1]


@played
async def test_whoever_waits_for_a_topic_to_be_recorded_may_leave() -> None:
    log = await open_log(FakeDisk(1))
    made = asyncio.ensure_future(log.metadata.ensure_topic("a"))
    await asyncio.sleep(0)  # it has begun
    appended = log.append(batch("a", b"one"))
    made.cancel()
    assert (await appended).base_offsets == [1]


@played
async def test_topic_that_a_damaged_catalogue_forgot_is_there_for_good() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    await log.append(batch("a", b"one"))
    await log.close()
    disk = disk.restart()
    path = the_path(files_of(disk), "/metadata/")
    disk.flip_bit(path, files_of(disk)[path].index(b"topic"), 0)
    log = await open_log(disk)
    assert any(report.startswith(path) for report in log.recovered.damage)
    await log.close()
    log = await open_log(disk.restart())
    assert not log.recovered.damage
    assert await payloads(log, "a") == {1: b"one"}


# --- Numbers ---


@played
async def test_producer_is_known_by_its_last_batch_and_not_by_an_older_record() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    await log.append(batch("a", b"0", producer="p", number=0))
    await log.close()
    log = await open_log(disk := disk.restart())
    await log.append(batch("a", b"1", producer="p", number=1))
    log = await open_log(_killed(disk))
    repeated = await log.append(batch("a", b"1", producer="p", number=1))
    assert repeated.is_repeated
    assert repeated.base_offsets == [2]
    assert (await log.append(batch("a", b"2", producer="p", number=2))).base_offsets == [3]


@played
async def test_entries_are_not_given_again_when_rewriting_dropped_the_last() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    for number in range(3):
        await log.append(batch("a", b"%d" % number))
    await log.close()
    # Segments so small that the one there is not written to again; a snapshot with every record.
    log = await open_log(disk := disk.restart(), segment_bytes_max=100, catalogue_log_bytes_max=1)
    await log._owned.shards[ALL].rewrite(
        lambda key, base, count, *_: [(base, base + 1)] if base < 3 else []
    )
    assert log.shard(ALL).entries().next_offset == 4
    await log.metadata.set_cursor("c", [])
    log = await open_log(_killed(disk))
    assert (await log.append(batch("a", b"next"))).entry == 4


@played
async def test_reader_finds_what_follows_when_all_segments_before_are_gone() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk, segment_bytes_max=500)
    for _ in range(3):
        await log.append(batch("a", BIG))
    await log.close()
    log = await open_log(disk.restart(), segment_bytes_max=400)
    end = (await log.read("a", 0, 1)).next_offset
    await log._owned.shards[ALL].rewrite(drop_everything)
    for number in range(3):
        await log.append(batch("a", b"%d" % number, BIG))
    assert (await payloads(log, "a"))[end] == b"0"


@played
async def test_offsets_of_damaged_messages_at_the_end_are_not_given_again() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    for payload in (b"one", b"two", b"three"):
        await log.append(batch("a", payload))
    disk = _killed(disk)
    path = the_path(files_of(disk), ".segment")
    disk.flip_bit(path, files_of(disk)[path].index(b"three"), 0)
    log = await open_log(disk)
    assert any(report.startswith(path) for report in log.recovered.damage)
    assert await payloads(log, "a") == {1: b"one", 2: b"two"}
    await log.close()
    log = await open_log(disk.restart())
    appended = await log.append(batch("a", b"four"))
    assert appended.base_offsets[0] > 3
    assert appended.entry > 3


@played
async def test_messages_on_their_way_to_a_deleted_topic_stay_hidden_in_its_follower() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    await log.append(batch("a", b"deleted"))
    deleting = asyncio.ensure_future(log.metadata.delete_topic("a"))
    await asyncio.sleep(0)
    late = log.append(batch("a", b"on its way"))
    await deleting
    await late
    await log.append(batch("a", b"of the follower"))
    assert await payloads(log, "a") == {3: b"of the follower"}
    log = await open_log(_killed(disk))
    assert await payloads(log, "a") == {3: b"of the follower"}


# --- Failures ---


@played
async def test_refused_batch_does_not_come_back_beside_the_one_stored_instead() -> None:
    for seed in range(30):
        disk = FakeDisk(seed)
        log = await open_log(disk, segment_bytes_max=1_200)
        await log.append(batch("a", BIG))
        # Too large for the segment: a new one is begun, written, and cannot be synced.
        disk.fail(Kind.SYNC, errno.EIO, path=lambda path: path.endswith("2-0.segment"), skip=1)
        with pytest.raises(ReadOnlyError):
            await log.append(batch("a", b"refused", BIG))
        await log.reopen(ALL)
        await log.append(batch("a", b"stored"))
        disk.crash()
        log = await open_log(disk.restart())
        assert await payloads(log, "a") == {1: BIG, 2: b"stored"}


@played
async def test_nothing_of_a_group_that_found_no_room_is_there_after_a_kill() -> None:
    for seed in range(30):
        disk = FakeDisk(seed)
        log = await open_log(disk)
        await log.append(batch("a", b"one"))
        disk.fail(Kind.WRITE, errno.ENOSPC, path=lambda path: path.endswith(".segment"))
        appended = [log.append(batch("a", b"%d" % number)) for number in range(10)]
        outcomes = await asyncio.gather(*appended, return_exceptions=True)
        assert all(isinstance(outcome, DiskFullError) for outcome in outcomes)
        log = await open_log(_killed(disk))
        assert await payloads(log, "a") == {1: b"one"}


@played
async def test_journal_whose_name_could_not_be_synced_at_first_is_found_later() -> None:
    for seed in range(20):
        disk = FakeDisk(seed)
        log = await open_log(disk)
        disk.fail(Kind.SYNC_DIRECTORY, errno.EIO, path=lambda path: path.endswith("all"))
        with pytest.raises(Unavailable):
            await log.append(batch("a", b"refused"))
        await log.reopen(ALL)
        await log.append(batch("a", b"stored"))
        disk.crash()
        log = await open_log(disk.restart())
        assert await payloads(log, "a") == {1: b"stored"}


@played
async def test_closing_answers_everyone_though_the_catalogue_cannot_be_written() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    await log.append(batch("a", b"one"))
    disk.fail(Kind.WRITE, errno.EIO, path=lambda path: "metadata" in path, times=None)
    appended = [log.append(batch("a", b"two")), log.append(batch("b", b"three"))]
    with pytest.raises(Unavailable):
        await log.close()
    assert all(future.done() for future in appended)
    for future in appended:
        future.exception()
    disk.heal()
    assert 1 in await payloads(await open_log(disk.restart()), "a")


@played
async def test_retention_makes_room_though_the_catalogue_has_none() -> None:
    disk, clock = FakeDisk(1), VirtualClock()
    log = await open_log(disk, clock=clock, segment_bytes_max=500, age_ns=10**9, last_value=True)
    for topic in ("a", "a", "b", "c"):
        await log.append(batch(topic, BIG))
    clock.advance(10**10)
    disk.fail(Kind.WRITE, errno.ENOSPC, path=lambda path: "catalogue" in path, times=None)
    # The first holds no last value; the active one has an end that cannot be recorded.
    assert (await trim_log(log)).segments_removed == 1
    disk.heal()
    assert (await trim_log(log)).segments_removed == 3
    last = await last_message(log, "a", 0)
    assert last is not None
    assert [message.offset for message in last] == [2]


# --- Reading ---


@played
async def test_shard_of_a_topic_without_messages_can_be_read_after_a_restart() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    await log.metadata.ensure_topic("a")
    await log.close()
    log = await open_log(disk.restart())
    assert log.shard(ALL).entries().next_offset == 1
    assert not (await log.read_shard(ALL, Position(0, 1))).found


@played
async def test_reading_goes_on_with_a_damaged_index_on_a_full_disk() -> None:
    disk = FakeDisk(1)
    log = await open_log(disk)
    await log.append(batch("a", b"one"))
    await log.close()
    disk = disk.restart()
    path = the_path(files_of(disk), ".index")
    log = await open_log(disk, segment_bytes_max=100)
    disk.flip_bit(path, len(files_of(disk)[path]) // 2, 0)
    disk.fail(Kind.CREATE, errno.ENOSPC, path=lambda path: ".index" in path, times=None)
    assert await payloads(log, "a") == {1: b"one"}


def _killed(disk: FakeDisk) -> FakeDisk:
    disk.kill()
    return disk.restart()
