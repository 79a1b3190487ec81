"""Adds up the reports of several nodes, as if one broker had made them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from runnel.cli.render.top_view import (
    BrokerReport,
    BrokerReports,
    ConnectionsReport,
    Durations,
    GroupsReport,
    JournalRow,
    JournalsReport,
    LimitState,
    OtherTopicsRow,
    Rates,
    ReportedGroup,
    ReportedHistogram,
    SubscriptionsReport,
    TopicRow,
    TopicsReport,
)

# Gauges of what all nodes know alike, or share: each of them reports the whole.
_SHARED_GAUGES: Final = frozenset({"topics_kept", "disk_full", "tokens"})

_Number = TypeVar("_Number", int, float)


class _NamedReport(msgspec.Struct, frozen=True):
    """Every report says which node made it."""

    node: str = ""


class ReportsByNode:
    """The latest reports of each node."""

    def __init__(self) -> None:
        self.by_node: Final[dict[str, BrokerReports]] = {}

    def take(self, topic: str, payload: bytes) -> str:
        """Take a report; returns the name of its node."""
        node = msgspec.json.decode(payload, type=_NamedReport).node
        self.by_node.setdefault(node, BrokerReports()).take(topic, payload)
        return node

    def is_complete(self, nodes: Collection[str]) -> bool:
        """Whether each of these nodes has made every report; without names, whether any node has."""
        complete = {name for name, reports in self.by_node.items() if reports.is_complete}
        return bool(complete) and complete.issuperset(nodes)

    def added_up(self, nodes: Collection[str]) -> BrokerReports:
        """The reports of these nodes together; without names, of all."""
        chosen = [
            reports
            for name, reports in sorted(self.by_node.items())
            if reports.is_complete and (not nodes or name in nodes)
        ]
        return chosen[0] if len(chosen) == 1 else _added_up(chosen)


def _added_up(parts: Sequence[BrokerReports]) -> BrokerReports:
    if not parts:
        return BrokerReports()
    return BrokerReports(
        _brokers([each.broker for each in parts if each.broker is not None]),
        _topics([each.topics for each in parts if each.topics is not None]),
        _journals([each.journals for each in parts if each.journals is not None]),
        _connections([each.connections for each in parts if each.connections is not None]),
        _subscriptions([each.subscriptions for each in parts if each.subscriptions is not None]),
        _work([each.work for each in parts if each.work is not None]),
    )


def _brokers(reports: Sequence[BrokerReport]) -> BrokerReport:
    gauges: dict[str, float] = {}
    limits: dict[str, LimitState] = {}
    histograms: dict[str, list[Durations]] = defaultdict(list)
    for report in reports:
        for name, value in report.gauges.items():
            is_shared = name in _SHARED_GAUGES
            gauges[name] = (
                max(gauges.get(name, value), value) if is_shared else gauges.get(name, 0) + value
            )
        for name, state in report.limits.items():  # each node has its own: the nearest counts
            if name not in limits or state.share > limits[name].share:
                limits[name] = state
        for name, histogram in report.histograms.items():
            histograms[name].append(histogram.interval)
    return BrokerReport(
        max(report.time_ns for report in reports),
        f"{len(reports)} nodes",
        max(report.uptime_ns for report in reports),
        _sums(report.rates for report in reports),
        _sums(report.totals for report in reports),
        gauges,
        {name: ReportedHistogram(_slowest(found)) for name, found in histograms.items()},
        limits,
    )


def _sums(tables: Iterable[Mapping[str, _Number]]) -> dict[str, _Number]:
    sums: dict[str, _Number] = {}
    for table in tables:
        for name, value in table.items():
            sums[name] = sums[name] + value if name in sums else value
    return sums


def _slowest(intervals: Sequence[Durations]) -> Durations:
    """Percentiles cannot be added up: those of the slowest node count."""
    return Durations(
        sum(each.count for each in intervals),
        max(each.p50_ns for each in intervals),
        max(each.p99_ns for each in intervals),
        max(each.max_ns for each in intervals),
    )


def _rates(rates: Iterable[Rates]) -> Rates:
    found = list(rates)
    return Rates(
        sum(each.messages_in for each in found),
        sum(each.bytes_in for each in found),
        sum(each.messages_out for each in found),
        sum(each.bytes_out for each in found),
    )


def _busyness(rates: Rates) -> float:
    return rates.messages_in + rates.messages_out


def _topics(reports: Sequence[TopicsReport]) -> TopicsReport:
    rows: dict[str, list[Rates]] = defaultdict(list)
    others: dict[str, list[OtherTopicsRow]] = defaultdict(list)
    for report in reports:
        for row in report.topics:
            rows[row.topic].append(row.rates)
        for other in report.others:
            others[other.journal].append(other)
    topics = [TopicRow(topic, _rates(rates)) for topic, rates in rows.items()]
    return TopicsReport(
        sorted(topics, key=lambda row: -_busyness(row.rates)),
        [
            OtherTopicsRow(
                journal,
                max(each.topics for each in found),
                _rates(each.rates for each in found),
            )
            for journal, found in others.items()
        ],
    )


def _journals(reports: Sequence[JournalsReport]) -> JournalsReport:
    rows: dict[str, list[JournalRow]] = defaultdict(list)
    for report in reports:
        for row in report.journals:
            rows[row.journal].append(row)
    journals = [
        JournalRow(
            journal,
            _rates(each.rates for each in found),
            sum(each.stored_bytes for each in found),
            sum(each.segments for each in found),
            sum(each.queued_bytes for each in found),
            sum(each.read_only_shards for each in found),
            max(
                (each.sync_time_mean_ns for each in found if each.sync_time_mean_ns is not None),
                default=None,
            ),
            max(each.sync_time_max_ns for each in found),
        )
        for journal, found in rows.items()
    ]
    return JournalsReport(sorted(journals, key=lambda row: -_busyness(row.rates)))


def _connections(reports: Sequence[ConnectionsReport]) -> ConnectionsReport:
    rows = [row for report in reports for row in report.connections]
    rows.sort(key=lambda row: -_busyness(row.rates))
    return ConnectionsReport(sum(report.count for report in reports), rows)


def _subscriptions(reports: Sequence[SubscriptionsReport]) -> SubscriptionsReport:
    """A subscription in parts counts at each node."""
    rows = [row for report in reports for row in report.subscriptions]
    rows.sort(key=lambda row: (row.state != "behind", -row.lag, -row.queued_bytes, -row.missed))
    return SubscriptionsReport(
        sum(report.count for report in reports), sum(report.behind for report in reports), rows
    )


def _work(reports: Sequence[GroupsReport]) -> GroupsReport:
    rows: dict[str, list[ReportedGroup]] = defaultdict(list)
    for report in reports:
        for row in report.subscriptions:
            rows[row.subscription].append(row)
    groups = [
        msgspec.structs.replace(
            found[0],
            consumers=max(each.consumers for each in found),  # each has a part at every node
            backlog=sum(each.backlog for each in found),
            in_flight=sum(each.in_flight for each in found),
            delayed=sum(each.delayed for each in found),
            oldest_ns=min((each.oldest_ns for each in found if each.oldest_ns), default=0),
            redelivered=sum(each.redelivered for each in found),
            dead=sum(each.dead for each in found),
        )
        for found in rows.values()
    ]
    groups.sort(key=lambda row: -row.backlog)
    return GroupsReport(
        max(report.time_ns for report in reports), max(report.count for report in reports), groups
    )
