"""Decides which segments retention removes, and which messages readers still get. Pure.

`age` and `bytes` remove whole segments. They are of a journal: the oldest segments of all its shards go first, until
the rest fits. A reader's hold (see `holds`) keeps a segment up to the ceiling that the
setting `pin` gives. Beyond it the segment goes, and the reader meets a gap. `acked` decides what `until = "acked"`
removes earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from runnel.config import Pin, Retain
from runnel.formats.envelope import Envelope
from runnel.log.log import PassedRun
from runnel.log.retention.holds import Holds
from runnel.topics.names import TopicPartition
from runnel.topics.policies import JournalPolicy

# Whether readers get some messages: their topic-partition, the offset behind them, their receive time, their entry.
IsServed = Callable[[TopicPartition, int, int, int], bool]


def served_at(
    now_ns: int,
    policy: JournalPolicy,
    *,
    floor_of: Callable[[TopicPartition], int | None] | None,
    holds: Callable[[], Holds],
) -> IsServed:
    """Readers get the messages that are not purged, and not past their age unless they are held.

    `floor_of` returns the offset below which a topic-partition's messages are hidden, or None if all of them are.
    It is itself None if nothing in the shard is hidden. `holds` is called only if a message has passed its age.
    """
    age_ns, pin_age_ns = policy.retain.age_ns, policy.pin.age_ns
    oldest_ns = now_ns - age_ns if age_ns is not None else None
    oldest_held_ns = now_ns - pin_age_ns if pin_age_ns is not None else None
    known_holds: Holds | None = None

    def is_served(key: TopicPartition, next_offset: int, time_ns: int, entry: int) -> bool:
        nonlocal known_holds
        if floor_of is not None:
            floor = floor_of(key)
            if floor is None or next_offset <= floor:
                return False
        if oldest_ns is None or time_ns >= oldest_ns:
            return True
        if oldest_held_ns is not None and time_ns < oldest_held_ns:
            return False
        if known_holds is None:
            known_holds = holds()
        return known_holds.is_held(key, next_offset, entry)

    return is_served


def served_runs(head: Envelope, is_served: IsServed) -> tuple[int, ...] | None:
    """The runs of a stored batch that readers get; None: all of them."""
    keys = zip(head.topics, head.column32(head.partitions), strict=True)
    ends = zip(head.column64(head.base_offsets), head.column32(head.counts), strict=True)
    times = head.column64(head.receive_times)
    runs = tuple(
        run
        for run, (key, (base, count)) in enumerate(zip(keys, ends, strict=True))
        if is_served(key, base + count, times[run], head.entry)
    )
    return None if len(runs) == head.run_count else runs


def passed_runs(head: Envelope, runs: Sequence[int]) -> Iterator[PassedRun]:
    """The runs of a stored batch that readers do not get; `runs` are those that they get."""
    served = set(runs)
    columns = zip(
        head.topics,
        head.column32(head.partitions),
        head.column64(head.base_offsets),
        head.column32(head.counts),
        strict=True,
    )
    for run, (topic, partition, base, count) in enumerate(columns):
        if run not in served:
            yield PassedRun(topic, partition, base, base + count)


class SegmentFacts(msgspec.Struct, frozen=True):
    """A sealed segment of a journal. In memory each batch counts as a segment."""

    number: int
    bytes: int
    last_time_ns: int
    shard: int = 0

    @property
    def age_order(self) -> tuple[int, int, int]:
        """Segments of all shards of a journal are removed in this order."""
        return self.last_time_ns, self.shard, self.number


class Removal:
    """Judges the sealed segments of a journal one after the other, in their `age_order`.

    `total_bytes` is the size of all segments of all its shards, also of the active ones, which are never removed.
    """

    def __init__(self, total_bytes: int, retain: Retain, pin: Pin, now_ns: int) -> None:
        self._total_bytes = total_bytes
        self._retain = retain
        self._pin = pin
        self._now_ns = now_ns

    def is_due(self, facts: SegmentFacts) -> bool:
        """Whether a segment goes unless it is held. If not, the newer ones stay too: times rise, the total falls."""
        retain = self._retain
        is_old = retain.age_ns is not None and facts.last_time_ns < self._now_ns - retain.age_ns
        return is_old or (retain.bytes_max is not None and self._total_bytes > retain.bytes_max)

    def takes(self, facts: SegmentFacts, held_by: AbstractSet[str]) -> bool:
        """Whether a segment that is due goes although these readers hold it. If so, its bytes are free."""
        if held_by:
            pin = self._pin
            is_too_old = pin.age_ns is not None and facts.last_time_ns < self._now_ns - pin.age_ns
            is_too_much = pin.bytes_max is not None and self._total_bytes > pin.bytes_max
            if not is_too_old and not is_too_much:
                return False
        self._total_bytes -= facts.bytes
        return True


def rotation_period(time_ns: int, every_ns: int | None, at_ns: int) -> int:
    """The number of the period that a time lies in. A segment holds messages of one period only."""
    return 0 if every_ns is None else (time_ns - at_ns) // every_ns
