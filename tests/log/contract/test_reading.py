"""Reading a partition, and a whole shard."""

from __future__ import annotations

import pytest

from runnel.config import Rotate, TopicRule
from runnel.errors import ClientFault, OffsetAheadError, OffsetGoneError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.log.log import OffsetBounds, Position, ShardId
from tests.log.contract.stores import At, Store, scenario
from tests.log.samples import batch, last_message, one, read_offsets, read_payloads, read_topics

MAIN = ShardId("main")
# On disk every batch gets a segment of its own.
SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1))


@scenario()
async def test_reading_begins_at_any_offset_even_inside_a_batch(at: At) -> None:
    for first in (0, 4, 8):
        await at.log.append(one("a", *(b"%d" % number for number in range(first, first + 4))))
    for offset in range(1, 13):
        page = await at.log.read("a", 0, offset)
        offsets = read_offsets(page)
        assert offsets[-1] == 12
        assert offsets == list(range(offsets[0], 13))
        assert offset - 4 < offsets[0] <= offset  # whole batches, the first of which holds it
        assert page.next_offset == 13
        assert page.gaps == () or page.gaps == []


@scenario()
async def test_at_the_end_there_is_an_empty_page(at: At) -> None:
    await at.log.append(one("a", b"1", b"2"))
    page = await at.log.read("a", 0, 3)
    assert not page.found
    assert page.next_offset == 3


@scenario()
async def test_topic_without_messages_is_read_as_empty(at: At) -> None:
    await at.log.metadata.ensure_topic("a")
    assert await at.log.bounds("a", 0) == OffsetBounds(1, 1)
    page = await at.log.read("a", 0, 1)
    assert not page.found
    assert page.next_offset == 1
    assert await last_message(at.log, "a", 0) is None


@scenario()
async def test_offset_beyond_the_next_one_is_a_mistake(at: At) -> None:
    await at.log.append(one("a", b"1", b"2"))
    with pytest.raises(OffsetAheadError) as raised:
        await at.log.read("a", 0, 4)
    error = raised.value
    assert (error.topic, error.partition, error.offset, error.next_offset) == ("a", 0, 4, 3)


@scenario()
async def test_offset_before_the_first_tells_the_gap(at: At) -> None:
    await at.log.append(one("a", b"1", b"2"))
    await at.log.metadata.purge_topic("a")
    await at.log.append(one("a", b"3"))
    with pytest.raises(OffsetGoneError) as raised:
        await at.log.read("a", 0, 1)
    error = raised.value
    assert (error.topic, error.partition, error.offset) == ("a", 0, 1)
    assert (error.first_offset, error.gap) == (3, 2)


@scenario()
async def test_what_can_be_no_offset_is_a_mistake(at: At) -> None:
    await at.log.append(one("a", b"1"))
    for wrong in (0, -1, 1.5, "1", None):
        with pytest.raises(ClientFault, match="numbered 1, 2, 3"):
            await at.log.read("a", 0, wrong)  # type: ignore[arg-type]


@scenario(TopicRule(match="p", partitions=2))
async def test_unknown_topics_partitions_and_shards_are_refused(at: At) -> None:
    await at.log.metadata.ensure_topic("p")
    with pytest.raises(UnknownTopicError, match="'nowhere' does not exist"):
        await at.log.read("nowhere", 0, 1)
    with pytest.raises(UnknownTopicError, match="'nowhere' does not exist"):
        await at.log.bounds("nowhere", 0)
    with pytest.raises(UnknownTopicError, match="partitions 0 to 1, not 2"):
        await at.log.read("p", 2, 1)
    with pytest.raises(UnknownTopicError, match="partitions 0 to 1, not -1"):
        await last_message(at.log, "p", -1)
    with pytest.raises(UnknownTopicError, match="no shard other/0"):
        await at.log.read_shard(ShardId("other"), Position(0, 1))
    assert at.log.metadata.topics.names() == ["p"]


