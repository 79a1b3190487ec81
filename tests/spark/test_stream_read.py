"""`spark.readStream.format("runnel")`: what each micro-batch holds, and that none is missing or comes twice.

Most of it drives the reader as Spark does, without Spark; the last tests are real queries.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.streaming.query import StreamingQuery

from runnel.client import BlockingBus
from runnel.config import TopicRule
from runnel.errors import ClientFault
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.spark.connections import close_connections
from runnel.spark.options import stream_options
from runnel.spark.read import query_cursor, stream_offset
from runnel.spark.read.schema import SPARK_SCHEMA, arrow_schema
from runnel.spark.read.stream_offset import Offset, ShardReadPosition, StreamShard
from runnel.spark.read.stream_reader import StreamReader
from runnel.testing import BrokerThread
from tests.spark.brokers import LOG, DiskBroker
from tests.spark.read_results import publish

RULES = (TopicRule(match="own/*", journal="{topic}"),)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[DiskBroker]:
    with DiskBroker(tmp_path / "data", RULES) as serving:
        yield serving


@pytest.fixture
def connections() -> Iterator[None]:
    """Those that the reader opens in this process."""
    yield
    close_connections()


def reader_of(url: str, **options: str) -> StreamReader:
    chosen = {} if "topics" in options else {"pattern": "*"}
    parsed = stream_options({**chosen, **options, "url": url}, url="")
    return StreamReader(parsed, arrow_schema(SPARK_SCHEMA))


class Query:
    """A query as Spark runs it: a plan from where the last one ended, its tasks elsewhere, and all of it again."""

    def __init__(self, reader: StreamReader, start: Offset | None = None) -> None:
        self.reader = reader
        self.at = reader.initialOffset() if start is None else start

    def step(self, limit: ReadLimit | None = None) -> list[bytes]:
        """The payloads of the next micro-batch."""
        chosen = self.reader.getDefaultReadLimit() if limit is None else limit
        start, self.at = self.at, self.reader.latestOffset(self.at, chosen)
        payloads = self.read(start, self.at)
        assert self.read(start, self.at) == payloads, "a micro-batch that is repeated differs"
        return payloads

    def read(self, start: Offset, end: Offset) -> list[bytes]:
        found: list[bytes] = []
        for partition in self.reader.partitions(start, end):
            sent = pickle.loads(pickle.dumps(partition))
            for batch in self.reader.read(sent):
                found += batch.column("payload").to_pylist()
        return found

    def all(self) -> list[list[bytes]]:
        """Micro-batches until there is nothing new."""
        found: list[list[bytes]] = []
        while True:
            before = self.at
            payloads = self.step()
            if self.at == before:
                return found
            found.append(payloads)


def numbered(topic: str, first: int, end: int) -> list[Message]:
    return [Message(topic, b"%d" % number) for number in range(first, end)]


def payloads(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def joined(batches: list[list[bytes]]) -> list[bytes]:
    return list(chain.from_iterable(batches))


def store(bus: BlockingBus, topic: str, first: int, end: int, per_entry: int = 1) -> None:
    """Entries of so many messages each."""
    for begin in range(first, end, per_entry):
        bus.publish_batch(Batch.from_messages(numbered(topic, begin, min(end, begin + per_entry))))


# --- Offsets ---


def test_an_offset_is_small_and_its_keys_are_in_order() -> None:
    places = {
        StreamShard("sensors/x", 1): ShardReadPosition(3, 7, 9),
        StreamShard("main", 10): ShardReadPosition(3, 7, 7),
        StreamShard("main", 2): ShardReadPosition(3, 5),
    }
    offset = stream_offset.encode(places)
    assert list(offset.items()) == [
        ("main/2", [3, 5]),
        ("main/10", [3, 7]),
        ("sensors/x/1", [3, 7, 9]),
    ]
    assert stream_offset.encode(stream_offset.decode(offset)) == offset


@pytest.mark.parametrize(
    "offset",
    [{"index": [3]}, 17, [1, 2], {"main/0": 3}, {"main/0": [1, -3]}, {"main/0": ["a", "b"]}],
)
def test_a_checkpoint_of_another_source_is_refused(offset: Any) -> None:
    with pytest.raises(ClientFault, match="not of a stream from Runnel"):
        stream_offset.decode(offset)


# --- Where a stream begins, and what joins it ---


@pytest.mark.usefixtures("connections")
def test_a_stream_begins_where_it_is_told(broker: DiskBroker, bus: BlockingBus) -> None:
    store(bus, "a", 0, 10)
    time_ns = bus.fetch("a", 7).messages[0].receive_time_ns
    latest = Query(reader_of(broker.url))
    earliest = Query(reader_of(broker.url, startingOffsets="earliest"))
    timed = Query(reader_of(broker.url, startingTime=str(time_ns)))
    store(bus, "a", 10, 12)
    assert latest.step() == payloads(10, 12)
    assert earliest.step() == payloads(0, 12)
    assert timed.step() == payloads(6, 12)
    assert timed.all() == []


@pytest.mark.usefixtures("connections")
def test_new_topics_and_new_shards_are_read_from_their_first_message(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    store(bus, "a", 0, 3)
    query = Query(reader_of(broker.url))
    store(bus, "b", 3, 5)  # in a shard that is known
    assert query.step() == payloads(3, 5)
    store(bus, "own/c", 5, 8)
    assert [batch for batch in query.all() if batch] == [payloads(5, 8)]
    assert list(query.at) == ["main/0", "own/c/0"]


@pytest.mark.usefixtures("connections")
def test_a_stream_reads_all_shards_of_a_journal_also_after_a_restart(
    tmp_path: Path, connections: None
) -> None:
    rules = (TopicRule(match="p/*", partitions=4, journal="spread"),)
    log = msgspec.structs.replace(LOG, journal_shards=4)

    def messages(first: int, end: int) -> list[Message]:
        return [Message(f"p/{n % 3}", b"%d" % n, key=b"%d" % n) for n in range(first, end)]

    with DiskBroker(tmp_path / "data", rules, log=log) as broker, broker.connect() as bus:
        publish(bus, messages(0, 100))
        query = Query(reader_of(broker.url, startingOffsets="earliest", cursor="c"))
        assert {key.rpartition("/")[2] for key in query.at} == {"0", "1", "2", "3"}
        assert sorted(map(int, joined(query.all()))) == list(range(100))
        publish(bus, messages(100, 130))
        assert sorted(map(int, joined(query.all()))) == list(range(100, 130))
        (cursor,) = bus.cursors()
        assert {place.shard for place in cursor.places} == {0, 1, 2, 3}
        address = broker.address
    with DiskBroker(tmp_path / "data", rules, address, log=LOG) as broker, broker.connect() as bus:
        publish(bus, messages(130, 150))
        assert sorted(map(int, joined(query.all()))) == list(range(130, 150))


def test_a_shard_in_which_nothing_is_stored_is_no_loss_after_a_restart(
    tmp_path: Path, connections: None
) -> None:
    rules = (TopicRule(match="p/*", partitions=4, journal="spread"),)
    log = msgspec.structs.replace(LOG, journal_shards=4)
    with DiskBroker(tmp_path / "data", rules, log=log) as broker, broker.connect() as bus:
        bus.publish("p/a", b"1", partition=0)
        query = Query(reader_of(broker.url, startingOffsets="earliest"))
        assert joined(query.all()) == [b"1"]
        address = broker.address
    with DiskBroker(tmp_path / "data", rules, address, log=log) as broker, broker.connect() as bus:
        for partition in range(4):
            bus.publish("p/a", b"%d" % (2 + partition), partition=partition)
        assert sorted(joined(query.all())) == [b"2", b"3", b"4", b"5"]


@pytest.mark.usefixtures("connections")
def test_a_stream_of_nothing_waits_for_its_first_topic(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    query = Query(reader_of(broker.url, topics="a"))
    assert query.at == {}
    assert query.step() == []
    store(bus, "b", 0, 3)
    store(bus, "a", 3, 5)
    assert [batch for batch in query.all() if batch] == [payloads(3, 5)]


@pytest.mark.usefixtures("connections")
def test_only_wanted_topics_and_tags_come(broker: DiskBroker, bus: BlockingBus) -> None:
    messages = [
        Message("ab"[number % 2], b"%d" % number, tags={"unit": "CF"[number % 3 > 0]})
        for number in range(12)
    ]
    publish(bus, messages)
    options = {"topics": "a", "tag.unit": "C", "startingOffsets": "earliest"}
    assert Query(reader_of(broker.url, **options)).step() == [b"0", b"6"]


# --- Limits ---


@pytest.mark.usefixtures("connections")
def test_rows_of_a_micro_batch_are_limited_but_entries_are_not_cut(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    store(bus, "a", 0, 40, per_entry=4)
    store(bus, "a", 40, 60, per_entry=20)
    options = {"startingOffsets": "earliest", "maxRowsPerTrigger": "10"}
    batches = Query(reader_of(broker.url, **options)).all()
    assert [len(batch) for batch in batches] == [8, 8, 8, 8, 8, 20]
    assert joined(batches) == payloads(0, 60)


@pytest.mark.usefixtures("connections")
def test_bytes_of_a_micro_batch_are_limited(broker: DiskBroker, bus: BlockingBus) -> None:
    for number in range(6):
        bus.publish("a", b"%d" % number + bytes(1000))
    options = {"startingOffsets": "earliest", "maxBytesPerTrigger": "2500"}
    batches = Query(reader_of(broker.url, **options)).all()
    assert [len(batch) for batch in batches] == [2, 2, 2]


@pytest.mark.usefixtures("connections")
def test_a_limit_is_shared_by_shards_and_none_is_left_behind(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    store(bus, "own/x", 0, 50)
    store(bus, "own/y", 100, 104)
    store(bus, "unwanted", 0, 20)
    options = {"pattern": "own/*", "startingOffsets": "earliest", "maxRowsPerTrigger": "8"}
    query = Query(reader_of(broker.url, **options))
    first = query.step()
    assert sorted(first) == sorted([*payloads(0, 4), *payloads(100, 104)])
    rest = query.all()
    assert all(len(batch) <= 8 for batch in rest)
    assert joined(rest) == payloads(4, 50)


@pytest.mark.usefixtures("connections")
def test_a_trigger_that_wants_everything_gets_it_whatever_the_limit(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    store(bus, "a", 0, 30)
    options = {"startingOffsets": "earliest", "maxRowsPerTrigger": "10"}
    assert Query(reader_of(broker.url, **options)).step(ReadAllAvailable()) == payloads(0, 30)


@pytest.mark.usefixtures("connections")
def test_available_now_ends_at_what_was_there(broker: DiskBroker, bus: BlockingBus) -> None:
    store(bus, "a", 0, 10)
    options = {"startingOffsets": "earliest", "maxRowsPerTrigger": "4"}
    reader = reader_of(broker.url, **options)
    reader.prepareForTriggerAvailableNow()
    query = Query(reader)
    store(bus, "a", 10, 20)
    store(bus, "own/c", 20, 21)
    assert joined(query.all()) == payloads(0, 10)
    again = Query(reader_of(broker.url, **options), start=query.at)
    again.reader.prepareForTriggerAvailableNow()
    assert sorted(joined(again.all())) == sorted(payloads(10, 21))


@pytest.mark.usefixtures("connections")
def test_a_large_backlog_is_read_by_several_tasks(broker: DiskBroker, bus: BlockingBus) -> None:
    store(bus, "a", 0, 2000, per_entry=5)
    options = {"startingOffsets": "earliest", "bytesPerPartition": "16k"}
    query = Query(reader_of(broker.url, **options))
    start = query.at
    assert query.step() == payloads(0, 2000)
    assert len(query.reader.partitions(start, query.at)) > 3


@pytest.mark.usefixtures("connections")
def test_progress_is_told_without_asking_the_broker(broker: DiskBroker, bus: BlockingBus) -> None:
    query = Query(reader_of(broker.url))
    store(bus, "a", 0, 5)
    query.all()
    before = bus.statistics()["totals"]["requests"]
    for _ in range(50):
        assert query.reader.reportLatestOffset() == query.at
    assert bus.statistics()["totals"]["requests"] - before <= 2


# --- The cursor ---


@pytest.mark.usefixtures("connections")
def test_a_named_cursor_follows_what_is_committed(broker: DiskBroker, bus: BlockingBus) -> None:
    store(bus, "a", 0, 5)
    query = Query(reader_of(broker.url, cursor="mine", startingOffsets="earliest"))
    assert query.step() == payloads(0, 5)
    # The micro-batch is read, but not known to be committed until the next is planned.
    cursor = bus.cursor("mine")
    assert cursor is None or cursor.places[0].entry == 1
    query.all()
    cursor = bus.cursor("mine")
    assert cursor is not None
    (place,) = cursor.places
    assert (place.journal, place.entry, place.lag, list(place.patterns)) == ("main", 6, 0, ["*"])


@pytest.mark.usefixtures("connections")
def test_a_query_that_has_read_everything_has_moved_its_cursor_there(
    broker: DiskBroker, bus: BlockingBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_cursor, "_INTERVAL_S", 0.0)  # each plan moves it, and waits for none
    query = Query(reader_of(broker.url, cursor="mine", startingOffsets="earliest"))
    for number in range(5):
        store(bus, "own/c", number, number + 1)
        query.all()
        cursor = bus.cursor("mine")
        assert cursor is not None
        assert [(place.entry, place.lag) for place in cursor.places] == [(number + 2, 0)]


# --- Loss ---


@pytest.mark.usefixtures("connections")
def test_messages_purged_before_they_were_read_are_an_error_or_passed_over(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    store(bus, "a", 0, 3)
    start = reader_of(broker.url).initialOffset()
    store(bus, "a", 3, 6)
    bus.purge_topic("a")
    store(bus, "a", 6, 8)
    with pytest.raises(ClientFault, match=r"a\[0\] offsets 4 to 6, retention.*failOnDataLoss"):
        Query(reader_of(broker.url), start).step()
    assert Query(reader_of(broker.url, failOnDataLoss="false"), start).step() == payloads(6, 8)


@pytest.mark.usefixtures("connections")
def test_topics_deleted_before_they_were_read_are_passed_in_silence(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    store(bus, "a", 0, 3)
    query = Query(reader_of(broker.url, startingOffsets="earliest"))
    start = query.at
    query.step()
    end = query.at
    bus.delete_topic("a")
    assert query.read(start, end) == []
    assert query.all() == []


@pytest.mark.usefixtures("connections")
def test_what_was_gone_before_the_query_began_is_no_loss(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    store(bus, "a", 0, 3)
    bus.purge_topic("a")
    store(bus, "a", 3, 6)
    query = Query(reader_of(broker.url, startingOffsets="earliest", maxRowsPerTrigger="1"))
    assert joined(query.all()) == payloads(3, 6)


@pytest.mark.usefixtures("connections")
def test_a_broker_whose_data_was_replaced_is_an_error_or_read_anew(tmp_path: Path) -> None:
    with DiskBroker(tmp_path / "data") as broker:
        with broker.connect() as bus:
            store(bus, "a", 0, 9)
        start = reader_of(broker.url).initialOffset()
        address = broker.address
        close_connections()
    with DiskBroker(tmp_path / "other", address=address) as other:
        with other.connect() as bus:
            store(bus, "a", 20, 23)
        with pytest.raises(ClientFault, match=r"entries 10 to 3: data is gone.*was replaced"):
            Query(reader_of(other.url), start).step()
        query = Query(reader_of(other.url, failOnDataLoss="false"), start)
        assert query.step() == payloads(20, 23)
        assert query.all() == []
        close_connections()


@pytest.mark.usefixtures("connections")
def test_a_restarted_broker_goes_on_where_it_was(tmp_path: Path) -> None:
    with DiskBroker(tmp_path / "data") as broker:
        with broker.connect() as bus:
            store(bus, "a", 0, 9)
        start = reader_of(broker.url).initialOffset()
        address = broker.address
        close_connections()
    with DiskBroker(tmp_path / "data", address=address) as again:
        with again.connect() as bus:
            store(bus, "a", 9, 12)
        query = Query(reader_of(again.url), start)
        assert joined(query.all()) == payloads(9, 12)
        close_connections()


@pytest.mark.usefixtures("connections")
def test_topics_in_memory_that_were_made_anew_are_a_loss(runnel_broker: BrokerThread) -> None:
    with runnel_broker.connect_blocking() as bus:
        store(bus, "a", 0, 5)
    url = runnel_broker.url
    ((epoch, _),) = reader_of(url).initialOffset().values()
    older = {"main/0": [epoch - 1, 3]}
    with pytest.raises(ClientFault, match="made anew"):
        Query(reader_of(url), older).step()
    assert Query(reader_of(url, failOnDataLoss="false"), older).step() == payloads(0, 5)
    close_connections()


# --- Real queries ---


def start_query(
    spark: SparkSession, broker: DiskBroker, name: str, folder: Path, **options: str
) -> StreamingQuery:
    """Into Parquet, with all there is, then it ends."""
    frame = (
        spark.readStream.format("runnel")
        .options(url=broker.url, pattern="*", startingOffsets="earliest")
        .options(**options)
        .load()
    )
    return (
        frame.writeStream.format("parquet")
        .option("path", str(folder / name))
        .option("checkpointLocation", str(folder / f"{name}-checkpoint"))
        .trigger(availableNow=True)
        .start()
    )


def found_in(spark: SparkSession, folder: Path) -> list[int]:
    rows = spark.read.parquet(str(folder)).collect()
    return sorted(int(bytes(row.payload)) for row in rows)


def test_a_query_that_is_run_again_goes_on_and_its_cursor_has_its_name(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus, tmp_path: Path
) -> None:
    store(bus, "a", 0, 20, per_entry=5)
    query = start_query(spark, broker, "out", tmp_path, maxRowsPerTrigger="10")
    assert query.awaitTermination(90)
    assert [progress["numInputRows"] for progress in query.recentProgress] == [10, 10]
    store(bus, "own/b", 20, 30)
    again = start_query(spark, broker, "out", tmp_path)
    assert again.awaitTermination(90)
    assert found_in(spark, tmp_path / "out") == list(range(30))
    cursor = bus.cursor(f"spark/{again.id}")
    assert cursor is not None
    assert {(place.journal, place.entry) for place in cursor.places} <= {
        ("main", 1),
        ("main", 3),
        ("main", 5),
        ("own/b", 1),
    }


def test_a_query_follows_a_topic_and_tells_how_far_the_broker_is(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus, tmp_path: Path
) -> None:
    store(bus, "a", 0, 3)
    frame = (
        spark.readStream.format("runnel")
        .options(url=broker.url, topics="a,c", startingOffsets="earliest", cursor="follower")
        .load()
    )
    query = (
        frame.writeStream.format("memory")
        .queryName("followed")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()
        store(bus, "c", 3, 6)
        store(bus, "b", 6, 9)
        query.processAllAvailable()
        rows = spark.table("followed").collect()
        assert sorted(int(bytes(row.payload)) for row in rows) == list(range(6))
        assert query.lastProgress is not None
        (source,) = query.lastProgress["sources"]
        assert source["latestOffset"] == source["endOffset"]
    finally:
        query.stop()
    cursor = bus.cursor("follower")
    assert cursor is not None
    assert cursor.places[0].lag <= 3


def test_a_query_whose_data_is_gone_fails_with_the_range(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus, tmp_path: Path
) -> None:
    store(bus, "a", 0, 3)
    assert start_query(spark, broker, "out", tmp_path, cursor="").awaitTermination(90)
    assert bus.cursors() == []
    store(bus, "a", 3, 6)
    bus.purge_topic("a")
    store(bus, "a", 6, 8)
    failing = start_query(spark, broker, "out", tmp_path, cursor="")
    with pytest.raises(StreamingQueryException, match=r"a\[0\] offsets 4 to 6"):
        failing.awaitTermination(90)
    going_on = start_query(spark, broker, "out", tmp_path, cursor="", failOnDataLoss="false")
    assert going_on.awaitTermination(90)
    assert found_in(spark, tmp_path / "out") == [0, 1, 2, 6, 7]
