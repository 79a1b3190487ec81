"""Appending: numbers, order, levels, refusals."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import Keep, LimitSettings, TopicRule
from runnel.errors import (
    ClientFault,
    InvalidNameError,
    LimitExceededError,
    UnknownTopicError,
)
from runnel.log.log import Level, OffsetBounds, Position, ShardId
from tests.log.contract.stores import LOG, At, Store, scenario
from tests.log.samples import batch, one, read_offsets, read_payloads

MAIN = ShardId("main")


@scenario()
async def test_messages_of_a_partition_are_numbered_from_1(at: At) -> None:
    assert (await at.log.append(one("a", b"1", b"2"))).base_offsets == [1]
    assert (await at.log.append(one("a", b"3"))).base_offsets == [3]
    assert (await at.log.append(one("a", b"4", b"5"))).base_offsets == [4]
    assert read_offsets(await at.log.read("a", 0, 1)) == [1, 2, 3, 4, 5]


@scenario(TopicRule(match="p", partitions=3, journal="main"))
async def test_every_topic_and_partition_counts_for_itself(at: At) -> None:
    done = await at.log.append(batch(("a", [b"1"]), ("p", [b"2"], 1), ("p", [b"3"], 2)))
    assert done.base_offsets == [1, 1, 1]
    done = await at.log.append(batch(("p", [b"4", b"5"], 2), ("b", [b"6"])))
    assert done.base_offsets == [2, 1]
    assert await at.log.bounds("p", 0) == OffsetBounds(1, 1)
    assert await at.log.bounds("p", 2) == OffsetBounds(1, 4)


@scenario()
async def test_runs_of_one_topic_in_a_batch_follow_each_other(at: At) -> None:
    done = await at.log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"]), ("a", [b"4"])))
    assert done.base_offsets == [1, 1, 3]
    page = await at.log.read("a", 0, 1)
    assert read_payloads(page) == [b"1", b"2", b"4"]
    assert page.next_offset == 4


@scenario()
async def test_answer_tells_entry_epoch_and_time(at: At) -> None:
    first = await at.log.append(one("a", b"1"))
    at.clock.advance(5)
    second = await at.log.append(one("b", b"2"))
    assert (first.entry, second.entry) == (1, 2)
    assert first.epoch == second.epoch > 0
    assert second.receive_time_ns == first.receive_time_ns + 5 == at.clock.time_ns()
    assert not first.is_repeated


@scenario()
async def test_order_of_calls_is_order_in_the_shard_and_of_answers(at: At) -> None:
    answered: list[int] = []
    futures = [at.log.append(one("a", b"%d" % number)) for number in range(50)]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: answered.append(number))  # type: ignore[misc]
    done = await asyncio.gather(*futures)
    assert [answer.entry for answer in done] == list(range(1, 51))
    await at.log.sync()
    await asyncio.sleep(0)  # callbacks of futures that were done at once come with the next turn
    assert answered == list(range(50))
    assert read_payloads(await at.log.read("a", 0, 1)) == [b"%d" % number for number in range(50)]


@scenario()
async def test_answer_says_how_safe_the_batch_is(at: At) -> None:
    assert (await at.log.append(one("a", b"1"))).level is at.best_level
    assert (await at.log.append(one("a", b"2"), Level.STORED)).level is at.best_level
    assert (await at.log.append(one("a", b"3"), Level.RECEIVED)).level is Level.RECEIVED
    assert (await at.log.append(one("a", b"4"), Level.NONE)).level is Level.NONE
    await at.log.sync()
    assert read_payloads(await at.log.read("a", 0, 1)) == [b"1", b"2", b"3", b"4"]


@scenario()
async def test_weaker_levels_are_answered_at_once(at: At) -> None:
    assert at.log.append(one("a", b"1"), Level.RECEIVED).done()
    assert at.log.append(one("a", b"2"), Level.NONE).done()


@scenario()
async def test_batch_on_disk_is_visible_only_once_it_is_stored(at: At) -> None:
    await at.log.append(one("a", b"1"))
    future = at.log.append(one("a", b"2"), Level.RECEIVED)
    seen = (await at.log.bounds("a", 0)).next_offset
    assert seen == (3 if at.store is Store.MEMORY else 2)
    assert (await future).base_offsets == [2]
    await at.log.sync()
    assert (await at.log.bounds("a", 0)).next_offset == 3


@scenario()
async def test_sync_waits_for_everything_appended_so_far(at: At) -> None:
    futures = [at.log.append(one(f"t{number}", b"x")) for number in range(20)]
    await at.log.sync()
    assert all(future.done() for future in futures)


@scenario()
async def test_whoever_stops_waiting_changes_nothing_for_the_others(at: At) -> None:
    futures = [at.log.append(one("a", b"%d" % number)) for number in range(10)]
    for future in futures[::2]:
        future.cancel()
    done = await asyncio.gather(*futures[1::2])
    if at.store is not Store.MEMORY:  # there they were answered before
        assert [answer.base_offsets for answer in done] == [[2], [4], [6], [8], [10]]
    await at.log.sync()
    assert read_offsets(await at.log.read("a", 0, 1)) == list(range(1, 11))


@scenario()
async def test_receive_time_does_not_go_back_when_the_wall_clock_does(at: At) -> None:
    first = await at.log.append(one("a", b"1"))
    at.clock.step_wall(-(10**12))
    second = await at.log.append(one("b", b"2"))
    assert second.receive_time_ns == first.receive_time_ns
    at.clock.step_wall(10**12 + 7)
    third = await at.log.append(one("a", b"3"))
    assert third.receive_time_ns == first.receive_time_ns + 7


# --- Refusals ---


@scenario(TopicRule(match="p", partitions=2, journal="main"), TopicRule(match="far/*"))
async def test_refused_run_refuses_the_whole_batch_and_is_named(at: At) -> None:
    await at.log.append(batch(("a", [b"1"]), ("p", [b"2"])))
    with pytest.raises(InvalidNameError, match=r"run 1: .*control character"):
        at.log.append(batch(("a", [b"x"]), ("b\n", [b"x"])))
    with pytest.raises(UnknownTopicError, match="run 1: topic 'p' has partitions 0 to 1, not 2"):
        at.log.append(batch(("a", [b"x"]), ("p", [b"x"], 2)))
    with pytest.raises(ClientFault, match=r"run 2: 'far/1' lies in shard far/\*/0"):
        at.log.append(batch(("a", [b"x"]), ("p", [b"x"]), ("far/1", [b"x"])))
    assert await at.log.bounds("a", 0) == OffsetBounds(1, 2)
    assert (await at.log.append(one("a", b"2"))).base_offsets == [2]
    page = await at.log.read_shard(MAIN, Position(0, 1))
    assert read_payloads(page) == [b"1", b"2", b"2"]


@scenario(TopicRule(match="live/*", keep=Keep.NONE), TopicRule(match="m", keep=Keep.MEMORY))
async def test_topic_that_is_kept_elsewhere_is_refused(at: At) -> None:
    with pytest.raises(ClientFault, match=r"'live/a'.* (none|not kept)"):
        at.log.append(one("live/a", b"1"))
    with pytest.raises(ClientFault, match=r"run 1: .*'m'"):
        at.log.append(batch(("a", [b"1"]), ("m", [b"2"])))
    with pytest.raises(ClientFault, match="'m'"):
        await at.log.metadata.ensure_topic("m")
    assert "m" not in at.log.metadata.topics.names()


@scenario(limits=LimitSettings(topics_max=2))
async def test_topic_beyond_the_limit_is_refused_and_others_go_on(at: At) -> None:
    await at.log.append(batch(("a", [b"1"]), ("b", [b"2"])))
    with pytest.raises(LimitExceededError, match=r"run 1: topic 'c' .* limits.topics_max = 2"):
        at.log.append(batch(("a", [b"3"]), ("c", [b"4"])))
    assert (await at.log.append(one("a", b"5"))).base_offsets == [2]


@scenario(log=LOG)
async def test_statistics_count_what_was_done(at: At) -> None:
    await at.log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"])))
    await at.log.append(one("a", b"4"))
    statistics = at.log.statistics()
    assert statistics.topics == 2
    assert list(statistics.damage) == []
    [shard] = statistics.shards
    assert shard.shard == MAIN
    assert (shard.entries, shard.messages) == (2, 4)
    assert 0 < shard.bytes <= shard.stored_bytes
    assert (shard.queued_batches, shard.queued_bytes, shard.failed_batches) == (0, 0, 0)
    assert not shard.is_read_only
    assert at.log.shards() == [MAIN]


@scenario()
async def test_level_may_be_a_plain_string_and_nothing_else(at: At) -> None:
    future = at.log.append(one("a", b"1"), "stored")  # type: ignore[arg-type]
    assert (await future).level is at.best_level
    for wrong in ("Stored", "bogus", None, 0):
        with pytest.raises(ClientFault, match="is no level"):
            at.log.append(one("a", b"2"), wrong)  # type: ignore[arg-type]
    assert (await at.log.bounds("a", 0)).next_offset == 2


@scenario(limits=LimitSettings(batch_bytes_max=1000, message_bytes_max=100))
async def test_batch_beyond_its_limit_is_refused_by_name(at: At) -> None:
    with pytest.raises(LimitExceededError, match=r"limits\.batch_bytes_max = 1000"):
        at.log.append(one("a", bytes(1000)))
    with pytest.raises(ClientFault, match="list cannot be appended"):
        at.log.append([b"x"])  # type: ignore[arg-type]
    assert (await at.log.append(one("a", b"x"))).base_offsets == [1]
