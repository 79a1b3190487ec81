"""Stored batches as record batches that Spark accepts: every value, and the columns that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from runnel.errors import ClientFault
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.spark.schema import ROWS_PER_RECORD_BATCH, SPARK_SCHEMA, arrow_schema, rows

ALL = arrow_schema(SPARK_SCHEMA)


def stored(messages: Sequence[Message], base_offset: int = 1, receive_time_ns: int = 0) -> Batch:
    batch = Batch.from_messages(messages)
    runs = len(batch.envelope.topics)
    head = msgspec.structs.replace(
        batch.envelope,
        base_offsets=base_offset.to_bytes(8, "little") * runs,
        receive_times=receive_time_ns.to_bytes(8, "little", signed=True),
        epochs=(1).to_bytes(8, "little"),
        entries=(1).to_bytes(8, "little"),
    )
    return Batch(head, batch.body)


def test_every_field_arrives() -> None:
    message = Message(
        "sensors/a",
        b"21.5",
        key=b"k",
        tags={"unit": "C"},
        event_time_ns=1_700_000_000_123_456_789,
        transmit_time_ns=-1,
        partition=3,
        uid=bytes(range(20)),
    )
    plain = Message("sensors/b", b"", event_time_ns=5, transmit_time_ns=6)
    (found,) = rows([stored([message, plain], 7, 1_700_000_001_000_000_999)], ALL)
    assert found.schema.equals(ALL)
    first, second = found.to_pylist()
    assert first["topic"] == "sensors/a"
    assert (first["partition"], first["offset"], first["size"]) == (3, 7, 4)
    assert (first["key"], first["payload"], first["uid"]) == (b"k", b"21.5", bytes(range(20)))
    assert first["tags"] == [("unit", "C")]
    assert first["event_time_ns"] == 1_700_000_000_123_456_789
    assert first["event_time"].isoformat() == "2023-11-14T22:13:20.123456+00:00"
    assert first["receive_time_ns"] == 1_700_000_001_000_000_999
    assert first["receive_time"].microsecond == 0
    # A nanosecond before 1970 lies in the microsecond before it.
    assert first["transmit_time"].isoformat() == "1969-12-31T23:59:59.999999+00:00"
    assert (second["topic"], second["key"], second["uid"]) == ("sensors/b", None, None)
    assert second["tags"] == []


def test_a_narrower_schema_is_honoured_in_its_own_order() -> None:
    narrow = arrow_schema(StructType().add("offset", LongType()).add("topic", StringType()))
    (found,) = rows([stored([Message("a", b"x")])], narrow)
    assert found.to_pydict() == {"offset": [1], "topic": ["a"]}


@pytest.mark.parametrize("sizes", [[10] * 3000, [45_000], [10_000, 1, 25_000]])
def test_record_batches_have_near_ten_thousand_rows(sizes: list[int]) -> None:
    batches = []
    offset = 1
    for size in sizes:
        batches.append(stored([Message("a", b"x", event_time_ns=1)] * size, offset))
        offset += size
    found = list(rows(batches, ALL))
    assert all(batch.num_rows <= 2 * ROWS_PER_RECORD_BATCH for batch in found)
    assert all(batch.num_rows >= ROWS_PER_RECORD_BATCH / 2 for batch in found[:-1])
    offsets = pa.Table.from_batches(found).column("offset").to_pylist()
    assert offsets == list(range(1, sum(sizes) + 1))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            StructType([StructField("ofset", LongType())]),
            "no column 'ofset': the columns are topic",
        ),
        (StructType([StructField("offset", StringType())]), "column offset is bigint, not string"),
        (StructType([]), "without columns"),
    ],
)
def test_a_schema_that_is_not_ours_is_refused(schema: StructType, text: str) -> None:
    with pytest.raises(ClientFault, match=text):
        arrow_schema(schema)
