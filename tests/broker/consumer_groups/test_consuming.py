"""Acknowledged work in the broker: who gets what, what comes back, and what a restart remembers."""

from __future__ import annotations

import asyncio

import pytest

from runnel.broker.consumer_groups.dead_letter_queues import SettleRequest
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest
from runnel.broker.fetcher import FetchRequest
from runnel.config import Keep, LimitSettings, Retain, Rotate, TopicRule, Until
from runnel.errors import (
    ClientFault,
    InvalidNameError,
    MemberReplacedError,
    SubscriptionDiffersError,
    UnknownSubscriptionError,
)
from runnel.formats.batch import Batch
from runnel.formats.heads import PartitionPlace, Start
from runnel.formats.message import Message
from runnel.formats.work_heads import WorkOptions
from tests.broker.consumer_groups.scenes import Scene, Worker, scene
from tests.broker.scenes import Store
from tests.log.samples import trim_log

ON_DISK = (Store.FAKE_DISK,)
UNKEPT = TopicRule(match="live/*", keep=Keep.NONE)
SPREAD = TopicRule(match="p", partitions=3)
QUICK = WorkOptions(lease_ms=1000, deliveries_max=2, retry_delay_ms=0)


@scene()
async def test_what_was_there_and_what_comes_is_delivered(at: Scene) -> None:
    await at.publish("a", b"1", b"2")
    worker = await at.consume("a")
    await at.publish("a", b"3")
    await at.until(lambda: worker.payloads() == [b"1", b"2", b"3"])
    assert worker.ack(1, 2, 3) == []
    await worker.consumer.wait_stored()
    assert await at.backlog() == 0


@scene()
async def test_latest_begins_with_what_comes_next(at: Scene) -> None:
    await at.publish("a", b"1")
    worker = await at.consume("a", start=Start("latest"))
    await at.publish("a", b"2")
    await at.publish("a", b"3")
    await at.until(lambda: worker.offsets() == [2, 3])


@scene(SPREAD)
async def test_offsets_say_where_partitions_begin(at: Scene) -> None:
    for partition in range(3):
        await at.publish("p", b"1", b"2", b"3", partition=partition)
    start = Start("offsets", [PartitionPlace("p", 1, 3)])
    worker = await at.consume("p", start=start)
    await at.until(lambda: len(worker.messages) == 7)
    assert [m.offset for m in worker.messages if m.partition == 1] == [3]


@scene()
async def test_a_topic_made_later_joins_with_its_first_message(at: Scene) -> None:
    worker = await at.consume("t/*", start=Start("latest"))
    await at.publish("t/new", b"1")
    await at.publish("t/new", b"2")
    await at.until(lambda: worker.offsets("t/new") == [1, 2])


@scene()
async def test_two_subscriptions_get_everything_each(at: Scene) -> None:
    one = await at.consume("a", subscription="one")
    two = await at.consume("a", subscription="two")
    await at.publish("a", b"1", b"2")
    await at.until(lambda: one.offsets() == two.offsets() == [1, 2])


@scene()
async def test_two_consumers_share_the_messages(at: Scene) -> None:
    one = await at.consume("a", window_messages=3)
    two = await at.consume("a", window_messages=3)
    await at.publish("a", *[b"%d" % number for number in range(6)])
    await at.until(lambda: len(one.messages) + len(two.messages) == 6)
    assert sorted(one.offsets() + two.offsets()) == [1, 2, 3, 4, 5, 6]
    assert len(one.messages) == len(two.messages) == 3


@scene()
async def test_a_window_is_not_exceeded_and_acks_make_room(at: Scene) -> None:
    worker = await at.consume("a", window_messages=2)
    await at.publish("a", *[b"%d" % number for number in range(5)])
    await at.settle()
    assert worker.offsets() == [1, 2]
    worker.ack(2)
    await at.until(lambda: worker.offsets() == [1, 2, 3])
    worker.consumer.resize(0, 0)
    worker.ack(1, 3)
    await at.settle()
    assert worker.offsets() == [1, 2, 3]
    worker.consumer.resize(10, 2**20)
    await at.until(lambda: worker.offsets() == [1, 2, 3, 4, 5])


