"""What tests of writing share: rows for a stream to find, and whether each landed once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pyspark.sql import SparkSession

from runnel.client import BlockingBus
from runnel.formats.message import Message
from tests.spark.brokers import DiskBroker

ROWS = 25_000  # three chunks of a task


def all_messages(bus: BlockingBus, topic: str) -> list[Message]:
    found: list[Message] = []
    for partition, state in enumerate(bus.topic(topic).partitions):
        offset = state.first_offset
        while offset < state.next_offset:
            page = bus.fetch(topic, offset, partition=partition, bytes_max=2**24)
            found += page.messages
            offset = page.next_offset
    return found


def check_each_once(bus: BlockingBus, topic: str, rows: int = ROWS) -> None:
    """Payloads are the numbers of the rows."""
    times = Counter(int(message.payload) for message in all_messages(bus, topic))
    assert times == Counter(range(rows))


def repeated(bus: BlockingBus) -> int:
    """Batches that came again, as the broker counts them."""
    count: int = bus.statistics()["totals"]["publishes_repeated"]
    return count


def run_stream(
    spark: SparkSession, directory: Path, broker: DiskBroker, format_name: str = "runnel"
) -> None:
    """What there is, from the checkpoint on."""
    rows = spark.readStream.schema("payload string").json(str(directory / "rows"))
    stream = rows.writeStream.format(format_name).trigger(availableNow=True)
    stream = stream.options(url=broker.url, topic="stream")
    query = stream.option("checkpointLocation", str(directory / "checkpoint")).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
