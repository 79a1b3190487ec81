"""Key-shared work: a key's messages go to one consumer at a time, in order, and come again in order."""

from __future__ import annotations

import pytest

from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.definition import SubscriptionOptions
from runnel.group_rules.effects import (
    NOTHING,
    DeadLetter,
    DeliveryPart,
    Effects,
    Failure,
    LeasedDelivery,
)
from runnel.group_rules.keyed_partition import KeyedPartition
from tests.group_rules.bare_group import ORDERS, SECOND, BareGroup, offsets, part

A, B, C = b"a", b"b", b"c"
LEASE = 30 * SECOND


def keyed(*row_keys: bytes | None, deliveries_max: int = 8, waiting_max: int = 65_536) -> BareGroup:
    options = SubscriptionOptions(
        lease_ns=LEASE,
        deliveries_max=deliveries_max,
        retry_delay_ns=SECOND,
        retry_delay_ns_max=10 * SECOND,
    )
    group = BareGroup(options, is_keyed=True, waiting_max=waiting_max)
    group.publish(*row_keys)
    return group


def nack(
    group: BareGroup, delivery: LeasedDelivery, offset: int, *, delay_ns: int | None = 0
) -> Effects:
    return group.group.nack(
        delivery.consumer,
        [part(delivery, offset)],
        group.now_ns,
        delay_ns=delay_ns,
        reason="no such customer",
    )


def ack(group: BareGroup, delivery: LeasedDelivery, *named: int) -> Effects:
    parts = [part(delivery, offset) for offset in named]
    return group.group.ack(delivery.consumer, [], parts, group.now_ns)


def is_empty(group: BareGroup) -> bool:
    """Nothing is left of any queue."""
    work = group.group._partitions[ORDERS]
    assert isinstance(work, KeyedPartition)
    return not (list(work._key_queues) or work._held or work._key_queues.waiting or work.due)


# --- One consumer at a time, in order ---


def test_keys_are_dealt_out_and_each_stays_with_its_consumer() -> None:
    group = keyed(A, B, A, C, B, A)
    group.join(1)
    group.join(2)
    assert group.pumped() == [(1, [1, 3, 4, 6]), (2, [2, 5])]


def test_several_of_a_key_are_in_flight_at_once() -> None:
    group = keyed(A, A)
    group.join(1)
    group.join(2)
    assert group.pumped() == [(1, [1, 2])]
    group.publish(A)
    assert group.pumped() == [(1, [3])]


def test_a_key_moves_only_when_nothing_of_it_is_in_flight() -> None:
    group = keyed(A, A)
    group.join(1, messages=2)
    delivery = group.only()
    group.join(2)
    group.publish(A)
    assert group.pump() == []
    assert group.group.waiting == 1
    ack(group, delivery, 1, 2)
    group.group.resize(1, window_messages=0, window_bytes=0)
    assert group.pumped() == [(2, [3])]
    assert group.group.waiting == 0


def test_what_waits_for_a_full_consumer_holds_up_no_other_key() -> None:
    group = keyed(A, A, A, B, A, C)
    group.join(1, messages=2)
    group.join(2, messages=100)
    first, second = group.pump()
    assert (first.consumer, offsets(first)) == (1, [1, 2])
    assert (second.consumer, offsets(second)) == (2, [4, 6])
    ack(group, first, 1)
    assert group.pumped() == [(1, [3])]
    ack(group, first, 2)
    assert group.pumped() == [(1, [5])]


def test_what_waits_of_several_keys_goes_out_together_as_far_as_there_is_room() -> None:
    group = keyed(A, B, A, B, C, A, B, A)
    group.join(1, messages=2)
    group.join(2, messages=100)
    group.group.resize(2, window_messages=0, window_bytes=0)
    assert group.pumped() == [(1, [1, 2])]
    group.group.resize(2, window_messages=100, window_bytes=1_000_000)
    assert group.pumped() == [(2, [5])]
    assert group.group.waiting == 5
    group.group.resize(1, window_messages=6, window_bytes=1_000_000)
    assert group.pumped() == [(1, [3, 4, 6, 8])]  # the key that has waited longest first
    group.group.resize(1, window_messages=7, window_bytes=1_000_000)
    assert group.pumped() == [(1, [7])]
    assert group.group.waiting == 0


