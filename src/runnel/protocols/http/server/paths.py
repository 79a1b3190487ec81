"""Parses paths whose segments are names: `%2F` stays within its segment, and topics may have plain slashes.

    /v1/topics/sensors%2Fa/messages     topic sensors/a
    /v1/topics/sensors/a/messages       the same
    /v1/topics/sensors/a/messages/17    its message 17
    /v1/topics/sensors/a/messages/last  its last message
    /v1/topics/a%2Fmessages             topic a/messages, which has to be escaped

Routing sees one escaped segment for each name; handlers see the names themselves, decoded and checked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final
from urllib.parse import unquote_to_bytes

from runnel.errors import InvalidNameError
from runnel.protocols.http.encoding.problems import FieldNameFault
from runnel.topics.names import check_text

_TOPICS: Final = b"/v1/topics/"
_CURSORS: Final = b"/v1/cursors/"
_MESSAGES: Final = b"messages"
_LAST: Final = b"last"
_SHORT_BYTES_MAX: Final = 256  # longer paths are not cached


def routed_path(raw_path: bytes) -> str:
    """The path for routing, in which every name is one segment."""
    return _routed_cached(raw_path) if len(raw_path) <= _SHORT_BYTES_MAX else _routed(raw_path)


def _routed(raw_path: bytes) -> str:
    if raw_path.startswith(_TOPICS):
        raw_path = _TOPICS + _joined("topic", raw_path[len(_TOPICS) :], has_messages=True)
    elif raw_path.startswith(_CURSORS):
        raw_path = _CURSORS + _joined("name", raw_path[len(_CURSORS) :], has_messages=False)
    elif b"//" in raw_path:
        raise FieldNameFault("path", "the path has an empty segment: a name in it is empty")
    return raw_path.decode("ascii", "replace")


# Clients that poll use the same path again and again.
_routed_cached: Final = lru_cache(maxsize=1024)(_routed)


def _joined(field: str, rest: bytes, *, has_messages: bool) -> bytes:
    name, _, behind = rest.partition(b"/")
    if not behind:
        return name if not rest.endswith(b"/") or not name else name + b"%2F"
    if behind == _MESSAGES and has_messages and name:  # by far the most frequent
        return rest
    segments = rest.split(b"/")
    tail: list[bytes] = []
    if has_messages and len(segments) > 1:
        if segments[-1] == _MESSAGES:
            segments, tail = segments[:-1], segments[-1:]
        elif len(segments) > 2 and segments[-2] == _MESSAGES and _is_message(segments[-1]):
            segments, tail = segments[:-2], segments[-2:]
    if segments == [b""]:
        raise FieldNameFault(field, f"the {field} in the path is empty")
    return b"/".join((b"%2F".join(segments), *tail))


def _is_message(segment: bytes) -> bool:
    return segment.isdigit() or segment == _LAST


@lru_cache(maxsize=1024)
def decoded_name(field: str, escaped: str) -> str:
    """The name that a segment stands for."""
    if "%" not in escaped and escaped.isascii():
        name = escaped
    else:
        try:
            name = unquote_to_bytes(escaped).decode()
        except UnicodeDecodeError as error:
            raise FieldNameFault(
                field,
                f"the {field} in the path is not UTF-8, percent-encoded: {error.reason} at byte {error.start + 1}",
            ) from None
    try:
        check_text(field, name)
    except InvalidNameError as error:
        raise FieldNameFault(field, str(error)) from None
    return name
