"""What acknowledged work takes in its stride: askers that leave, topics that vanish, disks that are full."""

from __future__ import annotations

import asyncio
import errno

import pytest

from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest
from runnel.broker.fetcher import FetchRequest
from runnel.config import Retain, Rotate, TopicRule, Until
from runnel.errors import DiskFullError, UnknownSubscriptionError
from runnel.formats.heads import Start
from runnel.formats.work_heads import Consume, WorkOptions
from tests.broker.consumer_groups.scenes import Scene, Worker, scene
from tests.broker.scenes import Store
from tests.fakes.disk import Kind
from tests.log.samples import trim_log

ON_DISK = (Store.FAKE_DISK,)
TO_THE_LAST = TopicRule(match="a", rotate=Rotate(bytes_max=1), retain=Retain(until=Until.ACKED))


@scene()
async def test_whatever_is_said_to_a_consumer_that_was_ended_does_nothing(at: Scene) -> None:
    worker = await at.consume("a", mode="multicast", member="m")
    await at.broker.consumer_groups.remove_member("s", "m")
    assert isinstance(worker.error, UnknownSubscriptionError)
    consumer = worker.consumer
    for say in (consumer.start, consumer.pause, consumer.resume):
        say()
    consumer.resize(5, 5)
    consumer.renew([1])
    consumer.close(is_clean=False)


