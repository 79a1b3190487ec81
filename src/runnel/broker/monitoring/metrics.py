"""The registry of all metrics; `!system/metrics`, `runnel top` and Prometheus read it.

Counting is an addition to an attribute, once per batch. Gauges cost nothing until they are read.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import Meta

from runnel.broker.monitoring.histogram import HistogramSnapshot, TimeHistogram
from runnel.broker.monitoring.topic_traffic import TopicTraffic

_MS: Final = 1_000_000
_SECOND: Final = 1_000_000_000

# The bucket bounds of an exposition; the histogram itself is finer. They stay the same across versions, so that
# recorded figures can be compared.
LATENCIES_NS: Final = (
    _MS // 10, _MS // 4, _MS // 2, _MS, 5 * _MS // 2, 5 * _MS, 10 * _MS, 25 * _MS, 50 * _MS, 100 * _MS, 250 * _MS,
    500 * _MS, _SECOND, 5 * _SECOND // 2, 5 * _SECOND, 10 * _SECOND,
)  # fmt: skip
AGES_NS: Final = (
    _MS, 5 * _MS, 10 * _MS, 50 * _MS, 100 * _MS, 500 * _MS, _SECOND, 5 * _SECOND, 10 * _SECOND, 30 * _SECOND,
    60 * _SECOND, 300 * _SECOND, 600 * _SECOND, 1800 * _SECOND, 3600 * _SECOND, 6 * 3600 * _SECOND, 86_400 * _SECOND,
)  # fmt: skip


class MetricKind(enum.StrEnum):
    """The kind of a metric, as Prometheus names it."""

    COUNTER = "counter"  # only grows, from 0 at the start of the process
    GAUGE = "gauge"  # the current value
    HISTOGRAM = "histogram"


class MetricUnit(enum.StrEnum):
    """The unit of a metric inside the broker."""

    COUNT = "count"
    BYTES = "bytes"
    NANOSECONDS = "ns"


class Description(msgspec.Struct, frozen=True):
    """The name, kind, help text and unit of a metric."""

    name: str
    kind: MetricKind
    help: str
    unit: MetricUnit = MetricUnit.COUNT
    bounds_ns: Sequence[int] = ()  # of a histogram: the bucket bounds of an exposition


Row = tuple[tuple[str, ...], float]  # the values of the labels, and the value


class Family(msgspec.Struct, frozen=True):
    """A metric with labels. The code that creates it bounds the number of rows."""

    described: Description
    labels: tuple[str, ...]
    rows: Sequence[Row]


class AtLimit(enum.StrEnum):
    """What happens to one more than a limit allows."""

    REFUSED = "refused"
    WAITS = "waits"  # until there is room
    REPLACES = "replaces"  # the oldest is removed: reaching such a limit is no problem


class LimitGauge(msgspec.Struct, frozen=True):
    """A setting that bounds something, and how much of it is in use."""

    setting: str  # its key, as "native.connections_max"
    limit: int
    at_limit: AtLimit
    used: Callable[[], float]


def _counts(text: str, unit: MetricUnit = MetricUnit.COUNT) -> Meta:
    return Meta(description=text, extra={"unit": unit})


class BrokerCounters(msgspec.Struct, gc=False):
    """The counters of the broker and its listeners: `counters.messages_in += batch.count`."""

    messages_in: Annotated[int, _counts("Messages accepted from publishers.")] = 0
    bytes_in: Annotated[int, _counts("Bytes of accepted batches.", MetricUnit.BYTES)] = 0
    batches_in: Annotated[int, _counts("Batches accepted from publishers.")] = 0
    publishes_failed: Annotated[int, _counts("Batches that were refused or not stored.")] = 0
    publishes_repeated: Annotated[int, _counts("Batches that had been stored before.")] = 0
    messages_out: Annotated[int, _counts("Messages handed to readers of any kind.")] = 0
    bytes_out: Annotated[int, _counts("Bytes of blocks handed to readers.", MetricUnit.BYTES)] = 0
    deliveries: Annotated[int, _counts("Deliveries to live subscriptions.")] = 0
    gaps: Annotated[int, _counts("Gaps reported to readers.")] = 0
    messages_missed: Annotated[int, _counts("Messages that live readers missed.")] = 0
    slow_readers: Annotated[int, _counts("Times a live subscription fell behind.")] = 0
    fetches: Annotated[int, _counts("Fetches answered.")] = 0
    requests: Annotated[int, _counts("Requests of every kind at every listener.")] = 0
    requests_failed: Annotated[int, _counts("Requests answered with an error.")] = 0
    subscriptions_opened: Annotated[int, _counts("Live subscriptions begun.")] = 0
    connections_opened: Annotated[int, _counts("Connections accepted.")] = 0
    connections_refused: Annotated[int, _counts("Connections refused.")] = 0
    connections_idle: Annotated[int, _counts("Connections closed because they were idle.")] = 0
    protocol_errors: Annotated[
        int, _counts("Connections closed because they sent something invalid.")
    ] = 0
    topics_made: Annotated[int, _counts("Topics made.")] = 0
    work_delivered: Annotated[int, _counts("Messages leased to consumers.")] = 0
    work_acked: Annotated[int, _counts("Messages acknowledged, or passed over as gone.")] = 0
    work_failed: Annotated[int, _counts("Deliveries that failed: nacks, ended leases, losses.")] = 0
    work_late: Annotated[int, _counts("Acks and nacks that came too late.")] = 0
    dead_letters: Annotated[int, _counts("Messages that became dead letters.")] = 0
    topics_removed: Annotated[int, _counts("Topics deleted, or gone with their readers.")] = 0
    quota_refusals: Annotated[
        int, _counts("Requests refused because a token had used up a quota.")
    ] = 0
    quota_waits: Annotated[
        int, _counts("Times a token had to wait because it was over a rate.")
    ] = 0

    @property
    def commands_in(self) -> int:
        """Every message in is a command."""
        return self.messages_in

    @property
    def commands_out(self) -> int:
        """Every message out is a command too."""
        return self.messages_out


class Metrics:
    """The registry of a broker's metrics. `journal_of` must know every topic that was ever counted."""

    def __init__(self, *, topics_max: int, journal_of: Callable[[str], str]) -> None:
        self.counters = BrokerCounters()
        self.traffic = TopicTraffic(topics_max, journal_of)
        self._readings: dict[str, tuple[Description, Callable[[], float]]] = {}
        self._histograms: dict[str, tuple[Description, TimeHistogram]] = {}
        self._families: list[Callable[[], Iterable[Family]]] = []
        self._limits: dict[str, LimitGauge] = {}
        counters = self.counters
        for described in _described(BrokerCounters):
            self._readings[described.name] = (
                described,
                lambda name=described.name: getattr(counters, name),  # type: ignore[misc]
            )
        self.add_counter(
            "commands_in", "Every message in is a command.", lambda: counters.commands_in
        )
        self.add_counter(
            "commands_out", "Every message out is a command.", lambda: counters.commands_out
        )
        self.publish_time = self.add_histogram(
            "publish_time", "From a batch's arrival to its acknowledgement."
        )
        self.sync_time = self.add_histogram("sync_time", "Writing a group of batches and its sync.")
        self.delivery_time = self.add_histogram(
            "delivery_time", "From a kept batch's receive time to its live readers."
        )
        self.live_age = self.add_histogram(
            "live_age",
            "From the event time of a batch's first message to its live readers.",
            bounds_ns=AGES_NS,
        )
        self.work_age = self.add_histogram(
            "work_age",
            "From the event time of a run's first message to its consumer.",
            bounds_ns=AGES_NS,
        )

    def add_counter(
        self, name: str, text: str, read: Callable[[], int], *, unit: MetricUnit = MetricUnit.COUNT
    ) -> None:
        """Add a number that is counted elsewhere and only grows."""
        self._add(Description(name, MetricKind.COUNTER, text, unit), read)

    def add_gauge(
        self,
        name: str,
        text: str,
        read: Callable[[], float],
        *,
        unit: MetricUnit = MetricUnit.COUNT,
    ) -> None:
        """Add a current value. `read` is called at every sampling, so it should be quick."""
        self._add(Description(name, MetricKind.GAUGE, text, unit), read)

    def add_histogram(
        self, name: str, text: str, *, bounds_ns: Sequence[int] = LATENCIES_NS
    ) -> TimeHistogram:
        """Add a histogram; its `observe` takes the durations."""
        described = Description(name, MetricKind.HISTOGRAM, text, MetricUnit.NANOSECONDS, bounds_ns)
        self._check_new(described)
        histogram = TimeHistogram()
        self._histograms[name] = (described, histogram)
        return histogram

    def add_families(self, read: Callable[[], Iterable[Family]]) -> None:
        """Add metrics with labels. `read` is called at every exposition."""
        self._families.append(read)

    def add_limit(
        self,
        setting: str,
        limit: int,
        used: Callable[[], float],
        at_limit: AtLimit = AtLimit.REFUSED,
    ) -> None:
        """Add a limit and its use. A listener that is opened again may add its limits again."""
        self._limits[setting] = LimitGauge(setting, limit, at_limit, used)

    def _add(self, described: Description, read: Callable[[], float]) -> None:
        self._check_new(described)
        self._readings[described.name] = (described, read)

    def _check_new(self, described: Description) -> None:
        if described.name in self._readings or described.name in self._histograms:
            raise ValueError(f"there is a metric {described.name!r} already")

    def descriptions(self) -> list[Description]:
        """The descriptions of all metrics without labels."""
        readings = [described for described, _ in self._readings.values()]
        return readings + [described for described, _ in self._histograms.values()]

    def totals(self) -> dict[str, int]:
        """The current values of all counters."""
        return {
            name: int(read())
            for name, (described, read) in self._readings.items()
            if described.kind is MetricKind.COUNTER
        }

    def gauges(self) -> dict[str, float]:
        """The current values of all gauges."""
        return dict(self.each_gauge())

    def each_gauge(self) -> Iterator[tuple[str, float]]:
        """The gauges one by one, each read when its turn comes."""
        for name, (described, read) in list(self._readings.items()):
            if described.kind is MetricKind.GAUGE:
                yield name, read()

    def readings(self) -> Iterator[tuple[Description, float]]:
        """Counters and gauges one by one, each read when its turn comes."""
        for described, read in list(self._readings.values()):
            yield described, read()

    def distributions(self) -> Iterator[tuple[Description, HistogramSnapshot]]:
        """The histograms, each with its total."""
        for described, histogram in list(self._histograms.values()):
            yield described, histogram.total()

    def families(self) -> Iterator[Family]:
        """All metrics with labels, and the limits."""
        for read in list(self._families):
            yield from read()
        limits = list(self._limits.values())
        labels = ("setting", "at_limit")
        yield Family(
            Description(
                "limit",
                MetricKind.GAUGE,
                "The value of a limit. at_limit: whether one more is refused, waits, or replaces the oldest.",
            ),
            labels,
            [((each.setting, each.at_limit), each.limit) for each in limits],
        )
        yield Family(
            Description(
                "limit_used",
                MetricKind.GAUGE,
                "How much of a limit is in use; of a limit that many things have each, the fullest of them.",
            ),
            labels,
            [((each.setting, each.at_limit), each.used()) for each in limits],
        )

    def limits(self) -> dict[str, dict[str, object]]:
        """By setting: the limit, how much is in use, and what happens to one more."""
        return dict(self.each_limit())

    def each_limit(self) -> Iterator[tuple[str, dict[str, object]]]:
        """The limits one by one."""
        for each in list(self._limits.values()):
            yield (
                each.setting,
                {"limit": each.limit, "used": each.used(), "at_limit": each.at_limit},
            )

    def histograms(self) -> Mapping[str, HistogramSnapshot]:
        """The total of each histogram."""
        return {name: histogram.total() for name, (_, histogram) in self._histograms.items()}

    def end_interval(self) -> Iterator[tuple[str, HistogramSnapshot]]:
        """The durations of each histogram since the last call. Only the reporter may call it."""
        for name, (_, histogram) in list(self._histograms.items()):
            yield name, histogram.end_interval()


def _described(kind: type[BrokerCounters]) -> Iterator[Description]:
    hints: dict[str, Any] = get_type_hints(kind, include_extras=True)
    for name in kind.__struct_fields__:
        (meta,) = hints[name].__metadata__
        yield Description(name, MetricKind.COUNTER, meta.description, meta.extra["unit"])
