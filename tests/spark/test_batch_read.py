"""`spark.read.format("runnel")` from a broker: exact rows, filters at the source, errors that help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from runnel.client import BlockingBus
from runnel.config import Keep, TopicRule
from runnel.formats.message import Message
from tests.spark.brokers import DiskBroker
from tests.spark.read_results import assert_same, publish, sensor_messages, stored

RULES = (TopicRule(match="sensors/*", partitions=2), TopicRule(match="live/*", keep=Keep.NONE))
TOPICS = ("sensors/a", "sensors/b")
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskBroker]:
    """A broker with six hundred messages of two topics, two partitions each."""
    directory: Path = tmp_path_factory.mktemp("shelf")
    with DiskBroker(directory / "data", RULES) as serving:
        with serving.connect() as bus:
            publish(bus, sensor_messages(600))
        yield serving


@pytest.fixture
def messages(shelf: DiskBroker) -> list[Message]:
    with shelf.connect() as bus:
        return stored(bus, *TOPICS)


def load(spark: SparkSession, shelf: DiskBroker, **options: str) -> DataFrame:
    chosen = {"pattern": "sensors/*"} if "topics" not in options else {}
    return spark.read.format("runnel").options(url=shelf.url, **{**chosen, **options}).load()


def error_of(frame: DataFrame) -> str:
    with pytest.raises(PySparkException) as caught:
        frame.count()
    return str(caught.value)


def test_every_message_comes_once_with_every_field(
    spark: SparkSession, shelf: DiskBroker, messages: list[Message]
) -> None:
    frame = load(spark, shelf)
    assert_same(frame, messages)
    assert_same(load(spark, shelf, topics="sensors/b"), [m for m in messages if m.topic[-1] == "b"])


def test_a_small_size_per_partition_makes_more_tasks_of_the_same_rows(
    spark: SparkSession, shelf: DiskBroker, messages: list[Message]
) -> None:
    frame = load(spark, shelf, bytesPerPartition="40k")
    assert frame._jdf.queryExecution().toRdd().getNumPartitions() > 4
    assert_same(frame, messages)


def test_offsets_bound_a_read_exactly(
    spark: SparkSession, shelf: DiskBroker, messages: list[Message]
) -> None:
    frame = load(
        spark,
        shelf,
        startingOffsets='{"sensors/a": {"0": 11, "1": "latest"}, "sensors/b": 71}',
        endingOffsets='{"sensors/a": {"0": 14}}',
    )
    assert_same(
        frame,
        [
            message
            for message in messages
            if (message.topic == "sensors/b" and message.offset >= 71)
            or (
                message.topic == "sensors/a" and not message.partition and 11 <= message.offset < 14
            )
        ],
    )


def test_times_bound_a_read_by_when_messages_were_received(
    spark: SparkSession, shelf: DiskBroker, messages: list[Message]
) -> None:
    times = sorted({message.receive_time_ns for message in messages})
    since_ns, until_ns = times[len(times) // 3], times[2 * len(times) // 3]
    frame = load(
        spark, shelf, startingTime=str(since_ns), endingTime=f'{{"sensors/a": {until_ns}}}'
    )
    assert_same(
        frame,
        [
            message
            for message in messages
            if message.receive_time_ns >= since_ns
            and (message.topic == "sensors/b" or message.receive_time_ns < until_ns)
        ],
    )


def test_tags_are_filtered_at_the_source(
    spark: SparkSession, shelf: DiskBroker, messages: list[Message]
) -> None:
    reader = spark.read.format("runnel").options(url=shelf.url, pattern="sensors/*")
    assert_same(
        reader.option("tag.unit", "F").option("tags", '{"Ort": "Köln"}').load(),
        [message for message in messages if message.tags.get("Ort") == "Köln"],
    )


def test_ends_are_fixed_when_the_read_is_planned(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus
) -> None:
    publish(bus, [Message("a", b"1"), Message("a", b"2")])
    frame = spark.read.format("runnel").options(url=broker.url, topics="a").load()
    planned = frame.rdd
    assert planned.getNumPartitions() == 1
    publish(bus, [Message("a", b"3")])
    assert [row.payload for row in planned.collect()] == [b"1", b"2"]
    assert spark.read.format("runnel").options(url=broker.url, topics="a").load().count() == 3


def test_a_narrower_schema_is_honoured(
    spark: SparkSession, shelf: DiskBroker, messages: list[Message]
) -> None:
    reader = spark.read.format("runnel").options(url=shelf.url, topics="sensors/a")
    frame = reader.schema("payload binary, offset bigint").load()
    assert frame.columns == ["payload", "offset"]
    expected = [(m.payload, m.offset) for m in messages if m.topic == "sensors/a"]
    assert sorted((bytes(row.payload), row.offset) for row in frame.collect()) == sorted(expected)
    assert "column offset is bigint, not string" in error_of(reader.schema("offset string").load())


# --- Filters ---


FILTERS = [
    "topic IN ('sensors/b', 'nowhere')",
    "topic LIKE 'sensors/a%' AND partition = 1",
    "offset > 10 AND offset <= 20 AND partition IN (0, 5)",
    "event_time >= timestamp'2023-11-14 22:15:00' AND event_time < timestamp'2023-11-14 22:16:00'",
    "event_time = timestamp'2023-11-14 22:13:23'",
    "receive_time <= timestamp'2020-01-01'",
    "receive_time_ns > 0 AND transmit_time > timestamp'2020-01-01' AND event_time_ns < 1700000003000000022",
]


@pytest.fixture(scope="module")
def held(spark: SparkSession, shelf: DiskBroker) -> Iterator[DataFrame]:
    """All rows in Spark's own memory, where it filters them itself."""
    frame = load(spark, shelf).cache()
    yield frame
    frame.unpersist(blocking=True)


