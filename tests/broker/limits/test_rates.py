"""Rates: a second's worth at once, then the average, and debts that are paid by waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runnel.broker.limits.rates import Rate

SECOND = 1_000_000_000


def test_a_second_s_worth_goes_at_once_and_more_waits_for_what_is_more() -> None:
    rate = Rate(100)
    rate.charge(100, SECOND)
    assert rate.wait_ns(SECOND) == 0
    rate.charge(50, SECOND)
    assert rate.wait_ns(SECOND) == SECOND // 2
    assert rate.wait_ns(SECOND + SECOND // 2) == 0


def test_a_batch_larger_than_a_second_s_worth_goes_and_the_next_one_waits() -> None:
    rate = Rate(100)
    assert rate.wait_ns(0) == 0
    rate.charge(1000, 0)
    assert rate.wait_ns(0) == 9 * SECOND


def test_time_without_traffic_saves_up_no_more_than_a_second_s_worth() -> None:
    rate = Rate(10)
    rate.charge(20, 3600 * SECOND)
    assert rate.wait_ns(3600 * SECOND) == SECOND


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 3 * SECOND)), min_size=1),
)
def test_who_waits_as_told_never_exceeds_the_average_by_more_than_a_batch_and_a_second(
    per_s: int, steps: list[tuple[int, int]]
) -> None:
    rate, now_ns, total = Rate(per_s), 0, 0
    for amount, idle_ns in steps:
        now_ns += max(idle_ns, rate.wait_ns(now_ns))
        assert total <= per_s * (now_ns + SECOND) // SECOND + len(steps)  # each charge rounds down
        rate.charge(amount, now_ns)
        total += amount
