"""Messages into batches and out again, whatever columns they need."""

from __future__ import annotations

import pickle
from array import array
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import LimitExceededError, MalformedError
from runnel.formats import columns
from runnel.formats.batch import Batch
from runnel.formats.column_builder import build_even
from runnel.formats.columns import Columns
from runnel.formats.envelope import RUNS_MAX, Codec
from runnel.formats.message import Message
from tests.formats.samples import as_read, message_lists, stored

CODECS = st.sampled_from(list(Codec))


@given(message_lists(), CODECS)
def test_messages_come_back_as_they_were(messages: list[Message], codec: Codec) -> None:
    batch = Batch.unpack(Batch.from_messages(messages, codec=codec).pack())
    assert batch.messages() == list(map(as_read, messages))
    assert list(batch) == batch.messages()
    assert len(batch) == len(messages)


@given(message_lists())
def test_many_rows_go_through_numpy_as_few_go_without(messages: list[Message]) -> None:
    messages = (messages * 100)[:100]
    assert Batch.unpack(Batch.from_messages(messages).pack()).messages() == [
        as_read(message) for message in messages
    ]


@given(message_lists(), CODECS)
def test_a_batch_packs_to_the_bytes_it_was_read_from(messages: list[Message], codec: Codec) -> None:
    block = Batch.from_messages(messages, codec=codec, producer="p", term=3, number=4).pack()
    assert Batch.unpack(block).pack() == block
    assert len(block) % 8 == 0


@given(message_lists(), CODECS)
def test_decoded_columns_encode_to_the_same_body(messages: list[Message], codec: Codec) -> None:
    batch = Batch.from_messages(messages, codec=codec)
    plain = batch.uncompressed()
    assert columns.encode(Batch.unpack(batch.pack()).columns) == plain.body
    assert Batch.unpack(plain.pack()).messages() == batch.messages()
    assert plain.uncompressed() is plain


@given(message_lists())
def test_neighbours_of_one_topic_and_partition_are_one_run(messages: list[Message]) -> None:
    runs = Batch.from_messages(messages).runs()
    spread = [(run.topic, run.partition) for run in runs for _ in range(run.count)]
    assert spread == [(message.topic, message.partition) for message in messages]
    for before, after in pairwise(runs):
        assert (before.topic, before.partition) != (after.topic, after.partition)
        assert after.row == before.row + before.count


@given(message_lists())
def test_stored_messages_carry_offset_and_receive_time(messages: list[Message]) -> None:
    batch = Batch.unpack(stored(Batch.from_messages(messages), receive_time_ns=-5).pack())
    expected = [run.base_offset + number for run in batch.runs() for number in range(run.count)]
    assert [message.offset for message in batch] == expected
    assert {message.receive_time_ns for message in batch} == {-5}
    assert [run.base_offset % 1_000 for run in batch.runs()] == [1] * batch.envelope.run_count


def test_two_rows_with_different_tags_keep_them() -> None:
    # One tag number and its padding are as long as two numbers: the case that once was misread.
    messages = [Message("t", b"", tags={"n": "1"}), Message("t", b"", tags={"n": "2"})]
    assert [
        dict(message.tags) for message in Batch.unpack(Batch.from_messages(messages).pack())
    ] == [
        {"n": "1"},
        {"n": "2"},
    ]


def test_two_rows_with_equal_tags_share_one_mapping() -> None:
    messages = [Message("t", b"", tags={"n": "1"}), Message("t", b"", tags={"n": "1"})]
    first, second = Batch.unpack(Batch.from_messages(messages).pack())
    assert first.tags is second.tags
    with pytest.raises(TypeError):
        first.tags["n"] = "2"  # type: ignore[index]


def test_a_block_is_read_at_its_position_whatever_lies_around_it() -> None:
    block = Batch.from_messages([Message("t", b"payload")]).pack()
    assert Batch.unpack(b"12345678" + block + b"behind", 8).messages() == [Message("t", b"payload")]
    assert Batch.unpack(memoryview(bytearray(block))).messages() == [Message("t", b"payload")]


def test_batches_and_messages_can_be_pickled() -> None:
    batch = stored(Batch.from_messages([Message("t", b"x", tags={"a": "b"})]))
    again: Batch = pickle.loads(pickle.dumps(batch))
    assert again.messages() == batch.messages()
    assert pickle.loads(pickle.dumps(batch.messages())) == batch.messages()


