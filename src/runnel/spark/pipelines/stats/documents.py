"""Makes messages of figures: a JSON document for each window, topic and chosen tags, and its topic. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
import xxhash

from runnel.errors import ClientFault
from runnel.topics.names import NAME_BYTES_MAX, STATS_PREFIX, check_topic

DEFAULT_PREFIX: Final = STATS_PREFIX.rstrip("/")

_NS_PER_US: Final = 1000
_TIMES: Final = ("window_start", "window_end")
_LATENCY: Final = ("p50", "p90", "p99", "max")
# A topic name that would be too long is cut, and ends with a digest of this length.
_DIGEST_CHARS: Final = 16
_PREFIX_BYTES_MAX: Final = 100
# Characters of tags that have a meaning in the topic's name, or that no name may contain.
_QUOTED: Final = re.compile("[%,={}\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Figure(msgspec.Struct, frozen=True):
    """A message to publish. Its event time is the end of the window."""

    topic: str
    payload: bytes
    key: bytes
    tags: Mapping[str, str]
    event_time_ns: int


def check_prefix(prefix: str) -> None:
    """ClientFault unless topics can begin with this prefix and have room for the rest of their names."""
    check_topic(prefix)
    if prefix.endswith("/") or len(prefix.encode()) > _PREFIX_BYTES_MAX:
        raise ClientFault(
            f"figures cannot be published below {prefix!r}: it must not end with /, and have at most "
            f"{_PREFIX_BYTES_MAX} bytes"
        )


def figures_of(rows: pa.Table, prefix: str) -> Iterator[Figure]:
    """A message for each row, in the order of the rows."""
    for name in _TIMES:
        rows = rows.set_column(rows.schema.get_field_index(name), name, rows[name].cast(pa.int64()))
    for batch in rows.to_batches(max_chunksize=1000):
        for row in batch.to_pylist():
            tags = {name: value for name, value in row["tags"] if value is not None}
            end_ns = row["window_end"] * _NS_PER_US
            yield Figure(
                topic_of(prefix, row["topic"], tags),
                msgspec.json.encode(document(row)),
                row["topic"].encode(),
                tags,
                end_ns,
            )


def document(row: Mapping[str, Any]) -> dict[str, Any]:
    """The document for a row, whose times are microseconds since 1970."""
    return {
        "window_start_ns": row["window_start"] * _NS_PER_US,
        "window_end_ns": row["window_end"] * _NS_PER_US,
        "topic": row["topic"],
        "tags": dict(row["tags"]),
        "messages": row["messages"],
        "bytes": row["bytes"],
        "size": _summary(row, "size", ("min", "avg", "max", "p50", "p90", "p99")),
        "event_to_transmit_ns": _summary(row, "event_to_transmit", _LATENCY, "_ns"),
        "transmit_to_receive_ns": _summary(row, "transmit_to_receive", _LATENCY, "_ns"),
        "ahead_messages": row["ahead_messages"],
        "late_messages": row["late_messages"],
        "late_bytes": row["late_bytes"],
        "late_max_ns": row["late_max_ns"],
    }


def _summary(
    row: Mapping[str, Any], name: str, parts: tuple[str, ...], unit: str = ""
) -> dict[str, Any]:
    return {part: row[f"{name}_{part}{unit}"] for part in parts}


def topic_of(prefix: str, topic: str, tags: Mapping[str, str]) -> str:
    """The topic of a figure, as `!system/stats/main/sensors/a{unit=C}`: each topic and set of tags has a last value.

    Some characters of tags are percent-encoded.
    """
    named = ",".join(f"{_quoted(name)}={_quoted(value)}" for name, value in tags.items())
    whole = f"{prefix}/{topic}" + (f"{{{named}}}" if named else "")
    encoded = whole.encode()
    if len(encoded) <= NAME_BYTES_MAX:
        return whole
    digest = xxhash.xxh3_64_hexdigest(encoded)
    room = NAME_BYTES_MAX - _DIGEST_CHARS - 1
    return f"{encoded[:room].decode(errors='ignore')}~{digest}"


def _quoted(text: str) -> str:
    return _QUOTED.sub(lambda found: quote(found[0]), text)
