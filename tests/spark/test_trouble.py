"""What happens to queries when the broker does not behave: killed, stopped, racing them with retention, crowded."""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from runnel.client import BlockingBus, connect_blocking
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.spark.connections import BrokerLogin, close_connections, connection
from runnel.spark.pipelines.streaming_query import reason_of
from tests.server.server_process import ServerProcess, held_port
from tests.spark.brokers import DiskBroker
from tests.spark.read_results import stored
from tests.spark.test_stream_read import Query, reader_of

# Far more than it takes, also on a machine that is busy with other tests.
SECONDS_MAX: Final = 120


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A broker that can be killed and started again."""
    with held_port() as port:
        made = ServerProcess(tmp_path, port, ())
        try:
            asyncio.run(made.start())
            yield made
        finally:
            made.discard()


class Publishing:
    """Numbers into a topic, one after the other, for as long as the test likes."""

    def __init__(self, url: str, topic: str) -> None:
        self._url = url
        self._topic = topic
        self._is_over = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._publish)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _publish(self) -> None:
        # With a name, what a lost connection left unanswered is sent again and stored once.
        with (
            connect_blocking(self._url) as bus,
            bus.publisher(self._topic, name="numbers", batch_messages_max=20) as publisher,
        ):
            while not self._is_over.wait(0.01):
                for _ in range(10):
                    publisher.send(b"%d" % self.count)
                    self.count += 1


def wait_until(is_so: Callable[[], bool], query: StreamingQuery) -> None:
    ends_at_s = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert query.isActive, query.exception()
        assert time.monotonic() < ends_at_s, query.status
        time.sleep(0.02)


def batches_done(query: StreamingQuery) -> int:
    return -1 if query.lastProgress is None else int(query.lastProgress["batchId"])


def wait_for_batches(query: StreamingQuery, count: int) -> None:
    goal = batches_done(query) + count
    wait_until(lambda: batches_done(query) >= goal, query)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_broker_killed_or_stopped_under_streams_gets_each_message_once(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    frame = (
        spark.readStream.format("runnel")
        .options(url=server.url, topics="numbers", startingOffsets="earliest")
        .options(maxRowsPerTrigger="500")
        .load()
    )
    stream = frame.select("payload").writeStream.format("runnel")
    stream = stream.options(url=server.url, topic="copies")
    query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        with Publishing(server.url, "numbers") as publishing:
            wait_for_batches(query, 2)
            for _ in range(2):
                server.kill()
                asyncio.run(server.start())
                wait_for_batches(query, 1)
            server.send_signal(signal.SIGSTOP)
            time.sleep(1)  # of nothing but silence
            server.send_signal(signal.SIGCONT)
            wait_for_batches(query, 1)
        query.processAllAvailable()
    finally:
        query.stop()
    with connect_blocking(server.url) as bus:
        expected = [b"%d" % number for number in range(publishing.count)]
        assert [message.payload for message in stored(bus, "numbers")] == expected
        assert [message.payload for message in stored(bus, "copies")] == expected


@pytest.mark.slow
def test_a_task_waits_for_a_broker_that_is_starting(
    spark: SparkSession, server: ServerProcess
) -> None:
    server.kill()
    address = BrokerLogin(server.url)
    server.spawn()
    seconds = spark.sparkContext.parallelize([0], 1).map(lambda _: connection(address).ping())
    assert seconds.first() < SECONDS_MAX


# --- Many topics ---


def test_ten_thousand_topics_make_a_small_offset_and_a_small_plan(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    names = [f"sensors/{number:05}" for number in range(10_000)]
    for begin in range(0, len(names), 1000):
        rows = [Message(name, b"1") for name in names[begin : begin + 1000]]
        bus.publish_batch(Batch.from_messages(rows))
    reader = reader_of(broker.url, pattern="sensors/*", startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    query = Query(reader)
    start = query.at
    bus.publish("sensors/late", b"2")  # not there when the query began
    bus.publish("others/a", b"3")
    try:
        assert [len(batch) for batch in query.all()] == [10_000]
        assert len(json.dumps(query.at)) < 100
        assert len(pickle.dumps(reader.partitions(start, query.at))) < 2000
        following = Query(reader_of(broker.url, pattern="sensors/*"), query.at)
        assert following.step() == [b"2"]
        bus.publish("sensors/new", b"4")
        assert following.step() == [b"4"]
    finally:
        close_connections()


# --- What users are told ---


def reason_of_stream(
    spark: SparkSession, directory: Path, schema: str | None = None, **options: str
) -> str:
    """Why a query that cannot be run failed."""
    reader = spark.readStream.format("runnel").options(**options)
    frame = (reader if schema is None else reader.schema(schema)).load()
    sink = frame.writeStream.format("noop").option("checkpointLocation", str(directory))
    query = sink.trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(SECONDS_MAX)
    return reason_of(caught.value)


def test_a_stream_that_cannot_be_says_why(
    spark: SparkSession, broker: DiskBroker, tmp_path: Path
) -> None:
    def reason(schema: str | None = None, **options: str) -> str:
        chosen = {"url": broker.url, "topics": "a", **options}
        return reason_of_stream(spark, tmp_path / f"checkpoint-{len(options)}", schema, **chosen)

    begins = "a stream begins at earliest, latest or one startingTime"
    assert reason(startingOffsets='{"a": 3}').endswith(begins)
    assert reason("topic int") == "column topic is string, not int"
    gone = reason(url="runnel://127.0.0.1:1")
    assert gone.startswith("cannot connect to 127.0.0.1:1: connection refused. Is a broker")


def test_a_stream_whose_checkpoint_is_of_another_source_says_so(
    spark: SparkSession, broker: DiskBroker, tmp_path: Path
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "one").write_text("1")
    text = spark.readStream.text(str(tmp_path / "rows"))
    sink = text.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "of text"))
    assert sink.trigger(availableNow=True).start().awaitTermination(SECONDS_MAX)
    reason = reason_of_stream(spark, tmp_path / "of text", url=broker.url, topics="a")
    assert "is not of a stream from Runnel; a query needs a checkpointLocation of its own" in reason


def test_a_wrong_option_is_told_first_and_without_a_traceback(spark: SparkSession) -> None:
    reading = spark.read.format("runnel").option("topics", "a").option("startingOffsets", "first")
    rows = spark.range(1).selectExpr("cast('x' AS binary) AS payload")
    writing = rows.write.format("runnel").mode("append").option("topc", "a")
    for act, sentence in (
        (
            lambda: reading.load().collect(),
            "option startingOffsets is 'first': it must be earliest",
        ),
        (writing.save, "option 'topc' is not one of writing: did you mean topic?"),
    ):
        with pytest.raises(AnalysisException) as refused:
            act()
        text = str(refused.value)
        assert "Traceback" not in text
        assert f": runnel.errors.ClientFault: {sentence}" in text.splitlines()[0]
        assert reason_of(refused.value).startswith(sentence)
