"""What may go, and what is served until then: pure decisions over segments, pins and the time.

`age` and `bytes` remove whole segments. A pin (a named cursor, an acknowledged subscription) holds what its reader has
not passed, up to a ceiling of its own; beyond that it is passed over, and its reader will meet a gap. What
`until = "acked"` lets go before that is decided in `acked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec

from runnel.config import Pin, Retain
from runnel.formats.envelope import Envelope
from runnel.log.log import Cursor, Passed, ShardId
from runnel.topics.names import TopicPartition
from runnel.topics.patterns import Pattern
from runnel.topics.policies import JournalPolicy

# Whether messages of a key are to be served: key, next offset behind them, receive time, entry.
IsServed = Callable[[TopicPartition, int, int, int], bool]


class Hold(msgspec.Struct, frozen=True):
    """One reader's claim on a shard: a partition from an offset on, or patterns from an entry on."""

    cursor: str  # its name; of a subscription, "subscription NAME"
    key: TopicPartition | None
    offset: int
    entry: int
    patterns: tuple[str, ...]

    def holds(self, key: TopicPartition, next_offset: int, last_entry: int) -> bool:
        """Whether messages of this key that end before `next_offset`, in `last_entry`, are held."""
        if self.key is not None:
            return key == self.key and next_offset > self.offset
        return last_entry >= self.entry and any(
            _pattern(text).matches(key[0]) for text in self.patterns
        )


class Claims(Protocol):
    """What acknowledged subscriptions claim of a log. Asked on the loop; must not wait."""

    @property
    def version(self) -> int:
        """Rises when less may be owed, or other partitions be covered, than before."""
        ...

    @property
    def is_empty(self) -> bool:
        """There are no subscriptions."""
        ...

    def holds_of(self, key: TopicPartition) -> Sequence[Hold]:
        """For each subscription that covers a partition, from the lowest offset that it owes on."""
        ...

    def owed(self, key: TopicPartition, begin: int, end: int) -> Sequence[tuple[int, int]] | None:
        """Of these offsets, the ranges [begin, end) that any subscription has not acknowledged, in order.

        None: no subscription covers this partition.
        """
        ...


class Holds:
    """Claims on a shard, to be asked about many messages: it does not matter how many partitions are claimed.

    `claimed` tells more of them by partition, and is asked once for each that matters.
    """

    def __init__(
        self,
        holds: Iterable[Hold],
        claimed: Callable[[TopicPartition], Sequence[Hold]] | None = None,
    ) -> None:
        self._claimed = claimed
        self._asked: dict[TopicPartition, Sequence[Hold]] = {}
        self._by_key: dict[TopicPartition, list[Hold]] = {}
        self._by_pattern: list[Hold] = []
        for hold in holds:
            if hold.key is None:
                self._by_pattern.append(hold)
            else:
                self._by_key.setdefault(hold.key, []).append(hold)

    def __bool__(self) -> bool:
        return bool(self._by_key or self._by_pattern or self._claimed)

    def holders(self, key: TopicPartition, next_offset: int, last_entry: int) -> set[str]:
        """Who holds messages of this key that end before `next_offset`, in `last_entry`."""
        return {hold.cursor for hold in self._holding(key, next_offset, last_entry)}

    def is_held(self, key: TopicPartition, next_offset: int, last_entry: int) -> bool:
        return next(self._holding(key, next_offset, last_entry), None) is not None

    def _holding(self, key: TopicPartition, next_offset: int, last_entry: int) -> Iterator[Hold]:
        for holds in (self._by_key.get(key, ()), self._by_pattern, self._claims_on(key)):
            for hold in holds:
                if hold.holds(key, next_offset, last_entry):
                    yield hold

    def _claims_on(self, key: TopicPartition) -> Sequence[Hold]:
        if self._claimed is None:
            return ()
        known = self._asked.get(key)
        if known is None:
            known = self._asked[key] = self._claimed(key)
        return known

    def lowest_offset(self, key: TopicPartition) -> int | None:
        """From which offset on a partition is held by offsets."""
        return min((hold.offset for hold in self._by_key.get(key, ())), default=None)

    def lowest_entry(self, key: TopicPartition) -> int | None:
        """From which entry on a partition is held by patterns."""
        endless = 2**63
        entries = (hold.entry for hold in self._by_pattern if hold.holds(key, 0, endless))
        return min(entries, default=None)


