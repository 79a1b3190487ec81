"""Metrics with labels: which rows there are, how many at most, and what was left out."""

from __future__ import annotations

from runnel.broker.monitoring import metric_families as families
from runnel.broker.monitoring.histogram import TimeHistogram
from runnel.broker.monitoring.metric_families import (
    CURSORS_MAX,
    MEMBERS_MAX,
    CursorLag,
    JournalRoster,
)
from runnel.broker.monitoring.metrics import AtLimit, Family, Metrics
from runnel.broker.monitoring.store_statistics import JournalStatistics, StoreStatistics
from runnel.broker.monitoring.topic_traffic import JOURNAL_TOTALS_MAX, Flow, TopicTraffic
from runnel.formats.wire import CursorPlace, CursorState
from runnel.formats.work_heads import MemberState, SubscriptionState, WorkOptions
from runnel.log.log import LogStatistics, ShardId, ShardStatistics
from tests.fakes.clock import VirtualClock

MS = 1_000_000
SECOND_NS = 1_000_000_000


def rows(family: Family) -> dict[tuple[str, ...], float]:
    return dict(family.rows)


def named(found: list[Family], name: str) -> dict[tuple[str, ...], float]:
    (family,) = [each for each in found if each.described.name == name]
    return rows(family)


def state(
    name: str, *members: MemberState, dead: int = 0, is_paused: bool = False
) -> SubscriptionState:
    return SubscriptionState(
        name, "shared", ("a",), is_paused, 0, WorkOptions(), members, redelivered=7, dead=dead
    )


# --- Journals ---


def test_totals_of_journals_only_grow_and_latecomers_share_a_row() -> None:
    traffic = TopicTraffic(10, lambda topic: topic)
    for number in range(JOURNAL_TOTALS_MAX + 50):
        traffic.count_in(f"j{number}", 1, 10)
        traffic.end_interval()
    traffic.count_in("j0", 4, 40)
    traffic.count_out("j249", 2, 20)
    traffic.end_interval()
    found = list(families.flow_families(traffic.totals))
    messages_in = named(found, "journal_messages_in")
    assert len(messages_in) == JOURNAL_TOTALS_MAX + 1
    assert messages_in["j0",] == 5
    assert messages_in["(other)",] == 50
    assert named(found, "journal_bytes_out")["(other)",] == 20


def test_readers_of_a_shard_count_for_its_journal() -> None:
    traffic = TopicTraffic(10, lambda topic: "main")
    traffic.count_in("a", 1, 10)
    traffic.count_journal_out("main", 5, 50)
    sample = traffic.end_interval()
    assert sample.journals == {"main": Flow(1, 10, 5, 50)}


def test_journals_keep_their_series_and_the_rest_is_summed_up() -> None:
    roster = JournalRoster(journals_max=2)
    small = JournalStatistics(stored_bytes=1, syncs=3)
    assert list(roster.divide({"a": small, "b": small})) == ["a", "b"]
    large = JournalStatistics(stored_bytes=1000, syncs=5)
    divided = roster.divide({"c": large, "d": large, "b": small, "a": small})
    assert set(divided) == {"a", "b", "(other)"}
    found = list(families.storage_families(divided))
    assert named(found, "journal_stored_bytes")["(other)",] == 2000
    assert named(found, "journal_syncs") == {("b",): 3, ("a",): 3, ("(other)",): 10}
    assert roster.left_out == 2


def test_unknown_outcomes_are_counted_by_journal_and_in_total() -> None:
    def shard(journal: str, unknown_outcomes: int) -> ShardStatistics:
        return ShardStatistics(
            shard=ShardId(journal),
            entries=0,
            messages=0,
            bytes=0,
            stored_bytes=0,
            segments=0,
            syncs=0,
            sync_time_ns=0,
            sync_time_max_ns=0,
            queued_batches=0,
            queued_bytes=0,
            failed_batches=0,
            is_read_only=False,
            unknown_outcomes=unknown_outcomes,
        )

    class Log:
        def statistics(self) -> LogStatistics:
            return LogStatistics(1, [shard("a", 2), shard("a", 3), shard("b", 0)], 0, ())

    metrics = Metrics(topics_max=1, journal_of=str)
    statistics = StoreStatistics({"disk": Log()}, VirtualClock())
    statistics.register(metrics)
    assert metrics.totals()["unknown_outcomes"] == 5
    found = list(families.storage_families(statistics.read().journals))
    assert named(found, "journal_unknown_outcomes") == {("a",): 5, ("b",): 0}