@scene(TopicRule(match="t/*"))
async def test_a_consumer_that_leaves_while_it_joins_is_missed_by_nobody(at: Scene) -> None:
    for number in range(5):
        await at.publish(f"t/{number}", b"1")
    await at.broker.consumer_groups.make_subscription(
        SubscriptionRequest("s", ["t/*"], "shared", Start("earliest"))
    )
    for turns in range(12):
        joining = asyncio.ensure_future(
            at.broker.consumer_groups.consume(1, Worker(), Consume(1, 1, "s"))
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        is_in = joining.done()
        joining.cancel()
        if is_in:
            (await joining).close(is_clean=True)
    await at.settle()
    assert (await at.state()).members[0].consumers == 0
    assert not at.broker.consumer_groups._subscriptions._active
    worker = await at.consume()
    await at.until(lambda: len(worker.messages) == 5)


@scene()
async def test_what_was_asked_for_is_done_though_the_asker_leaves(at: Scene) -> None:
    await at.consume("a")
    asked = asyncio.ensure_future(at.broker.consumer_groups.pause_subscription("s", is_paused=True))
    await asyncio.sleep(0)
    asked.cancel()
    await at.settle()
    assert (await at.state()).is_paused
    asked = asyncio.ensure_future(at.broker.consumer_groups.delete_subscription("s"))
    await asyncio.sleep(0)
    asked.cancel()
    await at.settle()
    assert await at.broker.consumer_groups.subscriptions() == []


@scene(stores=ON_DISK)
async def test_a_full_disk_does_not_end_the_look_for_absent_members(at: Scene) -> None:
    options = WorkOptions(absent_ms_max=10_000)
    worker = await at.consume("a", mode="multicast", member="m", options=options)
    worker.consumer.close(is_clean=True)
    at.disk.fail(Kind.WRITE, errno.ENOSPC, times=None)
    for _ in range(3):
        at.pass_time(1)
        await at.settle()
    at.disk.heal()
    for _ in range(13):
        at.pass_time(1)
        await at.settle()
    assert (await at.state()).members == []


@scene(stores=ON_DISK)
async def test_acks_that_could_not_be_stored_are_stored_later(at: Scene) -> None:
    worker = await at.consume("a")
    await at.publish("a", b"1")
    await at.until(lambda: worker.offsets() == [1])
    at.disk.fail(Kind.WRITE, errno.ENOSPC, path=lambda path: "state/" in path, times=None)
    worker.ack(1)
    with pytest.raises(DiskFullError):
        await worker.consumer.wait_stored()
    at.disk.heal()
    await worker.consumer.wait_stored()
    await at.restart()
    assert await at.backlog() == 0


@scene()
async def test_a_lease_that_is_made_shorter_ends_sooner(at: Scene) -> None:
    worker = await at.consume("a")
    await at.publish("a", b"1")
    await at.until(lambda: worker.offsets() == [1])
    worker.consumer.renew([worker.parts["a", 1].delivery], lease_ns=1_000_000_000)
    at.pass_time(1)
    await at.until(lambda: worker.offsets() == [1, 1])


@scene()
async def test_a_deleted_topic_makes_room_for_others(at: Scene) -> None:
    worker = await at.consume("t/*", window_messages=1)
    await at.publish("t/1", b"1")
    await at.until(lambda: worker.offsets("t/1") == [1])
    await at.publish("t/2", b"1")
    await at.settle()
    assert worker.offsets("t/2") == []
    await at.broker.delete_topic("t/1")
    await at.until(lambda: worker.offsets("t/2") == [1])


@scene()
async def test_a_topic_deleted_while_nobody_consumes_is_forgotten(at: Scene) -> None:
    worker = await at.consume("t/*")
    await at.publish("t/1", b"1")
    await at.until(lambda: worker.offsets("t/1") == [1])
    worker.consumer.close(is_clean=True)
    await at.broker.delete_topic("t/1")
    worker = await at.consume()
    assert await at.backlog() == 0
    await at.publish("t/1", b"2")
    await at.until(lambda: worker.offsets("t/1") == [2])


@scene()
async def test_what_an_unnamed_member_had_does_not_become_a_dead_letter_when_it_is_lost(
    at: Scene,
) -> None:
    worker = await at.consume("a", mode="multicast", options=WorkOptions(deliveries_max=1))
    await at.publish("a", b"1")
    await at.until(lambda: worker.offsets() == [1])
    worker.consumer.close(is_clean=False)
    await at.settle()
    assert (await at.state()).dead == 0


@scene(TO_THE_LAST)
async def test_what_an_unnamed_member_acknowledges_goes(at: Scene) -> None:
    worker = await at.consume("a", mode="multicast")
    for number in range(4):
        await at.publish("a", b"%d" % number)
    await at.until(lambda: len(worker.messages) == 4)
    [log] = [log for log in at.broker._stores.kept if log.metadata.topics.has("a")]
    await trim_log(log)
    assert (await log.bounds("a", 0)).first_offset == 1
    worker.ack(1, 2, 3)
    await trim_log(log)
    assert (await log.bounds("a", 0)).first_offset == 4


@scene(stores=ON_DISK)
async def test_what_is_purged_while_it_is_read_is_not_delivered(at: Scene) -> None:
    await at.broker.consumer_groups.make_subscription(
        SubscriptionRequest("s", ["a"], "shared", Start("earliest"))
    )
    for turns in range(40):
        await at.publish("a", b"1", b"2")
        worker = Worker()
        worker.consumer = await at.broker.consumer_groups.consume(1, worker, Consume(1, 1, "s"))
        purging = asyncio.ensure_future(at.broker.purge_topic("a"))
        for _ in range(turns % 10):
            await asyncio.sleep(0)
        worker.consumer.start()  # nothing of it is in memory, so it is read
        await purging
        seen = len(worker.messages)
        await at.settle()
        assert len(worker.messages) == seen
        worker.consumer.close(is_clean=True)


@scene(TopicRule(match="t/*", rotate=Rotate(bytes_max=1), retain=Retain(age_ns=60_000_000_000)))
async def test_retention_passes_what_segments_have_of_a_deleted_topic(at: Scene) -> None:
    await at.publish("t/1", b"1")
    await at.consume("t/*")
    await at.publish("t/2", b"2")
    await at.broker.delete_topic("t/1")
    await at.publish("t/2", b"3")
    at.pass_time(61)
    for log in at.broker._stores.kept:
        await trim_log(log)
    fetched = await at.broker.fetch(FetchRequest("t/2"))
    assert [message.offset for batch in fetched.batches for message in batch] == [1, 2]
