"""Messages as text lines for people, as JSON lines for programs, or as bare payloads."""

from __future__ import annotations

import base64
import enum
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from runnel.cli.render.times import format_time
from runnel.formats import ksuid
from runnel.formats.message import Message


class MessageFormat(enum.StrEnum):
    """The formats of a message on standard output."""

    TEXT = "text"
    JSON = "json"
    RAW = "raw"


Printer: TypeAlias = Callable[[Iterable[Message]], bytes]

_encoder = msgspec.json.Encoder()


def printer(form: MessageFormat, *, for_terminal: bool) -> Printer:
    """Return the function that turns messages into bytes to print. Raw payloads are not escaped."""
    match form:
        case MessageFormat.TEXT:
            return _text_lines
        case MessageFormat.RAW:
            return _raw_lines
        case MessageFormat.JSON:
            return _json_lines_for_terminal if for_terminal else json_lines


# --- Text ---


def _text_lines(messages: Iterable[Message]) -> bytes:
    return "".join(text_line(message) + "\n" for message in messages).encode()


def text_line(message: Message) -> str:
    """`sensors/a[0]@17 (key=a unit=C) 21.5`, on one line and without control characters."""
    labels = [] if message.key is None else [f"key={text_of(message.key)}"]
    labels += [f"{escaped(name)}={escaped(value)}" for name, value in message.tags.items()]
    noted = f" ({' '.join(labels)})" if labels else ""
    where = f"{escaped(message.topic)}[{message.partition}]@{message.offset}"
    return f"{where}{noted} {text_of(message.payload)}"


def text_of(data: bytes) -> str:
    r"""Decode bytes; a byte that is not UTF-8 becomes `\xff`."""
    return escaped(data.decode(errors="backslashreplace"))


def escaped(text: str) -> str:
    r"""Replace characters that cannot be printed by `\n`, `\x1b` or `\u2028`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


# --- Raw ---


def _raw_lines(messages: Iterable[Message]) -> bytes:
    buffer = io.BytesIO()
    for message in messages:
        buffer.write(message.payload)
        buffer.write(b"\n")
    return buffer.getvalue()


# --- JSON ---


def json_lines(messages: Iterable[Message]) -> bytes:
    """One JSON object per line, with every field of the message."""
    buffer = io.BytesIO()
    for message in messages:
        buffer.write(_encoder.encode(as_document(message)))
        buffer.write(b"\n")
    return buffer.getvalue()


def as_document(message: Message) -> Mapping[str, Any]:
    """All fields of a message.

    `payload`, `key` and `partition_key` are text if their bytes are UTF-8. Otherwise they are base64, and a field
    such as `payload_encoding` says so. Each time is there twice: as text and as nanoseconds.
    """
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        **_as_text("key", message.key),
        **_as_text("payload", message.payload),
        "tags": dict(message.tags),
        "event_time": format_time(message.event_time_ns),
        "event_time_ns": message.event_time_ns,
        "transmit_time": format_time(message.transmit_time_ns),
        "transmit_time_ns": message.transmit_time_ns,
        "receive_time": format_time(message.receive_time_ns),
        "receive_time_ns": message.receive_time_ns,
        "size": message.size,
        "uid": None if message.uid is None else ksuid.to_text(message.uid),
        **_as_text("partition_key", message.partition_key),
    }


def _as_text(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: base64.b64encode(data).decode(), f"{name}_encoding": "base64"}


def _json_lines_for_terminal(messages: Iterable[Message]) -> bytes:
    lines = json_lines(messages).decode().split("\n")
    return "\n".join(map(_json_printable, lines)).encode()


def _json_printable(line: str) -> str:
    """Escape characters that control a terminal, beyond those below U+0020 that JSON escapes. The JSON stays equal."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else _json_escape(char) for char in line)


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
