"""Batch reads: planning determines once what to read, and tasks then read exact ranges."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from runnel.client import Bus
from runnel.errors import ClientFault, OffsetGoneError, UnknownTopicError
from runnel.formats.wire import TopicState
from runnel.spark.connections import BrokerLogin, connection
from runnel.spark.options import BoundKind, ReadBound, ReadBounds, ReadOptions
from runnel.spark.read import schema
from runnel.spark.read.file_plan import plan_files
from runnel.spark.read.plan import (
    RANGE_BYTES,
    StoredOffsets,
    check_partitions,
    pack,
    resolve,
    split,
)
from runnel.spark.read.pushdown import Narrowing, narrowed
from runnel.spark.read.ranges import Range, ReadPartition, TopicRange, read

_REQUESTS_AT_ONCE: Final = 32
# Ranges with fewer messages are not sampled for their size.
_SAMPLED_FROM_MESSAGES: Final = 10_000
_SAMPLE_BYTES: Final = 64 * 1024
_NOT_KEPT: Final = "none"

_T = TypeVar("_T")


class BatchReader(DataSourceReader):
    """Reads topics, or a data directory, in sessions that do not push filters down."""

    def __init__(self, options: ReadOptions, columns: pa.Schema) -> None:
        self._options = options
        self._columns = columns
        self._narrowing = Narrowing()

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        if options.path is not None:
            tasks: Sequence[Sequence[Range]] = plan_files(options.path, options, self._narrowing)
        else:
            assert options.url is not None
            address = BrokerLogin(options.url, options.token)
            bus = connection(address)
            ranges = bus.run(_Plan(bus.bus, address, options, self._narrowing).ranges())
            tasks = pack(ranges, options.bytes_per_partition)
        # Without any, Spark would make a partition of its own, which `read` cannot read.
        return [ReadPartition(task) for task in tasks] or [ReadPartition(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ReadPartition)
        return schema.rows(chain.from_iterable(map(read, partition.ranges)), self._columns)


class PushdownBatchReader(BatchReader):
    """Applies pushed-down filters. Without `spark.sql.python.filterPushdown.enabled` Spark refuses such a reader."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        for pushed in filters:
            narrower = narrowed(self._narrowing, pushed)
            if narrower is None:
                yield pushed
            else:
                self._narrowing = narrower


