"""Writes metrics for Prometheus, in its text format or as OpenMetrics; of several nodes with the label `node`.

prometheus-client does the writing and escaping. It gets one family of one node at a time, so that a long list never
blocks the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

from runnel.broker.monitoring.exposed_metrics import NodeMetrics
from runnel.formats.metrics_report import ExposedMetric

_OPENMETRICS: Final = "application/openmetrics-text"
_END: Final = b"# EOF\n"  # ends a text in OpenMetrics
_NODE: Final = "node"  # the label


class Exposition:
    """The format that a client's `Accept` asks for: OpenMetrics if the header lists it, otherwise plain text."""

    def __init__(self, accept: str) -> None:
        # The library's own choice fails if a version is no number, and repeats that version in its answer.
        asked = {each.partition(";")[0].strip().lower() for each in accept.split(",")}
        self._is_open = _OPENMETRICS in asked
        self.content_type = (
            openmetrics.CONTENT_TYPE_LATEST if self._is_open else plain.CONTENT_TYPE_PLAIN_0_0_4
        )

    def encode(self, nodes: Sequence[NodeMetrics]) -> Iterator[bytes]:
        """The whole text in pieces: each family once, with the samples of all nodes."""
        for family in _families(nodes):
            for place, (node, exposed) in enumerate(family):
                written = self._encode(_metric(node, exposed))
                if place:  # HELP and TYPE stand before the samples of the first node
                    written = written[len(self._encode(_metric(node, _without_samples(exposed)))) :]
                yield written
        if self._is_open:
            yield _END

    def _encode(self, metric: Metric) -> bytes:
        collector = _FixedCollector((metric,))
        if self._is_open:
            written: bytes = openmetrics.generate_latest(collector)  # type: ignore[no-untyped-call]
            return written.removesuffix(_END)
        return plain.generate_latest(collector)


def _families(nodes: Sequence[NodeMetrics]) -> Iterator[Sequence[tuple[str, ExposedMetric]]]:
    """The families in the order of the first node that has them, each with the names of its nodes."""
    found: dict[str, list[tuple[str, ExposedMetric]]] = {}
    for each in nodes:
        for exposed in each.metrics or ():
            found.setdefault(exposed.name, []).append((each.node, exposed))
    yield from found.values()
    if named := [each for each in nodes if each.node]:
        yield [(each.node, _is_up(each)) for each in named]


def _is_up(node: NodeMetrics) -> ExposedMetric:
    return ExposedMetric(
        "runnel_node_up",
        "gauge",
        "1 if the node has answered with its metrics. Only of several processes.",
        rows=[((), float(node.metrics is not None))],
    )


def _without_samples(exposed: ExposedMetric) -> ExposedMetric:
    return ExposedMetric(exposed.name, exposed.kind, exposed.help, exposed.labels)


def _metric(node: str, exposed: ExposedMetric) -> Metric:
    if exposed.kind == "histogram":
        return _histogram(node, exposed)
    make = CounterMetricFamily if exposed.kind == "counter" else GaugeMetricFamily
    # A family that names the node by itself has one label of this name, as any other.
    is_named = not node or _NODE in exposed.labels
    own_labels, own_values = ((), ()) if is_named else ((_NODE,), (node,))
    metric = make(exposed.name, exposed.help, labels=(*own_labels, *exposed.labels))
    for values, value in exposed.rows:
        metric.add_metric((*own_values, *values), value)
    return metric


def _histogram(node: str, exposed: ExposedMetric) -> Metric:
    labels, values = ((_NODE,), (node,)) if node else ((), ())
    metric = HistogramMetricFamily(exposed.name, exposed.help, labels=labels)
    if exposed.buckets:
        metric.add_metric(values, exposed.buckets, exposed.sum)
    return metric


class _FixedCollector(Collector):
    """A collector of given metrics: the library writes only what comes from a collector."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
