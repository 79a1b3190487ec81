"""`stats` with Spark: exact figures of known messages, each window once, and all messages accounted for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession

from runnel.cli.main import run
from runnel.client import BlockingBus
from runnel.errors import ClientFault
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.spark import stats, stats_history, stats_of, write_stats
from runnel.spark.pipelines.stats.history import documents
from runnel.spark.pipelines.streaming_query import PipelineFailedError
from runnel.testing import BrokerThread
from tests.spark.brokers import DiskBroker
from tests.spark.read_results import publish, sensor_messages

pytestmark = pytest.mark.timeout(300)

S = 10**9
START = 1_700_000_000 * S  # when the broker's clock begins: 20 s into a minute
MINUTE = START - 20 * S
INT64_MAX = 2**63 - 1


def known(
    spark: SparkSession, rows: Sequence[tuple[dict[str, str], int, int, int, int]]
) -> DataFrame:
    """Messages of one topic: tags, event, transmit and receive time, size."""
    names = ("tags", "event_time_ns", "transmit_time_ns", "receive_time_ns", "size")
    columns = list(zip(*rows, strict=True))
    types = (pa.map_(pa.string(), pa.string()), pa.int64(), pa.int64(), pa.int64(), pa.int32())
    table = pa.table(
        {
            "topic": ["a"] * len(rows),
            **{
                name: pa.array(
                    [list(v.items()) if isinstance(v, dict) else v for v in column], kind
                )
                for name, column, kind in zip(names, columns, types, strict=True)
            },
        }
    )
    return spark.createDataFrame(table)


def by_window(rows: DataFrame) -> dict[tuple[int, str | None], dict[str, Any]]:
    """Documents by the second their window begins, counted from MINUTE, and by unit."""
    return {
        ((found["window_start_ns"] - MINUTE) // S, found["tags"].get("unit")): found
        for found in documents(rows)
    }


# --- Of messages that are known ---


def test_figures_of_known_messages_are_exact(spark: SparkSession) -> None:
    celsius: list[tuple[dict[str, str], int, int, int, int]] = [
        # Event at second 1, 2 … 100 of the first two minutes; longer under way, and larger, each time.
        ({"unit": "C"}, MINUTE + n * S, MINUTE + n * S + n, MINUTE + n * S + n + 2 * n, 10 * n)
        for n in range(1, 101)
    ]
    others: list[tuple[dict[str, str], int, int, int, int]] = [
        # Late by more than 10 s, the second by less than one nanosecond too little.
        ({"unit": "F"}, MINUTE + 30 * S - 1, MINUTE + 40 * S, MINUTE + 40 * S, 7),
        ({"unit": "F"}, MINUTE + 30 * S, MINUTE + 40 * S, MINUTE + 40 * S, 8),
        # An hour ahead: counts when it was received.
        ({"unit": "F"}, MINUTE + 3600 * S, MINUTE + 50 * S, MINUTE + 50 * S, 9),
        # Received in the second minute, an event of the first.
        ({"unit": "F"}, MINUTE + 59 * S, MINUTE + 61 * S, MINUTE + 62 * S, 10),
        # Times that are not set, and times whose difference does not fit into 64 bits.
        ({}, 0, 0, MINUTE + 1 * S, 1),
        ({}, -INT64_MAX, 5, MINUTE + 2 * S, 2),
        ({}, INT64_MAX, -INT64_MAX, MINUTE + 3 * S, 0),
    ]
    found = by_window(stats_of(known(spark, celsius + others), tags=["unit"]))
    assert found.keys() == {(0, "C"), (60, "C"), (0, "F"), (0, None)}

    first = found[0, "C"]
    assert (first["messages"], first["bytes"]) == (59, 10 * sum(range(1, 60)))
    assert first["size"] == {"min": 10, "avg": 300, "max": 590, "p50": 300, "p90": 540, "p99": 590}
    assert first["event_to_transmit_ns"] == {"p50": 30, "p90": 54, "p99": 59, "max": 59}
    assert first["transmit_to_receive_ns"] == {"p50": 60, "p90": 108, "p99": 118, "max": 118}
    assert (first["late_messages"], first["late_bytes"], first["late_max_ns"]) == (0, 0, None)
    assert found[60, "C"]["messages"] == 41

    fahrenheit = found[0, "F"]
    assert (fahrenheit["messages"], fahrenheit["bytes"], fahrenheit["ahead_messages"]) == (3, 27, 1)
    assert fahrenheit["event_to_transmit_ns"]["max"] == 10 * S
    assert (fahrenheit["late_messages"], fahrenheit["late_bytes"]) == (1, 7)
    assert fahrenheit["late_max_ns"] == 10 * S + 1

    strange = found[0, None]
    assert (strange["messages"], strange["ahead_messages"], strange["late_messages"]) == (2, 1, 1)
    assert strange["late_max_ns"] == INT64_MAX
    assert strange["size"] == {"min": 0, "avg": 0.5, "max": 1, "p50": 0, "p90": 1, "p99": 1}
    assert strange["event_to_transmit_ns"] == {"p50": None, "p90": None, "p99": None, "max": None}


def test_windows_may_overlap_and_need_their_columns(spark: SparkSession) -> None:
    rows = known(spark, [({}, MINUTE + 70 * S, 0, MINUTE + 70 * S, 1)])
    overlapping = by_window(stats_of(rows, window_s=60, slide_s=20))
    assert sorted(start for start, _ in overlapping) == [20, 40, 60]
    with pytest.raises(ClientFault, match="there is no column size"):
        stats_of(rows.drop("size"))


# --- As they come ---


@pytest.fixture
def clocked() -> Iterator[BrokerThread]:
    """A broker whose time the test moves."""
    broker = BrokerThread()
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def bus(clocked: BrokerThread) -> Iterator[BlockingBus]:
    with clocked.connect_blocking() as connected:
        yield connected


def store(bus: BlockingBus, topic: str, *events_ns: int, size: int = 10, unit: str = "C") -> None:
    messages = [
        Message(
            topic, b"x" * size, tags={"unit": unit}, event_time_ns=event_ns, transmit_time_ns=START
        )
        for event_ns in events_ns
    ]
    bus.publish_batch(Batch.from_messages(messages))


def rows_of(table: Path) -> list[dict[str, Any]]:
    found = DeltaTable(str(table)).to_pyarrow_table()
    keys = ("window_start", "topic", "tags")
    return sorted(found.to_pylist(), key=lambda row: tuple(str(row[key]) for key in keys))


def totals(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    return sum(row["messages"] for row in rows), sum(row["late_messages"] for row in rows)


def test_each_window_is_stored_once_and_published_when_it_is_complete(
    spark: SparkSession, clocked: BrokerThread, bus: BlockingBus, tmp_path: Path
) -> None:
    table = tmp_path / "table"

    def count(publish: str = "!system/stats") -> int:
        told = stats(
            spark,
            pattern="sensors/*",
            tags=["unit"],
            table=table,
            publish=publish,
            name="minutes",
            url=clocked.url,
        )
        assert told.dropped == 0
        return told.rows

    settings = dict(spark.conf.getAll)
    store(bus, "sensors/a", START - S, START, size=10)
    store(bus, "sensors/a", START + 3600 * S, unit="F")  # a clock that is wrong must close nothing
    store(bus, "sensors/b", START - 11 * S, START - 9 * S)  # the first is late
    assert count() == 5
    assert dict(spark.conf.getAll) == settings
    assert not DeltaTable.is_deltatable(str(table))  # no window is complete

    clocked.advance(41)  # a second into the next minute, with something of this one
    store(bus, "sensors/a", START + 39 * S, size=30)
    clocked.advance(14)
    store(bus, "sensors/b", START + 55 * S)  # now the first minute is complete
    # What fails between table and publishing is published when the same micro-batch comes again.
    with pytest.raises(PipelineFailedError, match="names that begin with ! are the system's"):
        count(publish="!mine")
    stored = rows_of(table)
    assert [(row["topic"], dict(row["tags"])["unit"]) for row in stored] == [
        ("sensors/a", "C"),
        ("sensors/a", "F"),
        ("sensors/b", "C"),
    ]
    assert [(row["messages"], row["ahead_messages"]) for row in stored] == [(3, 0), (1, 1), (1, 0)]
    assert [(row["bytes"], row["late_messages"]) for row in stored] == [(50, 0), (10, 0), (10, 1)]
    assert stored[2]["late_max_ns"] == 11 * S
    assert not bus.topics("!system/stats/*")

    count()
    assert rows_of(table) == stored
    with bus.subscribe("!system/stats/*", start="last") as watching:
        seen = {message.topic: message for message in islice(watching, 3)}
    assert seen.keys() == {
        "!system/stats/minutes/sensors/a{unit=C}",
        "!system/stats/minutes/sensors/a{unit=F}",
        "!system/stats/minutes/sensors/b{unit=C}",
    }
    one = seen["!system/stats/minutes/sensors/a{unit=C}"]
    assert (one.key, dict(one.tags), one.event_time_ns) == (
        b"sensors/a",
        {"unit": "C"},
        MINUTE + 60 * S,
    )
    assert json.loads(one.payload)["size"]["max"] == 30

    clocked.advance(120)
    store(bus, "sensors/c", START + 175 * S)
    assert count() == 1
    whole = rows_of(table)
    assert totals(whole) == (6, 1)  # all but the last, whose minute is open
    history = stats_history(spark, pattern="sensors/*", tags=["unit"], url=clocked.url)
    assert write_stats(history, tmp_path / "history") == len(whole) + 1
    everything = rows_of(tmp_path / "history")
    assert totals(everything) == (7, 1)
    assert everything[:-1] == whole
    with pytest.raises(ClientFault, match="history is counted from its beginning"):
        write_stats(history, tmp_path / "history")


def test_what_cannot_run_says_why(spark: SparkSession, tmp_path: Path) -> None:
    table = tmp_path / "prices"
    write_deltalake(str(table), pa.table({"price": [1.5]}))
    with pytest.raises(ClientFault, match="not one of statistics: its columns are price"):
        stats(spark, pattern="*", table=table)
    with pytest.raises(PipelineFailedError, match="cannot connect to"):
        stats(spark, pattern="*", url="runnel://127.0.0.1:1")


def test_the_command_counts_files_without_a_broker(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with DiskBroker(tmp_path / "data") as broker, broker.connect() as bus:
        publish(bus, sensor_messages(100))
    assert spark.getActiveSession() is not None  # which the command finds
    words = [
        "--pattern",
        "sensors/*",
        "--history",
        "--path",
        str(tmp_path / "data"),
        "--window",
        "1d",
    ]
    assert run(["pipeline", "stats", *words]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {document["topic"] for document in found} == {"sensors/a", "sensors/b"}
    assert sum(document["late_messages"] for document in found) == 100  # their events are years old
