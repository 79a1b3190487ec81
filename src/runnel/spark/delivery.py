"""Publishing a task's batches in order: several under way, and again whatever was not acknowledged.

A Python worker of Spark runs one task after the other, so it keeps its connection from task to task.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from runnel.client.results import BatchReceipt
from runnel.errors import (
    ProducerFault,
    ProducerFencedError,
    ProducerForgottenError,
    RunnelError,
    Unavailable,
)
from runnel.formats.batch import Batch
from runnel.formats.wire import Route, Welcome
from runnel.spark.connections import Address, Patience, connected

# Far fewer than the batches whose numbers a broker remembers; enough that no sync is waited for alone.
_UNDER_WAY_MAX: Final = 8
_CLIENT_NAME: Final = "spark writer"


class _UnderWay(NamedTuple):
    batch: Batch
    begun_at: float
    answer: concurrent.futures.Future[BatchReceipt]


class Tally(msgspec.Struct):
    """What became of a task's rows. Repeated ones had been stored by an earlier attempt."""

    rows: int = 0
    batches: int = 0
    rows_repeated: int = 0

    def count(self, batch: Batch, receipt: BatchReceipt) -> None:
        self.rows += len(batch)
        self.batches += 1
        if receipt.is_repeated:
            self.rows_repeated += len(batch)


class Outlet:
    """A connection that publishes. Everything it does is given up `deadline_s` after it last got anywhere."""

    def __init__(self, address: Address, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._bus = connected(address, _CLIENT_NAME, deadline_s, Patience(deadline_s))

    @property
    def server(self) -> Welcome:
        return self._bus.server

    def close(self) -> None:
        self._bus.close(is_flushing=False)

    def find_routes(self, topics: Sequence[str]) -> Mapping[str, Route]:
        """Where these topics' messages go. Brokers are asked once for each."""
        return self._bus.routes(*topics)

    def publish(self, batches: Iterable[Batch], tally: Tally | None = None) -> Tally:
        """All of them, in this order. Returns when the last is acknowledged.

        They are counted in `tally` as they are acknowledged, so whoever makes them can see how far this is.
        """
        tally = Tally() if tally is None else tally
        under_way: deque[_UnderWay] = deque()
        try:
            for batch in batches:
                if len(under_way) == _UNDER_WAY_MAX:
                    self._settle_oldest(under_way, tally)
                under_way.append(_UnderWay(batch, time.monotonic(), self._begin(batch)))
            while under_way:
                self._settle_oldest(under_way, tally)
        finally:
            for each in under_way:
                each.answer.cancel()
        return tally

    def _settle_oldest(self, under_way: deque[_UnderWay], tally: Tally) -> None:
        batch, begun_at, answer = under_way[0]
        try:
            receipt = answer.result()
        except RunnelError as error:
            # Those behind it may have failed for want of it: start over from here, one by one.
            concurrent.futures.wait([each.answer for each in under_way])
            again = [each.batch for each in under_way]
            under_way.clear()
            patience = Patience(begun_at + self._deadline_s - time.monotonic())
            if isinstance(error, Unavailable):
                patience.wait_or_raise(error)
            for batch in again:
                tally.count(batch, self._publish_alone(batch, patience))
                patience = Patience(self._deadline_s)
        else:
            under_way.popleft()
            tally.count(batch, receipt)

    def _begin(self, batch: Batch) -> concurrent.futures.Future[BatchReceipt]:
        # The loop begins what it is given in order, and a frame is written before the first wait.
        bus = self._bus.bus
        return asyncio.run_coroutine_threadsafe(bus.publish_batch(batch), bus.loop)

    def _publish_alone(self, batch: Batch, patience: Patience) -> BatchReceipt:
        """With nothing else under way: what is refused now is refused for good."""
        while True:
            try:
                return self._begin(batch).result()
            except Unavailable as error:
                patience.wait_or_raise(error)
            except (ProducerFencedError, ProducerForgottenError):
                raise
            except ProducerFault as fault:
                raise ProducerFault(
                    f"{fault}. Spark ran a task again, and its rows were not the same, or not in the same "
                    "order: sort them within their partitions before they are written"
                ) from fault


# --- The one of this process ---

_kept: dict[tuple[int, Address, float], Outlet] = {}


@contextmanager
def outlet_to(address: Address, deadline_s: float) -> Iterator[Outlet]:
    """This process's connection, which stays for the next task unless this one fails."""
    # By process, as a fork must not use another's sockets. Taken out while it is used: should a process ever run two
    # tasks at once, each has its own.
    key = (os.getpid(), address, deadline_s)
    outlet = _kept.pop(key, None) or Outlet(address, deadline_s)
    try:
        yield outlet
    except BaseException:
        outlet.close()
        raise
    if (other := _kept.get(key)) is not None:
        other.close()
    _kept[key] = outlet


def close_outlets() -> None:
    """Close those of this process."""
    for key in [key for key in _kept if key[0] == os.getpid()]:
        _kept.pop(key).close()
