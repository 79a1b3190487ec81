"""Journals with several shards: each topic-partition in its own, and limits of bytes for all of them together."""

from __future__ import annotations

import msgspec
import pytest

from runnel.config import Pin, Retain, Rotate, TopicRule
from runnel.errors import ClientFault, ProducerFencedError, UnknownTopicError
from runnel.log.log import CursorPosition, Position, ShardId
from runnel.topics.partitions import shard_of_partition
from tests.log.contract.stores import LOG, At, Store, scenario
from tests.log.samples import batch, last_message, numbered, one, read_payloads, trim_log

SHARDS = 4
SPLIT = msgspec.structs.replace(LOG, journal_shards=SHARDS)
RULE = TopicRule(match="*", partitions=2, journal="main", rotate=Rotate(bytes_max=1))
KEYS = [(f"t{number}", partition) for number in range(4) for partition in range(2)]
SECOND_NS = 1_000_000_000


def shard_of(key: tuple[str, int]) -> ShardId:
    return ShardId("main", shard_of_partition(*key, SHARDS))


async def publish(at: At, number: int, size: int = 100) -> None:
    """One message to every topic-partition, a second apart."""
    for topic, partition in KEYS:
        at.clock.advance(SECOND_NS)
        payload = (b"%d " % number) + bytes(size)
        await at.log.append(one(topic, payload, partition=partition))


async def left(at: At) -> dict[tuple[str, int], int]:
    """How many messages of each topic-partition are left."""
    found = {}
    for key in KEYS:
        bounds = await at.log.bounds(*key)
        found[key] = bounds.next_offset - bounds.first_offset
    return found


