"""Samples the registry every interval, and publishes it as JSON on `!system/metrics/…`.

broker          the whole broker: rates over the interval, totals, gauges, histograms, limits and their use
topics          the busiest topics, and the rest by journal
journals        traffic, storage, queues and sync times by journal
connections     the busiest connections
subscriptions   live subscriptions, the most behind first
work            acknowledged subscriptions, the largest backlog first
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from runnel.broker.monitoring import metric_tables
from runnel.broker.monitoring.histogram import HistogramSnapshot
from runnel.broker.monitoring.metric_tables import (
    BusiestConnections,
    ConnectionStats,
    LiveSubscriptionStats,
    Table,
)
from runnel.broker.monitoring.metrics import Metrics
from runnel.broker.monitoring.store_statistics import StoreStatistics
from runnel.broker.monitoring.throttled import Throttled
from runnel.config import Settings
from runnel.errors import RunnelError
from runnel.formats.work_heads import SubscriptionState
from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger

METRICS_TOPIC: Final = "!system/metrics"

# After steps that take this long together, the reporter pauses. With only a turn of the loop in between, the quarter of
# a second with these steps had twice the p99 of the others (5,000 single messages a second).
_STEP_NS: Final = 100_000
_PAUSE_SECONDS: Final = 0.003
_ROWS_PER_STEP: Final = 128

logger = get_logger("runnel")

# Topic and payload. It must not wait; a RunnelError is logged.
Publish = Callable[[str, bytes], None]

T = TypeVar("T")


class Reporter:
    """Samples and publishes the metrics. `connections` and `subscriptions` may give many rows: it chooses the top ones.

    It asks less often for rows that take long. A source of very many subscriptions may leave out those not behind.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        stores: StoreStatistics,
        publish: Publish,
        *,
        connections: Callable[[], Awaitable[Mapping[int, ConnectionStats]]],
        subscriptions: Callable[[], Iterable[LiveSubscriptionStats]] = tuple,
        work: Callable[[], Awaitable[Sequence[SubscriptionState]]] | None = None,
    ) -> None:
        self._interval_ns = settings.broker.metrics_interval_ns
        self._node = settings.cluster.node
        self._clock = clock
        self._metrics = metrics
        self._publish = publish
        self._read_stores = stores.read
        self._stores = _LastChange(stores.read(), clock)
        self._read_connections = connections
        self._connections: _LastChange[Mapping[int, ConnectionStats]] = _LastChange({}, clock)
        self._subscriptions = Throttled(lambda: list(subscriptions()), clock)
        self._work = work
        self._began_ns = clock.monotonic_ns()
        self._sampled_ns = self._paused_ns = self._began_ns
        self._totals: Mapping[str, int] = metrics.totals()
        self._last: _Interval | None = None
        self._failing: set[str] = set()  # documents that could not be published last time

    async def run(self) -> None:
        """Report at every interval, until cancelled. Intervals that a busy loop missed are not made up for."""
        due_ns = self._clock.monotonic_ns() + self._interval_ns
        while True:
            await self._clock.sleep((due_ns - self._clock.monotonic_ns()) / 1e9)
            try:
                await self.report()
            except Exception:  # monitoring must not stop the broker
                logger.exception("metrics could not be sampled")
            late_ns = max(0, self._clock.monotonic_ns() - due_ns)
            due_ns += (late_ns // self._interval_ns + 1) * self._interval_ns

    async def report(self) -> None:
        """End the interval: sample everything and publish it.

        It takes as long as twenty single messages, or longer on a busy broker. So it works in small steps, and pauses
        whenever it has used the loop for a while.
        """
        self._paused_ns = now_ns = self._clock.monotonic_ns()
        interval_ns = max(1, now_ns - self._sampled_ns)
        totals = self._metrics.totals()
        rates = _rates(totals, self._totals, interval_ns)
        self._sampled_ns, self._totals = now_ns, totals
        await self._pause_if_due()
        traffic = self._metrics.traffic.end_interval(interval_ns)
        histograms: dict[str, HistogramSnapshot] = {}
        for name, ended in self._metrics.end_interval():
            histograms[name] = ended
            await self._pause_if_due()
        self._last = _Interval(interval_ns, rates, histograms)

        broker: Table = {}
        for _ in self._fill(broker):
            await self._pause_if_due()
        self._send("broker", broker)
        await self._pause_if_due()
        self._send(
            "topics", self._head(interval_ns) | metric_tables.topics_table(traffic, interval_ns)
        )
        await self._pause_if_due()
        stores = self._stores.update(self._read_stores())
        self._send(
            "journals",
            self._head(interval_ns)
            | metric_tables.journals_table(traffic, interval_ns, stores.now, stores.before),
        )
        await self._pause_if_due()
        await self._report_connections()
        await self._pause_if_due()
        self._send(
            "subscriptions",
            self._head(interval_ns)
            | metric_tables.subscriptions_table(self._subscriptions.value()),
        )
        if self._work is not None:
            await self._pause_if_due()
            states = await self._work()
            self._send("work", self._head(interval_ns) | metric_tables.work_table(states))

    async def _report_connections(self) -> None:
        rows = self._connections.update(await self._read_connections())
        busiest = BusiestConnections(rows.before, rows.interval_ns)
        now = list(rows.now.values())
        for begin in range(0, len(now), _ROWS_PER_STEP):
            busiest.add(now[begin : begin + _ROWS_PER_STEP])
            await self._pause_if_due()
        self._send("connections", self._head(rows.interval_ns) | busiest.table())

    async def _pause_if_due(self) -> None:
        """Yield the loop to messages, if the reporter has used it for a while."""
        if self._clock.monotonic_ns() - self._paused_ns >= _STEP_NS:
            await self._clock.sleep(_PAUSE_SECONDS)
            self._paused_ns = self._clock.monotonic_ns()

    def document(self) -> Table:
        """The broker's current figures. Rates, and the histograms' `interval`, are of the last whole interval.

        Before the first interval has ended, they cover the time since the start.
        """
        document: Table = {}
        for _ in self._fill(document):
            pass
        return document

    def loop_lag_ms(self) -> float:
        """The event loop's lag that one timer of a hundred exceeded in the last interval."""
        if self._last is None or "loop_lag" not in self._last.histograms:
            return 0.0
        return self._last.histograms["loop_lag"].quantile_ns(0.99) / 1e6

    def _fill(self, document: Table) -> Iterator[None]:
        """Fill the broker's document step by step."""
        uptime_ns = self._clock.monotonic_ns() - self._began_ns
        totals = self._metrics.totals()
        seen = self._metrics.histograms()
        last = self._last or _Interval(
            uptime_ns, _rates(totals, self._totals, max(1, uptime_ns)), seen
        )
        document |= self._head(last.length_ns)
        document |= {"uptime_ns": uptime_ns, "rates": last.rates, "totals": totals}
        yield
        gauges: dict[str, float] = {}
        for name, value in self._metrics.each_gauge():
            gauges[name] = value
            yield
        limits: Table = {}
        for name, limit in self._metrics.each_limit():
            limits[name] = limit
            yield
        histograms: Table = {}
        for name, total in seen.items():
            interval = last.histograms.get(name, total)
            histograms[name] = {"interval": interval.summary(), "total": total.summary()}
            yield
        document |= {"gauges": gauges, "limits": limits, "histograms": histograms}

    def _head(self, interval_ns: int) -> Table:
        return {"time_ns": self._clock.time_ns(), "node": self._node, "interval_ns": interval_ns}

    def _send(self, name: str, document: Table) -> None:
        topic = f"{METRICS_TOPIC}/{name}"
        try:
            self._publish(topic, msgspec.json.encode(document))
        except RunnelError as error:
            if name not in self._failing:  # logged once, not every second
                logger.warning("metrics could not be published", topic=topic, error=str(error))
                self._failing.add(name)
        else:
            self._failing.discard(name)


class _Interval(msgspec.Struct, frozen=True):
    """The figures of the last whole interval."""

    length_ns: int
    rates: Mapping[str, float]
    histograms: Mapping[str, HistogramSnapshot]


class _Change(msgspec.Struct, Generic[T], frozen=True):
    """Two consecutive readings, and the time between them."""

    now: T
    before: T
    interval_ns: int


class _LastChange(Generic[T]):
    """The last change of a cached reading.

    As long as the reading is the same object, the change is the same too.
    """

    def __init__(self, first: T, clock: Clock) -> None:
        self._clock = clock
        self._read_ns = clock.monotonic_ns()
        self._change = _Change(first, first, 1)

    def update(self, value: T) -> _Change[T]:
        if value is not self._change.now:
            now_ns = self._clock.monotonic_ns()
            self._change = _Change(value, self._change.now, max(1, now_ns - self._read_ns))
            self._read_ns = now_ns
        return self._change


def _rates(now: Mapping[str, int], before: Mapping[str, int], interval_ns: int) -> dict[str, float]:
    return {
        name: round((value - before.get(name, 0)) * 1e9 / interval_ns, 3)
        for name, value in now.items()
    }
