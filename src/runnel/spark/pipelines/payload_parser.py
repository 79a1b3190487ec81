"""Separates messages with JSON payloads from all others: rows to work with, and dead letters. No row is lost.

Nothing here makes Spark read the data, or even its columns, so it also works in the functions of Declarative Pipelines,
where that is not allowed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from runnel.formats.dead_letters import ERROR_TAG, FROM_TAG, TOPIC_TAG

VALUE: Final = "value"
_UNPARSED: Final = "__unparsed"  # the text of a payload that did not parse; null otherwise
_OPTIONS: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _UNPARSED}


class Parsed(NamedTuple):
    """Messages whose payload parsed, with a struct `value` beside their own columns; and dead letters for the rest."""

    rows: DataFrame
    letters: DataFrame


def parsed(
    messages: DataFrame, schema: StructType | str, *, dead_letter_topic: str | None = None
) -> Parsed:
    """Separate messages by whether their payload is a JSON object of this schema, which may be given as DDL text.

    Missing fields are null. A payload with a field of another type does not parse. The letters have the columns that
    `format("runnel")` writes: the message's payload, key, tags and event time, and tags that name the error and the
    message. They go to `dead_letter_topic`, if it is given.
    """
    text = f.col("payload").cast("string")
    value = f.from_json(text, _with_unparsed(schema), _OPTIONS)
    is_bad = ~f.is_valid_utf8(text) | f.col(VALUE).isNull() | f.col(VALUE)[_UNPARSED].isNotNull()
    both = messages.withColumn(VALUE, value)
    rows = both.where(~is_bad).withColumn(VALUE, f.col(VALUE).dropFields(_UNPARSED))
    letters = both.where(is_bad).select(
        f.lit(dead_letter_topic).cast("string").alias("topic"),
        f.col("payload"),
        f.col("key"),
        _letter_tags(text, schema).alias("tags"),
        f.col("event_time_ns"),
    )
    return Parsed(rows, letters)


def _with_unparsed(schema: StructType | str) -> StructType | str:
    if isinstance(schema, str):
        return f"{schema}, {_UNPARSED} string"
    return StructType([*schema.fields, StructField(_UNPARSED, StringType())])


def _letter_tags(text: Column, schema: StructType | str) -> Column:
    expected = schema if isinstance(schema, str) else schema.simpleString()
    error = (
        f.when(~f.is_valid_utf8(text), "the payload is not JSON: it is not UTF-8")
        .when(f.trim(text) == "", "the payload is empty, not JSON")
        .when(f.try_parse_json(text).isNull(), "the payload is not JSON")
        .otherwise(f"the payload is JSON, but not an object of {expected}")
    )
    place = f.format_string("%s[%d] offset %d", f.col("topic"), f.col("partition"), f.col("offset"))
    about = {ERROR_TAG: error, TOPIC_TAG: f.col("topic"), FROM_TAG: place}
    own = f.map_filter(
        f.coalesce(f.col("tags"), f.create_map().cast("map<string,string>")),
        lambda name, _: ~name.isin(*about),
    )
    pairs = [part for tag, value in about.items() for part in (f.lit(tag), value)]
    return f.map_concat(own, f.create_map(*pairs))
