"""W3C trace context is in the tags, and tags stay with their message: into the dead letter, and back."""

from __future__ import annotations

from runnel.broker.consumer_groups.dead_letter_queues import SettleRequest
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.work_heads import WorkOptions
from tests.broker.consumer_groups.scenes import Scene, Worker, scene

TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7",
}
ONCE = WorkOptions(deliveries_max=1, retry_delay_ms=0)


async def make_dead_letter(at: Scene) -> Worker:
    """A message with a trace context that fails at once."""
    worker = await at.consume("a", options=ONCE)
    await at.broker.publish(
        Batch.from_messages([Message("a", b"bad", tags={"unit": "C", **TRACE})])
    )
    await at.until(lambda: worker.offsets() == [1])
    assert worker.messages[0].tags == {"unit": "C", **TRACE}
    worker.nack(1)
    await at.until_dead(1)
    return worker


@scene()
async def test_dead_letter_has_the_trace_of_its_message(at: Scene) -> None:
    await make_dead_letter(at)
    batches, _ = await at.broker.consumer_groups.dead_letters("s", 0, 10)
    (letter,) = batches[0].messages()
    assert {**letter.tags, **TRACE} == letter.tags
    assert letter.tags["unit"] == "C"


@scene()
async def test_message_that_is_sent_back_has_its_trace(at: Scene) -> None:
    worker = await make_dead_letter(at)
    assert (
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", [1], is_all=False, is_redriven=True)
        )
        == 1
    )
    await at.until(lambda: len(worker.messages) == 2)
    assert worker.messages[1].tags == {"unit": "C", **TRACE}


@scene()
async def test_copy_of_a_message_that_has_gone_has_its_trace(at: Scene) -> None:
    worker = await make_dead_letter(at)
    await at.broker.purge_topic("a")
    assert (
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", [1], is_all=False, is_redriven=True)
        )
        == 1
    )
    await at.until(lambda: len(worker.messages) == 2)
    assert worker.messages[1].offset == 2
    assert worker.messages[1].tags == {"unit": "C", **TRACE}
