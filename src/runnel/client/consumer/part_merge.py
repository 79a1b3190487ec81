"""Merges the parts of a live subscription, one at each node: what to ask for, and which deliveries count. Pure.

A shard is read from one part at a time: the one that claims it with the highest epoch. When it moves, the new owner
gets the place behind everything that was accepted. Later deliveries of the former owner are dropped, because the new
one sends the same messages. So nothing is missed, and nothing comes twice, in whatever order the frames of different
connections arrive. Frames of one connection arrive in their order.

Before the subscription has begun, a shard without a place begins as the program wants the subscription to begin.
Afterwards such a shard is new: everything in it is newer than the subscription.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.topics.names import LIVE_JOURNAL, TopicPartition, is_reserved

ShardKey: TypeAlias = tuple[str, int]

_WITH_LAST: Final = ("last", "resume_last")
_EPHEMERAL_MAX: Final = 100_000  # partitions of ephemeral topics whose epoch is remembered
_MOVED: Final = (
    "its shard moved to another node, and messages of a topic that is not kept were late"
)


class Attach(NamedTuple):
    """Ask a part to read these shards from this start on. `placed` or `refused` get its number with the answer."""

    part: int
    number: int
    shards: Sequence[wire.ShardTerm]
    start: wire.Start


class Accepted(NamedTuple):
    """What the program gets of a delivery: gaps before it, and batches."""

    gaps: Sequence[wire.GapState]
    batches: Sequence[Batch]


class _MergedShard(msgspec.Struct):
    """A shard that exists, as far as the merge has heard of it."""

    epoch: int = 0  # the highest with which a part has claimed it
    part: int = 0  # that claims it in this epoch; 0: none does now
    number: int = 0  # of the attach to this part; 0: not asked
    is_reading: bool = False  # the part has answered the attach
    has_place: bool = False
    awaits_last: bool = False  # its last values have not all come
    gaps: list[wire.GapState] = msgspec.field(default_factory=list)  # before the next delivery


class _Part(msgspec.Struct):
    """One connection's part of the subscription."""

    node: str
    has_answered: bool = False


