"""The text for Prometheus: of a broker that is alone, and of several nodes in one."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from runnel.broker.monitoring.exposed_metrics import NodeMetrics, exposed_metrics
from runnel.broker.monitoring.metrics import (
    Description,
    Family,
    MetricKind,
    Metrics,
    MetricUnit,
)
from runnel.errors import MalformedError
from runnel.formats.metrics_report import ExposedMetric, decode_metrics, encode_metrics
from runnel.protocols.http.encoding.exposition import Exposition

OPENMETRICS = "application/openmetrics-text"
HOSTILE = 'node "one"\\ of {two},\nor é=1'

IN = ExposedMetric("runnel_messages_in", "counter", "Messages.", (), [((), 3.0)])
SEGMENTS = ExposedMetric(
    "runnel_segments", "gauge", "Segments.", ("journal",), [(("main",), 2.0), ((HOSTILE,), 1.5)]
)
TIME = ExposedMetric(
    "runnel_time_seconds", "histogram", "Time.", buckets=[("0.1", 1.0), ("+Inf", 4.0)], sum=2.5
)
BUILD = ExposedMetric(
    "runnel_build_info", "gauge", "Built.", ("node", "version"), [(("node-1", "1"), 1.0)]
)


def text_of(nodes: Iterable[NodeMetrics], accept: str = "") -> str:
    return b"".join(Exposition(accept).encode(list(nodes))).decode()


def parsed(nodes: Iterable[NodeMetrics], accept: str) -> dict[str, Metric]:
    text = text_of(nodes, accept)
    families = list((parse_open if accept else parse_plain)(text))
    found = {family.name: family for family in families}
    assert len(found) == len(families), "a family comes twice"
    for what in ("HELP", "TYPE"):
        names = re.findall(rf"^# {what} (\S+)", text, re.MULTILINE)
        assert len(names) == len(set(names)) == len(families)
    assert text.count("# EOF") == bool(accept)
    return found


def samples(family: Metric) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value for sample in family.samples
    }
    assert len(found) == len(family.samples), "a series comes twice"
    return found


def values(family: Metric, label: str = "node") -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in family.samples}


# --- Alone ---


def test_broker_that_is_alone_has_no_label_of_a_node() -> None:
    assert text_of([NodeMetrics("", [IN, SEGMENTS, TIME])]) == (
        "# HELP runnel_messages_in_total Messages.\n"
        "# TYPE runnel_messages_in_total counter\n"
        "runnel_messages_in_total 3.0\n"
        "# HELP runnel_segments Segments.\n"
        "# TYPE runnel_segments gauge\n"
        'runnel_segments{journal="main"} 2.0\n'
        'runnel_segments{journal="node \\"one\\"\\\\ of {two},\\nor é=1"} 1.5\n'
        "# HELP runnel_time_seconds Time.\n"
        "# TYPE runnel_time_seconds histogram\n"
        'runnel_time_seconds_bucket{le="0.1"} 1.0\n'
        'runnel_time_seconds_bucket{le="+Inf"} 4.0\n'
        "runnel_time_seconds_count 4.0\n"
        "runnel_time_seconds_sum 2.5\n"
    )
    assert text_of([NodeMetrics("", [IN])], OPENMETRICS) == (
        "# HELP runnel_messages_in Messages.\n"
        "# TYPE runnel_messages_in counter\n"
        "runnel_messages_in_total 3.0\n"
        "# EOF\n"
    )


def test_figures_of_the_registry_are_in_seconds_and_bytes() -> None:
    registry = Metrics(topics_max=1, journal_of=lambda _: "main")
    registry.counters.bytes_in = 5
    registry.publish_time.observe(300_000_000)
    family = Description("age", MetricKind.GAUGE, "Age.", MetricUnit.NANOSECONDS)
    registry.add_families(lambda: [Family(family, ("of",), [(("a",), 1_500_000_000)])])
    found = {each.name: each for each in exposed_metrics(registry)}
    assert found["runnel_in_bytes"].rows == [((), 5)]
    assert found["runnel_age_seconds"].rows == [(("a",), 1.5)]
    time = found["runnel_publish_time_seconds"]
    assert time.buckets[-1] == ("+Inf", 1.0)
    assert dict(time.buckets)["0.1"] == 0
    assert dict(time.buckets)["0.5"] == 1
    assert time.sum == pytest.approx(0.3)


# --- Several nodes ---


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_each_sample_has_the_name_of_its_node(accept: str) -> None:
    more = ExposedMetric("runnel_messages_in", "counter", "Messages.", (), [((), 4.0)])
    found = parsed(
        [NodeMetrics("node-1", [IN, SEGMENTS]), NodeMetrics(HOSTILE, [more, SEGMENTS])], accept
    )
    assert list(found) == ["runnel_messages_in", "runnel_segments", "runnel_node_up"]
    assert values(found["runnel_messages_in"]) == {"node-1": 3, HOSTILE: 4}
    assert samples(found["runnel_segments"]) == {
        ("runnel_segments", frozenset({("node", node), ("journal", journal)})): value
        for node in ("node-1", HOSTILE)
        for journal, value in (("main", 2.0), (HOSTILE, 1.5))
    }
    assert values(found["runnel_node_up"]) == {"node-1": 1, HOSTILE: 1}


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_histograms_stay_apart(accept: str) -> None:
    other = ExposedMetric(
        "runnel_time_seconds", "histogram", "Time.", buckets=[("0.1", 7.0), ("+Inf", 7.0)], sum=0.5
    )
    found = parsed([NodeMetrics("a", [TIME]), NodeMetrics("b", [other])], accept)
    of_nodes: dict[str, list[tuple[str, float]]] = {"a": [], "b": []}
    for sample in found["runnel_time_seconds"].samples:
        name = sample.name.removeprefix("runnel_time_seconds_") + sample.labels.get("le", "")
        of_nodes[sample.labels["node"]].append((name, sample.value))
    assert of_nodes["a"] == [("bucket0.1", 1), ("bucket+Inf", 4), ("count", 4), ("sum", 2.5)]
    assert of_nodes["b"] == [("bucket0.1", 7), ("bucket+Inf", 7), ("count", 7), ("sum", 0.5)]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_family_that_names_its_node_by_itself_has_one_label_for_it(accept: str) -> None:
    found = parsed([NodeMetrics("node-1", [BUILD])], accept)
    [sample] = found["runnel_build_info"].samples
    assert sample.labels == {"node": "node-1", "version": "1"}


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_node_that_did_not_answer_is_down_and_has_no_samples(accept: str) -> None:
    found = parsed([NodeMetrics("a", None), NodeMetrics("b", [IN])], accept)
    assert values(found["runnel_node_up"]) == {"a": 0, "b": 1}
    assert values(found["runnel_messages_in"]) == {"b": 3}


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_family_of_one_node_only_comes_behind_those_before_it(accept: str) -> None:
    empty = ExposedMetric("runnel_segments", "gauge", "Other words.", ("journal",), [])
    nodes = [NodeMetrics("a", [IN, empty]), NodeMetrics("b", [IN, TIME, SEGMENTS])]
    found = parsed(nodes, accept)
    assert list(found) == [
        "runnel_messages_in", "runnel_segments", "runnel_time_seconds", "runnel_node_up",
    ]  # fmt: skip
    assert {sample.labels["node"] for sample in found["runnel_segments"].samples} == {"b"}
    assert len(found["runnel_segments"].samples) == 2


# --- On the way from a node to another ---


def test_report_is_read_as_it_was_written() -> None:
    unusual = ExposedMetric("x", "gauge", "X.", (), [((), float("inf")), ((), -0.0)])
    written = [IN, SEGMENTS, TIME, BUILD, unusual]
    read = decode_metrics(encode_metrics(written))
    assert encode_metrics(read) == encode_metrics(written)
    assert text_of([NodeMetrics("", read)]) == text_of([NodeMetrics("", written)])


@pytest.mark.parametrize(
    "tail",
    [b"", b"\x90\x00", b"\x91\x93\xa1x\xa3odd\xa0", encode_metrics([IN])[:-1], b"\x91" * 9000],
)
def test_damaged_report_is_malformed(tail: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_metrics(tail)


def test_later_version_may_say_more_of_a_metric() -> None:
    longer = b"\x91\x98" + encode_metrics([IN])[2:] + b"\x01"
    assert encode_metrics([IN])[1:2] == b"\x97"
    assert encode_metrics(decode_metrics(longer)) == encode_metrics([IN])
