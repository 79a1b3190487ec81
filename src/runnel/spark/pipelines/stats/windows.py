"""Counts and measures messages in windows of event time, and defines the window of each message.

Only the message itself decides its window:

    late       received more than `late_s` after its event: counts separately, in the window of its receive time
    ahead      its event time is after its receive time, so a clock is wrong: the window of its receive time
    otherwise  the window of its event time

So each message counts in `messages` or in `late_messages` of one window (of every window that covers it, if windows
overlap), and counts the same whenever it is counted again. `messages` includes `ahead_messages`.

The time that places a message is never later than its receive time, and never more than `late_s` before it. So a wrong
clock cannot move the watermark into the future. Receive times never go back within a shard, so a shard's messages are
never too late for Spark by themselves; only shards that are read at an uneven pace can be, see `SLACK`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from runnel.errors import ClientFault
from runnel.spark.read.schema import SPARK_SCHEMA

WINDOW_S: Final = 60.0
LATE_S: Final = 10.0
# Each shard is synced separately, and readable after that. So a message that one shard received a moment before the
# others may be read with the next micro-batch.
SLACK: Final = timedelta(seconds=2)
TAGS_MAX: Final = 16
OVERLAPPING_MAX: Final = 100

_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# A percentile's rank is wrong by at most a thousandth. The state of a window grows with this number.
_ACCURACY: Final = 1000
_MICROSECOND: Final = timedelta(microseconds=1)
_DURATION_MAX: Final = timedelta(days=366)
_NS_PER_US: Final = 1000
_LONG_MAX: Final = 2**63 - 1

_NEEDED: Final = ("topic", "event_time_ns", "transmit_time_ns", "receive_time_ns", "size")
_TAGS: Final = "tags"
_AT: Final = "placed_at"


def _percentiles(name: str) -> list[str]:
    return [f"{name}_{share}" for share in _SHARES]


def _latency(name: str) -> list[str]:
    return [f"{column}_ns" for column in (*_percentiles(name), f"{name}_max")]


# The figures: one row for each window, topic and chosen tags.
FIGURES: Final = pa.schema(
    [
        ("window_start", pa.timestamp("us", "UTC")),
        ("window_end", pa.timestamp("us", "UTC")),
        ("topic", pa.string()),
        ("tags", pa.map_(pa.string(), pa.string())),
        *(
            (name, pa.float64() if name == "size_avg" else pa.int64())
            for name in (
                "messages",
                "bytes",
                "size_min",
                "size_avg",
                "size_max",
                *_percentiles("size"),
                *_latency("event_to_transmit"),
                *_latency("transmit_to_receive"),
                "ahead_messages",
                "late_messages",
                "late_bytes",
                "late_max_ns",
            )
        ),
    ]
)


class Windows(msgspec.Struct, frozen=True):
    """What is counted together: windows, chosen tags and lateness. `of` checks it."""

    length: timedelta
    slide: timedelta
    tags: tuple[str, ...]
    late: timedelta

    @classmethod
    def of(
        cls, *, window_s: float, slide_s: float | None, tags: Sequence[str], late_s: float
    ) -> Windows:
        """Check the arguments. ClientFault says what is wrong."""
        length = _duration("window_s", window_s, least=_MICROSECOND)
        slide = length if slide_s is None else _duration("slide_s", slide_s, least=_MICROSECOND)
        if slide > length:
            raise ClientFault(
                f"slide_s is {slide_s}, more than the {window_s} of a window: messages between two windows would "
                "count nowhere"
            )
        if length > OVERLAPPING_MAX * slide:
            raise ClientFault(
                f"slide_s is {slide_s}: each message would count in {length / slide:,.0f} windows, and at most "
                f"{OVERLAPPING_MAX} are possible"
            )
        late = _duration("late_s", late_s, least=timedelta(0))
        return cls(length, slide, _tag_names(tags), late)

    @property
    def columns(self) -> StructType:
        """The columns of messages that have to be read."""
        names = (*_NEEDED, _TAGS) if self.tags else _NEEDED
        return StructType([SPARK_SCHEMA[name] for name in names])


def _duration(name: str, seconds: float, *, least: timedelta) -> timedelta:
    try:
        duration = timedelta(seconds=seconds)
    except (TypeError, ValueError, OverflowError):
        raise ClientFault(f"{name} is {seconds!r}: it must be a number of seconds") from None
    if not least <= duration <= _DURATION_MAX:
        raise ClientFault(
            f"{name} is {seconds}: it must be from {least.total_seconds():g} to {_DURATION_MAX.total_seconds():,.0f}"
        )
    return duration


def _tag_names(tags: Sequence[str]) -> tuple[str, ...]:
    names = (tags,) if isinstance(tags, str) else tuple(tags)
    if not all(isinstance(name, str) and name for name in names):
        raise ClientFault(f"tags is {tags!r}: it must be names of tags, as ['unit', 'site']")
    if len(set(names)) != len(names):
        raise ClientFault(f"tags is {tags!r}: one of them stands there twice")
    if len(names) > TAGS_MAX:
        raise ClientFault(f"{len(names)} tags to count by: at most {TAGS_MAX} are possible")
    return names


def stats_of(
    messages: DataFrame,
    *,
    window_s: float = WINDOW_S,
    slide_s: float | None = None,
    tags: Sequence[str] = (),
    late_s: float = LATE_S,
) -> DataFrame:
    """The figures of messages that Spark has read from a broker, files or an archive.

    A stream gives each window once it is complete; a batch gives all windows.
    """
    windows = Windows.of(window_s=window_s, slide_s=slide_s, tags=tags, late_s=late_s)
    missing = [name for name in windows.columns.names if name not in messages.columns]
    if missing:
        raise ClientFault(
            f"there is no column {', '.join(missing)}: statistics need {', '.join(windows.columns.names)}"
        )
    return figures(messages, windows)


def figures(messages: DataFrame, windows: Windows) -> DataFrame:
    """One row for each window, topic and chosen tags, with the columns of `FIGURES`."""
    rows = messages.select(*_measured(windows))
    if rows.isStreaming:
        rows = rows.withWatermark(_AT, _interval(windows.late + SLACK))
    window = f.window(_AT, _interval(windows.length), _interval(windows.slide))
    tags = [f.col(_tag(number)) for number in range(len(windows.tags))]
    counted = rows.groupBy(window, "topic", *tags).agg(*_counted())
    return counted.select(*_columns_of_figures(windows))


# --- Columns of each message ---


def _measured(windows: Windows) -> list[Column]:
    no = f.lit(0).cast("boolean")
    # 0: the client did not set it.
    event_ns = f.nullif(f.col("event_time_ns"), f.lit(0))
    transmit_ns = f.nullif(f.col("transmit_time_ns"), f.lit(0))
    receive_ns = f.col("receive_time_ns")
    late_ns = windows.late // _MICROSECOND * _NS_PER_US
    is_late = f.ifnull(event_ns < receive_ns - late_ns, no)
    at_ns = f.when(is_late, receive_ns).otherwise(f.least(event_ns, receive_ns))
    in_time = ~is_late
    # Clients may set any time, so a difference that does not fit into 64 bits must not end the query.
    return [
        f.col("topic"),
        *(f.col(_TAGS)[tag].alias(_tag(number)) for number, tag in enumerate(windows.tags)),
        f.timestamp_micros(f.call_function("div", at_ns, f.lit(_NS_PER_US))).alias(_AT),
        in_time.alias("in_time"),
        f.ifnull(event_ns > receive_ns, no).alias("is_ahead"),
        f.col("size").cast("long").alias("size"),
        f.when(in_time, f.try_subtract(transmit_ns, event_ns)).alias("event_to_transmit"),
        f.when(in_time, f.try_subtract(receive_ns, transmit_ns)).alias("transmit_to_receive"),
        f.when(is_late, f.coalesce(f.try_subtract(receive_ns, event_ns), f.lit(_LONG_MAX))).alias(
            "late_ns"
        ),
    ]


def _tag(number: int) -> str:
    """The internal column of a tag, because the tag's own name could be that of another column."""
    return f"tag_{number}"


