"""Routes each stored batch to the consumer groups that currently have consumers.

A stored run goes into the run cache first, so that it is delivered from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from runnel.broker.consumer_groups.consumer_group import ConsumerGroup
from runnel.broker.consumer_groups.run_cache import RunCache, StoredRun, run_of
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.log.log import VisibleBatch

_CACHED_TOPICS_MAX: Final = 65_536


class ActiveConsumerGroups:
    """The consumer groups that have consumers, and a cache of them by topic."""

    def __init__(self, run_cache: RunCache) -> None:
        self._run_cache = run_cache
        self._active: dict[ConsumerGroup, Callable[[str], bool]] = {}
        self._consumer_groups_of: dict[str, tuple[ConsumerGroup, ...]] = {}

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, consumer_group: ConsumerGroup) -> bool:
        return consumer_group in self._active

    def add(self, consumer_group: ConsumerGroup, matches: Callable[[str], bool]) -> None:
        """Route batches of matching topics to a consumer group from now on."""
        self._active[consumer_group] = matches
        self._consumer_groups_of.clear()

    def discard(self, consumer_group: ConsumerGroup) -> None:
        if self._active.pop(consumer_group, None) is not None:
            self._consumer_groups_of.clear()

    def clear(self) -> None:
        self._active.clear()
        self._consumer_groups_of.clear()

    def on_stored(self, stored: VisibleBatch) -> None:
        """Cache the stored runs, and wake the consumer groups of their topics. Hot: once a batch."""
        if not self._active:
            return
        head = stored.envelope
        if len(head.topics) == 1:
            consumer_groups = self.of(head.topics[0])
            if consumer_groups:
                key = (head.topics[0], int.from_bytes(head.partitions, "little"))
                end = int.from_bytes(head.base_offsets, "little") + head.message_count
                run = run_of(stored)
                if run is not None:
                    self._run_cache.put(key, run)
                for consumer_group in consumer_groups:
                    consumer_group.extend(key, end)
                    consumer_group.wake()
            return
        self._on_stored_runs(stored)

    def _on_stored_runs(self, stored: VisibleBatch) -> None:
        """The same for a batch of several runs. Each consumer group is woken once."""
        head = stored.envelope
        batch = Batch(head, stored.body) if head.codec == Codec.NONE else None
        woken: dict[ConsumerGroup, None] = {}
        bases = head.column64(head.base_offsets)
        counts = head.column32(head.counts)
        for number, key in enumerate(zip(head.topics, head.column32(head.partitions), strict=True)):
            consumer_groups = self.of(key[0])
            if consumer_groups and batch is not None:
                run = StoredRun(batch, bases[number], counts[number], run=number)
                self._run_cache.put(key, run)
            for consumer_group in consumer_groups:
                consumer_group.extend(key, bases[number] + counts[number])
                woken[consumer_group] = None
        for consumer_group in woken:
            consumer_group.wake()

    def of(self, topic: str) -> tuple[ConsumerGroup, ...]:
        """The active consumer groups that a topic belongs to."""
        consumer_groups = self._consumer_groups_of.get(topic)
        if consumer_groups is None:
            if len(self._consumer_groups_of) >= _CACHED_TOPICS_MAX:
                self._consumer_groups_of.clear()
            consumer_groups = tuple(
                consumer_group for consumer_group, matches in self._active.items() if matches(topic)
            )
            self._consumer_groups_of[topic] = consumer_groups
        return consumer_groups
