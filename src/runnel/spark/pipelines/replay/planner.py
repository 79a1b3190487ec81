"""Plans a replay once when it begins: how much of each partition, into which topic, and when."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from runnel.client import BlockingBus
from runnel.errors import ClientFault
from runnel.spark.pipelines.replay.options import ReplayOptions
from runnel.spark.pipelines.replay.plan import PartitionRows, ReplayPart, ReplayTarget, assign
from runnel.spark.pipelines.replay.sources import PLANNED, ReplaySource
from runnel.spark.pipelines.replay.state import VERSION, ReplayState
from runnel.spark.pipelines.replay.timetable import DUE, Cut, shortened

# The order in which rows were stored. It keeps the order within each partition.
STORED_ORDER: Final = ("receive_time_ns", "topic", "partition", "offset")
_NS_PER_SECOND: Final = 10**9


def plan_replay(
    spark: SparkSession,
    source: ReplaySource,
    bus: BlockingBus,
    *,
    tasks_max: int,
    into_existing: bool,
) -> ReplayState:
    """Read everything that is selected, without payloads, and plan it. `bus`: the target broker."""
    options = source.options
    frame = with_due(source.rows(spark, PLANNED), options)
    found, first_ns, last_ns = _found(frame)
    if not found:
        raise ClientFault(f"nothing to replay: {_nothing(options)}")
    targets = _targets(source, found, bus, into_existing=into_existing)
    return ReplayState(
        version=VERSION,
        replay_id=uuid.uuid4().hex,
        options=options,
        parts=tuple(
            ReplayPart(each, targets[each.topic], task) for each, task in assign(found, tasks_max)
        ),
        first_ns=first_ns,
        last_ns=last_ns,
        cuts=_cuts(frame, options),
    )


def with_due(frame: DataFrame, options: ReplayOptions) -> DataFrame:
    """Add the due time by event time. A row is never due before its predecessor in the partition."""
    if options.speed is None:
        return frame
    so_far = Window.partitionBy("topic", "partition").orderBy(*STORED_ORDER)
    so_far = so_far.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return frame.withColumn(DUE, f.max("event_time_ns").over(so_far))


def slots(spark: SparkSession) -> int:
    """How many tasks run at once: Spark's default number of partitions. Spark Connect shows it in no other way."""
    cut = spark.range(10_000).select(f.spark_partition_id().alias("slot"))
    return max(1, cut.distinct().count())


def _found(frame: DataFrame) -> tuple[list[PartitionRows], int, int]:
    """The selected rows of each partition, and the due times of the first and the last row of all."""
    due = f.col(DUE) if DUE in frame.columns else f.lit(0)
    rows = (
        frame.groupBy("topic", "partition")
        .agg(
            f.min("offset").alias("begin"),
            f.max("offset").alias("last"),
            f.count("*").alias("rows"),
            f.min(due).alias("first_ns"),
            f.max(due).alias("last_ns"),
        )
        .collect()
    )
    found = [
        PartitionRows(row["topic"], row["partition"], row["begin"], row["last"] + 1, row["rows"])
        for row in rows
    ]
    first_ns = min((row["first_ns"] for row in rows), default=0)
    last_ns = max((row["last_ns"] for row in rows), default=0)
    return found, first_ns, last_ns


def _nothing(options: ReplayOptions) -> str:
    chosen = (
        ", ".join(options.topics) if options.topics else f"topics that match {options.pattern!r}"
    )
    filters = (
        ("since", options.since_ns),
        ("until", options.until_ns),
        ("offsets", options.offsets),
        ("tags", options.tags),
        ("where", options.where),
    )
    given = [name for name, value in filters if value not in (None, (), {})]
    left = f" that {', '.join(given)} would leave" if given else ""
    return f"the {options.source} has no messages of {chosen}{left}"


def _targets(
    source: ReplaySource, found: Iterable[PartitionRows], bus: BlockingBus, *, into_existing: bool
) -> dict[str, ReplayTarget]:
    options = source.options
    topics = sorted({each.topic for each in found})
    into = {topic: options.rename.of(topic) for topic in topics}
    routes = bus.routes(*sorted(set(into.values())))
    same = [topic for topic in topics if into[topic] == topic and routes[topic].exists]
    if same and not into_existing:
        raise ClientFault(
            f"{', '.join(same[:5])}{', …' if same[5:] else ''} would go into the topic of the same name at "
            f"{options.into_url}, which is there already: rename, as '*' to 'replayed/*', or say into_existing "
            "if that is meant"
        )
    counts = source.partition_counts(topics)
    targets = {}
    for topic in topics:
        partitions = len(routes[into[topic]].owners)
        targets[topic] = ReplayTarget(into[topic], partitions, counts.get(topic) == partitions)
    return targets


def _cuts(frame: DataFrame, options: ReplayOptions) -> tuple[Cut, ...]:
    """The cuts in gaps that are longer than `gap_max_s`."""
    if options.gap_max_s is None:
        return ()
    assert options.speed is not None
    longest_ns = max(1, int(options.gap_max_s * options.speed * _NS_PER_SECOND))
    # A bucket of this length contains no longer gap, so the edges of buckets are enough.
    edges = frame.groupBy(f.expr(f"{DUE} - pmod({DUE}, {longest_ns}L)").alias("bucket")).agg(
        f.min(DUE).alias("first"), f.max(DUE).alias("last")
    )
    before = f.lag("last").over(Window.orderBy("bucket"))
    gaps = edges.select(before.alias("last"), f.col("first").alias("next"))
    found = gaps.where(f.col("next") - f.col("last") > longest_ns).collect()
    return shortened(((row["last"], row["next"]) for row in found), longest_ns)
