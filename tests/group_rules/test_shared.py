"""Shared work: who gets what, what comes again, and what becomes a dead letter."""

from __future__ import annotations

import pytest

from runnel.formats.work_heads import Picked
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.effects import NOTHING, DeadLetter, DeliveryPart, Effects, Failure
from runnel.group_rules.group import Group
from tests.group_rules.bare_group import ORDERS, PLAIN, SECOND, BareGroup, offsets, part

WHOLE = 2**63 - 1


def bare(count: int = 10, *, deliveries_max: int = 8) -> BareGroup:
    group = BareGroup(
        type(PLAIN)(
            lease_ns=30 * SECOND,
            deliveries_max=deliveries_max,
            retry_delay_ns=SECOND,
            retry_delay_ns_max=10 * SECOND,
        )
    )
    group.publish(count=count)
    return group


# --- Who gets what ---


def test_without_consumers_nothing_is_wanted() -> None:
    assert bare().group.next_want(0) is None


def test_without_messages_nothing_is_wanted() -> None:
    group = BareGroup()
    group.add()
    group.join(1)
    assert group.group.next_want(0) is None


def test_a_run_goes_whole_to_a_consumer_with_room() -> None:
    group = bare(1_000)
    group.join(1, messages=5_000)
    delivery = group.only()
    assert (delivery.id, delivery.consumer, delivery.base, delivery.count) == (1, 1, 1, 1_000)
    assert delivery.mask == 2**1_000 - 1
    assert delivery.size_bytes == 10_000
    assert delivery.attempts == []
    assert group.group.in_flight == 1_000


def test_a_long_run_is_split_into_deliveries_of_bounded_span() -> None:
    group = bare(10_000)
    group.join(1, messages=20_000)
    deliveries = group.pump()
    assert [delivery.count for delivery in deliveries] == [4_096, 4_096, 1_808]
    assert [delivery.base for delivery in deliveries] == [1, 4_097, 8_193]


def test_a_run_is_sliced_where_windows_end() -> None:
    group = bare(10)
    group.join(1, messages=3)
    group.join(2, messages=4)
    assert group.pumped() == [(1, [1, 2, 3]), (2, [4, 5, 6, 7])]


def test_consumers_with_room_take_turns() -> None:
    group = BareGroup()
    group.add()
    for consumer in (1, 2, 3):
        group.join(consumer)
    takers = []
    for _ in range(6):
        group.publish(count=1)
        takers.append(group.only().consumer)
    assert takers == [1, 2, 3, 1, 2, 3]


def test_partitions_with_work_take_turns() -> None:
    group = BareGroup()
    keys = [("orders", number) for number in range(3)]
    for key in keys:
        group.publish(count=100, key=key)
    group.join(1, messages=6)
    wanted = []
    for _ in range(6):
        want = group.group.next_want(0)
        assert want is not None
        wanted.append(want.key)
        (delivery,) = group.offer(want.begin, 1, key=want.key)
        group.group.ack(1, [delivery.id], [], 0)
    assert wanted == keys * 2


def test_a_window_is_by_bytes_too() -> None:
    group = bare(10)
    group.join(1, messages=100, size_bytes=35)
    assert group.pumped() == [(1, [1, 2, 3])]


def test_a_message_larger_than_the_window_goes_alone() -> None:
    group = bare(3)
    group.join(1, messages=100, size_bytes=5)
    delivery = group.only()
    assert offsets(delivery) == [1]
    group.group.ack(1, [delivery.id], [], 0)
    assert group.pumped() == [(1, [2])]


def test_a_message_too_large_for_what_is_left_is_not_wanted_for_ever() -> None:
    group = bare(3)
    group.join(1, messages=100, size_bytes=15)
    delivery = group.only()
    assert offsets(delivery) == [1]
    assert group.group.next_want(0) is None
    group.group.ack(1, [delivery.id], [], 0)
    assert group.pumped() == [(1, [2])]


def test_a_window_of_no_messages_is_a_pause() -> None:
    group = bare(3)
    group.join(1, messages=0)
    assert group.pump() == []
    group.group.resize(1, window_messages=2, window_bytes=100)
    assert group.pumped() == [(1, [1, 2])]


