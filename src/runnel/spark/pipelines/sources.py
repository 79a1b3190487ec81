"""Makes views for the topics that a statement names, for as long as the statement needs them."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Final

import msgspec
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from runnel.client import connect_blocking
from runnel.errors import ClientFault
from runnel.spark.options import literal
from runnel.spark.payloads import json
from runnel.spark.pipelines.payload_parser import VALUE, parsed
from runnel.spark.pipelines.statement import (
    explained,
    name_parts,
    quoted,
    streamed_names,
)
from runnel.spark.pipelines.streaming_query import OBSERVATION
from runnel.topics.patterns import Pattern

_NOT_FOUND: Final = "TABLE_OR_VIEW_NOT_FOUND"
_NAMES_TOLD_MAX: Final = 10

# Views belong to the session, and several statements may be prepared in one.
_views_lock = threading.Lock()


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the topics of a statement are read."""

    url: str
    token: str | None = None
    patterns: Mapping[str, str] = {}  # by name in the statement
    schemas: Mapping[str, str] = {}  # of JSON payloads, by name in the statement
    start: str = "earliest"
    cursor: str | None = None  # prefix of the cursors of streams on the broker; None: no cursors
    dead_letter_topic: str | None = None
    options: Mapping[str, str] = {}

    def check(self) -> None:
        for name, pattern in self.patterns.items():
            try:
                Pattern(pattern)
            except ClientFault as error:
                raise ClientFault(f"source {name}={pattern!r}: {error}") from None


class ResolvedStatement(msgspec.Struct, frozen=True):
    """A statement that Spark has resolved."""

    rows: DataFrame
    letters: DataFrame | None  # dead letters for messages whose payload did not parse
    is_stream: bool
    streamed_patterns: tuple[str, ...]


@contextmanager
def resolved_statement(
    spark: SparkSession, statement: str, reading: SourceOptions
) -> Iterator[ResolvedStatement]:
    """The result of a statement. Its views exist until the `with` ends: a Connect server resolves them again."""
    reading.check()
    views = _Views(spark, statement, reading)
    with _views_lock:
        try:
            yield views.understand()
        finally:
            views.drop()


class _Views:
    """The temporary views of one statement."""

    def __init__(self, spark: SparkSession, statement: str, reading: SourceOptions) -> None:
        self._spark = spark
        self._statement = statement
        self._reading = reading
        self._streamed = streamed_names(statement)
        self._made: dict[str, str] = {}  # the pattern of each view
        self._letters: list[DataFrame] = []

    def understand(self) -> ResolvedStatement:
        for name in self._reading.patterns:
            self._make(name)
        rows, is_stream = self._resolved()
        if unused := sorted(self._reading.schemas.keys() - self._made.keys()):
            raise ClientFault(
                f"a schema is given for {', '.join(unused)}, which the statement does not read"
            )
        letters = (
            reduce(lambda some, more: some.unionByName(more), self._letters)
            if self._letters
            else None
        )
        patterns = tuple(self._made[name] for name in self._streamed if name in self._made)
        return ResolvedStatement(rows, letters, is_stream, patterns)

    def _resolved(self) -> tuple[DataFrame, bool]:
        """The statement's rows. Makes a view for each name that Spark does not know, until Spark knows all."""
        while True:
            try:
                rows = self._spark.sql(self._statement)
                return rows, rows.isStreaming
            except PySparkException as error:
                missing = self._missing_name(error)
                if missing is None or missing in self._made:
                    raise ClientFault(explained(self._statement, str(error))) from None
            self._make(missing)

    def drop(self) -> None:
        for name in self._made:
            self._spark.catalog.dropTempView(name)

    def _missing_name(self, error: PySparkException) -> str | None:
        if not isinstance(error, AnalysisException) or error.getCondition() != _NOT_FOUND:
            return None
        parts = name_parts((error.getMessageParameters() or {}).get("relationName", ""))
        if len(parts) > 1:
            raise ClientFault(
                f"{explained(self._statement, str(error))}\nIf it is a topic, put its name in backticks: "
                f"{quoted('.'.join(parts))}"
            )
        return parts[0] if parts else None

    # --- One view ---

    def _make(self, name: str) -> None:
        pattern = self._reading.patterns.get(name)
        if pattern is None:
            pattern = self._pattern_of_topic(name)
        rows = self._read(name, pattern)
        schema = self._reading.schemas.get(name)
        if schema is not None:
            rows = self._parsed(name, rows, schema)
        elif self._reading.schemas:
            rows = self._counted(name, rows)
        if self._spark.catalog.tableExists(quoted(name)):
            raise ClientFault(
                f"{name} is a table or view of this session already: use another name"
            )
        rows.createTempView(quoted(name))
        self._made[name] = pattern

    def _pattern_of_topic(self, name: str) -> str:
        """The pattern of a topic that the statement names directly. It must exist, so that a typo is noticed."""
        reading = self._reading
        with connect_blocking(reading.url, token=reading.token) as bus:
            topics = [topic.name for topic in bus.topics()]
        if name in topics:
            return literal(name)
        near = difflib.get_close_matches(name, topics, 3) or topics[:_NAMES_TOLD_MAX]
        known = [*reading.patterns, *near]
        available = f"there are {', '.join(known)}" if known else "there are no topics yet"
        raise ClientFault(
            f"{name} is neither a topic nor a name that was given: {available}. To read topics under this name, "
            f"say which: --from {name}=PATTERN, or sources={{{name!r}: 'PATTERN'}}"
        )

    def _read(self, name: str, pattern: str) -> DataFrame:
        reading = self._reading
        options = {"url": reading.url, "pattern": pattern}
        if reading.token is not None:
            options["token"] = reading.token
        if name not in self._streamed:
            return self._spark.read.format("runnel").options(**options, **reading.options).load()
        options["startingOffsets"] = reading.start
        options["cursor"] = "" if reading.cursor is None else f"{reading.cursor}/{name}"
        return self._spark.readStream.format("runnel").options(**options, **reading.options).load()

    def _counted(self, name: str, rows: DataFrame) -> DataFrame:
        """Count the messages of a stream. Spark's own count is wrong: parsed messages are read twice."""
        if name not in self._streamed:
            return rows
        return rows.observe(f"{OBSERVATION}/{name}", f.count(f.lit(1)).alias("rows"))

    def _parsed(self, name: str, rows: DataFrame, schema: str) -> DataFrame:
        own = {column.lower() for column in rows.columns}
        topic = self._reading.dead_letter_topic
        try:
            if topic is None:
                with_value = json(rows, schema, into=VALUE, options={"mode": "FAILFAST"})
            else:
                with_value = parsed(self._counted(name, rows), schema).rows
                self._letters.append(parsed(rows, schema, dead_letter_topic=topic).letters)
            kind = with_value.schema[VALUE].dataType
        except PySparkException as error:
            raise ClientFault(
                f"the schema of {name} is {schema!r}: {explained(schema, str(error))} It must be of fields, as "
                "celsius double, station string"
            ) from None
        if not isinstance(kind, StructType):
            raise ClientFault(
                f"the schema of {name} is {schema!r}: it must have fields, as celsius double, station string"
            )
        fields = [
            f.col(VALUE)[field].alias(field)
            for field in kind.fieldNames()
            if field.lower() not in {*own, VALUE}
        ]
        return with_value.select("*", *fields)
