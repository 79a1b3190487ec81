"""The position of a live subscription, from which it subscribes again after a lost connection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from runnel.formats import wire
from runnel.formats.batch import Batch, Run
from runnel.topics.names import TopicPartition
from runnel.topics.read_position import ReadPosition, places_of, resume_at


class SubscriptionPosition:
    """A `ReadPosition` that also recognizes the last values that a reconnect repeats."""

    __slots__ = ("_newest", "_position", "_start", "is_known")

    def __init__(self, patterns: Iterable[str], start: wire.Start) -> None:
        self.is_known = False  # the broker has said where the subscription begins
        self._start: Final = start
        self._position: Final = ReadPosition(patterns, start)
        # While last values arrive: epoch and offset of the newest message of each partition.
        self._newest: dict[TopicPartition, tuple[int, int]] = {}

    @property
    def is_by_partition(self) -> bool:
        """Whether no pattern has a wildcard, so that there is a place in each partition."""
        return self._position.is_by_partition

    def begin(self, answer: wire.Subscribed) -> None:
        """Take over where the broker begins. Partitions and shards that it does not name stay as they are."""
        self.is_known = True
        self._position.begin(answer.partitions, answer.shards)

    def delivered(self, head: wire.Deliver, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Move behind a delivery. Returns its batches without repeated last values."""
        position = self._position
        if position.awaits_last_values:
            if batches:
                batches = self._without_repeated(batches)
            elif not head.next_entry:  # no last values follow
                self.end_last_values()
        position.delivered(head.journal, head.shard, head.epoch, head.next_entry, batches)
        return batches

    def end_last_values(self) -> None:
        """No last values follow: every message is new."""
        self._position.awaits_last_values = False
        self._newest.clear()

    def _without_repeated(self, batches: Iterable[Batch]) -> list[Batch]:
        new = []
        for batch in batches:
            runs = [number for number, run in enumerate(batch.runs()) if self._is_new(run)]
            if runs:
                new.append(batch.cut(runs))
        return new

    def _is_new(self, run: Run) -> bool:
        key = (run.topic, run.partition)
        newest = (run.epoch, run.base_offset + run.count - 1)
        if newest <= self._newest.get(key, (-1, -1)):
            return False
        self._newest[key] = newest
        return True

    def missed(self, gap: wire.GapState) -> None:
        """Move behind messages that will not come."""
        self._position.missed(gap)

    def next_start(self) -> wire.Start:
        """The start to subscribe with: the user's at first, this position after a lost connection."""
        return self._position.resume() if self.is_known else self._start

    def resume(self, shards: Iterable[tuple[str, int]], *, awaits_last: bool) -> wire.Start:
        """The start that continues in these shards. Without wildcards it has the places in all partitions."""
        position = self._position
        if position.is_by_partition:
            places: Sequence[wire.ShardPlace] = ()
        else:
            places = [position.shards[key] for key in shards if key in position.shards]
        return resume_at(places_of(position.partitions), places, awaits_last_values=awaits_last)