@scene()
async def test_a_nacked_message_comes_again_after_its_delay_and_says_so(at: Scene) -> None:
    at.pass_time(1)
    worker = await at.consume("a")
    await at.publish("a", b"1", b"2")
    await at.until(lambda: len(worker.messages) == 2)
    worker.nack(1, delay_ns=5_000_000_000)
    await at.settle()
    assert worker.offsets() == [1, 2]
    at.pass_time(5)
    await at.until(lambda: worker.offsets() == [1, 2, 1])
    assert worker.attempts["a", 1].failures == 1
    assert worker.attempts["a", 1].first_delivery_ns > 0


@scene()
async def test_an_ended_lease_goes_to_another_and_its_ack_is_late(at: Scene) -> None:
    slow = await at.consume("a", options=QUICK)
    await at.publish("a", b"1")
    await at.until(lambda: slow.offsets() == [1])
    quick = await at.consume("a")
    slow.consumer.resize(0, 0)
    at.pass_time(1.5)
    await at.until(lambda: quick.offsets() == [1])
    assert slow.ack(1) == [slow.parts["a", 1]]
    assert quick.ack(1) == []


@scene()
async def test_a_renewed_lease_stays(at: Scene) -> None:
    worker = await at.consume("a", options=QUICK)
    await at.publish("a", b"1")
    await at.until(lambda: worker.offsets() == [1])
    for _ in range(5):
        at.pass_time(0.6)
        worker.consumer.renew([worker.parts["a", 1].delivery])
    assert worker.offsets() == [1]
    assert worker.ack(1) == []


@scene()
async def test_what_a_lost_consumer_had_goes_to_another_at_once(at: Scene) -> None:
    lost = await at.consume("a")
    await at.publish("a", b"1", b"2")
    await at.until(lambda: lost.offsets() == [1, 2])
    other = await at.consume("a")
    lost.consumer.close(is_clean=False)
    await at.until(lambda: other.offsets() == [1, 2])
    assert other.attempts["a", 1].failures == 1


@scene()
async def test_failing_too_often_makes_a_dead_letter_that_says_what_it_was(at: Scene) -> None:
    worker = await at.consume("a", options=QUICK)
    await at.publish("a", b"bad", key=b"k")
    await at.until(lambda: worker.offsets() == [1])
    worker.nack(1)
    await at.until(lambda: worker.offsets() == [1, 1])
    worker.nack(1)
    await at.until(lambda: at.broker.routes(["!dead/s"])[0].exists)
    await at.until_dead(1)
    batches, next_offset = await at.broker.consumer_groups.dead_letters("s", 0, 10)
    (letter,) = batches[0].messages()
    assert next_offset == 0
    assert (letter.topic, letter.payload, letter.key) == ("!dead/s", b"bad", b"k")
    assert letter.tags["dead.topic"] == "a"
    assert letter.tags["dead.offset"] == "1"
    assert letter.tags["dead.deliveries"] == "2"
    assert letter.tags["dead.error"] == "a test says so"
    assert worker.offsets() == [1, 1]
    assert await at.backlog() == 0


async def _make_dead_letter(at: Scene) -> None:
    worker = await at.consume("a", options=QUICK)
    await at.publish("a", b"bad")
    await _fail_twice(at, worker)
    await at.until_dead(1)
    worker.consumer.close(is_clean=True)


async def _fail_twice(at: Scene, worker: Worker) -> None:
    await at.until(lambda: len(worker.messages) == 1)
    worker.nack(1)
    await at.until(lambda: len(worker.messages) == 2)
    worker.nack(1)


@scene()
async def test_a_dead_letter_that_is_sent_back_is_delivered_to_its_subscription_alone(
    at: Scene,
) -> None:
    other = await at.consume("a", subscription="other")
    await _make_dead_letter(at)
    await at.until(lambda: other.offsets() == [1])
    other.ack(1)
    assert (
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", [1], is_all=False, is_redriven=True)
        )
        == 1
    )
    worker = await at.consume("a")
    await at.until(lambda: worker.offsets() == [1])
    assert not worker.attempts
    await at.settle()
    assert other.offsets() == [1]
    assert (await at.state()).dead == 0
    assert (
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", [1], is_all=False, is_redriven=True)
        )
        == 0
    )