def _interval(duration: timedelta) -> str:
    return f"{duration // _MICROSECOND} microseconds"


# --- Columns of each window ---


def _counted() -> list[Column]:
    in_time = f.col("in_time")
    size = f.when(in_time, f.col("size"))
    return [
        f.count_if(in_time).alias("messages"),
        f.coalesce(f.sum(size), f.lit(0)).alias("bytes"),
        f.min(size).alias("size_min"),
        f.avg(size).alias("size_avg"),
        f.max(size).alias("size_max"),
        _shares(size).alias("size"),
        _shares(f.col("event_to_transmit")).alias("event_to_transmit"),
        f.max("event_to_transmit").alias("event_to_transmit_max_ns"),
        _shares(f.col("transmit_to_receive")).alias("transmit_to_receive"),
        f.max("transmit_to_receive").alias("transmit_to_receive_max_ns"),
        f.count_if(f.col("is_ahead")).alias("ahead_messages"),
        f.count_if(~in_time).alias("late_messages"),
        f.coalesce(f.sum(f.when(~in_time, f.col("size"))), f.lit(0)).alias("late_bytes"),
        f.max("late_ns").alias("late_max_ns"),
    ]


def _shares(column: Column) -> Column:
    return f.percentile_approx(column, list(_SHARES.values()), _ACCURACY)


def _columns_of_figures(windows: Windows) -> list[Column]:
    columns = {
        "window_start": f.col("window.start"),
        "window_end": f.col("window.end"),
        "tags": _tags_of(windows),
        **{
            f"{name}_{share}{unit}": f.col(name)[number]
            for name, unit in (
                ("size", ""),
                ("event_to_transmit", "_ns"),
                ("transmit_to_receive", "_ns"),
            )
            for number, share in enumerate(_SHARES)
        },
    }
    return [columns.get(name, f.col(name)).alias(name) for name in FIGURES.names]


def _tags_of(windows: Windows) -> Column:
    """The chosen tags with their values; null for messages without the tag."""
    if not windows.tags:
        return f.expr("cast(map() as map<string, string>)")
    pairs = [(f.lit(tag), f.col(_tag(number))) for number, tag in enumerate(windows.tags)]
    return f.create_map(*(column for pair in pairs for column in pair))
