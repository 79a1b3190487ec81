"""Retention that runs while a query reads: each message comes once, or is within a range that is told."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pytest

from runnel.client import BlockingBus
from runnel.config import Pin, Retain, Rotate, TopicRule
from runnel.errors import ClientFault
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.spark.connections import close_connections
from runnel.spark.options import batch_options
from runnel.spark.read.batch_reader import BatchReader
from runnel.spark.read.schema import SPARK_SCHEMA, arrow_schema
from runnel.spark.read.stream_reader import StreamReader
from tests.spark.brokers import LOG, DiskBroker
from tests.spark.test_stream_read import reader_of

SEGMENT_BYTES: Final = 8 * 1024
RETAINED_BYTES: Final = 4 * SEGMENT_BYTES
PADDING: Final = bytes(1000)
ROUNDS: Final = 15
# An entry is a message here, and both are numbered from 1 on.
GONE_ENTRIES: Final = re.compile(r"begins at entry (\d+); (\d+) entries from (\d+) on are gone")
GONE_OFFSETS: Final = re.compile(
    r"begins at offset (\d+): (\d+) messages from offset (\d+) on are gone"
)
PASSED_OFFSETS: Final = re.compile(r"a\[0\] offsets (\d+) to (\d+), retention")


def serving(directory: Path, pin: Pin) -> DiskBroker:
    """Where retention looks a hundred times a second."""
    rule = TopicRule(
        match="*",
        journal="main",
        rotate=Rotate(bytes_max=SEGMENT_BYTES),
        retain=Retain(bytes_max=RETAINED_BYTES),
        pin=pin,
    )
    log = msgspec.structs.replace(LOG, retention_interval_ns=10_000_000)
    return DiskBroker(directory, (rule,), log=log)


@pytest.fixture(autouse=True)
def connections() -> Iterator[None]:
    yield
    close_connections()


def store(bus: BlockingBus, count: int, first: int) -> int:
    """So many messages, each an entry of its own; the number behind the last."""
    for number in range(first, first + count):
        bus.publish_batch(Batch.from_messages([Message("a", b"%d " % number + PADDING)]))
    return first + count


def numbers_in(rows: pa.RecordBatch) -> list[int]:
    return [int(payload.split()[0]) for payload in rows.column("payload").to_pylist()]


class Reader:
    """Micro-batch after micro-batch, each read once."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._at = reader.initialOffset()
        self.numbers: list[int] = []

    def step(self) -> bool:
        """Whether there was anything."""
        start = self._at
        self._at = self._reader.latestOffset(start, self._reader.getDefaultReadLimit())
        for partition in self._reader.partitions(start, self._at):
            for batch in self._reader.read(partition):
                self.numbers += numbers_in(batch)
        return self._at != start


def told(caplog: pytest.LogCaptureFixture) -> set[int]:
    """The messages that warnings say are gone."""
    gone: set[int] = set()
    for record in caplog.records:
        text = record.getMessage()
        for first, count, begin in [*GONE_ENTRIES.findall(text), *GONE_OFFSETS.findall(text)]:
            assert int(first) - int(begin) == int(count)
            gone |= set(range(int(begin), int(first)))
        for begin, last in PASSED_OFFSETS.findall(text):
            gone |= set(range(int(begin), int(last) + 1))
    return gone


def test_a_stream_with_a_cursor_holds_retention_back(tmp_path: Path) -> None:
    with serving(tmp_path / "data", Pin()) as broker, broker.connect() as bus:
        options = {"startingOffsets": "earliest", "cursor": "mine", "maxRowsPerTrigger": "15"}
        store(bus, 1, 1)
        reader = Reader(reader_of(broker.url, **options))
        reader.step()
        end = 2
        for _ in range(ROUNDS):  # twice as many as the query takes at a time
            end = store(bus, 30, end)
            reader.step()
        while reader.step():
            pass
        assert reader.numbers == list(range(1, end))
        deadline_s = time.monotonic() + 30
        while bus.topic("a").partitions[0].first_offset == 1:  # behind the cursor it goes on
            assert time.monotonic() < deadline_s
            reader.step()


def test_beyond_the_ceiling_what_was_not_read_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pin = Pin(bytes_max=2 * RETAINED_BYTES)
    with serving(tmp_path / "data", pin) as broker, broker.connect() as bus:
        options = {"startingOffsets": "earliest", "cursor": "mine", "maxRowsPerTrigger": "15"}
        store(bus, 1, 1)
        strict = Reader(reader_of(broker.url, **options))
        lenient = Reader(reader_of(broker.url, failOnDataLoss="false", **options))
        end = 2
        with caplog.at_level(logging.WARNING, "runnel.spark"):
            for _ in range(ROUNDS):
                end = store(bus, 30, end)
                lenient.step()
            while lenient.step():
                pass
        lost = told(caplog)
        assert lenient.numbers == sorted(set(lenient.numbers))
        assert lost
        assert not lost & set(lenient.numbers)
        assert lost | set(lenient.numbers) == set(range(1, end))
        with pytest.raises(ClientFault, match=r"entries 1 to .* are gone.*failOnDataLoss=false"):
            strict.step()


def test_a_query_that_starts_again_plans_its_last_batch_though_data_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path / "data", Pin()) as broker, broker.connect() as bus:
        end = store(bus, 300, 1)  # so many that planning looks at some of them
        started = reader_of(broker.url, failOnDataLoss="false")
        before, behind = {"main/0": [1, 1]}, {"main/0": [1, end]}
        found = []
        with caplog.at_level(logging.WARNING, "runnel.spark"):
            for partition in started.partitions(before, behind):
                for batch in started.read(partition):
                    found += numbers_in(batch)
        assert told(caplog) | set(found) == set(range(1, end))
        assert found == sorted(set(found) - told(caplog))
        strict = reader_of(broker.url)
        with pytest.raises(ClientFault, match=r"entries 1 to \d+: data is gone: the shard begins"):
            [list(strict.read(partition)) for partition in strict.partitions(before, behind)]


def test_a_batch_read_that_was_planned_before_retention_passed_tells_what_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path / "data", Pin()) as broker, broker.connect() as bus:
        end = store(bus, 20, 1)

        def planned(**options: str) -> Iterator[int]:
            """The numbers in the topic as it is now, read when they are asked for."""
            read = batch_options(
                {"topics": "a", "bytesPerPartition": "12k", **options}, url=broker.url
            )
            reader = BatchReader(read, arrow_schema(SPARK_SCHEMA))
            rows = chain.from_iterable(map(reader.read, reader.partitions()))
            return (number for batch in rows for number in numbers_in(batch))

        strict, lenient = planned(), planned(failOnDataLoss="false")
        assert next(lenient) == 1
        while (at := bus.topic("a").partitions[0]).first_offset < end // 2:
            store(bus, 10, at.next_offset)  # these are not in the plans, and push others out
        with pytest.raises(ClientFault, match=r"a\[0\], offsets 1 to .* are gone.*failOnDataLoss"):
            list(strict)
        with caplog.at_level(logging.WARNING, "runnel.spark"):
            found = [1, *lenient]
        lost = told(caplog)
        assert lost
        assert found == sorted(set(found))
        assert not lost & set(found)
        assert lost | set(found) >= set(range(1, end))
