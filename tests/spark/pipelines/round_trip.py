"""Messages there and back: published, archived, replayed, and compared column by column, to the nanosecond."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from runnel.client import BlockingBus
from runnel.config import TopicRule
from runnel.formats.batch import Batch
from runnel.spark import archive, replay
from runnel.spark.connections import BrokerLogin
from runnel.spark.write.chunks import Chunker
from runnel.spark.write.task_publisher import TaskPublisher
from tests.spark.brokers import DiskBroker

TOPICS = ("sensors/a", "sensors/b", "orders")
RULES = (
    TopicRule(match="*sensors/*", partitions=2, journal="{topic}"),
    TopicRule(match="*orders", partitions=3),
)
START_NS = 1_700_000_000 * 10**9
TAG_SETS = ((), (("unit", "C"),), (("unit", "F"), ("Ort", "Köln")), (("empty", ""),))
# Everything but what a replay gives anew: the receive time, and the topic's name, which is compared apart.
COMPARED = (
    "partition",
    "offset",
    "key",
    "partition_key",
    "payload",
    "tags",
    "event_time",
    "transmit_time",
    "size",
    "uid",
)
_ROWS_AT_ONCE = 50_000


def random_rows(count: int, seed: int) -> Iterator[pa.RecordBatch]:
    """With all that a message can have, also in the wrong order, empty and missing."""
    random = np.random.default_rng(seed)
    for begin in range(0, count, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, count - begin)
        event_ns = START_NS + random.integers(-(10**9), 10**9, rows) + np.arange(rows) * 1_000_003
        sets = pa.array(TAG_SETS, pa.map_(pa.string(), pa.string()))
        yield pa.record_batch(
            {
                "topic": pa.array(TOPICS).take(pa.array(random.integers(0, len(TOPICS), rows))),
                "key": _binary(random, random.integers(0, 9, rows), missing=0.2),
                "payload": _binary(random, random.integers(0, 200, rows)),
                "tags": sets.take(pa.array(random.integers(0, len(TAG_SETS), rows))),
                "event_time_ns": event_ns,
                "transmit_time_ns": event_ns + random.integers(0, 10**7, rows),
                "uid": _binary(random, np.full(rows, 20), missing=0.5),
            }
        )


def _binary(random: np.random.Generator, lengths: np.ndarray, missing: float = 0.0) -> pa.Array:
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    data = pa.py_buffer(random.bytes(int(ends[-1])))
    values = pa.BinaryArray.from_buffers(
        pa.binary(), len(lengths), [None, pa.py_buffer(ends), data]
    )
    if not missing:
        return values
    is_missing = pa.array(random.random(len(lengths)) < missing)
    return pa.compute.if_else(is_missing, pa.scalar(None, pa.binary()), values)


def publish(url: str, count: int, seed: int) -> None:
    with closing(TaskPublisher(BrokerLogin(url), 60)) as publisher:
        chunker = Chunker(
            "round trip",
            1,
            topic=None,
            turn=0,
            bytes_max=publisher.server.batch_bytes_max // 2,
            find_routes=publisher.find_routes,
            now_ns=time.time_ns,
        )
        publisher.publish(chunker.batches(random_rows(count, seed)))


def stored(bus: BlockingBus, topics: Sequence[str]) -> pa.Table:
    """By topic, partition and offset."""
    batches: list[Batch] = []
    for topic in topics:
        for partition, at in enumerate(bus.topic(topic).partitions):
            offset = at.first_offset
            while offset < at.next_offset:
                page = bus.fetch(topic, offset, partition=partition, bytes_max=4 * 2**20)
                batches += page.batches
                offset = page.next_offset
    return Batch.table(batches)


def check_round_trip(spark: SparkSession, directory: Path, count: int, seed: int) -> None:
    """Fails with the first column that is not the same."""
    with DiskBroker(directory / "data", RULES) as broker, broker.connect() as bus:
        publish(broker.url, count, seed)
        done = archive(spark, directory / "table", pattern="*", url=broker.url)
        assert done.rows == count
        result = replay(
            spark,
            archive=str(directory / "table"),
            rename={"*": "replayed/*"},
            url=broker.url,
            checkpoint=str(directory / "checkpoint"),
        )
        assert (result.sent, result.already_there) == (count, 0)
        before = stored(bus, TOPICS)
        after = stored(bus, [f"replayed/{topic}" for topic in TOPICS])
    assert before.num_rows == after.num_rows == count
    for name in COMPARED:
        assert before.column(name).equals(after.column(name)), f"seed {seed}: {name} differs"
    names = pa.compute.binary_join_element_wise(
        "replayed", before.column("topic").cast(pa.string()), "/"
    )
    assert names.equals(after.column("topic").cast(pa.string()))
