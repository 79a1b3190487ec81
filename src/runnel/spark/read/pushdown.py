"""Applies pushed-down filters of a query to topics, partitions, offsets and times.

Everything here is exact. Spark keeps the filters that cannot be applied exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from runnel.formats.batch import Batch
from runnel.formats.columns import Columns

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NS_PER_US: Final = 1000


class NumberRange(msgspec.Struct, frozen=True):
    """The numbers from `low` on and below `high`; None: no bound."""

    low: int | None = None
    high: int | None = None

    def __bool__(self) -> bool:
        return self.low is not None or self.high is not None

    def __and__(self, other: NumberRange) -> NumberRange:
        return NumberRange(
            max((low for low in (self.low, other.low) if low is not None), default=None),
            min((high for high in (self.high, other.high) if high is not None), default=None),
        )

    def holds(self, number: int) -> bool:
        return (self.low is None or number >= self.low) and (
            self.high is None or number < self.high
        )

    def mask(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        is_in = np.ones(len(numbers), np.bool_)
        if self.low is not None:
            is_in &= numbers >= self.low
        if self.high is not None:
            is_in &= numbers < self.high
        return is_in


class RowFilter(msgspec.Struct, frozen=True):
    """Selects rows by tags and client times, which only the batch itself contains."""

    tags: Mapping[str, str] = {}
    event_ns: NumberRange = NumberRange()
    transmit_ns: NumberRange = NumberRange()

    def __bool__(self) -> bool:
        return bool(self.tags or self.event_ns or self.transmit_ns)

    def select(self, batch: Batch) -> Batch | None:
        """The wanted rows; None if there are none."""
        if not self:
            return batch
        columns = batch.columns
        # A column may hold one value for all rows; numpy broadcasts it.
        wanted = np.ones(columns.count, np.bool_)
        if self.event_ns:
            wanted &= self.event_ns.mask(np.frombuffer(columns.event_times, np.int64))
        if self.transmit_ns:
            wanted &= self.transmit_ns.mask(np.frombuffer(columns.transmit_times, np.int64))
        if self.tags:
            wanted &= self._has_tags(columns)
        if wanted.all():
            return batch
        rows = np.flatnonzero(wanted)
        return batch.take(rows) if len(rows) else None

    def _has_tags(self, columns: Columns) -> NDArray[np.bool_]:
        """Whether each row has the tags. Compares the tag sets, which are few, and looks up each row's set."""
        if not columns.tag_index:
            return np.zeros(1, np.bool_)
        wanted = self.tags.items()
        fits = np.array([wanted <= tags.items() for tags in columns.tag_sets], np.bool_)
        return fits[np.frombuffer(columns.tag_index, np.int32)]


class Narrowing(msgspec.Struct, frozen=True):
    """What the pushed-down filters select. `topics` or `partitions` None: all of them."""

    topics: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()
    partitions: frozenset[int] | None = None
    partition: NumberRange = NumberRange()
    offset: NumberRange = NumberRange()
    event_ns: NumberRange = NumberRange()
    transmit_ns: NumberRange = NumberRange()
    receive_ns: NumberRange = NumberRange()

    def wants_topic(self, topic: str) -> bool:
        return (self.topics is None or topic in self.topics) and all(
            map(topic.startswith, self.prefixes)
        )

    def wants_partition(self, partition: int) -> bool:
        is_named = self.partitions is None or partition in self.partitions
        return is_named and self.partition.holds(partition)

    def rows(self, tags: Mapping[str, str]) -> RowFilter:
        return RowFilter(tags, self.event_ns, self.transmit_ns)


# Columns of integers, with the field of `Narrowing` that bounds each, and the number of the field's units in one.
_BOUNDED: Final[Mapping[str, tuple[str, int]]] = {
    "partition": ("partition", 1),
    "offset": ("offset", 1),
    "event_time_ns": ("event_ns", 1),
    "transmit_time_ns": ("transmit_ns", 1),
    "receive_time_ns": ("receive_ns", 1),
    "event_time": ("event_ns", _NS_PER_US),
    "transmit_time": ("transmit_ns", _NS_PER_US),
    "receive_time": ("receive_ns", _NS_PER_US),
}
_NEVER_NULL: Final = frozenset((*_BOUNDED, "topic", "payload", "tags", "size"))


def narrowed(narrowing: Narrowing, pushed: Filter) -> Narrowing | None:
    """Add one more filter; None if it cannot be applied exactly."""
    match pushed:
        case IsNotNull((column,)) if column in _NEVER_NULL:
            return narrowing
        case EqualTo(("topic",), value) | EqualNullSafe(("topic",), value) if isinstance(
            value, str
        ):
            return _with_set(narrowing, "topics", (value,))
        case In(("topic",), values):
            return _with_set(narrowing, "topics", values)
        case StringStartsWith(("topic",), prefix):
            return msgspec.structs.replace(narrowing, prefixes=(*narrowing.prefixes, prefix))
        case In(("partition",), values):
            return _with_set(narrowing, "partitions", values)
        case (
            EqualTo((column,), value)
            | EqualNullSafe((column,), value)
            | GreaterThan((column,), value)
            | GreaterThanOrEqual((column,), value)
            | LessThan((column,), value)
            | LessThanOrEqual((column,), value)
        ) if column in _BOUNDED:
            field, unit = _BOUNDED[column]
            number = _number(value)
            if number is None:
                return None
            span = getattr(narrowing, field) & _span(pushed, number, unit)
            return msgspec.structs.replace(narrowing, **{field: span})
        case _:
            return None


def _with_set(narrowing: Narrowing, field: str, values: tuple[object, ...]) -> Narrowing:
    known = getattr(narrowing, field)
    chosen = frozenset(values)
    return msgspec.structs.replace(
        narrowing, **{field: chosen if known is None else known & chosen}
    )


def _number(value: object) -> int | None:
    """An integer as it is, or a time in microseconds; None for other values."""
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        since = moment - _EPOCH
        return (since.days * 86_400 + since.seconds) * 10**6 + since.microseconds
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None


def _span(pushed: Filter, number: int, unit: int) -> NumberRange:
    """The numbers that a comparison selects. A time in microseconds stands for the 1000 ns that are rounded to it."""
    here, behind = number * unit, (number + 1) * unit
    match pushed:
        case GreaterThan():
            return NumberRange(low=behind)
        case GreaterThanOrEqual():
            return NumberRange(low=here)
        case LessThan():
            return NumberRange(high=here)
        case LessThanOrEqual():
            return NumberRange(high=behind)
        case _:
            return NumberRange(here, behind)
