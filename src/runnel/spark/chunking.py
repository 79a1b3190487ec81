"""Cutting a task's rows into batches of one shard each, the same ones whenever the same rows come again. Pure.

The broker tells batches apart by their numbers, so a task that is run again must cut where it cut before. Where that is
depends on the rows and on nothing else: not on how Spark happened to group them, not on time, not on what was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from runnel.errors import ClientFault
from runnel.formats.batch import Batch
from runnel.formats.table import Columns
from runnel.formats.wire import Route
from runnel.spark.outgoing import column, columns_of, plain, row_bytes
from runnel.topics.names import check_topic
from runnel.topics.partitions import partitions_of_keys

# To change one of these is to cut elsewhere: batches that were under way while Runnel was updated could not repeat.
CHUNK_ROWS_MAX: Final = (
    10_000  # what Spark hands over at once unless told otherwise: nothing is copied
)
CHUNK_BYTES_MAX: Final = 2 * 2**20  # half of what a broker takes unless told otherwise

FindRoutes: TypeAlias = Callable[[Sequence[str]], Mapping[str, Route]]


class ShardKey(NamedTuple):
    """What a batch may not mix."""

    keep: str
    journal: str
    shard: int


class _Run(NamedTuple):
    """A topic and partition that occur in a chunk, where they belong, and in how many rows."""

    topic: str
    partition: int
    key: ShardKey
    rows: int


class Chunker:
    """The rows of one task as numbered batches of its producer's term."""

    def __init__(
        self,
        producer: str,
        term: int,
        *,
        topic: str | None,
        turn: int,
        bytes_max: int,
        find_routes: FindRoutes,
        now_ns: Callable[[], int],
    ) -> None:
        """`topic`: of rows that name none. `turn`: where rows without a key begin their way through partitions."""
        self._producer = producer
        self._term = term
        self._topic = topic
        self._turn = turn
        self._bytes_max = min(CHUNK_BYTES_MAX, bytes_max)
        self._find_routes = find_routes
        self._now_ns = now_ns
        self._next_numbers: dict[ShardKey, int] = {}

    def batches(self, incoming: Iterable[pa.RecordBatch]) -> Iterator[Batch]:
        """What to publish, in this order."""
        for turn, chunk in enumerate(chunks(incoming, self._bytes_max), start=self._turn):
            yield from self._split(chunk, turn)

    def _split(self, chunk: pa.RecordBatch, turn: int) -> Iterator[Batch]:
        """A batch for each shard; rows of one topic and partition keep their order."""
        topics, codes = self._topics(chunk)
        routes = self._find_routes(topics)
        partitions = _partitions(chunk, topics, codes, routes, turn)
        rows, runs = _in_runs(chunk, topics, codes, partitions, routes)
        now_ns = self._now_ns()
        begin = 0
        for key, group in groupby(runs, key=lambda run: run.key):
            of_shard = list(group)
            count = sum(run.rows for run in of_shard)
            yield self._batch(key, of_shard, columns_of(rows.slice(begin, count), now_ns))
            begin += count

    def _batch(self, key: ShardKey, runs: Sequence[_Run], table: Columns) -> Batch:
        number = self._next_numbers.get(key, 0)
        self._next_numbers[key] = number + 1
        return Batch.from_columns(
            table,
            [run.topic for run in runs],
            [run.rows for run in runs],
            partitions=[run.partition for run in runs],
            shard=key.shard,
            producer=self._producer,
            term=self._term,
            number=number,
        )

    def _topics(self, chunk: pa.RecordBatch) -> tuple[list[str], NDArray[np.int32]]:
        """The topics in these rows, and for each row which of them."""
        names = column(chunk, "topic")
        if names is None or (names.null_count and self._topic is not None):
            if self._topic is None:
                raise ClientFault(
                    "topic is null in all rows of a chunk, and there is no option topic"
                )
            if names is None:
                return [self._topic], np.zeros(chunk.num_rows, np.int32)
            names = names.fill_null(self._topic)
        if names.null_count:
            raise ClientFault(
                f"topic is null in {names.null_count} of {len(names)} rows: filter them out, or give the "
                "option topic, which stands for rows without one"
            )
        encoded = names.dictionary_encode()
        topics: list[str] = encoded.dictionary.to_pylist()
        for topic in topics:
            check_topic(topic)
        return topics, encoded.indices.to_numpy(zero_copy_only=False)


# --- Chunks ---


