"""The parts of `stats` that need no Spark: what may be asked for, documents and their topics, the table, the tally."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from runnel.cli.main import run
from runnel.errors import ClientFault
from runnel.spark.pipelines.stats import table as stats_table
from runnel.spark.pipelines.stats.documents import check_prefix, figures_of, topic_of
from runnel.spark.pipelines.stats.job import StatsPlan
from runnel.spark.pipelines.stats.record import StatsRecord, check_record
from runnel.spark.pipelines.stats.table import append_once, check_table
from runnel.spark.pipelines.stats.windows import FIGURES, Windows
from runnel.spark.pipelines.streaming_query import _ProgressTally

MINUTE_US = 60 * 10**6
START_US = 1_700_000_040 * 10**6


def windows(**changed: Any) -> Windows:
    return Windows.of(**{"window_s": 60, "slide_s": None, "tags": (), "late_s": 10} | changed)


def figures(topic: str = "sensors/a", minute: int = 0, **changed: Any) -> pa.Table:
    """One row; every value that is not given is 1."""
    row: dict[str, Any] = dict.fromkeys(FIGURES.names, 1) | {
        "topic": topic,
        "tags": [("unit", "C"), ("site", None)],
        "window_start": START_US + minute * MINUTE_US,
        "window_end": START_US + (minute + 1) * MINUTE_US,
    }
    return pa.Table.from_pylist([row | changed], schema=FIGURES)


# --- What may be asked for ---


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"window_s": 0}, "window_s is 0: it must be from 1e-06"),
        ({"window_s": "1m"}, "window_s is '1m': it must be a number of seconds"),
        ({"late_s": -1}, "late_s is -1: it must be from 0"),
        ({"late_s": float("nan")}, "late_s is nan: it must be a number of seconds"),
        ({"slide_s": 61}, "between two windows would count nowhere"),
        ({"slide_s": 0.1}, "each message would count in 600 windows"),
        ({"tags": ("unit", "unit")}, "stands there twice"),
        ({"tags": ("",)}, "names of tags"),
        ({"tags": [f"tag{number}" for number in range(17)]}, "at most 16"),
    ],
)
def test_windows_that_make_no_sense_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ClientFault, match=said):
        windows(**changed)


def test_only_the_columns_that_count_are_read() -> None:
    names = ["topic", "event_time_ns", "transmit_time_ns", "receive_time_ns", "size"]
    assert windows().columns.names == names
    assert windows(tags="unit").columns.names == [*names, "tags"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"publish": None}, "nowhere to go"),
        ({"pattern": None}, "which topics"),
        ({"topics": "a"}, "not both"),
        ({"starting": "yesterday"}, "startingTime is 'yesterday'"),
        ({"every_s": 0}, "every_s is 0"),
        ({"name": "a/b"}, "name is 'a/b'"),
        ({"publish": "figures/\n"}, "control character"),
        ({"publish": "x" * 200}, "at most 100 bytes"),
        ({"url": "http://here"}, "http://here"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_without_spark(changed: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {
        "topics": None,
        "pattern": "*",
        "window_s": 60,
        "slide_s": None,
        "tags": (),
        "late_s": 10,
        "table": None,
        "publish": "figures",
        "name": "main",
        "checkpoint": None,
        "starting": "earliest",
        "every_s": None,
        "url": "runnel://127.0.0.1:1",
    }
    StatsPlan.make(**usual)
    with pytest.raises(ClientFault, match=said):
        StatsPlan.make(**usual | changed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--pattern * --window 5", "--window '5': a duration needs a unit"),
        ("--pattern * --late soon", "--late 'soon': not a duration"),
        ("--window 1m", "which topics"),
        ("--pattern * --path here", "--path is for --history"),
        ("--pattern * --history --once", "--history counts from the beginning"),
        ("--pattern * --no-publish", "nowhere to go"),
    ],
)
def test_the_command_says_what_is_wrong_before_spark_starts(
    words: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pipeline", "stats", *words.split()]) == 2
    assert said in capfd.readouterr().err


def test_a_checkpoint_is_for_one_question(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoint")
    check_record(place, StatsRecord.of(windows(), {"pattern": "never begun"}))
    check_record(
        place, StatsRecord.of(windows(tags=["unit"]), {"pattern": "sensors/*", "url": "u"})
    )
    (tmp_path / "checkpoint/offsets").mkdir()
    check_record(
        place, StatsRecord.of(windows(tags=["unit"]), {"pattern": "sensors/*", "url": "v"})
    )
    with pytest.raises(ClientFault, match=r"window_s is 300.0, but .* was begun with 60.0"):
        check_record(place, StatsRecord.of(windows(window_s=300), {"pattern": "sensors/*"}))
    with pytest.raises(ClientFault, match=r"pattern is 'b', but .* was begun with 'sensors/\*'"):
        check_record(place, StatsRecord.of(windows(tags=["unit"]), {"pattern": "b"}))
    (tmp_path / "checkpoint/runnel-stats.json").write_text("{")
    with pytest.raises(ClientFault, match="is not what `stats` wrote there"):
        check_record(place, StatsRecord.of(windows(), {"pattern": "b"}))


# --- Documents ---


def test_a_row_is_published_with_its_tags_where_its_last_value_is_kept() -> None:
    (figure,) = figures_of(figures(size_avg=2.5, late_max_ns=None), "!system/stats/main")
    assert figure.topic == "!system/stats/main/sensors/a{unit=C}"
    assert figure.key == b"sensors/a"
    assert figure.tags == {"unit": "C"}
    assert figure.event_time_ns == (START_US + MINUTE_US) * 1000
    latency = {"p50": 1, "p90": 1, "p99": 1, "max": 1}
    assert json.loads(figure.payload) == {
        "window_start_ns": START_US * 1000,
        "window_end_ns": (START_US + MINUTE_US) * 1000,
        "topic": "sensors/a",
        "tags": {"unit": "C", "site": None},
        "messages": 1,
        "bytes": 1,
        "size": {"min": 1, "avg": 2.5, "max": 1, "p50": 1, "p90": 1, "p99": 1},
        "event_to_transmit_ns": latency,
        "transmit_to_receive_ns": latency,
        "ahead_messages": 1,
        "late_messages": 1,
        "late_bytes": 1,
        "late_max_ns": None,
    }


@pytest.mark.parametrize(
    ("tags", "topic"),
    [
        ({}, "p/a"),
        ({"unit": "C", "Ort": "Köln 1"}, "p/a{unit=C,Ort=Köln 1}"),
        ({"a=b": "{1,2}"}, "p/a{a%3Db=%7B1%2C2%7D}"),
        ({"line": "x\ny\u2028\x85%"}, "p/a{line=x%0Ay%E2%80%A8%C2%85%25}"),
    ],
)
def test_tags_become_part_of_a_name_that_can_be_published_to(
    tags: dict[str, str], topic: str
) -> None:
    assert topic_of("p", "a", tags) == topic
    check_prefix(topic)  # which is a topic's name


def test_names_that_would_be_too_long_stay_apart() -> None:
    names = [topic_of("p", "ö" * 127, {"unit": unit}) for unit in ("C", "F")]
    assert len(set(names)) == 2
    for name in names:
        assert len(name.encode()) <= 255
        assert name.startswith("p/öö")


# --- The table ---


def test_a_micro_batch_that_comes_again_is_not_added_again(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    check_table(uri)
    assert append_once(uri, figures(minute=0), query_id="q", batch_id=3)
    assert not append_once(uri, figures(minute=0), query_id="q", batch_id=3)
    assert not append_once(uri, figures(minute=9), query_id="q", batch_id=2)
    assert append_once(uri, figures(minute=1), query_id="q", batch_id=4)
    assert append_once(uri, figures(minute=1), query_id="another", batch_id=3)
    check_table(uri)
    assert DeltaTable(uri).to_pyarrow_table().num_rows == 3


def test_small_files_are_joined_and_the_checkpoint_beside_them_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_table, "COMPACT_EVERY", 3)
    kept = tmp_path / "table/_checkpoints/main/offsets/0"
    kept.parent.mkdir(parents=True)
    kept.write_text("v1")
    uri = str(tmp_path / "table")
    for number in range(3):
        append_once(uri, figures(minute=number), query_id="q", batch_id=number)
    table = DeltaTable(uri)
    assert len(table.file_uris()) == 1
    assert table.to_pyarrow_table().num_rows == 3
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert kept.exists()
    assert not append_once(uri, figures(minute=2), query_id="q", batch_id=2)


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    write_deltalake(uri, pa.table({"name": ["a"], "price": [1.5]}))
    for attempt in (
        lambda: check_table(uri),
        lambda: append_once(uri, figures(), query_id="q", batch_id=0),
    ):
        with pytest.raises(ClientFault, match="not one of statistics: its columns are name, price"):
            attempt()


# --- What Spark drops ---


class ReportingQuery:
    """As far as a tally looks at it: ten rows in each micro-batch, and some of them dropped."""

    def __init__(self, *dropped: int) -> None:
        self.recentProgress = [
            StreamingQueryProgress.fromJson(_REPORT | {"batchId": number} | _state(count))
            for number, count in enumerate(dropped)
        ]


_REPORT: dict[str, Any] = {
    "id": "6f5a0e5c-0000-4000-8000-000000000000",
    "runId": "6f5a0e5c-0000-4000-8000-000000000001",
    "name": None,
    "timestamp": "2026-01-01T00:00:00.000Z",
    "batchDuration": 2000,
    "durationMs": {},
    "eventTime": {},
    "sources": [
        {
            "description": "runnel",
            "startOffset": "{}",
            "endOffset": "{}",
            "latestOffset": "{}",
            "numInputRows": 10,
            "inputRowsPerSecond": 5.0,
            "processedRowsPerSecond": 5.0,
            "metrics": {},
        }
    ],
    "sink": {"description": "runnel_stats", "numOutputRows": 0, "metrics": {}},
    "numInputRows": 10,
    "inputRowsPerSecond": 5.0,
    "processedRowsPerSecond": 5.0,
    "observedMetrics": {},
}


def _state(dropped: int) -> dict[str, Any]:
    numbers = ("numRowsTotal", "numRowsUpdated", "numRowsRemoved", "allUpdatesTimeMs")
    times = ("allRemovalsTimeMs", "commitTimeMs", "memoryUsedBytes")
    counts = ("numShufflePartitions", "numStateStoreInstances")
    state: dict[str, Any] = dict.fromkeys((*numbers, *times, *counts), 0)
    state |= {"operatorName": "stateStoreSave", "customMetrics": {}}
    return {"stateOperators": [state | {"numRowsDroppedByWatermark": dropped}]}


def test_what_spark_drops_is_counted_once() -> None:
    tally = _ProgressTally()
    assert tally.update(cast(StreamingQuery, ReportingQuery(0, 2)))
    assert not tally.update(cast(StreamingQuery, ReportingQuery(0, 2)))
    assert tally.update(cast(StreamingQuery, ReportingQuery(0, 2, 3)))
    assert tally.progress.dropped == 5
    assert tally.progress.rows == 30