@scenario(SMALL)
async def test_page_holds_as_many_batches_as_fit_and_at_least_one(at: At) -> None:
    for number in range(6):
        await at.log.append(one("a", b"%d" % number * 1000))
    size = len((await at.log.read("a", 0, 1, bytes_max=1)).found[0].block)
    for count in range(1, 7):
        page = await at.log.read("a", 0, 1, bytes_max=count * size + size // 2)
        assert read_offsets(page) == list(range(1, count + 1))
        assert page.next_offset == count + 1
    assert read_offsets(await at.log.read("a", 0, 3, bytes_max=0)) == [3]


@scenario()
async def test_pages_follow_each_other_to_the_end(at: At) -> None:
    for number in range(30):
        await at.log.append(batch(("a", [b"%d" % number]), ("other", [b"-"] * (number % 3 + 1))))
    pages = await at.read_all("a", 1)
    assert [offset for page in pages for offset in read_offsets(page)] == list(range(1, 31))


@scenario()
async def test_reader_of_one_topic_gets_its_runs_out_of_shared_batches(at: At) -> None:
    topics = [f"t{number}" for number in range(8)]
    for number in range(5):
        await at.log.append(
            batch(*((topic, [b"%s.%d" % (topic.encode(), number)]) for topic in topics))
        )
    for topic in topics:
        page = await at.log.read(topic, 0, 1)
        assert read_payloads(page) == [b"%s.%d" % (topic.encode(), number) for number in range(5)]
        assert {len(found.batch) for found in page.found} == {8}  # the stored batch, uncut
        assert [found.runs for found in page.found] == [(topics.index(topic),)] * 5


@scenario()
async def test_found_blocks_are_whole_batches_that_decode_again(at: At) -> None:
    done = await at.log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"])))
    for page in (await at.log.read("b", 0, 1), await at.log.read_shard(MAIN, Position(0, 1))):
        [found] = page.found
        again = Batch.unpack(found.block)
        assert again.messages() == found.batch.messages()
        assert [run.base_offset for run in again.runs()] == [1, 1]
        assert {run.entry for run in again.runs()} == {done.entry}
        assert {run.epoch for run in again.runs()} == {done.epoch}
        assert {run.receive_time_ns for run in again.runs()} == {done.receive_time_ns}


@scenario()
async def test_reader_cannot_change_what_is_stored(at: At) -> None:
    await at.log.append(one("a", b"1"))
    block = (await at.log.read("a", 0, 1)).found[0].block
    if not block.readonly:
        block[-1] ^= 1
    assert read_payloads(await at.log.read("a", 0, 1)) == [b"1"]


# --- The whole shard ---


@scenario()
async def test_shard_is_read_in_the_order_of_storing_whatever_the_topic(at: At) -> None:
    for number in range(10):
        await at.log.append(one(f"t{number % 3}", b"%d" % number))
    page = await at.log.read_shard(MAIN, Position(0, 1))
    assert read_payloads(page) == [b"%d" % number for number in range(10)]
    assert read_topics(page)[:4] == ["t0", "t1", "t2", "t0"]
    assert page.next_position.entry == 11


@scenario(SMALL)
async def test_positions_lead_from_page_to_page(at: At) -> None:
    for number in range(10):
        await at.log.append(one("a", b"%d" % number))
    position, seen = Position(0, 1), []
    while (page := await at.log.read_shard(MAIN, position, bytes_max=1)).found:
        seen += read_payloads(page)
        assert page.next_position.entry == position.entry + len(page.found)
        position = page.next_position
    assert seen == [b"%d" % number for number in range(10)]
    assert page.next_position == position
    await at.log.append(one("b", b"new"))
    assert read_payloads(await at.log.read_shard(MAIN, position)) == [b"new"]


@scenario()
async def test_shard_can_be_read_from_every_entry(at: At) -> None:
    for number in range(5):
        await at.log.append(one("a", b"%d" % number))
    assert at.log.shard(MAIN).entries() == OffsetBounds(1, 6)
    for entry in range(1, 7):
        page = await at.log.read_shard(MAIN, Position(0, entry))
        assert read_payloads(page) == [b"%d" % number for number in range(entry - 1, 5)]
    with pytest.raises(OffsetAheadError):
        await at.log.read_shard(MAIN, Position(0, 7))
    with pytest.raises(OffsetGoneError):
        await at.log.read_shard(MAIN, Position(0, 0))


@scenario(TopicRule(match="own/*", journal="{topic}"))
async def test_journals_are_shards_of_their_own(at: At) -> None:
    for name in ("own/a", "own/b", "shared"):
        await at.log.append(one(name, b"x"))
    assert sorted(map(str, at.log.shards())) == ["main/0", "own/a/0", "own/b/0"]
    for name in ("own/a", "own/b"):
        page = await at.log.read_shard(ShardId(name), Position(0, 1))
        assert read_topics(page) == [name]
        assert at.log.metadata.topics.get(name).shards == [ShardId(name)]


@scenario()
async def test_position_of_another_epoch_is_never_answered_with_other_data(at: At) -> None:
    done = await at.log.append(one("a", b"1"))
    assert read_payloads(await at.log.read_shard(MAIN, Position(done.epoch, 1))) == [b"1"]
    before = Position(done.epoch - 1, 1)
    if at.store is Store.MEMORY:
        with pytest.raises(OffsetGoneError):
            await at.log.read_shard(MAIN, before)
    else:  # on disk an entry is the same in every epoch
        assert read_payloads(await at.log.read_shard(MAIN, before)) == [b"1"]


# --- The last message ---


@scenario()
async def test_last_is_the_newest_message_alone(at: At) -> None:
    await at.log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"]), ("a", [b"4"])))
    await at.log.append(one("b", b"5", b"6"))
    for topic, offset, payload in (("a", 3, b"4"), ("b", 3, b"6")):
        last = await last_message(at.log, topic, 0)
        assert last is not None
        [message] = last.messages()
        assert (message.topic, message.offset, message.payload) == (topic, offset, payload)
        assert message.receive_time_ns == at.clock.time_ns()


@scenario(SMALL)
async def test_offset_is_found_by_the_time_of_receiving(at: At) -> None:
    times = []
    for number in range(4):
        at.clock.advance(10)
        times.append(at.clock.time_ns())
        await at.log.append(one("a", b"%d" % number, b"x"))
        await at.log.append(one("b", b"other"))
    for number, time_ns in enumerate(times):
        assert await at.log.offset_at("a", 0, time_ns) == 2 * number + 1
        assert await at.log.offset_at("a", 0, time_ns - 5) == 2 * number + 1
    assert await at.log.offset_at("a", 0, 0) == 1
    assert await at.log.offset_at("a", 0, times[-1] + 1) == 9


@scenario(SMALL)
async def test_time_before_the_first_message_there_is_leads_to_that_message(at: At) -> None:
    await at.log.append(one("a", b"1", b"2"))
    await at.log.metadata.purge_topic("a")
    await at.log.append(one("a", b"3"))
    assert await at.log.offset_at("a", 0, 0) == 3