@scene(stores=ON_DISK)
async def test_dead_letter_sent_back_while_a_consumer_joins_is_delivered(at: Scene) -> None:
    """Also if the consumer's group covers the partition before the note that the message is owed again is stored."""
    await at.publish("a", b"bad")
    for turns in range(24):
        name = f"s{turns}"
        await _fail_twice(at, await at.consume("a", subscription=name, options=QUICK))
        await at.settle()
        await at.restart()  # no group covers the partition now
        settling = at.broker.consumer_groups.settle_dead(SettleRequest(name, [1], is_redriven=True))
        sent_back = asyncio.ensure_future(settling)
        for _ in range(turns):
            await asyncio.sleep(0)
        worker = await at.consume("a", subscription=name)
        assert await sent_back == 1
        await at.settle()
        assert worker.offsets() == [1], f"joined after {turns} turns"


@scene()
async def test_dead_letters_can_be_dropped(at: Scene) -> None:
    await _make_dead_letter(at)
    assert (
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", (), is_all=True, is_redriven=False)
        )
        == 1
    )
    assert (await at.state()).dead == 0
    assert await at.backlog() == 0


@scene()
async def test_a_key_goes_to_one_consumer_at_a_time_and_in_order(at: Scene) -> None:
    one = await at.consume("a", mode="key_shared")
    two = await at.consume("a")
    for number in range(20):
        await at.publish("a", b"%d" % number, key=b"k%d" % (number % 4))
    await at.until(lambda: len(one.messages) + len(two.messages) == 20)
    keys_of_one = {message.key for message in one.messages}
    keys_of_two = {message.key for message in two.messages}
    assert not keys_of_one & keys_of_two
    for worker in (one, two):
        for key in {message.key for message in worker.messages}:
            offsets = [m.offset for m in worker.messages if m.key == key]
            assert offsets == sorted(offsets)


@scene()
async def test_a_failed_message_recalls_the_later_ones_of_its_key(at: Scene) -> None:
    worker = await at.consume("a", mode="key_shared")
    await at.publish("a", b"1", b"2", b"3", key=b"k")
    await at.until(lambda: worker.offsets() == [1, 2, 3])
    worker.nack(1, delay_ns=0)
    recalled = [offset for part in worker.recalls for offset in range(part.begin, part.end)]
    assert recalled == [2, 3]
    await at.settle()
    assert worker.offsets() == [1, 2, 3]
    assert worker.ack(2) == [worker.parts["a", 2]]
    worker.consumer.recalled([worker.parts["a", 3]])
    await at.until(lambda: worker.offsets() == [1, 2, 3, 1, 2, 3])


@scene()
async def test_each_member_of_a_multicast_gets_everything_from_its_joining_on(at: Scene) -> None:
    await at.publish("a", b"before")
    one = await at.consume("a", mode="multicast", member="one")
    await at.publish("a", b"1")
    two = await at.consume("a", mode="multicast", member="two")
    await at.publish("a", b"2")
    await at.until(lambda: one.payloads() == [b"1", b"2"] and two.payloads() == [b"2"])
    one.ack(2, 3)
    one.consumer.close(is_clean=True)
    await at.publish("a", b"3")
    again = await at.consume("a", mode="multicast", member="one")
    await at.until(lambda: again.payloads() == [b"3"])


@scene()
async def test_an_unnamed_member_owes_nothing_once_it_is_gone(at: Scene) -> None:
    worker = await at.consume("a", mode="multicast")
    await at.publish("a", b"1")
    await at.until(lambda: worker.offsets() == [1])
    worker.consumer.close(is_clean=False)
    assert (await at.state()).members == []


@scene()
async def test_a_member_that_comes_again_takes_its_own_place(at: Scene) -> None:
    first = await at.consume("a", mode="multicast", member="m")
    await at.publish("a", b"1")
    await at.until(lambda: first.offsets() == [1])
    second = await at.consume("a", mode="multicast", member="m")
    assert isinstance(first.error, MemberReplacedError)
    await at.until(lambda: second.offsets() == [1])
    assert first.ack(1) == [first.parts["a", 1]]


@scene()
async def test_a_member_absent_for_too_long_is_owed_nothing(at: Scene) -> None:
    options = WorkOptions(absent_ms_max=10_000)
    worker = await at.consume("a", mode="multicast", member="m", options=options)
    worker.consumer.close(is_clean=False)
    for _ in range(13):
        at.pass_time(1)
        await at.settle()
    assert (await at.state()).members == []


