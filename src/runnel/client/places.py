"""Where a subscription begins and where it stands: what users write as `start`, and what a reconnect resumes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from runnel.client.checking import check_natural, check_time
from runnel.errors import ClientFault
from runnel.formats import wire
from runnel.formats.batch import Batch, Run
from runnel.topics.habits import start_meant
from runnel.topics.names import check_topic
from runnel.topics.patterns import Pattern

OffsetMap: TypeAlias = Mapping[str | tuple[str, int], int]
StartAt: TypeAlias = str | int | datetime | tuple[str, int] | OffsetMap

_WORDS: Final = ("latest", "last", "earliest")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def start_of(start: StartAt, patterns: Sequence[str]) -> wire.Start:
    """What the wire says for a user's `start`; ClientFault says what would be right."""
    if isinstance(start, str):
        if start in _WORDS:
            return wire.Start(start)
    elif isinstance(start, datetime):
        time_ns = time_ns_of(start)
        check_time("start", time_ns)
        return wire.Start("time", time_ns=time_ns)
    elif isinstance(start, Mapping):
        return wire.Start("offsets", tuple(partition_places(start)))
    elif isinstance(start, tuple):
        if len(start) == 2 and start[0] == "time" and type(start[1]) is int:
            check_time("start", start[1])
            return wire.Start("time", time_ns=start[1])
    elif type(start) is int:
        if len(patterns) != 1 or not Pattern(patterns[0]).is_literal:
            raise ClientFault(
                f"start={start} is an offset, which needs one topic, not {' '.join(patterns)}: "
                "give a map of topics, or (topic, partition) pairs, to offsets"
            )
        return wire.Start("offsets", tuple(partition_places({patterns[0]: start})))
    meant = start_meant(start)
    raise ClientFault(
        f"start={start!r} is none of 'latest', 'last', 'earliest', an offset, a datetime with a "
        "time zone, ('time', nanoseconds), or a map of topics or (topic, partition) to offsets"
        + ("" if meant is None else f"; did you mean {meant!r}?")
    )


def time_ns_of(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise ClientFault(f"{moment!r} has no time zone: which moment it is cannot be known")
    return (moment - _EPOCH) // _MICROSECOND * 1000


def partition_places(offsets: OffsetMap) -> Iterable[wire.PartitionPlace]:
    """Places of topics, or of (topic, partition) pairs; a topic alone means its partition 0."""
    for place, offset in offsets.items():
        match place:
            case str():
                topic, partition = place, 0
            case (str() as topic, int() as partition) if partition >= 0:
                pass
            case _:
                raise ClientFault(f"{place!r} is neither a topic nor a (topic, partition) pair")
        if type(offset) is not int or offset < 0:
            raise ClientFault(f"{offset!r} of {place!r} is not an offset: 1, 2, 3 …")
        check_topic(topic)
        check_natural(f"the partition of {place!r}", partition)
        check_natural(f"the offset of {place!r}", offset)
        yield wire.PartitionPlace(topic, partition, offset)


class Places:
    """Where a subscription goes on: by partition if it names its topics, by shard if it has wildcards."""

    __slots__ = ("_is_by_partition", "_newest", "_partitions", "_shards", "_start", "is_known")

    def __init__(self, patterns: Iterable[str], start: wire.Start) -> None:
        self.is_known = False  # the broker has said where it begins
        self._start = start
        # Until all last values have come: epoch and offset of what came of each partition.
        self._newest: dict[tuple[str, int], tuple[int, int]] | None = (
            {} if start.kind == "last" else None
        )
        self._is_by_partition = all(Pattern(pattern).is_literal for pattern in patterns)
        self._partitions: dict[tuple[str, int], tuple[int, int]] = {}  # the next offset, and epoch
        self._shards: dict[tuple[str, int], wire.ShardPlace] = {}

    def begin(self, answer: wire.Subscribed) -> None:
        """Take over what the broker says; what it says nothing of stays."""
        self.is_known = True
        for place in answer.partitions:
            self._partitions[place.topic, place.partition] = place.offset, place.epoch
        for shard in answer.shards:
            self._shards[shard.journal, shard.shard] = shard

    def delivered(self, head: wire.Deliver, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Move on behind what has arrived. What is new of it: last values may come again after a loss."""
        if self._newest is not None:
            if batches:
                batches = self._without_repeated(batches)
            elif not head.next_entry:
                self._newest = None  # that was the last of them
        if not self._is_by_partition:
            if head.next_entry:
                self._shards[head.journal, head.shard] = wire.ShardPlace(
                    head.journal, head.shard, head.epoch, head.next_entry
                )
            return batches  # the runs need not be looked at
        places = self._partitions
        for batch in batches:
            for run in batch.runs():
                # A topic that was made later is not known yet. One of a new epoch counts from 1 again.
                key, offset = (run.topic, run.partition), run.base_offset + run.count
                place = places.get(key)
                if place is None or offset > place[0] or run.epoch != place[1]:
                    places[key] = offset, run.epoch
        return batches

    def _without_repeated(self, batches: Iterable[Batch]) -> list[Batch]:
        new = []
        for batch in batches:
            runs = [number for number, run in enumerate(batch.runs()) if self._is_new(run)]
            if runs:
                new.append(batch.cut(runs))
        return new

    def _is_new(self, run: Run) -> bool:
        assert self._newest is not None
        key = (run.topic, run.partition)
        newest = (run.epoch, run.base_offset + run.count - 1)
        if newest <= self._newest.get(key, (-1, -1)):
            return False
        self._newest[key] = newest
        return True

    def missed(self, gap: wire.GapState) -> None:
        """Move on behind what will not arrive."""
        key = (gap.topic, gap.partition)
        place = self._partitions.get(key)
        if place is not None and gap.next_offset > place[0]:
            self._partitions[key] = gap.next_offset, place[1]

    def next_start(self) -> wire.Start:
        """What to subscribe with, the first time or after a loss."""
        if not self.is_known:
            return self._start
        kind = "resume" if self._newest is None else "resume_last"
        partitions = tuple(
            wire.PartitionPlace(topic, partition, offset, epoch)
            for (topic, partition), (offset, epoch) in self._partitions.items()
        )
        return wire.Start(kind, partitions, 0, tuple(self._shards.values()))
