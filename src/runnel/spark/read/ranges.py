"""Pieces of work that Spark sends to its workers, and how each is read: exact ranges, the same rows every time."""

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

# Small at first, so that Spark has something to do soon.
_FIRST_PAGE_BYTES: Final = 512 * 1024
_PAGE_BYTES: Final = 2 * 2**20


class TopicRange(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets of one partition, from `begin` on and below `end`."""

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
    """Entries of a shard, from `begin` on and below `end`, and the topics wanted of them.

    Entries below `settled` were there before the query first looked: what is missing among them, it never had. A shard
    that was made anew is read from its beginning by the piece that `is_first`, and by no other.
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
    """Blocks of a data directory's files, and what is wanted of them."""

    path: str
    stretches: tuple[Stretch, ...]
    selection: Selection
    rows: RowFilter = RowFilter()
    fails_on_data_loss: bool = True

    def __str__(self) -> str:
        return f"files of {self.path}"


Range: TypeAlias = TopicRange | ShardRange | FileRange


class ReadPartition(InputPartition):
    """What one task reads, one range after the other."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(tuple(ranges))

    @property
    def ranges(self) -> tuple[Range, ...]:
        found: tuple[Range, ...] = self.value
        return found


def read(work: Range) -> Iterator[Batch]:
    """The wanted rows, in order. What is gone is an error, or told and passed over, as the range says."""
    if TaskContext.get() is not None:
        _settle_worker()
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
def _settle_worker() -> None:
    """A Python worker of Spark's looks through all its objects for garbage after every task.

    What it has now is modules, and stays: without it each task takes tens of milliseconds less (bench/spark.py).
    """
    gc.freeze()


def lost(work: Range, what: str) -> None:
    """Data of a range is gone."""
    if work.fails_on_data_loss:
        raise ClientFault(
            f"{work}: data is gone: {what}. With option failOnDataLoss=false the query goes on without it"
        )
    logger.warning("%s: data is gone, reading goes on without it: %s", work, what)


# --- From a broker ---


class _Page(NamedTuple):
    batches: Sequence[Batch]
    next: int
    gaps: Sequence[Gap]


class _Pages(Protocol):
    """How the pages of a range are asked for, from an offset or entry on and so many bytes: in two ways."""

    def head(self, number: int, begin: int, bytes_max: int) -> wire.Head:
        """The request of this number, for a line."""

    def page(self, answer: wire.Answer, tail: memoryview) -> _Page:
        """What a line brought."""

    async def fetch(self, bus: Bus, begin: int, bytes_max: int) -> _Page:
        """Through a client."""


def _read_pages(address: BrokerLogin, pages: _Pages, begin: int, end: int) -> Iterator[_Page]:
    """Page after page; the next is on its way while this one is used."""
    try:
        for page in _over_line(address, pages, begin, end):
            begin = page.next
            yield page
    except PageConnectionError as error:
        logger.debug("a client goes on in the place of a line to %s: %s", address.url, error)
    if begin < end:
        yield from _through_client(address, pages, begin, end)


def _over_line(address: BrokerLogin, pages: _Pages, begin: int, end: int) -> Iterator[_Page]:
    line = page_connection(address)
    line.ask(pages.head(line.next_number(), begin, _FIRST_PAGE_BYTES))
    try:
        while begin < end:
            page = pages.page(*line.take())
            begin = _advanced(page, begin, end)
            if begin < end:
                line.ask(pages.head(line.next_number(), begin, _PAGE_BYTES))
            yield page
    finally:
        if not line.is_idle():
            close_page_connection(address)


def _through_client(address: BrokerLogin, pages: _Pages, begin: int, end: int) -> Iterator[_Page]:
    bus = connection(address).bus

    def ask(bytes_max: int) -> Future[_Page]:
        return asyncio.run_coroutine_threadsafe(pages.fetch(bus, begin, bytes_max), bus.loop)

    on_its_way = ask(_FIRST_PAGE_BYTES)
    try:
        while begin < end:
            page = on_its_way.result()
            begin = _advanced(page, begin, end)
            if begin < end:
                on_its_way = ask(_PAGE_BYTES)
            yield page
    finally:
        on_its_way.cancel()


def _advanced(page: _Page, begin: int, end: int) -> int:
    if page.next <= begin:
        raise ClientFault(f"nothing follows {begin}, but {end - begin} more were promised")
    return page.next


class _TopicPages:
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
                        lost(work, _told(gap))
                if page.next <= work.end:
                    yield from page.batches
                else:
                    yield from filter(None, (_below(batch, work.end) for batch in page.batches))
            return
        except OffsetGoneError as gone:
            lost(work, str(gone))
            begin = gone.first_offset
        except OffsetAheadError as ahead:
            lost(work, f"{ahead}: the topic was made anew, or the broker's data replaced")
            return
        except UnknownTopicError as unknown:  # deleted since the read was planned
            lost(work, str(unknown))
            return


def _below(batch: Batch, end: int) -> Batch | None:
    """The rows of a partition's batch below an offset."""
    count = sum(min(max(end - run.base_offset, 0), run.count) for run in batch.runs())
    return batch.slice(0, count) if count else None


class _ShardPages:
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
        """What is missing before and behind `settled` is judged differently, so no page has both."""
        settled, end = self._work.settled, self._work.end
        return settled if begin < settled < end else end


def _read_shard(work: ShardRange) -> Iterator[Batch]:
    begin, epoch = work.begin, work.epoch
    # In another epoch the shard may have begun at 1 again, so that the end lies before the beginning: the broker tells.
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
                        lost(work, _told(gap))
                begin = page.next
                yield from page.batches
            return
        except OffsetGoneError as gone:
            lost(work, _entries_gone(gone))
            epoch = 0
            if gone.gap > 0 or work.is_first:
                begin = gone.first_offset
        except OffsetAheadError as ahead:
            lost(work, f"{ahead}: the broker's data was replaced")
            epoch = 0
            begin = 1 if work.is_first else work.end
        except UnknownTopicError as unknown:  # the last topic in it was deleted
            lost(work, str(unknown))
            return


def _entries_gone(gone: OffsetGoneError) -> str:
    if gone.gap > 0:
        return f"the shard begins at entry {gone.first_offset}; {gone.gap} entries from {gone.offset} on are gone"
    return f"the shard was made anew, and begins at entry {gone.first_offset}"


def _told(gap: Gap) -> str:
    where = f"{gap.topic}[{gap.partition}] offsets {gap.first_offset} to {gap.next_offset - 1}, "
    return f"{where if gap.topic else ''}{gap.reason}: {gap.text}"


# --- From files ---


def _read_files(work: FileRange) -> Iterator[Batch]:
    # Made anew for each task: what it remembers of the catalogue must not outlive the query.
    log = OfflineLog(work.path)
    for stretch in work.stretches:
        yield from log.read(stretch, work.selection)
    report = log.report
    if report.damage:
        lost(work, f"{report.damage_count} damaged places, the first {report.damage[0]}")
    if report.gone:
        lost(work, f"removed by retention before it was read: {', '.join(report.gone)}")