def test_only_for_the_consumer_that_has_the_key_is_anything_wanted() -> None:
    group = keyed(A, A, A)
    group.join(1, messages=1)
    group.join(2)
    delivery = group.only()
    assert group.group.next_want(0) is None
    ack(group, delivery, 1)
    want = group.group.next_want(0)
    assert want is not None
    assert (want.begin, want.bytes_max > 0) == (2, True)


def test_a_consumer_that_comes_takes_keys_that_are_not_in_flight() -> None:
    group = keyed(A, A, B)
    group.join(1, messages=2)
    group.pump()
    group.join(2)
    assert group.pumped() == [(2, [3])]


def test_without_anybody_with_room_messages_are_not_looked_at() -> None:
    group = keyed(*[A] * 100)
    group.join(1, messages=5)
    group.pump()
    assert group.group.waiting == 0


def test_the_same_key_in_another_partition_is_another_key() -> None:
    group = keyed(A)
    group.publish(A, key=("orders", 1))
    group.join(1)
    group.join(2)
    assert sorted(group.pumped()) == [(1, [1]), (2, [1])]


def test_an_empty_key_is_a_key() -> None:
    group = keyed(b"", b"")
    group.join(1)
    group.join(2)
    assert group.pumped() == [(1, [1, 2])]


def test_messages_without_a_key_have_no_order() -> None:
    group = keyed(None, None, None, None)
    group.join(1)
    group.join(2)
    first, second = group.pump()
    assert (offsets(first), offsets(second)) == ([1, 3], [2, 4])
    assert nack(group, first, 1).recalls == []
    assert [named for _, named in group.pumped()] == [[1]]


def test_beyond_so_many_that_wait_no_more_are_looked_at_and_lanes_go_on() -> None:
    group = keyed(*[A] * 20, B, waiting_max=4)
    group.join(1, messages=2)
    group.join(2)
    delivery = group.only()
    assert offsets(delivery) == [1, 2]
    assert group.group.waiting == 4
    held = {1: delivery, 2: delivery}
    for offset in range(3, 21):
        ack(group, held.pop(offset - 2), offset - 2)
        held[offset] = group.pump()[0]
        assert (held[offset].consumer, offsets(held[offset])) == (1, [offset])
        assert group.group.waiting <= 4
    assert group.group.waiting == 0


def test_a_long_offer_is_delivered_in_pieces_of_bounded_span() -> None:
    group = keyed(*[A, B] * 5_000)
    group.join(1, messages=20_000)
    group.join(2, messages=20_000)
    deliveries = group.pump()
    assert [delivery.count for delivery in deliveries] == [2_048, 2_048, 2_048, 2_048, 904, 904]
    assert {delivery.mask.bit_length() <= 4_096 for delivery in deliveries} == {True}


def test_keys_must_be_given_with_an_offer() -> None:
    group = keyed(A, B)
    group.join(1)
    with pytest.raises(ValueError, match="2 messages in key_shared mode need as many keys"):
        group.group.offer(ORDERS, 1, 2, 20, 0)


def test_new_messages_are_taken_in_order_only() -> None:
    group = keyed(A, B, A)
    group.join(1)
    assert group.offer(3, 1) == []
    assert group.pumped() == [(1, [1, 2, 3])]


# --- What failed comes again, with the later ones of its key ---


