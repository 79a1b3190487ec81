"""The plan of a history, drawn from its seed: settings, rules, topics and troubles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final

from runnel.config import (
    LimitSettings,
    LogSettings,
    Pin,
    Retain,
    Rotate,
    Settings,
    TopicRule,
    Until,
)
from runnel.topics.policies import Policies
from tests.simulation.shards import draw_journal_shards
from tests.simulation.troubles import Trouble, draw_troubles

SECOND_NS = 1_000_000_000


TROUBLES: Final = (
    Trouble.POWER_LOSS,
    Trouble.KILL,
    Trouble.DISK_FAULT,
    Trouble.DISK_FULL,
    Trouble.RECOVERY_CRASH,
    Trouble.CANCELLATION,
)


@dataclass(frozen=True, slots=True)
class Losses:
    """How often a group store loses answers: the shares of attempts, and the seed of its own random numbers."""

    seed: int
    before: float  # not stored, and unknown
    after: float  # stored, and unknown
    failed: float
    hangs: float
    stays_unknown: (
        float  # of unknown attempts: all later ones are unknown too, until the medium is well again
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one history of the log."""

    settings: Settings
    policies: Policies
    topics: tuple[str, ...]
    covered: tuple[str, ...]  # topics of a subscription
    producers: tuple[str, ...]
    steps: int
    worker_turns_max: int
    troubles: frozenset[Trouble]
    ends_in_damage: bool
    losses: Losses | None = None  # None: groups are stored in segment files as usual

    @property
    def retains(self) -> bool:
        """Whether retention may take anything."""
        return any(rule.retain != Retain() for rule in self.settings.topics)


def draw(random: Random) -> Plan:
    # Few journals and topics: what is rare with many happens often with few.
    names = ("a/1", "a/2", "a/3", "t/x", "t/ü%", "c")
    topics = tuple(sorted(random.sample(names, random.randint(2, len(names)))))
    rules = (
        _rule(random, "a/*", "alpha"),
        _rule(random, "t/*", "{topic}"),
        _rule(random, "*", "rest"),
    )
    settings = Settings(
        data="data",
        limits=LimitSettings(open_files_max=16),
        log=LogSettings(
            write_queue_bytes_max=random.choice((3_000, 20_000, 1 << 20)),
            write_queue_batches_max=random.choice((3, 20, 1000)),
            group_bytes_max=random.choice((300, 2_000, 20_000)),
            allocate_bytes=random.choice((0, 512, 1_000, 8_192)),
            disk_reserve_bytes=0,
            index_cache_bytes_max=random.choice((1, 2_000, 1 << 20)),
            segment_runs_max=random.choice((4, 30, 10_000)),
            catalogue_log_bytes_max=random.choice((1, 300, 2_000, 1 << 20)),
            state_log_bytes_max=random.choice((1, 100, 1_000)),
            journal_shards=draw_journal_shards(random),
        ),
        topics=rules,
    )
    plan = Plan(
        settings=settings,
        policies=Policies(rules),
        topics=topics,
        covered=tuple(topic for topic in topics if random.random() < 0.6),
        producers=("p", "q"),
        steps=random.choice((8, 20, 32)),
        worker_turns_max=random.choice((0, 1, 4)),
        troubles=draw_troubles(random, TROUBLES, 0.45),
        ends_in_damage=random.random() < 0.4,
    )
    losses = _losses(random)
    if losses is None:
        return plan
    return replace(plan, losses=losses, troubles=plan.troubles | {Trouble.LOST_ANSWER})


def _losses(random: Random) -> Losses | None:
    """For a third of the histories. Nothing is drawn from `random` itself: the others stay what they are without it."""
    own = Random()
    own.setstate(random.getstate())
    if own.random() >= 1 / 3:
        return None
    return Losses(
        seed=own.getrandbits(32),
        before=own.choice((0.0, 0.1, 0.3)),
        after=own.choice((0.1, 0.3, 0.6)),
        failed=own.choice((0.0, 0.05, 0.2)),
        hangs=own.choice((0.0, 0.1)),
        stays_unknown=own.choice((0.0, 0.2)),
    )


def _rule(random: Random, match: str, journal: str) -> TopicRule:
    retain = Retain(
        age_ns=random.choice((None, 60 * SECOND_NS)),
        bytes_max=random.choice((None, None, 4_000)),
        until=random.choice((None, Until.ACKED)),
    )
    pin = Pin(
        age_ns=random.choice((None, 300 * SECOND_NS)), bytes_max=random.choice((None, None, 9_000))
    )
    rotate = Rotate(
        bytes_max=random.choice((500, 1_500, 6_000)),
        every_ns=random.choice((None, 30 * SECOND_NS)),
        at_ns=random.choice((0, 7 * SECOND_NS)),
    )
    return TopicRule(
        match=match,
        journal=journal,
        partitions=random.choice((1, 1, 3)),
        rotate=rotate,
        retain=retain,
        pin=pin,
        last_value=random.random() < 0.3,
    )
