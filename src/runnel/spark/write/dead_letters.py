"""Makes dead letters of rows that cannot be published: what fits of the row, and tags that give the reason. Pure.

    dead.error    what is wrong with the row
    dead.topic    the row's topic, if it has one
    dead.from     where the row came from

A letter keeps the row's own tags if they fit. A payload that is too large is left out, and the error gives its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import pyarrow as pa

from runnel.formats.dead_letters import ERROR_TAG, FROM_TAG, TOPIC_TAG
from runnel.formats.table import TAGS_MAX, UID_BYTES
from runnel.spark.write.row_columns import TIME_US_MAX
from runnel.spark.write.row_faults import Limits
from runnel.topics.names import NAME_BYTES_MAX

_ERROR_CHARACTERS_MAX: Final = 1000
_TAG_BYTES_MAX: Final = 32 * 1024  # of the row's own tags
_KEY_BYTES_MAX: Final = 32 * 1024
_NS_PER_US: Final = 1000
# The most bytes of a letter beside its payload: keys, tags and the row itself.
_BESIDE_BYTES: Final = 2 * _KEY_BYTES_MAX + _TAG_BYTES_MAX + 16 * 1024

_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("payload", pa.binary()),
        ("key", pa.binary()),
        ("partition_key", pa.binary()),
        ("tags", pa.map_(pa.string(), pa.string())),
        ("event_time_ns", pa.int64()),
        ("uid", pa.binary()),
    ]
)


class RowDeadLetters(msgspec.Struct, frozen=True):
    """Makes dead letters for a topic. `origin` describes the task that writes them."""

    topic: str
    origin: str
    limits: Limits

    def letters(
        self,
        rows: pa.RecordBatch,
        reasons: Mapping[int, str],
        *,
        default_topic: str | None,
        first_row: int,
    ) -> pa.RecordBatch:
        """A letter for each row with a reason, in order. `first_row`: the first row's number in its task."""
        rejected = sorted(reasons)
        return pa.RecordBatch.from_pylist(
            [
                self._letter(row, reasons[number], default_topic, first_row + number)
                for number, row in zip(
                    rejected,
                    rows.take(pa.array(rejected)).to_pylist(maps_as_pydicts=None),
                    strict=True,
                )
            ],
            schema=_SCHEMA,
        )

    def _letter(
        self, row: Mapping[str, Any], reason: str, default_topic: str | None, number: int
    ) -> dict[str, Any]:
        tags = _kept_tags(row.get("tags")) | {
            ERROR_TAG: reason[:_ERROR_CHARACTERS_MAX],
            FROM_TAG: f"{self.origin}, row {number}",
        }
        topic = row.get("topic")
        if topic is None:
            topic = default_topic
        if topic is not None:
            tags[TOPIC_TAG] = topic[:NAME_BYTES_MAX]
        uid = row.get("uid")
        return {
            "topic": self.topic,
            "payload": self._kept_payload(row["payload"]),
            "key": _kept_key(row.get("key")),
            "partition_key": _kept_key(row.get("partition_key")),
            "tags": list(tags.items()),
            "event_time_ns": _kept_time(row),
            "uid": uid if uid is not None and len(uid) == UID_BYTES else None,
        }

    def _kept_payload(self, payload: bytes | None) -> bytes:
        room = min(self.limits.message_bytes_max, self.limits.batch_bytes_max - _BESIDE_BYTES)
        return payload if payload is not None and len(payload) <= room else b""


def _kept_tags(pairs: list[tuple[str, str | None]] | None) -> dict[str, str]:
    """The row's own tags if all fit, else none."""
    if pairs is None or len(pairs) > TAGS_MAX - len((ERROR_TAG, TOPIC_TAG, FROM_TAG)):
        return {}
    tags = {name: value for name, value in pairs if value is not None}
    size = sum(len(name.encode()) + len(value.encode()) for name, value in tags.items())
    return tags if size <= _TAG_BYTES_MAX else {}


def _kept_key(key: bytes | None) -> bytes | None:
    return key if key is not None and len(key) <= _KEY_BYTES_MAX else None


def _kept_time(row: Mapping[str, Any]) -> int | None:
    if (time_ns := row.get("event_time_ns")) is not None:
        return int(time_ns)
    micros = row.get("event_time")
    if micros is None or abs(micros) > TIME_US_MAX:
        return None
    return int(micros) * _NS_PER_US
