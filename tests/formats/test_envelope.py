"""Envelopes: what one value stands for, and every field that may be wrong, by its name."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import MalformedError
from runnel.formats import envelope
from runnel.formats.envelope import (
    BODY_BYTES_CEILING,
    OFFSET_MAX,
    RUNS_MAX,
    Envelope,
    pack32,
    pack64,
)

FIELDS = Envelope.__struct_fields__


def fields(**changes: Any) -> list[Any]:
    """A right envelope of two stored runs as plain values, with some of them changed."""
    values: dict[str, Any] = {
        "version": 1,
        "topics": ["a", "b"],
        "partitions": pack32([0, 1]),
        "counts": pack32([2, 3]),
        "base_offsets": pack64([1, 11]),
        "receive_times": pack64([5]),
        "epochs": pack64([1]),
        "entries": pack64([9]),
        "rows": b"",
        "shard": 0,
        "producer": "p",
        "term": 1,
        "number": 2,
        "codec": 0,
        "body_bytes": 200,
        "body_crc": 7,
    }
    assert tuple(values) == FIELDS
    return list((values | changes).values())


def encoded(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(fields(**changes))


def unset(**changes: Any) -> bytes:
    """The same before the broker has filled in its part."""
    empty = {"base_offsets": b"", "receive_times": b"", "epochs": b"", "entries": b""}
    return encoded(**(empty | changes))


def test_an_envelope_is_read_and_written_alike() -> None:
    for data in (encoded(), unset(), encoded(rows=pack32([4, 9])), encoded(topics=["", ""])):
        assert envelope.encode(envelope.decode(data)) == data


# Each end of every length that msgpack gives a number.
NUMBERS = [n for e in (7, 8, 16, 32) for n in (2**e - 1, 2**e)]


@given(
    st.text(st.characters(codec="utf-8"), max_size=40),
    st.integers(0, 2**31 - 1),
    st.integers(1, 2**20),
    st.sampled_from([0, *NUMBERS]) | st.integers(0, 2**63 - 1),
    st.sampled_from(NUMBERS[:-2]) | st.integers(0, BODY_BYTES_CEILING),
    st.sampled_from([0, *NUMBERS[:-1]]) | st.integers(0, 2**32 - 1),
)
def test_the_envelope_of_a_plain_batch_is_encoded_alike(
    topic: str, partition: int, count: int, shard: int, body_bytes: int, body_crc: int
) -> None:
    body_bytes = max(body_bytes, 4 * (count + 1))
    sizes: dict[str, Any] = {"shard": shard, "body_bytes": body_bytes, "body_crc": body_crc}
    head = envelope.published((topic,), (count,), partitions=(partition,), **sizes)
    assert envelope.encode_plain(topic, partition, count, **sizes) == envelope.encode(head)


@pytest.mark.parametrize("number", NUMBERS[:-1])
def test_the_envelope_of_a_plain_batch_is_encoded_alike_whatever_its_numbers_take(
    number: int,
) -> None:
    sizes: dict[str, Any] = {
        "shard": number,
        "body_bytes": min(number, BODY_BYTES_CEILING),
        "body_crc": number,
    }
    head = envelope.published(("t",), (1,), **sizes)
    assert envelope.encode_plain("t", 0, 1, **sizes) == envelope.encode(head)


def test_a_name_that_is_no_text_is_refused_in_a_plain_batch_too() -> None:
    with pytest.raises(MalformedError, match="not valid UTF-8"):
        envelope.encode_plain("\ud800", 0, 1, shard=0, body_bytes=100, body_crc=1)


def test_one_value_stands_for_all_runs() -> None:
    head = envelope.decode(encoded(counts=pack32([2, 2]), base_offsets=pack64([8, 8])))
    assert len(head.counts) == 4
    assert head.column32(head.counts) == head.vector32(head.counts).tolist() == [2, 2]
    assert head.column64(head.base_offsets) == head.vector64(head.base_offsets).tolist() == [8, 8]
    assert head.message_count == 4
    assert head.run_starts().tolist() == [0, 2, 4]
    assert head.run_rows == [0, 2]
    assert head.entry == 9


def test_rows_that_are_given_win_over_those_that_follow_from_counts() -> None:
    assert envelope.decode(encoded()).run_rows == [0, 2]
    assert envelope.decode(encoded(rows=pack32([4, 9]))).run_rows == [4, 9]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9))
def test_packed_columns_give_their_values_back(values: list[int]) -> None:
    packed = pack64(values)
    assert len(packed) == (8 if len(set(values)) == 1 else 8 * len(values))
    count = len(packed) // 8
    assert list(struct.unpack(f"<{count}q", packed)) * (len(values) // count) == values


def test_numbers_that_fit_no_column_are_refused() -> None:
    for values in ([2**31], [0, -(2**31) - 1], ["1"]):
        with pytest.raises(MalformedError, match="does not fit its column"):
            pack32(values)  # type: ignore[arg-type]
    with pytest.raises(MalformedError, match="does not fit its column"):
        pack64([2**63])


WRONG: list[tuple[str, Any]] = [
    ("version", 2),
    ("version", "1"),
    ("topics", []),
    ("topics", ["a"]),
    ("topics", ["a", 1]),
    ("topics", "ab"),
    ("topics", ["a"] * (RUNS_MAX + 1)),
    ("partitions", b""),
    ("partitions", pack32([0, 1])[:-1]),
    ("partitions", pack32([0, -1])),
    ("partitions", "text"),
    ("partitions", None),
    ("counts", pack32([1, 0])),
    ("counts", pack32([1, -1])),
    ("counts", pack32([2**31 - 1, 2**31 - 2])),
    ("counts", pack32([2**31 - 1])),
    ("counts", pack32([1, 2, 3])),
    ("base_offsets", pack64([0, 1])),
    ("base_offsets", pack64([-1])),
    ("base_offsets", pack64([OFFSET_MAX + 1])),
    ("base_offsets", pack64([1, 2**63 - 1])),
    ("base_offsets", b""),
    ("receive_times", b""),
    ("receive_times", bytes(4)),
    ("epochs", pack64([-1])),
    ("epochs", b""),
    ("entries", pack64([0])),
    ("entries", b""),
    ("rows", pack32([-1])),
    ("rows", pack32([2**31 - 1])),
    ("rows", bytes(12)),
    ("shard", -1),
    ("shard", 2**63),
    ("shard", True),
    ("shard", 1.0),
    ("producer", 5),
    ("producer", None),
    ("term", -1),
    ("term", 2**64 - 1),
    ("number", -1),
    ("number", None),
    ("codec", 3),
    ("codec", -1),
    ("body_bytes", 0),
    ("body_bytes", -5),
    ("body_bytes", 2**40),
    ("body_crc", -1),
    ("body_crc", 2**32),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_field_is_named(name: str, value: Any) -> None:
    with pytest.raises(MalformedError) as caught:
        envelope.decode(encoded(**{name: value}))
    # Too few topics show as columns that are too long for them.
    expected = "partitions" if (name, value) == ("topics", ["a"]) else name
    assert caught.value.place == f"envelope {expected}"


@pytest.mark.parametrize("name", ["partitions", "counts", "base_offsets", "epochs", "entries"])
def test_a_wrong_number_in_a_column_of_one_is_named(name: str) -> None:
    width = 4 if name in ("partitions", "counts") else 8
    one_each = {"partitions": bytes(4), "counts": pack32([1]), "base_offsets": pack64([1])}
    envelope.decode(encoded(**one_each))
    with pytest.raises(MalformedError) as caught:
        envelope.decode(encoded(**(one_each | {name: b"\xff" * width})))
    assert caught.value.place == f"envelope {name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("receive_times", pack64([1])), ("epochs", pack64([1])), ("rows", pack32([1]))],
)
def test_the_brokers_fields_are_all_there_or_none(name: str, value: bytes) -> None:
    with pytest.raises(MalformedError) as caught:
        envelope.decode(unset(**{name: value}))
    assert caught.value.place == "envelope base_offsets"


def test_bad_utf8_is_refused() -> None:
    for data in (encoded(topics=["a", "x" * 9]), encoded(producer="x" * 9)):
        for bad in (b"\xff" * 9, b"\xed\xa0\x80xxxxxx"):
            with pytest.raises(MalformedError, match="utf-8"):
                envelope.decode(data.replace(b"x" * 9, bad))


@pytest.mark.parametrize(
    "data", [b"", b"\xc0", b"\xdc", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"]
)
def test_bytes_that_are_no_envelope_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedError, match="envelope"):
        envelope.decode(data)


def test_an_envelope_cut_at_any_byte_or_with_bytes_behind_is_refused() -> None:
    data = encoded(rows=pack32([4, 9]))
    for length in range(len(data)):
        with pytest.raises(MalformedError):
            envelope.decode(data[:length])
    with pytest.raises(MalformedError):
        envelope.decode(data + b"\xc0")


def test_more_and_fewer_fields_are_refused() -> None:
    for values in (fields()[:-1], [*fields(), 0]):
        with pytest.raises(MalformedError):
            envelope.decode(msgspec.msgpack.encode(values))


def test_a_later_version_is_named_whatever_else_it_changed() -> None:
    for values in ([2, "other fields", *range(15)], [*fields(version=2), "more"]):
        with pytest.raises(MalformedError, match="2 is unknown; this Runnel reads version 1"):
            envelope.decode(msgspec.msgpack.encode(values))
