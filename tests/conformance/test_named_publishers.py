"""Named publishers: a repeated batch is stored once, a predecessor is fenced, a gap is refused."""

from __future__ import annotations

import msgspec
import pytest

from runnel.client import BatchReceipt, Bus
from runnel.errors import ClientFault, ProducerFault, ProducerFencedError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.conformance.listeners import Ability
from tests.conformance.stage import Stage, verb


async def publish_numbered(
    bus: Bus, term: int, number: int, *payloads: bytes, topic: str = "a", name: str = "p"
) -> BatchReceipt:
    batch = Batch.from_messages([Message(topic, payload) for payload in payloads])
    head = msgspec.structs.replace(batch.envelope, producer=name, term=term, number=number)
    return await bus.publish_batch(Batch(head, batch.body))


@verb(needs=[Ability.NAMED])
async def test_named_publisher_stores_everything_once_and_in_order(stage: Stage) -> None:
    async with stage.bus.publisher("a", name="p", batch_messages_max=10) as publisher:
        for number in range(100):
            publisher.send(b"%d" % number)
            publisher.send(b"%d" % number, "b")
    expected = [b"%d" % number for number in range(100)]
    assert await stage.payloads("a") == await stage.payloads("b") == expected


@verb(needs=[Ability.NAMED])
async def test_repeated_batch_is_answered_with_its_original_offsets(stage: Stage) -> None:
    first = await publish_numbered(stage.bus, 1, 0, b"1", b"2")
    await publish_numbered(stage.bus, 1, 1, b"3")
    again = await publish_numbered(stage.bus, 1, 0, b"1", b"2")
    assert again.is_repeated
    assert not first.is_repeated
    assert list(again.base_offsets) == list(first.base_offsets) == [1]
    assert await stage.payloads("a") == [b"1", b"2", b"3"]


@verb(needs=[Ability.NAMED])
async def test_gap_in_the_numbers_is_refused_and_says_which_is_next(stage: Stage) -> None:
    await publish_numbered(stage.bus, 1, 0, b"1")
    with pytest.raises(ProducerFault, match=r"\b1\b"):
        await publish_numbered(stage.bus, 1, 2, b"3")
    with pytest.raises(ProducerFault):
        await publish_numbered(stage.bus, 2, 1, b"a term begins with 0")
    await publish_numbered(stage.bus, 1, 1, b"2")
    assert await stage.payloads("a") == [b"1", b"2"]


@verb(needs=[Ability.NAMED])
async def test_older_term_is_fenced(stage: Stage) -> None:
    await publish_numbered(stage.bus, 5, 0, b"1")
    await publish_numbered(stage.bus, 6, 0, b"2")
    with pytest.raises(ProducerFencedError, match="term 5"):
        await publish_numbered(stage.bus, 5, 1, b"late")
    assert await stage.payloads("a") == [b"1", b"2"]


@verb(needs=[Ability.NAMED])
async def test_opening_a_name_again_fences_its_predecessor(stage: Stage) -> None:
    other = await stage.connect()
    async with stage.bus.publisher("a", name="p") as old:
        old.send(b"1")
        await old.flush()
        async with other.publisher("a", name="p") as new:
            old.send(b"too late")
            with pytest.raises(ProducerFencedError):
                await old.flush()
            with pytest.raises(ProducerFencedError):
                old.send(b"never")
            new.send(b"2")
    assert await stage.payloads("a") == [b"1", b"2"]


@verb(needs=[Ability.NAMED])
async def test_names_do_not_mind_each_other(stage: Stage) -> None:
    for number in range(3):
        await publish_numbered(stage.bus, 1, number, b"p%d" % number)
        await publish_numbered(stage.bus, 9, number, b"q%d" % number, name="q")
    assert await stage.payloads("a") == [b"p0", b"q0", b"p1", b"q1", b"p2", b"q2"]


@verb(needs=[Ability.NAMED])
async def test_named_publisher_is_always_stored(stage: Stage) -> None:
    with pytest.raises(ClientFault, match="named publisher"):
        stage.bus.publisher("a", name="p", level="received")


@verb(needs=[Ability.NAMED])
async def test_named_publisher_has_to_be_opened(stage: Stage) -> None:
    publisher = stage.bus.publisher("a", name="p")
    with pytest.raises(ClientFault, match="async with"):
        publisher.send(b"x")


@verb(needs=[Ability.NAMED, Ability.RESTART])
async def test_sequence_survives_a_restart(stage: Stage) -> None:
    await publish_numbered(stage.bus, 3, 0, b"1")
    await stage.restart()
    again = await publish_numbered(stage.bus, 3, 0, b"1")
    assert (again.is_repeated, list(again.base_offsets)) == (True, [1])
    with pytest.raises(ProducerFault):
        await publish_numbered(stage.bus, 3, 2, b"3")
    with pytest.raises(ProducerFencedError):
        await publish_numbered(stage.bus, 2, 0, b"older")
    async with stage.bus.publisher("a", name="p") as publisher:
        publisher.send(b"2")
    assert await stage.payloads("a") == [b"1", b"2"]
