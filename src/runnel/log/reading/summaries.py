"""Sums up topics, with their offsets and message counts, from the indexes of segments."""

from __future__ import annotations

import msgspec
import numpy as np

from runnel.log.reading.catalogue_view import CatalogueView
from runnel.log.reading.selection import END_OF_OFFSETS, Matcher
from runnel.log.segments.index import Index
from runnel.topics.names import TopicPartition


class PartitionInfo(msgspec.Struct, frozen=True):
    """A partition's offsets and messages. Without any, both offsets are equal and `last_time_ns` is 0."""

    partition: int
    first_offset: int
    next_offset: int
    messages: int
    last_time_ns: int


class TopicInfo(msgspec.Struct, frozen=True):
    """A topic, its journal and its partitions."""

    name: str
    journal: str
    partitions: tuple[PartitionInfo, ...]


class _Counts:
    """The totals of one topic-partition so far."""

    __slots__ = ("first_offset", "last_time_ns", "messages", "next_offset")

    def __init__(self) -> None:
        self.first_offset = END_OF_OFFSETS
        self.next_offset = 1
        self.messages = 0
        self.last_time_ns = 0


class TopicSummaries:
    """Sums up topics: `add` the index of every segment, then call `topics`."""

    def __init__(self, matcher: Matcher, catalogued: CatalogueView) -> None:
        self._matcher = matcher
        self._catalogued = catalogued
        self._counts: dict[TopicPartition, _Counts] = {}
        self._journals: dict[str, str] = {}

    def add(self, journal: str, index: Index) -> None:
        """Add a segment: vectors over all runs first, then a step for each topic-partition."""
        table = index.run_table(lambda key: self._matcher.bounds(key) is not None)
        if not table.keys:
            return
        floors = np.array([self._floor(key) for key in table.keys], np.int64)
        floors = np.repeat(floors, np.diff(table.ends, prepend=0))
        begins = np.maximum(table.base_offsets, floors)
        ends = table.base_offsets + table.counts
        starts = np.concatenate(([0], table.ends[:-1]))
        messages = np.add.reduceat(np.maximum(ends - begins, 0), starts).tolist()
        firsts = np.minimum.reduceat(np.where(ends > begins, begins, END_OF_OFFSETS), starts)
        lasts = zip(
            ends[table.ends - 1].tolist(), table.blocks[table.ends - 1].tolist(), strict=True
        )
        for key, count, first, (end, block) in zip(
            table.keys, messages, firsts.tolist(), lasts, strict=True
        ):
            counts = self._counts.setdefault(key, _Counts())
            counts.next_offset = max(counts.next_offset, end)
            if count:
                counts.messages += count
                counts.first_offset = min(counts.first_offset, first)
                counts.last_time_ns = max(counts.last_time_ns, index.block_place(block)[2])
            self._journals.setdefault(key[0], journal)

    def _floor(self, key: TopicPartition) -> int:
        bounds = self._matcher.bounds(key)
        assert bounds is not None
        return bounds[0]

    def topics(self) -> list[TopicInfo]:
        for topic in self._catalogued.topics.values():
            for partition in topic.partitions:
                if self._matcher.bounds(partition.key) is not None:
                    counts = self._counts.setdefault(partition.key, _Counts())
                    counts.next_offset = max(counts.next_offset, partition.next_offset)
                    self._journals[topic.name] = topic.policy.journal
        partitions: dict[str, list[PartitionInfo]] = {}
        for key in sorted(self._counts):
            counts = self._counts[key]
            partitions.setdefault(key[0], []).append(
                PartitionInfo(
                    key[1],
                    min(counts.first_offset, counts.next_offset),
                    counts.next_offset,
                    counts.messages,
                    counts.last_time_ns,
                )
            )
        return [
            TopicInfo(name, self._journals[name], tuple(found))
            for name, found in partitions.items()
        ]
