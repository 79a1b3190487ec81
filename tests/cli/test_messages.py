"""Messages as they are printed: text for people, JSON for programs, raw for pipes."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.cli.render.messages import MessageFormat, as_document, escaped, printer, text_line
from runnel.formats import ksuid
from runnel.formats.message import Message

NOW_NS = 1_700_000_000 * 10**9 + 5

FULL = Message(
    "sensors/a",
    b"21.5",
    key=b"a",
    tags={"unit": "C", "ort": "Köln"},
    event_time_ns=NOW_NS,
    transmit_time_ns=NOW_NS + 1,
    receive_time_ns=NOW_NS + 2,
    partition=3,
    offset=17,
    uid=bytes(range(20)),
    partition_key=b"\xff",
)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (FULL, "sensors/a[3]@17 (key=a unit=C ort=Köln) 21.5"),
        (Message("a", b"plain", offset=1), "a[0]@1 plain"),
        (Message("a", b"", offset=1), "a[0]@1 "),
        (Message("a", b"two\nlines\ttab", offset=1), r"a[0]@1 two\nlines\ttab"),
        (Message("a", b"\x1b[31mred\x07", offset=1), r"a[0]@1 \x1b[31mred\x07"),
        (Message("a", b"caf\xe9", offset=1), r"a[0]@1 caf\xe9"),
        (Message("a", "\u009b31m\u2028\U000e0001".encode(), offset=1), r"a[0]@1 \x9b31m\u2028\U000e0001"),
        (Message("a", b"", key=b"\x00", tags={"\x1b": "\r"}, offset=1), r"a[0]@1 (key=\x00 \x1b=\r) "),
    ],
)  # fmt: skip
def test_text_is_one_line_that_steers_no_terminal(message: Message, line: str) -> None:
    assert text_line(message) == line


@given(st.text())
def test_escaped_text_can_always_be_printed(text: str) -> None:
    assert escaped(text).isprintable()


def test_json_has_every_field_and_each_time_twice() -> None:
    line = printer(MessageFormat.JSON, for_terminal=False)([FULL])
    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "topic": "sensors/a",
        "partition": 3,
        "offset": 17,
        "key": "a",
        "payload": "21.5",
        "tags": {"unit": "C", "ort": "Köln"},
        "event_time": "2023-11-14T22:13:20.000000005Z",
        "event_time_ns": NOW_NS,
        "transmit_time": "2023-11-14T22:13:20.000000006Z",
        "transmit_time_ns": NOW_NS + 1,
        "receive_time": "2023-11-14T22:13:20.000000007Z",
        "receive_time_ns": NOW_NS + 2,
        "size": 4,
        "uid": ksuid.to_text(bytes(range(20))),
        "partition_key": base64.b64encode(b"\xff").decode(),
        "partition_key_encoding": "base64",
    }


def test_json_says_when_a_payload_is_base64() -> None:
    document = as_document(Message("a", b"\xff\x00"))
    assert (document["payload"], document["payload_encoding"]) == ("/wA=", "base64")
    assert "payload_encoding" not in as_document(Message("a", b"text"))


@given(st.text())
def test_json_for_a_terminal_is_printable_and_says_the_same(text: str) -> None:
    message = Message("a", text.encode(errors="ignore"), tags={"t": "\u009b\U000e0001"})
    shown = printer(MessageFormat.JSON, for_terminal=True)([message]).decode()
    plain = printer(MessageFormat.JSON, for_terminal=False)([message]).decode()
    assert shown.removesuffix("\n").isprintable()
    assert json.loads(shown) == json.loads(plain)


def test_raw_is_the_payloads_and_newlines_alone() -> None:
    messages = [Message("a", b"\xff\x1b"), Message("b", b""), Message("c", b"x\ny")]
    assert printer(MessageFormat.RAW, for_terminal=True)(messages) == b"\xff\x1b\n\nx\ny\n"
