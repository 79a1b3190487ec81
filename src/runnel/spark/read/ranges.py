"""The ranges that Spark sends to its workers, and reading them: the same rows every time."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from runnel.client import Bus, Gap
from runnel.errors import ClientFault, OffsetAheadError, OffsetGoneError, UnknownTopicError
from runnel.formats import wire
from runnel.formats.batch import Batch, unpack_blocks
from runnel.log.reading import OfflineLog, Selection, Stretch
from runnel.spark.connections import BrokerLogin, connection
from runnel.spark.read.page_connection import (
    PageConnectionError,
    close_page_connection,
    page_connection,
)
from runnel.spark.read.pushdown import RowFilter

logger = logging.getLogger("runnel.spark")

# Small, so that Spark can begin soon.
_FIRST_PAGE_BYTES: Final = 512 * 1024
_PAGE_BYTES: Final = 2 * 2**20


class TopicRange(msgspec.Struct, frozen=True, kw_only=True):
    """The offsets of one topic-partition, from `begin` on and below `end`."""

    address: BrokerLogin
    topic: str
    partition: int
    begin: int
    end: int
    rows: RowFilter = RowFilter()
    fails_on_data_loss: bool = True

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}], offsets {self.begin} to {self.end - 1}"


class ShardRange(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a shard, from `begin` on and below `end`, and the patterns of the topics to read.

    Entries below `settled` existed before the query began, so what retention removed of them is no loss. If a shard was
    recreated, only the range with `is_first` reads it from its beginning.
    """

    address: BrokerLogin
    journal: str
    shard: int
    epoch: int
    begin: int
    end: int
    patterns: tuple[str, ...]
    settled: int = 0
    is_first: bool = True
    rows: RowFilter = RowFilter()
    fails_on_data_loss: bool = True

    def __str__(self) -> str:
        return f"shard {self.journal}/{self.shard}, entries {self.begin} to {self.end - 1}"


