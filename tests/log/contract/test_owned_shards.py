"""Views of owned shards, terms of named publishers, and what a store says of itself."""

from __future__ import annotations

import pytest

from runnel.config import TopicRule
from runnel.errors import ClosedError, InvalidNameError, UnknownTopicError
from runnel.log.log import OffsetBounds, Position, ShardId
from tests.log.contract.stores import At, scenario
from tests.log.samples import batch, numbered, one

MAIN = ShardId("main")
OTHER = ShardId("other")
TWO_JOURNALS = TopicRule(match="b*", journal="other")


# --- Views ---


@scenario()
async def test_view_knows_what_was_just_stored(at: At) -> None:
    done = await at.log.append(batch(("a", [b"1", b"2"]), ("c", [b"3"])))
    shard = at.log.shard(MAIN)
    assert (shard.id, shard.epoch) == (MAIN, done.epoch)
    assert shard.entries() == OffsetBounds(1, 2)
    assert [shard.next_offset(topic, 0) for topic in "ac"] == [3, 2]
    await at.log.append(one("a", b"4"))
    assert shard.entries() == OffsetBounds(1, 3)
    assert shard.next_offset("a", 0) == 4


@scenario()
async def test_view_stays_the_same_for_the_whole_term(at: At) -> None:
    await at.log.append(one("a", b"1"))
    shard = at.log.shard(MAIN)
    await at.log.append(one("a", b"2"))
    assert at.log.shard(MAIN) is shard
    assert at.log.shards() == [MAIN]


@scenario(TWO_JOURNALS)
async def test_every_shard_has_a_view_and_an_epoch_of_its_own(at: At) -> None:
    done = [await at.log.append(one(topic, b"1")) for topic in ("a", "b")]
    shards = [at.log.shard(MAIN), at.log.shard(OTHER)]
    assert [shard.epoch for shard in shards] == [each.epoch for each in done]
    assert shards[0].next_offset("a", 0) == shards[1].next_offset("b", 0) == 2


@scenario(TWO_JOURNALS)
async def test_view_refuses_partitions_of_other_shards(at: At) -> None:
    await at.log.append(one("a", b"1"))
    await at.log.append(one("b", b"1"))
    shard = at.log.shard(MAIN)
    with pytest.raises(UnknownTopicError, match=r"b\[0\] lies in shard other/0, not in main/0"):
        shard.next_offset("b", 0)
    with pytest.raises(UnknownTopicError, match="partitions 0 to 0, not 1"):
        shard.floor("a", 1)
    await at.log.metadata.delete_topic("a")
    with pytest.raises(UnknownTopicError, match="does not exist"):
        shard.next_offset("a", 0)


@scenario()
async def test_floor_rises_with_a_purge(at: At) -> None:
    await at.log.append(one("a", b"1", b"2"))
    shard = at.log.shard(MAIN)
    assert shard.floor("a", 0) == 1
    await at.log.metadata.purge_topic("a")
    assert (shard.floor("a", 0), shard.next_offset("a", 0)) == (3, 3)


@scenario()
async def test_stamp_changes_when_a_count_may_rise(at: At) -> None:
    async def turn() -> None: ...

    await at.log.append(one("a", b"1"))
    shard = at.log.shard(MAIN)
    stamps = [shard.count_stamp()]
    assert await at.log.count(MAIN, 1, ("a",), turn) == 1
    assert shard.count_stamp() == stamps[0]
    await at.log.append(one("b", b"2"))
    stamps.append(shard.count_stamp())
    await at.log.metadata.purge_topic("a")
    stamps.append(shard.count_stamp())
    assert len(set(stamps)) == 3
    assert await at.log.count(MAIN, 1, ("a",), turn) == 0


@scenario()
async def test_shard_exists_with_its_first_topic(at: At) -> None:
    with pytest.raises(UnknownTopicError, match="there is no shard main/0"):
        at.log.shard(MAIN)
    assert not await at.log.is_still_mine(MAIN)
    await at.log.metadata.ensure_topic("a")
    shard = at.log.shard(MAIN)
    assert shard.entries() == OffsetBounds(1, 1)
    assert shard.next_offset("a", 0) == 1
    page = await at.log.read_shard(MAIN, Position(shard.epoch, 1))
    assert (list(page.found), page.next_position.entry) == ([], 1)
    assert await at.log.is_still_mine(MAIN)


@scenario()
async def test_closed_log_has_no_views(at: At) -> None:
    await at.log.metadata.ensure_topic("a")
    await at.log.close()
    with pytest.raises(ClosedError):
        at.log.shard(MAIN)
    assert not await at.log.is_still_mine(MAIN)


# --- Terms ---


@scenario()
async def test_term_is_higher_than_all_before_it(at: At) -> None:
    metadata = at.log.metadata
    first = await metadata.take_term("p")
    assert first >= at.clock.time_ns() // 10**6
    assert await metadata.take_term("p") == first + 1
    assert await metadata.take_term("p", first + 100) == first + 101
    assert await metadata.take_term("p", first) == first + 102
    await at.log.append(numbered("p", 0, term=first + 200))
    assert await metadata.take_term("p") == first + 201
    at.clock.advance(10**9)
    assert await metadata.take_term("p") == first + 1000


@scenario()
async def test_name_of_a_publisher_is_checked(at: At) -> None:
    with pytest.raises(InvalidNameError):
        await at.log.metadata.take_term("")


# --- What a store is capable of ---


@scenario()
async def test_new_store_has_nothing_to_report(at: At) -> None:
    recovered = at.log.recovered
    assert recovered.was_clean
    assert not [*recovered.torn, *recovered.damage, *recovered.differences]
    await at.log.append(one("a", b"1"))
    assert list(await at.log.reopen(MAIN)) == []


@scenario()
async def test_what_is_durable_can_be_reopened_and_copied_or_says_no(at: At) -> None:
    able = at.log.capabilities
    assert able.keeps_positions == able.is_durable
    assert (await at.log.append(one("a", b"1"))).level is at.best_level
    await at.log.drop_checkpoint()  # there is none, which does no harm
