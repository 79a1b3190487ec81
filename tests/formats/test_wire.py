"""Heads: every one survives the wire, may be shorter or longer than ours, and rubbish is refused in one way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from runnel.errors import MalformedError
from runnel.formats import wire
from runnel.formats.frames import Frame, FrameReader
from runnel.formats.wire import Head

REQUESTS: tuple[type[Head], ...] = get_args(wire.Request)
ANSWERS: tuple[type[Head], ...] = get_args(wire.Answer)
HEADS = (*REQUESTS, *ANSWERS)

Decode = Callable[[Frame], Head]
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=6)


def tag_of(kind: type[Head]) -> str:
    return str(kind.__struct_config__.tag)


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Whatever the annotation of a field allows. Arrays come back as lists, so lists go in."""
    match kind:
        case inspect.StructType():
            fields = {field.name: values_of(field.type) for field in kind.fields}
            return st.builds(kind.cls, **fields)
        case inspect.UnionType():
            return st.one_of(*map(values_of, kind.types))
        case inspect.ListType():
            return st.lists(values_of(kind.item_type), max_size=3)
        case inspect.DictType():
            return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=3)
        case inspect.IntType(ge=None, le=None):
            return INT64
        case inspect.IntType():
            return st.integers(kind.ge, kind.le)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.StrType():
            return TEXT
        case inspect.BytesType():
            return st.binary(max_size=6)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise AssertionError(f"no strategy for {kind}")


@cache
def heads_of(kind: type[Head]) -> st.SearchStrategy[Head]:
    heads: st.SearchStrategy[Head] = values_of(inspect.type_info(kind))
    return heads


ANY_HEAD = st.sampled_from(HEADS).flatmap(heads_of)


def decoder_of(kind: type[Head]) -> Decode:
    return wire.decode_request if kind in REQUESTS else wire.decode_answer


def frame_of(head: bytes) -> Frame:
    return Frame(memoryview(head), memoryview(b""))


def elements_of(head: Head) -> list[msgspec.Raw]:
    (frame,) = FrameReader(2**20).feed(wire.encode(head))
    return msgspec.msgpack.decode(frame.head, type=list[msgspec.Raw])


def required_count(kind: type[Head]) -> int:
    """Elements that must be there, the name included."""
    return 1 + len(kind.__struct_fields__) - len(kind.__struct_defaults__)


def test_names_are_unique_and_each_head_is_of_one_side() -> None:
    assert len({tag_of(kind) for kind in HEADS}) == len(HEADS)


def test_all_heads_are_requests_or_answers() -> None:
    assert set(HEADS) == set(Head.__subclasses__())


@settings(max_examples=20)
@given(st.data())
@pytest.mark.parametrize("kind", HEADS, ids=tag_of)
def test_every_head_survives_the_wire(kind: type[Head], data: st.DataObject) -> None:
    head = data.draw(heads_of(kind))
    tail = data.draw(st.binary(max_size=9))
    (frame,) = FrameReader(2**20).feed(wire.encode(head, len(tail)) + tail)
    assert bytes(frame.tail) == tail
    assert decoder_of(kind)(frame) == head
    assert msgspec.msgpack.decode(frame.head)[0] == tag_of(kind)


@given(ANY_HEAD, st.data())
def test_fields_left_out_at_the_end_take_their_defaults(head: Head, data: st.DataObject) -> None:
    kind, elements = type(head), elements_of(head)
    kept = data.draw(st.integers(required_count(kind), len(elements)))
    read = decoder_of(kind)(frame_of(msgspec.msgpack.encode(elements[:kept])))
    present = kind.__struct_fields__[: kept - 1]
    assert read == kind(**{name: getattr(head, name) for name in present})


@given(ANY_HEAD, st.data())
def test_fields_that_must_be_there_are_missed(head: Head, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, required_count(type(head)) - 1))
    with pytest.raises(MalformedError, match="at least length"):
        decoder_of(type(head))(frame_of(msgspec.msgpack.encode(elements_of(head)[:kept])))


