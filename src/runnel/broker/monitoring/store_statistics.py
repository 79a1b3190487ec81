"""Statistics of the logs, summed up by journal and in total."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from runnel.broker.monitoring.metrics import Metrics, MetricUnit
from runnel.broker.monitoring.throttled import Throttled
from runnel.log.log import LogStatistics, ShardStatistics
from runnel.platform.clock import Clock

_LARGEST_MAX: Final = 100


class StatisticsSource(Protocol):
    """A log."""

    def statistics(self) -> LogStatistics: ...


class JournalStatistics(msgspec.Struct, gc=False):
    """Sums over some shards. Messages and bytes count what was appended since the log was opened."""

    shards: int = 0
    messages: int = 0
    bytes: int = 0
    stored_bytes: int = 0
    segments: int = 0
    queued_batches: int = 0
    queued_bytes: int = 0
    failed_batches: int = 0
    unknown_outcomes: int = 0
    read_only_shards: int = 0
    syncs: int = 0
    sync_time_ns: int = 0
    sync_time_max_ns: int = 0

    def add(self, shard: ShardStatistics) -> None:
        self.shards += 1
        self.stored_bytes += shard.stored_bytes
        self.segments += shard.segments
        self.queued_batches += shard.queued_batches
        self.queued_bytes += shard.queued_bytes
        self.read_only_shards += shard.is_read_only
        self.add_counters(shard)

    def add_counters(self, shard: ShardStatistics) -> None:
        """Add what only grows, also of a shard that has gone."""
        self.messages += shard.messages
        self.bytes += shard.bytes
        self.failed_batches += shard.failed_batches
        self.unknown_outcomes += shard.unknown_outcomes
        self.syncs += shard.syncs
        self.sync_time_ns += shard.sync_time_ns
        self.sync_time_max_ns = max(self.sync_time_max_ns, shard.sync_time_max_ns)


class Peaks(msgspec.Struct, gc=False):
    """The highest figures in a log. Stored bytes are limited for each journal, all others for each shard."""

    stored_bytes: int = 0
    queued_batches: int = 0
    queued_bytes: int = 0
    producers: int = 0

    def add(self, shard: ShardStatistics) -> None:
        self.queued_batches = max(self.queued_batches, shard.queued_batches)
        self.queued_bytes = max(self.queued_bytes, shard.queued_bytes)
        self.producers = max(self.producers, shard.producers)


class StoreReading(msgspec.Struct, frozen=True):
    """The statistics of all logs at one moment."""

    logs: Mapping[str, LogStatistics]
    peaks: Mapping[str, Peaks]  # by log
    journals: Mapping[str, JournalStatistics]  # summed up if several logs have the journal
    largest: Sequence[str]  # journals with the most stored bytes
    total: JournalStatistics

    @classmethod
    def of(cls, logs: Mapping[str, LogStatistics]) -> StoreReading:
        journals: dict[str, JournalStatistics] = {}
        peaks = {name: Peaks() for name in logs}
        total = JournalStatistics()
        for name, statistics in logs.items():
            stored_bytes: Counter[str] = Counter()
            for shard in statistics.shards:
                peaks[name].add(shard)
                stored_bytes[shard.shard.journal] += shard.stored_bytes
                journals.setdefault(shard.shard.journal, JournalStatistics()).add(shard)
                total.add(shard)
            for ended in statistics.ended:
                journals.setdefault(ended.shard.journal, JournalStatistics()).add_counters(ended)
                total.add_counters(ended)
            peaks[name].stored_bytes = max(stored_bytes.values(), default=0)
        largest = heapq.nlargest(
            _LARGEST_MAX, journals, key=lambda name: journals[name].stored_bytes
        )
        return cls(logs, peaks, journals, largest, total)


class StoreStatistics:
    """A cached reading of the logs by name ("disk", "memory")."""

    def __init__(self, logs: Mapping[str, StatisticsSource], clock: Clock) -> None:
        self._reading = Throttled(
            lambda: StoreReading.of({name: log.statistics() for name, log in logs.items()}), clock
        )

    def read(self) -> StoreReading:
        return self._reading.value()

    def forget(self) -> None:
        """Discard the cached reading, after a change that readers must see."""
        self._reading.forget()

    def register(self, metrics: Metrics) -> None:
        """Add the metrics of the logs to the registry."""

        def of_total(name: str) -> Callable[[], int]:
            return lambda: int(getattr(self.read().total, name))

        def gauge(name: str, text: str, unit: MetricUnit = MetricUnit.COUNT) -> None:
            metrics.add_gauge(name, text, of_total(name), unit=unit)

        gauge("shards", "Shards of all journals.")
        gauge("stored_bytes", "Bytes of all journals, on disk and in memory.", MetricUnit.BYTES)
        gauge("segments", "Segments of all journals; in memory each batch counts as one.")
        gauge("queued_batches", "Batches waiting to be written.")
        gauge("queued_bytes", "Bytes waiting to be written.", MetricUnit.BYTES)
        gauge("read_only_shards", "Shards that are read-only because a sync failed.")
        metrics.add_counter("syncs", "Syncs of all shards.", of_total("syncs"))
        metrics.add_counter(
            "batches_failed", "Batches that could not be written.", of_total("failed_batches")
        )
        metrics.add_counter(
            "unknown_outcomes",
            "Attempts to store batches after which it was unknown whether they are stored: the shard repeats them.",
            of_total("unknown_outcomes"),
        )
        metrics.add_gauge(
            "topics_kept",
            "Topics whose messages are kept.",
            lambda: sum(log.topics for log in self.read().logs.values()),
        )
        metrics.add_gauge(
            "open_files",
            "Segment and index files held open.",
            lambda: sum(log.open_files for log in self.read().logs.values()),
        )
        metrics.add_gauge(
            "damage",
            "Damaged places found since the logs were opened; at most a hundred are counted.",
            lambda: sum(len(log.damage) for log in self.read().logs.values()),
        )
