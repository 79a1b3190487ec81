"""Streaming reads: shards are read entry by entry, in micro-batches that Spark plans and repeats.

One process plans for as long as the query runs: it asks the broker for the ends of the shards, and decides what the
next micro-batch contains. Tasks in other processes read exactly what the plan says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from runnel.errors import ClientFault, OffsetAheadError, OffsetGoneError, UnknownTopicError
from runnel.formats.wire import ShardState
from runnel.spark.connections import BrokerLogin, close_connections, connection
from runnel.spark.options import BoundKind, ReadOptions
from runnel.spark.read import schema, stream_offset
from runnel.spark.read.plan import pack, split
from runnel.spark.read.pushdown import RowFilter
from runnel.spark.read.query_cursor import QueryCursor, StreamPartition
from runnel.spark.read.ranges import ShardRange, logger, read
from runnel.spark.read.stream_limits import Lookahead, TriggerLimit
from runnel.spark.read.stream_offset import Offset, Positions, ShardReadPosition, StreamShard
from runnel.spark.runtime.fault_text import faults_without_trace

# Finding the shards that match takes the broker longer the more topics it has, and Spark asks a hundred times a second
# while there is nothing new. At most this share of the time is spent on it.
_REQUEST_SHARE: Final = 0.2
# The assumed size of an entry without a sample: small micro-batches are not worth a request.
_ENTRY_BYTES: Final = 16 * 1024
_SAMPLED_FROM_ENTRIES: Final = 256
_SAMPLE_BYTES: Final = 256 * 1024


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads the micro-batches of one streaming query."""

    def __init__(self, options: ReadOptions, columns: pa.Schema) -> None:
        assert options.url is not None
        self._options = options
        self._columns = columns
        self._address = BrokerLogin(options.url, options.token)
        self._states: dict[StreamShard, ShardState] = {}
        self._next_request_at_s = 0.0
        self._target: dict[StreamShard, ShardState] | None = None  # with the trigger availableNow
        self._lookahead = Lookahead(self._address, options.patterns)
        self._cursor = QueryCursor(self._address, options.patterns, options.cursor)

    # --- Offsets: in the planning process ---

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        place = self._options.starting.default
        time_ns = place.value if place.kind is BoundKind.TIME else None
        states = self._fetch_states(time_ns)
        if not states:
            logger.warning("no topic matches %s yet: waiting", ", ".join(self._options.patterns))
        places: Positions = {}
        for key, state in states.items():
            match place.kind:
                case BoundKind.LATEST:
                    entry = state.next_entry
                case BoundKind.TIME:
                    entry = state.time_entry
                case _:
                    entry = state.first_entry
            places[key] = ShardReadPosition(state.epoch, entry, state.next_entry)
        return stream_offset.encode(places)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        places = stream_offset.decode(start)
        self._cursor.move(places)
        states = self._target if self._target is not None else self._fetch_states()
        ends = dict(places)
        backlog: dict[StreamShard, ShardState] = {}
        for key, state in states.items():
            place = places.get(key)
            if place is None:
                # Its messages come with the next micro-batch, after the checkpoint has recorded where they begin.
                ends[key] = ShardReadPosition(state.epoch, state.first_entry, state.next_entry)
            elif (state.epoch, state.next_entry) != (place.epoch, place.entry):
                backlog[key] = state
        if ends == places and not backlog:
            self._cursor.arrive(places)
            # Waits instead of caching the answer, which would be outdated by then.
            time.sleep(max(0.0, self._next_request_at_s - time.monotonic()))
            return start
        allowed = self._limit(limit)
        if allowed is None:
            ends |= {
                key: places[key].moved(state.epoch, state.next_entry)
                for key, state in backlog.items()
            }
        else:
            ends |= self._lookahead.ends(places, backlog, allowed)
        return stream_offset.encode(ends)

    def _limit(self, limit: ReadLimit) -> TriggerLimit | None:
        """The limit of a micro-batch; None if Spark wants everything, whatever the options say."""
        if isinstance(limit, ReadAllAvailable):
            return None
        rows_max, bytes_max = (
            self._options.rows_per_trigger_max,
            self._options.bytes_per_trigger_max,
        )
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        if rows_max is None and bytes_max is None:
            return None
        return TriggerLimit(rows_max, bytes_max)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        options = self._options
        if options.rows_per_trigger_max is not None:
            return ReadMaxRows(options.rows_per_trigger_max)
        if options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(options.bytes_per_trigger_max)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802 - Spark's name
        """The ends of shards at the last request. Spark calls this far too often to ask the broker each time."""
        if not self._states:
            return None
        return stream_offset.encode(
            {key: ShardReadPosition(at.epoch, at.next_entry) for key, at in self._states.items()}
        )

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = self._fetch_states()

    def _fetch_states(self, time_ns: int | None = None) -> dict[StreamShard, ShardState]:
        bus = connection(self._address)
        begin_s = time.monotonic()
        found = bus.shards(*self._options.patterns, time=time_ns)
        took_s = time.monotonic() - begin_s
        self._next_request_at_s = begin_s + took_s / _REQUEST_SHARE
        self._states = {StreamShard(state.journal, state.shard): state for state in found}
        return self._states

    # --- The ranges of each task ---

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        places, ends = stream_offset.decode(start), stream_offset.decode(end)
        self._cursor.move(places)
        sized = [
            piece
            for key, place in ends.items()
            if key in places
            and (places[key].epoch, places[key].entry) != (place.epoch, place.entry)
            for piece in self._pieces(key, places[key], place)
        ]
        tasks = pack(sized, self._options.bytes_per_partition)
        # The first task moves the cursor, if only tasks know the query's id.
        steps = chain((self._cursor.step(places),), iter(lambda: None, 0))
        return [StreamPartition(task, step) for task, step in zip(tasks, steps, strict=False)]

    def _pieces(
        self, key: StreamShard, begin: ShardReadPosition, end: ShardReadPosition
    ) -> Iterator[tuple[ShardRange, int]]:
        options = self._options
        count = max(0, end.entry - begin.entry)
        size = count * self._entry_bytes(key, begin, count)
        pieces = -(-size // options.bytes_per_partition)
        edges = split(begin.entry, end.entry, pieces) if count else [(begin.entry, end.entry)]
        for first, last in edges:
            yield (
                ShardRange(
                    address=self._address,
                    journal=key.journal,
                    shard=key.shard,
                    epoch=begin.epoch,
                    begin=first,
                    end=last,
                    patterns=options.patterns,
                    settled=begin.settled,
                    is_first=first == begin.entry,
                    rows=RowFilter(options.tags),
                    fails_on_data_loss=options.fails_on_data_loss,
                ),
                size // max(1, pieces),
            )

    def _entry_bytes(self, key: StreamShard, begin: ShardReadPosition, count: int) -> int:
        """The average size of the matching messages of an entry, estimated from a sample if there are many entries."""
        if count < _SAMPLED_FROM_ENTRIES:
            return _ENTRY_BYTES
        state = self._states.get(key)
        first_entry = begin.entry if state is None else max(begin.entry, state.first_entry)
        try:
            page = connection(self._address).fetch_shard(
                key.journal,
                key.shard,
                first_entry,
                patterns=self._options.patterns,
                bytes_max=_SAMPLE_BYTES,
            )
        except (OffsetGoneError, OffsetAheadError, UnknownTopicError):
            return _ENTRY_BYTES  # the tasks that read it report the loss
        size = sum(batch.envelope.body_bytes for batch in page.batches)
        return max(1, size // max(1, page.next_entry - first_entry))

    def commit(self, end: Offset) -> None:
        """Does nothing: Spark calls it too late, and not for the last micro-batch. The cursor follows `start`."""

    def stop(self) -> None:
        close_connections()

    # --- In a task ---

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, StreamPartition)
        if partition.step is not None:
            partition.step.take()
        return schema.rows(chain.from_iterable(map(read, partition.ranges)), self._columns)


class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream with wrong options or columns: every call raises the error.

    Spark stops a reader after an error, even a reader that it never got. So if `streamReader` raised the error, the
    user would see the error of that stop instead.
    """

    def __init__(self, fault: ClientFault) -> None:
        self._fault = fault

    def _refuse(self) -> NoReturn:
        with faults_without_trace():
            raise self._fault

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        self._refuse()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: ARG002, N802 - Spark's name
        self._refuse()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        self._refuse()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._refuse()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # noqa: ARG002
        self._refuse()

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:  # noqa: ARG002
        self._refuse()
