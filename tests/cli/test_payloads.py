"""Payloads from lines: they do not depend on how the input is split."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.cli import payloads
from runnel.cli.payloads import LineSplitter, Payloads, Read
from runnel.errors import LimitExceededError


def pieces(parts: Iterable[bytes]) -> Read:
    rest = iter(parts)

    async def read() -> bytes:
        return next(rest, b"")

    return read


def gathered(source: Payloads) -> list[bytes]:
    async def gather() -> list[bytes]:
        return [payload async for some in source for payload in some]

    return asyncio.run(gather())


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"\n", [b""]),
        (b"a\n\nb\n", [b"a", b"", b"b"]),
        (b"a\r\n", [b"a\r"]),
        (b"\xff\x00\n", [b"\xff\x00"]),
    ],
)
def test_each_line_is_a_payload_wherever_the_input_is_split(
    text: bytes, lines: list[bytes]
) -> None:
    for at in range(len(text) + 1):
        parts = [part for part in (text[:at], text[at:]) if part]
        assert gathered(payloads.of_lines(pieces(parts))) == lines


@given(st.lists(st.binary(min_size=1, max_size=8).map(lambda data: data.replace(b"x", b"\n"))))
def test_splitting_is_that_of_the_whole(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    expected = whole.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert gathered(payloads.of_lines(pieces(parts))) == expected


def test_endless_line_is_refused_by_its_number_before_memory_fills() -> None:
    splitter = LineSplitter(line_bytes_max=10)
    assert splitter.feed(b"first\nsecond\n0123456789") == [b"first", b"second"]
    with pytest.raises(LimitExceededError, match="line 3 is longer than 10 bytes"):
        splitter.feed(b"x")


def test_whole_input_is_one_payload_even_an_empty_one() -> None:
    assert gathered(payloads.of_whole(pieces([b"a\n", b"b\n"]), "standard input")) == [b"a\nb\n"]
    assert gathered(payloads.of_whole(pieces([]), "standard input")) == [b""]


def test_whole_input_beyond_the_ceiling_is_refused() -> None:
    endless = (bytes(2**20) for _ in range(100))
    with pytest.raises(LimitExceededError, match="standard input is longer than 67108864 bytes"):
        gathered(payloads.of_whole(pieces(endless), "standard input"))


def test_arguments_keep_their_bytes() -> None:
    assert gathered(payloads.of_arguments(["ü", "\udcff"])) == ["ü".encode(), b"\xff"]