def test_what_is_leased_beyond_a_smaller_window_stays_leased() -> None:
    group = bare(10)
    group.join(1, messages=4)
    delivery = group.only()
    group.group.resize(1, window_messages=2, window_bytes=1_000)
    group.group.ack(1, [], [part(delivery, 1, 2)], 0)
    assert group.pump() == []
    group.group.ack(1, [], [part(delivery, 3)], 0)
    assert group.pumped() == [(1, [5])]


def test_what_was_acknowledged_before_is_passed_over() -> None:
    group = BareGroup()
    group.add(acked=AckSet(3, [(5, 6), (8, 9)]))
    group.publish(count=9)
    group.join(1)
    assert group.pumped() == [(1, [3, 4, 6, 7, 9])]


def test_messages_of_an_unknown_partition_go_to_nobody() -> None:
    group = bare()
    group.join(1)
    assert group.group.offer(("other", 0), 1, 5, 50, 0) == []
    group.group.extend(("other", 0), 5)
    assert group.group.gone(("other", 0), 1, 5) is NOTHING


def test_an_offer_beyond_what_was_wanted_leaves_the_rest_owed() -> None:
    group = bare(9)
    group.join(1)
    assert [offsets(delivery) for delivery in group.offer(4, 3)] == [[4, 5, 6]]
    assert group.pumped() == [(1, [1, 2, 3, 7, 8, 9])]


def test_what_was_offered_before_is_not_taken_again() -> None:
    group = bare(9)
    group.join(1)
    group.pump()
    assert group.offer(1, 9) == []


def test_a_consumer_cannot_join_twice() -> None:
    group = bare()
    group.join(1)
    with pytest.raises(ValueError, match="consumer 1 is there already"):
        group.join(1)


def test_ten_thousand_idle_partitions_are_not_looked_at() -> None:
    group = Group(PLAIN, is_keyed=False)
    for number in range(10_000):
        group.add_partition(("orders", number), AckSet(), now_ns=0)
    group.extend(("orders", 5_000), 2)
    group.join(1, window_messages=10, window_bytes=100)
    want = group.next_want(0)
    assert want is not None
    assert want.key == ("orders", 5_000)
    assert len(group._group_state._busy) == 1


# --- Acknowledging ---


def test_an_acknowledged_delivery_makes_room_and_is_to_be_stored() -> None:
    group = bare(10)
    group.join(1, messages=5)
    delivery = group.only()
    effects = group.group.ack(1, [delivery.id], [], 0)
    assert effects.acked == [(ORDERS, 1, 6)]
    assert effects == Effects(acked=effects.acked)
    assert group.group.in_flight == 0
    assert group.pumped() == [(1, [6, 7, 8, 9, 10])]


def test_acks_of_neighbours_are_one_range_to_be_stored() -> None:
    group = bare(10)
    group.join(1, messages=5)
    first = group.only()
    group.group.resize(1, window_messages=10, window_bytes=1_000)
    second = group.only()
    assert group.group.ack(1, [first.id, second.id], [], 0).acked == [(ORDERS, 1, 11)]


def test_parts_are_acknowledged_in_any_order() -> None:
    group = bare(6)
    group.join(1)
    delivery = group.only()
    parts = [part(delivery, 5), part(delivery, 2, 3), part(delivery, 6)]
    assert group.group.ack(1, [], parts, 0).acked == [(ORDERS, 2, 4), (ORDERS, 5, 7)]
    assert group.acked() == AckSet(1, [(2, 4), (5, 7)])
    assert group.group.in_flight == 2
    assert group.group.ack(1, [delivery.id], [], 0).acked == [(ORDERS, 1, 2), (ORDERS, 4, 5)]


def test_up_to_an_offset_covers_what_this_consumer_has_there_and_nothing_else() -> None:
    group = bare(9)
    group.join(1, messages=3)
    group.join(2, messages=3)
    group.pump()
    group.publish(count=1, key=("orders", 1))
    assert group.group.ack_up_to(1, ORDERS, 8, 0).acked == [(ORDERS, 1, 4)]
    assert group.group.ack_up_to(2, ORDERS, 5, 0).acked == [(ORDERS, 4, 6)]
    assert group.group.ack_up_to(2, ("orders", 1), 5, 0) is NOTHING
    assert group.group.ack_up_to(9, ORDERS, 5, 0) is NOTHING
    assert group.group.in_flight == 1


