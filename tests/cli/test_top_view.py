"""`runnel top` shows a broker's reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runnel.cli.render.top_view import BrokerReports, head_lines, summary_line, tables
from runnel.formats.wire import CursorPlace, CursorState

RATES = {"messages_in": 1234.4, "bytes_in": 2048, "messages_out": 10, "bytes_out": 0}
BROKER: dict[str, Any] = {
    "time_ns": 1_700_000_000 * 10**9,
    "node": "node-1",
    "interval_ns": 10**9,
    "uptime_ns": 3_725 * 10**9 + 5,
    "rates": {**RATES, "messages_missed": 0},
    "totals": {"messages_in": 5000, "messages_out": 12},
    "gauges": {"topics_kept": 1, "stored_bytes": 1 << 20, "queued_bytes": 0},
    "histograms": {
        "sync_time": {
            "interval": {"count": 3, "p50_ns": 1_500_000, "p99_ns": 2_000_000, "max_ns": 3_000_000},
            "total": {},
        },
        "publish_time": {"interval": {"count": 0}},
    },
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "broker": BROKER,
    "topics": {
        "topics": [{"topic": f"t{number}", "journal": "main", "rates": RATES} for number in range(3)],
        "others": [{"journal": "main", "topics": 40, "rates": RATES}],
    },
    "journals": {
        "journals": [
            {"journal": "live", "rates": RATES},
            {
                "journal": "main",
                "rates": RATES,
                "stored_bytes": 1 << 20,
                "segments": 2,
                "sync_time_mean_ns": 1_500_000,
                "sync_time_max_ns": 3_000_000,
                "read_only_shards": 1,
            },
        ],
        "others": {},
        "total": {},
    },
    "connections": {
        "count": 2,
        "connections": [
            {
                "id": 1,
                "peer": "127.0.0.1:5",
                "listener": "native",
                "client": "runnel-python/0.1",
                "subscriptions": 1,
                "queued_bytes": 10,
                "rates": RATES,
            }
        ],
    },
    "subscriptions": {
        "count": 1,
        "behind": 1,
        "subscriptions": [
            {
                "connection": 1,
                "number": 4,
                "peer": "127.0.0.1:5",
                "patterns": ["sensors/*"],
                "pattern_count": 3,
                "state": "behind",
                "lag": 1500,
                "queued_bytes": 0,
                "missed": 0,
            }
        ],
    },
    "work": {
        "time_ns": 1_700_000_000 * 10**9,
        "count": 2,
        "subscriptions": [
            {
                "subscription": "billing",
                "mode": "key_shared",
                "patterns": ["orders/*"],
                "pattern_count": 1,
                "is_paused": False,
                "members": 1,
                "consumers": 4,
                "backlog": 1500,
                "in_flight": 256,
                "delayed": 3,
                "oldest_ns": (1_700_000_000 - 125) * 10**9,
                "redelivered": 7,
                "dead": 2,
            },
            {
                "subscription": "news",
                "mode": "multicast",
                "patterns": ["a", "b", "c", "d"],
                "pattern_count": 9,
                "is_paused": True,
                "members": 2,
                "consumers": 1,
                "backlog": 0,
                "in_flight": 0,
                "delayed": 0,
                "oldest_ns": 0,
                "redelivered": 0,
                "dead": 0,
            },
        ],
    },
}  # fmt: skip


@pytest.fixture
def latest() -> BrokerReports:
    made = BrokerReports()
    for name, document in DOCUMENTS.items():
        assert not made.is_complete
        made.take(f"!system/metrics/{name}", msgspec.json.encode(document))
    assert made.is_complete
    return made


def test_head_tells_rates_totals_and_times(latest: BrokerReports) -> None:
    assert head_lines(latest) == [
        "node-1  up 1h2m5s  2023-11-14T22:13:20Z",
        "in   1,234 messages/s 2.0 KiB/s   5,000 in all",
        "out  10 messages/s 0 B/s   12 in all",
        "2 connections, 1 subscription (1 behind), 1 kept topic, 1.0 MiB stored, "
        "0 B waiting to be written",
        "2 acknowledged subscriptions, 1,500 not acknowledged, 256 in flight, 5 consumers",
        "p50/p99/max  sync 1.5 ms / 2 ms / 3 ms",
        "WARNING: 2 dead letters; see `runnel dead list`",
    ]


def test_what_needs_attention_is_a_warning(latest: BrokerReports) -> None:
    document = {**BROKER, "gauges": {"read_only_shards": 1, "damage": 2}}
    document["rates"] = {"messages_missed": 7}
    latest.take("!system/metrics/broker", msgspec.json.encode(document))
    assert head_lines(latest)[-3:] == [
        "WARNING: 1 shard read-only after a failed sync",
        "WARNING: 2 places of damage; see `runnel log verify`",
        "WARNING: live readers miss 7 messages/s",
    ]


def test_before_the_first_report_it_says_that_it_waits() -> None:
    assert head_lines(BrokerReports()) == ["waiting for the broker's first report"]
    assert tables(BrokerReports(), 10) == []


def test_line_for_a_pipe_has_what_matters(latest: BrokerReports) -> None:
    assert summary_line(latest) == (
        "2023-11-14T22:13:20Z  in 1,234 messages/s 2.0 KiB/s  out 10 messages/s 0 B/s  "
        "2 connections  1 subscription  1 behind  sync p99 2 ms  1,500 not acknowledged"
    )


def test_work_shows_what_is_not_acknowledged_and_for_how_long(latest: BrokerReports) -> None:
    assert tables(latest, 2)[1].lines() == [
        "acknowledged  topics              mode        backlog  in flight  delayed  oldest"
        "  redelivered  dead  consumers",
        "billing       orders/*            key_shared    1,500        256        3    2m5s"
        "            7     2          4",
        "news PAUSED   a b c … and 6 more  multicast         0          0        0       -"
        "            0     0          1",
    ]


def test_broker_without_acknowledged_subscriptions_says_nothing_of_them(
    latest: BrokerReports,
) -> None:
    document = {"time_ns": 0, "count": 0, "subscriptions": []}
    latest.take("!system/metrics/work", msgspec.json.encode(document))
    assert not any("acknowledged" in line for line in (*head_lines(latest), summary_line(latest)))
    assert all(table.columns[0] != "acknowledged" for table in tables(latest, 2))


def test_tables_show_the_first_rows_and_count_the_rest(latest: BrokerReports) -> None:
    latest.cursors = [
        CursorState("slow", [CursorPlace("a", 1, 5, lag=10)], 0),
        CursorState("slower", [CursorPlace(journal="main", patterns=("a*", "b"), lag=20)], 0),
    ]
    topics, _, subscriptions, cursors, journals, connections = tables(latest, 2)
    assert topics.lines() == [
        "topic             in/s  bytes in/s  out/s  bytes out/s",
        "t0               1,234     2.0 KiB     10          0 B",
        "t1               1,234     2.0 KiB     10          0 B",
        "… and 41 others",
    ]
    assert subscriptions.lines()[1] == (
        "sensors/* … and 2 more  127.0.0.1:5#4  behind  1,500     0 B       0"
    )
    assert cursors.lines() == [
        "cursor  place  lag (messages)",
        "slower  a*, b              20",
        "slow    a[1]               10",
    ]
    assert [row[0] for row in journals.rows] == ["live", "main READ-ONLY"]
    assert journals.rows[0][-2:] == ("-", "-")
    assert journals.rows[1][-2:] == ("1.5 ms", "3 ms")
    assert connections.rows[0][:4] == ("127.0.0.1:5", "native", "runnel-python/0.1", "1")


def test_report_of_a_kind_that_is_not_known_is_passed_over(latest: BrokerReports) -> None:
    latest.take("!system/metrics/weather", b"no JSON")
    assert latest.is_complete


def test_topics_of_the_system_come_last(latest: BrokerReports) -> None:
    names = ["!system/metrics/broker", "busy", "!system/events", "quiet"]
    document = {"topics": [{"topic": name, "rates": RATES} for name in names]}
    latest.take("!system/metrics/topics", msgspec.json.encode(document))
    shown = [row[0] for row in tables(latest, 3)[0].rows]
    assert shown == ["busy", "quiet", "!system/metrics/broker", "… and 1 other"]


def test_limits_that_are_nearly_reached_are_told_the_nearest_first(latest: BrokerReports) -> None:
    limits = {
        "native.connections_max": {"limit": 1000, "used": 850, "at_limit": "refused"},
        "log.write_queue_bytes_max": {"limit": 100, "used": 99, "at_limit": "waits"},
        "http.connections_max": {"limit": 1000, "used": 799, "at_limit": "refused"},
        "log.memory_journal_bytes_max": {"limit": 10, "used": 10, "at_limit": "replaces"},
    }
    latest.take("!system/metrics/broker", msgspec.json.encode({**BROKER, "limits": limits}))
    assert head_lines(latest)[-1] == (
        "WARNING: near its limit: log.write_queue_bytes_max 99% of 100, native.connections_max 85% of 1,000"
    )


def test_full_disk_and_refused_tokens_are_reported(latest: BrokerReports) -> None:
    gauges = {**BROKER["gauges"], "disk_full": 1}
    rates = {**BROKER["rates"], "tokens_refused": 2.5}
    document = {**BROKER, "gauges": gauges, "rates": rates}
    latest.take("!system/metrics/broker", msgspec.json.encode(document))
    assert head_lines(latest)[-2:] == [
        "WARNING: the disk is full; publishing is refused",
        "WARNING: 2.5 tokens/s are refused",
    ]


def test_ages_at_delivery_and_the_lag_of_the_loop_stand_beside_the_other_times(
    latest: BrokerReports,
) -> None:
    seen = {"interval": {"count": 1, "p50_ns": 10**6, "p99_ns": 2 * 10**6, "max_ns": 3 * 10**6}}
    histograms = dict.fromkeys(("live_age", "work_age", "loop_lag"), seen)
    latest.take("!system/metrics/broker", msgspec.json.encode({**BROKER, "histograms": histograms}))
    (line,) = [line for line in head_lines(latest) if line.startswith("p50/p99/max")]
    times = "1 ms / 2 ms / 3 ms"
    assert line == f"p50/p99/max  age live {times}   age work {times}   loop {times}"
