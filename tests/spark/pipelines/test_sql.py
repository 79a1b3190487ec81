"""One SQL statement from topics into a topic or a table: each row once, what fails aside, mistakes shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from runnel.cli.commands.pipeline.progress_line import text_of
from runnel.client import BlockingBus
from runnel.errors import ClientFault, RunnelError
from runnel.spark.pipelines.sql import Mode, sql
from runnel.spark.pipelines.streaming_query import PipelineProgress
from tests.spark.brokers import DiskBroker
from tests.spark.read_results import START_NS, stored

NS_PER_S = 10**9
FIELDS = "celsius double, station string"
DEAD = "!dead/hot"
HOT = "SELECT station AS key, celsius, event_time, topic FROM STREAM sensors WHERE celsius >= 5"


@pytest.fixture
def run(spark: SparkSession, broker: DiskBroker, tmp_path: Path) -> Callable[..., PipelineProgress]:
    """A statement over JSON payloads, once, going on from its checkpoint."""

    def once(statement: str, into: str, **others: Any) -> PipelineProgress:
        usual = {
            "schemas": {"sensors": FIELDS},
            "checkpoint": str(tmp_path / "checkpoint"),
            "once": True,
        }
        return sql(spark, statement, into=into, url=broker.url, **{**usual, **others})

    return once


def publish(bus: BlockingBus, numbers: range) -> None:
    """A reading each; every fifth is of another kind, which the schema does not know."""
    for number in numbers:
        celsius = f'"{number}"' if number % 5 == 4 else f"{number}.5"
        bus.publish(
            "sensors",
            b'{"celsius": %s, "station": "s%d"}' % (celsius.encode(), number % 2),
            key=b"%d" % number,
            tags={"n": str(number)},
            event_time_ns=START_NS + number * NS_PER_S,
        )


def forget_commit(checkpoint: Path, batch: int) -> None:
    """As if the query had been killed after it wrote this micro-batch, and before it said so."""
    for path in (checkpoint / "commits").glob(f"*{batch}*"):
        path.unlink()


def test_rows_of_a_stream_become_messages_once_and_what_does_not_parse_dead_letters(
    run: Callable[..., PipelineProgress], broker: DiskBroker, bus: BlockingBus, tmp_path: Path
) -> None:
    publish(bus, range(10))
    seen: list[PipelineProgress] = []
    done = run(HOT, "topic:hot", on_progress=seen.append)
    assert (done.rows, done.batches) == (10, 1)
    assert seen[-1] == done
    first = stored(bus, "hot")
    assert done.written == len(first) < done.rows
    assert f"10 messages read, {len(first)} rows written in 1 batch" in text_of(done)
    assert [json.loads(m.payload) for m in first] == [
        {"celsius": number + 0.5, "topic": "sensors"} for number in (5, 6, 7, 8)
    ]
    assert [m.key for m in first] == [b"s1", b"s0", b"s1", b"s0"]
    assert [m.event_time_ns for m in first] == [START_NS + n * NS_PER_S for n in (5, 6, 7, 8)]

    letters = stored(bus, DEAD)
    assert [m.payload for m in letters] == [
        b'{"celsius": "4", "station": "s0"}',
        b'{"celsius": "9", "station": "s1"}',
    ]
    assert letters[0].key == b"4"
    assert letters[0].event_time_ns == START_NS + 4 * NS_PER_S
    assert letters[0].tags == {
        "n": "4",
        "dead.error": f"the payload is JSON, but not an object of {FIELDS}",
        "dead.topic": "sensors",
        "dead.from": "sensors[0] offset 5",
    }

    forget_commit(tmp_path / "checkpoint", 0)
    publish(bus, range(10, 20))
    run(HOT, "topic:hot")
    assert [json.loads(m.payload)["celsius"] for m in stored(bus, "hot")] == [
        number + 0.5 for number in range(5, 20) if number % 5 != 4
    ]
    assert len(stored(bus, DEAD)) == 4
    assert [cursor.name for cursor in bus.cursors()] == ["hot/sensors"]


def test_rows_of_a_stream_land_in_a_table_once_and_dead_letters_beside_it(
    run: Callable[..., PipelineProgress], bus: BlockingBus, tmp_path: Path
) -> None:
    table = f"table:{tmp_path / 'hot'}"
    statement = "SELECT station, celsius, value.celsius AS same, event_time FROM STREAM sensors"
    for payload in (b"", b"\xff", b"{", b"[1]", b'{"other": 1}'):
        bus.publish("sensors", payload)
    publish(bus, range(10))
    run(statement, table)
    forget_commit(tmp_path / "checkpoint", 0)
    publish(bus, range(10, 20))
    assert run(statement, table).rows == 25
    found = DeltaTable(tmp_path / "hot").to_pyarrow_table().sort_by("celsius").to_pylist()
    assert [row["celsius"] for row in found] == [
        *(number + 0.5 for number in range(20) if number % 5 != 4),
        None,
    ]
    assert found[0]["same"] == 0.5
    assert found[0]["station"] == "s0"
    assert found[0]["event_time"].timestamp() == START_NS // NS_PER_S
    errors = [m.tags["dead.error"] for m in stored(bus, DEAD)]
    assert errors[:4] == [
        "the payload is empty, not JSON",
        "the payload is not JSON: it is not UTF-8",
        "the payload is not JSON",
        f"the payload is JSON, but not an object of {FIELDS}",
    ]
    assert len(errors) == 8
    with pytest.raises(RunnelError, match="has the columns station string, celsius double"):
        run("SELECT station FROM STREAM sensors", table, checkpoint=str(tmp_path / "other"))


def test_windows_with_a_watermark_are_published_once_in_an_order_that_comes_again(
    run: Callable[..., PipelineProgress], bus: BlockingBus, tmp_path: Path
) -> None:
    statement = """
        SELECT window.start AS event_time, station AS key, count(*) AS readings, max(celsius) AS hottest
        FROM STREAM sensors WATERMARK event_time DELAY OF INTERVAL 1 SECOND
        GROUP BY window(event_time, '10 seconds'), station
    """
    publish(bus, range(30))
    done = run(statement, "topic:windows")
    closed = [json.loads(m.payload) for m in stored(bus, "windows")]
    assert sorted(row["readings"] for row in closed) == [4, 4, 4, 4]
    assert (done.rows, done.written) == (30, 4)
    batches = sorted(int(path.name) for path in (tmp_path / "checkpoint" / "commits").glob("[0-9]"))
    forget_commit(tmp_path / "checkpoint", batches[-1])
    run(statement, "topic:windows")
    assert [json.loads(m.payload) for m in stored(bus, "windows")] == closed


def test_a_statement_without_stream_reads_what_is_stored_and_ends(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus, tmp_path: Path
) -> None:
    publish(bus, range(10))
    bus.publish("rooms/n", b"x")
    done = sql(
        spark,
        "SELECT count(*) AS readings, (SELECT count(*) FROM rooms) AS rooms FROM sensors",
        into="topic:counts",
        url=broker.url,
        sources={"rooms": "rooms/*"},
    )
    assert (done.rows, done.batches) == (1, 1)
    assert text_of(done) == "1 row written"
    (message,) = stored(bus, "counts")
    assert message.payload == b'{"readings":10,"rooms":1}'
    path = tmp_path / "table"
    runs: tuple[tuple[Mode, int], ...] = (("append", 10), ("append", 20), ("complete", 10))
    for mode, rows in runs:
        sql(spark, "TABLE sensors", into=f"table:{path}", url=broker.url, mode=mode)
        assert DeltaTable(path).to_pyarrow_table().num_rows == rows


def test_messages_can_be_copied_as_they_are_each_where_its_topic_says(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus
) -> None:
    publish(bus, range(3))
    sql(
        spark,
        "SELECT * EXCEPT (topic), concat('copy/', topic) AS topic FROM STREAM sensors",
        into="topic",
        url=broker.url,
        once=True,
    )
    copied, given = stored(bus, "copy/sensors"), stored(bus, "sensors")
    assert [(m.payload, m.key, m.tags, m.event_time_ns) for m in copied] == [
        (m.payload, m.key, m.tags, m.event_time_ns) for m in given
    ]
    assert bus.cursors() == []  # without a checkpoint, no query would return to it


@pytest.mark.parametrize(
    ("statement", "options", "problem"),
    [
        (
            "SELECT topc FROM sensors",
            {},
            r"`topc` cannot be resolved.*\n  line 1: SELECT topc.*\n +\^",
        ),
        ("SELECT 1\n FRM sensors WHERE", {}, r"[Ss]yntax error.*\n  line 2:  FRM"),
        (
            "SELECT * FROM STREAM sensor",
            {},
            r"sensor is neither a topic nor.*there are sensors.*--from",
        ),
        ("SELECT * FROM STREAM db.sensors", {}, "put its name in backticks: `db.sensors`"),
        ("SELECT * FROM STREAM sensors", {}, "would read what it writes"),
        ("SELECT key FROM sensors", {}, "nothing for a payload: key are"),
        ("SELECT payload, 1 AS x FROM sensors", {}, "so x would be lost"),
        ("SELECT 1 AS tags, 2 AS x FROM sensors", {}, "column tags is int, but that of a message"),
        ("SELECT 1 AS x, 2 AS x FROM sensors", {}, "columns x come more than once"),
        ("SELECT 1 AS x FROM sensors", {"into": "topic"}, "the rows have no column topic, only x"),
        ("SELECT 1 AS x FROM sensors", {"mode": "often"}, "mode 'often'"),
        ("SELECT 1 AS x FROM sensors", {"schemas": {"s": "a int"}}, "a schema is given for s"),
        (
            "TABLE sensors",
            {"schemas": {"sensors": "celsius dbl"}},
            "the schema of sensors is .*near 'dbl'",
        ),
        ("TABLE a", {"sources": {"a": "[z"}}, r"source a='\[z'"),
        (
            "SELECT station, count(*) AS n FROM STREAM sensors GROUP BY station",
            {"schemas": {"sensors": FIELDS}, "into": "topic:n"},
            "^Invalid streaming output mode: append.*without watermark",
        ),
    ],
)
def test_mistakes_are_shown_without_a_java_trace(
    spark: SparkSession,
    broker: DiskBroker,
    bus: BlockingBus,
    statement: str,
    options: dict[str, Any],
    problem: str,
) -> None:
    publish(bus, range(1))
    with pytest.raises(ClientFault, match=problem) as told:
        sql(spark, statement, url=broker.url, **{"into": "topic:sensors", "once": True, **options})
    assert "\tat org." not in str(told.value)
    assert not spark.catalog.tableExists("sensors")


def test_without_dead_letters_a_message_that_does_not_parse_ends_the_query(
    run: Callable[..., PipelineProgress], bus: BlockingBus
) -> None:
    publish(bus, range(5))
    with pytest.raises(RunnelError, match="FAILFAST"):
        run(HOT, "topic:hot", dead_letters="")
