"""A session: its answers, their order, and its behaviour when the broker or the client is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from runnel.broker.broker import FetchResult, Level
from runnel.config import NativeSettings
from runnel.errors import (
    BusyError,
    DiskFullError,
    MovedError,
    OffsetGoneError,
    RunnelError,
    SlowReaderError,
    UnknownTopicError,
    details_of,
    from_details,
)
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.frames import pack_head
from runnel.formats.message import Message
from runnel.protocols.native.session import LARGE_ANSWERS_MAX
from tests.protocols.native.scene import Scene
from tests.protocols.native.talker import (
    HELLO,
    frames_of,
    in_loop,
    packed,
    publish,
    subscribe,
    turn,
    until,
)

# --- Greeting ---


@in_loop
async def test_hello_is_answered_with_who_the_broker_is_and_what_it_allows() -> None:
    scene = Scene(greets=False)
    (welcome,) = scene.ask(wire.Hello(9, 1, (), "test/1"))
    assert isinstance(welcome, wire.Welcome)
    assert (welcome.id, welcome.version, welcome.cluster) == (9, 1, "runnel")
    assert welcome.server.startswith("runnel/")
    assert welcome.idle_timeout_ms == 60_000
    assert scene.session.client == "test/1"


@in_loop
async def test_another_version_is_refused_naming_both() -> None:
    scene = Scene(greets=False)
    (error,) = scene.ask(wire.Hello(9, 2))
    assert isinstance(error, wire.Error)
    assert (error.id, error.code) == (9, "handshake")
    assert "version 2" in error.text
    assert "version 1" in error.text
    assert scene.output.is_closed


@in_loop
async def test_whatever_comes_before_hello_ends_the_connection() -> None:
    scene = Scene(greets=False)
    (error,) = scene.ask(wire.Ping(4), HELLO)
    assert isinstance(error, wire.Error)
    assert (error.id, error.code) == (4, "handshake")
    assert "'ping'" in error.text
    assert scene.output.is_closed


@in_loop
async def test_a_second_hello_ends_the_connection() -> None:
    scene = Scene()
    (error,) = scene.ask(HELLO)
    assert isinstance(error, wire.Error)
    assert error.code == "handshake"
    assert scene.output.is_closed


# --- Verbs ---


@in_loop
async def test_requests_in_one_piece_are_all_answered() -> None:
    scene = Scene()
    pong, routes, term, cursors = await scene.ask_later(
        wire.Ping(2), wire.Routes(3, ["a"]), wire.Producer(4, "p"), wire.Cursors(5, "c")
    )
    assert pong == wire.Pong(2, scene.broker.clock.time_ns())
    assert routes == wire.RouteList(3, [wire.Route("a", "disk", [wire.Owner("main", 0, 1)])])
    assert term == wire.Term(4, 5)
    assert cursors == wire.CursorListHead(5, [wire.CursorState("c", [], 0)])


@in_loop
async def test_statistics_are_json_in_the_tail() -> None:
    scene = Scene()
    scene.say(packed(wire.Statistics(2)))
    (frame,) = frames_of(bytes(scene.output.data))
    assert wire.decode_answer(frame) == wire.StatisticsReport(2)
    assert msgspec.json.decode(frame.tail) == {"node": "fake"}


@in_loop
async def test_requests_that_wait_are_answered_when_they_are_done() -> None:
    scene = Scene()
    scene.broker.may_delete.clear()
    answers = await scene.ask_later(
        wire.DeleteTopic(2, "a"), wire.Ping(3), wire.DescribeTopic(4, "b")
    )
    assert [type(answer) for answer in answers] == [wire.Pong, wire.TopicList]
    scene.broker.may_delete.set()
    await turn()
    assert scene.hear() == [wire.Done(2)]
    answers = await scene.ask_later(
        wire.PurgeTopic(5, "a"), wire.SetCursor(6, "c", []), wire.RemoveCursor(7, "c")
    )
    assert answers == [wire.Done(5), wire.Done(6), wire.Done(7)]


@in_loop
async def test_a_fetch_brings_its_batches_as_blocks() -> None:
    scene = Scene()
    batches = [Batch.from_messages([Message("a", payload)]) for payload in (b"1", b"22")]
    scene.broker.fetched.set_result(FetchResult(batches, 3, 1, 3))
    scene.say(packed(wire.Fetch(2, "a", offset=1)))
    await turn()
    (frame,) = frames_of(bytes(scene.output.data))
    assert wire.decode_answer(frame) == wire.Fetched(2, 3, 1, 3, [])
    assert bytes(frame.tail) == b"".join(batch.pack() for batch in batches)


@pytest.mark.parametrize("head", [wire.Ping(3), wire.Fetch(3, "a")])
@in_loop
async def test_bytes_behind_a_head_that_has_none_are_an_error(head: wire.Head) -> None:
    scene = Scene()
    (error,) = scene.ask(packed(head, b"12345678"))
    assert isinstance(error, wire.Error)
    assert (error.id, error.code) == (3, "malformed")
    assert "8 bytes behind" in error.text
    assert not scene.output.is_closed


@in_loop
async def test_a_mistake_in_what_has_no_answer_is_reported_and_ends_the_connection() -> None:
    scene = Scene()
    (error,) = scene.ask(packed(wire.Credit(1, 1), b"12345678"), wire.Ping(2))
    assert isinstance(error, wire.Error)
    assert (error.id, error.code) == (0, "malformed")
    assert scene.output.is_closed


# --- Errors ---


@pytest.mark.parametrize(
    "error", [UnknownTopicError("no b"), OffsetGoneError("a", 0, 3, 9), DiskFullError("full")]
)
@in_loop
async def test_errors_cross_the_connection_whole(error: RunnelError) -> None:
    scene = Scene()
    scene.broker.failure = error
    (answer,) = scene.ask(wire.Routes(2, ["b"]))
    assert isinstance(answer, wire.Error)
    assert (answer.id, answer.code, answer.retriable) == (2, error.code, error.retriable)
    told = from_details(answer.code, answer.text, answer.details)
    assert type(told) is type(error)
    assert str(told) == str(error)
    assert details_of(told) == details_of(error)


@in_loop
async def test_moved_says_where_to() -> None:
    scene = Scene()
    route = wire.Route("a", "disk", [wire.Owner("main", 0, 2, "10.0.0.2:7470")])
    scene.broker.refusals = [MovedError("node-2 has it", [route])]
    (answer,) = scene.ask(publish(2, b"1"))
    assert isinstance(answer, wire.Error)
    assert (answer.code, answer.retriable) == ("moved", True)
    assert list(answer.routes) == [route]


@in_loop
async def test_an_error_that_quotes_the_client_is_not_as_long_as_the_client() -> None:
    (answer,) = Scene().ask(publish(2, b"1", level="x" * 100_000))
    assert isinstance(answer, wire.Error)
    assert answer.code == "bad_request"
    assert len(answer.text) == 1000


@pytest.mark.parametrize("request_", [wire.Routes(7, ["a"]), wire.DeleteTopic(7, "a")])
@in_loop
async def test_a_bug_costs_its_own_connection_alone(
    request_: wire.Head, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene()
    scene.broker.failure = ZeroDivisionError("a secret")
    answers = await scene.ask_later(request_, wire.Ping(8))
    answer = answers[-1]
    assert isinstance(answer, wire.Error)
    assert (answer.id, answer.code) == (7, "internal")
    assert "secret" not in answer.text
    assert scene.output.is_closed
    (record,) = caplog.records
    assert (vars(record)["event"], record.levelname) == ("a session failed", "ERROR")


@pytest.mark.parametrize(
    "head", [b"\xc1", b"\x91\xa5dance", b"\x92\xa4ping\xa1x", b"\x90", b"\x07"]
)
@in_loop
async def test_a_head_that_cannot_be_understood_ends_the_connection(head: bytes) -> None:
    scene = Scene()
    answers = scene.ask(packed(wire.Ping(2)), pack_head(head), packed(wire.Ping(3)))
    assert [type(answer) for answer in answers] == [wire.Pong, wire.Error]
    assert isinstance(answers[1], wire.Error)
    assert (answers[1].id, answers[1].code) == (0, "malformed")
    assert answers[1].details["place"] == "frame head"
    assert scene.output.is_closed
    assert scene.broker.metrics.counters.protocol_errors == 1


# --- Publishing ---


@in_loop
async def test_publishes_are_answered_with_their_offsets() -> None:
    scene = Scene()
    first, second = scene.ask(publish(2, b"1"), packed(wire.Send(3, "received", "a", b"2")))
    assert first == wire.Published(2, [1], 1, 1, 7, "stored")
    assert second == wire.Published(3, [2], 2, 1, 7, "received")
    assert scene.broker.published == [b"1", b"2"]
    assert scene.session.messages_in == 2


@in_loop
async def test_publishes_are_answered_when_they_are_stored_in_whatever_order() -> None:
    scene = Scene()
    scene.broker.holds_publishes = True
    assert scene.ask(publish(2, b"1"), publish(3, b"2")) == []
    for future in reversed(scene.broker.pending):
        scene.broker.answer(future)
    await turn()
    assert [answer.id for answer in scene.hear() if isinstance(answer, wire.Published)] == [3, 2]


@in_loop
async def test_level_none_is_answered_only_if_it_fails() -> None:
    scene = Scene()
    assert scene.ask(publish(2, b"1", level="none")) == []
    scene.broker.holds_publishes = True
    scene.say(publish(3, b"2", level="none"))
    scene.broker.pending[-1].set_exception(DiskFullError("no room"))
    await turn()
    (error,) = scene.hear()
    assert isinstance(error, wire.Error)
    assert (error.id, error.code, error.retriable) == (3, "disk_full", True)


def _without_a_block() -> bytes:
    return packed(wire.Publish(2))


def _with_two_blocks() -> bytes:
    return packed(wire.Publish(2), Batch.from_messages([Message("a", b"1")]).pack() * 2)


def _with_a_torn_block() -> bytes:
    return packed(wire.Publish(2), Batch.from_messages([Message("a", b"1")]).pack()[:-8])


def _with_a_flipped_bit() -> bytes:
    block = bytearray(Batch.from_messages([Message("a", b"1" * 64)]).pack())
    block[-20] ^= 1
    return packed(wire.Publish(2), bytes(block))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_without_a_block, "is empty"),
        (_with_two_blocks, "exactly one"),
        (_with_a_torn_block, "bytes of"),
        (_with_a_flipped_bit, "checksum"),
    ],
)
@in_loop
async def test_a_publish_needs_exactly_one_sound_block(
    make: Callable[[], bytes], text: str
) -> None:
    scene = Scene()
    error, pong = scene.ask(make(), packed(wire.Ping(3)))
    assert isinstance(error, wire.Error)
    assert (error.id, error.code) == (2, "malformed")
    assert text in error.text
    assert isinstance(pong, wire.Pong)
    assert scene.broker.published == []


@in_loop
async def test_a_full_queue_holds_up_this_connection_and_keeps_its_order() -> None:
    scene = Scene()
    scene.broker.refusals = [BusyError("full"), BusyError("still full")]
    assert scene.ask(publish(2, b"1"), publish(3, b"2"), wire.Ping(4)) == []
    assert scene.is_held_back
    await until(lambda: scene.broker.room_waits == 1)
    assert scene.ask(wire.Ping(5)) == []
    scene.broker.room.set()
    await turn()
    assert scene.broker.room_waits == 2
    assert scene.broker.published == [b"1", b"2"]
    assert [answer.id for answer in scene.hear()] == [2, 3, 4, 5]  # type: ignore[union-attr]
    assert not scene.output.is_input_paused
    assert not scene.session.is_held_back


@in_loop
async def test_a_publish_that_waits_for_room_can_still_fail() -> None:
    scene = Scene()
    scene.broker.refusals = [BusyError("full"), DiskFullError("no room at all")]
    scene.broker.room.set()
    error, pong = await scene.ask_later(publish(2, b"1"), wire.Ping(3))
    assert isinstance(error, wire.Error)
    assert (error.id, error.code) == (2, "disk_full")
    assert isinstance(pong, wire.Pong)


@in_loop
async def test_a_publish_that_waits_for_room_is_dropped_with_its_connection() -> None:
    scene = Scene()
    scene.broker.refusals = [BusyError("full")]
    scene.say(publish(2, b"1"), publish(3, b"2"))
    await turn()
    scene.session.lost()
    scene.broker.room.set()
    await turn()
    assert scene.broker.published == []


@in_loop
async def test_too_many_unanswered_requests_hold_up_the_next_without_an_error() -> None:
    scene = Scene(NativeSettings(requests_max=2))
    scene.broker.holds_publishes = True
    scene.say(publish(2, b"1"), publish(3, b"2"), publish(4, b"3"))
    assert scene.broker.published == [b"1", b"2"]
    assert scene.output.is_input_paused
    scene.broker.answer(scene.broker.pending[0])
    await turn()
    assert scene.broker.published == [b"1", b"2", b"3"]
    assert scene.output.is_input_paused
    scene.broker.answer(scene.broker.pending[1])
    await turn()
    assert not scene.output.is_input_paused


@in_loop
async def test_others_have_their_turn_between_many_requests() -> None:
    scene = Scene()
    answers = scene.ask(*(wire.Ping(number) for number in range(1000)))
    assert 0 < len(answers) < 1000
    assert scene.output.is_input_paused
    await turn(100)
    answers += scene.hear()
    assert [answer.id for answer in answers] == list(range(1000))  # type: ignore[union-attr]
    assert not scene.output.is_input_paused


@in_loop
async def test_few_fetches_of_a_connection_are_under_way_and_other_requests_go_on() -> None:
    scene = Scene()
    scene.broker.shares_fetched = True
    answers = await scene.ask_later(*(wire.Fetch(number, "a") for number in range(2, 22)))
    assert (answers, scene.broker.fetches) == ([], LARGE_ANSWERS_MAX)
    assert [type(answer) for answer in await scene.ask_later(wire.Ping(30))] == [wire.Pong]
    scene.broker.fetched.set_result(FetchResult([], 1, 1, 1))
    await turn(50)
    assert [answer.id for answer in scene.hear()] == list(range(2, 22))  # type: ignore[union-attr]
    assert scene.broker.fetches == 20


@in_loop
async def test_no_fetch_is_begun_while_the_client_does_not_read() -> None:
    scene = Scene()
    scene.broker.shares_fetched = True
    await scene.ask_later(*(wire.Fetch(number, "a") for number in range(2, 22)))
    scene.session.pause_output()
    scene.broker.fetched.set_result(FetchResult([], 1, 1, 1))
    await turn(50)
    assert scene.broker.fetches == LARGE_ANSWERS_MAX
    assert len(scene.hear()) == LARGE_ANSWERS_MAX
    scene.session.resume_output()
    await turn(50)
    assert scene.broker.fetches == 20
    assert len(scene.hear()) == 20 - LARGE_ANSWERS_MAX


@in_loop
async def test_fetches_that_have_not_begun_end_with_the_connection() -> None:
    scene = Scene()
    scene.broker.shares_fetched = True
    await scene.ask_later(*(wire.Fetch(number, "a") for number in range(2, 22)))
    scene.session.pause_output()
    scene.session.lost()
    scene.broker.fetched.set_result(FetchResult([], 1, 1, 1))
    await turn(50)
    assert scene.broker.fetches == LARGE_ANSWERS_MAX
    assert not scene.session._tasks


# --- Subscriptions ---


@in_loop
async def test_deliveries_begin_after_the_client_knows_of_the_subscription() -> None:
    scene = Scene()
    (subscribed,) = await scene.ask_later(subscribe(2, 7, "a/*", "b", credit_bytes=100))
    assert subscribed == wire.Subscribed(2, 7, [], [wire.ShardPlace("main", 0, 1, 1)], [])
    (subscription,) = scene.broker.subscriptions
    assert (subscription.patterns, subscription.credit_bytes) == (["a/*", "b"], 100)
    assert subscription.calls == ["start"]
    subscription.deliver(b"12345678")
    subscription.sink.gap(7, wire.GapState("overflow", 3, "a/x"))
    (deliver, gap) = scene.hear()
    assert deliver == wire.Deliver(7, "main", 0, 1, 2)
    assert gap == wire.GapNotice(7, wire.GapState("overflow", 3, "a/x"))


@in_loop
async def test_credit_and_unsubscribe_reach_the_subscription() -> None:
    scene = Scene()
    await scene.ask_later(subscribe(2, 7, credit_bytes=100))
    assert scene.ask(wire.Credit(7, 50)) == []
    assert scene.broker.subscriptions[0].credit_bytes == 150
    assert scene.ask(wire.Unsubscribe(3, 7)) == [wire.Done(3)]
    assert scene.broker.subscriptions[0].calls == ["start", "grant", "close"]
    assert scene.ask(wire.Credit(7, 1), wire.Unsubscribe(4, 7)) == [wire.Done(4)]


@in_loop
async def test_credit_given_early_is_not_lost() -> None:
    scene = Scene()
    scene.broker.may_subscribe.clear()
    await scene.ask_later(subscribe(2, 7, credit_bytes=100), wire.Credit(7, 50))
    scene.broker.may_subscribe.set()
    await turn()
    assert scene.broker.subscriptions[0].credit_bytes == 150


@in_loop
async def test_unsubscribing_early_is_done_once_it_has_begun() -> None:
    scene = Scene()
    scene.broker.may_subscribe.clear()
    assert await scene.ask_later(subscribe(2, 7), wire.Unsubscribe(3, 7)) == []
    scene.broker.may_subscribe.set()
    await turn()
    subscribed, done = scene.hear()
    assert isinstance(subscribed, wire.Subscribed)
    assert done == wire.Done(3)
    assert scene.broker.subscriptions[0].calls == ["close"]
    assert len(scene.session.subscriptions) == 0


@in_loop
async def test_a_number_in_use_is_refused_and_free_again_after_a_failure() -> None:
    scene = Scene()
    scene.broker.failure = UnknownTopicError("no")
    scene.broker.may_subscribe.clear()
    (taken,) = await scene.ask_later(subscribe(2, 7), subscribe(3, 7), wire.Unsubscribe(4, 7))
    assert isinstance(taken, wire.Error)
    assert (taken.id, taken.code) == (3, "bad_request")
    scene.broker.may_subscribe.set()
    await turn()
    done, error = scene.hear()
    assert done == wire.Done(4)
    assert isinstance(error, wire.Error)
    assert (error.id, error.code) == (2, "unknown_topic")
    scene.broker.failure = None
    (subscribed,) = await scene.ask_later(subscribe(5, 7))
    assert isinstance(subscribed, wire.Subscribed)


@in_loop
async def test_one_subscription_more_than_allowed_is_refused() -> None:
    scene = Scene(NativeSettings(subscriptions_max=2))
    answers = await scene.ask_later(*(subscribe(number, number) for number in (2, 3, 4)))
    errors = [answer for answer in answers if isinstance(answer, wire.Error)]
    assert [(error.id, error.code) for error in errors] == [(4, "limit_exceeded")]


@in_loop
async def test_a_subscription_that_the_broker_ends_is_reported_and_its_number_free() -> None:
    scene = Scene()
    await scene.ask_later(subscribe(2, 7))
    scene.broker.subscriptions[0].sink.ended(7, SlowReaderError("too slow"))
    (ended,) = scene.hear()
    assert ended == wire.Ended(7, "slow_reader", "too slow", retriable=True, routes=[])
    (subscribed,) = await scene.ask_later(subscribe(3, 7))
    assert isinstance(subscribed, wire.Subscribed)


@in_loop
async def test_a_client_that_does_not_read_is_sent_and_asked_nothing_until_it_does() -> None:
    scene = Scene()
    await scene.ask_later(subscribe(2, 7))
    scene.session.pause_output()
    assert scene.output.is_input_paused
    assert not scene.session.is_held_back
    assert await scene.ask_later(wire.Ping(3)) == []
    scene.session.resume_output()
    assert isinstance(scene.hear()[0], wire.Pong)
    assert scene.broker.subscriptions[0].calls == ["start", "pause", "resume"]
    assert not scene.output.is_input_paused


@in_loop
async def test_a_subscription_opened_while_the_client_does_not_read_begins_paused() -> None:
    scene = Scene()
    scene.broker.may_subscribe.clear()
    scene.say(subscribe(2, 7))
    await turn()
    scene.session.pause_output()
    scene.broker.may_subscribe.set()
    await turn()
    assert scene.broker.subscriptions[0].calls == ["pause", "start"]


@in_loop
async def test_a_subscription_opened_too_late_for_its_connection_is_closed() -> None:
    scene = Scene()
    scene.broker.may_subscribe.clear()
    scene.say(subscribe(2, 7))
    await turn()
    scene.session.lost()
    scene.broker.may_subscribe.set()
    await turn()
    assert scene.broker.subscriptions[0].calls == ["close"]


# --- The end ---


@in_loop
async def test_a_lost_connection_takes_what_waits_and_leaves_what_changes_something() -> None:
    scene = Scene()
    scene.broker.may_delete.clear()
    await scene.ask_later(
        subscribe(2, 7), wire.Fetch(3, "a", wait_ms=60_000), wire.DeleteTopic(4, "a")
    )
    scene.session.lost()
    await turn()
    assert scene.broker.fetched.cancelled()
    assert scene.broker.subscriptions[0].calls == ["start", "close"]
    scene.broker.may_delete.set()
    await turn()
    assert scene.broker.topics_deleted == ["a"]
    scene.session.receive(frames_of(packed(wire.Ping(5))))
    assert not any(isinstance(answer, wire.Pong) for answer in scene.hear())


@in_loop
async def test_draining_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    scene = Scene()
    scene.broker.holds_publishes = True
    scene.say(publish(2, b"1"), packed(wire.Fetch(3, "a", wait_ms=60_000)))
    scene.session.drain(within_ms=1000)
    idle = asyncio.get_running_loop().create_task(scene.session.wait_idle())
    closing, *refused = await scene.ask_later(
        publish(4, b"2"), packed(wire.Send(5, None, "a", b"3")), subscribe(6), wire.Fetch(7, "a")
    )
    assert isinstance(closing, wire.Closing)
    assert closing.within_ms == 1000
    assert {(answer.id, answer.code, answer.retriable) for answer in refused} == {  # type: ignore[union-attr]
        (request_id, "closed", True) for request_id in (3, 4, 5, 6, 7)
    }
    assert isinstance(scene.ask(wire.Ping(8))[0], wire.Pong)
    assert not idle.done()
    scene.broker.answer(scene.broker.pending[0], Level.STORED)
    await idle
    assert isinstance(scene.hear()[0], wire.Published)


@in_loop
async def test_who_has_not_said_hello_when_draining_begins_is_sent_away() -> None:
    scene = Scene(greets=False)
    scene.session.drain(within_ms=1000)
    (error,) = scene.hear()
    assert isinstance(error, wire.Error)
    assert (error.code, error.retriable) == ("closed", True)
    assert scene.output.is_closed


@in_loop
async def test_a_client_that_has_said_everything_gets_its_answers_before_the_end() -> None:
    scene = Scene()
    scene.broker.holds_publishes = True
    scene.say(publish(2, b"1"))
    scene.session.end_input()
    assert not scene.output.is_closed
    scene.broker.answer(scene.broker.pending[0])
    await turn()
    assert isinstance(scene.hear()[0], wire.Published)
    assert scene.output.is_closed
