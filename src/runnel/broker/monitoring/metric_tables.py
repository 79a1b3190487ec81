"""The tables of the metrics documents: topics, journals, connections, subscriptions; the top rows of each. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from runnel.broker.monitoring.store_statistics import JournalStatistics, StoreReading
from runnel.broker.monitoring.topic_traffic import OTHER_JOURNALS, Flow, OtherTopics, TrafficSample
from runnel.formats.work_heads import SubscriptionState

# A table has to fit into a message.
_ROWS_MAX: Final = 100
_PATTERNS_MAX: Final = 4  # shown of one subscription

Table = dict[str, object]


class ConnectionStats(msgspec.Struct, frozen=True, gc=False):
    """A connection as its listener sees it."""

    id: int  # unique for the life of the process
    listener: str
    peer: str
    client: str
    since_ns: int  # wall clock
    subscriptions: int
    queued_bytes: int
    flow: Flow  # since it was opened
    token: str = ""  # the name of its token


class LiveSubscriptionStats(msgspec.Struct, frozen=True, gc=False):
    """A live subscription. `lag`: entries of its shards that it has not been sent."""

    connection: int
    number: int
    peer: str
    patterns: Sequence[str]
    is_behind: bool  # it reads from the log
    lag: int
    queued_bytes: int
    missed: int  # messages, since it began


def topics_table(traffic: TrafficSample, interval_ns: int) -> Table:
    """The busiest topics one by one, the rest of each journal in one row."""
    others = dict(traffic.others)
    shown = heapq.nlargest(_ROWS_MAX, others, key=lambda name: others[name].flow.busyness)
    rest = OtherTopics()
    for name in set(others).difference(shown):
        rest.topics += others[name].topics
        rest.flow.add(others[name].flow)
    rows = [(name, others[name]) for name in shown]
    if rest.topics or any(rest.flow.busyness):
        rows.append((OTHER_JOURNALS, rest))
    return {
        "topics": [
            {"topic": row.topic, "journal": row.journal, "rates": row.flow.rates(interval_ns)}
            for row in traffic.busiest
        ],
        "others": [
            {"journal": name, "topics": row.topics, "rates": row.flow.rates(interval_ns)}
            for name, row in rows
        ],
    }


def journals_table(
    traffic: TrafficSample, interval_ns: int, now: StoreReading, before: StoreReading
) -> Table:
    """The busiest journals, then the largest idle ones; the others are summed up.

    `before` is an earlier reading: the growth of the counters since then gives the recent sync times.
    """
    idle = Flow()
    active = heapq.nlargest(
        _ROWS_MAX, traffic.journals, key=lambda name: traffic.journals[name].busyness
    )
    shown = list(dict.fromkeys([*active, *now.largest]))[:_ROWS_MAX]
    rows = [
        {
            "journal": name,
            "rates": traffic.journals.get(name, idle).rates(interval_ns),
            **_storage(now.journals.get(name), before.journals.get(name)),
        }
        for name in shown
    ]
    rest = Flow()
    for name in set(traffic.journals).difference(shown):
        rest.add(traffic.journals[name])
    count = len(now.journals.keys() | traffic.journals.keys())
    return {
        "journals": rows,
        "others": {"journals": count - len(shown), "rates": rest.rates(interval_ns)},
        "total": _storage(now.total, before.total),
    }


def _storage(now: JournalStatistics | None, before: JournalStatistics | None) -> Table:
    """The storage figures of a journal; empty for the journal of ephemeral topics."""
    if now is None:
        return {}
    earlier = before or JournalStatistics()
    syncs = now.syncs - earlier.syncs
    row: Table = msgspec.structs.asdict(now)
    row["sync_time_mean_ns"] = (now.sync_time_ns - earlier.sync_time_ns) // syncs if syncs else None
    return row


class BusiestConnections:
    """The busiest connections by traffic since `before`; among equals, those with the fullest queues."""

    def __init__(self, before: Mapping[int, ConnectionStats], interval_ns: int) -> None:
        self._before = before
        self._interval_ns = interval_ns
        self._count = 0
        self._busiest: list[tuple[ConnectionStats, Flow]] = []

    def add(self, rows: Sequence[ConnectionStats]) -> None:
        """Add some connections. With very many, the caller yields the loop between calls."""
        before = self._before
        self._count += len(rows)
        moved = [
            (row, _since(row.flow, before[row.id].flow if row.id in before else Flow()))
            for row in rows
        ]
        self._busiest = heapq.nlargest(
            _ROWS_MAX,
            self._busiest + moved,
            key=lambda item: (*item[1].busyness, item[0].queued_bytes),
        )

    def table(self) -> Table:
        return {
            "count": self._count,
            "connections": [
                {
                    "id": row.id,
                    "listener": row.listener,
                    "door": row.listener,  # the former name; deprecated
                    "peer": row.peer,
                    "client": row.client,
                    "token": row.token,
                    "since_ns": row.since_ns,
                    "subscriptions": row.subscriptions,
                    "queued_bytes": row.queued_bytes,
                    "rates": flow.rates(self._interval_ns),
                    "totals": msgspec.structs.asdict(row.flow),
                }
                for row, flow in self._busiest
            ],
        }


def _since(now: Flow, before: Flow) -> Flow:
    return Flow(
        now.messages_in - before.messages_in,
        now.bytes_in - before.bytes_in,
        now.messages_out - before.messages_out,
        now.bytes_out - before.bytes_out,
    )


def subscriptions_table(rows: Sequence[LiveSubscriptionStats]) -> Table:
    """Live subscriptions, the most behind first."""
    shown = heapq.nlargest(
        _ROWS_MAX, rows, key=lambda row: (row.is_behind, row.lag, row.queued_bytes, row.missed)
    )
    return {
        "count": len(rows),
        "behind": sum(row.is_behind for row in rows),
        "subscriptions": [
            {
                "connection": row.connection,
                "number": row.number,
                "peer": row.peer,
                "patterns": list(row.patterns[:_PATTERNS_MAX]),
                "pattern_count": len(row.patterns),
                "state": "behind" if row.is_behind else "live",
                "lag": row.lag,
                "queued_bytes": row.queued_bytes,
                "missed": row.missed,
            }
            for row in shown
        ],
    }


def work_table(states: Sequence[SubscriptionState]) -> Table:
    """Acknowledged subscriptions, the largest backlog first."""

    def backlog(state: SubscriptionState) -> int:
        return sum(member.backlog for member in state.members)

    shown = heapq.nlargest(_ROWS_MAX, states, key=backlog)
    return {
        "count": len(states),
        "subscriptions": [
            {
                "subscription": state.name,
                "mode": state.mode,
                "patterns": list(state.patterns[:_PATTERNS_MAX]),
                "pattern_count": len(state.patterns),
                "is_paused": state.is_paused,
                "members": len(state.members),
                "consumers": sum(member.consumers for member in state.members),
                "backlog": backlog(state),
                "in_flight": sum(member.in_flight for member in state.members),
                "delayed": sum(member.delayed for member in state.members),
                "oldest_ns": min(
                    [each.oldest_ns for each in state.members if each.oldest_ns], default=0
                ),
                "redelivered": state.redelivered,
                "dead": state.dead,
            }
            for state in shown
        ],
    }
