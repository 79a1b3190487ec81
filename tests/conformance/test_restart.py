"""After a restart the broker still has last values and the positions of readers."""

from __future__ import annotations

from runnel.config import Keep, Retain, Rotate, TopicRule
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.conformance.listeners import Ability
from tests.conformance.stage import DAY_S, Stage, nothing_more, take_payloads, verb

KEPT = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1), last_value=True)
FORGOTTEN = TopicRule(
    match="*",
    journal="main",
    rotate=Rotate(bytes_max=1),
    retain=Retain(age_ns=10**9),
    last_value=True,
)
STATE = TopicRule(match="state/*", keep=Keep.NONE, last_value=True)


@verb(KEPT, needs=[Ability.RESTART])
async def test_last_value_survives_a_restart(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2")
    await stage.publish("b", b"3")
    await stage.restart()
    async with stage.bus.subscribe("?", start="last") as subscription:
        assert sorted(await take_payloads(subscription, 2)) == [b"2", b"3"]
        await nothing_more(stage, subscription)


@verb(FORGOTTEN, needs=[Ability.BATCHES, Ability.RESTART])
async def test_last_value_beyond_retention_survives_a_restart(stage: Stage) -> None:
    last = [Message("a", b"2"), Message("b", b"3"), Message("a", b"4")]
    await stage.publish("a", b"1")
    await stage.bus.publish_batch(Batch.from_messages(last))
    async with stage.bus.subscribe("!system/events") as events:
        stage.advance(DAY_S)
        async for message in events:
            if message.tags["kind"] == "retention":
                break
    await stage.restart()
    assert await stage.payloads("a") == await stage.payloads("b") == []
    async with stage.bus.subscribe("?", start="last") as subscription:
        assert sorted(await take_payloads(subscription, 2)) == [b"3", b"4"]
        await stage.publish("a", b"5")
        assert await take_payloads(subscription, 1) == [b"5"]


@verb(STATE, KEPT, needs=[Ability.RESTART])
async def test_last_value_of_a_topic_that_is_not_kept_does_not_survive(stage: Stage) -> None:
    await stage.publish("state/a", b"1")
    await stage.restart()
    async with stage.bus.subscribe("state/*", start="last") as subscription:
        await nothing_more(stage, subscription)


@verb(KEPT, needs=[Ability.OFFSETS, Ability.RESTART])
async def test_reader_goes_on_by_offset_after_a_restart(stage: Stage) -> None:
    await stage.publish("a", b"1", b"2", b"3")
    page = await stage.bus.fetch("a", 1, messages_max=1)
    await stage.bus.set_cursor("c", {"a": page.next_offset})
    await stage.restart()
    cursor = await stage.bus.cursor("c")
    assert cursor is not None
    async with stage.bus.subscribe("a", start=cursor.places[0].offset) as subscription:
        await stage.publish("a", b"4")
        assert await take_payloads(subscription, 3) == [b"2", b"3", b"4"]


@verb(KEPT, needs=[Ability.RESTART])
async def test_what_was_received_but_not_asked_to_be_stored_is_stored_by_closing(
    stage: Stage,
) -> None:
    for number in range(20):
        await stage.bus.publish("a", b"%d" % number, level="received")
    await stage.restart()
    assert await stage.payloads("a") == [b"%d" % number for number in range(20)]