def test_a_failed_message_comes_again_with_the_later_ones_in_order() -> None:
    group = keyed(A, B, A, A)
    group.join(1)
    delivery = group.only()
    group.publish(A)
    later = group.only()
    effects = nack(group, delivery, 3)
    assert effects.recalls == [(1, part(delivery, 4)), (1, part(later, 5))]
    assert [failed[1:3] for failed in effects.failed] == [(3, 1)]
    assert group.pump() == []
    group.group.recalled(1, [part(delivery, 4)], 0)
    assert group.pump() == []
    group.group.recalled(1, [part(later, 5)], 0)
    group.publish(A)
    again, new = group.pump()
    assert (offsets(again), offsets(new)) == ([3, 4, 5], [6])
    assert [attempt[:2] for attempt in again.attempts] == [(3, 1), (4, 0), (5, 0)]
    assert group.group.in_flight == 6


def test_returned_message_brings_back_the_later_ones_of_its_key_uncounted() -> None:
    group = keyed(A, B, A, A)
    group.join(1)
    delivery = group.only()
    ack(group, delivery, 1)
    effects = group.group.give_back(1, [part(delivery, 3)], 0)
    assert (effects.recalls, effects.failed) == ([(1, part(delivery, 4))], [])
    assert group.pump() == []  # until the consumer says that it does not work on the later one
    group.group.recalled(1, [part(delivery, 4)], 0)
    again = group.only()
    assert offsets(again) == [3, 4]
    assert [attempt[:2] for attempt in again.attempts] == [(3, 0), (4, 0)]


def test_returned_last_message_of_a_key_waits_for_the_ones_before_it() -> None:
    group = keyed(A, A)
    group.join(1)
    delivery = group.only()
    group.group.resize(1, window_messages=0, window_bytes=0)
    group.join(2)
    assert not group.group.give_back(1, [part(delivery, 2)], 0)
    assert group.pump() == []
    ack(group, delivery, 1)
    assert group.pumped() == [(2, [2])]


def test_what_is_recalled_can_no_longer_be_acknowledged() -> None:
    group = keyed(A, A, A)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1)
    assert ack(group, delivery, 2).late == [part(delivery, 2)]
    assert nack(group, delivery, 3).late == [part(delivery, 3)]
    assert group.acked().floor == 1
    # Both have said that work on them ended: that is as good as a confirmation.
    assert group.pumped() == [(1, [1, 2, 3])]


def test_a_whole_delivery_is_late_where_it_was_recalled() -> None:
    group = keyed(A, B, A, A)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1)
    effects = group.group.ack(1, [delivery.id], [], 0)
    assert effects.acked == [(ORDERS, 2, 3)]
    assert effects.late == [part(delivery, 3, 4)]
    assert group.pumped() == [(1, [1, 3, 4])]


def test_up_to_an_offset_is_late_where_it_was_recalled() -> None:
    group = keyed(A, B, A)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1)
    effects = group.group.ack_up_to(1, ORDERS, 3, 0)
    assert (effects.acked, effects.late) == ([(ORDERS, 2, 3)], [part(delivery, 3)])
    assert group.pumped() == [(1, [1, 3])]


def test_recalled_messages_stay_in_the_window_until_they_are_confirmed() -> None:
    group = keyed(A, A, B, C)
    group.join(1, messages=3)
    delivery = group.only()
    nack(group, delivery, 1)
    assert group.group.in_flight == 2
    assert group.pumped() == [(1, [4])]
    assert group.pump() == []
    group.group.recalled(1, [part(delivery, 2)], 0)
    assert group.pumped() == [(1, [1])]


def test_an_earlier_one_in_flight_is_not_disturbed() -> None:
    group = keyed(A, A, A)
    group.join(1)
    group.join(2)
    delivery = group.only()
    effects = nack(group, delivery, 2)
    assert effects.recalls == [(1, part(delivery, 3))]
    group.group.recalled(1, [part(delivery, 3)], 0)
    assert group.pumped() == [(1, [2, 3])]
    assert ack(group, delivery, 1).acked == [(ORDERS, 1, 2)]