@lru_cache(maxsize=4096)
def _pattern(text: str) -> Pattern:
    return Pattern(text)


def holds_on(
    shard: ShardId, cursor: Cursor, shard_of: Callable[[TopicPartition], ShardId | None]
) -> list[Hold]:
    """What a cursor claims in one shard."""
    holds = []
    for place in cursor.positions:
        if place.topic is not None:
            key = (place.topic, place.partition)
            if shard_of(key) == shard:
                holds.append(Hold(cursor.name, key, place.offset, 0, ()))
        elif place.shard == shard and place.position is not None:
            holds.append(Hold(cursor.name, None, 0, place.position.entry, place.patterns))
    return holds


def served_at(
    now_ns: int,
    policy: JournalPolicy,
    *,
    floor_of: Callable[[TopicPartition], int | None] | None,
    holds: Callable[[], Holds],
) -> IsServed:
    """Which messages readers may see: not purged, and not past their age unless held.

    `floor_of` gives the offset below which a key's messages are hidden, None if all of them are; it is
    None itself if nothing in the shard is. `holds` is asked only if something has passed its age.
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
    """Which runs of a stored batch are served; None for all of them."""
    keys = zip(head.topics, head.column32(head.partitions), strict=True)
    ends = zip(head.column64(head.base_offsets), head.column32(head.counts), strict=True)
    times = head.column64(head.receive_times)
    runs = tuple(
        run
        for run, (key, (base, count)) in enumerate(zip(keys, ends, strict=True))
        if is_served(key, base + count, times[run], head.entry)
    )
    return None if len(runs) == head.run_count else runs


def passed_runs(head: Envelope, runs: Sequence[int]) -> Iterator[Passed]:
    """The others: those that are not served."""
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
            yield Passed(topic, partition, base, base + count)


class SegmentFacts(msgspec.Struct, frozen=True):
    """A sealed segment, oldest first, and who holds something in it. In memory each batch is one."""

    number: int
    bytes: int
    last_time_ns: int
    held_by: frozenset[str] = frozenset()


class Decision(msgspec.Struct, frozen=True):
    remove: Sequence[int]
    held: Sequence[int]  # would go, but for a pin
    pins_passed: frozenset[str]


def decide(
    segments: Iterable[SegmentFacts], total_bytes: int, retain: Retain, pin: Pin, now_ns: int
) -> Decision:
    """Which sealed segments go now, looking at no more of them than needed.

    `total_bytes` is the size of all, and of what is still written to, which never goes.
    """
    remove: list[int] = []
    held: list[int] = []
    passed: set[str] = set()
    total = total_bytes
    for facts in segments:
        is_old = retain.age_ns is not None and facts.last_time_ns < now_ns - retain.age_ns
        is_over = retain.bytes_max is not None and total > retain.bytes_max
        if not is_old and not is_over:
            break  # nor is any that follows: times rise, and the total only falls
        if facts.held_by:
            is_too_old = pin.age_ns is not None and facts.last_time_ns < now_ns - pin.age_ns
            is_too_much = pin.bytes_max is not None and total > pin.bytes_max
            if not is_too_old and not is_too_much:
                held.append(facts.number)
                continue
            passed |= facts.held_by
        remove.append(facts.number)
        total -= facts.bytes
    return Decision(remove, held, frozenset(passed))


def rotation_period(time_ns: int, every_ns: int | None, at_ns: int) -> int:
    """Which period a time lies in: a segment holds messages of one period only."""
    return 0 if every_ns is None else (time_ns - at_ns) // every_ns
