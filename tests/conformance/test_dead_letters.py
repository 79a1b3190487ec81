"""Dead letters: messages that failed too often are listed, sent back and dropped."""

from __future__ import annotations

import pytest

from runnel.client.consumer import Consumer
from runnel.errors import ClientFault, UnknownSubscriptionError
from runnel.formats.message import Message
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, nothing_more, take_work, until, verb


def consume(stage: Stage, mode: str = "shared") -> Consumer:
    """With these options, one nack makes a dead letter."""
    return stage.bus.consume("s", "a", mode=mode, deliveries_max=1)


async def letters(stage: Stage, count: int) -> list[Message]:
    async def look() -> list[Message]:
        return [letter async for letter in stage.bus.dead_letters("s")]

    return await until(look, lambda found: len(found) >= count)


async def make_dead_letters(stage: Stage, *payloads: bytes) -> None:
    """Make dead letters of these offsets, and close the consumer."""
    async with consume(stage) as consumer:
        await stage.publish("a", *payloads)
        for work in await take_work(consumer, len(payloads)):
            await work.nack(reason=f"no {work.payload.decode()} today")
        await letters(stage, len(payloads))


@verb()
async def test_letter_says_what_it_was_and_why(stage: Stage) -> None:
    async with consume(stage) as consumer:
        await stage.bus.publish("a", b"bad", key=b"k", tags={"colour": "red"})
        await (await anext(consumer)).nack(reason="it is bad")
        (letter,) = await letters(stage, 1)
        await nothing_more(stage, consumer)
    assert (letter.topic, letter.offset, letter.payload, letter.key) == ("!dead/s", 1, b"bad", b"k")
    assert letter.tags == {
        "colour": "red",
        "dead.error": "it is bad",
        "dead.topic": "a",
        "dead.partition": "0",
        "dead.offset": "1",
        "dead.deliveries": "1",
        "dead.from": "s",
    }
    state = await until(
        lambda: stage.bus.subscription("s"), lambda state: not state.members[0].backlog
    )
    assert state.dead == 1
    page = await stage.bus.fetch("!dead/s", 1)
    assert [message.payload for message in page.messages] == [b"bad"]


@verb()
async def test_letter_keeps_the_exception_and_the_end_of_its_traceback(stage: Stage) -> None:
    trace = '  File "shop.py", line 3, in bill\n    raise Refused("no")\nshop.Refused: no'
    async with consume(stage) as consumer:
        await stage.bus.publish("a", b"bad", tags={"colour": "red"})
        reason = f"Refused: no\nTraceback (most recent call last):\n{trace}\n"
        await (await anext(consumer)).nack(reason=reason)
        (letter,) = await letters(stage, 1)
    assert letter.tags["dead.error"] == "Refused: no"
    assert letter.tags["dead.error_type"] == "shop.Refused"
    assert letter.tags["dead.traceback"] == trace
    assert letter.tags["colour"] == "red"
    await stage.bus.redrive("s", "all")
    async with consume(stage) as consumer:
        again = await anext(consumer)
        assert again.tags == {"colour": "red"}
        await again.ack()


@verb()
async def test_letters_are_sent_back_to_their_subscription_alone(stage: Stage) -> None:
    await stage.bus.make_subscription("other", "a")
    await make_dead_letters(stage, b"1", b"2", b"3")
    assert await stage.bus.redrive("s", [2]) == 1
    async with consume(stage) as consumer:
        work = await anext(consumer)
        assert (work.offset, work.failures) == (2, 0)
        await work.ack(stored=True)
        assert await stage.bus.redrive("s", "all") == 2
        assert [work.offset for work in await take_work(consumer, 2)] == [1, 3]
    assert (await stage.bus.subscription("other")).members[0].backlog == 3
    assert await stage.bus.redrive("s", [2]) == 0  # it was settled before


@verb()
async def test_letters_are_dropped_and_come_page_by_page(stage: Stage) -> None:
    await make_dead_letters(stage, b"1", b"2", b"3", b"4")
    assert await stage.bus.drop_dead("s", [2]) == 1
    page = await stage.bus.dead_letter_page("s", messages_max=2)
    assert [message.offset for message in page.messages] == [1, 3]
    rest = await stage.bus.dead_letter_page("s", page.next_offset)
    assert ([message.offset for message in rest.messages], rest.next_offset) == ([4], 0)
    assert await stage.bus.drop_dead("s", "all") == 3
    assert await letters(stage, 0) == []
    assert (await stage.bus.subscription("s")).dead == 0


@verb()
async def test_letter_of_a_message_that_is_gone_is_published_anew(stage: Stage) -> None:
    await make_dead_letters(stage, b"1")
    await stage.bus.purge_topic("a")
    assert await stage.bus.redrive("s", "all") == 1
    async with consume(stage) as consumer:
        work = await anext(consumer)
        assert (work.offset, work.payload, dict(work.tags)) == (2, b"1", {})


@verb()
async def test_letter_cannot_be_sent_where_its_subscription_does_not_reach(stage: Stage) -> None:
    await stage.bus.make_subscription("s", "a")
    tags = {"dead.topic": "payroll", "dead.partition": "0", "dead.offset": "1"}
    await stage.bus.publish("!dead/s", b"forged", tags=tags)
    with pytest.raises(ClientFault, match="it is of a topic that the subscription is not over"):
        await stage.bus.redrive("s", "all")
    assert "payroll" not in [topic.name for topic in await stage.bus.topics("*")]


@verb()
async def test_key_goes_on_behind_what_was_given_up(stage: Stage) -> None:
    async with consume(stage, "key_shared") as consumer:
        for number in range(3):
            await stage.bus.publish("a", b"%d" % number, key=b"k")
        await (await anext(consumer)).nack()
        again = await take_work(consumer, 2)
        assert [(work.payload, work.failures) for work in again] == [(b"1", 0), (b"2", 0)]
        assert [letter.payload for letter in await letters(stage, 1)] == [b"0"]


@verb(needs=[Ability.RESTART])
async def test_letters_and_what_became_of_them_survive_a_restart(stage: Stage) -> None:
    await make_dead_letters(stage, b"1", b"2", b"3")
    await stage.bus.drop_dead("s", [1])
    await stage.bus.redrive("s", [3])
    await stage.restart()
    assert [letter.payload for letter in await letters(stage, 1)] == [b"2"]
    async with consume(stage) as consumer:
        assert [work.offset for work in await take_work(consumer, 1)] == [3]
        await nothing_more(stage, consumer)


@verb()
async def test_letters_stay_when_their_subscription_goes(stage: Stage) -> None:
    await make_dead_letters(stage, b"1")
    await stage.bus.delete_subscription("s")
    page = await stage.bus.fetch("!dead/s", 1)
    assert [message.payload for message in page.messages] == [b"1"]


@verb()
async def test_letters_that_are_not_there(stage: Stage) -> None:
    for act in (stage.bus.redrive, stage.bus.drop_dead):
        with pytest.raises(UnknownSubscriptionError, match="'nobody'"):
            await act("nobody", "all")
    with pytest.raises(UnknownSubscriptionError, match="'nobody'"):
        await anext(stage.bus.dead_letters("nobody"))
    await stage.bus.make_subscription("s", "a", deliveries_max=1)
    assert await letters(stage, 0) == []
    assert await stage.bus.redrive("s", "all") == 0
    await make_dead_letters(stage, b"1")
    with pytest.raises(ClientFault, match="no dead letter 2"):
        await stage.bus.drop_dead("s", [2])
    with pytest.raises(ClientFault, match="are no offsets"):
        await stage.bus.redrive("s", "some")  # type: ignore[arg-type]