def test_of_several_that_failed_together_the_first_of_each_key_counts() -> None:
    group = keyed(A, B, A, B, None, None)
    group.join(1)
    delivery = group.only()
    effects = group.group.nack(1, [part(delivery, 1, 6)], group.now_ns, delay_ns=0, reason="")
    assert sorted(failed[1] for failed in effects.failed) == [1, 2, 5, 6]
    assert effects.recalls == []
    assert group.pumped() == [(1, [1, 2, 3, 4, 5, 6])]


def test_a_delayed_failure_holds_its_whole_key_and_no_other() -> None:
    group = keyed(A, B)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1, delay_ns=5 * SECOND)
    group.publish(A, B)
    assert group.pumped() == [(1, [4])]
    assert group.group.delayed == 1
    group.now_ns += 5 * SECOND
    assert group.group.next_time_ns() == group.now_ns
    group.group.expire(group.now_ns)
    assert group.pumped() == [(1, [1, 3])]
    assert group.group.delayed == 0


def test_a_key_is_held_until_its_longest_delay_is_over() -> None:
    group = keyed(A, A)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 2, delay_ns=5 * SECOND)
    nack(group, delivery, 1, delay_ns=SECOND)
    group.group.expire(group.now_ns + SECOND)
    assert group.pump() == []
    group.group.expire(group.now_ns + 5 * SECOND)
    assert group.pumped() == [(1, [1, 2])]


def test_after_a_failure_the_key_may_go_to_another_consumer() -> None:
    group = keyed(A, A)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1)
    group.group.recalled(1, [part(delivery, 2)], 0)
    group.join(2)
    group.group.resize(1, window_messages=0, window_bytes=0)
    assert group.pumped() == [(2, [1, 2])]


def test_an_expired_lease_counts_the_first_of_each_key_and_recalls_what_others_hold() -> None:
    group = keyed(A, B, A)
    group.join(1)
    first = group.only()
    group.now_ns += SECOND
    group.publish(A, C)
    second = group.only()
    group.now_ns = first.deadline_ns
    effects = group.group.expire(group.now_ns)
    assert sorted(failed[1:3] for failed in effects.failed) == [(1, 1), (2, 1)]
    assert effects.recalls == [(1, part(second, 4))]
    assert group.pumped() == [(1, [2])]
    group.now_ns = second.deadline_ns
    effects = group.group.expire(group.now_ns)
    assert [failed[1] for failed in effects.failed] == [5]
    assert group.pumped() == [(1, [1, 3, 4, 5])]


def test_leases_that_end_together_count_a_key_once() -> None:
    group = keyed(A)
    group.join(1)
    first = group.only()
    group.publish(A)
    group.only()
    effects = group.group.expire(first.deadline_ns)
    assert [failed[1:3] for failed in effects.failed] == [(1, 1)]
    assert effects.recalls == []
    assert group.pumped() == [(1, [1, 2])]


def test_a_lost_consumer_counts_the_first_of_each_key() -> None:
    group = keyed(A, B, A)
    group.join(1)
    group.only()
    group.publish(B)
    group.only()
    effects = group.group.leave(1, group.now_ns, is_clean=False)
    assert sorted(failed[1:3] for failed in effects.failed) == [(1, 1), (2, 1)]
    group.join(2)
    assert group.pumped() == [(2, [1, 2, 3]), (2, [4])]


def test_a_consumer_that_leaves_in_order_counts_nothing() -> None:
    group = keyed(A, B, None, A)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1)
    assert group.group.leave(1, group.now_ns, is_clean=True) is NOTHING
    group.join(2)
    again = group.only()
    assert offsets(again) == [1, 2, 3, 4]
    assert [attempt[:2] for attempt in again.attempts] == [(1, 1), (2, 0), (3, 0), (4, 0)]


def test_a_holder_that_leaves_has_stopped_work_on_what_was_recalled() -> None:
    group = keyed(A, A)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1)
    group.join(2)
    effects = group.group.leave(1, group.now_ns, is_clean=False)
    assert effects.failed == []
    assert group.pumped() == [(2, [1, 2])]


