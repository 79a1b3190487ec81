"""What only the memory store does: it forgets, and it never holds more than it may."""

from __future__ import annotations

import tracemalloc

import pytest

from runnel.config import Keep, LogSettings, Pin, Retain, Settings, TopicRule
from runnel.errors import ClientFault, ClosedError, OffsetGoneError
from runnel.formats import block
from runnel.log.log import CursorPosition, Level, Position, ShardId
from runnel.log.memory import MemoryLog
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.log.home import run
from tests.log.samples import batch, one, read_all, read_offsets, read_payloads, trim_log

M = ShardId("m")
IN_MEMORY = TopicRule(match="*", keep=Keep.MEMORY, journal="m")


def made(
    rule: TopicRule = IN_MEMORY,
    *,
    bytes_max: int = 10**6,
    clock: VirtualClock | None = None,
    journal_shards: int = 1,
) -> MemoryLog:
    log = LogSettings(memory_journal_bytes_max=bytes_max, journal_shards=journal_shards)
    return MemoryLog(
        settings=Settings(log=log),
        policies=Policies([rule]),
        clock=clock or VirtualClock(),
    )


def rule(retain: Retain | None = None, pin: Pin | None = None) -> TopicRule:
    return TopicRule(
        match="*", keep=Keep.MEMORY, journal="m", retain=retain or Retain(), pin=pin or Pin()
    )


def stored_bytes(log: MemoryLog) -> int:
    return log.statistics().shards[0].stored_bytes


def test_it_is_a_log_for_memory_topics_and_no_others() -> None:
    async def scenario() -> None:
        log = made(TopicRule(match="m/*", keep=Keep.MEMORY))
        done = await log.append(one("m/a", b"1"), Level.STORED)
        assert done.level is Level.RECEIVED
        with pytest.raises(ClientFault, match="keep = disk; this log is for memory"):
            log.append(one("elsewhere", b"1"))
        assert log.metadata.topics.names() == ["m/a"]

    run(scenario)


def test_log_made_anew_begins_at_1_in_a_higher_epoch_and_old_positions_are_gone() -> None:
    async def scenario() -> None:
        clock = VirtualClock()
        first = made(clock=clock)
        for number in range(5):
            await first.append(one("a", b"old %d" % number))
        position = (await first.read_shard(M, Position(first.shard(M).epoch, 3))).next_position
        clock.advance(1)
        second = made(clock=clock)
        for number in range(9):
            assert (await second.append(one("a", b"new"))).base_offsets == [number + 1]
        assert second.shard(M).epoch > first.shard(M).epoch
        for stale in (
            position,
            Position(first.shard(M).epoch, 1),
            Position(first.shard(M).epoch, 100),
        ):
            with pytest.raises(OffsetGoneError) as raised:
                await second.read_shard(M, stale)
            assert raised.value.first_offset == 1
            assert raised.value.gap >= 0
        page = await second.read_shard(M, Position(second.shard(M).epoch, 1))
        assert len(read_payloads(page)) == 9

    run(scenario)


def test_epoch_can_be_given() -> None:
    async def scenario() -> None:
        log = MemoryLog(
            settings=Settings(), policies=Policies([IN_MEMORY]), clock=VirtualClock(), epoch=42
        )
        assert (await log.append(one("a", b"1"))).epoch == log.shard(M).epoch == 42

    run(scenario)


def test_without_retention_the_oldest_go_at_the_bound_and_readers_are_told() -> None:
    async def scenario() -> None:
        log = made(bytes_max=50_000)
        most = 0
        for number in range(200):
            await log.append(one("a", b"%03d" % number * 300))
            most = max(most, stored_bytes(log))
        assert 40_000 < most <= 50_000
        bounds = await log.bounds("a", 0)
        assert bounds.next_offset == 201
        assert 40 <= bounds.next_offset - bounds.first_offset <= 50
        with pytest.raises(OffsetGoneError) as raised:
            await log.read("a", 0, 1)
        assert raised.value.gap == bounds.first_offset - 1
        messages = await read_all(log, "a", bounds.first_offset)
        assert [message.offset for message in messages] == list(range(bounds.first_offset, 201))
        trimmed = await trim_log(log)
        assert trimmed.segments_removed == bounds.first_offset - 1  # told by the next round
        assert trimmed.bytes_removed > 100_000
        assert (await trim_log(log)).segments_removed == 0

    run(scenario)


