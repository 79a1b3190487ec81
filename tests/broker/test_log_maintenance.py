"""Retention, reopening and looking after the logs, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest

from runnel.broker.log_maintenance import LogMaintenance, report_recovery
from runnel.broker.monitoring.events import Events
from runnel.broker.monitoring.store_statistics import StoreStatistics
from runnel.config import Keep, LogSettings, Pin, Retain, Rotate, Settings, TopicRule
from runnel.errors import ReadOnlyError
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import (
    Capabilities,
    CursorPosition,
    Level,
    LogStatistics,
    Position,
    Recovered,
    ShardId,
    ShardStatistics,
    Store,
    Trimmed,
)
from runnel.log.memory import MemoryLog
from runnel.topics.policies import Difference, Policies
from tests.broker.fake_publisher import FakePublisher, settle
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import Kind
from tests.log.home import Home
from tests.log.samples import one

SECOND_NS = 1_000_000_000
PLAIN = LogSettings(allocate_bytes=0, disk_reserve_bytes=0)
# Every batch a segment; two of them stay.
SMALL = TopicRule(
    match="*", journal="main", rotate=Rotate(bytes_max=1), retain=Retain(bytes_max=600)
)


class House:
    """Log maintenance at work, what it tells, and its clock."""

    def __init__(
        self,
        logs: Mapping[str, Store],
        clock: VirtualClock,
        settings: Settings | None = None,
    ) -> None:
        self.clock = clock
        self.published = FakePublisher()
        self.events = Events(clock, self.published.publish)
        self.keeping = LogMaintenance(
            settings or Settings(log=PLAIN),
            clock,
            logs,
            StoreStatistics(logs, clock),
            self.events,
        )

    async def pass_time(self, seconds: int) -> None:
        """Second by second, so that each look falls on its time."""
        for _ in range(seconds):
            self.clock.advance(SECOND_NS)
            await settle()

    def told(self, kind: str) -> list[str]:
        return [event["subject"] for event in self.published.events(kind)]


@asynccontextmanager
async def house(
    logs: Mapping[str, Store], clock: VirtualClock, settings: Settings | None = None
) -> AsyncIterator[House]:
    kept = House(logs, clock, settings)
    running = asyncio.get_running_loop().create_task(kept.keeping.run())
    await settle(5)
    try:
        yield kept
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait({running})


@asynccontextmanager
async def disk_house(home: Home) -> AsyncIterator[tuple[House, DiskLog]]:
    log = await home.open()
    try:
        async with house({"disk": log}, home.clock, home.settings) as kept:
            yield kept, log
    finally:
        await log.close()


class FakeLog(MemoryLog):
    """A log whose troubles a test arranges."""

    def __init__(self, *shards: str) -> None:
        self.clock = VirtualClock()
        super().__init__(settings=Settings(), policies=Policies(), clock=self.clock)
        self.names = [ShardId(name) for name in shards]
        self.segments = dict.fromkeys(self.names, 1)
        self.read_only: set[ShardId] = set()
        self.damage: list[str] = []
        self.unreadable: set[ShardId] = set()

    def shards(self) -> list[ShardId]:
        return self.names

    async def trim_shard(self, shard: ShardId) -> Trimmed:
        if shard in self.unreadable:
            raise OSError(errno.EIO, "bad sector")
        return Trimmed(1, 100)

    def statistics(self) -> LogStatistics:
        shards = [
            ShardStatistics(
                name, 0, 0, 0, 0, self.segments[name], 0, 0, 0, 0, 0, 0, name in self.read_only
            )
            for name in self.names
        ]
        return LogStatistics(topics=0, shards=shards, open_files=0, damage=list(self.damage))


class FakeDiskLog(FakeLog):
    """One that can be reopened, as often as its disk allows."""

    def __init__(self, *shards: str) -> None:
        super().__init__(*shards)
        self.tries: list[tuple[int, ShardId]] = []
        self.broken: set[ShardId] = set()
        self.hanging: set[ShardId] = set()
        self.released = asyncio.Event()  # those that hang, hang until then

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, is_reopenable=True)

    async def reopen(self, shard: ShardId) -> Sequence[str]:
        self.tries.append((self.clock.monotonic_ns() // SECOND_NS, shard))
        if shard in self.hanging:
            await self.released.wait()
        if shard in self.broken:
            raise OSError(errno.EIO, "the disk is still bad")
        self.read_only.discard(shard)
        return ()


# --- Retention ---


def test_retention_is_applied_at_its_interval_and_reported() -> None:
    home = Home(SMALL, log=PLAIN)

    async def scenario() -> None:
        async with disk_house(home) as (kept, log):
            for _ in range(10):
                await log.append(one("a", bytes(100)))
            await kept.pass_time(9)
            assert (await log.bounds("a", 0)).first_offset == 1
            await kept.pass_time(1)
            first = (await log.bounds("a", 0)).first_offset
            assert first > 1
            (event,) = kept.published.events("retention")
            assert event["segments_removed"] == first - 1
            assert event["bytes_removed"] > 100 * (first - 1)
            await kept.pass_time(10)
            assert (
                len(kept.published.events("retention")) == 1
            )  # nothing more to do, nothing to tell

    asyncio.run(scenario())


def test_retention_in_memory_is_applied_too() -> None:
    async def scenario() -> None:
        clock = VirtualClock()
        rule = TopicRule(match="*", keep=Keep.MEMORY, retain=Retain(age_ns=5 * SECOND_NS))
        log = MemoryLog(settings=Settings(), policies=Policies((rule,)), clock=clock)
        await log.append(one("a", b"x"))
        async with house({"memory": log}, clock) as kept:
            await kept.pass_time(10)
            assert kept.told("retention") == ["*/0"]
            assert log.statistics().shards[0].stored_bytes == 0
            assert not kept.published.events("segment_rotated")

    asyncio.run(scenario())


def test_round_that_fails_is_reported_and_the_next_tries_again() -> None:
    async def scenario() -> None:
        log, other, clock = FakeLog("a"), FakeLog("b"), VirtualClock()
        log.unreadable = {ShardId("a")}
        async with house({"disk": log, "memory": other}, clock) as kept:
            await kept.pass_time(10)
            (event,) = kept.published.events("retention_failed")
            assert event["subject"] == "a/0"
            assert "bad sector" in event["error"]
            assert kept.told("retention") == ["b/0"]  # one log stops no other
            log.unreadable = set()
            await kept.pass_time(10)
            assert kept.told("retention") == ["b/0", "a/0", "b/0"]

    asyncio.run(scenario())


def test_one_failing_shard_does_not_keep_the_others_from_retention() -> None:
    async def scenario() -> None:
        log, clock = FakeLog("a", "b", "c"), VirtualClock()
        log.unreadable = {ShardId("b")}
        async with house({"disk": log}, clock) as kept:
            await kept.pass_time(10)
            assert kept.told("retention") == ["a/0", "c/0"]
            assert kept.told("retention_failed") == ["b/0"]

    asyncio.run(scenario())


def test_cursor_whose_hold_was_passed_is_named_with_what_it_lost() -> None:
    rule = TopicRule(
        match="*",
        journal="main",
        rotate=Rotate(bytes_max=1),
        retain=Retain(bytes_max=600),
        pin=Pin(bytes_max=800),
    )
    home = Home(rule, log=PLAIN)

    async def scenario() -> None:
        async with disk_house(home) as (kept, log):
            for _ in range(10):
                await log.append(one("a", bytes(100)))
            (shard,) = log.shards()
            epoch = log.shard(shard).epoch
            await log.metadata.set_cursor("by-offset", [CursorPosition(topic="a", offset=2)])
            await log.metadata.set_cursor(
                "by-shard",
                [CursorPosition(shard=shard, position=Position(epoch, 1), patterns=("*",))],
            )
            await log.metadata.set_cursor("in-time", [CursorPosition(topic="a", offset=11)])
            await kept.pass_time(10)
            first = (await log.bounds("a", 0)).first_offset
            by_offset, by_shard = kept.published.events("pin_passed")
            assert by_offset["subject"] == "by-offset"
            assert by_offset["messages_lost"] == first - 2 > 0
            assert by_offset["places"] == [
                {
                    "topic": "a",
                    "partition": 0,
                    "shard": None,
                    "at": 2,
                    "first": first,
                    "lost": first - 2,
                }
            ]
            assert by_shard["subject"] == "by-shard"
            assert by_shard["entries_lost"] == first - 1
            assert by_shard["places"][0]["shard"] == "main/0"

    asyncio.run(scenario())


# --- Shards that a failed sync closed ---


def test_read_only_shard_is_reopened_and_both_are_reported() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        async with disk_house(home) as (kept, log):
            await log.append(one("a", b"1"))
            home.disk.fail(Kind.SYNC, errno.EIO, path=lambda path: path.endswith(".segment"))
            with pytest.raises(ReadOnlyError):
                await log.append(one("a", b"2"))
            await kept.pass_time(1)
            assert kept.told("shard_read_only") == ["main/0"]
            with pytest.raises(ReadOnlyError):
                log.append(one("a", b"3"), Level.RECEIVED)
            await kept.pass_time(1)
            (event,) = kept.published.events("shard_reopened")
            assert (event["subject"], event["tries"]) == ("main/0", 1)
            assert event["closed_for_ns"] == SECOND_NS
            assert (await log.append(one("a", b"4"))).base_offsets == [2]
            await kept.pass_time(5)
            assert len(kept.published.events("shard_reopened")) == 1
            assert len(kept.published.events("shard_read_only")) == 1

    asyncio.run(scenario())


def test_disk_that_stays_broken_is_tried_again_after_longer_and_longer_times() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        async with disk_house(home) as (kept, log):
            await log.append(one("a", b"1"))
            home.disk.fail(
                Kind.SYNC, errno.EIO, path=lambda path: path.endswith(".segment"), times=4
            )
            with pytest.raises(ReadOnlyError):
                await log.append(one("a", b"2"))
            await kept.pass_time(20)
            failed = kept.published.events("shard_reopen_failed")
            assert [event["tries"] for event in failed] == [1, 2, 3]
            assert [event["next_try_in_ns"] // SECOND_NS for event in failed] == [1, 2, 4]
            (event,) = kept.published.events("shard_reopened")
            assert event["tries"] == 4
            assert event["closed_for_ns"] == 8 * SECOND_NS
            assert (await log.append(one("a", b"3"))).base_offsets == [2]

    asyncio.run(scenario())


def test_longest_time_between_tries_is_a_minute() -> None:
    async def scenario() -> None:
        log = FakeDiskLog("a")
        log.read_only = log.broken = {ShardId("a")}
        async with house({"disk": log}, log.clock) as kept:
            await kept.pass_time(250)
            seconds = [second for second, _ in log.tries]
            waits = [after - before for before, after in pairwise(seconds)]
            assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    asyncio.run(scenario())


def test_shard_that_cannot_be_reopened_keeps_no_other_from_it() -> None:
    async def scenario() -> None:
        log = FakeDiskLog("broken", "hanging", "well")
        log.read_only = set(log.names)
        log.broken, log.hanging = {ShardId("broken")}, {ShardId("hanging")}
        async with house({"disk": log}, log.clock) as kept:
            await kept.pass_time(2)
            assert kept.told("shard_reopened") == ["well/0"]
            assert kept.told("shard_reopen_failed") == ["broken/0"]
            await kept.pass_time(30)
            assert sum(shard == ShardId("hanging") for _, shard in log.tries) == 1  # under way
            assert len(kept.published.events("retention")) == 9  # three rounds, three shards
            log.released.set()
            await settle()
            assert kept.told("shard_reopened") == ["well/0", "hanging/0"]

    asyncio.run(scenario())


def test_reopening_that_is_under_way_is_finished_before_maintenance_ends() -> None:
    async def scenario() -> None:
        log = FakeDiskLog("a")
        log.read_only = log.hanging = {ShardId("a")}
        kept = House({"disk": log}, log.clock)
        running = asyncio.get_running_loop().create_task(kept.keeping.run())
        await settle(5)
        await kept.pass_time(2)
        assert log.tries
        running.cancel()
        await settle()
        assert not running.done()
        log.released.set()
        await asyncio.wait({running})
        assert running.cancelled()

    asyncio.run(scenario())


def test_only_some_shards_are_reopened_at_a_time() -> None:
    async def scenario() -> None:
        log = FakeDiskLog(*(f"j{number}" for number in range(20)))
        log.read_only = set(log.names)
        async with house({"disk": log}, log.clock) as kept:
            await kept.pass_time(2)
            assert len(log.tries) == 8
            await kept.pass_time(2)
            assert len(log.tries) == 20
            assert len(kept.told("shard_reopened")) == 20
            assert not log.read_only

    asyncio.run(scenario())


def test_shard_that_somebody_else_reopened_is_left_alone() -> None:
    async def scenario() -> None:
        log = FakeDiskLog("a")
        log.read_only = {ShardId("a")}
        async with house({"disk": log}, log.clock) as kept:
            await kept.pass_time(1)
            log.read_only = set()
            await kept.pass_time(5)
            assert not log.tries

    asyncio.run(scenario())


# --- Damage and rotation ---


def test_damage_found_while_running_is_reported_once() -> None:
    async def scenario() -> None:
        log, clock = FakeDiskLog("a"), VirtualClock()
        log.damage = ["known at the start"]
        async with house({"disk": log}, clock) as kept:
            await kept.pass_time(2)
            assert not kept.published.events("damage")
            log.damage.append("data/a.segment:4096: checksum\udcff")
            await kept.pass_time(3)
            assert kept.told("damage") == ["data/a.segment:4096: checksum\\udcff"]

    asyncio.run(scenario())


def test_rotation_is_reported() -> None:
    home = Home(TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1)), log=PLAIN)

    async def scenario() -> None:
        async with disk_house(home) as (kept, log):
            await log.append(one("a", b"1"))
            await kept.pass_time(1)
            assert not kept.told("segment_rotated")
            await log.append(one("a", b"2"))
            await kept.pass_time(3)
            (event,) = kept.published.events("segment_rotated")
            assert (event["subject"], event["segments"]) == ("main/0", 2)

    asyncio.run(scenario())


# --- Recovery ---


def test_clean_start_has_nothing_to_tell() -> None:
    kept = House({}, VirtualClock())
    report_recovery(kept.events, "disk", Recovered(True, (), (), ()))
    assert not kept.published.seen


def test_what_recovery_found_is_reported() -> None:
    kept = House({}, VirtualClock())
    differences = [
        Difference(topic="a", key="keep", recorded="disk", now="memory", rule="a*"),
        Difference(topic="a", key="journal", recorded="main", now="a*", rule="a*"),
    ]
    report_recovery(kept.events, "disk", Recovered(False, ["x:7: torn"], (), differences))
    (recovered,) = kept.published.events("recovered")
    assert recovered["torn"] == ["x:7: torn"]
    assert (recovered["torn_count"], recovered["damage_count"]) == (1, 0)
    (differs,) = kept.published.events("policy_differs")
    assert differs["subject"] == "a"
    assert "keep = disk" in differs["text"]
    assert "journal = main" in differs["text"]


def test_events_held_back_are_summed_up_by_maintenance() -> None:
    async def scenario() -> None:
        log, clock = FakeDiskLog("a"), VirtualClock()
        async with house({"disk": log}, clock) as kept:
            log.damage = [f"place {number}" for number in range(130)]
            await kept.pass_time(1)
            assert len(kept.told("damage")) == 100
            await kept.pass_time(1)
            assert kept.published.events("damage")[-1]["suppressed"] == 30

    asyncio.run(scenario())


def test_retention_over_several_shards_is_told_by_the_shard_that_lost_segments() -> None:
    rule = TopicRule(
        match="*", journal="main", rotate=Rotate(bytes_max=1), retain=Retain(bytes_max=3000)
    )
    home = Home(rule, log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0, journal_shards=4))

    async def scenario() -> None:
        async with disk_house(home) as (kept, log):
            for number in range(60):
                home.clock.advance(1)
                await log.append(one(f"t{number % 10}", bytes(100)))
            before = {each.shard: each.segments for each in log.statistics().shards}
            assert len(before) == 4
            await kept.pass_time(20)
            told = dict.fromkeys(kept.told("retention"), 0)
            for event in kept.published.events("retention"):
                told[event["subject"]] += event["segments_removed"]
            after = {each.shard: each.segments for each in log.statistics().shards}
            assert told == {str(shard): before[shard] - after[shard] for shard in before}
            assert sum(each.stored_bytes for each in log.statistics().shards) <= 3000
            reading = StoreStatistics({"disk": log}, home.clock).read()
            assert reading.journals["main"].shards == 4
            stored = sum(each.stored_bytes for each in log.statistics().shards)
            assert reading.peaks["disk"].stored_bytes == stored

    asyncio.run(scenario())