# --- Dead letters ---


def test_a_key_waits_for_the_dead_letter_of_its_message_and_goes_on() -> None:
    group = keyed(A, B, A, deliveries_max=1)
    group.join(1)
    delivery = group.only()
    effects = nack(group, delivery, 1)
    assert effects.dead_letters == [DeadLetter(ORDERS, 1, 1, "no such customer")]
    assert effects.recalls == [(1, part(delivery, 3))]
    group.group.recalled(1, [part(delivery, 3)], 0)
    group.publish(A)
    assert group.pump() == []
    assert group.group.dead_letter_stored(ORDERS, 1, 0).acked == [(ORDERS, 1, 2)]
    assert group.pumped() == [(1, [3, 4])]


def test_a_dead_letter_that_failed_goes_on_holding_its_key() -> None:
    group = keyed(A, A, deliveries_max=1)
    group.join(1)
    delivery = group.only()
    dead_letters = group.group.nack(
        1, [part(delivery, 1, 2)], group.now_ns, delay_ns=0, reason=""
    ).dead_letters
    group.group.dead_letter_failed(ORDERS, 1, group.now_ns)
    assert group.pump() == []
    group.now_ns += 10 * SECOND
    assert group.group.expire(group.now_ns).dead_letters == dead_letters
    assert group.pump() == []
    group.group.dead_letter_stored(ORDERS, 1, group.now_ns)
    assert group.pumped() == [(1, [2])]


def test_what_is_sent_back_comes_before_what_is_newer_of_its_key() -> None:
    group = keyed(A, A, B, deliveries_max=1)
    group.join(1, messages=2)
    delivery = group.only()
    nack(group, delivery, 1)
    group.group.dead_letter_stored(ORDERS, 1, 0)
    ack(group, delivery, 2)
    group.publish(A)
    assert group.group.reopen(ORDERS, 1).failed == [(ORDERS, 1, 0, 0, 0, "")]
    assert group.offer(4, 1) == []  # an older read: the key of the message is not known yet
    delivered = [delivery for delivery in group.pump() if delivery.consumer == 1]
    assert offsets(delivered[0])[0] == 1
    assert group.group.in_flight == 2


def test_what_is_sent_back_without_a_key_goes_to_anybody() -> None:
    group = keyed(None, deliveries_max=1)
    group.join(1)
    nack(group, group.only(), 1)
    group.group.dead_letter_stored(ORDERS, 1, 0)
    group.group.reopen(ORDERS, 1)
    assert group.pumped() == [(1, [1])]


# --- What was before a restart, and what is no more ---


def recovered(failures: dict[int, Failure], *row_keys: bytes | None) -> BareGroup:
    group = BareGroup(SubscriptionOptions(deliveries_max=3), is_keyed=True)
    group.keys[ORDERS] = [None]
    group.group.add_partition(ORDERS, AckSet(), failures, now_ns=group.now_ns)
    group.publish(*row_keys)
    group.join(1)
    return group


def test_a_delay_of_before_a_restart_holds_its_whole_key() -> None:
    group = recovered({2: Failure(1, 5 * SECOND, 7, "slow")}, A, A, A, B)
    assert group.pumped() == [(1, [1, 4])]
    group.now_ns = 5 * SECOND
    group.group.expire(group.now_ns)
    again = group.only()
    assert (offsets(again), again.attempts) == ([2, 3], [(2, 1, 7)])


def test_a_dead_letter_of_before_a_restart_is_asked_for_again_and_holds_its_key() -> None:
    group = recovered({1: Failure(3, 0, 7, "bad")}, A, A, B)
    assert group.pumped() == [(1, [3])]
    assert group.group.next_time_ns() == group.now_ns
    assert group.group.expire(group.now_ns).dead_letters == [DeadLetter(ORDERS, 1, 3, "bad")]
    assert group.pump() == []
    group.group.dead_letter_stored(ORDERS, 1, 0)
    assert group.pumped() == [(1, [2])]


