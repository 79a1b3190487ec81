"""The checker lets good histories pass, and says of bad ones which promise they break."""

from __future__ import annotations

import pytest

from tests.group_rules.checker import check
from tests.group_rules.expectations import trail
from tests.group_rules.history import (
    NS_PER_SECOND,
    Acked,
    AckedUpTo,
    Attempt,
    Began,
    DeadLetterSettled,
    Delivered,
    Event,
    Expired,
    Failure,
    Finished,
    GaveBack,
    GivenUp,
    Gone,
    Joined,
    Left,
    Moved,
    Nacked,
    Parted,
    Paused,
    Published,
    Recall,
    Recovered,
    Renewed,
    Restarted,
    Rested,
    Rules,
    Stated,
    Stored,
    Stretch,
    Told,
)
from tests.simulation.history import Violation

SECOND = NS_PER_SECOND
LEASE = 30 * SECOND
ORDERS = ("orders", 0)
SHARED = Rules(
    is_keyed=False,
    lease_ns=LEASE,
    deliveries_max=3,
    retry_delay_ns=SECOND,
    retry_delay_ns_max=8 * SECOND,
    backoff=2.0,
)
KEYED = Rules(
    is_keyed=True,
    lease_ns=LEASE,
    deliveries_max=3,
    retry_delay_ns=SECOND,
    retry_delay_ns_max=8 * SECOND,
    backoff=2.0,
)

# --- Words for histories ---


def published(*keys: bytes | None, base: int = 1, cost_bytes: int = 1) -> Published:
    return Published(0, place=ORDERS, base=base, keys=keys, cost_bytes=cost_bytes)


def joined(consumer: int, messages: int = 10, size_bytes: int = 100) -> Joined:
    return Joined(0, consumer=consumer, window_messages=messages, window_bytes=size_bytes)


def got(
    consumer: int,
    delivery: int,
    *offsets: int,
    at: int = 0,
    failed: int | None = None,
    size: int = 0,
) -> Delivered:
    """Delivered at a second; with `failed`, each was delivered before, first at 0, and failed so often."""
    return Delivered(
        at * SECOND,
        consumer=consumer,
        delivery=delivery,
        place=ORDERS,
        offsets=offsets,
        size_bytes=size or len(offsets),
        deadline_ns=at * SECOND + LEASE,
        attempts=[Attempt(offset, failed, 0) for offset in offsets] if failed is not None else [],
    )


def part(delivery: int, begin: int, end: int | None = None) -> Stretch:
    return Stretch(delivery, begin, begin + 1 if end is None else end)


def acked(consumer: int, *parts: Stretch, at: int = 0, done: bool = True) -> Acked:
    told = Told(acked=[(ORDERS, part.begin, part.end) for part in parts]) if done else Told()
    return Acked(at * SECOND, consumer=consumer, parts=parts, told=told)


def failure(offset: int, count: int = 1, *, until: int = 0) -> Failure:
    return Failure(ORDERS, offset, count, until * SECOND, 0)


def nacked(
    consumer: int,
    part: Stretch,
    failed: Failure,
    *,
    at: int = 0,
    delay: int | None = 0,
    recalls: tuple[Recall, ...] = (),
    dead_letters: tuple[GivenUp, ...] = (),
) -> Nacked:
    delay_ns = None if delay is None else delay * SECOND
    told = Told(failed=[failed], recalls=recalls, dead_letters=dead_letters)
    return Nacked(at * SECOND, consumer=consumer, parts=[part], delay_ns=delay_ns, told=told)


def beginning(*keys: bytes | None) -> list[Event]:
    return [Began(0, place=ORDERS, floor=1), published(*keys), joined(1), joined(2)]


def assert_broken(rules: Rules, promise: str, *events: Event) -> None:
    with pytest.raises(Violation) as violation:
        check(rules, events)
    assert promise in str(violation.value)


A, B = b"a", b"b"


# --- All modes ---