@pytest.mark.parametrize("condition", FILTERS)
def test_a_filter_leaves_the_same_rows_whoever_applies_it(
    spark: SparkSession, shelf: DiskBroker, held: DataFrame, condition: str
) -> None:
    # Cached rows are found by the plan; another option makes it another one.
    pushed = load(spark, shelf, bytesPerPartition="1m").where(condition)
    assert "Filter (" not in plan_of(pushed)
    found = sorted((row.topic, row.partition, row.offset) for row in pushed.collect())
    expected = held.where(condition).collect()
    assert found == sorted((row.topic, row.partition, row.offset) for row in expected)


def plan_of(frame: DataFrame) -> str:
    plan: str = frame._jdf.queryExecution().executedPlan().toString()
    return plan


def test_filters_that_the_source_cannot_apply_are_left_to_spark(
    spark: SparkSession, shelf: DiskBroker, messages: list[Message]
) -> None:
    frame = load(spark, shelf).where("size = 4 AND tags['unit'] = 'C' AND offset IN (4, 5, 6)")
    assert "Filter (" in plan_of(frame)
    assert_same(
        frame,
        [
            message
            for message in messages
            if len(message.payload) == 4
            and message.tags.get("unit") == "C"
            and message.offset in (4, 5, 6)
        ],
    )


def test_a_session_without_pushdown_reads_the_same(
    spark: SparkSession, shelf: DiskBroker, messages: list[Message]
) -> None:
    spark.conf.set(PUSHDOWN, "false")
    try:
        frame = load(spark, shelf).where("offset < 5")
        assert_same(frame, [message for message in messages if message.offset < 5])
    finally:
        spark.conf.set(PUSHDOWN, "true")


# --- What is wrong ---


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topics": "sensor/a"}, "topic 'sensor/a' does not exist; did you mean sensors/a"),
        (
            {"startingOffsets": '{"sensors/a": {"0": 9999}}'},
            "option startingOffsets: sensors/a[0] has not reached offset 9999: from 1 to ",
        ),
        ({"endingOffsets": '{"sensors/a": {"2": 1}}'}, "has partitions 0 to 1, not 2"),
        ({"endingOffsets": '{"elsewhere": 1}'}, "'elsewhere' is not among the topics read"),
        ({"startingOfsets": "earliest"}, "did you mean startingOffsets?"),
        ({"url": "runnel://127.0.0.1:1"}, "cannot connect to 127.0.0.1:1"),
        ({"url": "http://127.0.0.1"}, "is not a Runnel URL"),
    ],
)
def test_errors_say_what_would_be_right(
    spark: SparkSession, shelf: DiskBroker, options: dict[str, str], text: str
) -> None:
    reader = spark.read.format("runnel").option("url", shelf.url)
    chosen = {} if "topics" in options else {"pattern": "sensors/*"}
    assert text in error_of(reader.options(**chosen, **options).load())


def test_messages_that_are_gone_are_an_error_or_passed_over(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus
) -> None:
    publish(bus, [Message("a", b"%d" % number) for number in range(10)])
    bus.purge_topic("a")
    publish(bus, [Message("a", b"new")])
    reader = spark.read.format("runnel").options(
        url=broker.url, topics="a", startingOffsets='{"a": 3}'
    )
    assert "offset 3 of a[0] is gone: from 11 to 12" in error_of(reader.load())
    (row,) = reader.option("failOnDataLoss", "false").load().collect()
    assert (row.offset, bytes(row.payload)) == (11, b"new")


def test_a_pattern_that_matches_nothing_kept_gives_no_rows(
    spark: SparkSession, shelf: DiskBroker
) -> None:
    with shelf.connect() as bus, bus.subscribe("live/x"):
        bus.publish("live/x", b"not kept")  # it is there as long as somebody listens
        check_nothing_kept(spark, shelf)


def check_nothing_kept(spark: SparkSession, shelf: DiskBroker) -> None:
    reader = spark.read.format("runnel").option("url", shelf.url)
    assert reader.option("pattern", "nothing/*").load().count() == 0
    assert reader.option("pattern", "live/*").load().count() == 0
    named = spark.read.format("runnel").options(url=shelf.url, topics="live/x").load()
    assert "topic 'live/x' is live only" in error_of(named)
