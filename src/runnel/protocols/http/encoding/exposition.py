"""Writes the metrics for Prometheus: names and units by its conventions, in its text format or as OpenMetrics.

    in the registry                 exposed
    messages_in      counter        runnel_messages_in_total
    bytes_in         counter, bytes runnel_in_bytes_total
    publish_time     histogram, ns  runnel_publish_time_seconds_bucket, …_sum, …_count
    process_cpu      counter, ns    process_cpu_seconds_total

Metrics of the process have their usual names, which every dashboard knows, without our prefix. prometheus-client does
the writing and escaping. It gets one family at a time, so that a long list never blocks the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import exposition as plain
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from runnel.broker.monitoring.histogram import HistogramSnapshot
from runnel.broker.monitoring.metrics import Description, Family, MetricKind, Metrics, MetricUnit

_PREFIX: Final = "runnel_"
_PROCESS: Final = "process_"
_NS_PER_SECOND: Final = 1e9
_OPENMETRICS: Final = "application/openmetrics-text"
_END: Final = b"# EOF\n"  # ends a text in OpenMetrics


def exposed_name(described: Description) -> str:
    """The metric's name for Prometheus, without suffixes of its kind such as `_total` and `_bucket`."""
    name = described.name
    if described.unit is MetricUnit.BYTES:
        words = [word for word in name.split("_") if word != "bytes"]
        name = "_".join([*words, "bytes"])
    elif described.unit is MetricUnit.NANOSECONDS:
        name += "_seconds"
    return name if name.startswith(_PROCESS) else _PREFIX + name


def metrics_of(registry: Metrics) -> Iterator[Metric]:
    """All metrics. Each is read when the iteration reaches it."""
    for described, value in registry.readings():
        yield _labelled(Family(described, (), [((), value)]))
    for described, seen in registry.distributions():
        yield _histogram(described, seen)
    for family in registry.families():
        yield _labelled(family)


def _labelled(family: Family) -> Metric:
    described = family.described
    is_counter = described.kind is MetricKind.COUNTER
    make = CounterMetricFamily if is_counter else GaugeMetricFamily
    metric = make(exposed_name(described), described.help, labels=family.labels)
    for labels, value in family.rows:
        metric.add_metric(
            labels, value / _NS_PER_SECOND if described.unit is MetricUnit.NANOSECONDS else value
        )
    return metric


def _histogram(described: Description, seen: HistogramSnapshot) -> Metric:
    metric = HistogramMetricFamily(exposed_name(described), described.help)
    counts = seen.counts_up_to(described.bounds_ns)
    buckets = [
        (f"{bound_ns / _NS_PER_SECOND:g}", float(count))
        for bound_ns, count in zip(described.bounds_ns, counts, strict=True)
    ]
    buckets.append(("+Inf", float(seen.count)))
    metric.add_metric((), buckets, seen.sum_ns / _NS_PER_SECOND)
    return metric


class Exposition:
    """The format that a client's `Accept` asks for: OpenMetrics if the header lists it, otherwise plain text."""

    def __init__(self, accept: str) -> None:
        # The library's own choice fails if a version is no number, and repeats that version in its answer.
        asked = {each.partition(";")[0].strip().lower() for each in accept.split(",")}
        self._is_open = _OPENMETRICS in asked
        self.content_type = (
            openmetrics.CONTENT_TYPE_LATEST if self._is_open else plain.CONTENT_TYPE_PLAIN_0_0_4
        )

    def encode(self, metric: Metric) -> bytes:
        collector = _FixedCollector((metric,))
        if self._is_open:
            written: bytes = openmetrics.generate_latest(collector)  # type: ignore[no-untyped-call]
            return written.removesuffix(_END)
        return plain.generate_latest(collector)

    @property
    def end(self) -> bytes:
        return _END if self._is_open else b""


class _FixedCollector(Collector):
    """A collector of given metrics: the library writes only what comes from a collector."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
