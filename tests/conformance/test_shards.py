"""Reading shards, as a pipeline does: all matching messages in the order in which they were stored."""

from __future__ import annotations

import pytest

from runnel.client import ShardPage
from runnel.errors import OffsetAheadError, UnknownTopicError
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, verb


async def read_all(stage: Stage, pattern: str, entry: int = 1, end_entry: int = 0) -> list[bytes]:
    (shard,) = await stage.bus.shards(pattern)
    end = end_entry or shard.next_entry
    payloads: list[bytes] = []
    while entry < end:
        page: ShardPage = await stage.bus.fetch_shard(
            shard.journal, shard.shard, entry, end_entry=end, patterns=[pattern], bytes_max=1
        )
        assert page.next_entry > entry
        payloads += [message.payload for batch in page.batches for message in batch]
        entry = page.next_entry
    return payloads


@verb(needs=[Ability.SHARDS, Ability.ALONE])
async def test_entries_come_in_the_order_in_which_they_were_stored(stage: Stage) -> None:
    for number in range(12):
        await stage.publish("abc"[number % 3], b"%d" % number)
    assert await read_all(stage, "*") == [b"%d" % number for number in range(12)]
    assert await read_all(stage, "[ab]") == [b"%d" % n for n in range(12) if n % 3 < 2]
    assert await read_all(stage, "a", 4, 9) == [b"3", b"6"]


@verb(needs=[Ability.SHARDS])
async def test_shards_tell_where_a_time_begins(stage: Stage) -> None:
    await stage.publish("a", b"1")
    await stage.publish("a", b"2")
    page = await stage.bus.fetch("a", 2)
    (shard,) = await stage.bus.shards("a", time=page.messages[0].receive_time_ns + 1)
    assert shard.time_entry == shard.next_entry == 3
    (shard,) = await stage.bus.shards("a", time=0)
    assert (shard.time_entry, shard.first_entry) == (1, 1)
    assert await stage.bus.shards("nobody/*") == []


@verb(needs=[Ability.SHARDS, Ability.ALONE])
async def test_shards_and_entries_that_are_not_there(stage: Stage) -> None:
    await stage.publish("a", b"1")
    with pytest.raises(UnknownTopicError, match="nowhere/0"):
        await stage.bus.fetch_shard("nowhere", 0, 1)
    with pytest.raises(OffsetAheadError):
        await stage.bus.fetch_shard("main", 0, 5)