@scene(stores=ON_DISK)
async def test_a_restart_delivers_again_what_was_not_acknowledged_and_nothing_else(
    at: Scene,
) -> None:
    worker = await at.consume("a")
    await at.publish("a", b"1", b"2", b"3", b"4")
    await at.until(lambda: len(worker.messages) == 4)
    worker.ack(2, 4)
    await worker.consumer.wait_stored()
    await at.restart()
    again = await at.consume()
    await at.until(lambda: again.offsets() == [1, 3])
    assert not again.attempts  # what was in flight does not count


@scene(stores=ON_DISK)
async def test_a_restart_remembers_failures_and_delays(at: Scene) -> None:
    worker = await at.consume("a")
    await at.publish("a", b"1", b"2")
    await at.until(lambda: len(worker.messages) == 2)
    worker.nack(1, delay_ns=60_000_000_000)
    await worker.consumer.wait_stored()
    await at.restart()
    again = await at.consume()
    await at.until(lambda: again.offsets() == [2])
    again.ack(2)
    await at.settle()
    assert again.offsets() == [2]
    at.pass_time(61)
    await at.until(lambda: again.offsets() == [2, 1])
    assert again.attempts["a", 1].failures == 1


@scene()
async def test_a_paused_subscription_delivers_nothing(at: Scene) -> None:
    worker = await at.consume("a")
    await at.broker.consumer_groups.pause_subscription("s", is_paused=True)
    await at.publish("a", b"1")
    await at.settle()
    assert worker.offsets() == []
    await at.broker.consumer_groups.pause_subscription("s", is_paused=False)
    await at.until(lambda: worker.offsets() == [1])


@scene()
async def test_a_moved_subscription_begins_elsewhere_and_old_leases_are_late(at: Scene) -> None:
    worker = await at.consume("a")
    await at.publish("a", b"1", b"2", b"3")
    await at.until(lambda: worker.offsets() == [1, 2, 3])
    worker.ack(1, 2)
    old = worker.parts["a", 3]
    await at.broker.consumer_groups.move_subscription("s", Start("earliest"))
    await at.until(lambda: worker.offsets() == [1, 2, 3, 1, 2, 3])
    assert worker.consumer.ack((), [old]) == [old]
    await at.broker.consumer_groups.move_subscription("s", Start("latest"))
    assert await at.backlog() == 0


@scene()
async def test_a_deleted_subscription_ends_its_consumers(at: Scene) -> None:
    worker = await at.consume("a")
    await at.broker.consumer_groups.delete_subscription("s")
    assert isinstance(worker.error, UnknownSubscriptionError)
    with pytest.raises(UnknownSubscriptionError, match="name its topics"):
        await at.consume()
    await at.publish("a", b"1")
    worker = await at.consume("a", start=Start("latest"))
    assert await at.backlog() == 0


@scene()
async def test_another_mode_or_other_topics_are_an_error_that_says_so(at: Scene) -> None:
    await at.consume("a")
    with pytest.raises(SubscriptionDiffersError, match="is shared, not key_shared"):
        await at.consume("a", mode="key_shared")
    with pytest.raises(SubscriptionDiffersError, match="is over a, not over b"):
        await at.consume("b")
    with pytest.raises(ClientFault, match="only a multicast has members"):
        await at.consume("a", member="m")


@scene(UNKEPT)
async def test_what_cannot_be_is_refused(at: Scene) -> None:
    with pytest.raises(ClientFault, match="is not kept"):
        await at.consume("live/x")
    with pytest.raises(ClientFault, match="shared, key_shared, multicast"):
        await at.consume("a", mode="queue")
    with pytest.raises(InvalidNameError):
        await at.consume("a", subscription="")
    with pytest.raises(ClientFault, match="none of earliest, latest, time, offsets"):
        await at.consume("a", start=Start("last"))
    with pytest.raises(UnknownSubscriptionError, match="does not exist"):
        await at.broker.consumer_groups.delete_subscription("nobody")


@scene(TopicRule(match="a", rotate=Rotate(bytes_max=1), retain=Retain(until=Until.ACKED)))
async def test_acknowledged_messages_go_and_a_straggler_stays(at: Scene) -> None:
    worker = await at.consume("a")
    for number in range(6):
        await at.publish("a", b"%d" % number)
    await at.until(lambda: len(worker.messages) == 6)
    worker.ack(1, 2, 4, 5)
    await worker.consumer.wait_stored()
    for log in at.broker._stores.kept:
        await trim_log(log)
    fetched = await at.broker.fetch(FetchRequest("a"))
    offsets = [message.offset for batch in fetched.batches for message in batch]
    assert 3 in offsets
    assert not {1, 2, 4, 5} & set(offsets)


