"""Bodies that break the layout: each is refused, and the column that broke it is named."""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import MalformedError
from runnel.formats import columns, plain_bodies
from runnel.formats.table import FEW_ROWS

NAMES = (
    "event_times",
    "transmit_times",
    "payload_offsets",
    "payload_bytes",
    "key_validity",
    "key_offsets",
    "key_bytes",
    "partition_key_validity",
    "partition_key_offsets",
    "partition_key_bytes",
    "uids",
    "tag_index",
)


def i32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def i64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def padded(buffer: bytes) -> bytes:
    return buffer + bytes((3 - len(buffer)) % 8)


def body(*, header: bytes = b"\xdc\x00\x0d", tag_sets: Any = (), **changes: bytes) -> bytes:
    """A body of three rows, written by hand, with some of its buffers changed."""
    buffers = dict.fromkeys(NAMES, b"") | {
        "event_times": i64(1, 2, 3),
        "transmit_times": i64(9),
        "payload_offsets": i32(0, 1, 3, 6),
        "payload_bytes": b"abbccc",
    }
    buffers |= changes
    parts = [header]
    for name in NAMES:
        buffer = padded(buffers[name])
        parts += [b"\xc6", struct.pack(">I", len(buffer)), buffer]
    parts.append(tag_sets if isinstance(tag_sets, bytes) else msgspec.msgpack.encode(tag_sets))
    return b"".join(parts)


def refused(data: bytes, count: int = 3) -> MalformedError:
    with pytest.raises(MalformedError) as caught:
        columns.decode(data, count)
    return caught.value


def lengths_body(*lengths: int) -> bytes:
    """A body with a row for each of these lengths of payloads; a negative one goes backwards."""
    return body(
        event_times=i64(*range(len(lengths))),
        payload_offsets=i32(*accumulate(lengths, initial=0)),
        payload_bytes=bytes(sum(lengths)),
    )


KEYS = {"key_offsets": i32(0, 1, 1, 2), "key_bytes": b"kl"}
TWO_SETS = [{"a": "1"}, {"b": "2"}]


def test_a_body_written_by_hand_is_read() -> None:
    table = columns.decode(
        body(
            **KEYS,
            key_validity=bytes([0b101]) + bytes(7),
            tag_index=i32(1, 0, 1),
            tag_sets=TWO_SETS,
        ),
        3,
    )
    assert table.payloads.to_list() == [b"a", b"bb", b"ccc"]
    assert table.keys.to_optional_list(3) == [b"k", None, b"l"]
    assert table.times(table.event_times) == [1, 2, 3]
    assert table.times(table.transmit_times) == [9, 9, 9]
    assert [dict(tags) for tags in table.tags_list()] == [{"b": "2"}, {"a": "1"}, {"b": "2"}]
    assert columns.encode(table) == body(
        **KEYS, key_validity=bytes([0b101]) + bytes(7), tag_index=i32(1, 0, 1), tag_sets=TWO_SETS
    )


INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(st.binary(max_size=20), INT64), min_size=1, max_size=FEW_ROWS), INT64)
def test_plain_messages_make_the_same_body_without_columns(
    rows: list[tuple[bytes, int]], transmit_time_ns: int
) -> None:
    payloads, times = [payload for payload, _ in rows], [time for _, time in rows]
    table = columns.build(payloads, event_times_ns=times, transmit_time_ns=transmit_time_ns)
    plain = plain_bodies.encode(payloads, times, transmit_time_ns)
    assert plain == columns.encode(table)


@pytest.mark.parametrize("count", [*range(1, FEW_ROWS + 1)])
@pytest.mark.parametrize("width", [0, 1, 100, 1027])
def test_any_number_of_plain_messages_makes_the_same_body(count: int, width: int) -> None:
    payloads, times = [bytes(width)] * count, [*range(count)]
    table = columns.build(payloads, event_times_ns=times, transmit_time_ns=7)
    plain = plain_bodies.encode(payloads, times, 7)
    assert plain == columns.encode(table)


