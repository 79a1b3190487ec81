"""The histogram of latencies: close to exact, and the same when put together from parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.cli.bench.latencies import Latencies


@given(
    st.lists(st.integers(1, 3600 * 10**9), min_size=1, max_size=50),
    st.sampled_from([1, 50, 99, 99.9, 100]),
)
def test_percentiles_are_right_to_two_percent(values: list[int], percent: float) -> None:
    latencies = Latencies()
    latencies.add(values)
    exact = np.percentile(values, percent, method="inverted_cdf")
    assert latencies.percentile_ns(percent) == pytest.approx(exact, rel=0.02, abs=1)


@given(st.lists(st.lists(st.integers(-5, 10**10), max_size=20), max_size=5))
def test_parts_that_travelled_add_up_to_the_whole(parts: list[list[int]]) -> None:
    whole, merged = Latencies(), Latencies()
    for part in parts:
        own = Latencies()
        own.add(part)
        merged.merge(Latencies(own.counts))
        whole.add(part)
    assert merged.counts == whole.counts
    assert merged.count == sum(map(len, parts))


def test_no_latency_has_no_percentile() -> None:
    assert Latencies().percentile_ns(50) is None