def test_failures_of_before_a_restart_count_on() -> None:
    group = recovered({1: Failure(2, 0, 7, "bad"), 2: Failure(1, 9 * SECOND, 8, "")}, A, None)
    delivery = group.only()
    assert (offsets(delivery), delivery.attempts) == ([1], [(1, 2, 7)])
    assert nack(group, delivery, 1).dead_letters == [DeadLetter(ORDERS, 1, 3, "no such customer")]
    group.group.expire(9 * SECOND)
    assert group.pumped() == [(1, [2])]


def test_what_is_gone_waits_in_no_lane() -> None:
    group = keyed(A, A, A, A)
    group.join(1, messages=1)
    group.join(2)
    delivery = group.only()
    assert group.group.waiting == 3
    group.group.gone(ORDERS, 2, 4)
    assert group.group.waiting == 1
    ack(group, delivery, 1)
    assert [offset for _, named in group.pumped() for offset in named] == [4]


def test_what_is_gone_holds_no_key() -> None:
    group = keyed(A, B, A, deliveries_max=1)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1)
    group.group.gone(ORDERS, 1, 2)
    group.group.recalled(1, [part(delivery, 3)], 0)
    assert group.pumped() == [(1, [3])]
    assert group.group.dead_letter_stored(ORDERS, 1, 0) is NOTHING


def test_what_is_gone_while_it_is_recalled_is_confirmed_all_the_same() -> None:
    group = keyed(A, A, A)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1)
    group.group.gone(ORDERS, 2, 3)
    group.group.recalled(1, [part(delivery, 3)], 0)
    assert group.pump() == []
    group.group.recalled(1, [part(delivery, 2)], 0)
    assert group.pumped() == [(1, [1, 3])]


def test_a_move_ends_leases_and_key_queues() -> None:
    group = keyed(A, A, B, A, A)
    group.join(1, messages=1)
    group.join(2, messages=1)
    first, second = group.pump()
    assert group.group.waiting == 1
    nack(group, first, 1, delay_ns=SECOND)
    effects = group.group.reset_partition(ORDERS, 4)
    assert effects.recalls == [(2, part(second, 3))]
    assert group.group.is_idle
    assert group.group.waiting == 0
    assert group.pumped() in ([(1, [4])], [(2, [4])])
    group.group.expire(group.now_ns + SECOND)
    assert group.group.in_flight == 1


def test_a_partition_that_is_no_more_leaves_nothing_to_wait_for() -> None:
    group = keyed(A, A, A)
    group.join(1, messages=1)
    group.join(2)
    group.pump()
    assert group.group.waiting == 2
    group.group.remove_partition(ORDERS)
    assert group.group.waiting == 0
    group.group.resize(1, window_messages=50, window_bytes=1_000)
    assert group.group.next_want(0) is None


def test_lanes_end_with_their_last_message() -> None:
    group = keyed(A, B, A, None, C, A)
    group.join(1, messages=2)
    group.join(2, messages=2)
    for _ in range(10):
        for delivery in group.pump():
            group.group.ack(delivery.consumer, [delivery.id], [], 0)
    assert group.acked().floor == 7
    assert is_empty(group)
    assert group.group.is_idle


def test_rubbish_is_late() -> None:
    group = keyed(A, A)
    group.join(1)
    delivery = group.only()
    nack(group, delivery, 1)
    rubbish = [
        DeliveryPart(delivery.id, 0, 2**63 - 1),
        DeliveryPart(99, 1, 2),
        DeliveryPart(delivery.id, 9, 3),
    ]
    group.group.recalled(2, rubbish, 0)
    assert group.pump() == []
    group.group.recalled(1, rubbish, 0)
    assert group.pumped() == [(1, [1, 2])]
    assert group.group.ack(1, [], [DeliveryPart(delivery.id, 0, 2**63 - 1)], 0).late == [
        DeliveryPart(delivery.id, 0, 2**63 - 1)
    ]
