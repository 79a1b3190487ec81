"""Cuts a task's rows into batches of one shard each. The same rows always give the same batches. Pure.

The broker recognises batches by their numbers, so a task that runs again must cut where it cut before. The cuts depend
only on the rows: not on how Spark grouped them, not on time, and not on what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from runnel.formats.batch import Batch
from runnel.formats.table import Columns
from runnel.formats.wire import Route
from runnel.spark.write.dead_letters import RowDeadLetters
from runnel.spark.write.row_columns import column, columns_of, plain, row_bytes
from runnel.spark.write.row_faults import Fault, partition_faults, row_faults, topic_faults
from runnel.topics.partitions import partitions_of_keys

# Changing one of these moves the cuts: a task that runs again after an update of Runnel could not repeat its batches.
# By default Spark passes this many rows at once, so that nothing is copied.
CHUNK_ROWS_MAX: Final = 10_000
CHUNK_BYTES_MAX: Final = 2 * 2**20  # half of a broker's default limit

FindRoutes: TypeAlias = Callable[[Sequence[str]], Mapping[str, Route]]


class BatchShard(NamedTuple):
    """A shard and its storage. All rows of a batch belong to the same one."""

    keep: str
    journal: str
    shard: int


class _TopicRun(NamedTuple):
    """A topic-partition that occurs in a chunk, its shard, and its number of rows."""

    topic: str
    partition: int
    key: BatchShard
    rows: int


class _RowsByTopic(NamedTuple):
    """Rows, the topics that occur in them, and the index of each row's topic (-1: the row has no topic)."""

    rows: pa.RecordBatch
    topics: list[str]
    codes: NDArray[np.int32]

    def without(self, rows: Collection[int]) -> _RowsByTopic:
        """The rows except these, and their topics."""
        kept = np.delete(np.arange(len(self.codes)), list(rows))
        codes, places = np.unique(self.codes[kept], return_inverse=True)
        return _RowsByTopic(
            self.rows.take(pa.array(kept)),
            [self.topics[code] for code in codes.tolist()],
            places.astype(np.int32),
        )


class Chunker:
    """Makes the numbered batches of one task's rows, in its producer's term."""

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
        dead_letters: RowDeadLetters | None = None,
    ) -> None:
        """`topic`: for rows without one. `turn`: the partition with which rows without a key begin.

        Without `dead_letters`, a row that cannot be published fails the task.
        """
        self._producer = producer
        self._term = term
        self._topic = topic
        self._turn = turn
        self._bytes_max = min(CHUNK_BYTES_MAX, bytes_max)
        self._find_routes = find_routes
        self._now_ns = now_ns
        self._dead_letters = dead_letters
        self._next_numbers: dict[BatchShard, int] = {}

    def batches(self, incoming: Iterable[pa.RecordBatch]) -> Iterator[Batch]:
        """The batches to publish, in this order."""
        first_row = 0
        for turn, chunk in enumerate(chunks(incoming, self._bytes_max), start=self._turn):
            reasons: dict[int, str] = {}
            yield from self._split(self._by_topic(chunk), turn, reasons)
            if reasons:
                yield from self._dead_letter_batches(chunk, turn, reasons, first_row)
            first_row += chunk.num_rows

    def _split(self, chunk: _RowsByTopic, turn: int, reasons: dict[int, str]) -> Iterator[Batch]:
        """One batch for each shard. Rows of one topic-partition keep their order.

        Leaves out rows that cannot be published, and adds the reasons to `reasons`, by the row's index in the chunk.
        """
        limits = None if self._dead_letters is None else self._dead_letters.limits
        names_wrong = self._rejected(topic_faults(chunk.topics, chunk.codes), chunk)
        rows_wrong = self._rejected(row_faults(chunk.rows, limits), chunk)
        places = np.arange(len(chunk.codes))
        if wrong := rows_wrong | names_wrong:
            reasons.update(wrong)
            chunk, places = chunk.without(wrong), np.delete(places, list(wrong))
        routes = self._find_routes(chunk.topics)
        counts = np.array([len(routes[topic].owners) for topic in chunk.topics], np.int64)
        chosen = column(chunk.rows, "partition")
        if wrong := self._rejected(
            partition_faults(chunk.topics, chunk.codes, counts, chosen), chunk
        ):
            reasons.update((int(places[row]), reason) for row, reason in wrong.items())
            chunk = chunk.without(wrong)
        if not len(chunk.codes):
            return
        rows, runs = _in_runs(chunk, _partitions(chunk, routes, turn), routes)
        now_ns = self._now_ns()
        begin = 0
        for key, group in groupby(runs, key=lambda run: run.key):
            of_shard = list(group)
            count = sum(run.rows for run in of_shard)
            yield self._batch(key, of_shard, columns_of(rows.slice(begin, count), now_ns))
            begin += count

    def _rejected(self, faults: Iterable[Fault], chunk: _RowsByTopic) -> dict[int, str]:
        """The rows that become dead letters, with reasons. Without dead letters, raises the first fault."""
        reasons: dict[int, str] = {}
        for fault in faults:
            if self._dead_letters is None:
                raise fault.error(len(chunk.codes))
            for row in fault.rows.tolist():
                reasons.setdefault(row, fault.reason)
        return reasons

    def _dead_letter_batches(
        self, chunk: pa.RecordBatch, turn: int, reasons: Mapping[int, str], first_row: int
    ) -> Iterator[Batch]:
        """The dead letters, in separate batches: a letter may be larger than its row."""
        assert self._dead_letters is not None
        letters = self._dead_letters.letters(
            chunk, reasons, default_topic=self._topic, first_row=first_row
        )
        for part in chunks([letters], self._bytes_max):
            left: dict[int, str] = {}
            yield from self._split(self._by_topic(part), turn, left)
            assert not left, left  # every letter can be published

    def _batch(self, key: BatchShard, runs: Sequence[_TopicRun], table: Columns) -> Batch:
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

    def _by_topic(self, chunk: pa.RecordBatch) -> _RowsByTopic:
        names = column(chunk, "topic")
        if names is None:
            code = -1 if self._topic is None else 0
            topics = [] if self._topic is None else [self._topic]
            return _RowsByTopic(chunk, topics, np.full(chunk.num_rows, code, np.int32))
        if self._topic is not None:
            names = names.fill_null(self._topic)
        encoded = names.dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return _RowsByTopic(chunk, encoded.dictionary.to_pylist(), codes)


