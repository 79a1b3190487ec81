"""The metrics under the names and in the units that Prometheus has them in.

    in the registry                 exposed
    messages_in      counter        runnel_messages_in_total
    bytes_in         counter, bytes runnel_in_bytes_total
    publish_time     histogram, ns  runnel_publish_time_seconds_bucket, …_sum, …_count
    process_cpu      counter, ns    process_cpu_seconds_total

Metrics of the process have their usual names, which every dashboard knows, without our prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from runnel.broker.monitoring.histogram import HistogramSnapshot
from runnel.broker.monitoring.metrics import Description, Family, Metrics, MetricUnit
from runnel.formats.metrics_report import ExposedMetric

_PREFIX: Final = "runnel_"
_PROCESS: Final = "process_"
_NS_PER_SECOND: Final = 1e9


class NodeMetrics(msgspec.Struct, frozen=True):
    """The metrics of one node of a cluster. None: it did not answer in time."""

    node: str  # "": of a broker that is alone
    metrics: Sequence[ExposedMetric] | None


def exposed_name(described: Description) -> str:
    """The metric's name for Prometheus, without suffixes of its kind such as `_total` and `_bucket`."""
    name = described.name
    if described.unit is MetricUnit.BYTES:
        words = [word for word in name.split("_") if word != "bytes"]
        name = "_".join([*words, "bytes"])
    elif described.unit is MetricUnit.NANOSECONDS:
        name += "_seconds"
    return name if name.startswith(_PROCESS) else _PREFIX + name


def exposed_metrics(registry: Metrics) -> Iterator[ExposedMetric]:
    """All metrics. Each is read when the iteration reaches it."""
    for described, value in registry.readings():
        yield _labelled(Family(described, (), [((), value)]))
    for described, seen in registry.distributions():
        yield _histogram(described, seen)
    for family in registry.families():
        yield _labelled(family)


def _labelled(family: Family) -> ExposedMetric:
    described, rows = family.described, family.rows
    if described.unit is MetricUnit.NANOSECONDS:
        rows = [(labels, value / _NS_PER_SECOND) for labels, value in rows]
    return ExposedMetric(
        exposed_name(described), described.kind.value, described.help, family.labels, rows
    )


def _histogram(described: Description, seen: HistogramSnapshot) -> ExposedMetric:
    counts = seen.counts_up_to(described.bounds_ns)
    buckets = [
        (f"{bound_ns / _NS_PER_SECOND:g}", float(count))
        for bound_ns, count in zip(described.bounds_ns, counts, strict=True)
    ]
    buckets.append(("+Inf", float(seen.count)))
    return ExposedMetric(
        exposed_name(described),
        described.kind.value,
        described.help,
        buckets=buckets,
        sum=seen.sum_ns / _NS_PER_SECOND,
    )