def chunks(incoming: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[pa.RecordBatch]:
    """The rows in chunks that depend on the rows alone: each as many as there may be, and at least one."""
    held: list[pa.RecordBatch] = []
    held_rows = held_bytes = 0
    for arrived in incoming:
        rows = plain(arrived)
        held.append(rows)
        held_rows += rows.num_rows
        held_bytes += int(row_bytes(rows).sum())
        if held_rows < CHUNK_ROWS_MAX and held_bytes <= bytes_max:
            continue  # what comes next may belong to the same chunk
        joined = pa.concat_batches(held) if len(held) > 1 else rows
        sizes = row_bytes(joined)
        begin = 0
        for end in _full_ends(sizes, bytes_max):
            yield joined.slice(begin, end - begin)
            begin = end
        held = [joined.slice(begin)]
        held_rows = held[0].num_rows
        held_bytes = int(sizes[begin:].sum())
    if held_rows:
        yield pa.concat_batches(held)


def _full_ends(sizes: NDArray[np.int64], bytes_max: int) -> Iterator[int]:
    """Where chunks end that cannot take the row behind them, or have all the rows they may have."""
    totals = np.cumsum(sizes)
    begin, count = 0, len(sizes)
    while begin < count:
        before = int(totals[begin - 1]) if begin else 0
        fitting = int(np.searchsorted(totals, before + bytes_max, side="right"))
        end = min(max(fitting, begin + 1), begin + CHUNK_ROWS_MAX)
        if end >= count and end - begin < CHUNK_ROWS_MAX:
            return
        yield end
        begin = end


# --- Partitions and shards ---


def _partitions(
    chunk: pa.RecordBatch,
    topics: Sequence[str],
    codes: NDArray[np.int32],
    routes: Mapping[str, Route],
    turn: int,
) -> NDArray[np.int64]:
    """The partition of each row: its own choice, by its partition key or key, or by turns."""
    counts = np.array([len(routes[topic].owners) for topic in topics], np.int64)
    chosen = column(chunk, "partition")
    if chosen is None and counts.max() == 1:
        return np.zeros(chunk.num_rows, np.int64)
    counts_by_row = counts[codes]
    partitions = turn % counts_by_row
    keys = _partition_keys(chunk)
    if keys is not None:
        encoded = keys.dictionary_encode()
        values: list[bytes] = encoded.dictionary.to_pylist()
        indices = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        has_key = keys.is_valid().to_numpy(zero_copy_only=False)
        for count in np.unique(counts[counts > 1]).tolist():
            of_values = np.array(partitions_of_keys(values, count, keyless=0), np.int64)
            rows = has_key & (counts_by_row == count)
            partitions[rows] = of_values[indices[rows]]
    if chosen is not None:
        is_chosen = chosen.is_valid().to_numpy(zero_copy_only=False)
        numbers = chosen.fill_null(0).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(is_chosen & ((numbers < 0) | (numbers >= counts_by_row)))
        if len(wrong):
            topic = topics[codes[wrong[0]]]
            raise ClientFault(
                f"{topic} has partitions 0 to {counts_by_row[wrong[0]] - 1}, not {numbers[wrong[0]]}"
            )
        partitions = np.where(is_chosen, numbers, partitions)
    return partitions


def _partition_keys(chunk: pa.RecordBatch) -> pa.Array | None:
    explicit, keys = column(chunk, "partition_key"), column(chunk, "key")
    if explicit is None or keys is None:
        return keys if explicit is None else explicit
    return pc.coalesce(explicit, keys)


def _in_runs(
    chunk: pa.RecordBatch,
    topics: Sequence[str],
    codes: NDArray[np.int32],
    partitions: NDArray[np.int64],
    routes: Mapping[str, Route],
) -> tuple[pa.RecordBatch, list[_Run]]:
    """The rows, those of one topic and partition together, those of one shard together; and what these runs are."""
    several = int(partitions.max()) + 1
    places, where, counts = np.unique(
        codes * np.int64(several) + partitions, return_inverse=True, return_counts=True
    )
    runs = []
    for place, count in zip(places.tolist(), counts.tolist(), strict=True):
        topic, partition = topics[place // several], place % several
        owner = routes[topic].owners[partition]
        key = ShardKey(routes[topic].keep, owner.journal, owner.shard)
        runs.append(_Run(topic, partition, key, count))
    if len(runs) == 1:
        return chunk, runs
    order = sorted(
        range(len(runs)), key=lambda run: runs[run].key
    )  # stable: else as they first appear
    rank = np.empty(len(runs), np.int64)
    rank[order] = np.arange(len(runs))
    ranks = rank[where]
    if (ranks[1:] < ranks[:-1]).any():
        chunk = chunk.take(pa.array(np.argsort(ranks, kind="stable")))
    return chunk, [runs[run] for run in order]