ANYTHING = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats() | TEXT | st.binary(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(ANY_HEAD, st.lists(ANYTHING, min_size=1, max_size=3))
def test_elements_of_a_later_version_are_passed_over(head: Head, later: list[object]) -> None:
    longer = msgspec.msgpack.encode([*elements_of(head), *later])
    assert decoder_of(type(head))(frame_of(longer)) == head


def test_elements_of_a_later_version_inside_values_are_passed_over() -> None:
    longer = ["subscribe", 1, 2, ["*"], ["resume", [["t", 0, 5, 1, "new"]], 0, [], {}], 9]
    read = wire.decode_request(frame_of(msgspec.msgpack.encode(longer)))
    start = wire.Start("resume", [wire.PartitionPlace("t", 0, 5, 1)], 0, [])
    assert read == wire.Subscribe(1, 2, ["*"], start, 9)


# --- Rubbish ---


def refused_or_understood(decode: Decode, data: bytes) -> bool:
    """Any other error than MalformedError comes out, and fails the test."""
    with suppress(MalformedError):
        return isinstance(decode(frame_of(data)), Head)
    return True


@given(st.binary(max_size=40), st.sampled_from([wire.decode_request, wire.decode_answer]))
def test_bytes_of_chance_are_refused_as_malformed(data: bytes, decode: Decode) -> None:
    assert refused_or_understood(decode, data)


@settings(max_examples=300)
@given(ANY_HEAD, st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1))
def test_heads_with_changed_bytes_are_refused_as_malformed(
    head: Head, changes: list[tuple[int, int]]
) -> None:
    encoded = bytearray(msgspec.msgpack.encode(elements_of(head)))
    for position, byte in changes:
        encoded[position % len(encoded)] = byte
    assert refused_or_understood(decoder_of(type(head)), bytes(encoded))


@given(ANY_HEAD, st.data())
def test_cut_heads_are_refused(head: Head, data: st.DataObject) -> None:
    encoded = msgspec.msgpack.encode(elements_of(head))
    with pytest.raises(MalformedError):
        decoder_of(type(head))(frame_of(encoded[: data.draw(st.integers(0, len(encoded) - 1))]))


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (["pang", 1], "Invalid value 'pang'"),
        (["ping", -1], ">= 0"),
        (["ping", 2**53 + 1], "<= 9007199254740992"),
        (["ping", "1"], "Expected `int`, got `str`"),
        (["send", 1, None, "t", "text"], "Expected `bytes`, got `str`"),
        (["fetch", 1, "t", None, None, None, None], r"at `\$\[6\]`"),
        (["publish", 1, b"stored"], r"at `\$\[2\]`"),
        ([], "at least length 1"),
        ({"head": "ping", "id": 1}, "Expected `array`"),
        (None, "Expected `array`"),
    ],
)
def test_what_is_wrong_with_a_head_is_said(head: object, problem: str) -> None:
    with pytest.raises(MalformedError, match=problem) as caught:
        wire.decode_request(frame_of(msgspec.msgpack.encode(head)))
    assert caught.value.place == "frame head"


def test_bytes_behind_a_head_are_refused() -> None:
    with pytest.raises(MalformedError, match="trailing"):
        wire.decode_request(frame_of(msgspec.msgpack.encode(["ping", 1]) + b"\xc0"))


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(MalformedError, match="utf-8"):
        wire.decode_request(frame_of(b"\x93\xa5topic\x01\xa1\xff"))


def test_heads_nested_without_end_are_refused() -> None:
    with pytest.raises(MalformedError, match="recursion"):
        wire.decode_request(frame_of(b"\x93\xa4ping\x01" + b"\x91" * 100_000 + b"\xc0"))


@pytest.mark.parametrize(
    ("decode", "head"),
    [(wire.decode_request, wire.Pong(1, 2)), (wire.decode_answer, wire.Ping(1))],
)
def test_heads_of_the_other_side_are_refused(decode: Decode, head: Head) -> None:
    (frame,) = FrameReader(100).feed(wire.encode(head))
    with pytest.raises(MalformedError, match="Invalid value"):
        decode(frame)


def test_text_without_utf8_is_not_sent() -> None:
    with pytest.raises(MalformedError, match="not valid UTF-8"):
        wire.encode(wire.DescribeTopic(1, "\ud800"))
