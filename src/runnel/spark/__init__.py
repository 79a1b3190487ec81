"""Runnel in Spark: `spark.read.format("runnel")` and its kin, a session that suits them, payloads as columns.

    from runnel import spark

    session = spark.session()
    readings = session.read.format("runnel").option("topics", "sensors/a").load()
    spark.json(readings, "celsius double").show()

source                        the format, as Spark finds it through the module `pyspark_runnel`
options, schema, pushdown     what may be said of a read, its columns, filters that the source applies
batch_reader, file_planning   exact ranges of topics, from a broker or from files
stream_reader, stream_offset  shards entry by entry, for as long as the query runs
ranges, connections           what a task reads, and over what
writer                        rows into topics, each once
session, java, payloads       around it
"""

from __future__ import annotations

try:
    import pyspark  # noqa: F401 - is it there?
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "runnel.spark needs pyspark: pip install 'runnel[spark]'", name=error.name
    ) from None

# At once, and not when they are asked for: the module `session` would otherwise take the function's place here.
from runnel.spark.payloads import json, text
from runnel.spark.session import session

__all__ = ["json", "session", "text"]
