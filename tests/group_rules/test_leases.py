"""Leases: until when, renewed by whom, and what happens when they end."""

from __future__ import annotations

from runnel.group_rules.definition import SubscriptionOptions
from runnel.group_rules.effects import NOTHING, DeliveryPart
from runnel.group_rules.group import Group
from tests.group_rules.bare_group import ORDERS, SECOND, BareGroup, offsets, part

LEASE = 10 * SECOND
OPTIONS = SubscriptionOptions(lease_ns=LEASE, processing_ns_max=60 * SECOND)


def leased(count: int = 3, messages: int = 100) -> BareGroup:
    group = BareGroup(OPTIONS)
    group.publish(count=count)
    group.join(1, messages=messages)
    return group


def test_a_delivery_is_leased_for_as_long_as_the_options_say() -> None:
    group = leased()
    delivery = group.only()
    assert delivery.deadline_ns == group.now_ns + LEASE
    assert group.group.next_time_ns() == delivery.deadline_ns


def test_an_expired_lease_goes_to_another_consumer() -> None:
    group = leased()
    delivery = group.only()
    group.group.resize(1, window_messages=0, window_bytes=0)
    group.join(2)
    group.group.ack(1, [], [part(delivery, 2)], 0)
    assert group.group.expire(delivery.deadline_ns - 1) is NOTHING
    effects = group.group.expire(delivery.deadline_ns)
    assert [failed[1:3] for failed in effects.failed] == [(1, 1), (3, 1)]
    assert all(failed[3] == delivery.deadline_ns for failed in effects.failed)
    assert group.group.in_flight == 0
    assert group.pumped() == [(2, [1, 3])]


def test_after_the_lease_has_ended_its_acks_are_late() -> None:
    group = leased()
    delivery = group.only()
    group.group.expire(delivery.deadline_ns)
    late = group.group.ack(1, [], [part(delivery, 1)], 0)
    assert late.late == [part(delivery, 1)]
    assert not late.acked


def test_an_ack_counts_until_the_clock_was_looked_at() -> None:
    group = leased()
    delivery = group.only()
    effects = group.group.ack(1, [delivery.id], [], delivery.deadline_ns + SECOND)
    assert effects.acked == [(ORDERS, 1, 4)]
    assert group.group.expire(delivery.deadline_ns + SECOND) is NOTHING


def test_a_renewed_lease_begins_anew() -> None:
    group = leased()
    delivery = group.only()
    group.group.renew(1, [delivery.id, 99], group.now_ns + 7 * SECOND)
    assert group.group.next_time_ns() == group.now_ns + 17 * SECOND
    assert group.group.expire(group.now_ns + 16 * SECOND) is NOTHING
    assert group.group.expire(group.now_ns + 17 * SECOND).failed


def test_a_lease_may_be_renewed_for_longer_up_to_the_processing_time() -> None:
    group = leased()
    delivery = group.only()
    group.group.renew(1, [delivery.id], 0, lease_ns=20 * SECOND)
    assert group.group.next_time_ns() == 20 * SECOND
    group.group.renew(1, [delivery.id], 0, lease_ns=2**62)
    assert group.group.next_time_ns() == 60 * SECOND


def test_a_lease_may_be_renewed_for_shorter() -> None:
    group = leased()
    delivery = group.only()
    group.group.renew(1, [delivery.id], group.now_ns, lease_ns=SECOND)
    assert group.group.next_time_ns() == group.now_ns + SECOND
    assert group.group.expire(group.now_ns + SECOND).failed
    assert group.group.next_time_ns() is None


def test_another_consumers_lease_is_not_renewed() -> None:
    group = leased()
    group.join(2)
    delivery = group.only()
    group.group.renew(2, [delivery.id], group.now_ns + SECOND)
    assert group.group.next_time_ns() == delivery.deadline_ns


def test_without_leases_and_delays_there_is_no_next_time() -> None:
    group = leased()
    delivery = group.only()
    group.group.ack(1, [delivery.id], [], 0)
    assert group.group.next_time_ns() is None
    assert group.group.is_idle


def test_the_next_time_is_that_of_the_first_lease_or_delay() -> None:
    group = leased(count=2, messages=1)
    group.join(2, messages=1)
    first, second = group.pump()
    group.group.renew(first.consumer, [first.id], group.now_ns + SECOND)
    assert group.group.next_time_ns() == second.deadline_ns
    group.group.nack(
        second.consumer, [part(second, 2)], group.now_ns, delay_ns=3 * SECOND, reason=""
    )
    assert group.group.next_time_ns() == group.now_ns + 3 * SECOND


def test_renewing_again_and_again_leaves_no_trail() -> None:
    group = leased()
    delivery = group.only()
    for tick in range(10_000):
        group.group.renew(1, [delivery.id], tick, lease_ns=(tick % 7) * SECOND)
        group.group.renew(1, [delivery.id], tick, lease_ns=10_000 * SECOND - tick)
    assert len(group.group._group_state.leases._deadlines) < 2_000


def test_leases_that_were_acknowledged_leave_no_trail() -> None:
    group = BareGroup(OPTIONS)
    group.add()
    group.join(1)
    for _ in range(5_000):
        group.publish(count=1)
        delivery = group.only()
        group.group.ack_up_to(1, ORDERS, delivery.base, 0)
    table = group.group._group_state.leases
    assert len(table._deadlines) < 2_000
    assert not table._leases
    assert not table._of_consumer
    assert not table._of_partition


def test_ids_go_on_where_they_are_told_to() -> None:
    group = Group(OPTIONS, is_keyed=False, first_delivery_id=1_000)
    assert group.next_delivery_id == 1_000
    other = BareGroup(OPTIONS)
    other.group = group
    other.publish(count=4)
    other.join(1, messages=2)
    other.join(2, messages=2)
    assert [delivery.id for delivery in other.pump()] == [1_000, 1_001]
    assert group.next_delivery_id == 1_002


def test_leases_that_end_together_are_ended_together() -> None:
    group = leased(count=100, messages=0)
    for consumer in range(2, 12):
        group.join(consumer, messages=10)
    deliveries = group.pump()
    assert len(deliveries) == 10
    effects = group.group.expire(group.now_ns + LEASE)
    assert sorted(failed[1] for failed in effects.failed) == list(range(1, 101))
    assert sorted(o for delivery in group.pump() for o in offsets(delivery)) == list(range(1, 101))


def test_a_recall_that_nobody_asked_for_is_passed_over() -> None:
    group = leased()
    delivery = group.only()
    assert group.group.recalled(1, [part(delivery, 1, 3), DeliveryPart(77, 1, 2)], 0) is NOTHING
    assert group.group.in_flight == 3