def test_history_that_keeps_every_promise_passes() -> None:
    check(
        SHARED,
        [
            *beginning(None, None, None),
            got(1, 1, 1, 2),
            acked(1, part(1, 2)),
            nacked(1, part(1, 1), failure(1, until=1), delay=None),
            got(2, 2, 3),
            Expired(SECOND),
            got(2, 3, 1, at=1, failed=1),
            Left(2 * SECOND, consumer=2, is_clean=True),
            got(1, 4, 1, at=2, failed=1),
            got(1, 5, 3, at=2, failed=0),
            acked(1, part(4, 1), part(5, 3), at=2),
            Rested(2 * SECOND),
            Stated(2 * SECOND, place=ORDERS, floor=4, done=(), in_flight=0),
            Finished(2 * SECOND),
        ],
    )


def test_lost_message_is_found() -> None:
    assert_broken(
        SHARED,
        "message orders[0]@2 was lost: it is neither acknowledged nor dead-lettered, and nobody holds it",
        *beginning(None, None),
        got(1, 1, 1),
        acked(1, part(1, 1)),
        Finished(0),
    )


def test_message_that_retention_took_is_not_lost() -> None:
    gone = Gone(0, place=ORDERS, begin=1, end=3, told=Told(acked=[(ORDERS, 1, 3)]))
    check(SHARED, [*beginning(None, None), got(1, 1, 1), gone, Finished(0)])


def test_delivery_after_an_ack_is_found() -> None:
    assert_broken(
        SHARED,
        "message orders[0]@1 was delivered to consumer 2 after it was done: acknowledged",
        *beginning(None),
        got(1, 1, 1),
        acked(1, part(1, 1)),
        got(2, 2, 1),
    )


def test_delivery_after_a_stored_ack_and_a_restart_is_found() -> None:
    history = [*beginning(None), got(1, 1, 1), acked(1, part(1, 1))]
    assert_broken(
        SHARED,
        "was delivered to consumer 3 after it was done: acknowledged",
        *history,
        Stored(0, events=len(history)),
        Restarted(0, events=len(history)),
        joined(3),
        got(3, 2, 1),
    )


def test_ack_that_was_not_stored_is_lost_with_the_broker() -> None:
    history = [*beginning(None), got(1, 1, 1), acked(1, part(1, 1))]
    restarted = Restarted(0, events=len(history) - 1)
    check(SHARED, [*history, restarted, joined(3), got(3, 2, 1)])


def test_lost_ack_that_is_not_delivered_again_is_found() -> None:
    history = [*beginning(None), got(1, 1, 1), acked(1, part(1, 1))]
    restarted = Restarted(0, events=len(history) - 1)
    assert_broken(SHARED, "@1 was lost", *history, restarted, joined(3), Finished(0))


def test_two_leases_of_a_message_are_found() -> None:
    assert_broken(
        SHARED,
        "message orders[0]@1 was delivered to consumer 2 while consumer 1 held it by delivery 1 "
        "until 30.000",
        *beginning(None),
        got(1, 1, 1),
        got(2, 2, 1, at=29),
    )


def test_lease_that_is_not_ended_at_its_deadline_is_found() -> None:
    assert_broken(
        SHARED,
        "orders[0]@1 failed, and was not counted",
        *beginning(None),
        got(1, 1, 1),
        Expired(LEASE),
    )


def test_renewed_lease_that_is_ended_is_found() -> None:
    assert_broken(
        SHARED,
        "orders[0]@1 was counted as failed, and did not fail",
        *beginning(None),
        got(1, 1, 1),
        Renewed(SECOND, consumer=1, deliveries=[1]),
        Expired(LEASE, told=Told(failed=[failure(1, until=30)])),
    )


def test_ack_of_a_lease_that_ended_has_to_be_told_late() -> None:
    events = [
        *beginning(None),
        got(1, 1, 1),
        Expired(LEASE, told=Told(failed=[failure(1, until=30)], expired=[(1, 1)])),
    ]
    assert_broken(
        SHARED,
        "of delivery 1 @1 came too late, and nothing was told so",
        *events,
        acked(1, part(1, 1), at=30, done=False),
    )
    late = Acked(LEASE, consumer=1, parts=[part(1, 1)], told=Told(late=[part(1, 1)]))
    check(SHARED, [*events, late])


