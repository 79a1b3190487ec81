"""The source of a replay as a DataFrame: an archive, the files of a broker, or a broker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from runnel.client import connect_blocking
from runnel.errors import ClientFault
from runnel.log.reading import OfflineLog
from runnel.spark.options import literal
from runnel.spark.pipelines.archive.reader import read_archive
from runnel.spark.pipelines.archive.table import ArchiveTable
from runnel.spark.pipelines.replay.options import OffsetRange, ReplayOptions
from runnel.spark.pipelines.replay.plan import ReplayPart
from runnel.spark.read.schema import SPARK_SCHEMA

# The columns for planning a replay, and for sending it.
PLANNED: Final = ("topic", "partition", "offset", "event_time_ns", "receive_time_ns")
SENT: Final = (*PLANNED, "key", "payload", "tags", "transmit_time_ns", "uid")


class ReplaySource(msgspec.Struct, frozen=True):
    """The source of a replay's rows."""

    options: ReplayOptions
    token: str | None = None

    def rows(
        self, spark: SparkSession, columns: Sequence[str], parts: Iterable[ReplayPart] | None = None
    ) -> DataFrame:
        """The selected rows. With `parts`, only the offsets that the plan found."""
        options = self.options
        if parts is None:
            bounds = options.offsets
        else:
            bounds = tuple(
                OffsetRange(found.topic, found.partition, found.begin, found.end)
                for found in (part.found for part in parts)
            )
        if options.archive is not None:
            frame = self._archived(spark, bounds if parts is None else ())
        else:
            frame = self._logged(spark, columns, bounds)
        if options.where is not None:
            try:
                frame = frame.where(options.where)
                _ = frame.schema  # Spark Connect reports an error only on access
            except (AnalysisException, ParseException) as error:
                reason = str(error).strip().partition("\n")[0].partition(" SQLSTATE")[0]
                raise ClientFault(f"where is {options.where!r}: {reason}") from None
        return frame.select(*columns)

    def _archived(self, spark: SparkSession, bounds: Iterable[OffsetRange]) -> DataFrame:
        options = self.options
        assert options.archive is not None
        frame = read_archive(
            spark,
            options.archive,
            topics=options.topics or None,
            pattern=options.pattern,
            since=options.since_ns,
            until=options.until_ns,
        )
        for name, value in options.tags.items():
            frame = frame.where(f.try_element_at("tags", f.lit(name)) == value)
        for each in bounds:
            is_other = (f.col("topic") != each.topic) | (f.col("partition") != each.partition)
            if each.begin is not None:
                frame = frame.where(is_other | (f.col("offset") >= each.begin))
            if each.end is not None:
                frame = frame.where(is_other | (f.col("offset") < each.end))
        return frame

    def _logged(
        self, spark: SparkSession, columns: Sequence[str], bounds: Sequence[OffsetRange]
    ) -> DataFrame:
        options = self.options
        reader = spark.read.format("runnel").options(**_places(bounds))
        if options.where is None:  # otherwise the condition may use any column
            reader = reader.schema(StructType([SPARK_SCHEMA[name] for name in columns]))
        if options.pattern is not None:
            reader = reader.option("pattern", options.pattern)
        else:
            reader = reader.option("topics", ",".join(options.topics))
        if options.tags:
            reader = reader.option("tags", msgspec.json.encode(options.tags).decode())
        if options.path is not None:
            reader = reader.option("path", options.path)
        else:
            assert options.url is not None
            reader = reader.option("url", options.url)
            reader = reader if self.token is None else reader.option("token", self.token)
        frame = reader.load()
        if options.since_ns is not None:
            frame = frame.where(f.col("receive_time_ns") >= options.since_ns)
        if options.until_ns is not None:
            frame = frame.where(f.col("receive_time_ns") < options.until_ns)
        return frame

    def partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """The number of partitions of these topics; in an archive, of partitions with messages."""
        if self.options.archive is not None:
            opened = ArchiveTable.open(self.options.archive)
            highest: dict[str, int] = {}
            for topic, partition in opened.next_offsets(set(topics).__contains__):
                highest[topic] = max(partition, highest.get(topic, 0))
            return {topic: partition + 1 for topic, partition in highest.items()}
        if self.options.path is not None:
            patterns = tuple(map(literal, topics))
            found = OfflineLog(self.options.path).topics(patterns)
            return {topic.name: len(topic.partitions) for topic in found}
        assert self.options.url is not None
        with connect_blocking(self.options.url, token=self.token) as bus:
            return {topic: len(route.owners) for topic, route in bus.routes(*topics).items()}


def _places(bounds: Iterable[OffsetRange]) -> dict[str, str]:
    """The bounds as options of a read."""
    begins: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for each in bounds:
        if each.begin is not None:
            begins.setdefault(each.topic, {})[str(each.partition)] = each.begin
        if each.end is not None:
            ends.setdefault(each.topic, {})[str(each.partition)] = each.end
    named = (("startingOffsets", begins), ("endingOffsets", ends))
    return {name: msgspec.json.encode(places).decode() for name, places in named if places}
