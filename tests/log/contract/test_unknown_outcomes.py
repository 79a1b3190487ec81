"""Unknown outcomes: nothing is answered, seen or taken back before it is known that a batch is stored.

Every other test of the contract also runs on a store that loses the first answer for each group.
"""

from __future__ import annotations

import asyncio

from runnel.config import Rotate, TopicRule
from runnel.log.log import OffsetBounds
from tests.log.contract.stores import At, Store, scenario
from tests.log.samples import numbered, one, read_offsets, read_payloads


@scenario()
async def test_answers_are_lost_where_this_is_the_store(at: At) -> None:
    await asyncio.gather(*(at.log.append(one("a", b"%d" % number)) for number in range(5)))
    await at.log.append(one("a", b"5"))
    [shard] = at.log.statistics().shards
    assert (shard.unknown_outcomes > 1) == (at.store is Store.LOST_ANSWERS)
    assert shard.failed_batches == 0


@scenario()
async def test_every_batch_is_stored_once_and_in_order(at: At) -> None:
    futures = []
    for number in range(60):
        futures.append(at.log.append(numbered("p", number, payload=b"%d" % number)))
        if number % 7 == 0:
            await asyncio.sleep(0)
    done = await asyncio.gather(*futures)
    assert [answer.entry for answer in done] == list(range(1, 61))
    assert not any(answer.is_repeated for answer in done)
    page = await at.log.read("a", 0, 1)
    assert read_offsets(page) == list(range(1, 61))
    assert read_payloads(page) == [b"%d" % number for number in range(60)]


@scenario()
async def test_answered_batch_is_visible_and_no_batch_is_visible_before_its_answer(at: At) -> None:
    for number in range(1, 20):
        future = at.log.append(one("a", b"%d" % number))
        while not future.done():
            seen = await at.log.bounds("a", 0)
            if not future.done():
                assert seen == OffsetBounds(1, number)
            await asyncio.sleep(0)
        assert (await at.log.bounds("a", 0)).next_offset == number + 1


@scenario(TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1)))
async def test_every_batch_may_begin_a_segment(at: At) -> None:
    done = await asyncio.gather(*(at.log.append(one("a", b"%d" % number)) for number in range(9)))
    assert [answer.base_offsets for answer in done] == [[number] for number in range(1, 10)]
    pages = await at.read_all("a", 1)
    assert [payload for page in pages for payload in read_payloads(page)] == [
        b"%d" % number for number in range(9)
    ]