def test_ack_in_time_that_is_told_late_is_found() -> None:
    assert_broken(
        SHARED,
        "of delivery 1 nothing came too late, and @1 was told so",
        *beginning(None),
        got(1, 1, 1),
        Acked(
            0,
            consumer=1,
            parts=[part(1, 1)],
            told=Told(late=[part(1, 1)], acked=[(ORDERS, 1, 2)]),
        ),
    )


def test_ack_that_is_not_told_to_be_stored_is_found() -> None:
    assert_broken(
        SHARED,
        "that orders[0]@1 is done was not told, so nobody stores it",
        *beginning(None),
        got(1, 1, 1),
        acked(1, part(1, 1), done=False),
    )


def test_ack_up_to_an_offset_is_of_ones_own_alone() -> None:
    assert_broken(
        SHARED,
        "orders[0]@2 was told to be done, and is not now, or was before",
        *beginning(None, None),
        got(1, 1, 1),
        got(2, 2, 2),
        AckedUpTo(0, consumer=1, place=ORDERS, offset=2, told=Told(acked=[(ORDERS, 1, 3)])),
    )


def test_full_window_that_gets_more_is_found() -> None:
    events = [Began(0, place=ORDERS, floor=1), published(None, None, cost_bytes=10)]
    assert_broken(
        SHARED,
        "message orders[0]@2 of 10 bytes was delivered to consumer 1, "
        "which had 1 messages of 10 bytes; its window: 1 messages, 100 bytes",
        *events,
        joined(1, messages=1),
        got(1, 1, 1, 2, size=20),
    )
    assert_broken(
        SHARED,
        "its window: 10 messages, 19 bytes",
        *events,
        joined(1, size_bytes=19),
        got(1, 1, 1, 2, size=20),
    )


def test_idle_consumer_may_get_one_message_larger_than_its_window() -> None:
    events = [Began(0, place=ORDERS, floor=1), published(None, cost_bytes=1000), joined(1)]
    check(SHARED, [*events, got(1, 1, 1, size=1000)])


def test_delivery_before_the_delay_is_over_is_found() -> None:
    assert_broken(
        SHARED,
        "was delivered to consumer 2 at 4.000, before its delay ended at 5.000",
        *beginning(None),
        got(1, 1, 1),
        nacked(1, part(1, 1), failure(1, until=5), delay=5),
        got(2, 2, 1, at=4, failed=1),
    )


def test_delay_that_is_not_the_subscriptions_is_found() -> None:
    assert_broken(
        SHARED,
        "orders[0]@1 may come again at 1.000, and was held until 2.000",
        *beginning(None),
        got(1, 1, 1),
        nacked(1, part(1, 1), failure(1, until=2), delay=None),
    )


def test_wrong_count_is_found() -> None:
    assert_broken(
        SHARED,
        "message orders[0]@1 failed 1 times, and was delivered as if it had 0 times",
        *beginning(None),
        got(1, 1, 1),
        nacked(1, part(1, 1), failure(1)),
        got(2, 2, 1),
    )


def test_wrong_time_of_the_first_delivery_is_found() -> None:
    again = Delivered(
        SECOND,
        consumer=2,
        delivery=2,
        place=ORDERS,
        offsets=[1],
        size_bytes=1,
        deadline_ns=SECOND + LEASE,
        attempts=[Attempt(1, 1, SECOND)],
    )
    assert_broken(
        SHARED,
        "was first delivered at 0.000, and was delivered as if that was at 1.000",
        *beginning(None),
        got(1, 1, 1),
        nacked(1, part(1, 1), failure(1)),
        again,
    )


def test_clean_goodbye_that_counts_is_found() -> None:
    assert_broken(
        SHARED,
        "orders[0]@1 was counted as failed, and did not fail",
        *beginning(None),
        got(1, 1, 1),
        Left(0, consumer=1, is_clean=True, told=Told(failed=[failure(1)])),
    )


def test_lost_consumer_that_does_not_count_is_found() -> None:
    assert_broken(
        SHARED,
        "orders[0]@1 failed, and was not counted",
        *beginning(None),
        got(1, 1, 1),
        Left(0, consumer=1, is_clean=False),
    )


