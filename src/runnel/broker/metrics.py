"""The registry of everything that is counted and measured; `!system/metrics`, `runnel top` and Prometheus read it.

Counting is an addition to an attribute, once a batch. Gauges cost nothing until somebody looks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from runnel.broker.histogram import Histogram, HistogramSnapshot
from runnel.broker.topic_traffic import TopicTraffic


class MetricKind(enum.StrEnum):
    COUNTER = "counter"  # only grows, from 0 at the start of the process
    GAUGE = "gauge"  # as it is now
    HISTOGRAM = "histogram"


class Unit(enum.StrEnum):
    COUNT = "count"
    BYTES = "bytes"
    NANOSECONDS = "ns"


class Description(msgspec.Struct, frozen=True):
    name: str
    kind: MetricKind
    help: str
    unit: Unit


def _counts(text: str, unit: Unit = Unit.COUNT) -> Meta:
    return Meta(description=text, extra={"unit": unit})


class Counters(msgspec.Struct, gc=False):
    """What broker and doors count as they work: `counters.messages_in += batch.count`."""

    messages_in: Annotated[int, _counts("Messages accepted from publishers.")] = 0
    bytes_in: Annotated[int, _counts("Bytes of accepted batches.", Unit.BYTES)] = 0
    batches_in: Annotated[int, _counts("Batches accepted from publishers.")] = 0
    publishes_failed: Annotated[int, _counts("Batches that were refused or not stored.")] = 0
    publishes_repeated: Annotated[int, _counts("Batches that had been stored before.")] = 0
    messages_out: Annotated[int, _counts("Messages handed to readers of any kind.")] = 0
    bytes_out: Annotated[int, _counts("Bytes of blocks handed to readers.", Unit.BYTES)] = 0
    deliveries: Annotated[int, _counts("Deliveries to live subscriptions.")] = 0
    gaps: Annotated[int, _counts("Gaps that readers were told of.")] = 0
    messages_missed: Annotated[int, _counts("Messages that live readers missed.")] = 0
    slow_readers: Annotated[int, _counts("Times a live subscription fell behind.")] = 0
    fetches: Annotated[int, _counts("Fetches answered.")] = 0
    requests: Annotated[int, _counts("Requests of every kind at every door.")] = 0
    requests_failed: Annotated[int, _counts("Requests answered with an error.")] = 0
    subscriptions_opened: Annotated[int, _counts("Live subscriptions begun.")] = 0
    connections_opened: Annotated[int, _counts("Connections that said hello.")] = 0
    connections_refused: Annotated[int, _counts("Connections turned away.")] = 0
    connections_idle: Annotated[int, _counts("Connections closed for their silence.")] = 0
    protocol_errors: Annotated[int, _counts("Connections closed for what they sent.")] = 0
    topics_made: Annotated[int, _counts("Topics made.")] = 0
    work_delivered: Annotated[int, _counts("Messages leased to consumers.")] = 0
    work_acked: Annotated[int, _counts("Messages acknowledged, or passed over as gone.")] = 0
    work_failed: Annotated[int, _counts("Deliveries that failed: nacks, ended leases, losses.")] = 0
    work_late: Annotated[int, _counts("Acks and nacks that came too late.")] = 0
    dead_letters: Annotated[int, _counts("Messages that became dead letters.")] = 0
    topics_removed: Annotated[int, _counts("Topics deleted, or gone with their readers.")] = 0

    @property
    def commands_in(self) -> int:
        """Every message in is a command."""
        return self.messages_in

    @property
    def commands_out(self) -> int:
        """Every message out is one too."""
        return self.messages_out


class Metrics:
    """See the module's first line. `journal_of` must know every topic that was ever counted."""

    def __init__(self, *, topics_max: int, journal_of: Callable[[str], str]) -> None:
        self.counters = Counters()
        self.traffic = TopicTraffic(topics_max, journal_of)
        self._readings: dict[str, tuple[Description, Callable[[], float]]] = {}
        self._histograms: dict[str, tuple[Description, Histogram]] = {}
        counters = self.counters
        for described in _described(Counters):
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

    def add_counter(
        self, name: str, text: str, read: Callable[[], int], *, unit: Unit = Unit.COUNT
    ) -> None:
        """A number that is counted elsewhere and only grows."""
        self._add(Description(name, MetricKind.COUNTER, text, unit), read)

    def add_gauge(
        self, name: str, text: str, read: Callable[[], float], *, unit: Unit = Unit.COUNT
    ) -> None:
        """A number as it is when it is looked at. `read` is called at every sampling: it should be quick."""
        self._add(Description(name, MetricKind.GAUGE, text, unit), read)

    def add_histogram(self, name: str, text: str) -> Histogram:
        """Durations, to be given to `observe`."""
        described = Description(name, MetricKind.HISTOGRAM, text, Unit.NANOSECONDS)
        self._check_new(described)
        histogram = Histogram()
        self._histograms[name] = (described, histogram)
        return histogram

    def _add(self, described: Description, read: Callable[[], float]) -> None:
        self._check_new(described)
        self._readings[described.name] = (described, read)

    def _check_new(self, described: Description) -> None:
        if described.name in self._readings or described.name in self._histograms:
            raise ValueError(f"there is a metric {described.name!r} already")

    def descriptions(self) -> list[Description]:
        """Of everything there is, for an exposition."""
        readings = [described for described, _ in self._readings.values()]
        return readings + [described for described, _ in self._histograms.values()]

    def totals(self) -> dict[str, int]:
        """All counters now."""
        return {
            name: int(read())
            for name, (described, read) in self._readings.items()
            if described.kind is MetricKind.COUNTER
        }

    def gauges(self) -> dict[str, float]:
        """All gauges now."""
        return {
            name: read()
            for name, (described, read) in self._readings.items()
            if described.kind is MetricKind.GAUGE
        }

    def histograms(self) -> Mapping[str, HistogramSnapshot]:
        """What each has seen in all."""
        return {name: histogram.total() for name, (_, histogram) in self._histograms.items()}

    def end_interval(self) -> Mapping[str, HistogramSnapshot]:
        """What each histogram has seen since this was last called, which only the reporter does."""
        return {name: each.end_interval() for name, (_, each) in self._histograms.items()}


def _described(kind: type[Counters]) -> Iterator[Description]:
    hints: dict[str, Any] = get_type_hints(kind, include_extras=True)
    for name in kind.__struct_fields__:
        (meta,) = hints[name].__metadata__
        yield Description(name, MetricKind.COUNTER, meta.description, meta.extra["unit"])