def test_up_to_an_offset_again_and_again_covers_what_came_meanwhile() -> None:
    group = BareGroup()
    group.add()
    group.join(1)
    for offset in range(1, 30):
        group.publish(count=1)
        group.pump()
        if offset > 20:
            effects = group.group.ack_up_to(1, ORDERS, offset - 10, 0)
            assert effects.acked == [
                (ORDERS, max(offset - 10, 1) if offset > 21 else 1, offset - 9)
            ]
    assert group.acked().floor == 20


def test_another_consumers_delivery_is_late() -> None:
    group = bare()
    group.join(1)
    group.join(2)
    delivery = group.only()
    named = part(delivery, 1, 3)
    assert group.group.ack(2, [delivery.id], [named], 0).late == [
        DeliveryPart(delivery.id, 0, WHOLE),
        named,
    ]
    assert group.group.nack(2, [named], 0, delay_ns=None, reason="").late == [named]
    assert group.group.in_flight == 10


def test_what_was_acknowledged_already_is_late() -> None:
    group = bare(5)
    group.join(1)
    delivery = group.only()
    group.group.ack(1, [], [part(delivery, 2, 3)], 0)
    effects = group.group.ack(1, [], [part(delivery, 1, 4)], 0)
    assert effects.acked == [(ORDERS, 1, 2), (ORDERS, 4, 5)]
    assert effects.late == [part(delivery, 2, 3)]


def test_nothing_is_acknowledged_twice_in_one_call() -> None:
    group = bare(5)
    group.join(1)
    delivery = group.only()
    twice = [part(delivery, 1, 5), part(delivery, 2)]
    effects = group.group.ack(1, [delivery.id, delivery.id], twice, 0)
    assert effects.acked == [(ORDERS, 1, 6)]
    assert effects.late == [DeliveryPart(delivery.id, 0, WHOLE), *twice]


@pytest.mark.parametrize(
    "rubbish",
    [
        DeliveryPart(1, 0, 2**63 - 1),
        DeliveryPart(1, 2**62, 2**63 - 1),
        DeliveryPart(1, -(2**63), 2**63),
        DeliveryPart(2**62, 1, 2),
        DeliveryPart(-1, 1, 2),
        DeliveryPart(1, 7, 3),
        DeliveryPart(1, 5, 5),
    ],
)
def test_rubbish_is_late_or_nothing(rubbish: DeliveryPart) -> None:
    group = bare(5)
    group.join(1)
    group.pump()
    group.group.recalled(1, [rubbish], 0)
    group.group.renew(1, [rubbish.delivery], 0)
    group.group.nack(1, [rubbish], 0, delay_ns=2**200, reason="x" * 10_000)
    effects = group.group.ack(1, [rubbish.delivery], [rubbish] * 3, 0)
    named = {offset for _, begin, end in effects.acked for offset in range(begin, end)}
    assert named <= {1, 2, 3, 4, 5}
    group.group.ack_up_to(1, ORDERS, rubbish.end, 0)
    group.group.ack_up_to(1, ORDERS, -rubbish.end, 0)
    assert group.group.in_flight + group.group.delayed + group.acked().floor - 1 == 5


def test_what_a_consumer_says_after_it_left_is_late() -> None:
    group = bare(5)
    group.join(1)
    delivery = group.only()
    group.group.leave(1, 0, is_clean=True)
    assert group.group.ack(1, [delivery.id], [], 0).late == [DeliveryPart(delivery.id, 0, WHOLE)]
    assert group.group.leave(1, 0, is_clean=True) is NOTHING
    group.group.resize(1, window_messages=5, window_bytes=5)
    assert group.group.next_want(0) is None


# --- What comes again ---


def test_what_failed_comes_again_after_its_delay_and_before_what_is_new() -> None:
    group = bare(4)
    group.join(1, messages=4)
    delivery = group.only()
    effects = group.group.nack(
        1, [part(delivery, 2, 3)], group.now_ns, delay_ns=None, reason="no such customer"
    )
    until_ns = group.now_ns + SECOND
    assert effects.failed == [
        (ORDERS, 2, 1, until_ns, group.now_ns, "no such customer"),
        (ORDERS, 3, 1, until_ns, group.now_ns, "no such customer"),
    ]
    assert group.group.delayed == 2
    assert group.pump() == []
    assert group.group.next_time_ns() == until_ns
    first_ns, group.now_ns = group.now_ns, until_ns
    group.group.expire(group.now_ns)
    group.publish(count=2)
    group.group.resize(1, window_messages=5, window_bytes=1_000)
    again, new = group.pump()
    assert (offsets(again), offsets(new)) == ([2, 3], [5])
    assert again.attempts == [(2, 1, first_ns), (3, 1, first_ns)]
    assert group.group.releases == 2


