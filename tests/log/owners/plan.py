"""What a history draws before it begins: settings and rules, for these partitions."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from runnel.config import LogSettings, Retain, Rotate, Settings, TopicRule
from runnel.topics.names import TopicPartition

NAMES: Final = ("first", "second", "third")
KEYS: Final[Sequence[TopicPartition]] = (
    ("a", 0),
    ("b", 0),
    ("wide", 0),
    ("wide", 1),
    ("wide", 2),
    ("last/1", 0),
    ("last/2", 0),
    ("removed", 0),
)
# Those of named publishers: their topics are not deleted, and retention takes nothing.
NUMBERED_KEYS: Final = KEYS[:5]


def draw_settings(random: Random) -> Settings:
    """Journals of two shards and small segments. Of topics in `last` only the last value is kept."""
    rotate = Rotate(bytes_max=random.choice((300, 900, 5_000)))
    rules = (
        TopicRule(match="wide", partitions=3, journal="main", rotate=rotate),
        TopicRule(
            match="last/*",
            journal="last",
            last_value=True,
            rotate=Rotate(bytes_max=random.choice((1, 600))),
            retain=Retain(bytes_max=1),
        ),
        TopicRule(match="*", journal="main", rotate=rotate),
    )
    return Settings(
        data="data",
        topics=rules,
        log=LogSettings(
            allocate_bytes=random.choice((0, 1_000)),
            disk_reserve_bytes=0,
            group_bytes_max=random.choice((300, 20_000)),
            catalogue_log_bytes_max=random.choice((1, 300, 1 << 20)),
            state_log_bytes_max=random.choice((1, 200)),
            journal_shards=2,
        ),
    )
