"""What happens at the very moment when a subscription begins: nothing may slip through."""

from __future__ import annotations

import asyncio

from runnel.config import LogSettings, Rotate, TopicRule
from runnel.formats.wire import Start
from tests.broker.scenes import EARLIEST, At, Reader, scene

OWN = TopicRule(match="*", journal="{topic}")
SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1))
# Looking anything up takes a while.
FORGETFUL = LogSettings(allocate_bytes=4096, disk_reserve_bytes=0, index_cache_bytes_max=1)

OLD = [f"old/{number}" for number in range(10)]


async def begin_beside_publishing(at: At, start: Start, pattern: str, turns: int) -> None:
    """A topic is made and published to while the broker still looks up where to begin."""
    topic = f"n{turns}"
    reader = Reader()
    beginning = asyncio.ensure_future(
        at.broker.subscribe(1, reader, [*OLD, f"{topic}{pattern}"], start, credit_bytes=0)
    )
    for _ in range(turns):
        await asyncio.sleep(0)
    await at.publish(topic, b"1", b"2")
    subscription = await beginning
    subscription.start()
    await at.publish(topic, b"3")
    subscription.grant(2**30)
    await at.settle(subscription)
    assert reader.offsets(topic) == [1, 2, 3]
    subscription.close()


@scene(SMALL, log=FORGETFUL, patterns=("", "*"))
async def test_topic_made_while_a_subscription_begins_is_read_from_its_first_message(
    at: At,
) -> None:
    for old in OLD:
        await at.publish(old, b"0")
    for turns in range(20):
        await begin_beside_publishing(at, EARLIEST, at.pattern, turns)
        await begin_beside_publishing(at, Start("resume"), at.pattern, 20 + turns)


@scene(OWN, patterns=("", "*"))
async def test_journal_made_while_a_subscription_begins_is_read_from_its_first_message(
    at: At,
) -> None:
    for turns in range(20):
        await at.publish(OLD[0], b"0")
        await begin_beside_publishing(at, EARLIEST, at.pattern, turns)
        start = Start("time", time_ns=at.clock.time_ns())
        await begin_beside_publishing(at, start, at.pattern, 20 + turns)
