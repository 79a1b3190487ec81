"""The broker's reports on `!system/metrics/…`, and how `runnel top` shows them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from runnel.cli.render.subscription_tables import age, patterns_text
from runnel.cli.render.tables import Table, counted, human_bytes, human_time
from runnel.cli.render.times import format_time
from runnel.config import format_duration
from runnel.formats.wire import CursorState
from runnel.topics.names import is_system

TOPICS: Final = "!system/metrics/*"

_SECOND_NS: Final = 10**9
_NEAR_LIMIT: Final = 0.8


class Rates(msgspec.Struct, frozen=True):
    """Rates per second."""

    messages_in: float = 0
    bytes_in: float = 0
    messages_out: float = 0
    bytes_out: float = 0


class Durations(msgspec.Struct, frozen=True):
    """Percentiles of the durations in one interval."""

    count: int = 0
    p50_ns: int = 0
    p99_ns: int = 0
    max_ns: int = 0


class ReportedHistogram(msgspec.Struct, frozen=True):
    """A histogram in a report; the view needs only its latest interval."""

    interval: Durations = Durations()


class LimitState(msgspec.Struct, frozen=True):
    """A limit. `at_limit` says what happens when it is reached ("replaces": the oldest item is removed)."""

    limit: int
    used: float
    at_limit: str

    @property
    def share(self) -> float:
        return self.used / self.limit


class BrokerReport(msgspec.Struct, frozen=True):
    """The report `broker`: the broker as a whole."""

    time_ns: int
    node: str
    uptime_ns: int
    rates: Mapping[str, float]
    totals: Mapping[str, int]
    gauges: Mapping[str, float]
    histograms: Mapping[str, ReportedHistogram] = {}
    limits: Mapping[str, LimitState] = {}


class TopicRow(msgspec.Struct, frozen=True):
    """One topic of the report `topics`."""

    topic: str
    rates: Rates


class OtherTopicsRow(msgspec.Struct, frozen=True):
    """The topics of a journal that have no row of their own."""

    journal: str
    topics: int
    rates: Rates


class TopicsReport(msgspec.Struct, frozen=True):
    """The report `topics`."""

    topics: Sequence[TopicRow]
    others: Sequence[OtherTopicsRow] = ()


class JournalRow(msgspec.Struct, frozen=True):
    """One journal of the report `journals`."""

    journal: str
    rates: Rates
    stored_bytes: int = 0
    segments: int = 0
    queued_bytes: int = 0
    read_only_shards: int = 0
    sync_time_mean_ns: int | None = None
    sync_time_max_ns: int = 0


class JournalsReport(msgspec.Struct, frozen=True):
    """The report `journals`."""

    journals: Sequence[JournalRow]


class ReportedConnection(msgspec.Struct, frozen=True):
    """One connection of the report `connections`."""

    peer: str
    client: str
    subscriptions: int
    queued_bytes: int
    rates: Rates
    listener: str = ""


class ConnectionsReport(msgspec.Struct, frozen=True):
    """The report `connections`."""

    count: int
    connections: Sequence[ReportedConnection]


class ReportedSubscription(msgspec.Struct, frozen=True):
    """One live subscription of the report `subscriptions`."""

    peer: str
    number: int
    patterns: Sequence[str]
    pattern_count: int
    state: str
    lag: int
    queued_bytes: int
    missed: int


class SubscriptionsReport(msgspec.Struct, frozen=True):
    """The report `subscriptions`."""

    count: int
    behind: int
    subscriptions: Sequence[ReportedSubscription]


class ReportedGroup(msgspec.Struct, frozen=True):
    """An acknowledged subscription: the totals of all its members."""

    subscription: str
    mode: str
    patterns: Sequence[str]
    pattern_count: int
    is_paused: bool
    consumers: int
    backlog: int
    in_flight: int
    delayed: int
    oldest_ns: int
    redelivered: int
    dead: int


class GroupsReport(msgspec.Struct, frozen=True):
    """The report `work`: the acknowledged subscriptions."""

    time_ns: int
    count: int
    subscriptions: Sequence[ReportedGroup]


def kind_of(topic: str) -> str:
    """The kind of report in a topic of metrics: `broker`, `topics`, …"""
    return topic.rpartition("/")[2]


class BrokerReports(msgspec.Struct):
    """The latest report of each kind. Kinds that this version does not know are ignored."""

    broker: BrokerReport | None = None
    topics: TopicsReport | None = None
    journals: JournalsReport | None = None
    connections: ConnectionsReport | None = None
    subscriptions: SubscriptionsReport | None = None
    work: GroupsReport | None = None
    cursors: Sequence[CursorState] = ()

    def take(self, topic: str, payload: bytes) -> None:
        match kind_of(topic):
            case "broker":
                self.broker = msgspec.json.decode(payload, type=BrokerReport)
            case "topics":
                self.topics = msgspec.json.decode(payload, type=TopicsReport)
            case "journals":
                self.journals = msgspec.json.decode(payload, type=JournalsReport)
            case "connections":
                self.connections = msgspec.json.decode(payload, type=ConnectionsReport)
            case "subscriptions":
                self.subscriptions = msgspec.json.decode(payload, type=SubscriptionsReport)
            case "work":
                self.work = msgspec.json.decode(payload, type=GroupsReport)

    @property
    def is_complete(self) -> bool:
        return None not in (
            self.broker,
            self.topics,
            self.journals,
            self.connections,
            self.subscriptions,
            self.work,
        )


# --- Lines ---


def head_lines(latest: BrokerReports) -> list[str]:
    """The lines about the whole broker."""
    broker = latest.broker
    if broker is None:
        return ["waiting for the broker's first report"]
    uptime = format_duration(broker.uptime_ns // _SECOND_NS * _SECOND_NS)
    connections = 0 if latest.connections is None else latest.connections.count
    subscriptions = latest.subscriptions
    behind = "" if subscriptions is None else f" ({subscriptions.behind:,} behind)"
    lines = [
        f"{broker.node}  up {uptime}  {_second(broker.time_ns)}",
        f"in   {_flow(broker.rates, 'in')}   {broker.totals.get('messages_in', 0):,} in all",
        f"out  {_flow(broker.rates, 'out')}   {broker.totals.get('messages_out', 0):,} in all",
        f"{counted(connections, 'connection')}, "
        f"{counted(0 if subscriptions is None else subscriptions.count, 'subscription')}{behind}, "
        f"{counted(int(broker.gauges.get('topics_kept', 0)), 'kept topic')}, "
        f"{human_bytes(broker.gauges.get('stored_bytes', 0))} stored, "
        f"{human_bytes(broker.gauges.get('queued_bytes', 0))} waiting to be written",
    ]
    times = [
        f"{label} {_durations(found.interval)}"
        for name, label in (
            ("publish_time", "publish"),
            ("sync_time", "sync"),
            ("delivery_time", "deliver"),
            ("live_age", "age live"),
            ("work_age", "age work"),
            ("loop_lag", "loop"),
        )
        if (found := broker.histograms.get(name)) is not None and found.interval.count
    ]
    if times:
        lines.append("p50/p99/max  " + "   ".join(times))
    if latest.work is not None and latest.work.count:
        lines.insert(4, _work_line(latest.work))
    return lines + _warnings(broker, latest.work)


def _work_line(work: GroupsReport) -> str:
    rows = work.subscriptions
    return (
        f"{counted(work.count, 'acknowledged subscription')}, "
        f"{sum(row.backlog for row in rows):,} not acknowledged, "
        f"{sum(row.in_flight for row in rows):,} in flight, "
        f"{counted(sum(row.consumers for row in rows), 'consumer')}"
    )


def _warnings(broker: BrokerReport, work: GroupsReport | None) -> list[str]:
    found = []
    if dead := sum(row.dead for row in work.subscriptions) if work is not None else 0:
        found.append(f"WARNING: {counted(dead, 'dead letter')}; see `runnel dead list`")
    if read_only := int(broker.gauges.get("read_only_shards", 0)):
        found.append(f"WARNING: {counted(read_only, 'shard')} read-only after a failed sync")
    if damage := int(broker.gauges.get("damage", 0)):
        found.append(f"WARNING: {counted(damage, 'place')} of damage; see `runnel log verify`")
    if missed := broker.rates.get("messages_missed", 0):
        found.append(f"WARNING: live readers miss {missed:,.0f} messages/s")
    if broker.gauges.get("disk_full", 0):
        found.append("WARNING: the disk is full; publishing is refused")
    if refused := broker.rates.get("tokens_refused", 0):
        found.append(f"WARNING: {refused:,.1f} tokens/s are refused")
    return found + _limit_warnings(broker.limits)


def _limit_warnings(limits: Mapping[str, LimitState]) -> list[str]:
    """Limits that are nearly reached, the nearest first. A limit that replaces the oldest item needs no warning."""
    near = [
        (state.share, setting)
        for setting, state in limits.items()
        if state.at_limit != "replaces" and state.share >= _NEAR_LIMIT
    ]
    if not near:
        return []
    near_limits = ", ".join(
        f"{setting} {share:.0%} of {limits[setting].limit:,}"
        for share, setting in sorted(near, reverse=True)
    )
    return [f"WARNING: near its limit: {near_limits}"]


def summary_line(latest: BrokerReports) -> str:
    """One line for a file or a pipe."""
    broker = latest.broker
    if broker is None:
        return "no report yet"
    subscriptions = latest.subscriptions
    sync = broker.histograms.get("sync_time", ReportedHistogram()).interval
    parts = [
        _second(broker.time_ns),
        f"in {_flow(broker.rates, 'in')}",
        f"out {_flow(broker.rates, 'out')}",
        counted(0 if latest.connections is None else latest.connections.count, "connection"),
        counted(0 if subscriptions is None else subscriptions.count, "subscription"),
        f"{0 if subscriptions is None else subscriptions.behind:,} behind",
        f"sync p99 {human_time(sync.p99_ns)}" if sync.count else "no sync",
    ]
    if latest.work is not None and latest.work.count:
        backlog = sum(row.backlog for row in latest.work.subscriptions)
        parts.append(f"{backlog:,} not acknowledged")
    return "  ".join(parts)


def _flow(rates: Mapping[str, float], way: str) -> str:
    messages = rates.get(f"messages_{way}", 0)
    size = rates.get(f"bytes_{way}", 0)
    return f"{messages:,.0f} messages/s {human_bytes(size)}/s"


def _durations(found: Durations) -> str:
    return " / ".join(map(human_time, (found.p50_ns, found.p99_ns, found.max_ns)))


def _second(time_ns: int) -> str:
    return f"{format_time(time_ns)[:19]}Z"


# --- Tables ---


def tables(latest: BrokerReports, rows_max: int) -> list[Table]:
    """Tables with the busiest and the furthest behind first. Empty tables are left out."""
    made = [
        _topics(latest, rows_max),
        _work(latest, rows_max),
        _subscriptions(latest, rows_max),
        _cursors(latest, rows_max),
        _journals(latest, rows_max),
        _connections(latest, rows_max),
    ]
    return [table for table in made if table.rows]


def _topics(latest: BrokerReports, rows_max: int) -> Table:
    report = latest.topics or TopicsReport(())
    # The broker's own topics come last: users look for others first.
    ordered = sorted(report.topics, key=lambda row: is_system(row.topic))
    rows = [(row.topic, *_rates(row.rates)) for row in ordered[:rows_max]]
    hidden = len(report.topics) - len(rows) + sum(row.topics for row in report.others)
    if hidden:
        rows.append((f"… and {counted(hidden, 'other')}", "", "", "", ""))
    return Table(("topic", *_RATE_COLUMNS), rows, frozenset(_RATE_COLUMNS))


def _subscriptions(latest: BrokerReports, rows_max: int) -> Table:
    report = latest.subscriptions or SubscriptionsReport(0, 0, ())
    rows = [
        (
            patterns_text(row.patterns, row.pattern_count),
            f"{row.peer}#{row.number}",
            row.state,
            f"{row.lag:,}",
            human_bytes(row.queued_bytes),
            f"{row.missed:,}",
        )
        for row in report.subscriptions[:rows_max]
    ]
    columns = ("subscription", "reader", "state", "lag", "queued", "missed")
    return Table(columns, rows, frozenset(columns[3:]))


def _work(latest: BrokerReports, rows_max: int) -> Table:
    report = latest.work or GroupsReport(0, 0, ())
    rows = [
        (
            row.subscription + (" PAUSED" if row.is_paused else ""),
            patterns_text(row.patterns, row.pattern_count),
            row.mode,
            f"{row.backlog:,}",
            f"{row.in_flight:,}",
            f"{row.delayed:,}",
            age(row.oldest_ns, report.time_ns),
            f"{row.redelivered:,}",
            f"{row.dead:,}",
            f"{row.consumers:,}",
        )
        for row in report.subscriptions[:rows_max]
    ]
    columns = (
        "acknowledged", "topics", "mode", "backlog", "in flight", "delayed", "oldest",
        "redelivered", "dead", "consumers",
    )  # fmt: skip
    return Table(columns, rows, frozenset(columns[3:]))


def _cursors(latest: BrokerReports, rows_max: int) -> Table:
    places = [(cursor.name, place) for cursor in latest.cursors for place in cursor.places]
    places.sort(key=lambda item: -item[1].lag)
    rows = [
        (
            name,
            f"{place.topic}[{place.partition}]" if place.topic else ", ".join(place.patterns),
            f"{place.lag:,}",
        )
        for name, place in places[:rows_max]
    ]
    lag = "lag (messages)"
    return Table(("cursor", "place", lag), rows, frozenset((lag,)))


def _journals(latest: BrokerReports, rows_max: int) -> Table:
    report = latest.journals or JournalsReport(())
    rows = [
        (
            row.journal + (" READ-ONLY" if row.read_only_shards else ""),
            *_rates(row.rates)[:2],
            human_bytes(row.stored_bytes),
            f"{row.segments:,}",
            human_bytes(row.queued_bytes),
            "-" if row.sync_time_mean_ns is None else human_time(row.sync_time_mean_ns),
            human_time(row.sync_time_max_ns) if row.sync_time_max_ns else "-",
        )
        for row in report.journals[:rows_max]
    ]
    columns = ("journal", "in/s", "bytes in/s", "stored", "segments", "queued", "sync", "longest")
    return Table(columns, rows, frozenset(columns[1:]))


def _connections(latest: BrokerReports, rows_max: int) -> Table:
    report = latest.connections or ConnectionsReport(0, ())
    rows = [
        (row.peer, row.listener, row.client, str(row.subscriptions), *_rates(row.rates), human_bytes(row.queued_bytes))
        for row in report.connections[:rows_max]
    ]  # fmt: skip
    columns = ("connection", "listener", "client", "subscriptions", *_RATE_COLUMNS, "queued")
    return Table(columns, rows, frozenset(columns[3:]))


_RATE_COLUMNS: Final = ("in/s", "bytes in/s", "out/s", "bytes out/s")


def _rates(rates: Rates) -> tuple[str, str, str, str]:
    return (
        f"{rates.messages_in:,.0f}",
        human_bytes(rates.bytes_in),
        f"{rates.messages_out:,.0f}",
        human_bytes(rates.bytes_out),
    )
