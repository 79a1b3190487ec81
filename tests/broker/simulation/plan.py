"""What is drawn before a history begins: the rules of its topics, and the sizes of everything."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from runnel.config import (
    BrokerSettings,
    Keep,
    LogSettings,
    Retain,
    Rotate,
    Settings,
    TopicRule,
)
from tests.simulation.shards import draw_journal_shards

SECOND_NS = 1_000_000_000
AGE = Retain(age_ns=60 * SECOND_NS)

# Topics of a group may share a batch, as far as they lie in one shard.
GROUPS: dict[str, Sequence[str]] = {
    "disk": ("d/1", "d/2", "d/3", "d/4", "d/5", "d/6"),
    "aged": ("a/1", "a/2", "a/3"),
    "sized": ("b/1", "b/2"),
    "memory": ("m/1", "m/2", "m/3"),
    "aged in memory": ("o/1", "o/2"),
    **{f"of its own, {number}": (f"x/{number}",) for number in range(1, 5)},
    "not kept": ("n/1", "n/2"),
    "a state": ("s/1", "s/2"),
}
LIVE_GROUPS = ("not kept", "a state")
KEPT_GROUPS = [name for name in GROUPS if name not in LIVE_GROUPS]
PATTERNS = ("*", "?/1", "d/*", "[ab]/*", "m*", "a/?", "n/*", "s/*", "[nd]/*", "x/*", "o/*")
TOPICS = [topic for group in GROUPS.values() for topic in group]


def draw(random: Random) -> Settings:
    rotate = Rotate(bytes_max=random.choice((1, 600, 2000, 10**6)))

    def rule(match: str, journal: str | None, **options: Any) -> TopicRule:
        return TopicRule(match=match, journal=journal, rotate=rotate, **options)

    spread = random.choice((1, 2, 3))
    return Settings(
        topics=(
            rule("d/*", "disk", partitions=spread),
            rule("a/*", "aged", retain=AGE, last_value=random.random() < 0.5, partitions=spread),
            rule("b/*", "sized", retain=Retain(bytes_max=random.choice((500, 3000)))),
            rule("m/*", "memory", keep=Keep.MEMORY, partitions=spread),
            rule("o/*", "old", keep=Keep.MEMORY, retain=AGE),
            rule("x/*", "{topic}"),
            TopicRule(match="n/*", keep=Keep.NONE, partitions=spread),
            TopicRule(match="s/*", keep=Keep.NONE, last_value=True),
        ),
        log=LogSettings(
            allocate_bytes=random.choice((0, 4096)),
            disk_reserve_bytes=0,
            index_cache_bytes_max=random.choice((1, 10**6)),
            journal_shards=draw_journal_shards(random),
        ),
        broker=BrokerSettings(live_queue_bytes_max=random.choice((500, 2000, 10**6))),
    )
