"""Counting: the registry, histograms, and traffic by topic."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.broker.monitoring import topic_traffic
from runnel.broker.monitoring.histogram import TimeHistogram, bucket_end, bucket_of
from runnel.broker.monitoring.metrics import BrokerCounters, MetricKind, Metrics, MetricUnit
from runnel.broker.monitoring.throttled import Throttled, ThrottledAsync
from runnel.broker.monitoring.topic_traffic import Flow, TopicTraffic
from tests.fakes.clock import VirtualClock

SECOND_NS = 1_000_000_000


def journal_of(topic: str) -> str:
    return topic.split("/")[0]


def registry() -> Metrics:
    return Metrics(topics_max=100, journal_of=journal_of)


# --- The registry ---


def test_every_counter_of_the_struct_is_a_described_metric() -> None:
    described = {item.name: item for item in registry().descriptions()}
    for name in BrokerCounters.__struct_fields__:
        assert described[name].kind is MetricKind.COUNTER
        assert described[name].help.endswith(".")
    assert described["bytes_in"].unit is MetricUnit.BYTES
    assert described["messages_in"].unit is MetricUnit.COUNT
    assert described["publish_time"].kind is MetricKind.HISTOGRAM
    assert described["publish_time"].unit is MetricUnit.NANOSECONDS


def test_names_can_be_those_of_an_exposition() -> None:
    for described in registry().descriptions():
        assert described.name.replace("_", "").isalnum()
        assert described.name.islower()


def test_every_message_in_and_every_message_out_is_a_command() -> None:
    metrics = registry()
    metrics.counters.messages_in += 1000
    metrics.counters.messages_out += 30_000
    totals = metrics.totals()
    assert (totals["commands_in"], totals["commands_out"]) == (1000, 30_000)


def test_gauges_are_read_when_somebody_looks() -> None:
    metrics = registry()
    connections: list[str] = []
    metrics.add_gauge("connections", "Connections.", lambda: len(connections))
    assert metrics.gauges() == {"connections": 0}
    connections.append("peer")
    assert metrics.gauges() == {"connections": 1}
    assert "connections" not in metrics.totals()


@pytest.mark.parametrize("name", ["messages_in", "publish_time", "mine"])
def test_a_name_is_given_once(name: str) -> None:
    metrics = registry()
    metrics.add_gauge("mine", "A gauge.", lambda: 0)
    with pytest.raises(ValueError, match=f"there is a metric '{name}' already"):
        metrics.add_counter(name, "Another.", lambda: 0)
    with pytest.raises(ValueError, match="already"):
        metrics.add_histogram(name, "Another.")


# --- Histograms ---


@given(st.integers(0, 2**63 - 1))
def test_a_bucket_holds_numbers_that_differ_by_an_eighth_at_most(value: int) -> None:
    bucket = bucket_of(value)
    end = bucket_end(bucket)
    assert value <= end
    assert bucket_of(end) == bucket
    assert bucket_of(end + 1) == bucket + 1 if end < 2**63 - 1 else bucket == 487
    assert end - value <= value // 8


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200))
def test_quantiles_are_never_too_low_and_at_most_an_eighth_too_high(times_ns: list[int]) -> None:
    histogram = TimeHistogram()
    for time_ns in times_ns:
        histogram.observe(time_ns)
    total = histogram.total()
    ordered = sorted(times_ns)
    for share in (0.5, 0.99, 0.999, 1.0):
        exact = ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
        assert exact <= total.quantile_ns(share) <= exact + exact // 8
    assert total.max_ns == ordered[-1]
    assert total.sum_ns == sum(times_ns)
    assert total.count == len(times_ns)


def test_an_interval_has_only_what_came_in_it_and_the_total_has_all() -> None:
    histogram = TimeHistogram()
    histogram.observe(8_000_000)
    assert histogram.end_interval().max_ns == 8_000_000
    histogram.observe(1000, times=99)
    histogram.observe(2000)
    interval = histogram.end_interval()
    assert (interval.count, interval.max_ns, interval.sum_ns) == (100, 2000, 101_000)
    assert interval.summary() == {
        "count": 100,
        "mean_ns": 1010,
        "p50_ns": 1023,
        "p99_ns": 1023,
        "p99_9_ns": 2000,
        "max_ns": 2000,
    }
    assert histogram.total().count == 101
    assert histogram.total().max_ns == 8_000_000
    assert histogram.end_interval().summary() == dict.fromkeys(interval.summary(), 0)


def test_times_beyond_the_ends_count_at_the_ends() -> None:
    histogram = TimeHistogram()
    histogram.observe(-5)
    histogram.observe(2**70)
    assert list(histogram.total().buckets()) == [(0, 1), (2**63 - 1, 1)]


# --- Traffic ---


def test_busiest_topics_stand_alone_and_the_rest_is_summed_by_journal() -> None:
    traffic = TopicTraffic(2, journal_of)
    for number in range(10):
        traffic.count_in(f"a/{number}", number, 10 * number)
    traffic.count_out("b/x", 100, 7)
    sample = traffic.end_interval()
    assert [(row.topic, row.journal) for row in sample.busiest] == [("b/x", "b"), ("a/9", "a")]
    assert sample.others["a"].topics == 9
    assert sample.others["a"].flow == Flow(messages_in=36, bytes_in=360)
    assert "b" not in sample.others
    assert sample.journals == {"a": Flow(45, 450), "b": Flow(0, 0, 100, 7)}


def test_an_interval_forgets_the_one_before() -> None:
    traffic = TopicTraffic(100, journal_of)
    traffic.count_in("a", 5, 50)
    traffic.end_interval()
    traffic.count_out("a", 1, 2)
    sample = traffic.end_interval()
    assert [row.flow for row in sample.busiest] == [Flow(0, 0, 1, 2)]
    assert not traffic.end_interval().busiest


def test_a_batch_of_many_runs_shares_its_bytes_out_by_messages() -> None:
    traffic = TopicTraffic(100, journal_of)
    traffic.count_runs(["a/1", "a/2", "a/1"], [1, 2, 1], 4, 400, is_out=False)
    traffic.count_runs(["a/2"], [3], 3, 31, is_out=True)
    sample = traffic.end_interval()
    flows = {row.topic: row.flow for row in sample.busiest}
    assert flows == {"a/1": Flow(2, 200), "a/2": Flow(2, 200, 3, 31)}
    assert not sample.others


def test_under_load_topics_are_estimated_and_journals_stay_exact() -> None:
    traffic = TopicTraffic(1, journal_of)
    topics = [f"a/{number}" for number in range(999)]
    counts = [1] * 999
    counts[500] = 50
    for _ in range(1000):
        traffic.count_runs(topics, counts, 1048, 10_480, is_out=False)
        traffic.count_runs(topics, counts, 1048, 10_480, is_out=True)
    sample = traffic.end_interval()
    assert sample.journals == {"a": Flow(1_048_000, 10_480_000, 1_048_000, 10_480_000)}
    (busiest,) = sample.busiest
    assert busiest.topic == "a/500"
    assert busiest.flow.messages_in == pytest.approx(50_000, rel=0.2)
    assert busiest.flow.bytes_out == pytest.approx(500_000, rel=0.2)
    assert sample.others["a"].topics == 998


def test_estimates_that_were_too_high_leave_nothing_below_zero() -> None:
    traffic = TopicTraffic(100, journal_of)
    for _ in range(25):
        traffic.count_runs(["a/x"] * 1000, [1] * 999 + [0], 999, 0, is_out=False)
    sample = traffic.end_interval()
    assert sample.journals["a"].messages_in == 25 * 999
    assert all(other.flow.messages_in >= 0 for other in sample.others.values())


def test_topics_without_number_neither_fill_memory_nor_are_lost_from_their_journal() -> None:
    traffic = TopicTraffic(100, journal_of)
    for number in range(30_000):
        traffic.count_in(f"one/{number}", 1, 1)
        traffic.count_in(f"{number}/own", 1, 1)
    assert len(traffic._active) == topic_traffic._ACTIVE_MAX
    assert len(traffic._rest) <= topic_traffic._ACTIVE_MAX + 1
    sample = traffic.end_interval()
    assert len(sample.busiest) == 100
    assert sample.journals["one"].messages_in == 30_000
    assert sum(flow.messages_in for flow in sample.journals.values()) == 60_000


# --- Expensive readings ---


def test_what_is_costly_to_read_is_read_no_more_than_a_fiftieth_of_the_time() -> None:
    clock = VirtualClock()
    readings = 0

    def read() -> int:
        nonlocal readings
        readings += 1
        clock.advance(SECOND_NS // 10)
        return readings

    throttled = Throttled(read, clock)
    assert throttled.value() == throttled.value() == 1
    clock.advance(5 * SECOND_NS - 1)
    assert throttled.value() == 1
    clock.advance(1)
    assert throttled.value() == 2
    throttled.forget()
    assert throttled.value() == 3


def test_a_reading_that_is_awaited_takes_no_more_than_a_fiftieth_of_the_time_either() -> None:
    clock = VirtualClock()
    readings = 0

    async def read() -> int:
        nonlocal readings
        readings += 1
        clock.advance(SECOND_NS // 10)
        return readings

    async def run() -> None:
        throttled = ThrottledAsync(read, clock, first=0)
        assert throttled.last == 0
        assert await throttled.value() == await throttled.value() == throttled.last == 1
        clock.advance(5 * SECOND_NS - 1)
        assert await throttled.value() == 1
        clock.advance(1)
        assert await throttled.value() == 2
        throttled.forget()
        assert await throttled.value() == throttled.last == 3

    asyncio.run(run())


def test_what_costs_nothing_is_read_whenever_it_is_asked_for() -> None:
    values = iter(range(9))
    throttled = Throttled(lambda: next(values), VirtualClock())
    assert [throttled.value() for _ in range(3)] == [0, 1, 2]