def _failing(times: int, dead_letters: tuple[GivenUp, ...] = ()) -> list[Event]:
    """A message that fails so often; `dead_letters` is what the last failure leads to."""
    events = beginning(None)
    for count in range(1, times + 1):
        events.append(got(1, count, 1, failed=count - 1 or None))
        is_last = count == times
        told = dead_letters if is_last else ()
        events.append(nacked(1, part(count, 1), failure(1, count), dead_letters=told))
    return events


def test_message_that_failed_too_often_has_to_be_buried() -> None:
    assert_broken(
        SHARED, "orders[0]@1 failed too often, and was not to be dead-lettered", *_failing(3)
    )


def test_dead_letter_before_its_time_is_found() -> None:
    dead_letter = GivenUp(ORDERS, 1, 2)
    assert_broken(
        SHARED,
        "orders[0]@1 was to be dead-lettered after 2 failures, out of turn",
        *_failing(2, (dead_letter,)),
    )


def test_message_that_is_done_before_it_is_buried_is_found() -> None:
    *events, last = _failing(3, (GivenUp(ORDERS, 1, 3),))
    assert isinstance(last, Nacked)
    told = Told(
        failed=last.told.failed, dead_letters=last.told.dead_letters, acked=[(ORDERS, 1, 2)]
    )
    hasty = Nacked(0, consumer=1, parts=last.parts, delay_ns=0, told=told)
    assert_broken(SHARED, "@1 was told to be done, and is not now", *events, hasty)


def test_dead_letter_ends_what_is_owed() -> None:
    dead_letter_stored = DeadLetterSettled(
        0, place=ORDERS, offset=1, is_stored=True, told=Told(acked=[(ORDERS, 1, 2)])
    )
    check(SHARED, [*_failing(3, (GivenUp(ORDERS, 1, 3),)), dead_letter_stored, Finished(0)])


def test_idle_consumer_while_a_message_waits_is_found() -> None:
    assert_broken(
        SHARED,
        "message orders[0]@1 waits for nothing while consumer 1 has room",
        *beginning(None),
        Rested(0),
    )


def test_move_that_keeps_leases_is_found() -> None:
    assert_broken(
        SHARED,
        "@1 of delivery 1 was not recalled from consumer 1",
        *beginning(None),
        got(1, 1, 1),
        Moved(0, place=ORDERS, floor=1),
    )


def test_shard_that_goes_and_keeps_leases_is_found() -> None:
    assert_broken(
        SHARED,
        "@1 of delivery 1 was not recalled from consumer 1",
        *beginning(None),
        got(1, 1, 1),
        Parted(0, place=ORDERS),
    )


def test_delivery_while_the_shard_is_elsewhere_is_found() -> None:
    assert_broken(
        SHARED,
        "delivery 1 to consumer 1: the shard of orders[0] is elsewhere",
        *beginning(None),
        Parted(0, place=ORDERS),
        got(1, 1, 1),
    )


def test_shard_that_comes_back_without_what_was_acknowledged_is_found() -> None:
    told = Told(recalls=[Recall(1, part(1, 2))])
    parted = [
        *beginning(None, None),
        got(1, 1, 1, 2),
        acked(1, part(1, 1)),
        Parted(0, place=ORDERS, told=told),
    ]
    exactly = Recovered(0, place=ORDERS, floor=2, is_exact=True)
    check(
        SHARED,
        [
            *parted,
            Rested(0),
            exactly,
            got(1, 2, 2),
            Stated(0, place=ORDERS, floor=2, done=(), in_flight=1),
        ],
    )
    assert_broken(
        SHARED,
        "was not taken up as it now stands",
        *parted,
        Recovered(0, place=ORDERS, floor=1, is_exact=True),
    )


def test_delivery_while_paused_is_found() -> None:
    assert_broken(
        SHARED,
        "delivery 1 while deliveries are paused",
        *beginning(None),
        Paused(0, is_paused=True),
        got(1, 1, 1),
    )


def test_wrong_standing_is_found() -> None:
    assert_broken(
        SHARED,
        "message orders[0]@1 is owed, and the group says done",
        *beginning(None),
        Stated(0, place=ORDERS, floor=2, done=(), in_flight=0),
    )