@scene()
async def test_a_deleted_topic_leaves_its_subscription_in_peace(at: Scene) -> None:
    worker = await at.consume("t/*")
    await at.publish("t/1", b"1")
    await at.until(lambda: worker.offsets("t/1") == [1])
    await at.broker.delete_topic("t/1")
    assert worker.ack(1, topic="t/1") == [worker.parts["t/1", 1]]
    await at.publish("t/2", b"1")
    await at.until(lambda: worker.offsets("t/2") == [1])
    await at.publish("t/1", b"again")
    await at.until(lambda: worker.offsets("t/1") == [1, 2])


@scene()
async def test_a_batch_of_many_topics_is_delivered_topic_by_topic(at: Scene) -> None:
    worker = await at.consume("t/*", mode="key_shared")
    messages = [Message(f"t/{number}", b"%d" % number, b"k") for number in range(50)]
    await at.broker.publish(Batch.from_messages(messages))
    await at.until(lambda: len(worker.messages) == 50)
    assert sorted(worker.payloads()) == sorted(message.payload for message in messages)
    assert (
        worker.consumer.ack([delivery.lease.delivery for delivery in worker.deliveries], ()) == []
    )
    assert await at.backlog() == 0


@scene()
async def test_nothing_overtakes_when_a_connection_becomes_full_while_it_is_sent_to(
    at: Scene,
) -> None:
    keys = [b"k%d" % number for number in range(8)]
    workers = [await at.consume("a", mode="key_shared", window_messages=20) for _ in range(2)]
    for worker in workers:
        worker.on_delivery = worker.consumer.pause
    for round_number in range(10):
        batch = [Message("a", b"%d" % round_number, key) for key in keys]
        await at.broker.publish(Batch.from_messages(batch))
    for _ in range(200):
        for worker in workers:
            worker.consumer.resume()
            worker.ack(*worker.offsets())
        await at.settle()
        if not await at.backlog():
            break
    assert await at.backlog() == 0
    for worker in workers:
        for key in keys:
            offsets = [message.offset for message in worker.messages if message.key == key]
            assert offsets == sorted(offsets)


@scene()
async def test_a_dead_letter_of_a_member_is_sent_back_to_that_member_alone(at: Scene) -> None:
    one = await at.consume("a", mode="multicast", member="one", options=QUICK)
    two = await at.consume("a", mode="multicast", member="two")
    await at.publish("a", b"bad")
    await at.until(lambda: two.offsets() == [1])
    two.ack(1)
    await at.until(lambda: one.offsets() == [1])
    one.nack(1)
    await at.until(lambda: one.offsets() == [1, 1])
    one.nack(1)
    await at.until_dead(1)
    assert (
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", (), is_all=True, is_redriven=True)
        )
        == 1
    )
    await at.until(lambda: one.offsets() == [1, 1, 1])
    await at.settle()
    assert two.offsets() == [1]


@scene()
async def test_letters_that_were_settled_stay_so_for_a_subscription_of_the_same_name(
    at: Scene,
) -> None:
    await _make_dead_letter(at)
    await at.broker.consumer_groups.settle_dead(
        SettleRequest("s", (), is_all=True, is_redriven=False)
    )
    await at.broker.consumer_groups.delete_subscription("s")
    await at.consume("a", start=Start("latest"))
    assert (await at.state()).dead == 0


# --- What an adversary found ---

IN_MEMORY = TopicRule(match="a", keep=Keep.MEMORY)


@scene(IN_MEMORY, stores=ON_DISK)
async def test_another_message_at_the_offset_of_a_dead_letter_is_not_taken_for_it(
    at: Scene,
) -> None:
    await _make_dead_letter(at)
    await at.restart()  # which forgets the topic
    await at.publish("a", b"new")
    worker = await at.consume("a")
    await at.until(lambda: worker.payloads() == [b"new"])
    worker.ack(1)
    assert (
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", (), is_all=True, is_redriven=True)
        )
        == 1
    )
    await at.until(lambda: worker.payloads() == [b"new", b"bad"])


