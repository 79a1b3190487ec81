"""Converts the rows of a query to messages, by the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from runnel.errors import ClientFault
from runnel.spark.pipelines.statement import quoted

_PAYLOAD: Final = "payload"
_TOPIC: Final = "topic"
_EVENT_TIME: Final = "event_time"
_EVENT_TIME_NS: Final = "event_time_ns"
# The columns that a query may set beside the payload, with their types.
_BYTES: Final = (StringType, BinaryType)
_OWN: Final[Mapping[str, tuple[tuple[type[DataType], ...], str]]] = {
    "key": (_BYTES, "string or binary"),
    "partition_key": (_BYTES, "string or binary"),
    "tags": ((MapType,), "map<string,string>"),
    _EVENT_TIME: ((TimestampType,), "timestamp"),
    _EVENT_TIME_NS: ((LongType,), "bigint"),
    "uid": ((BinaryType,), "binary"),
}
# Columns of a message that was read. The broker sets them again for each message.
_OF_BROKER: Final = frozenset(
    (
        "partition",
        "offset",
        "transmit_time",
        "receive_time",
        "transmit_time_ns",
        "receive_time_ns",
        "size",
    )
)


def messages(rows: DataFrame, *, has_topic: bool) -> DataFrame:
    """The rows with the columns that format `runnel` writes.

    Rows with a column payload are messages already. Otherwise the payload becomes a JSON object of all columns except
    those of a message itself: key, partition_key, tags, event_time (or event_time_ns) and uid. `has_topic`: all rows go
    to one topic, and a column topic is an ordinary column; otherwise the rows must have a column topic.
    """
    schema = rows.schema
    names = schema.fieldNames()
    _check_once(names)
    if not has_topic and _TOPIC not in names:
        raise ClientFault(
            f"the rows have no column topic, only {', '.join(names)}: say into topic:NAME, or select one"
        )
    own = [name for name in _OWN if name in names]
    if _EVENT_TIME in own and _EVENT_TIME_NS in own:
        own.remove(_EVENT_TIME)  # event_time_ns is more precise
    columns = [_own(schema, name) for name in own]
    if not has_topic:
        columns.append(f.col(_TOPIC).cast("string").alias(_TOPIC))
    rest = [name for name in names if name not in _OWN and (has_topic or name != _TOPIC)]
    if _PAYLOAD in names:
        return rows.select(_whole_payload(schema, rest), *columns)
    if not rest:
        raise ClientFault(
            f"the rows have nothing for a payload: {', '.join(own)} are a message's own. Select more than these"
        )
    return rows.select(_json_payload(rest), *columns)


def _check_once(names: list[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ClientFault(
            f"columns {', '.join(twice)} come more than once: give them names with AS"
        )


def _own(schema: StructType, name: str) -> Column:
    kind = schema[name].dataType
    kinds, right = _OWN[name]
    if kinds is _BYTES:  # other types, as numbers and dates, become text
        own = f.col(name) if isinstance(kind, kinds) else f.col(name).cast("string")
        return own.cast("binary").alias(name)
    if not isinstance(kind, kinds):
        raise ClientFault(
            f"column {name} is {kind.simpleString()}, but that of a message is {right}: give it another name with AS, "
            "and it becomes part of the payload"
        )
    return f.col(name).cast("map<string,string>").alias(name) if name == "tags" else f.col(name)


def _whole_payload(schema: StructType, rest: list[str]) -> Column:
    others = [name for name in rest if name not in _OF_BROKER and name not in (_PAYLOAD, _TOPIC)]
    if others:
        raise ClientFault(
            f"the rows have a column payload, so {', '.join(others)} would be lost: leave payload out, and all columns "
            "become a JSON object; or select payload and what a message has beside it"
        )
    kind = schema[_PAYLOAD].dataType
    if not isinstance(kind, (StringType, BinaryType)):
        raise ClientFault(f"column payload is {kind.simpleString()}: it must be string or binary")
    return f.col(_PAYLOAD).cast("binary").alias(_PAYLOAD)


def _json_payload(names: list[str]) -> Column:
    # Null fields are included, so that every message has the same fields.
    whole = f.to_json(
        f.struct(*[f.col(quoted(name)) for name in names]), {"ignoreNullFields": "false"}
    )
    return whole.cast("binary").alias(_PAYLOAD)