class FileRange(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of a data directory's files, and the messages to read from them."""

    path: str
    stretches: tuple[Stretch, ...]
    selection: Selection
    rows: RowFilter = RowFilter()
    fails_on_data_loss: bool = True

    def __str__(self) -> str:
        return f"files of {self.path}"


Range: TypeAlias = TopicRange | ShardRange | FileRange


class ReadPartition(InputPartition):
    """The ranges that one task reads, one after the other."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(tuple(ranges))

    @property
    def ranges(self) -> tuple[Range, ...]:
        found: tuple[Range, ...] = self.value
        return found


def read(work: Range) -> Iterator[Batch]:
    """The rows of a range, in order. Lost data is an error, or logged and skipped, as the range says."""
    if TaskContext.get() is not None:
        _freeze_worker_objects()
    if isinstance(work, TopicRange):
        batches = _read_topic(work)
    elif isinstance(work, ShardRange):
        batches = _read_shard(work)
    else:
        batches = _read_files(work)
    if not work.rows:
        return batches
    return filter(None, map(work.rows.select, batches))


@lru_cache(maxsize=1)
def _freeze_worker_objects() -> None:
    """Exclude the worker's current objects, which are modules and stay, from garbage collection.

    Spark's Python workers collect garbage after every task; this saves tens of milliseconds per task (bench/spark.py).
    """
    gc.freeze()


def report_loss(work: Range, what: str) -> None:
    """Raise or log that data of a range is lost."""
    if work.fails_on_data_loss:
        raise ClientFault(
            f"{work}: data is gone: {what}. With option failOnDataLoss=false the query goes on without it"
        )
    logger.warning("%s: data is gone, reading goes on without it: %s", work, what)


# --- From a broker ---


class _Page(NamedTuple):
    """A page of a partition or shard; `next` is the offset or entry behind it."""

    batches: Sequence[Batch]
    next: int
    gaps: Sequence[Gap]


class _Pages(Protocol):
    """Requests pages of a range, from an offset or entry on: over a page connection or through a client."""

    def head(self, number: int, begin: int, bytes_max: int) -> wire.Head:
        """The request with this number, for a page connection."""

    def page(self, answer: wire.Answer, tail: memoryview) -> _Page:
        """The page in the answer of a page connection."""

    async def fetch(self, bus: Bus, begin: int, bytes_max: int) -> _Page:
        """Fetch a page through a client."""


def _read_pages(address: BrokerLogin, pages: _Pages, begin: int, end: int) -> Iterator[_Page]:
    """The pages of a range. The next page is requested before this one is processed."""
    try:
        for page in _over_page_connection(address, pages, begin, end):
            begin = page.next
            yield page
    except PageConnectionError as error:
        logger.debug(
            "reading continues through a client instead of a page connection to %s: %s",
            address.url,
            error,
        )
    if begin < end:
        yield from _through_client(address, pages, begin, end)


def _over_page_connection(
    address: BrokerLogin, pages: _Pages, begin: int, end: int
) -> Iterator[_Page]:
    pages_connection = page_connection(address)
    pages_connection.ask(pages.head(pages_connection.next_number(), begin, _FIRST_PAGE_BYTES))
    try:
        while begin < end:
            page = pages.page(*pages_connection.take())
            begin = _advanced(page, begin, end)
            if begin < end:
                pages_connection.ask(pages.head(pages_connection.next_number(), begin, _PAGE_BYTES))
            yield page
    finally:
        if not pages_connection.is_idle():
            close_page_connection(address)


def _through_client(address: BrokerLogin, pages: _Pages, begin: int, end: int) -> Iterator[_Page]:
    bus = connection(address).bus

    def ask(bytes_max: int) -> Future[_Page]:
        return asyncio.run_coroutine_threadsafe(pages.fetch(bus, begin, bytes_max), bus.loop)

    requested = ask(_FIRST_PAGE_BYTES)
    try:
        while begin < end:
            page = requested.result()
            begin = _advanced(page, begin, end)
            if begin < end:
                requested = ask(_PAGE_BYTES)
            yield page
    finally:
        requested.cancel()


def _advanced(page: _Page, begin: int, end: int) -> int:
    if page.next <= begin:
        raise ClientFault(f"nothing follows {begin}, but {end - begin} more were promised")
    return page.next


class _TopicPages:
    """Requests pages of a topic-partition."""

    def __init__(self, work: TopicRange) -> None:
        self._topic = work.topic
        self._partition = work.partition

    def head(self, number: int, begin: int, bytes_max: int) -> wire.Head:
        return wire.Fetch(number, self._topic, self._partition, begin, bytes_max=bytes_max)

    def page(self, answer: wire.Answer, tail: memoryview) -> _Page:
        assert isinstance(answer, wire.Fetched)
        return _Page(unpack_blocks(tail), answer.next_offset, answer.gaps)

    async def fetch(self, bus: Bus, begin: int, bytes_max: int) -> _Page:
        page = await bus.fetch(self._topic, begin, partition=self._partition, bytes_max=bytes_max)
        return _Page(page.batches, page.next_offset, page.gaps)


def _read_topic(work: TopicRange) -> Iterator[Batch]:
    begin = work.begin
    while begin < work.end:
        try:
            for page in _read_pages(work.address, _TopicPages(work), begin, work.end):
                begin = page.next
                for gap in page.gaps:
                    if gap.first_offset < work.end:
                        report_loss(work, _describe_gap(gap))
                if page.next <= work.end:
                    yield from page.batches
                else:
                    yield from filter(None, (_below(batch, work.end) for batch in page.batches))
            return
        except OffsetGoneError as gone:
            report_loss(work, str(gone))
            begin = gone.first_offset
        except OffsetAheadError as ahead:
            report_loss(work, f"{ahead}: the topic was made anew, or the broker's data replaced")
            return
        except UnknownTopicError as unknown:  # deleted since the read was planned
            report_loss(work, str(unknown))
            return


def _below(batch: Batch, end: int) -> Batch | None:
    """The rows of a partition's batch below an offset."""
    count = sum(min(max(end - run.base_offset, 0), run.count) for run in batch.runs())
    return batch.slice(0, count) if count else None


class _ShardPages:
    """Requests pages of a shard."""

    def __init__(self, work: ShardRange, epoch: int) -> None:
        self._work = work
        self._epoch = epoch

    def head(self, number: int, begin: int, bytes_max: int) -> wire.Head:
        work = self._work
        return wire.FetchShard(
            number,
            work.journal,
            work.shard,
            begin,
            self._end(begin),
            work.patterns,
            self._epoch,
            bytes_max,
        )

    def page(self, answer: wire.Answer, tail: memoryview) -> _Page:
        assert isinstance(answer, wire.ShardFetched)
        return _Page(unpack_blocks(tail), answer.next_entry, answer.gaps)

    async def fetch(self, bus: Bus, begin: int, bytes_max: int) -> _Page:
        page = await bus.fetch_shard(
            self._work.journal,
            self._work.shard,
            begin,
            end_entry=self._end(begin),
            patterns=self._work.patterns,
            epoch=self._epoch,
            bytes_max=bytes_max,
        )
        return _Page(page.batches, page.next_entry, page.gaps)

    def _end(self, begin: int) -> int:
        """The end of a page. No page crosses `settled`, because losses before and behind it are treated differently."""
        settled, end = self._work.settled, self._work.end
        return settled if begin < settled < end else end


def _read_shard(work: ShardRange) -> Iterator[Batch]:
    begin, epoch = work.begin, work.epoch
    # In another epoch the shard may have begun at 1 again, so that the end lies before the begin. The broker knows.
    is_checked = begin < work.end
    while begin < work.end or not is_checked:
        try:
            if not is_checked:
                is_checked = True
                bus = connection(work.address)
                bus.run(_ShardPages(work, epoch).fetch(bus.bus, begin, 1))
                return
            for page in _read_pages(work.address, _ShardPages(work, epoch), begin, work.end):
                for gap in page.gaps:
                    if begin >= work.settled or gap.reason != "retention":
                        report_loss(work, _describe_gap(gap))
                begin = page.next
                yield from page.batches
            return
        except OffsetGoneError as gone:
            report_loss(work, _entries_gone(gone))
            epoch = 0
            if gone.gap > 0 or work.is_first:
                begin = gone.first_offset
        except OffsetAheadError as ahead:
            report_loss(work, f"{ahead}: the broker's data was replaced")
            epoch = 0
            begin = 1 if work.is_first else work.end
        except UnknownTopicError as unknown:  # the last topic in it was deleted
            report_loss(work, str(unknown))
            return


def _entries_gone(gone: OffsetGoneError) -> str:
    if gone.gap > 0:
        return f"the shard begins at entry {gone.first_offset}; {gone.gap} entries from {gone.offset} on are gone"
    return f"the shard was made anew, and begins at entry {gone.first_offset}"


def _describe_gap(gap: Gap) -> str:
    where = f"{gap.topic}[{gap.partition}] offsets {gap.first_offset} to {gap.next_offset - 1}, "
    return f"{where if gap.topic else ''}{gap.reason}: {gap.text}"


# --- From files ---


def _read_files(work: FileRange) -> Iterator[Batch]:
    # A new object for each task: what it caches of the catalogue must not outlive the query.
    log = OfflineLog(work.path)
    for stretch in work.stretches:
        yield from log.read(stretch, work.selection)
    report = log.report
    if report.damage:
        report_loss(work, f"{report.damage_count} damaged places, the first {report.damage[0]}")
    if report.gone:
        report_loss(work, f"removed by retention before it was read: {', '.join(report.gone)}")
