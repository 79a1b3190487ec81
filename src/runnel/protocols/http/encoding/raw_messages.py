"""Raw messages, written and read: the payload is the body, and headers contain everything else.

    Runnel-Key: a%2Fb          or Runnel-Key-Base64; likewise Runnel-Partition-Key
    Runnel-Tag: unit=%C2%B0C   one header per tag
    Runnel-Event-Time: 2026-01-31T12:00:00Z, or nanoseconds since 1970; likewise Runnel-Transmit-Time
    Runnel-Uid: base64

Text is UTF-8, percent-encoded, so no name or value can end its header.
"""

from __future__ import annotations

import difflib
from base64 import b64encode
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from runnel.formats.message import NO_TAGS, Message
from runnel.protocols.http.encoding.messages import bytes_of_base64, uid_of
from runnel.protocols.http.encoding.parameters import time_ns
from runnel.protocols.http.encoding.problems import FieldFault

_PREFIX: Final = b"runnel-"
# Characters that need no encoding in a header. `=` does, because it separates a tag's name from its value.
_PLAIN: Final = "!#$&'*+-.^_`|~/:@(),;? "
_KNOWN: Final = (
    "Runnel-Key",
    "Runnel-Key-Base64",
    "Runnel-Partition-Key",
    "Runnel-Partition-Key-Base64",
    "Runnel-Tag",
    "Runnel-Event-Time",
    "Runnel-Transmit-Time",
    "Runnel-Uid",
)
_SPELLED: Final = {name.lower().encode(): name for name in _KNOWN}
_BY_END: Final = {name.lower().removeprefix("runnel-"): name for name in _KNOWN}


def message_of(topic: str, payload: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Message:
    """The message of a request. Headers that begin with Runnel- and are not known are refused."""
    values: dict[str, str] = {}
    tags: dict[str, str] = {}
    for raw_name, raw_value in headers:
        if not raw_name.startswith(_PREFIX):
            continue
        name = _SPELLED.get(raw_name)
        if name is None:
            raise _unknown(raw_name)
        value = raw_value.decode("latin-1")
        if name == "Runnel-Tag":
            tag, equals, of_tag = value.partition("=")
            if not equals:
                raise FieldFault(name, f"{value[:64]!r} is not name=value")
            tags[_text(name, tag).decode()] = _text(name, of_tag).decode()
        elif name in values:
            raise FieldFault(name, "is given twice")
        else:
            values[name] = value
    if not values:
        return Message(topic, payload, tags=tags or NO_TAGS)
    return Message(
        topic,
        payload,
        _bytes(values, "Runnel-Key"),
        tags or NO_TAGS,
        _time(values, "Runnel-Event-Time"),
        _time(values, "Runnel-Transmit-Time"),
        uid=uid_of("Runnel-Uid", values["Runnel-Uid"]) if "Runnel-Uid" in values else None,
        partition_key=_bytes(values, "Runnel-Partition-Key"),
    )


def _unknown(raw_name: bytes) -> FieldFault:
    """The error for an unknown header, which suggests a similar one. The common prefix does not count as similar."""
    given = raw_name.removeprefix(_PREFIX).decode("latin-1")
    near = difflib.get_close_matches(given, _BY_END, 1)
    hint = f"did you mean {_BY_END[near[0]]!r}?" if near else f"known are {', '.join(_KNOWN)}"
    return FieldFault(raw_name.decode("latin-1"), f"is not known here; {hint}")


def headers_of(message: Message, *, epoch: int | None = None) -> list[tuple[str, str]]:
    """The headers of a message that is read: those above, its position and its receive time."""
    headers = [
        ("Runnel-Topic", _quoted(message.topic)),
        ("Runnel-Partition", str(message.partition)),
        ("Runnel-Offset", str(message.offset)),
        ("Runnel-Event-Time", str(message.event_time_ns)),
        ("Runnel-Transmit-Time", str(message.transmit_time_ns)),
        ("Runnel-Receive-Time", str(message.receive_time_ns)),
    ]
    if epoch is not None:
        headers.append(("Runnel-Epoch", str(epoch)))
    if message.key is not None:
        headers.append(_key_header("Runnel-Key", message.key))
    if message.partition_key is not None and message.partition_key != message.key:
        headers.append(_key_header("Runnel-Partition-Key", message.partition_key))
    if message.uid is not None:
        headers.append(("Runnel-Uid", b64encode(message.uid).decode()))
    headers += [
        ("Runnel-Tag", f"{_quoted(name)}={_quoted(value)}") for name, value in message.tags.items()
    ]
    return headers


def _key_header(name: str, key: bytes) -> tuple[str, str]:
    try:
        return (name, _quoted(key.decode()))
    except UnicodeDecodeError:
        return (f"{name}-Base64", b64encode(key).decode())


def _quoted(text: str) -> str:
    quoted = quote(text, safe=_PLAIN)
    # HTTP removes blanks at either end of a header's value.
    if quoted.startswith(" ") or quoted.endswith(" "):
        quoted = quote(text, safe=_PLAIN.replace(" ", ""))
    return quoted


def _text(name: str, value: str) -> bytes:
    data = unquote_to_bytes(value)
    try:
        data.decode()
    except UnicodeDecodeError:
        raise FieldFault(name, f"{value[:64]!r} is not UTF-8, percent-encoded") from None
    return data


def _bytes(values: dict[str, str], name: str) -> bytes | None:
    text, base64 = values.get(name), values.get(f"{name}-Base64")
    if base64 is None:
        return None if text is None else _text(name, text)
    if text is not None:
        raise FieldFault(name, f"{name} and {name}-Base64 are given; one of them is enough")
    return bytes_of_base64(f"{name}-Base64", base64)


def _time(values: dict[str, str], name: str) -> int:
    given = values.get(name)
    return 0 if given is None else time_ns(name, given)