class PartMerge:
    """The merge of all parts of one subscription. Parts have numbers from 1 on, a new one for each connection."""

    def __init__(self, position: SubscriptionPosition, start: wire.Start) -> None:
        self.position: Final = position
        self.has_begun = False
        self._start: Final = start
        self._shards: dict[ShardKey, _MergedShard] = {}
        self._unread: set[ShardKey] = set()  # shards that no part reads now
        self._parts: dict[int, _Part] = {}
        self._nodes: frozenset[str] = frozenset()
        self._numbers = itertools.count(1)
        self._asked: dict[
            int, Sequence[ShardKey]
        ] = {}  # by the number of an attach without an answer
        self._epochs: dict[TopicPartition, int] = {}  # of ephemeral topics
        # Nodes whose ephemeral last values have come, or are not wanted.
        self._live_last: set[str] = set()

    @property
    def is_covered(self) -> bool:
        """Whether every living node has answered, and every shard is read."""
        if self._unread or not self._nodes:
            return False
        answered = {part.node for part in self._parts.values() if part.has_answered}
        return self._nodes <= answered

    @property
    def unread(self) -> Collection[ShardKey]:
        """The shards that no part reads now, for error messages."""
        return self._unread

    # --- Nodes and connections ---

    def expect(self, nodes: Iterable[str]) -> None:
        """These nodes live now: the subscription has a part at each."""
        self._nodes = frozenset(nodes)
        self._check()

    def open(self, part: int, node: str) -> wire.Start:
        """A connection to a node gets a part. Returns the start to subscribe with."""
        self._parts[part] = _Part(node)
        if self._start.kind not in _WITH_LAST or self.has_begun:
            self._live_last.add(node)
        # Of the start a node uses only whether it wants last values. It checks the rest.
        is_over = self.has_begun or (self._start.kind in _WITH_LAST and node in self._live_last)
        return wire.Start("latest") if is_over else self._start

    def answered(self, elsewhere: Iterable[wire.Owner]) -> None:
        """The node has accepted the part, and names the shards that it does not serve. Those that it serves follow."""
        for owner in elsewhere:
            self._shard((owner.journal, owner.shard))

    def lost(self, part: int) -> None:
        """The part has ended: nothing more comes of it."""
        if self._parts.pop(part, None) is None:
            return
        for key, shard in self._shards.items():
            if shard.part == part:
                self._release(key, shard)

    # --- Shards ---

    def came(self, part: int, shards: Iterable[wire.ShardTerm]) -> list[Attach]:
        """A part claims shards. Those that it has with a higher epoch are read from there at once."""
        claimed: list[wire.ShardTerm] = []
        for term in shards:
            key = (term.journal, term.shard)
            shard = self._shard(key)
            if term.epoch < shard.epoch or (term.epoch == shard.epoch and shard.part):
                continue
            self._release(key, shard)
            shard.part, shard.epoch = part, term.epoch
            claimed.append(term)
        attaches = self._attach(part, claimed)
        if (state := self._parts.get(part)) is not None:
            state.has_answered = True
        self._check()
        return attaches

    def left(self, part: int, shards: Iterable[wire.ShardTerm]) -> None:
        """A part has given shards up."""
        for term in shards:
            key = (term.journal, term.shard)
            shard = self._shards.get(key)
            if shard is not None and shard.part == part and shard.epoch <= term.epoch:
                self._release(key, shard)

    def placed(self, attach: Attach, answer: wire.Subscribed) -> None:
        """The answer to an attach: where its shards begin. It leaves out those whose term is over."""
        begun = {(place.journal, place.shard) for place in answer.shards}
        current = self._current(attach)
        for key in current:
            shard = self._shards[key]
            if key in begun:
                shard.is_reading = shard.has_place = True
                self._unread.discard(key)
            else:
                self._release(key, shard)
        places = [each for each in answer.shards if (each.journal, each.shard) in current]
        # An attach without wildcards is for one shard, so that all partitions in the answer belong to it.
        partitions = answer.partitions if current else ()
        self.position.begin(wire.Subscribed(answer.id, answer.subscription, partitions, places))
        self._check()

    def refused(self, attach: Attach) -> None:
        """An attach has failed, and may be repeated: see `retry`."""
        for key in self._current(attach):
            self._shards[key].number = 0

    def retry(self) -> list[Attach]:
        """Ask again for shards that a part claims, and has refused to read."""
        refused: dict[int, list[wire.ShardTerm]] = {}
        for (journal, number), shard in self._shards.items():
            if shard.part and not shard.number:
                term = wire.ShardTerm(journal, number, shard.epoch)
                refused.setdefault(shard.part, []).append(term)
        return [each for part, terms in refused.items() for each in self._attach(part, terms)]

    def _shard(self, key: ShardKey) -> _MergedShard:
        shard = self._shards.get(key)
        if shard is None:
            shard = self._shards[key] = _MergedShard()
            self._unread.add(key)
        return shard

    def _release(self, key: ShardKey, shard: _MergedShard) -> None:
        shard.part = shard.number = 0
        shard.is_reading = False
        shard.gaps.clear()  # the next owner reports them again
        self._unread.add(key)

    def _current(self, attach: Attach) -> list[ShardKey]:
        """The shards of an attach that are still read, or to be read, because of it."""
        return [key for key in _keys(attach) if self._shards[key].number == attach.number]

    def _attach(self, part: int, shards: Sequence[wire.ShardTerm]) -> list[Attach]:
        by_start: dict[tuple[bool, bool], list[wire.ShardTerm]] = {}
        for term in shards:
            shard = self._shards[term.journal, term.shard]
            by_start.setdefault((shard.has_place, shard.awaits_last), []).append(term)
        attaches: list[Attach] = []
        for (has_place, awaits_last), terms in by_start.items():
            if self.position.is_by_partition:
                groups: Sequence[Sequence[wire.ShardTerm]] = [(term,) for term in terms]
            else:
                groups = [terms]
            for group in groups:
                keys = [(term.journal, term.shard) for term in group]
                if has_place:
                    start = self.position.resume(keys, awaits_last=awaits_last)
                else:
                    start = wire.Start("resume") if self.has_begun else self._start_of(keys)
                attach = Attach(part, next(self._numbers), tuple(group), start)
                for key in keys:
                    self._shards[key].number = attach.number
                    self._shards[key].awaits_last = start.kind in _WITH_LAST
                attaches.append(attach)
        return attaches

    def _start_of(self, keys: Collection[ShardKey]) -> wire.Start:
        """The program's start, with the places in these shards only."""
        start = self._start
        places = [each for each in start.shards if (each.journal, each.shard) in keys]
        return msgspec.structs.replace(start, shards=places) if start.shards else start

    def _check(self) -> None:
        if not self.has_begun and self.is_covered:
            self.has_begun = True
            self._end_last_if_over()

    # --- Messages ---

    def delivered(self, part: int, head: wire.Deliver, batches: Sequence[Batch]) -> Accepted | None:
        """A delivery has come. None: it does not count, and only its credit is to be returned."""
        key = (head.journal, head.shard)
        if not batches and not head.next_entry:
            self._end_last_values(part, key)
            return None
        if head.journal == LIVE_JOURNAL:
            return self._ephemeral(head, batches)
        shard = self._shards.get(key)
        if shard is None or shard.part != part or not shard.is_reading:
            return None
        gaps, shard.gaps = shard.gaps, []
        return Accepted(gaps, self.position.delivered(head, batches))

    def _ephemeral(self, head: wire.Deliver, batches: Sequence[Batch]) -> Accepted:
        """Ephemeral messages count from any part, unless a later owner's have come already."""
        epochs = self._epochs
        if len(epochs) > _EPHEMERAL_MAX:
            epochs.clear()
        kept: list[Batch] = []
        late = 0
        for batch in batches:
            runs = batch.runs()
            wanted = [
                number
                for number, run in enumerate(runs)
                if is_reserved(run.topic)  # each node publishes its own
                or run.epoch >= epochs.setdefault((run.topic, run.partition), run.epoch)
            ]
            for number in wanted:
                epochs[runs[number].topic, runs[number].partition] = runs[number].epoch
            if len(wanted) == len(runs):
                kept.append(batch)
            else:
                late += len(batch)
                if wanted:
                    kept.append(batch.cut(wanted))
                    late -= len(kept[-1])
        gaps = (wire.GapState("restart", late, text=_MOVED),) if late else ()
        return Accepted(gaps, self.position.delivered(head, kept))

    def _end_last_values(self, part: int, key: ShardKey) -> None:
        """All last values of a shard have come, or of the ephemeral topics of a part."""
        if key[0] == LIVE_JOURNAL:
            if (state := self._parts.get(part)) is not None:
                self._live_last.add(state.node)
        elif (shard := self._shards.get(key)) is not None and shard.part == part:
            shard.awaits_last = False
        self._end_last_if_over()

    def _end_last_if_over(self) -> None:
        if self._start.kind not in _WITH_LAST or not self.has_begun:
            return
        is_due = any(shard.awaits_last for shard in self._shards.values())
        if self._nodes <= self._live_last and not is_due:
            self.position.end_last_values()

    def missed(self, part: int, notice: wire.GapNotice) -> Sequence[wire.GapState]:
        """A gap has come. Returns the gaps that are reported to the program now."""
        if not notice.journal:
            self.position.missed(notice.gap)
            return (notice.gap,)
        shard = self._shards.get((notice.journal, notice.shard))
        if shard is None or shard.part != part or not shard.is_reading:
            return ()
        if not self.position.is_by_partition:
            # Only the delivery behind the gap moves the place past it.
            shard.gaps.append(notice.gap)
            return ()
        self.position.missed(notice.gap)
        return (notice.gap,)


def _keys(attach: Attach) -> tuple[ShardKey, ...]:
    return tuple((term.journal, term.shard) for term in attach.shards)
