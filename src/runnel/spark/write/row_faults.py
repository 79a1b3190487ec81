"""Finds rows that cannot be published, column by column, and the reason for each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from runnel.errors import ClientFault, InvalidNameError
from runnel.formats.table import TAGS_MAX, UID_BYTES
from runnel.spark.write.row_columns import TIME_US_MAX, column, list_offsets, row_bytes, validity
from runnel.topics.names import check_topic

# A broker's default limit. The broker does not announce its own.
TAG_BYTES_MAX: Final = 64 * 1024


class Limits(msgspec.Struct, frozen=True):
    """The limits of a broker."""

    message_bytes_max: int
    batch_bytes_max: int


class Fault(NamedTuple):
    """Rows that cannot be published, all for the same reason."""

    rows: NDArray[np.int64]
    reason: str
    advice: str = ""
    kind: type[ClientFault] = ClientFault

    def error(self, row_count: int) -> ClientFault:
        return self.kind(
            f"{self.reason}, in {len(self.rows)} of {row_count} rows{self.advice and f': {self.advice}'}"
        )


def topic_faults(topics: Sequence[str], codes: NDArray[np.int32]) -> Iterator[Fault]:
    """Faults of topics. `codes`: the index of each row's topic, -1 for a row without one."""
    without = np.flatnonzero(codes < 0)
    if len(without):
        yield Fault(
            without,
            "topic is null",
            "filter them out, or give the option topic, which stands for rows without one",
        )
    for code, topic in enumerate(topics):
        try:
            check_topic(topic)
        except InvalidNameError as error:
            yield Fault(np.flatnonzero(codes == code), str(error), kind=InvalidNameError)


def partition_faults(
    topics: Sequence[str],
    codes: NDArray[np.int32],
    counts: NDArray[np.int64],
    chosen: pa.Array | None,
) -> Iterator[Fault]:
    """Faults of partitions that rows name. `counts`: the number of partitions of each topic."""
    if chosen is None:
        return
    numbers = chosen.fill_null(0).to_numpy(zero_copy_only=False)
    has_not = (numbers < 0) | (numbers >= counts[codes])
    for code in np.unique(codes[has_not]).tolist():
        of_topic = has_not & (codes == code)
        for rows, number in _by_value(np.flatnonzero(of_topic), numbers[of_topic]):
            yield Fault(
                rows, f"{topics[code]} has partitions 0 to {counts[code] - 1}, not {number}"
            )


def row_faults(rows: pa.RecordBatch, limits: Limits | None) -> Iterator[Fault]:
    """Faults of all other columns. Without `limits`, only the broker checks sizes."""
    yield from _payload_faults(rows, limits)
    yield from _uid_faults(column(rows, "uid"))
    yield from _time_faults(column(rows, "event_time"))
    yield from _tag_faults(column(rows, "tags"), limits)
    if limits is not None:
        sizes = row_bytes(rows)
        too_large = np.flatnonzero(sizes > limits.batch_bytes_max)
        for where, size in _by_value(too_large, sizes[too_large]):
            yield Fault(
                where,
                f"a message of {size} bytes with its key and tags is larger than limits.batch_bytes_max = "
                f"{limits.batch_bytes_max}",
            )


def _payload_faults(rows: pa.RecordBatch, limits: Limits | None) -> Iterator[Fault]:
    payload = rows.column("payload")
    if payload.null_count:
        yield Fault(_where(payload.is_null()), "payload is null", "filter them out, or coalesce")
    if limits is not None:
        sizes = np.diff(list_offsets(payload))
        too_large = np.flatnonzero(sizes > limits.message_bytes_max)
        for where, size in _by_value(too_large, sizes[too_large]):
            yield Fault(
                where,
                f"a message of {size} bytes is larger than limits.message_bytes_max = {limits.message_bytes_max}",
            )


def _uid_faults(uids: pa.Array | None) -> Iterator[Fault]:
    if uids is None:
        return
    sizes = np.diff(list_offsets(uids))
    wrong = np.flatnonzero(validity(uids).astype(np.bool_) & (sizes != UID_BYTES))
    for where, size in _by_value(wrong, sizes[wrong]):
        yield Fault(where, f"a uid of {size} bytes: it must have {UID_BYTES}")


def _time_faults(micros: pa.Array | None) -> Iterator[Fault]:
    if micros is None:
        return
    numbers = micros.fill_null(0).to_numpy(zero_copy_only=False)
    far = np.flatnonzero((numbers > TIME_US_MAX) | (numbers < -TIME_US_MAX))
    if len(far):
        yield Fault(
            far,
            "an event_time lies outside the years 1678 to 2261, where nanoseconds have 64 bits",
        )


def _tag_faults(tags: pa.Array | None, limits: Limits | None) -> Iterator[Fault]:
    if tags is None:
        return
    offsets = list_offsets(tags)
    counts = np.where(validity(tags), np.diff(offsets), 0)
    too_many = np.flatnonzero(counts > TAGS_MAX)
    for where, count in _by_value(too_many, counts[too_many]):
        yield Fault(where, f"a message with {count} tags: at most {TAGS_MAX} are allowed")
    if tags.items.null_count:
        nulls = np.concatenate(
            ([0], np.cumsum(tags.items.is_null().to_numpy(zero_copy_only=False)))
        )
        where = np.flatnonzero((counts > 0) & (nulls[offsets[1:]] > nulls[offsets[:-1]]))
        if len(where):
            yield Fault(
                where,
                "a tag has the value null",
                "leave it out, with map_filter, or give it text",
            )
    if limits is not None:
        sizes = sum(np.diff(list_offsets(texts)[offsets]) for texts in (tags.keys, tags.items))
        sizes = np.where(counts > 0, sizes, 0)
        too_large = np.flatnonzero(sizes > TAG_BYTES_MAX)
        for where, size in _by_value(too_large, sizes[too_large]):
            yield Fault(
                where, f"a message with {size} bytes of tags: at most {TAG_BYTES_MAX} are allowed"
            )


def _where(mask: pa.Array) -> NDArray[np.int64]:
    found: NDArray[np.int64] = pc.indices_nonzero(mask).to_numpy().astype(np.int64)
    return found


def _by_value(
    rows: NDArray[np.int64], values: NDArray[np.integer[Any]]
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Each distinct value with its rows."""
    for value in np.unique(values).tolist():
        yield rows[values == value], value
