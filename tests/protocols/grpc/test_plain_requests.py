"""Requests whose messages have only payloads: how the listener recognises, joins and answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from runnel.broker.broker import Level, Published
from runnel.protocols.grpc.encoding.fields import field, field_bytes, varint
from runnel.protocols.grpc.encoding.plain import (
    OtherRequest,
    PlainRequest,
    _has_only_payloads,
    answers_to,
    columns_of,
    even_in,
    joinable,
    plain_of,
)
from runnel.protocols.grpc.generated import runnel_pb2 as pb

PAYLOADS = st.one_of(st.binary(max_size=3), st.sampled_from([127, 128, 16_383, 16_384]).map(bytes))
# Each of them is a field that is set, if only to what it would be anyway.
EXTRAS = st.sampled_from(
    [
        {},
        {"key": b""},
        {"partition_key": b""},
        {"partition": 0},
        {"topic": "b"},
        {"tags": {"": ""}},
        {"event_time_ns": 1},
        {"transmit_time_ns": 1},
        {"uid": b""},
    ]
)
IDS = st.integers(0, 2**64 - 1)
TOPICS = st.sampled_from(["", "a", "a/b" * 50, "ä\x1a\x1a\x1a"])
LEVELS = st.sampled_from([pb.LEVEL_UNSPECIFIED, pb.LEVEL_NONE, pb.LEVEL_STORED])
MESSAGES = st.lists(st.tuples(PAYLOADS, EXTRAS), min_size=1, max_size=6)
# The lengths are of one byte or two where they are written.
EVEN = st.sampled_from([1, 2, 100, 123, 124, 125, 126, 127, 128, 300]).flatmap(
    lambda width: st.lists(st.binary(min_size=width, max_size=width), min_size=2, max_size=5)
)


def request_of(
    messages: Sequence[tuple[bytes, dict[str, Any]]], number: int, topic: str, level: pb.Level
) -> pb.PublishRequest:
    made = [pb.Message(payload=payload, **extras) for payload, extras in messages]
    return pb.PublishRequest(id=number, topic=topic, level=level, messages=made)


def plain_request(*payloads: bytes, topic: str = "a", number: int = 1) -> PlainRequest:
    return PlainRequest(number, None, topic, 100, len(payloads), rows=payloads)


def assert_as_parsed(found: PlainRequest, data: bytes) -> None:
    parsed = pb.PublishRequest.FromString(data)
    level = {None: pb.LEVEL_UNSPECIFIED, Level.NONE: pb.LEVEL_NONE, Level.STORED: pb.LEVEL_STORED}
    level[Level.RECEIVED] = pb.LEVEL_RECEIVED
    again = pb.PublishRequest(
        id=found.id,
        topic=found.topic,
        level=level[found.level],
        messages=[pb.Message(payload=payload) for payload in found.payloads()],
    )
    assert again == parsed
    assert (found.messages, found.size) == (len(parsed.messages), len(data))


@given(MESSAGES, IDS, TOPICS, LEVELS)
def test_plain_messages_are_those_without_any_other_field(
    messages: list[tuple[bytes, dict[str, Any]]], number: int, topic: str, level: pb.Level
) -> None:
    request = request_of(messages, number, topic, level)
    received = pb.PublishRequest.FromString(request.SerializeToString())
    are_plain = not any(extras for _, extras in messages)
    assert _has_only_payloads(received, [payload for payload, _ in messages]) is are_plain
    plain = plain_of(received, received.ByteSize())
    assert (plain is not None) is (are_plain and len(messages) > 1)
    if plain is not None:
        assert_as_parsed(plain, request.SerializeToString())


@given(EVEN, IDS, TOPICS, LEVELS)
def test_payloads_of_one_length_are_found_without_parsing(
    payloads: list[bytes], number: int, topic: str, level: pb.Level
) -> None:
    data = request_of([(each, {}) for each in payloads], number, topic, level).SerializeToString()
    found = even_in(data)
    assert (found is not None) is bool(topic)
    if found is not None:
        assert_as_parsed(found, data)


@given(MESSAGES, IDS, TOPICS, LEVELS)
def test_whatever_is_found_without_parsing_is_what_the_parser_finds(
    messages: list[tuple[bytes, dict[str, Any]]], number: int, topic: str, level: pb.Level
) -> None:
    data = request_of(messages, number, topic, level).SerializeToString()
    if (found := even_in(data)) is not None:
        assert_as_parsed(found, data)


@given(EVEN, st.data())
def test_a_changed_or_cut_request_is_found_only_as_the_parser_finds_it(
    payloads: list[bytes], choices: st.DataObject
) -> None:
    request = request_of([(each, {}) for each in payloads], 300, "a", pb.LEVEL_STORED)
    data = bytearray(request.SerializeToString())
    place = choices.draw(st.integers(0, len(data) - 1))
    data[place] = choices.draw(st.integers(0, 255))
    for damaged in (bytes(data), bytes(data[:place]), bytes(data) + bytes(data[:place])):
        if (found := even_in(damaged)) is not None:
            assert_as_parsed(found, damaged)  # it would raise DecodeError if there were nothing


def test_a_level_that_there_is_none_of_is_left_to_the_parser() -> None:
    request = pb.PublishRequest(topic="a", messages=[pb.Message(payload=b"1")] * 2)
    data = b"\x10\x07" + request.SerializeToString()
    assert even_in(data) is None
    assert plain_of(pb.PublishRequest.FromString(data), len(data)) is None


def test_neighbours_of_one_topic_and_level_are_joined_in_their_order() -> None:
    first, second, third = (plain_request(b"1", b"2", number=number) for number in (1, 2, 3))
    elsewhere = plain_request(b"1", b"2", topic="b")
    unanswered = first._replace(level=Level.NONE)
    other = OtherRequest(pb.PublishRequest(), 5)
    assert list(joinable([first, second, third])) == [[first, second, third]]
    assert list(joinable([first, elsewhere, second])) == [[first], [elsewhere], [second]]
    assert list(joinable([first, unanswered])) == [[first], [unanswered]]
    assert list(joinable([first, second, other, third])) == [[first, second], other, [third]]
    assert list(joinable([])) == []


def test_only_so_much_is_joined() -> None:
    large = plain_request(b"1", b"2")._replace(size=2**17)
    assert [len(each) for each in joinable([large] * 5)] == [2, 2, 1]
    many = plain_request(b"1", b"2")._replace(messages=1500)
    assert [len(each) for each in joinable([many] * 5)] == [2, 2, 1]
    huge = plain_request(b"1", b"2")._replace(size=2**20, messages=50_000)
    assert [len(each) for each in joinable([huge] * 2)] == [1, 1]


@pytest.mark.parametrize("widths", [(3, 3), (3, 2), (3, 0), (0, 0)])
def test_the_columns_of_joined_requests_have_all_their_payloads(widths: Sequence[int]) -> None:
    requests, expected = [], []
    for number, width in enumerate(widths):
        payloads = [bytes([48 + number, row])[: width or row].ljust(width) for row in range(3)]
        expected += payloads
        if width:
            even = PlainRequest(1, None, "a", 9, 3, data=b"".join(payloads), width=width)
            requests.append(even)
        else:
            requests.append(plain_request(*payloads))
    table = columns_of(requests)
    assert (table.count, table.payloads.to_list()) == (len(expected), expected)


@pytest.mark.parametrize("base", [1, 2**40, 0])
def test_each_joined_request_is_told_its_own_offsets(base: int) -> None:
    published = Published([base], 7, 8, 9, Level.RECEIVED, receivers=None if base else 0)
    requests = [plain_request(b"1", b"2", number=300), plain_request(b"3", b"4", b"5", number=301)]
    first, second = map(pb.PublishResponse.FromString, answers_to(requests, published, 3))
    told: dict[str, Any] = {
        "level": pb.LEVEL_RECEIVED,
        "receive_time_ns": 9,
        "entry": 7,
        "epoch": 8,
    }
    if not base:
        told["receivers"] = 0
    offsets = list(range(base, base + 5)) if base else [0] * 5
    assert first == pb.PublishResponse(id=300, offsets=offsets[:2], partitions=(3, 3), **told)
    assert second == pb.PublishResponse(id=301, offsets=offsets[2:], partitions=(3, 3, 3), **told)


@given(st.binary(max_size=300))
def test_a_field_is_as_long_as_it_is_said_to_be_and_is_read_again(value: bytes) -> None:
    written = field(0x0A, value)
    assert len(written) == field_bytes(len(value))
    length, begin = varint(written, 1)
    assert written[begin:] == value
    assert length == len(value)


def test_a_number_has_ten_bytes_at_most() -> None:
    assert varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
    for endless in (b"", b"\x80", b"\x80" * 11, b"\x80" * 10 + b"\x00"):
        with pytest.raises(IndexError):
            varint(endless, 0)
    with pytest.raises(DecodeError):
        pb.PublishRequest.FromString(b"\x08" + b"\x80" * 10 + b"\x00")
