"""Metrics with labels: journals, topics, acknowledged subscriptions, cursors, events. Bounded, and pure.

A counter exists as long as the process runs, so that rates can be computed from it: counters are by journal, and the
first journals have their own series. The set of busy topics changes all the time, so topics have gauges only: messages
and bytes of the last interval. The number of things without a series is a metric too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from runnel.broker.monitoring.events import EventKind
from runnel.broker.monitoring.metrics import Description, Family, MetricKind, MetricUnit, Row
from runnel.broker.monitoring.store_statistics import JournalStatistics
from runnel.broker.monitoring.topic_traffic import (
    JOURNAL_TOTALS_MAX,
    OTHER_JOURNALS,
    Flow,
    TopicTraffic,
)
from runnel.formats.wire import CursorState
from runnel.formats.work_heads import MemberState, SubscriptionState
from runnel.topics.names import is_reserved

MEMBERS_MAX: Final = 500
CURSORS_MAX: Final = 500
OTHER: Final = "(other)"
"""The label of everything without its own series."""

T = TypeVar("T")


def _gauge(name: str, text: str, unit: MetricUnit = MetricUnit.COUNT) -> Description:
    return Description(name, MetricKind.GAUGE, text, unit)


def _counter(name: str, text: str, unit: MetricUnit = MetricUnit.COUNT) -> Description:
    return Description(name, MetricKind.COUNTER, text, unit)


# --- Journals ---

_FLOWS: Final[Sequence[tuple[str, Description]]] = (
    ("messages_in", _counter("journal_messages_in", "Messages accepted, by journal.")),
    ("bytes_in", _counter("journal_bytes_in", "Bytes of accepted batches, by journal.", MetricUnit.BYTES)),
    ("messages_out", _counter("journal_messages_out", "Messages for readers, by journal.")),
    ("bytes_out", _counter("journal_bytes_out", "Bytes for readers, by journal.", MetricUnit.BYTES)),
)  # fmt: skip
_STORAGE: Final[Sequence[tuple[str, Description]]] = (
    ("stored_bytes", _gauge("journal_stored_bytes", "Bytes on disk or in memory, by journal.", MetricUnit.BYTES)),
    ("segments", _gauge("journal_segments", "Segment files, or batches in memory, by journal.")),
    ("queued_batches", _gauge("journal_queued_batches", "Batches waiting to be written, by journal.")),
    ("queued_bytes", _gauge("journal_queued_bytes", "Bytes waiting to be written, by journal.", MetricUnit.BYTES)),
    ("read_only_shards", _gauge("journal_read_only_shards", "Read-only shards, by journal.")),
    ("failed_batches", _counter("journal_batches_failed", "Batches that could not be written, by journal.")),
    (
        "unknown_outcomes",
        _counter(
            "journal_unknown_outcomes",
            "Attempts to store batches after which it was unknown whether they are stored, by journal.",
        ),
    ),
    ("syncs", _counter("journal_syncs", "Syncs, by journal.")),
    (
        "sync_time_ns",
        _counter("journal_sync_time", "Time that writes and syncs took, by journal.", MetricUnit.NANOSECONDS),
    ),
)  # fmt: skip


def flow_families(totals: Mapping[str, Flow]) -> Iterator[Family]:
    """Messages and bytes in and out of each journal. `totals` is bounded already."""
    for field, described in _FLOWS:
        rows: list[Row] = [
            ((OTHER if name == OTHER_JOURNALS else name,), getattr(flow, field))
            for name, flow in totals.items()
        ]
        yield Family(described, ("journal",), rows)


class JournalRoster:
    """The journals with their own series: the first ones, for good. The others are summed up."""

    def __init__(self, journals_max: int = JOURNAL_TOTALS_MAX) -> None:
        self._journals_max = journals_max
        self._names: dict[str, None] = {}
        self.left_out = 0

    def divide(self, journals: Mapping[str, JournalStatistics]) -> dict[str, JournalStatistics]:
        own: dict[str, JournalStatistics] = {}
        rest = JournalStatistics()
        for name, statistics in journals.items():
            if name not in self._names and len(self._names) < self._journals_max:
                self._names[name] = None
            if name in self._names:
                own[name] = statistics
            else:
                _add(rest, statistics)
        self.left_out = len(journals) - len(own)
        return {**own, OTHER: rest} if self.left_out else own


def _add(total: JournalStatistics, other: JournalStatistics) -> None:
    for field, _ in _STORAGE:
        setattr(total, field, getattr(total, field) + getattr(other, field))


def storage_families(journals: Mapping[str, JournalStatistics]) -> Iterator[Family]:
    for field, described in _STORAGE:
        rows: list[Row] = [((name,), getattr(each, field)) for name, each in journals.items()]
        yield Family(described, ("journal",), rows)


# --- Topics ---

_RATES: Final[Sequence[tuple[str, Description]]] = (
    ("messages_in", _gauge("topic_messages_in_per_second", "Messages accepted, of the busiest topics.")),
    ("bytes_in", _gauge("topic_in_bytes_per_second", "Bytes accepted, of the busiest topics.")),
    ("messages_out", _gauge("topic_messages_out_per_second", "Messages for readers, of the busiest topics.")),
    ("bytes_out", _gauge("topic_out_bytes_per_second", "Bytes for readers, of the busiest topics.")),
)  # fmt: skip


def topic_families(traffic: TopicTraffic) -> Iterator[Family]:
    """The busiest topics of the last interval. The set changes, so topics have no counters."""
    rates = [
        (row.topic, row.flow.rates(traffic.last_ns))
        for row in traffic.last.busiest
        if not is_reserved(row.topic)  # published by the broker itself
    ]
    for field, described in _RATES:
        yield Family(described, ("topic",), [((topic,), each[field]) for topic, each in rates])


# --- Acknowledged subscriptions ---


def work_families(states: Sequence[SubscriptionState], now_ns: int) -> Iterator[Family]:
    """Subscriptions and their members; if there are too many, those with the largest backlog."""
    pairs = [(state, member) for state in states for member in state.members]
    members = _most(MEMBERS_MAX, pairs, lambda item: (item[1].backlog,))
    shown = _most(
        MEMBERS_MAX, states, lambda state: (state.dead, sum(each.backlog for each in state.members))
    )

    def of_members(
        described: Description, read: Callable[[SubscriptionState, MemberState], float]
    ) -> Family:
        rows = [
            ((state.name, member.name), float(read(state, member))) for state, member in members
        ]
        return Family(described, ("subscription", "member"), rows)

    def of_states(described: Description, read: Callable[[SubscriptionState], float]) -> Family:
        return Family(
            described, ("subscription",), [((each.name,), float(read(each))) for each in shown]
        )

    yield of_members(
        _gauge("subscription_backlog", "Messages not acknowledged, those in flight included."),
        lambda _, member: member.backlog,
    )
    yield of_members(
        _gauge("subscription_in_flight", "Messages leased to consumers."),
        lambda _, member: member.in_flight,
    )
    yield of_members(
        _gauge("subscription_delayed", "Messages that wait for their next delivery."),
        lambda _, member: member.delayed,
    )
    yield of_members(
        _gauge(
            "subscription_oldest_age",
            "Age of the oldest message not acknowledged, by receive time; 0: there is none.",
            MetricUnit.NANOSECONDS,
        ),
        lambda _, member: max(0, now_ns - member.oldest_ns) if member.oldest_ns else 0,
    )
    yield of_members(
        _gauge("subscription_consumers", "Consumers that are connected."),
        lambda _, member: member.consumers,
    )
    yield of_states(
        _gauge("subscription_paused", "1 if the subscription is paused: nothing is delivered."),
        lambda state: state.is_paused,
    )
    yield of_states(
        _gauge(
            "subscription_dead_letters", "Dead letters that have not been sent back or dropped."
        ),
        lambda state: state.dead,
    )
    yield of_states(
        _counter("subscription_redelivered", "Messages delivered again."),
        lambda state: state.redelivered,
    )


# --- Cursors ---


class CursorLag(msgspec.Struct, frozen=True, gc=False):
    """The lag of a cursor in messages: the sum of its places that are served here."""

    name: str
    messages: int
    updated_ns: int

    @classmethod
    def of(cls, state: CursorState) -> CursorLag:
        return cls(state.name, sum(max(0, place.lag) for place in state.places), state.updated_ns)


def cursor_families(cursors: Sequence[CursorLag]) -> Iterator[Family]:
    """Named cursors; if there are too many, those with the largest lag."""
    shown = _most(CURSORS_MAX, cursors, lambda each: (each.messages,))
    for described, field in (
        (
            _gauge(
                "cursor_lag_messages",
                "Matching messages that a named cursor has not passed; for positions in shards, an upper bound.",
            ),
            "messages",
        ),
        (
            _gauge(
                "cursor_updated_timestamp",
                "When a named cursor was last set, since 1970.",
                MetricUnit.NANOSECONDS,
            ),
            "updated_ns",
        ),
    ):
        yield Family(
            described, ("cursor",), [((each.name,), getattr(each, field)) for each in shown]
        )


# --- The rest ---


def event_family(counts: Mapping[EventKind, int]) -> Family:
    described = _counter("events", "Events by kind, including suppressed ones.")
    return Family(described, ("kind",), [((kind.value,), count) for kind, count in counts.items()])


def listener_families(counts: Sequence[tuple[str, int]]) -> Iterator[Family]:
    described = _gauge(
        "listener_connections", "Connections, or calls in progress, of each listener."
    )
    samples = [((listener,), count) for listener, count in counts]
    yield Family(described, ("listener",), samples)
    former = _gauge(
        "door_connections", "Deprecated: the former name of runnel_listener_connections."
    )
    yield Family(former, ("door",), samples)


def info_family(**labels: str) -> Family:
    described = _gauge("build_info", "Always 1; the labels give the version and the node.")
    return Family(described, tuple(labels), [(tuple(labels.values()), 1)])


def left_out_family(**counts: int) -> Family:
    described = _gauge(
        "series_left_out", "Things without their own series, because there are too many."
    )
    return Family(described, ("of",), [((name,), count) for name, count in counts.items()])


def _most(count_max: int, items: Sequence[T], key: Callable[[T], tuple[int, ...]]) -> Sequence[T]:
    return items if len(items) <= count_max else heapq.nlargest(count_max, items, key=key)