@scene()
async def test_one_letter_that_cannot_be_sent_back_holds_up_no_other(at: Scene) -> None:
    await _make_dead_letter(at)
    await at.publish("!dead/s", b"somebody's note")
    with pytest.raises(ClientFault, match=r"1 dead letters were settled, 1 were not.*!dead/s@2"):
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", (), is_all=True, is_redriven=True)
        )
    assert (await at.state()).dead == 1
    worker = await at.consume("a")
    await at.until(lambda: worker.payloads() == [b"bad"])
    assert (
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", [2], is_all=False, is_redriven=False)
        )
        == 1
    )
    assert (await at.state()).dead == 0


@scene()
async def test_letters_that_were_purged_are_not_counted(at: Scene) -> None:
    await _make_dead_letter(at)
    await at.broker.purge_topic("!dead/s")
    assert (await at.state()).dead == 0
    assert (
        await at.broker.consumer_groups.settle_dead(
            SettleRequest("s", [1], is_all=False, is_redriven=True)
        )
        == 0
    )


@scene()
async def test_what_a_deleted_topic_had_is_not_owed_when_it_is_made_again(at: Scene) -> None:
    await at.publish("t/a", *[b"x"] * 50)
    await at.broker.delete_topic("t/a")
    await at.broker.consumer_groups.make_subscription(SubscriptionRequest("s", ["t/*"], "shared"))
    await at.publish("t/a", b"first")
    assert await at.backlog() == 1
    worker = await at.consume()
    await at.until(lambda: worker.offsets("t/a") == [51])


@scene()
async def test_a_topic_made_again_owes_nothing_of_what_was_begun_before(at: Scene) -> None:
    await at.publish("t/a", *[b"x"] * 4)
    worker = await at.consume("t/*")
    await at.until(lambda: len(worker.offsets("t/a")) == 4)
    worker.ack(2, topic="t/a")
    await worker.consumer.wait_stored()
    await at.broker.delete_topic("t/a")
    await at.publish("t/a", b"new")
    await at.until(lambda: worker.offsets("t/a")[-1] == 5)
    worker.ack(5, topic="t/a")
    await worker.consumer.wait_stored()
    assert await at.backlog() == 0
    worker.consumer.close(is_clean=True)
    assert await at.backlog() == 0


@scene()
async def test_what_a_topic_had_that_was_deleted_while_nobody_consumed_is_not_counted(
    at: Scene,
) -> None:
    await at.publish("t/a", *[b"x"] * 4)
    worker = await at.consume("t/*")
    await at.until(lambda: len(worker.offsets("t/a")) == 4)
    worker.ack(2, topic="t/a")
    await worker.consumer.wait_stored()
    worker.consumer.close(is_clean=True)
    await at.broker.delete_topic("t/a")
    await at.publish("t/a", b"new")
    assert await at.backlog() == 1
    again = await at.consume("t/*")
    await at.until(lambda: again.offsets("t/a") == [5])
    assert await at.backlog() == 1


@scene(stores=ON_DISK)
async def test_a_member_is_not_absent_while_the_broker_is_down(at: Scene) -> None:
    options = WorkOptions(absent_ms_max=10_000)
    worker = await at.consume("a", mode="multicast", member="m", options=options)
    await at.publish("a", b"1")
    await at.until(lambda: worker.offsets() == [1])
    worker.consumer.close(is_clean=True)
    await at.broker.close()
    at.pass_time(3600)
    await at.start()
    for _ in range(8):
        at.pass_time(1)
        await at.settle()
    again = await at.consume("a", mode="multicast", member="m")
    await at.until(lambda: again.offsets() == [1])


@scene()
async def test_names_that_unnamed_members_get_are_refused(at: Scene) -> None:
    with pytest.raises(ClientFault, match="are given to unnamed members"):
        await at.consume("a", mode="multicast", member="~1")


@scene(limits=LimitSettings(tags_max=2))
async def test_a_dead_letter_is_stored_whatever_publishers_are_allowed(at: Scene) -> None:
    await _make_dead_letter(at)
    assert (await at.state()).dead == 1


@scene()
async def test_a_lease_begins_with_its_first_message(at: Scene) -> None:
    workers = [await at.consume("a", window_messages=5) for _ in range(3)]
    await at.publish("a", *[b"x"] * 15)
    await at.until(lambda: sum(len(worker.messages) for worker in workers) == 15)
    spans = [(each.lease.begin, each.lease.end) for worker in workers for each in worker.deliveries]
    assert sorted(spans) == [(1, 6), (6, 11), (11, 16)]