def test_batch_larger_than_the_bound_is_kept_until_the_next_comes() -> None:
    async def scenario() -> None:
        log = made(bytes_max=1000)
        await log.append(one("a", b"x" * 5000))
        assert read_offsets(await log.read("a", 0, 1)) == [1]
        await log.append(one("a", b"y"))
        assert read_offsets(await log.read("a", 0, 2)) == [2]
        assert stored_bytes(log) < 1000

    run(scenario)


def test_holds_keep_more_than_retention_but_never_more_than_the_bound() -> None:
    async def scenario() -> None:
        log = made(rule(Retain(bytes_max=5000), Pin(bytes_max=None)), bytes_max=20_000)
        await log.metadata.set_cursor("slow", [CursorPosition(topic="a", offset=1)])
        for _ in range(10):
            await log.append(one("a", b"x" * 1000))
        assert list((await trim_log(log)).holds_passed) == []
        assert stored_bytes(log) > 10_000
        for _ in range(50):
            await log.append(one("a", b"x" * 1000))
            assert stored_bytes(log) <= 20_000
        assert list((await trim_log(log)).holds_passed) == ["slow"]
        assert (await trim_log(log)).holds_passed == []

    run(scenario)


def test_retention_above_the_bound_counts_as_the_bound() -> None:
    async def scenario() -> None:
        log = made(rule(Retain(bytes_max=30_000)), bytes_max=10_000)
        for _ in range(60):
            await log.append(one("a", b"x" * 1000))
        assert 20_000 < stored_bytes(log) <= 30_000

    run(scenario)


def test_blocks_have_the_form_that_they_have_in_a_file_with_nothing_durable() -> None:
    async def scenario() -> None:
        log = made()
        await log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"])))
        [found] = (await log.read("b", 0, 1)).found
        assert found.block.readonly
        header = block.read_header(found.block)
        assert header.durable_position == 0
        assert header.block_bytes == len(found.block)

    run(scenario)


def test_purging_frees_memory_at_once() -> None:
    async def scenario() -> None:
        log = made()
        for _ in range(10):
            await log.append(one("a", b"x" * 1000))
        await log.append(one("b", b"y"))
        await log.metadata.purge_topic("a")
        assert stored_bytes(log) < 1000
        assert log.shard(M).entries().first_offset == 11
        assert read_payloads(await log.read("b", 0, 1)) == [b"y"]

    run(scenario)


def test_what_has_gone_leaves_no_memory_behind() -> None:
    async def scenario() -> None:
        log = made(bytes_max=100_000)
        sent = one("a", b"x" * 1000)
        for _ in range(300):
            await log.append(sent)
        tracemalloc.start()
        try:
            for _ in range(3000):
                await log.append(sent)
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert grown < 300_000

    run(scenario)


def test_closed_log_has_let_go_of_everything() -> None:
    async def scenario() -> None:
        log = made()
        await log.append(one("a", b"1"))
        await log.close()
        assert log.shards() == []
        with pytest.raises(ClosedError):
            log.shard(M)

    run(scenario)


@pytest.mark.parametrize("shards", [1, 4, 64])
def test_bound_is_of_the_journal_and_the_oldest_of_all_its_shards_go(shards: int) -> None:
    async def scenario() -> None:
        clock = VirtualClock()
        log = made(bytes_max=20_000, clock=clock, journal_shards=shards)
        topics = [f"t{number}" for number in range(20)]
        await log.append(one(topics[0], b"first"))
        await log.metadata.set_cursor("c", [CursorPosition(topic=topics[0], offset=1)])
        for number in range(400):
            clock.advance(1)
            await log.append(one(topics[number % 20], bytes(100)))
            assert sum(each.stored_bytes for each in log.statistics().shards) <= 20_000
        left = [
            bounds.next_offset - bounds.first_offset
            for bounds in [await log.bounds(topic, 0) for topic in topics]
        ]
        assert max(left) - min(left) <= 1  # they were sent in turns
        trimmed = [await log.trim_shard(shard) for shard in log.shards()]
        removed = sum(each.segments_removed for each in trimmed)
        assert removed == 401 - sum(left)
        assert [each.holds_passed for each in trimmed if each.holds_passed] == [["c"]]

    run(scenario)