def test_member_of_a_multicast_owes_what_came_after_it_joined() -> None:
    member = [
        published(None),
        Began(0, "ann", place=ORDERS, floor=2),
        published(None, base=2),
        Joined(0, "ann", consumer=1, window_messages=9, window_bytes=9),
    ]
    early = Delivered(
        0,
        "ann",
        consumer=1,
        delivery=1,
        place=ORDERS,
        offsets=[1],
        size_bytes=1,
        deadline_ns=LEASE,
    )
    assert_broken(SHARED, "after it was done: before @2, where the group begins", *member, early)
    assert_broken(SHARED, "message orders[0]@2 of ann was lost", *member, Finished(0))


# --- Keys ---


def test_key_with_two_consumers_is_found() -> None:
    assert_broken(
        KEYED,
        "message orders[0]@3 (key b'a') was delivered to consumer 2 while consumer 1 held @1 of its key",
        *beginning(A, B, A),
        got(1, 1, 1),
        got(2, 2, 2),
        got(2, 3, 3),
    )


def test_several_of_a_key_may_be_with_one_consumer() -> None:
    check(KEYED, [*beginning(A, B, A), got(1, 1, 1), got(2, 2, 2), got(1, 3, 3)])


def test_later_message_of_a_key_before_an_earlier_one_is_found() -> None:
    assert_broken(
        KEYED,
        "message orders[0]@2 (key b'a') was delivered to consumer 1 before @1 of its key, which waits",
        *beginning(A, A),
        got(1, 1, 2),
    )


def test_messages_without_a_key_have_no_order() -> None:
    check(KEYED, [*beginning(None, None), got(1, 1, 2), got(2, 2, 1)])


def _recalled() -> list[Event]:
    """Of two messages of a key the first failed, and the second was recalled."""
    recall = Recall(1, part(1, 2))
    return [
        *beginning(A, A, A),
        got(1, 1, 1, 2),
        nacked(1, part(1, 1), failure(1), recalls=(recall,)),
    ]


def test_failure_that_recalls_nothing_is_found() -> None:
    *events, _ = _recalled()
    assert_broken(
        KEYED,
        "@2 of delivery 1 was not recalled from consumer 1",
        *events,
        nacked(1, part(1, 1), failure(1)),
    )


def test_key_that_goes_on_before_a_recall_is_confirmed_is_found() -> None:
    assert_broken(
        KEYED,
        "message orders[0]@1 (key b'a') was delivered to consumer 2 though consumer 1 has not given "
        "back @2 of its key",
        *_recalled(),
        got(2, 2, 1, failed=1),
    )


def test_what_failed_comes_before_what_is_newer() -> None:
    confirmed = GaveBack(0, consumer=1, parts=[part(1, 2)])
    again = Delivered(
        0,
        consumer=2,
        delivery=2,
        place=ORDERS,
        offsets=[1, 2, 3],
        size_bytes=3,
        deadline_ns=LEASE,
        attempts=[Attempt(1, 1, 0), Attempt(2, 0, 0)],
    )
    check(KEYED, [*_recalled(), confirmed, again])
    assert_broken(
        KEYED,
        "@3 (key b'a') was delivered to consumer 2 before @1 of its key, which waits",
        *_recalled(),
        confirmed,
        got(2, 2, 3),
    )


def test_late_ack_of_a_recalled_message_frees_its_key() -> None:
    late = Acked(0, consumer=1, parts=[part(1, 2)], told=Told(late=[part(1, 2)]))
    check(KEYED, [*_recalled(), late, got(2, 2, 1, failed=1)])


def test_only_the_first_of_a_key_counts_when_a_consumer_is_lost() -> None:
    events = [*beginning(A, A, B), got(1, 1, 1, 2, 3)]
    right = Told(failed=[failure(1), failure(3)])
    check(KEYED, [*events, Left(0, consumer=1, is_clean=False, told=right)])
    wrong = Told(failed=[failure(1), failure(2), failure(3)])
    assert_broken(
        KEYED,
        "orders[0]@2 was counted as failed, and did not fail",
        *events,
        Left(0, consumer=1, is_clean=False, told=wrong),
    )


