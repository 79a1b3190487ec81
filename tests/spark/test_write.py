"""Rows into topics from real Spark: every field, each row once, and clear errors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, WriterCommitMessage
from pyspark.sql.types import StructType

from runnel.client import BlockingBus
from runnel.config import TopicRule
from runnel.spark.write.writer import StreamWriter
from runnel.topics.partitions import partition_of_key
from tests.spark.brokers import DiskBroker
from tests.spark.row_batches import ROWS, all_messages, check_each_once, repeated, run_stream

UID = bytes(range(20))


def write(rows: DataFrame, broker: DiskBroker, **options: str) -> None:
    rows.write.format("runnel").mode("append").options(url=broker.url, **options).save()


# --- Fields ---


def test_every_field_of_a_row_lands(spark: SparkSession, tmp_path: Path) -> None:
    rules = (TopicRule(match="spread/*", partitions=4, journal="spread"),)
    rows = spark.createDataFrame(
        [
            (
                b"1",
                "spread/a",
                b"k",
                b"p",
                {"unit": "C", "site": "n"},
                1_700_000_000_123_456_789,
                UID,
                3,
            ),
            (b"", "plain", None, None, None, None, None, None),
            (b"2", "spread/a", b"k", None, {}, -5, None, None),
        ],
        "payload binary, topic string, key binary, partition_key binary, tags map<string,string>, "
        "event_time_ns bigint, uid binary, partition int",
    )
    with DiskBroker(tmp_path / "data", rules) as broker, broker.connect() as bus:
        before_ns = time.time_ns()
        write(rows.coalesce(1), broker)
        (first,) = [m for m in all_messages(bus, "spread/a") if m.payload == b"1"]
        assert (first.key, first.partition_key, first.partition) == (b"k", b"p", 3)
        assert first.tags == {"unit": "C", "site": "n"}
        assert (first.event_time_ns, first.uid) == (1_700_000_000_123_456_789, UID)
        assert before_ns < first.transmit_time_ns < time.time_ns()
        (second,) = all_messages(bus, "plain")
        assert (second.payload, second.key, second.tags, second.uid) == (b"", None, {}, None)
        assert second.event_time_ns >= before_ns
        (third,) = [m for m in all_messages(bus, "spread/a") if m.payload == b"2"]
        assert (third.partition, third.partition_key) == (partition_of_key(b"k", 4), b"k")
        assert third.event_time_ns == -5


def test_text_and_timestamps_can_be_written_as_they_are(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus
) -> None:
    rows = spark.sql(
        "SELECT 'é' AS payload, 'k' AS key, timestamp'2025-01-31T12:00:00.123456Z' AS event_time"
    )
    write(rows, broker, topic="t")
    (message,) = all_messages(bus, "t")
    assert (message.payload.decode(), message.key) == ("é", b"k")
    assert message.event_time_ns == 1_738_324_800_123_456_000


def test_many_rows_land_once_each_over_partitions_and_journals(
    spark: SparkSession, tmp_path: Path
) -> None:
    rules = (
        TopicRule(match="spread", partitions=3, journal="spread"),
        TopicRule(match="own/*", journal="{topic}"),
    )
    rows = spark.range(0, ROWS, 1, 3).selectExpr(
        "cast(id AS string) AS payload",
        "CASE id % 4 WHEN 0 THEN 'spread' WHEN 1 THEN 'plain' ELSE concat('own/', id % 4) END AS topic",
        "CASE WHEN id % 8 = 0 THEN cast(id AS string) END AS key",
    )
    with DiskBroker(tmp_path / "data", rules) as broker, broker.connect() as bus:
        write(rows, broker)
        found = {topic: all_messages(bus, topic) for topic in ("spread", "plain", "own/2", "own/3")}
        numbers = sorted(int(m.payload) for messages in found.values() for m in messages)
        assert numbers == list(range(ROWS))
        assert {int(m.payload) % 4 for m in found["own/3"]} == {3}
        assert {m.partition for m in found["spread"]} == {0, 1, 2}
        for partition in range(
            3
        ):  # keyless rows take turns, and the others go where their keys say
            there = [m for m in found["spread"] if m.partition == partition]
            assert all(m.key is None or partition_of_key(m.key, 3) == partition for m in there)
        by_task = [int(m.payload) for m in found["plain"]]
        for begin in range(0, ROWS, ROWS // 3):
            of_task = [n for n in by_task if begin <= n < begin + ROWS // 3]
            assert of_task == sorted(of_task)


# --- Once ---


def test_a_named_write_that_is_run_again_lands_once(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus
) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("cast(id AS string) AS payload")
    write(rows, broker, topic="t", producer="nightly 2025-01-31")
    write(rows, broker, topic="t", producer="nightly 2025-01-31")
    check_each_once(bus, "t")
    assert repeated(bus) == 4  # two tasks, two chunks each
    write(rows, broker, topic="u", producer="nightly 2025-02-01")
    check_each_once(bus, "u")


def test_rows_that_come_in_another_order_again_are_refused(
    spark: SparkSession, broker: DiskBroker
) -> None:
    rows = spark.range(0, ROWS, 1, 1).selectExpr("cast(id AS string) AS payload")
    write(rows, broker, topic="t", producer="p")
    with pytest.raises(Exception, match="sort them within their partitions"):
        write(rows.sort(rows.payload.desc()).coalesce(1), broker, topic="t", producer="p")


def test_a_batch_whose_commit_failed_lands_once_after_a_restart(
    spark: SparkSession,
    tmp_path: Path,
    rows_directory: Path,
    broker: DiskBroker,
    bus: BlockingBus,
) -> None:
    class CommitFailsSink(
        DataSource
    ):  # within the test, so that workers need not import this module
        @classmethod
        def name(cls) -> str:
            return "commit_fails"

        def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
            class CommitFails(StreamWriter):
                def commit(
                    self,
                    messages: list[WriterCommitMessage | None],
                    batchId: int,  # noqa: N803
                ) -> None:
                    raise RuntimeError("no commit")

            return CommitFails(dict(self.options), schema, overwrite=overwrite)

    spark.dataSource.register(CommitFailsSink)
    with pytest.raises(Exception, match="no commit"):
        run_stream(spark, tmp_path, broker, "commit_fails")
    check_each_once(bus, "stream")
    run_stream(spark, tmp_path, broker)
    check_each_once(bus, "stream")
    assert repeated(bus) == 3
    more = "".join(f'{{"payload": "{number}"}}\n' for number in range(ROWS, ROWS + 10))
    (rows_directory / "second.json").write_text(more)
    run_stream(spark, tmp_path, broker)
    check_each_once(bus, "stream", ROWS + 10)


# --- Trouble ---


def test_a_write_goes_on_when_the_broker_comes_back(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(0, ROWS, 1, 1).selectExpr("cast(id AS string) AS payload")
    with DiskBroker(tmp_path / "data") as broker:
        address = broker.address
        write(rows, broker, topic="t", producer="p")
    with DiskBroker(tmp_path / "data", address=address) as broker, broker.connect() as bus:
        # The workers still have connections to the one that is gone.
        write(rows, broker, topic="t", producer="p")
        check_each_once(bus, "t")
        assert repeated(bus) == 3


def test_a_broker_that_is_not_there_is_told_of_within_the_deadline(spark: SparkSession) -> None:
    rows = spark.sql("SELECT 'x' AS payload, 't' AS topic")
    unreachable = rows.write.format("runnel").mode("append")
    with pytest.raises(Exception, match=r"cannot connect to 127\.0\.0\.1:1: connection refused"):
        unreachable.options(url="runnel://127.0.0.1:1", deadlineSeconds="0.1").save()


@pytest.mark.parametrize(
    ("query", "options", "problem"),
    [
        ("SELECT 'x' AS payload, 1 AS offset", {"topic": "t"}, "cannot publish columns offset"),
        ("SELECT 'x' AS payload", {}, "a column topic, or the option topic"),
        ("SELECT 'x' AS payload", {"topic": ""}, "the topic name is empty"),
        ("SELECT 'x' AS payload", {"topc": "t"}, "did you mean topic"),
        ("SELECT 'x' AS payload", {"topic": "t", "level": "none"}, "is always stored"),
        ("SELECT 'x' AS payload", {"topic": "t", "url": "http://x"}, "is not a Runnel URL"),
        ("SELECT 'x' AS payload", {"topic": "t", "deadlineSeconds": "soon"}, "number of seconds"),
    ],
)
def test_a_wrong_write_is_refused_before_any_row_is_sent(
    spark: SparkSession, query: str, options: dict[str, str], problem: str
) -> None:
    with pytest.raises(Exception, match=problem):
        spark.sql(query).write.format("runnel").mode("append").options(**options).save()


def test_topics_cannot_be_overwritten(spark: SparkSession) -> None:
    rows = spark.sql("SELECT 'x' AS payload")
    with pytest.raises(Exception, match="topics are only added to"):
        rows.write.format("runnel").mode("overwrite").option("topic", "t").save()


def test_a_refused_batch_names_the_reason(spark: SparkSession, broker: DiskBroker) -> None:
    with pytest.raises(Exception, match=r"larger than limits\.message_bytes_max"):
        write(spark.sql("SELECT repeat('x', 1500000) AS payload"), broker, topic="t")