def newest(count: int, total: int) -> dict[tuple[str, int], int]:
    """Of so many messages, sent in turns, the newest in each topic-partition."""
    sent = [key for _ in range(total // len(KEYS)) for key in KEYS]
    return {key: sent[total - count :].count(key) for key in KEYS}


@scenario(RULE, log=SPLIT)
async def test_each_topic_partition_lies_in_its_shard(at: At) -> None:
    await publish(at, 1)
    assert {shard_of(key) for key in KEYS} == {ShardId("main", shard) for shard in range(SHARDS)}
    topics = at.log.metadata.topics
    for info in map(topics.get, topics.names()):
        assert info.shards == [shard_of((info.name, number)) for number in range(2)]
    for shard in at.log.shards():
        messages = await at.read_shard_all(shard, Position(0, 1))
        assert {(each.topic, each.partition) for each in messages} == {
            key for key in KEYS if shard_of(key) == shard
        }
    for key in KEYS:
        assert read_payloads(await at.log.read(*key, 1)) == [b"1 " + bytes(100)]


@scenario(RULE, log=SPLIT)
async def test_batch_for_two_shards_is_refused_whole(at: At) -> None:
    here, there = KEYS[0], next(key for key in KEYS if shard_of(key) != shard_of(KEYS[0]))
    with pytest.raises(ClientFault, match="a batch goes to one shard"):
        at.log.append(batch((here[0], [b"x"], here[1]), (there[0], [b"x"], there[1])))
    assert all(at.log.shard(shard).entries().next_offset == 1 for shard in at.log.shards())
    together = [key for key in KEYS if shard_of(key) == shard_of(here)]
    await at.log.append(batch(*((topic, [b"x"], partition) for topic, partition in together)))
    assert at.log.shard(shard_of(here)).entries().next_offset == 2


@scenario(RULE, log=SPLIT)
async def test_shard_in_which_nothing_is_stored_can_be_read(at: At) -> None:
    topic, partition = KEYS[0]
    await at.log.append(one(topic, b"x", partition=partition))
    for shard in range(SHARDS):
        entries = at.log.shard(ShardId("main", shard)).entries()
        is_used = ShardId("main", shard) == shard_of(KEYS[0])
        assert (entries.first_offset, entries.next_offset) == (1, 2 if is_used else 1)
        page = await at.log.read_shard(ShardId("main", shard), Position(0, 1))
        assert read_payloads(page) == ([b"x"] if is_used else [])
    with pytest.raises(UnknownTopicError):
        at.log.shard(ShardId("main", SHARDS))


@scenario(
    msgspec.structs.replace(RULE, retain=Retain(bytes_max=4000)),
    log=msgspec.structs.replace(SPLIT, allocate_bytes=0),
)
async def test_bytes_are_limited_for_the_journal_and_the_oldest_of_all_shards_go(at: At) -> None:
    for number in range(20):
        await publish(at, number)
    trimmed = await trim_log(at.log)
    found = await left(at)
    kept = sum(found.values())
    stored = sum(shard.stored_bytes for shard in at.log.statistics().shards)
    assert stored <= 4000 < stored + trimmed.bytes_removed / trimmed.segments_removed
    assert 160 - kept == trimmed.segments_removed
    if at.store is Store.MEMORY:
        assert found == newest(kept, 160)
    else:  # the newest segment of each shard is still written to
        assert sum(abs(found[key] - newest(kept, 160)[key]) for key in KEYS) <= SHARDS
    assert (await trim_log(at.log)).segments_removed == 0


@scenario(
    msgspec.structs.replace(
        RULE, retain=Retain(bytes_max=2000), pin=Pin(bytes_max=20_000, age_ns=None)
    ),
    log=msgspec.structs.replace(SPLIT, allocate_bytes=0),
)
async def test_ceiling_of_holds_in_bytes_is_of_the_journal(at: At) -> None:
    await publish(at, 0)
    held = KEYS[0]
    await at.log.metadata.set_cursor(
        "c", [CursorPosition(topic=held[0], partition=held[1], offset=1)]
    )
    for number in range(1, 3):
        await publish(at, number)
    await trim_log(at.log)
    found = await left(at)
    # What is held counts: the others go, in all shards, until nothing but the newest of each shard is left.
    assert found[held] == 3
    assert sum(found.values()) < 3 + 2 * SHARDS
    for _ in range(40):
        topic, partition = held
        at.clock.advance(SECOND_NS)
        await at.log.append(one(topic, bytes(500), partition=partition))
    trimmed = await trim_log(at.log)
    assert list(trimmed.holds_passed) == ["c"]
    assert sum(shard.stored_bytes for shard in at.log.statistics().shards) <= 20_000


@scenario(
    msgspec.structs.replace(RULE, retain=Retain(bytes_max=1), last_value=True),
    log=SPLIT,
)
async def test_last_values_of_all_shards_are_kept(at: At) -> None:
    for number in range(3):
        await publish(at, number)
    await trim_log(at.log)
    for key in KEYS:
        last = await last_message(at.log, *key)
        assert last is not None
        assert last.messages()[0].payload.startswith(b"2 ")


@scenario(RULE, log=SPLIT)
async def test_named_publisher_has_a_sequence_in_each_shard_and_one_term(at: At) -> None:
    by_shard = {shard_of(key): key for key in KEYS if key[1] == 0}
    topics = [topic for topic, _ in by_shard.values()]
    assert len(topics) > 1
    for topic in topics:
        for number in range(2):
            await at.log.append(numbered("p", number, term=1, topic=topic))
    for topic in topics:
        assert (await at.log.append(numbered("p", 1, term=1, topic=topic))).is_repeated
    await at.log.append(numbered("p", 0, term=7, topic=topics[-1]))
    assert await at.log.metadata.take_term("p") > 7
    with pytest.raises(ProducerFencedError):
        await at.log.append(numbered("p", 2, term=1, topic=topics[-1]))


@scenario(msgspec.structs.replace(RULE, journal="{topic}"), log=SPLIT)
async def test_journal_that_a_template_names_has_one_shard(at: At) -> None:
    await publish(at, 1)
    assert {shard.shard for shard in at.log.shards()} == {0}