def test_key_waits_while_its_message_is_being_buried() -> None:
    strict = Rules(
        is_keyed=True,
        lease_ns=LEASE,
        deliveries_max=1,
        retry_delay_ns=0,
        retry_delay_ns_max=SECOND,
        backoff=1.0,
    )
    events = [
        *beginning(A, A),
        got(1, 1, 1),
        nacked(1, part(1, 1), failure(1), dead_letters=(GivenUp(ORDERS, 1, 1),)),
    ]
    assert_broken(
        strict,
        "@2 (key b'a') was delivered to consumer 1 before @1 of its key, which is about to be dead-lettered",
        *events,
        got(1, 2, 2),
    )


# --- After a restart, records whose outcome is unknown ---


def _acked_one_by_one() -> list[Event]:
    """Two acks, of which the first is known to be stored."""
    return [
        *beginning(None, None, None),
        got(1, 1, 1, 2, 3),
        acked(1, part(1, 1)),
        Stored(0, events=6),
        acked(1, part(1, 2)),
        nacked(1, part(1, 3), failure(3)),
        Restarted(0, events=None),
    ]


@pytest.mark.parametrize("floor", [2, 3])
def test_state_of_any_moment_since_it_was_stored_may_be_taken_up(floor: int) -> None:
    check(SHARED, [*_acked_one_by_one(), Recovered(0, place=ORDERS, floor=floor)])


def test_all_of_what_was_not_stored_may_be_taken_up() -> None:
    taken_up = Recovered(0, place=ORDERS, floor=3, failed=[failure(3)])
    check(SHARED, [*_acked_one_by_one(), taken_up, taken_up])


def test_taking_up_less_than_was_stored_is_found() -> None:
    assert_broken(
        SHARED,
        "was not taken up as it stood at any time since it was last stored: message orders[0]@1",
        *_acked_one_by_one(),
        Recovered(0, place=ORDERS, floor=1),
    )


def test_taking_up_a_later_event_without_an_earlier_one_is_found() -> None:
    assert_broken(
        SHARED,
        "was not taken up as it stood at any time since it was last stored",
        *_acked_one_by_one(),
        Recovered(0, place=ORDERS, floor=2, failed=[failure(3)]),
    )


def test_taking_up_less_without_a_restart_is_found() -> None:
    assert_broken(
        SHARED,
        "was not taken up as it now stands",
        *_acked_one_by_one()[:-1],
        Recovered(0, place=ORDERS, floor=3, is_exact=True),
    )


def test_what_consumers_did_being_stored_says_nothing_of_a_later_move() -> None:
    told = Told(recalls=[Recall(1, part(1, 2)), Recall(1, part(1, 3))])
    events = [*_acked_one_by_one()[:6], Moved(0, place=ORDERS, floor=3, told=told)]
    stored = Stored(0, events=len(events), is_consumers=True)
    check(
        SHARED,
        [*events, stored, Restarted(0, events=None), Recovered(0, place=ORDERS, floor=2)],
    )


# --- How it is told ---


def test_trail_has_the_events_that_concern_a_message() -> None:
    events = [
        *beginning(A, B),
        got(1, 1, 1),
        got(2, 2, 2),
        acked(2, part(2, 2)),
        nacked(1, part(1, 1), failure(1)),
    ]
    numbers = [number for number, _ in trail(events, (ORDERS, {1}))]
    assert numbers == [1, 2, 5, 8]


def test_events_read_as_sentences() -> None:
    assert [str(event).strip() for event in _recalled()[1:]] == [
        "0.000  published orders[0] @1 b'a', @2 b'a', @3 b'a' (1 bytes each)",
        "0.000  consumer 1 joins, window of 10 messages, 100 bytes",
        "0.000  consumer 2 joins, window of 10 messages, 100 bytes",
        "0.000  consumer 1 gets delivery 1: orders[0] @1 @2, leased until 30.000",
        "0.000  consumer 1 nacks 1@1 for 0.000 s; recalled: 1@2 from consumer 1; "
        "failed: orders[0]@1 (count 1, due at 0.000)",
    ]
