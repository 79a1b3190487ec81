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
from runnel.spark.read.schema import ROWS_PER_RECORD_BATCH, SPARK_SCHEMA, arrow_schema, rows

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


def plain(payloads: Sequence[bytes], event_time_ns: int, transmit_time_ns: int) -> list[Message]:
    return [
        Message("a", payload, event_time_ns=event_time_ns, transmit_time_ns=transmit_time_ns)
        for payload in payloads
    ]


EVEN = plain([b"xx", b"yy"], -1, 2)
RAGGED = plain([b"", b"long", b"l"], 5, 6)
RISING = [Message("a", b"zz", event_time_ns=1000 * row, transmit_time_ns=row) for row in range(3)]
KEYED = [Message("a", b"kk", key=b"k", tags={"unit": "C"}, uid=bytes([1] * 20)), *EVEN]
TAGGED = [
    Message("a", b"t", key=b"key-%d" % row, tags=tags)
    for row, tags in enumerate([{"unit": "C"}, {}, {"unit": "F", "site": "x"}, {"unit": "C"}])
]
ALL_ALIKE = [Message("a", b"s", key=b"", tags={"unit": "F", "site": "x"})] * 3
ELSEWHERE = [Message("b", b"bb", partition=1, event_time_ns=7)]


STACKS = [
    [EVEN],
    [EVEN, EVEN],
    [EVEN, RAGGED, EVEN],
    [EVEN, RISING],
    [RISING, RISING],
    [EVEN, KEYED, RAGGED],
    [EVEN, ELSEWHERE, EVEN],
    [EVEN + ELSEWHERE, RISING],
    [TAGGED],
    [TAGGED, TAGGED],
    [ALL_ALIKE, ALL_ALIKE],
    [TAGGED, ALL_ALIKE, TAGGED],
    [ALL_ALIKE, EVEN, KEYED, TAGGED],
    [TAGGED + ELSEWHERE, ALL_ALIKE],
]


def stacked(
    parts: Sequence[Sequence[Message]], gap: int = 0, receive_time_ns: int = -1
) -> list[Batch]:
    """A batch for each part, a millisecond and so many offsets between them."""
    batches = []
    offset = 1
    for number, messages in enumerate(parts):
        batches.append(stored(messages, offset, receive_time_ns + 1_000_000 * number))
        offset += len(messages) + gap
    return batches


@pytest.mark.parametrize("parts", STACKS)
@pytest.mark.parametrize("gap", [0, 3])
def test_batches_of_all_kinds_come_in_one_stack_as_they_do_alone(
    parts: Sequence[Sequence[Message]], gap: int
) -> None:
    batches = stacked(parts, gap)
    (together,) = rows(batches, ALL)
    alone = [row for batch in batches for found in rows([batch], ALL) for row in found.to_pylist()]
    assert together.to_pylist() == alone
    messages = [message for batch in batches for message in batch]
    for row, message in zip(alone, messages, strict=True):
        assert (row["topic"], row["partition"]) == (message.topic, message.partition)
        assert (row["offset"], row["payload"]) == (message.offset, message.payload)
        assert (row["key"], row["uid"]) == (message.key, message.uid)
        assert (dict(row["tags"]), row["size"]) == (message.tags, len(message.payload))
        assert row["event_time_ns"] == message.event_time_ns
        assert row["transmit_time_ns"] == message.transmit_time_ns
        assert row["receive_time_ns"] == message.receive_time_ns


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
