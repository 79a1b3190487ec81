"""What a broker says of itself on `!system/metrics/…`, and how `runnel top` shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from runnel.cli.subscription_tables import age, patterns_text
from runnel.cli.tables import Table, counted, human_bytes, human_time
from runnel.cli.times import format_time
from runnel.config import format_duration
from runnel.formats.wire import CursorState
from runnel.topics.names import is_system

TOPICS: Final = "!system/metrics/*"

_SECOND_NS: Final = 10**9
_NEAR_LIMIT: Final = 0.8


class Rates(msgspec.Struct, frozen=True):
    """Per second."""

    messages_in: float = 0
    bytes_in: float = 0
    messages_out: float = 0
    bytes_out: float = 0


class Durations(msgspec.Struct, frozen=True):
    count: int = 0
    p50_ns: int = 0
    p99_ns: int = 0
    max_ns: int = 0


class Histogram(msgspec.Struct, frozen=True):
    interval: Durations = Durations()


class LimitState(msgspec.Struct, frozen=True):
    """A setting that limits something. `at_limit`: what becomes of one more ("replaces": the oldest goes)."""

    limit: int
    used: float
    at_limit: str

    @property
    def share(self) -> float:
        return self.used / self.limit


class BrokerReport(msgspec.Struct, frozen=True):
    time_ns: int
    node: str
    uptime_ns: int
    rates: Mapping[str, float]
    totals: Mapping[str, int]
    gauges: Mapping[str, float]
    histograms: Mapping[str, Histogram] = {}
    limits: Mapping[str, LimitState] = {}


class TopicRow(msgspec.Struct, frozen=True):
    topic: str
    rates: Rates


class OtherTopicsRow(msgspec.Struct, frozen=True):
    journal: str
    topics: int
    rates: Rates


class TopicsReport(msgspec.Struct, frozen=True):
    topics: Sequence[TopicRow]
    others: Sequence[OtherTopicsRow] = ()


class JournalRow(msgspec.Struct, frozen=True):
    journal: str
    rates: Rates
    stored_bytes: int = 0
    segments: int = 0
    queued_bytes: int = 0
    read_only_shards: int = 0
    sync_time_mean_ns: int | None = None
    sync_time_max_ns: int = 0


class JournalsReport(msgspec.Struct, frozen=True):
    journals: Sequence[JournalRow]


class ConnectionRow(msgspec.Struct, frozen=True):
    peer: str
    client: str
    subscriptions: int
    queued_bytes: int
    rates: Rates
    door: str = ""


class ConnectionsReport(msgspec.Struct, frozen=True):
    count: int
    connections: Sequence[ConnectionRow]


class SubscriptionRow(msgspec.Struct, frozen=True):
    peer: str
    number: int
    patterns: Sequence[str]
    pattern_count: int
    state: str
    lag: int
    queued_bytes: int
    missed: int


class SubscriptionsReport(msgspec.Struct, frozen=True):
    count: int
    behind: int
    subscriptions: Sequence[SubscriptionRow]


class WorkRow(msgspec.Struct, frozen=True):
    """An acknowledged subscription, all of its members together."""

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


class WorkReport(msgspec.Struct, frozen=True):
    time_ns: int
    count: int
    subscriptions: Sequence[WorkRow]


def kind_of(topic: str) -> str:
    """What a topic of metrics reports on: `broker`, `topics`, …"""
    return topic.rpartition("/")[2]


class Watched(msgspec.Struct):
    """The newest report of each kind. A kind that this version does not know is passed over."""

    broker: BrokerReport | None = None
    topics: TopicsReport | None = None
    journals: JournalsReport | None = None
    connections: ConnectionsReport | None = None
    subscriptions: SubscriptionsReport | None = None
    work: WorkReport | None = None
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
                self.work = msgspec.json.decode(payload, type=WorkReport)

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


def head_lines(watched: Watched) -> list[str]:
    """The broker as a whole."""
    broker = watched.broker
    if broker is None:
        return ["waiting for the broker's first report"]
    uptime = format_duration(broker.uptime_ns // _SECOND_NS * _SECOND_NS)
    connections = 0 if watched.connections is None else watched.connections.count
    subscriptions = watched.subscriptions
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
    if watched.work is not None and watched.work.count:
        lines.insert(4, _work_line(watched.work))
    return lines + _warnings(broker, watched.work)


def _work_line(work: WorkReport) -> str:
    rows = work.subscriptions
    return (
        f"{counted(work.count, 'acknowledged subscription')}, "
        f"{sum(row.backlog for row in rows):,} not acknowledged, "
        f"{sum(row.in_flight for row in rows):,} in flight, "
        f"{counted(sum(row.consumers for row in rows), 'consumer')}"
    )


def _warnings(broker: BrokerReport, work: WorkReport | None) -> list[str]:
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
    """Limits that are nearly reached, the nearest first. Where the oldest just goes, reaching it is no trouble."""
    near = [
        (state.share, setting)
        for setting, state in limits.items()
        if state.at_limit != "replaces" and state.share >= _NEAR_LIMIT
    ]
    if not near:
        return []
    told = ", ".join(
        f"{setting} {share:.0%} of {limits[setting].limit:,}"
        for share, setting in sorted(near, reverse=True)
    )
    return [f"WARNING: near its limit: {told}"]


def summary_line(watched: Watched) -> str:
    """One line for a file or a pipe."""
    broker = watched.broker
    if broker is None:
        return "no report yet"
    subscriptions = watched.subscriptions
    sync = broker.histograms.get("sync_time", Histogram()).interval
    parts = [
        _second(broker.time_ns),
        f"in {_flow(broker.rates, 'in')}",
        f"out {_flow(broker.rates, 'out')}",
        counted(0 if watched.connections is None else watched.connections.count, "connection"),
        counted(0 if subscriptions is None else subscriptions.count, "subscription"),
        f"{0 if subscriptions is None else subscriptions.behind:,} behind",
        f"sync p99 {human_time(sync.p99_ns)}" if sync.count else "no sync",
    ]
    if watched.work is not None and watched.work.count:
        backlog = sum(row.backlog for row in watched.work.subscriptions)
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


def tables(watched: Watched, rows_max: int) -> list[Table]:
    """What is worth a look, the busiest and the most behind first; a table without rows is left out."""
    made = [
        _topics(watched, rows_max),
        _work(watched, rows_max),
        _subscriptions(watched, rows_max),
        _cursors(watched, rows_max),
        _journals(watched, rows_max),
        _connections(watched, rows_max),
    ]
    return [table for table in made if table.rows]


def _topics(watched: Watched, rows_max: int) -> Table:
    report = watched.topics or TopicsReport(())
    # What the broker says of itself comes last: nobody looks here to see it.
    ordered = sorted(report.topics, key=lambda row: is_system(row.topic))
    rows = [(row.topic, *_rates(row.rates)) for row in ordered[:rows_max]]
    hidden = len(report.topics) - len(rows) + sum(row.topics for row in report.others)
    if hidden:
        rows.append((f"… and {counted(hidden, 'other')}", "", "", "", ""))
    return Table(("topic", *_RATE_COLUMNS), rows, frozenset(_RATE_COLUMNS))


def _subscriptions(watched: Watched, rows_max: int) -> Table:
    report = watched.subscriptions or SubscriptionsReport(0, 0, ())
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


def _work(watched: Watched, rows_max: int) -> Table:
    report = watched.work or WorkReport(0, 0, ())
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


def _cursors(watched: Watched, rows_max: int) -> Table:
    places = [(cursor.name, place) for cursor in watched.cursors for place in cursor.places]
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


def _journals(watched: Watched, rows_max: int) -> Table:
    report = watched.journals or JournalsReport(())
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


def _connections(watched: Watched, rows_max: int) -> Table:
    report = watched.connections or ConnectionsReport(0, ())
    rows = [
        (row.peer, row.door, row.client, str(row.subscriptions), *_rates(row.rates), human_bytes(row.queued_bytes))
        for row in report.connections[:rows_max]
    ]  # fmt: skip
    columns = ("connection", "door", "client", "subscriptions", *_RATE_COLUMNS, "queued")
    return Table(columns, rows, frozenset(columns[3:]))


_RATE_COLUMNS: Final = ("in/s", "bytes in/s", "out/s", "bytes out/s")


def _rates(rates: Rates) -> tuple[str, str, str, str]:
    return (
        f"{rates.messages_in:,.0f}",
        human_bytes(rates.bytes_in),
        f"{rates.messages_out:,.0f}",
        human_bytes(rates.bytes_out),
    )
