"""Rows as batches: where they are cut, which partition and shard they go to, and that nothing of them changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types
from pyspark.sql.types import StructType

from runnel.errors import ClientFault, InvalidNameError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import Owner, Route
from runnel.spark.write import chunks
from runnel.spark.write.chunks import Chunker
from runnel.spark.write.row_columns import check_schema, in_repeatable_order
from runnel.topics.partitions import partition_of_key

NOW_NS = 1_700_000_000_123_456_789
UID = bytes(range(20))
TAGS = pa.map_(pa.string(), pa.string())


def route(topic: str) -> Route:
    """Topics that begin with 4 have so many partitions, in two shards; others one, in the journal main."""
    if topic.startswith("4"):
        return Route(topic, "disk", [Owner("wide", number % 2, 1) for number in range(4)])
    return Route(topic, "disk", [Owner("main", 0, 1)])


def routes(topics: Sequence[str]) -> Mapping[str, Route]:
    return {topic: route(topic) for topic in topics}


def batches_of(
    *arrived: pa.RecordBatch, topic: str | None = None, turn: int = 0, bytes_max: int = 2**20
) -> list[Batch]:
    chunker = Chunker(
        "p",
        7,
        topic=topic,
        turn=turn,
        bytes_max=bytes_max,
        find_routes=routes,
        now_ns=lambda: NOW_NS,
    )
    return [Batch.unpack(batch.pack()) for batch in chunker.batches(arrived)]


def messages_of(*arrived: pa.RecordBatch, topic: str | None = None) -> list[Message]:
    return [message for batch in batches_of(*arrived, topic=topic) for message in batch]


def rows(**columns: object) -> pa.RecordBatch:
    """A batch as Spark hands it over."""
    kinds = {
        "payload": pa.binary(),
        "topic": pa.string(),
        "key": pa.binary(),
        "partition_key": pa.binary(),
        "tags": TAGS,
        "event_time": pa.timestamp("us", "UTC"),
        "event_time_ns": pa.int64(),
        "uid": pa.binary(),
        "partition": pa.int32(),
    }
    return pa.record_batch(
        {name: pa.array(values, kinds[name]) for name, values in columns.items()}
    )


def test_every_field_of_a_row_is_in_its_message() -> None:
    (message,) = messages_of(
        rows(
            payload=[b"21.5"],
            topic=["4/sensors"],
            key=[b"k"],
            partition_key=[b"p"],
            tags=[[("unit", "C"), ("site", "north")]],
            event_time_ns=[17],
            uid=[UID],
            partition=[3],
        )
    )
    assert (message.topic, message.payload, message.key) == ("4/sensors", b"21.5", b"k")
    assert (message.partition_key, message.partition) == (b"p", 3)
    assert message.tags == {"unit": "C", "site": "north"}
    assert (message.event_time_ns, message.transmit_time_ns) == (17, NOW_NS)
    assert message.uid == UID


def test_absent_values_stay_absent() -> None:
    first, second, third = messages_of(
        rows(
            payload=[b"", b"b", b"c"],
            key=[None, b"", b"k"],
            partition_key=[None, None, b"p"],
            tags=[None, [], [("a", "1")]],
            event_time=[None, 5, 6],
            uid=[None, UID, None],
        ),
        topic="t",
    )
    assert (first.payload, first.key, first.partition_key, first.uid) == (b"", None, None, None)
    assert (second.key, second.partition_key, second.uid) == (b"", b"", UID)
    assert (third.key, third.partition_key, third.uid) == (b"k", b"p", None)
    assert (first.tags, second.tags, third.tags) == ({}, {}, {"a": "1"})
    assert first.event_time_ns == NOW_NS // 1000 * 1000
    assert (second.event_time_ns, third.event_time_ns) == (5000, 6000)


def test_text_is_published_as_utf_8() -> None:
    arrived = pa.record_batch({"payload": pa.array(["é", "ü"]), "key": pa.array(["ö", None])})
    assert [(m.payload.decode(), m.key) for m in messages_of(arrived, topic="t")] == [
        ("é", "ö".encode()),
        ("ü", None),
    ]


def test_sparks_large_types_are_taken_too() -> None:
    arrived = pa.record_batch(
        {
            "payload": pa.array([b"a", b"b"], pa.large_binary()),
            "topic": pa.array(["t", "t"], pa.large_string()),
            "tags": pa.array(
                [[("unit", "C")], None], pa.map_(pa.large_string(), pa.large_string())
            ),
        }
    )
    assert [(m.payload, m.tags) for m in messages_of(arrived)] == [
        (b"a", {"unit": "C"}),
        (b"b", {}),
    ]


def test_rows_of_a_slice_are_those_of_the_slice() -> None:
    whole = rows(
        payload=[b"a", b"bb", b"ccc", b"dddd"],
        key=[None, b"1", None, b"33"],
        tags=[[("x", "a")], [("x", "b")], None, [("x", "b"), ("y", "c")]],
        uid=[None, UID, None, UID],
    )
    kept = messages_of(whole.slice(1, 3), topic="t")
    assert [m.payload for m in kept] == [b"bb", b"ccc", b"dddd"]
    assert [m.key for m in kept] == [b"1", None, b"33"]
    assert [dict(m.tags) for m in kept] == [{"x": "b"}, {}, {"x": "b", "y": "c"}]
    assert [m.uid for m in kept] == [UID, None, UID]


def test_a_row_without_a_topic_takes_the_option() -> None:
    arrived = rows(payload=[b"1", b"2"], topic=["mine", None])
    assert sorted(m.topic for m in messages_of(arrived, topic="other")) == ["mine", "other"]
    with pytest.raises(ClientFault, match="topic is null, in 1 of 2 rows"):
        messages_of(arrived)


def test_keys_choose_partitions_as_every_publisher_does() -> None:
    keys = [f"{number}".encode() for number in range(50)]
    found = messages_of(rows(payload=keys, key=keys), topic="4")
    assert {m.payload: m.partition for m in found} == {
        key: partition_of_key(key, 4) for key in keys
    }


def test_rows_without_a_key_take_turns_chunk_by_chunk() -> None:
    arrived = rows(payload=[b"x" * 1000] * 5)
    cut = batches_of(arrived, topic="4", turn=2, bytes_max=2200)
    assert [(batch.runs()[0].partition, len(batch)) for batch in cut] == [(2, 2), (3, 2), (0, 1)]


def test_a_batch_has_rows_of_one_shard_only_and_numbers_count_by_shard() -> None:
    arrived = rows(
        payload=[b"0", b"1", b"2", b"3", b"4", b"5"],
        topic=["4", "a", "4", "b", "4", "a"],
        partition=[0, None, 1, None, 2, None],
    )
    cut = batches_of(arrived, arrived.slice(0, 1))
    assert [[(run.topic, run.partition, run.count) for run in batch.runs()] for batch in cut] == [
        [("a", 0, 2), ("b", 0, 1)],
        [("4", 0, 2), ("4", 2, 1)],
        [("4", 1, 1)],
    ]
    assert [batch.envelope.shard for batch in cut] == [0, 0, 1]
    assert {(b.envelope.producer, b.envelope.term, b.envelope.number) for b in cut} == {("p", 7, 0)}
    numbers = [b.envelope.number for b in batches_of(arrived, bytes_max=1, topic="t")]
    assert numbers == [0, 0, 0, 1, 1, 2]


def test_a_partition_that_the_topic_has_not_is_refused() -> None:
    with pytest.raises(ClientFault, match="4 has partitions 0 to 3, not 4"):
        messages_of(rows(payload=[b""], topic=["4"], partition=[4]))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"payload": [b"a", None]}, "payload is null, in 1 of 2 rows"),
        ({"payload": [b""], "uid": [b"short"]}, "a uid of 5 bytes: it must have 20"),
        ({"payload": [b""], "tags": [[("a", None)]]}, "the value null"),
        ({"payload": [b""], "tags": [[(str(n), "") for n in range(65)]]}, "65 tags: at most 64"),
        ({"payload": [b""], "event_time": [2**62]}, "1678 to 2261"),
    ],
)
def test_a_row_that_cannot_be_published_is_reported(
    columns: dict[str, object], problem: str
) -> None:
    with pytest.raises(ClientFault, match=problem):
        messages_of(rows(**columns), topic="t")


def test_a_topic_name_is_checked_before_anything_is_sent() -> None:
    with pytest.raises(InvalidNameError):
        messages_of(rows(payload=[b""], topic=["a\nb"]))


message_rows = st.lists(
    st.tuples(
        st.binary(max_size=40),
        st.none() | st.binary(max_size=3),
        st.none() | st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3),
        st.sampled_from(["4", "4/b", "c", "d"]),
    ),
    min_size=1,
    max_size=60,
)


@given(message_rows, st.lists(st.integers(1, 59), max_size=5))
def test_batches_are_the_same_however_spark_groups_the_rows(
    given_rows: list[tuple[bytes, bytes | None, dict[str, str] | None, str]], cuts: list[int]
) -> None:
    payloads, keys, tags, topics = map(list, zip(*given_rows, strict=True))
    whole = rows(
        payload=payloads,
        key=keys,
        tags=[None if each is None else list(each.items()) for each in tags],
        topic=topics,
    )
    ends = sorted({0, *(min(cut, len(whole)) for cut in cuts), len(whole)})
    parts = [whole.slice(begin, end - begin) for begin, end in pairwise(ends)]
    at_once = batches_of(whole, bytes_max=600)
    assert [b.pack() for b in at_once] == [b.pack() for b in batches_of(*parts, bytes_max=600)]
    found = sorted(
        (m.topic, m.payload, m.key or b"-", sorted(m.tags.items())) for b in at_once for m in b
    )
    assert found == sorted(
        (topic, payload, key or b"-", sorted((each or {}).items()))
        for payload, key, each, topic in given_rows
    )


@given(message_rows, st.randoms())
def test_sorted_rows_come_in_the_same_order_whatever_order_they_came_in(
    given_rows: list[tuple[bytes, bytes | None, dict[str, str] | None, str]], random: Random
) -> None:
    def ordered(each: list[tuple[bytes, bytes | None, dict[str, str] | None, str]]) -> pa.Table:
        payloads, keys, tags, topics = map(list, zip(*each, strict=True))
        pairs = [None if one is None else sorted(one.items()) for one in tags]
        arrived = rows(payload=payloads, key=keys, tags=pairs, topic=topics)
        half = len(arrived) // 2
        return pa.Table.from_batches(
            in_repeatable_order([arrived.slice(0, half), arrived.slice(half)])
        )

    shuffled = list(given_rows)
    random.shuffle(shuffled)
    assert ordered(shuffled).equals(ordered(given_rows))
    assert ordered(given_rows).num_rows == len(given_rows)


def test_chunks_end_at_ten_thousand_rows() -> None:
    arrived = rows(payload=[b""] * 8000)
    sizes = [len(chunk) for chunk in chunks.chunks([arrived] * 3, 2**30)]
    assert sizes == [10_000, 10_000, 4_000]
    assert [len(c) for c in chunks.chunks([rows(payload=[b""] * 10_000)], 2**30)] == [10_000]


BINARY = types.StructField("payload", types.BinaryType())


def with_payload(**others: types.DataType) -> StructType:
    return StructType([BINARY, *(types.StructField(name, kind) for name, kind in others.items())])


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            with_payload(offset=types.LongType()),
            "cannot publish columns offset: a message is made of",
        ),
        (StructType().add("topic", types.StringType()), "there is no column payload"),
        (
            StructType().add("payload", types.IntegerType()),
            "payload is int: it must be binary or string",
        ),
        (
            with_payload(tags=types.MapType(types.StringType(), types.IntegerType())),
            "column tags is map<string,int>: it must be map<string,string>",
        ),
        (with_payload(event_time=types.TimestampNTZType()), "it must be timestamp"),
        (
            with_payload(event_time=types.TimestampType(), event_time_ns=types.LongType()),
            "drop one of them",
        ),
        (StructType([BINARY, BINARY]), "columns payload come more than once"),
    ],
)
def test_a_schema_that_cannot_be_published_is_refused(schema: StructType, problem: str) -> None:
    with pytest.raises(ClientFault, match=problem):
        check_schema(schema, has_topic=True)


def test_rows_need_a_topic_from_somewhere() -> None:
    with pytest.raises(ClientFault, match="a column topic, or the option topic"):
        check_schema(with_payload(), has_topic=False)