def test_one_tag_number_for_two_rows_is_read_as_two_zeros() -> None:
    data = body(
        event_times=i64(0),
        payload_offsets=i32(0, 0, 0),
        payload_bytes=b"",
        tag_index=i32(0),
        tag_sets=[{"a": "1"}],
    )
    assert [dict(tags) for tags in columns.decode(data, 2).tags_list()] == [{"a": "1"}] * 2


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"event_times": b""}, "event_times"),
        ({"event_times": i64(1, 2)}, "event_times"),
        ({"event_times": i64(1, 2, 3, 4)}, "event_times"),
        ({"transmit_times": b""}, "transmit_times"),
        ({"payload_offsets": b"", "payload_bytes": b""}, "payload_offsets"),
        ({"payload_offsets": b""}, "payload_offsets"),
        ({"payload_offsets": i32(0, 1, 3)}, "payload_offsets"),
        ({"payload_offsets": i32(0, 1, 3, 6, 6, 6)}, "payload_offsets"),
        ({"payload_offsets": i32(1, 1, 3, 6)}, "payload_offsets"),
        ({"payload_offsets": i32(-1, 1, 3, 6)}, "payload_offsets"),
        ({"payload_offsets": i32(0, 4, 3, 6)}, "payload_offsets"),
        ({"payload_offsets": i32(0, 1, 3, -6)}, "payload_offsets"),
        ({"payload_offsets": i32(0, 2**31 - 1, -(2**31), 6)}, "payload_offsets"),
        ({"payload_offsets": i32(0, 1, 3, 2**31 - 1)}, "payload_bytes"),
        ({"payload_offsets": i32(0, 1, 3, 3)}, "payload_bytes"),
        ({"payload_bytes": b""}, "payload_bytes"),
        ({"key_bytes": b"long"}, "key_offsets"),
        ({"key_validity": bytes(8)}, "key_offsets"),
        ({**KEYS, "key_offsets": i32(0, 1, 1)}, "key_offsets"),
        ({**KEYS, "key_offsets": i32(0, 1, 1, 9)}, "key_bytes"),
        ({**KEYS, "key_validity": bytes(16)}, "key_validity"),
        ({"partition_key_offsets": i32(0, 2, 1, 2)}, "partition_key_offsets"),
        ({"partition_key_bytes": b"long"}, "partition_key_offsets"),
        ({"uids": bytes(20)}, "uids"),
        ({"uids": bytes(80)}, "uids"),
        ({"tag_index": i32(0, 0, 0)}, "tag_index"),
        ({"tag_index": i32(0, 2, 0), "tag_sets": TWO_SETS}, "tag_index"),
        ({"tag_index": i32(0, -1, 0), "tag_sets": TWO_SETS}, "tag_index"),
        ({"tag_index": i32(1), "tag_sets": TWO_SETS}, "tag_index"),
        ({"tag_index": i32(0, 0, 0, 0, 0), "tag_sets": TWO_SETS}, "tag_index"),
        ({"tag_sets": TWO_SETS}, "tag_index"),
        ({"tag_index": i32(0, 0, 0), "tag_sets": [{}] * 4}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": [{"a": 1}]}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": [{1: "a"}]}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": [["a", "b"]]}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": {"a": "b"}}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": None}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": [{str(n): "" for n in range(65)}]}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": b"\x91\x81\xa1\xff\xa0"}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": b"\x91\x81\xa3\xed\xa0\x80\xa0"}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": b"\x91\x82\xa1a\xa0\xa1a\xa0"}, "tag_sets"),
        ({"tag_index": i32(0), "tag_sets": b"\x91\x82\xa1a\xa0\xd9\x01a\xa0"}, "tag_sets"),
    ],
)
def test_a_wrong_column_is_named(changes: dict[str, Any], place: str) -> None:
    assert refused(body(**changes)).place == f"body {place}"


def test_longer_string_headers_than_needed_are_allowed_in_tags() -> None:
    data = body(tag_index=i32(0), tag_sets=b"\x91\x82\xd9\x01a\xa0\xda\x00\x01b\xa0")
    assert dict(columns.decode(data, 3).tag_sets[0]) == {"a": "", "b": ""}


def test_backward_offsets_among_many_rows_are_found() -> None:
    rising = list(range(201))
    data = {"event_times": i64(0), "payload_bytes": bytes(200)}
    assert (
        len(columns.decode(body(**data, payload_offsets=i32(*rising)), 200).payloads.to_list())
        == 200
    )
    for row in (1, 100, 199):
        falling = [*rising[:row], rising[row] + 2, *rising[row + 1 :]]
        falling[row + 1] = rising[row]
        assert "backwards" in refused(body(**data, payload_offsets=i32(*falling)), 200).problem


@pytest.mark.parametrize("header", [b"\x9d", b"\xdd\x00\x00\x00\x0d"])
def test_another_array_header_is_refused(header: bytes) -> None:
    assert refused(body(header=header)).place == "body byte 0"


def test_a_shorter_buffer_header_is_refused_at_its_byte() -> None:
    data = body()
    # The second buffer stands after the array's header and the first, of 5 + 27 bytes.
    assert data[35:40] == b"\xc6\x00\x00\x00\x0b"
    for short in (b"\xc4\x0b", b"\xc5\x00\x0b"):
        error = refused(data[:35] + short + data[40:])
        assert error.place == "body byte 35"
        assert "transmit_times" in error.problem


@pytest.mark.parametrize("count", [1, 2, 4, 1_000, 2**24])
def test_another_number_of_rows_is_refused(count: int) -> None:
    refused(body(), count)