# --- What it says of itself ---


def test_repr_of_a_batch_says_where_it_belongs() -> None:
    batch = Batch.from_messages([Message("sensors/a", b"21.5", partition=2)] * 3)
    assert repr(batch) == f"<Batch 3 messages of sensors/a, {batch.envelope.body_bytes} bytes>"
    assert "sensors/a[2]@41…43," in repr(stored(batch, base_offsets=[41]))
    many = Batch.from_messages([Message(f"t{number}", b"") for number in range(4)])
    assert "4 messages of t0 … t3, 4 runs" in repr(many)


def test_repr_of_a_message_shows_the_beginning_of_long_payloads() -> None:
    message = Message("sensors/a", b"x" * 100, key=b"k", tags={"u": "C"}, partition=1, offset=9)
    assert repr(message) == (
        f"<Message sensors/a[1]@9 {b'x' * 32!r}… (100 bytes) key=b'k' tags={{'u': 'C'}}>"
    )
    assert repr(Message("t", b"21")) == "<Message t b'21'>"
    assert message.size == 100


# --- What cannot be made ---


def one(**fields: Any) -> Batch:
    return Batch.from_messages([Message(**({"topic": "t", "payload": b""} | fields))])


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"payload": "text"}, "payloads"),
        ({"payload": memoryview(array("i", [1, 2]))}, "payloads"),
        ({"key": "text"}, "keys"),
        ({"partition_key": 5}, "partition_keys"),
        ({"uid": b"short"}, "uids"),
        ({"uid": "x" * 20}, "uids"),
        ({"uid": 5}, "uids"),
        ({"uid": b""}, "uids"),
        ({"event_time_ns": 2**63}, "event_times_ns"),
        ({"event_time_ns": 1.5}, "event_times_ns"),
        ({"transmit_time_ns": -(2**63) - 1}, "transmit_time_ns"),
        ({"partition": -1}, "envelope partitions"),
        ({"partition": 2**31}, "envelope"),
        ({"tags": {"a": 1}}, "tags"),
        ({"tags": {1: "a"}}, "tags"),
        ({"tags": {"a": "\ud800"}}, "tags"),
        ({"tags": {str(number): "" for number in range(65)}}, "tags"),
    ],
)
def test_a_field_that_fits_no_column_is_refused_by_name(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(MalformedError) as caught:
        one(**fields).pack()
    assert caught.value.place == place


@pytest.mark.parametrize("odd", [{"a": 1}, {"a": []}, {"a": "b", 1: "c"}])
def test_one_odd_tag_among_many_sets_is_refused(odd: dict[str, str]) -> None:
    messages = [Message("t", b"", tags={"a": "b"}), Message("t", b"", tags=odd)]
    with pytest.raises(MalformedError, match="must be text on both sides"):
        Batch.from_messages(messages)


def test_uids_of_wrong_lengths_do_not_make_up_for_each_other() -> None:
    with pytest.raises(MalformedError, match="uids"):
        Batch.from_messages([Message("t", b"", uid=b"x" * 19), Message("t", b"", uid=b"x" * 21)])


def test_names_that_are_not_utf8_are_refused_when_packed() -> None:
    for batch in (one(topic="\ud800"), Batch.from_messages([Message("t", b"")], producer="\udfff")):
        with pytest.raises(MalformedError, match="not valid UTF-8"):
            batch.pack()


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(MalformedError):
        Batch.from_messages([])
    with pytest.raises(MalformedError):
        Batch.join([])
    with pytest.raises(MalformedError):
        columns.build([], event_times_ns=[])


@pytest.mark.parametrize("count", [1, 2, 64, 65, 1000])
def test_payloads_of_one_length_make_the_columns_that_their_list_makes(count: int) -> None:
    payloads = [row.to_bytes(3, "big") for row in range(count)]
    even = build_even(b"".join(payloads), 3)
    listed = columns.build(payloads, event_times_ns=[0])
    assert columns.encode(even) == columns.encode(listed)
    assert (even.count, even.payloads.to_list()) == (count, payloads)


@pytest.mark.parametrize(("size", "width"), [(0, 1), (7, 3), (2, 3)])
def test_bytes_that_are_no_payloads_of_one_length_are_refused(size: int, width: int) -> None:
    with pytest.raises(MalformedError, match="payloads"):
        build_even(bytes(size), width)


def test_payloads_of_one_length_may_not_be_more_than_a_batch_holds() -> None:
    with pytest.raises(LimitExceededError, match="a batch holds"):
        build_even(bytes(65 * 2**20), 2**20)


def rows(count: int) -> Columns:
    return columns.build([b""] * count, event_times_ns=[0])


@pytest.mark.parametrize(
    ("topics", "counts", "partitions"),
    [
        (["a", "b"], [1, 1], [0]),
        (["a", "b"], [2], [0]),
        (["a", "b"], [1, 1, 1], [0]),
        (["a", "b"], [4, -1], [0]),
        (["a", "b"], [3, 0], [0]),
        (["a", "b", "c"], [1], [0, 0]),
        ([], [3], [0]),
    ],
)
def test_runs_must_add_up_to_the_rows(
    topics: list[str], counts: list[int], partitions: list[int]
) -> None:
    with pytest.raises(MalformedError):
        Batch.from_columns(rows(3), topics, counts, partitions=partitions)


def test_one_count_and_one_partition_stand_for_all_runs() -> None:
    batch = Batch.from_columns(rows(4), ["a", "b"], [2], partitions=[3])
    assert [(run.topic, run.partition, run.count, run.row) for run in batch.runs()] == [
        ("a", 3, 2, 0),
        ("b", 3, 2, 2),
    ]


@pytest.mark.parametrize(
    "column",
    [
        {"event_times_ns": [1, 2]},
        {"transmit_time_ns": [1, 2]},
        {"keys": [b""]},
        {"keys": [b"", None]},
        {"keys": [None, None]},
        {"partition_keys": [b"", b"", b"", None]},
        {"uids": [b"x" * 20]},
        {"uids": [None]},
        {"tags": [{"a": "b"}]},
    ],
)
def test_columns_of_another_length_are_refused(column: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        columns.build([b""] * 3, **({"event_times_ns": [0]} | column))


@pytest.mark.parametrize(
    "fields", [{"shard": -1}, {"term": 1}, {"number": 1}, {"producer": "p", "term": -1}]
)
def test_producer_fields_must_fit_together(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedError, match=r"envelope (producer|shard|term)"):
        Batch.from_columns(rows(1), ["t"], [1], **fields)


def test_more_runs_than_a_batch_may_have_are_refused() -> None:
    count = RUNS_MAX + 1
    with pytest.raises(MalformedError, match="runs"):
        Batch.from_columns(rows(count), [f"t{run}" for run in range(count)], [1])


def test_more_bytes_than_a_batch_may_have_are_refused() -> None:
    mebibyte = bytes(2**20)
    with pytest.raises(LimitExceededError):
        columns.build([mebibyte] * 65, event_times_ns=[0])
    with pytest.raises(LimitExceededError):
        Batch.from_columns(columns.build([mebibyte] * 64, event_times_ns=[0]), ["t"], [64])


def test_messages_are_immutable() -> None:
    with pytest.raises(AttributeError):
        Message("t", b"").payload = b"x"  # type: ignore[misc]
    assert msgspec.structs.replace(Message("t", b""), payload=b"x").payload == b"x"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"producer": 5}, "envelope producer"),
        ({"producer": b"p"}, "envelope producer"),
        ({"producer": "p", "term": 1.5}, "envelope term"),
        ({"producer": "p", "term": 2**63}, "envelope term"),
        ({"producer": "p", "number": "1"}, "envelope number"),
    ],
)
def test_a_publisher_of_the_wrong_type_is_refused(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(MalformedError) as refused:
        Batch.from_messages([Message("a", b"x")], **fields)
    assert refused.value.place == place


@pytest.mark.parametrize(
    "message",
    [
        Message(b"a", b"x"),  # type: ignore[arg-type]
        Message(None, b"x"),  # type: ignore[arg-type]
        Message("a", b"x", tags=None),  # type: ignore[arg-type]
        Message("a", b"x", tags=["k"]),  # type: ignore[arg-type]
        None,
        b"x",
    ],
)
def test_messages_of_the_wrong_type_are_refused(message: Any) -> None:
    with pytest.raises(MalformedError):
        Batch.from_messages([Message("a", b"y"), message])