# --- Chunks ---


def chunks(incoming: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Cut rows into chunks that depend only on the rows: as many rows as the limits allow, and at least one."""
    held: list[pa.RecordBatch] = []
    held_rows = held_bytes = 0
    for arrived in incoming:
        rows = plain(arrived)
        sizes = row_bytes(rows)
        held.append(rows)
        held_rows += rows.num_rows
        held_bytes += int(sizes.sum())
        if held_rows < CHUNK_ROWS_MAX and held_bytes <= bytes_max:
            continue  # the next rows may belong to the same chunk
        if len(held) > 1:
            rows = pa.concat_batches(held)
            sizes = row_bytes(rows)
        begin = 0
        for end in _full_ends(sizes, bytes_max):
            yield rows.slice(begin, end - begin)
            begin = end
        held_rows = rows.num_rows - begin
        held_bytes = int(sizes[begin:].sum())
        held = [rows.slice(begin)] if held_rows else []  # joining an empty batch would copy
    if held_rows:
        yield pa.concat_batches(held)


def _full_ends(sizes: NDArray[np.int64], bytes_max: int) -> Iterator[int]:
    """The ends of full chunks: the next row does not fit, or the chunk has CHUNK_ROWS_MAX rows."""
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


def _partitions(chunk: _RowsByTopic, routes: Mapping[str, Route], turn: int) -> NDArray[np.int64]:
    """The partition of each row: the one it names, or by its partition key or key, or by turns."""
    counts = np.array([len(routes[topic].owners) for topic in chunk.topics], np.int64)
    chosen = column(chunk.rows, "partition")
    if chosen is None and counts.max() == 1:
        return np.zeros(len(chunk.codes), np.int64)
    counts_by_row = counts[chunk.codes]
    partitions = turn % counts_by_row
    keys = _partition_keys(chunk.rows)
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
        partitions = np.where(is_chosen, numbers, partitions)
    return partitions


def _partition_keys(chunk: pa.RecordBatch) -> pa.Array | None:
    explicit, keys = column(chunk, "partition_key"), column(chunk, "key")
    if explicit is None or keys is None:
        return keys if explicit is None else explicit
    return pc.coalesce(explicit, keys)


def _in_runs(
    chunk: _RowsByTopic, partitions: NDArray[np.int64], routes: Mapping[str, Route]
) -> tuple[pa.RecordBatch, list[_TopicRun]]:
    """The rows ordered by shard and, within it, by topic-partition; and the runs of this order."""
    rows = chunk.rows

    def run(topic: str, partition: int, count: int) -> _TopicRun:
        owner = routes[topic].owners[partition]
        return _TopicRun(
            topic, partition, BatchShard(routes[topic].keep, owner.journal, owner.shard), count
        )

    first = int(partitions[0])
    if len(chunk.topics) == 1 and not (partitions != first).any():
        return rows, [run(chunk.topics[0], first, rows.num_rows)]
    several = int(partitions.max()) + 1
    places, where, counts = np.unique(
        chunk.codes * np.int64(several) + partitions, return_inverse=True, return_counts=True
    )
    runs = [
        run(chunk.topics[place // several], place % several, count)
        for place, count in zip(places.tolist(), counts.tolist(), strict=True)
    ]
    # The sort is stable: within a shard, topics keep the order of their first appearance.
    order = sorted(range(len(runs)), key=lambda number: runs[number].key)
    rank = np.empty(len(runs), np.int64)
    rank[order] = np.arange(len(runs))
    ranks = rank[where]
    if (ranks[1:] < ranks[:-1]).any():
        rows = rows.take(pa.array(np.argsort(ranks, kind="stable")))
    return rows, [runs[number] for number in order]