@pytest.mark.parametrize("element", range(13))
def test_an_element_of_another_type_is_refused(element: int) -> None:
    values: list[Any] = msgspec.msgpack.decode(body())
    for odd in ("text", 5, None, [b""], {"a": b""}):
        changed = [*values[:element], odd, *values[element + 1 :]]
        encoded = msgspec.msgpack.encode(changed)
        if element == 12 and odd == [b""]:
            encoded = body(tag_sets=[b""])
        refused(encoded)


@pytest.mark.parametrize("data", [b"", b"\xdc", b"\xdc\x00\x0d", b"\xc0", b"\xdc\x00\x0e", b"\x90"])
def test_bytes_that_are_no_body_are_refused(data: bytes) -> None:
    assert refused(data).place == "body"


def test_a_body_cut_at_any_byte_or_with_bytes_behind_is_refused() -> None:
    data = body(**KEYS, tag_index=i32(0), tag_sets=[{"a": "1"}])
    for length in range(len(data)):
        refused(data[:length])
    refused(data + b"\xc0")


@pytest.mark.parametrize("opener", [b"\x91", b"\x81", b"\x81\xa0"])
def test_deep_nesting_is_refused(opener: bytes) -> None:
    for head in (b"", body()[:-1]):
        refused(head + opener * 100_000)
        refused(head + opener * 100_000 + b"\xc0" * 100_001)


def test_any_byte_of_a_body_may_be_anything_without_another_error() -> None:
    data = body(**KEYS, tag_index=i32(1, 0, 1), tag_sets=TWO_SETS)
    for position in range(len(data)):
        for value in range(256):
            changed = data[:position] + bytes([value]) + data[position + 1 :]
            try:
                table = columns.decode(changed, 3)
            except MalformedError:
                continue
            assert len(table.payloads.to_list()) == 3
            assert len(list(table.tags_list())) == 3


@pytest.mark.parametrize("count", [65, 1_000, 4_096, 4_097])
def test_rows_of_one_length_are_read_whether_it_is_noticed_or_not(count: int) -> None:
    payloads = columns.decode(lengths_body(*[7] * count), count).payloads
    assert payloads.to_list() == [bytes(7)] * count
    assert payloads.width in (0, 7)


@pytest.mark.parametrize("count", [65, 66, 100])
@pytest.mark.parametrize("width", range(1, 10))
def test_rows_of_one_length_are_noticed_whatever_padding_they_need(count: int, width: int) -> None:
    table = columns.decode(lengths_body(*[width] * count), count)
    assert table.payloads.width == width
    assert list(table.each_time(table.event_times)) == list(range(count))
    assert list(table.each_time(table.transmit_times)) == [9] * count
    assert table.payloads.to_list() == [bytes(width)] * count


def test_any_byte_of_rows_of_one_length_may_be_anything_without_another_error() -> None:
    data = lengths_body(*[3] * 65)
    for position in range(len(data)):
        for value in (0, 1, 0x7F, 0x80, 0xFF, data[position] ^ 4):
            changed = data[:position] + bytes([value]) + data[position + 1 :]
            try:
                table = columns.decode(changed, 65)
            except MalformedError:
                continue
            assert len(b"".join(table.payloads.to_list())) == 3 * 65
            assert len(list(table.each_time(table.event_times))) == 65


@pytest.mark.parametrize("odd", [0, 1, 50, 98])
def test_rows_that_only_add_up_to_one_length_are_not_taken_for_such(odd: int) -> None:
    lengths = [7] * 100
    lengths[odd : odd + 2] = [6, 8]
    payloads = columns.decode(lengths_body(*lengths), 100).payloads
    assert payloads.width == 0
    assert list(map(len, payloads.to_list())) == lengths


def test_rows_without_a_byte_are_read() -> None:
    assert columns.decode(lengths_body(*[0] * 100), 100).payloads.to_list() == [b""] * 100


@pytest.mark.parametrize("odd", [0, 1, 50, 98])
def test_offsets_that_go_backwards_are_refused_though_their_ends_are_right(odd: int) -> None:
    lengths = [7] * 100
    lengths[odd : odd + 2] = [-1, 15]
    error = refused(lengths_body(*lengths), 100)
    assert "payload_offsets" in str(error)
    assert "backwards" in str(error)


def test_offsets_that_fall_all_the_way_are_refused() -> None:
    offsets = i32(*range(0, -101, -1))
    data = body(event_times=i64(*range(100)), payload_offsets=offsets, payload_bytes=b"")
    assert "backwards" in str(refused(data, 100))


def test_offsets_that_do_not_begin_with_0_are_refused_though_rows_are_of_one_length() -> None:
    offsets = i32(1, *range(7, 701, 7))
    data = body(event_times=i64(*range(100)), payload_offsets=offsets, payload_bytes=bytes(700))
    assert "begin with 0" in str(refused(data, 100))
