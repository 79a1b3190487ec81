"""Publishes a task's batches in order, several at a time, and repeats batches that were not acknowledged.

A Python worker of Spark runs one task after the other, so it keeps its connection from task to task.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from runnel.client import BatchReceipt
from runnel.errors import (
    ProducerFault,
    ProducerFencedError,
    ProducerForgottenError,
    RunnelError,
    Unavailable,
)
from runnel.formats.batch import Batch
from runnel.formats.wire import Route, Welcome
from runnel.spark.connections import Backoff, BrokerLogin, ProcessCache, open_connection

# Far fewer than the batch numbers that a broker remembers; enough that batches share the wait for a sync.
_IN_FLIGHT_MAX: Final = 8
_CLIENT_NAME: Final = "spark writer"


class _InFlight(NamedTuple):
    """A batch that was sent and is not acknowledged yet."""

    batch: Batch
    begun_at: float
    answer: concurrent.futures.Future[BatchReceipt]


class Tally(msgspec.Struct):
    """Counts a task's published rows. An earlier attempt had stored the repeated rows."""

    rows: int = 0
    batches: int = 0
    rows_repeated: int = 0

    def count(self, batch: Batch, receipt: BatchReceipt) -> None:
        self.rows += len(batch)
        self.batches += 1
        if receipt.is_repeated:
            self.rows_repeated += len(batch)


class TaskPublisher:
    """A connection that publishes. It gives up `deadline_s` after its last progress."""

    def __init__(self, address: BrokerLogin, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._bus = open_connection(address, _CLIENT_NAME, deadline_s, Backoff(deadline_s))

    @property
    def server(self) -> Welcome:
        return self._bus.server

    def close(self) -> None:
        self._bus.close(is_flushing=False)

    def find_routes(self, topics: Sequence[str]) -> Mapping[str, Route]:
        """The routes of these topics. The connection asks the broker once for each topic."""
        return self._bus.routes(*topics)

    def publish(self, batches: Iterable[Batch], tally: Tally | None = None) -> Tally:
        """Publish batches in this order. Returns when the last is acknowledged.

        Each acknowledged batch is counted in `tally` at once, so that the caller can report progress.
        """
        tally = Tally() if tally is None else tally
        in_flight: deque[_InFlight] = deque()
        try:
            for batch in batches:
                if len(in_flight) == _IN_FLIGHT_MAX:
                    self._settle_oldest(in_flight, tally)
                in_flight.append(_InFlight(batch, time.monotonic(), self._begin(batch)))
            while in_flight:
                self._settle_oldest(in_flight, tally)
        finally:
            for each in in_flight:
                each.answer.cancel()
        return tally

    def _settle_oldest(self, in_flight: deque[_InFlight], tally: Tally) -> None:
        batch, begun_at, answer = in_flight[0]
        try:
            receipt = answer.result()
        except RunnelError as error:
            # The batches behind it may have failed because this one is missing: repeat them one by one.
            concurrent.futures.wait([each.answer for each in in_flight])
            again = [each.batch for each in in_flight]
            in_flight.clear()
            backoff = Backoff(begun_at + self._deadline_s - time.monotonic())
            if isinstance(error, Unavailable):
                backoff.wait_or_raise(error)
            for batch in again:
                tally.count(batch, self._publish_alone(batch, backoff))
                backoff = Backoff(self._deadline_s)
        else:
            in_flight.popleft()
            tally.count(batch, receipt)

    def _begin(self, batch: Batch) -> concurrent.futures.Future[BatchReceipt]:
        # The loop starts coroutines in order, and each writes its frame before its first wait.
        bus = self._bus.bus
        return asyncio.run_coroutine_threadsafe(bus.publish_batch(batch), bus.loop)

    def _publish_alone(self, batch: Batch, backoff: Backoff) -> BatchReceipt:
        """Publish with no other batch in flight: a refusal is final."""
        while True:
            try:
                return self._begin(batch).result()
            except Unavailable as error:
                backoff.wait_or_raise(error)
            except (ProducerFencedError, ProducerForgottenError):
                raise
            except ProducerFault as fault:
                raise ProducerFault(
                    f"{fault}. Spark ran a task again, and its rows were not the same, or not in the same "
                    "order: sort them within their partitions before they are written"
                ) from fault


# --- The publishers of this process ---

_publishers: Final[ProcessCache[tuple[BrokerLogin, float], TaskPublisher]] = ProcessCache()


@contextmanager
def publisher_to(address: BrokerLogin, deadline_s: float) -> Iterator[TaskPublisher]:
    """This process's publisher, kept for the next task unless this one fails."""
    # Removed from the cache while in use, so that two tasks at once would each have their own.
    key = (address, deadline_s)
    publisher = _publishers.pop(key) or TaskPublisher(address, deadline_s)
    try:
        yield publisher
    except BaseException:
        publisher.close()
        raise
    if (other := _publishers.get(key)) is not None:
        other.close()
    _publishers.put(key, publisher)


def close_publishers() -> None:
    """Close all publishers of this process."""
    for publisher in _publishers.pop_all():
        publisher.close()