def test_delays_grow_as_a_message_fails_again() -> None:
    group = bare(1)
    group.join(1)
    delays = []
    for _ in range(6):
        delivery = group.only()
        group.group.nack(1, [part(delivery, 1)], group.now_ns, delay_ns=None, reason="")
        due_ns = group.group.next_time_ns()
        assert due_ns is not None
        delays.append((due_ns - group.now_ns) // SECOND)
        group.now_ns = due_ns
        group.group.expire(group.now_ns)
    assert delays == [1, 2, 4, 8, 10, 10]


def test_a_nacks_own_delay_goes_before_the_options() -> None:
    group = bare(2)
    group.join(1)
    delivery = group.only()
    group.group.nack(1, [part(delivery, 1)], group.now_ns, delay_ns=0, reason="")
    assert group.pumped() == [(1, [1])]
    group.group.nack(1, [part(delivery, 2)], group.now_ns, delay_ns=7 * SECOND, reason="")
    assert group.pump() == []
    group.group.expire(group.now_ns + 7 * SECOND)
    assert group.pumped() == [(1, [2])]


def test_a_consumer_that_leaves_in_order_gives_back_without_counting() -> None:
    group = bare(5)
    group.join(1)
    delivery = group.only()
    group.group.ack(1, [], [part(delivery, 2)], 0)
    assert group.group.leave(1, group.now_ns, is_clean=True) is NOTHING
    first_ns, group.now_ns = group.now_ns, 5 * SECOND
    group.join(2)
    again = group.only()
    assert offsets(again) == [1, 3, 4, 5]
    assert again.attempts == [(offset, 0, first_ns) for offset in (1, 3, 4, 5)]
    state = group.group.partition_state(ORDERS)
    assert state is not None
    assert state.failures == {}


def test_returned_messages_come_again_at_once_uncounted_and_the_rest_stays_leased() -> None:
    group = bare(4)
    group.join(1, messages=4)
    delivery = group.only()
    group.group.resize(1, window_messages=0, window_bytes=0)
    group.join(2)
    assert group.group.give_back(1, [part(delivery, 2, 3)], 5) is NOTHING
    assert group.group.leased(1) == (2, 20)
    again = group.only()
    assert (again.consumer, offsets(again)) == (2, [2, 3])
    assert [attempt[:2] for attempt in again.attempts] == [(2, 0), (3, 0)]
    assert group.group.ack(1, [delivery.id], [], 5).acked == [(ORDERS, 1, 2), (ORDERS, 4, 5)]


def test_messages_that_a_consumer_does_not_have_cannot_be_returned() -> None:
    group = bare(2)
    group.join(1)
    delivery = group.only()
    group.group.ack(1, [], [part(delivery, 1)], 0)
    assert group.group.give_back(2, [part(delivery, 2)], 0) is NOTHING
    assert group.group.give_back(1, [part(delivery, 1), DeliveryPart(9, 1, 2)], 0) is NOTHING
    assert group.group.leased(1) == (1, 10)
    assert group.group.leased(2) == (0, 0)
    assert group.pump() == []


def test_group_says_which_messages_a_consumer_does_not_have() -> None:
    group = bare(6)
    group.join(1)
    delivery = group.only()
    group.group.ack(1, [], [part(delivery, 3)], 0)
    assert group.group.missing(1, [part(delivery, 2, 4)]) == [part(delivery, 3)]
    assert group.group.missing(1, [part(delivery, 1, 9)]) == [
        part(delivery, 3),
        part(delivery, 7, 9),
    ]
    assert group.group.missing(2, [part(delivery, 1)]) == [part(delivery, 1)]


def test_lease_that_ends_by_time_is_reported_once_even_if_it_was_renewed_for_less_and_more() -> (
    None
):
    group = bare(3)
    group.join(1, messages=2)
    group.join(2)
    first, second = group.pump()
    group.group.renew(1, [first.id], SECOND, lease_ns=SECOND)
    group.group.renew(1, [first.id], SECOND)
    assert group.group.expire(30 * SECOND).expired == []
    assert group.group.expire(31 * SECOND).expired == [(1, first.id), (2, second.id)]
    assert group.group.expire(100 * SECOND).expired == []


def test_a_consumer_that_is_lost_counts_and_its_messages_come_at_once() -> None:
    group = bare(2)
    group.join(1)
    group.only()
    effects = group.group.leave(1, group.now_ns, is_clean=False)
    assert [failed[1:3] for failed in effects.failed] == [(1, 1), (2, 1)]
    group.join(2)
    assert group.pumped() == [(2, [1, 2])]


def test_a_message_that_failed_too_often_is_to_be_buried_and_not_delivered() -> None:
    group = bare(2, deliveries_max=2)
    group.join(1)
    for failures in (1, 2):
        delivery = group.only()
        effects = group.group.nack(1, [part(delivery, 1)], 0, delay_ns=0, reason=f"try {failures}")
        assert effects.dead_letters == (
            [DeadLetter(ORDERS, 1, 2, "try 2")] if failures == 2 else []
        )
    assert group.pump() == []
    assert not group.group.is_idle
    assert 1 not in group.acked()
    assert group.group.dead_letter_stored(ORDERS, 1, 0).acked == [(ORDERS, 1, 2)]
    assert group.group.dead_letter_stored(ORDERS, 1, 0) is NOTHING
    assert group.acked().floor == 2


def test_a_dead_letter_that_failed_is_asked_for_again() -> None:
    group = bare(1, deliveries_max=1)
    group.join(1)
    delivery = group.only()
    dead_letters = group.group.nack(
        1, [part(delivery, 1)], group.now_ns, delay_ns=None, reason="x"
    ).dead_letters
    group.group.dead_letter_failed(ORDERS, 1, group.now_ns)
    assert group.group.next_time_ns() == group.now_ns + 10 * SECOND
    assert group.pump() == []
    assert group.group.expire(group.now_ns + 10 * SECOND).dead_letters == dead_letters
    assert group.group.dead_letter_stored(ORDERS, 1, 0).acked == [(ORDERS, 1, 2)]
    assert group.group.is_idle


def test_without_a_limit_nothing_is_buried() -> None:
    group = bare(1, deliveries_max=0)
    group.join(1)
    for failures in range(1, 50):
        effects = group.group.nack(1, [part(group.only(), 1)], 0, delay_ns=0, reason="")
        assert not effects.dead_letters
        assert effects.failed[0][2] == failures


def test_a_dead_letter_that_is_sent_back_is_owed_as_if_it_were_new() -> None:
    group = bare(3, deliveries_max=1)
    group.join(1)
    delivery = group.only()
    group.group.nack(1, [part(delivery, 2)], 0, delay_ns=0, reason="x")
    group.group.dead_letter_stored(ORDERS, 2, 0)
    group.group.ack(1, [delivery.id], [], 0)
    assert group.acked().floor == 4
    assert group.group.reopen(ORDERS, 2).failed == [(ORDERS, 2, 0, 0, 0, "")]
    assert group.acked() == AckSet(2, [(3, 4)])
    again = group.only()
    assert (offsets(again), again.attempts) == ([2], [])
    assert group.group.reopen(ORDERS, 2) is NOTHING
    assert group.group.reopen(ORDERS, -5) is NOTHING


# --- What was before a restart, and what is no more ---


def test_failures_of_before_a_restart_count_on_and_wait_for_their_time() -> None:
    group = BareGroup()
    failures = {
        2: Failure(3, 5 * SECOND, 1, "slow"),
        4: Failure(1, 0, 7, "quick"),
        6: Failure(8, 0, 1, "hopeless"),
    }
    group.keys[ORDERS] = [None]
    group.group.add_partition(ORDERS, AckSet(), failures, now_ns=group.now_ns)
    group.publish(count=8)
    group.join(1)
    delivery = group.only()
    assert offsets(delivery) == [1, 3, 4, 5, 7, 8]
    assert delivery.attempts == [(4, 1, 7)]
    assert group.group.next_time_ns() == group.now_ns
    assert group.group.expire(group.now_ns).dead_letters == [DeadLetter(ORDERS, 6, 8, "hopeless")]
    group.group.expire(5 * SECOND)
    again = group.only()
    assert (offsets(again), again.attempts) == ([2], [(2, 3, 1)])


def test_what_is_gone_counts_as_done() -> None:
    group = bare(10)
    group.join(1, messages=4)
    group.pump()
    assert group.group.gone(ORDERS, 3, 8).acked == [(ORDERS, 3, 8)]
    assert group.group.gone(ORDERS, 3, 8) is NOTHING
    group.group.resize(1, window_messages=100, window_bytes=1_000)
    assert group.pumped() == [(1, [8, 9, 10])]


def test_what_is_gone_while_it_is_leased_does_not_come_back() -> None:
    group = bare(4)
    group.join(1)
    delivery = group.only()
    group.group.gone(ORDERS, 2, 4)
    assert group.group.ack(1, [], [part(delivery, 2)], 0) is NOTHING
    effects = group.group.leave(1, 0, is_clean=False)
    assert [failed[1] for failed in effects.failed] == [1, 4]
    group.join(2)
    assert group.pumped() == [(2, [1, 4])]


def test_what_is_gone_while_it_waits_waits_no_more() -> None:
    group = bare(3, deliveries_max=2)
    group.join(1)
    delivery = group.only()
    group.group.nack(1, [part(delivery, 1, 3)], 0, delay_ns=SECOND, reason="")
    group.group.gone(ORDERS, 1, 4)
    assert group.group.is_idle
    group.group.expire(SECOND)
    assert group.pump() == []


def test_a_move_ends_leases_without_counting() -> None:
    group = bare(10)
    group.join(1, messages=10)
    delivery = group.only()
    group.group.nack(1, [part(delivery, 9)], group.now_ns, delay_ns=SECOND, reason="")
    effects = group.group.reset_partition(ORDERS, 7)
    assert effects.recalls == [(1, part(delivery, 1, 8)), (1, part(delivery, 10))]
    assert effects == Effects(recalls=effects.recalls)
    assert group.group.is_idle
    again = group.only()
    assert (offsets(again), again.attempts) == ([7, 8, 9, 10], [])
    assert group.group.ack(1, [delivery.id], [], 0).late == [DeliveryPart(delivery.id, 0, WHOLE)]
    group.group.expire(group.now_ns + SECOND)
    assert group.pump() == []


def test_a_partition_that_is_no_more_takes_its_leases_along() -> None:
    group = bare(10)
    group.publish(count=3, key=("orders", 1))
    group.join(1, messages=10)
    group.pump()
    group.group.remove_partition(ORDERS)
    assert group.group.partition_state(ORDERS) is None
    assert group.group.in_flight == 0
    assert group.pumped() == [(1, [1, 2, 3])]
    assert group.group.remove_partition(ORDERS) is NOTHING
    assert group.group.reset_partition(ORDERS, 1) is NOTHING
    group.group.expire(10**15)


def test_a_million_messages_in_flight_are_a_thousand_masks() -> None:
    group = bare(200_000)
    group.join(1, messages=10**6, size_bytes=2**40)
    deliveries = [
        delivery for base in range(1, 200_001, 1_000) for delivery in group.offer(base, 1_000)
    ]
    leases = group.group._group_state.leases._leases.values()
    assert len(deliveries) == len(leases) == 200
    assert all(
        lease.outstanding is delivery.mask
        for lease, delivery in zip(leases, deliveries, strict=True)
    )


# --- Scattered acks ---


def test_scattered_acks_are_reported_as_bits() -> None:
    group = bare(40)
    group.join(1)
    delivery = group.only()
    bits = sum(1 << number for number in range(0, 40, 2))
    picked = [Picked(delivery.id, 1, bits.to_bytes(5, "little"))]
    effects = group.group.ack(1, [], [], 0, picked)
    assert effects.acked == []
    assert effects.picked == [(ORDERS, 1, bits)]
    assert group.acked() == AckSet(1, [(offset, offset + 1) for offset in range(1, 41, 2)])
    assert group.group.in_flight == 20


def test_scattered_acks_of_what_is_not_outstanding_are_late() -> None:
    group = bare(3)
    group.join(1)
    delivery = group.only()
    far = 2**62
    picked = [
        Picked(delivery.id, 0, b"\x1b"),
        Picked(99, 1, b"\x03"),
        Picked(delivery.id, far, b"\x01"),
    ]
    effects = group.group.ack(1, [], [], 0, picked)
    assert effects.acked == [(ORDERS, 1, 2), (ORDERS, 3, 4)]
    assert effects.late == [
        DeliveryPart(delivery.id, 0, 1),
        DeliveryPart(delivery.id, 4, 5),
        DeliveryPart(99, 1, 3),
        DeliveryPart(delivery.id, far, far + 1),
    ]
