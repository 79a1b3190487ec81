"""Counts messages and bytes of an interval: by topic for the busiest topics, by journal for the others."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

import msgspec

# Topics counted one by one within an interval. Topics that come later count for their journal only: memory stays
# bounded, and a busy topic is hardly ever among the last.
_ACTIVE_MAX: Final = 10_000
# Runs of an interval that are counted one by one; of each later batch, only a sample of its runs. At a million
# messages a second in a million runs, counting all of them would cost a quarter of the loop's time.
_EXACT_RUNS_MAX: Final = 20_000
_RUNS_SAMPLED: Final = 16
_ALL: Final = slice(None)
# If there are as many journals as topics, journals beyond the limit are counted together under this name, which no
# journal has.
OTHER_JOURNALS: Final = ""
# Journals with their own totals: the first ones with any traffic, for good. Computing rates from totals needs the same
# journals every time, not those that happen to be busy.
JOURNAL_TOTALS_MAX: Final = 200


class Flow(msgspec.Struct, gc=False):
    """Messages and bytes in and out."""

    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0

    @property
    def busyness(self) -> tuple[int, int]:
        """More is busier: by messages, and by bytes among equals."""
        return (self.messages_in + self.messages_out, self.bytes_in + self.bytes_out)

    def add(self, other: Flow) -> None:
        self.messages_in += other.messages_in
        self.bytes_in += other.bytes_in
        self.messages_out += other.messages_out
        self.bytes_out += other.bytes_out

    def floor(self) -> None:
        """Raise negative numbers to 0: where estimates of the busiest were too high, the rest came out negative."""
        self.messages_in = max(0, self.messages_in)
        self.bytes_in = max(0, self.bytes_in)
        self.messages_out = max(0, self.messages_out)
        self.bytes_out = max(0, self.bytes_out)

    def rates(self, interval_ns: int) -> dict[str, float]:
        """Each number per second."""
        return {
            name: round(getattr(self, name) * 1e9 / interval_ns, 3)
            for name in self.__struct_fields__
        }


class TopicFlow(msgspec.Struct, frozen=True):
    """The flow of one topic in an interval."""

    topic: str
    journal: str
    flow: Flow


class OtherTopics(msgspec.Struct):
    """Topics of a journal that were active, but not among the busiest."""

    topics: int = 0
    flow: Flow = msgspec.field(default_factory=Flow)


class TrafficSample(msgspec.Struct, frozen=True):
    """One interval: the busiest topics, the rest of each journal, and each journal with all of its topics."""

    busiest: Sequence[TopicFlow]
    others: Mapping[str, OtherTopics]
    journals: Mapping[str, Flow]


class TopicTraffic:
    """Counts for the current interval. `journal_of` must also know topics that were deleted since."""

    def __init__(self, topics_max: int, journal_of: Callable[[str], str]) -> None:
        self._topics_max = topics_max
        self._journal_of = journal_of
        self._active: dict[str, Flow] = {}
        # By journal: topics beyond the limit, and the error of estimates, which may be negative.
        self._rest: dict[str, Flow] = {}
        self._exact_runs_left = _EXACT_RUNS_MAX
        self._random = Random(0)
        self._totals: dict[str, Flow] = {}
        self.on_ended: Callable[[Sequence[TopicFlow], Mapping[str, Flow], int], object] | None = (
            None
        )
        """Gets the flows by topic, those of other topics by journal, and the length of an interval that has ended."""
        self.last: TrafficSample = TrafficSample((), {}, {})
        self.last_ns = 1  # how long the last interval was

    @property
    def totals(self) -> Mapping[str, Flow]:
        """By journal, from the start to the end of the last interval; later journals are summed up."""
        return self._totals

    def count_in(self, topic: str, messages: int, size: int) -> None:
        flow = self._active.get(topic) or self._begin(topic)
        flow.messages_in += messages
        flow.bytes_in += size

    def count_out(self, topic: str, messages: int, size: int) -> None:
        flow = self._active.get(topic) or self._begin(topic)
        flow.messages_out += messages
        flow.bytes_out += size

    def count_journal_out(self, journal: str, messages: int, size: int) -> None:
        """Count what a reader of a shard got, of any topics."""
        rest = self._rest_in(journal)
        rest.messages_out += messages
        rest.bytes_out += size

    def count_runs(
        self,
        topics: Sequence[str],
        counts: Sequence[int],
        messages: int,
        size: int,
        *,
        is_out: bool,
    ) -> None:
        """Count a batch of many runs, with `messages` in total. They are in one shard, so in one journal.

        Its bytes are divided by messages, since the body is not decoded. Once many runs have been counted in this
        interval, topics are estimated from some of the runs; their journal stays exact.
        """
        rest_messages, rest_bytes, mean = messages, size, size / (messages or 1)
        chosen, weight = self._choose(len(topics))
        active = self._active
        for topic, count in zip(topics[chosen], counts[chosen], strict=True):
            flow = active.get(topic) or self._begin(topic)
            count *= weight
            rest_messages -= count
            share = round(mean * count)
            rest_bytes -= share
            if is_out:
                flow.messages_out += count
                flow.bytes_out += share
            else:
                flow.messages_in += count
                flow.bytes_in += share
        if topics and (rest_messages or rest_bytes):
            rest = self._rest_of(topics[0])
            if is_out:
                rest.messages_out += rest_messages
                rest.bytes_out += rest_bytes
            else:
                rest.messages_in += rest_messages
                rest.bytes_in += rest_bytes

    def _choose(self, runs: int) -> tuple[slice, int]:
        """Which runs of a batch are counted, and how many runs each of them represents."""
        if runs <= max(_RUNS_SAMPLED, self._exact_runs_left):
            self._exact_runs_left -= runs
            return _ALL, 1
        # At random: batches of the same runs come again and again, alternately in and out, and none may be favoured.
        step = runs // _RUNS_SAMPLED
        return slice(int(self._random.random() * step), None, step), step

    def _begin(self, topic: str) -> Flow:
        if len(self._active) < _ACTIVE_MAX:
            flow = self._active[topic] = Flow()
            return flow
        return self._rest_of(topic)

    def _rest_of(self, topic: str) -> Flow:
        """The flow of a topic's journal that is not counted by topic."""
        return self._rest_in(self._journal_of(topic))

    def _rest_in(self, journal: str) -> Flow:
        if journal not in self._rest and len(self._rest) >= _ACTIVE_MAX:
            journal = OTHER_JOURNALS
        return self._rest.setdefault(journal, Flow())

    def end_interval(self, interval_ns: int = 1) -> TrafficSample:
        """The counts since the last call, `interval_ns` ago. Counting begins again."""
        active, self._active = self._active, {}
        rest, self._rest = self._rest, {}
        self._exact_runs_left = _EXACT_RUNS_MAX
        rows = [TopicFlow(topic, self._journal_of(topic), flow) for topic, flow in active.items()]
        if self.on_ended is not None:
            self.on_ended(rows, rest, interval_ns)
        busiest = heapq.nlargest(self._topics_max, rows, key=lambda row: row.flow.busyness)
        own = {row.topic for row in busiest}
        journals: dict[str, Flow] = {}
        others: dict[str, OtherTopics] = {}
        for row in rows:
            journals.setdefault(row.journal, Flow()).add(row.flow)
            if row.topic not in own:
                other = others.setdefault(row.journal, OtherTopics())
                other.topics += 1
                other.flow.add(row.flow)
        for journal, flow in rest.items():
            journals.setdefault(journal, Flow()).add(flow)
            others.setdefault(journal, OtherTopics()).flow.add(flow)
        for other in others.values():
            other.flow.floor()
        for journal, flow in journals.items():
            if journal not in self._totals and len(self._totals) >= JOURNAL_TOTALS_MAX:
                journal = OTHER_JOURNALS
            total = self._totals.setdefault(journal, Flow())
            total.add(flow)
            if journal == OTHER_JOURNALS:
                total.floor()  # errors of estimates may be negative
        self.last, self.last_ns = TrafficSample(busiest, others, journals), interval_ns
        return self.last
