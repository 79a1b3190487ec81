"""Decodes payloads into a column `value` beside the message's own columns.

Avro and protobuf need jars that PySpark does not bring (spark-avro, spark-protobuf). With them on the session, Spark's
own `from_avro` and `from_protobuf` take the column payload as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, MapType, StructType
from pyspark.sql.utils import is_remote

from runnel.errors import ClientFault

_PAYLOAD: Final = "payload"


def text(df: DataFrame, *, into: str = "value") -> DataFrame:
    """The payload as text. Bytes that are not UTF-8 become U+FFFD."""
    return df.withColumn(into, _text(df))


def json(
    df: DataFrame,
    schema: StructType | ArrayType | MapType | str,
    *,
    into: str = "value",
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The payload parsed as JSON: a struct (or array, or map) of this schema, which may be given as DDL text.

    A payload that cannot be parsed becomes null, or ends the query with `options={"mode": "FAILFAST"}`. If the schema
    has a field `_corrupt_record string`, that field keeps it. `options`: the options of Spark's `from_json`.
    """
    # Spark Connect refuses empty options.
    return df.withColumn(into, f.from_json(_text(df), schema, dict(options) if options else None))


def _text(df: DataFrame) -> Column:
    # With Spark Connect, `df.columns` is a request, which functions of Declarative Pipelines must not make.
    if not is_remote() and _PAYLOAD not in df.columns:
        raise ClientFault(
            f"there is no column {_PAYLOAD} to take apart, only {', '.join(df.columns)}: call this before selecting"
        )
    return f.make_valid_utf8(f.col(_PAYLOAD).cast("string"))
