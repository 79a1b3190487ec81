"""Acknowledged work over a connection: what reaches the broker, which frames the client gets, and when."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import NativeSettings
from runnel.errors import DiskFullError, MemberReplacedError, RunnelError, UnknownSubscriptionError
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.work_heads import (
    Ack,
    AckedHead,
    AckUpTo,
    Consume,
    ConsumerEnded,
    Consuming,
    DeadLettersHead,
    DeadList,
    DeleteSubscription,
    DeliveryPart,
    Late,
    Lease,
    Leave,
    ListSubscriptions,
    MakeSubscription,
    MoveSubscription,
    Nack,
    PauseSubscription,
    Picked,
    Recall,
    Recalled,
    RemoveMember,
    Renew,
    SettleDead,
    SettledHead,
    SubscriptionListHead,
    Window,
    WorkHead,
    WorkOptions,
)
from runnel.group_rules.definition import SubscriptionOptions
from runnel.protocols.native.requests import PARTS_MAX
from tests.protocols.native.fake_work import FakeConsumer
from tests.protocols.native.scene import Scene
from tests.protocols.native.talker import frames_of, in_loop, packed, subscribe, turn


def consume(request_id: int, number: int = 1, **fields: object) -> Consume:
    return Consume(request_id, number, "billing", ["orders/*"], "shared", **fields)  # type: ignore[arg-type]


async def consuming(native: NativeSettings | None = None) -> tuple[Scene, FakeConsumer]:
    """A session with a consumer 1."""
    scene = Scene(native)
    await scene.ask_later(consume(2))
    (consumer,) = scene.broker.consumer_groups.consumers
    return scene, consumer


def error_in(answers: list[wire.Answer]) -> wire.Error:
    (error,) = answers
    assert isinstance(error, wire.Error)
    return error


# --- Beginning ---


@in_loop
async def test_work_begins_after_the_client_knows_of_the_consumer() -> None:
    scene = Scene()
    (told,) = await scene.ask_later(consume(2, 7, member="a", window_messages=5))
    assert told == Consuming(
        2, 7, "billing", "shared", ["orders/*"], SubscriptionOptions().to_wire(), "a"
    )
    (consumer,) = scene.broker.consumer_groups.consumers
    assert consumer.request.window_messages == 5
    assert consumer.calls == [("start",)]


@in_loop
async def test_a_consumer_that_waits_to_begin_holds_up_no_other_request() -> None:
    scene = Scene()
    scene.broker.consumer_groups.may_consume.clear()
    answers = await scene.ask_later(consume(2), wire.Ping(3), consume(4, 2))
    assert [type(answer) for answer in answers] == [wire.Pong]
    scene.broker.consumer_groups.may_consume.set()
    await turn()
    assert [type(answer) for answer in scene.hear()] == [Consuming, Consuming]


@in_loop
async def test_of_windows_named_early_the_last_counts() -> None:
    scene = Scene()
    scene.broker.consumer_groups.may_consume.clear()
    await scene.ask_later(consume(2), Window(1, 1, 100), Window(1, 2, 200))
    scene.broker.consumer_groups.may_consume.set()
    await turn()
    assert scene.broker.consumer_groups.consumers[0].calls == [("resize", 2, 200), ("start",)]


@in_loop
async def test_leaving_early_is_done_once_it_has_begun() -> None:
    scene = Scene()
    scene.broker.consumer_groups.may_consume.clear()
    assert await scene.ask_later(consume(2), Leave(3, 1), Leave(4, 1)) == []
    scene.broker.consumer_groups.may_consume.set()
    await turn()
    told, *done = scene.hear()
    assert isinstance(told, Consuming)
    assert done == [wire.Done(3), wire.Done(4)]
    assert scene.broker.consumer_groups.consumers[0].calls == [("close", True)]
    assert len(scene.session.consumers) == 0


@in_loop
async def test_a_consumers_number_in_use_is_refused_and_free_again_after_a_failure() -> None:
    scene = Scene()
    scene.broker.consumer_groups.failure = UnknownSubscriptionError("no billing")
    scene.broker.consumer_groups.may_consume.clear()
    taken = error_in(await scene.ask_later(consume(2), consume(3), Leave(4, 1)))
    assert (taken.id, taken.code) == (3, "bad_request")
    scene.broker.consumer_groups.may_consume.set()
    await turn()
    done, *failed = scene.hear()
    assert done == wire.Done(4)
    error = error_in(failed)
    assert (error.id, error.code) == (2, "unknown_subscription")
    scene.broker.consumer_groups.failure = None
    (told,) = await scene.ask_later(consume(5))
    assert isinstance(told, Consuming)


@in_loop
async def test_consumers_and_subscriptions_have_numbers_of_their_own() -> None:
    scene = Scene()
    answers = await scene.ask_later(subscribe(2, 1), consume(3, 1))
    assert [type(answer) for answer in answers] == [wire.Subscribed, Consuming]


@in_loop
async def test_one_consumer_more_than_allowed_is_refused() -> None:
    scene = Scene(NativeSettings(consumers_max=2))
    answers = await scene.ask_later(*(consume(number, number) for number in (2, 3, 4)))
    error = error_in([answer for answer in answers if isinstance(answer, wire.Error)])
    assert (error.id, error.code) == (4, "limit_exceeded")
    assert "native.consumers_max" in error.text


@in_loop
async def test_a_consumer_that_ends_before_it_began_is_refused_so() -> None:
    scene = Scene()
    scene.broker.consumer_groups.ends_consumers = MemberReplacedError("another has come")
    error = error_in(await scene.ask_later(consume(2)))
    assert (error.id, error.code) == (2, "member_replaced")
    assert scene.broker.consumer_groups.consumers[0].calls == [("close", True)]
    assert len(scene.session.consumers) == 0


# --- WorkHead ---


@in_loop
async def test_a_delivery_is_its_lease_and_its_block() -> None:
    scene, consumer = await consuming()
    consumer.deliver(b"12345678")
    (frame,) = frames_of(bytes(scene.output.data))
    assert wire.decode_answer(frame) == WorkHead(1, [Lease(1, "a", 0, 1, 2, [])])
    assert bytes(frame.tail) == b"12345678"
    assert scene.session.messages_out == 1


@in_loop
async def test_deliveries_share_frames_that_are_not_too_large() -> None:
    scene, consumer = await consuming(NativeSettings(frame_bytes_max=2**20))
    blocks = [bytes([number]) * 2**18 for number in range(5)] + [bytes(2**20), b"12345678"]
    consumer.deliver(*blocks)
    told = []
    for frame in frames_of(bytes(scene.output.data)):
        work = wire.decode_answer(frame)
        assert isinstance(work, WorkHead)
        told.append([lease.delivery for lease in work.leases])
        assert bytes(frame.tail) == b"".join(blocks[number - 1] for number in told[-1])
    assert told == [[1, 2], [3, 4], [5], [6], [7]]
    assert scene.session.messages_out == 7


@in_loop
async def test_recalls_late_notices_and_the_end_are_reported() -> None:
    scene, consumer = await consuming()
    consumer.sink.recall(1, [DeliveryPart(7, 18, 20)])
    consumer.sink.late(1, [DeliveryPart(7, 20, 21)])
    consumer.sink.consumer_ended(1, MemberReplacedError("another has come"))
    assert scene.hear() == [
        Recall(1, [DeliveryPart(7, 18, 20)]),
        Late(1, [DeliveryPart(7, 20, 21)]),
        ConsumerEnded(1, "member_replaced", "another has come", retriable=False),
    ]
    (told,) = await scene.ask_later(consume(3))  # its number is free again
    assert isinstance(told, Consuming)


@in_loop
async def test_a_client_that_does_not_read_is_given_no_work_until_it_does() -> None:
    scene, consumer = await consuming()
    scene.session.pause_output()
    scene.session.resume_output()
    assert consumer.calls == [("start",), ("pause",), ("resume",)]
    scene.broker.consumer_groups.may_consume.clear()
    scene.say(packed(consume(3, 2)))
    await turn()
    scene.session.pause_output()
    scene.broker.consumer_groups.may_consume.set()
    await turn()
    assert scene.broker.consumer_groups.consumers[1].calls == [("pause",), ("start",)]


# --- What is said of it ---


@in_loop
async def test_an_ack_without_an_id_is_answered_only_if_it_is_late() -> None:
    scene, consumer = await consuming()
    consumer.late_deliveries = {8, 9}
    assert scene.ask(Ack(0, 1, [7], [DeliveryPart(6, 1, 3)])) == []
    assert scene.ask(Ack(0, 1, [7, 8], [DeliveryPart(9, 1, 3)])) == [
        Late(1, [DeliveryPart(8, 0, 0), DeliveryPart(9, 1, 3)])
    ]
    assert consumer.calls[1] == ("ack", [7], [DeliveryPart(6, 1, 3)])


@in_loop
async def test_an_ack_with_an_id_is_taken_at_once_and_answered_when_it_is_stored() -> None:
    scene, consumer = await consuming()
    consumer.late_deliveries = {8}
    consumer.may_store.clear()
    answers = await scene.ask_later(Ack(3, 1, [7, 8]), AckUpTo(4, 1, "a", 0, 17), Ack(5, 1))
    assert answers == []
    assert consumer.calls[1:] == [("ack", [7, 8], []), ("ack_up_to", "a", 0, 17), ("ack", [], [])]
    assert isinstance(scene.ask(wire.Ping(6))[0], wire.Pong)
    consumer.may_store.set()
    await turn()
    assert scene.hear() == [
        AckedHead(3, [DeliveryPart(8, 0, 0)]),
        AckedHead(4, []),
        AckedHead(5, []),
    ]


@in_loop
async def test_an_answer_also_lists_what_another_node_calls_late() -> None:
    scene, consumer = await consuming()
    consumer.late_deliveries = {8}
    consumer.late_at_last = [DeliveryPart(7, 3, 4)]
    answers = await scene.ask_later(Ack(3, 1, [7, 8]))
    assert answers == [AckedHead(3, [DeliveryPart(8, 0, 0), DeliveryPart(7, 3, 4)])]


@in_loop
async def test_an_ack_that_cannot_be_stored_is_answered_so() -> None:
    scene, consumer = await consuming()
    consumer.failure = DiskFullError("no room")
    error = error_in(await scene.ask_later(Ack(3, 1, [7])))
    assert (error.id, error.code, error.retriable) == (3, "disk_full", True)


@in_loop
async def test_everything_else_reaches_the_consumer() -> None:
    scene, consumer = await consuming()
    answers = scene.ask(
        Nack(1, [DeliveryPart(7, 18, 19)], 5000, "no such customer"),
        Nack(1, [DeliveryPart(7, 19, 20)]),
        Renew(1, [7]),
        Renew(1, [7, 8], 60_000),
        Recalled(1, [DeliveryPart(7, 20, 21)]),
        Window(1, 0, 0),
        AckUpTo(0, 1, "a", 3, 17),
        Leave(3, 1),
    )
    assert answers == [wire.Done(3)]
    assert consumer.calls[1:] == [
        ("nack", [DeliveryPart(7, 18, 19)], 5_000_000_000, "no such customer"),
        ("nack", [DeliveryPart(7, 19, 20)], None, ""),
        ("renew", [7], None),
        ("renew", [7, 8], 60_000_000_000),
        ("recalled", [DeliveryPart(7, 20, 21)]),
        ("resize", 0, 0),
        ("ack_up_to", "a", 3, 17),
        ("close", True),
    ]


@in_loop
async def test_a_late_nack_is_reported() -> None:
    scene, consumer = await consuming()
    consumer.late_deliveries = {8}
    assert scene.ask(Nack(1, [DeliveryPart(7, 1, 2), DeliveryPart(8, 3, 4)])) == [
        Late(1, [DeliveryPart(8, 3, 4)])
    ]


OF_ONE_THAT_IS_NOT_THERE = (
    Ack(0, 1, [7]),
    AckUpTo(0, 1, "a", 0, 17),
    Nack(1, [DeliveryPart(7, 1, 2)]),
    Renew(1, [7]),
    Recalled(1, [DeliveryPart(7, 1, 2)]),
)


@in_loop
async def test_what_crosses_the_end_of_its_consumer_is_no_mistake() -> None:
    scene, consumer = await consuming()
    consumer.sink.consumer_ended(1, UnknownSubscriptionError("deleted"))
    scene.hear()
    assert scene.ask(*OF_ONE_THAT_IS_NOT_THERE, Window(1, 5, 5), Leave(3, 1)) == [wire.Done(3)]
    assert consumer.calls == [("start",)]


@in_loop
async def test_nothing_can_be_said_of_work_before_there_is_any() -> None:
    scene = Scene()
    scene.broker.consumer_groups.may_consume.clear()
    assert await scene.ask_later(consume(2), *OF_ONE_THAT_IS_NOT_THERE) == []
    scene.broker.consumer_groups.may_consume.set()
    await turn()
    assert scene.broker.consumer_groups.consumers[0].calls == [("start",)]


@pytest.mark.parametrize("ack", [Ack(3, 1, [7]), Ack(3, 1), AckUpTo(3, 1, "a", 0, 17)])
@in_loop
async def test_who_waits_for_an_ack_of_an_ended_consumer_is_told_that_it_is_late(
    ack: wire.Head,
) -> None:
    scene, consumer = await consuming()
    consumer.sink.consumer_ended(1, UnknownSubscriptionError("deleted"))
    scene.hear()
    error = error_in(scene.ask(ack))
    assert (error.id, error.code) == (3, "late_ack")


MANY = list(range(PARTS_MAX + 1))


@in_loop
async def test_bits_beyond_what_a_delivery_can_span_are_refused() -> None:
    scene, consumer = await consuming()
    error = error_in(scene.ask(Ack(3, 1, [], [], [Picked(7, 1, b"\x55" * 513)])))
    assert (error.id, error.code) == (3, "limit_exceeded")
    assert "513 bytes of bits for delivery 7" in error.text
    assert consumer.calls == [("start",)]


@in_loop
async def test_an_ack_that_names_too_much_is_refused_whole() -> None:
    scene, consumer = await consuming()
    error = error_in(scene.ask(Ack(3, 1, [1], [DeliveryPart(1, 1, 2)] * PARTS_MAX)))
    assert (error.id, error.code) == (3, "limit_exceeded")
    assert "100,001" in error.text
    assert consumer.calls == [("start",)]
    assert scene.ask(Ack(0, 1, MANY[1:])) == []
    assert not scene.output.is_closed


@pytest.mark.parametrize(
    "head",
    [
        Ack(0, 1, MANY),
        Nack(1, [DeliveryPart(1, 1, 2)] * len(MANY)),
        Renew(1, MANY),
        Recalled(1, [DeliveryPart(1, 1, 2)] * len(MANY)),
    ],
)
@in_loop
async def test_what_names_too_much_and_has_no_answer_ends_the_connection(head: wire.Head) -> None:
    scene, _ = await consuming()
    error = error_in(scene.ask(head))
    assert (error.id, error.code) == (0, "limit_exceeded")
    assert scene.output.is_closed


# --- The end ---


@in_loop
async def test_who_is_lost_has_failed_at_what_it_had() -> None:
    scene, consumer = await consuming()
    scene.session.lost()
    scene.session.lost()
    assert consumer.calls == [("start",), ("close", False)]


@in_loop
async def test_an_ack_is_taken_though_its_connection_is_lost_before_the_answer() -> None:
    scene, consumer = await consuming()
    consumer.may_store.clear()
    scene.say(packed(Ack(3, 1, [7])))
    scene.session.lost()
    consumer.may_store.set()
    await turn()
    assert consumer.calls == [("start",), ("ack", [7], []), ("close", False)]


@in_loop
async def test_a_consumer_opened_too_late_for_its_connection_is_closed() -> None:
    scene = Scene()
    scene.broker.consumer_groups.may_consume.clear()
    scene.say(packed(consume(2)))
    await turn()
    scene.session.lost()
    scene.broker.consumer_groups.may_consume.set()
    await turn()
    assert scene.broker.consumer_groups.consumers[0].calls == [("close", True)]


@in_loop
async def test_who_has_said_everything_keeps_no_work_while_it_waits_for_answers() -> None:
    scene, consumer = await consuming()
    scene.broker.may_delete.clear()
    scene.broker.consumer_groups.may_consume.clear()
    scene.say(packed(wire.DeleteTopic(3, "a")), packed(consume(4, 2)), packed(Ack(0, 1, [7])))
    await turn()
    scene.session.end_input()
    assert consumer.calls[1:] == [("ack", [7], []), ("close", False)]
    scene.broker.consumer_groups.may_consume.set()
    await turn()
    error = error_in(scene.hear())
    assert (error.id, error.code) == (4, "closed")
    scene.broker.may_delete.set()
    await turn()
    assert scene.hear() == [wire.Done(3)]
    assert scene.output.is_closed


@in_loop
async def test_draining_takes_acks_and_begins_no_work() -> None:
    scene, consumer = await consuming()
    consumer.may_store.clear()
    scene.say(packed(Ack(3, 1, [7])))
    scene.session.drain(within_ms=1000)
    idle = asyncio.get_running_loop().create_task(scene.session.wait_idle())
    closing, *refused = await scene.ask_later(consume(4, 2), Ack(0, 1, [8]), Nack(1, []))
    assert isinstance(closing, wire.Closing)
    error = error_in(refused)
    assert (error.id, error.code, error.retriable) == (4, "closed", True)
    scene.session.pause_output()
    scene.session.resume_output()
    assert not idle.done()
    consumer.may_store.set()
    await idle
    assert scene.hear() == [AckedHead(3, [])]
    scene.session.close()
    assert [call for call in consumer.calls if call[0] != "pause"] == [
        ("start",),
        ("ack", [7], []),
        ("ack", [8], []),
        ("nack", [], None, ""),
        ("close", True),  # a broker that goes is not the consumer's failure
    ]


# --- Subscriptions and dead letters ---


@in_loop
async def test_subscriptions_are_made_changed_and_deleted() -> None:
    scene = Scene()
    start, later = wire.Start("earliest", [], 0, []), wire.Start("latest", [], 0, [])
    options = WorkOptions(deliveries_max=3)
    answers = await scene.ask_later(
        MakeSubscription(2, "billing", ["orders/*"], "key_shared", start, options),
        PauseSubscription(3, "billing", is_paused=True),
        MoveSubscription(4, "billing", later, "m"),
        RemoveMember(5, "billing", "m"),
        DeleteSubscription(6, "billing"),
    )
    assert answers == [wire.Done(number) for number in range(2, 7)]
    assert scene.broker.consumer_groups.verbs == [
        ("make", "billing", ["orders/*"], "key_shared", start, options),
        ("pause", "billing", True),
        ("move", "billing", later, "m"),
        ("remove", "billing", "m"),
        ("delete", "billing"),
    ]


@pytest.mark.parametrize("failure", [UnknownSubscriptionError("no billing")])
@in_loop
async def test_what_cannot_be_done_with_a_subscription_is_reported(failure: RunnelError) -> None:
    scene = Scene()
    scene.broker.consumer_groups.failure = failure
    error = error_in(await scene.ask_later(DeleteSubscription(2, "billing")))
    assert (error.id, error.code, error.text) == (2, "unknown_subscription", "no billing")


@in_loop
async def test_subscriptions_are_listed_all_or_one() -> None:
    answers = await Scene().ask_later(ListSubscriptions(2), ListSubscriptions(3, "billing"))
    lists = [answer for answer in answers if isinstance(answer, SubscriptionListHead)]
    assert [[each.name for each in answer.subscriptions] for answer in lists] == [
        ["all"],
        ["billing"],
    ]


@in_loop
async def test_dead_letters_come_as_blocks() -> None:
    scene = Scene()
    scene.say(packed(DeadLettersHead(2, "billing", 5, 10)))
    await turn()
    (frame,) = frames_of(bytes(scene.output.data))
    assert wire.decode_answer(frame) == DeadList(2, 15)
    assert bytes(frame.tail) == Batch.from_messages([Message("!dead/billing", b"1")]).pack()


@in_loop
async def test_dead_letters_are_sent_back_or_dropped() -> None:
    scene = Scene()
    answers = await scene.ask_later(
        SettleDead(2, "billing", is_redriven=True, offsets=[3, 4]),
        SettleDead(3, "billing", is_redriven=False, is_all=True),
    )
    assert answers == [SettledHead(2, 2), SettledHead(3, 0)]
    assert scene.broker.consumer_groups.verbs == [
        ("settle", "billing", [3, 4], False, True),
        ("settle", "billing", [], True, False),
    ]
    error = error_in(await scene.ask_later(SettleDead(4, "b", is_redriven=True, offsets=MANY)))
    assert (error.id, error.code) == (4, "limit_exceeded")