def test_topics_have_rates_of_the_last_interval_and_no_counters() -> None:
    traffic = TopicTraffic(1, lambda topic: "main")
    traffic.count_in("busy", 10, 100)
    traffic.count_in("quiet", 1, 10)
    traffic.count_in("!system/metrics/broker", 1, 10)
    traffic.end_interval(2 * SECOND_NS)
    found = list(families.topic_families(traffic))
    assert named(found, "topic_messages_in_per_second") == {("busy",): 5}
    assert all(each.described.kind == "gauge" for each in found)


# --- Acknowledged subscriptions ---


def test_members_have_series_of_their_own() -> None:
    one = MemberState("", 2, 10, 3, 1, 5 * SECOND_NS)
    idle = MemberState("left", 0, 0, 0, 0, 0)
    states = [state("billing", one, dead=4), state("all", idle, is_paused=True)]
    found = list(families.work_families(states, now_ns=8 * SECOND_NS))
    assert named(found, "subscription_backlog") == {("billing", ""): 10, ("all", "left"): 0}
    assert named(found, "subscription_in_flight")["billing", ""] == 3
    assert named(found, "subscription_delayed")["billing", ""] == 1
    assert named(found, "subscription_consumers")["billing", ""] == 2
    assert named(found, "subscription_oldest_age") == {
        ("billing", ""): 3 * SECOND_NS,
        ("all", "left"): 0,
    }
    assert named(found, "subscription_dead_letters") == {("billing",): 4, ("all",): 0}
    assert named(found, "subscription_paused") == {("billing",): 0, ("all",): 1}
    assert named(found, "subscription_redelivered") == {("billing",): 7, ("all",): 7}


def test_of_too_many_members_those_with_the_largest_backlog_are_shown() -> None:
    states = [
        state(f"s{number}", MemberState("", 0, number, 0, 0, 0))
        for number in range(MEMBERS_MAX * 3)
    ]
    for family in families.work_families(states, 0):
        assert len(family.rows) == MEMBERS_MAX
        assert family.rows[0][0][0] == f"s{MEMBERS_MAX * 3 - 1}"


# --- Cursors ---


def test_lag_of_a_cursor_is_that_of_all_its_places() -> None:
    cursor = CursorState(
        "pipeline",
        [
            CursorPlace("a", 0, 5, lag=10),
            CursorPlace("a", 1, 5, lag=1),
            CursorPlace(journal="main", patterns=("*",), lag=7),
        ],
        9 * SECOND_NS,
    )
    found = list(families.cursor_families([CursorLag.of(cursor)]))
    assert named(found, "cursor_lag_messages") == {("pipeline",): 18}
    assert named(found, "cursor_updated_timestamp") == {("pipeline",): 9 * SECOND_NS}


def test_of_too_many_cursors_those_most_behind_are_shown() -> None:
    cursors = [CursorLag(f"c{number}", number, 1) for number in range(CURSORS_MAX + 1)]
    for family in families.cursor_families(cursors):
        assert ("c0",) not in rows(family)
        assert len(family.rows) == CURSORS_MAX


# --- The registry ---


def test_limits_are_reported_with_what_is_in_use() -> None:
    metrics = Metrics(topics_max=1, journal_of=str)
    used = [3]
    metrics.add_limit("native.connections_max", 10, lambda: used[0])
    metrics.add_limit("log.write_queue_bytes_max", 5, lambda: 5, AtLimit.WAITS)
    found = list(metrics.families())
    assert named(found, "limit")["native.connections_max", "refused"] == 10
    used[0] = 4
    assert named(list(metrics.families()), "limit_used") == {
        ("native.connections_max", "refused"): 4,
        ("log.write_queue_bytes_max", "waits"): 5,
    }
    assert metrics.limits()["log.write_queue_bytes_max"] == {
        "limit": 5,
        "used": 5,
        "at_limit": "waits",
    }


def test_listener_that_is_opened_again_tells_of_its_limit_again() -> None:
    metrics = Metrics(topics_max=1, journal_of=str)
    metrics.add_limit("http.streams_max", 10, lambda: 1)
    metrics.add_limit("http.streams_max", 10, lambda: 2)
    assert named(list(metrics.families()), "limit_used") == {("http.streams_max", "refused"): 2}


def test_counts_up_to_bounds_rise_and_leave_out_what_is_beyond() -> None:
    histogram = TimeHistogram()
    for time_ns in (1, MS // 2, MS, 2 * MS, 50 * MS, 10**12):
        histogram.observe(time_ns)
    counts = histogram.total().counts_up_to((MS // 10, MS, 5 * MS, 100 * MS))
    # The bucket in which the bound of 1 ms lies is beyond it.
    assert counts == [1, 2, 4, 5]
    assert histogram.total().count == 6