class _Plan:
    """Plans one read of a broker's topics, with a limited number of requests at a time."""

    def __init__(
        self, bus: Bus, address: BrokerLogin, options: ReadOptions, narrowing: Narrowing
    ) -> None:
        self._bus = bus
        self._address = address
        self._options = options
        self._narrowing = narrowing
        self._room = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def ranges(self) -> list[tuple[TopicRange, int]]:
        """The ranges to read, in order, and their approximate size in bytes."""
        topics = await self._topics()
        counts = {topic.name: topic.partition_count for topic in topics}
        for places in (self._options.starting, self._options.ending):
            check_partitions(places, counts)
        found = await self._each(
            self._partition(topic.name, number, StoredOffsets(at.first_offset, at.next_offset))
            for topic in topics
            if self._narrowing.wants_topic(topic.name)
            for number, at in enumerate(topic.partitions)
            if self._narrowing.wants_partition(number)
        )
        return list(chain.from_iterable(found))

    async def _each(self, work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
        async def one(coroutine: Coroutine[Any, Any, _T]) -> _T:
            async with self._room:
                return await coroutine

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(coroutine)) for coroutine in work]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one error is enough to say what is wrong
        return [task.result() for task in tasks]

    async def _topics(self) -> list[TopicState]:
        pattern = self._options.pattern
        if pattern is None:
            names = self._options.topics
        else:
            names = tuple(
                topic.name
                for topic in await self._bus.topics(pattern)
                if topic.keep != _NOT_KEPT and self._narrowing.wants_topic(topic.name)
            )
        try:
            described = await self._each(map(self._described, names))
        except UnknownTopicError as unknown:
            raise UnknownTopicError(f"{unknown}{await self._hint()}") from None
        topics = [topic for topic in described if topic is not None]
        for topic in topics:
            if topic.keep == _NOT_KEPT:
                raise ClientFault(
                    f'topic {topic.name!r} is live only (keep = "none"): there is nothing of it to read'
                )
        return topics

    async def _described(self, name: str) -> TopicState | None:
        """The topic's state; None if it was deleted after a pattern found it."""
        try:
            return await self._bus.topic(name)
        except UnknownTopicError:
            if self._options.pattern is None:
                raise
            return None

    async def _hint(self) -> str:
        """The topics that an unknown topic may have meant."""
        known = [topic.name for topic in await self._bus.topics()]
        missing = [name for name in self._options.topics if name not in known]
        near = [match for name in missing for match in difflib.get_close_matches(name, known, 3)]
        if near:
            return f"; did you mean {' or '.join(near)}?"
        shown = ", ".join(known[:5])
        return f"; there are {len(known)} topics{': ' if known else ''}{shown}{', …' if known[5:] else ''}"

    async def _partition(
        self, topic: str, partition: int, stored: StoredOffsets
    ) -> list[tuple[TopicRange, int]]:
        options, narrowing = self._options, self._narrowing
        begin = await self._offset(options.starting, topic, partition, stored)
        end = await self._offset(options.ending, topic, partition, stored)
        offsets, times = narrowing.offset, narrowing.receive_ns
        if offsets.low is not None:
            begin = max(begin, offsets.low)
        if offsets.high is not None:
            end = min(end, offsets.high)
        if times.low is not None:
            begin = max(begin, await self._offset_at(topic, partition, times.low))
        if times.high is not None:
            end = min(end, await self._offset_at(topic, partition, times.high))
        if begin >= end:
            return []
        size = await self._message_bytes(topic, partition, begin, end) * (end - begin)
        pieces = -(-size // options.bytes_per_partition)
        return [
            (
                TopicRange(
                    address=self._address,
                    topic=topic,
                    partition=partition,
                    begin=first,
                    end=last,
                    rows=narrowing.rows(options.tags),
                    fails_on_data_loss=options.fails_on_data_loss,
                ),
                size // pieces,
            )
            for first, last in split(begin, end, pieces)
        ]

    async def _offset(
        self, places: ReadBounds, topic: str, partition: int, stored: StoredOffsets
    ) -> int:
        place: ReadBound = places.of(topic, partition)
        if place.kind is BoundKind.TIME:
            # Not beyond the end when the topic was described, so that all ends are of one moment.
            return min(await self._offset_at(topic, partition, place.value), stored.next)
        return resolve(
            places,
            place,
            topic,
            partition,
            stored,
            is_strict=self._options.fails_on_data_loss,
        )

    async def _offset_at(self, topic: str, partition: int, time_ns: int) -> int:
        """The first offset whose message was received at this time or later."""
        page = await self._bus.fetch(
            topic, partition=partition, time=time_ns, messages_max=1, bytes_max=1
        )
        firsts = [batch.runs()[0].base_offset for batch in page.batches[:1]]
        firsts += [gap.first_offset for gap in page.gaps]
        return min(firsts, default=page.next_offset)

    async def _message_bytes(self, topic: str, partition: int, begin: int, end: int) -> int:
        """The average size of a message, estimated from a sample."""
        if end - begin < _SAMPLED_FROM_MESSAGES:
            return max(1, RANGE_BYTES // (end - begin))
        try:
            page = await self._bus.fetch(topic, begin, partition=partition, bytes_max=_SAMPLE_BYTES)
        except (
            OffsetGoneError
        ):  # removed since the topic was described; the task that reads the range reports it
            return max(1, RANGE_BYTES // (end - begin))
        size = sum(batch.envelope.body_bytes for batch in page.batches)
        return max(1, size // max(1, len(page)))
