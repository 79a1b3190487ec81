"""Runnel in Spark: `spark.read.format("runnel")` and its kin, a session that suits them, payloads as columns.

    from runnel import spark

    session = spark.session()
    readings = session.read.format("runnel").option("topics", "sensors/a").load()
    spark.json(readings, "celsius double").show()

source       the format `runnel`, as Spark finds it through the module `pyspark_runnel`
options      the options of a read or a write
read         batches and streams of messages, from a broker or from files
write        rows into topics, each once
runtime      the session, and the Java and Python that it runs on
payloads     payloads as columns
connections  the connections of a Python process of Spark
pipelines    archive, replay, statistics and transforms, made of these
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

try:
    import pyspark  # noqa: F401 - is it there?
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "runnel.spark needs pyspark: pip install '.[spark]'", name=error.name
    ) from None

# At once, and not when they are asked for: the module `session` would otherwise take the function's place here.
from runnel.spark.payloads import json, text
from runnel.spark.runtime.session import session

if TYPE_CHECKING:
    from runnel.spark.pipelines.archive.compaction import compact
    from runnel.spark.pipelines.archive.job import archive
    from runnel.spark.pipelines.archive.reader import read_archive
    from runnel.spark.pipelines.archive.status import archive_status
    from runnel.spark.pipelines.payload_parser import Parsed, parsed
    from runnel.spark.pipelines.project import init_project, run_project
    from runnel.spark.pipelines.replay.job import replay
    from runnel.spark.pipelines.sql import sql
    from runnel.spark.pipelines.stats.history import stats_history, write_stats
    from runnel.spark.pipelines.stats.job import stats
    from runnel.spark.pipelines.stats.windows import stats_of

__all__ = [
    "Parsed",
    "archive",
    "archive_status",
    "compact",
    "init_project",
    "json",
    "parsed",
    "pipelines",
    "read_archive",
    "replay",
    "run_project",
    "runtime",
    "session",
    "sql",
    "stats",
    "stats_history",
    "stats_of",
    "text",
    "write_stats",
]

# Pipelines are imported when they are asked for: workers need none of them, nor the libraries behind them.
_PIPELINES: Final = {
    "Parsed": "payload_parser",
    "archive": "archive.job",
    "archive_status": "archive.status",
    "compact": "archive.compaction",
    "init_project": "project",
    "parsed": "payload_parser",
    "read_archive": "archive.reader",
    "replay": "replay.job",
    "run_project": "project",
    "sql": "sql",
    "stats": "stats.job",
    "stats_history": "stats.history",
    "stats_of": "stats.windows",
    "write_stats": "stats.history",
}


def __getattr__(name: str) -> Any:
    if name not in _PIPELINES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.pipelines.{_PIPELINES[name]}"), name)
    globals()[name] = found
    return found
