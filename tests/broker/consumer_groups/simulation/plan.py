"""The plan of a history, drawn from its seed: rules of topics, subscriptions and their options, troubles."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from runnel.config import (
    BrokerSettings,
    LogSettings,
    Pin,
    Retain,
    Rotate,
    Settings,
    TopicRule,
    Until,
)
from runnel.formats.work_heads import WorkOptions
from runnel.group_rules.definition import Mode
from tests.simulation.shards import draw_journal_shards
from tests.simulation.troubles import Trouble, draw_troubles, names

SECOND_NS: Final = 1_000_000_000
# Topics of a journal may share a batch, as far as they lie in one shard. The last of each are made late, or never.
JOURNALS: Final = {"t": ("t/1", "t/2", "t/late"), "u": ("u", "u/late")}
TOPICS: Final = tuple(topic for topics in JOURNALS.values() for topic in topics)
PATTERNS: Final = (("t/*",), ("t/*",), ("t/1",), ("u*",), ("t/1", "u"), ("*",))


TROUBLES: Final = (
    Trouble.POWER_LOSS,
    Trouble.KILL,
    Trouble.DISK_FAULT,
    Trouble.DISK_FULL,
    Trouble.LOST_CONSUMER,
    Trouble.STALLED_CONSUMER,
    Trouble.NACK,
    Trouble.BAD_ACK,
    Trouble.OPERATOR,
    Trouble.TOPIC_REMOVAL,
    Trouble.LOST_SHARD,
    Trouble.CANCELLATION,
)


@dataclass(frozen=True, slots=True)
class SubscriptionPlan:
    """A subscription that consumers of the history make."""

    name: str
    patterns: tuple[str, ...]
    mode: Mode
    options: WorkOptions
    start: str

    def __str__(self) -> str:
        options = self.options
        return (
            f"{self.name}: {self.mode} over {' '.join(self.patterns)} from {self.start}; lease {options.lease_ms} "
            f"ms, at most {options.deliveries_max} deliveries, retry after {options.retry_delay_ms} to "
            f"{options.retry_delay_ms_max} ms"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one history of a broker with consumer groups."""

    settings: Settings
    subscriptions: tuple[SubscriptionPlan, ...]
    keys: tuple[bytes | None, ...]
    consumers_max: int
    worker_turns_max: int
    steps: int
    troubles: frozenset[Trouble]

    def lines(self) -> list[str]:
        rules = [
            f"{rule.match}: {rule.partitions} partitions, segments of {rule.rotate.bytes_max} bytes, "
            f"kept until {rule.retain.until}, {rule.retain.age_ns}, {rule.retain.bytes_max}"
            for rule in self.settings.topics
        ]
        return [*map(str, self.subscriptions), *rules, f"troubles: {names(self.troubles)}"]


def draw(random: Random) -> Plan:
    rules = (_rule(random, "t/*", "t"), _rule(random, "u*", "u"))
    return Plan(
        settings=Settings(
            topics=rules,
            log=LogSettings(
                allocate_bytes=random.choice((0, 1_000)),
                disk_reserve_bytes=0,
                index_cache_bytes_max=random.choice((1, 10**6)),
                state_log_bytes_max=random.choice((1, 300, 10**6)),
                catalogue_log_bytes_max=random.choice((300, 10**6)),
                journal_shards=draw_journal_shards(random),
            ),
            # The history does not look at metrics.
            broker=BrokerSettings(metrics_interval_ns=86_400 * SECOND_NS),
        ),
        subscriptions=tuple(
            _subscription(random, f"s{number}") for number in range(1, random.choice((2, 2, 3, 4)))
        ),
        keys=random.choice(((b"k",), (b"a", b"b", b"c"), (b"a", b"b", None), (None,))),
        consumers_max=random.randint(2, 5),
        worker_turns_max=random.choice((0, 1, 4)),
        steps=random.choice((25, 50, 100)),
        troubles=draw_troubles(random, TROUBLES, 0.4, {Trouble.NACK: 0.7}),
    )


def _rule(random: Random, match: str, journal: str) -> TopicRule:
    retain = random.choice(
        (
            Retain(),
            Retain(until=Until.ACKED),
            Retain(until=Until.ACKED),
            Retain(until=Until.ACKED),
            Retain(age_ns=60 * SECOND_NS, until=Until.ACKED),
            Retain(bytes_max=2_000),
        )
    )
    # Where limits pass what is owed, they do so before long.
    is_limited = retain.age_ns is not None or retain.bytes_max is not None
    pin = Pin(age_ns=120 * SECOND_NS, bytes_max=4_000) if is_limited else Pin(age_ns=None)
    return TopicRule(
        match=match,
        journal=journal,
        partitions=random.choice((1, 1, 2)),
        rotate=Rotate(bytes_max=random.choice((1, 400, 1_500, 10**6))),
        retain=retain,
        pin=pin,
    )


def _subscription(random: Random, name: str) -> SubscriptionPlan:
    retry_delay_ms = random.choice((0, 100, 1000))
    options = WorkOptions(
        lease_ms=random.choice((1_000, 30_000)),
        deliveries_max=random.choice((0, 1, 2, 2, 3)),
        retry_delay_ms=retry_delay_ms,
        retry_delay_ms_max=max(retry_delay_ms, random.choice((200, 5000))),
        absent_ms_max=10**9,
    )
    return SubscriptionPlan(
        name,
        random.choice(PATTERNS),
        random.choice((Mode.SHARED, Mode.KEY_SHARED, Mode.KEY_SHARED, Mode.MULTICAST)),
        options,
        random.choice(("earliest", "earliest", "latest")),
    )
