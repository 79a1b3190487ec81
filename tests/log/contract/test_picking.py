"""Single messages of many partitions, looked up together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing

from runnel.config import Retain, Rotate, TopicRule
from runnel.config.settings import DAY_NS
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from runnel.log.log import ShardId
from runnel.topics.names import TopicPartition
from tests.log.contract.stores import At, scenario
from tests.log.samples import batch, one, trim_log

MAIN = ShardId("main")
# On disk every batch gets a segment of its own.
SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1), partitions=2)
BY_AGE = TopicRule(
    match="*", journal="main", rotate=Rotate(bytes_max=1), retain=Retain(age_ns=DAY_NS)
)
BY_AGE_WITH_LAST = TopicRule(
    match="*",
    journal="main",
    rotate=Rotate(bytes_max=1),
    retain=Retain(age_ns=DAY_NS),
    last_value=True,
)


async def picked(at: At, wanted: Mapping[TopicPartition, int]) -> list[list[Message]]:
    """The messages found, by the stored batch they lie in."""
    async with aclosing(at.log.messages_at(MAIN, wanted)) as found:
        return [each.taken().messages() async for chosen in found for each in chosen]


def offsets(groups: list[list[Message]]) -> dict[TopicPartition, int]:
    return {
        (message.topic, message.partition): message.offset
        for messages in groups
        for message in messages
    }


@scenario()
async def test_messages_of_one_batch_come_together(at: At) -> None:
    topics = [f"t{number:03}" for number in range(500)]
    await at.log.append(batch(*((topic, [b"1", topic.encode()]) for topic in topics)))
    wanted = {(topic, 0): 2 for topic in reversed(topics)}
    [messages] = await picked(at, wanted)
    assert [message.payload for message in messages] == [topic.encode() for topic in topics]
    assert offsets([messages]) == wanted


@scenario(SMALL)
async def test_each_message_is_found_wherever_it_lies(at: At) -> None:
    await at.log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"], 1), ("a", [b"4", b"5"])))
    await at.log.append(batch(("a", [b"6"], 1), ("b", [b"7", b"8"])))
    await at.log.append(one("c", b"9"))
    await at.log.append(batch(("b", [b"10"]), ("c", [b"11"])))
    wanted = {("a", 0): 3, ("a", 1): 1, ("b", 0): 2, ("b", 1): 1, ("c", 0): 1}
    groups = await picked(at, wanted)
    assert offsets(groups) == wanted
    payloads = {message.payload for messages in groups for message in messages}
    assert payloads == {b"4", b"6", b"8", b"3", b"9"}


@scenario()
async def test_single_messages_of_compressed_batches_are_found(at: At) -> None:
    messages = [Message(f"t{number}", b"%d" % number * 100) for number in range(100)]
    await at.log.append(Batch.from_messages(messages, codec=Codec.ZSTD))
    wanted = {(f"t{number}", 0): 1 for number in range(0, 100, 7)}
    assert offsets(await picked(at, wanted)) == wanted


@scenario(SMALL)
async def test_what_is_not_there_is_left_out(at: At) -> None:
    await at.log.append(batch(("a", [b"1"]), ("purged", [b"2"]), ("deleted", [b"3"])))
    await at.log.append(one("a", b"4"))
    await at.log.metadata.purge_topic("purged")
    await at.log.metadata.delete_topic("deleted")
    wanted = {("a", 0): 2, ("a", 1): 1, ("purged", 0): 1, ("deleted", 0): 1, ("never", 0): 1}
    assert offsets(await picked(at, wanted)) == {("a", 0): 2}
    assert await picked(at, {("a", 0): 3}) == []


@scenario(BY_AGE)
async def test_message_past_its_age_is_left_out(at: At) -> None:
    await at.log.append(batch(("a", [b"1"]), ("b", [b"2"])))
    at.clock.advance(2 * DAY_NS)
    await at.log.append(one("b", b"3"))
    assert offsets(await picked(at, {("a", 0): 1, ("b", 0): 2})) == {("b", 0): 2}
    assert await picked(at, {("b", 0): 1}) == []


@scenario(BY_AGE_WITH_LAST)
async def test_last_values_are_found_however_old_and_no_others(at: At) -> None:
    topics = [f"t{number:02}" for number in range(50)]
    await at.log.append(batch(*((topic, [b"old", topic.encode()]) for topic in topics)))
    at.clock.advance(2 * DAY_NS)
    await at.log.append(one("t00", b"newer"))
    for _ in range(2):  # expired, then removed
        groups = await picked(at, {(topic, 0): 2 for topic in topics})
        assert offsets(groups) == {(topic, 0): 2 for topic in topics[1:]}
        assert {message.payload for messages in groups for message in messages} == {
            topic.encode() for topic in topics[1:]
        }
        await trim_log(at.log)
    assert at.log.shard(MAIN).entries().first_offset == 2


@scenario(BY_AGE)
async def test_what_retention_removes_between_two_answers_is_left_out(at: At) -> None:
    for number in range(4):
        await at.log.append(one(f"t{number}", b"x" * 100_000))
    await at.log.append(one("end", b"x"))
    wanted = {(f"t{number}", 0): 1 for number in range(4)}
    found = []
    async with aclosing(at.log.messages_at(MAIN, wanted)) as groups:
        async for chosen in groups:
            found += [message.topic for each in chosen for message in each.taken()]
            if len(found) == 1:
                at.clock.advance(2 * DAY_NS)
                await at.log.append(one("end", b"y"))
                await trim_log(at.log)
    assert len(found) == 1


@scenario(SMALL)
async def test_what_is_rewritten_between_two_answers_is_still_found(at: At) -> None:
    for number in range(4):
        await at.log.append(
            batch((f"t{number}", [b"x" * 100_000]), ("purged", [b"y" * 100_000] * 9))
        )
    await at.log.append(one("end", b"x"))
    wanted = {(f"t{number}", 0): 1 for number in range(4)}
    found = []
    async with aclosing(at.log.messages_at(MAIN, wanted)) as groups:
        async for chosen in groups:
            found += [message.topic for each in chosen for message in each.taken()]
            if len(found) == 1:
                await at.log.metadata.purge_topic("purged")
                assert (await trim_log(at.log)).segments_rewritten
    assert sorted(found) == ["t0", "t1", "t2", "t3"]
