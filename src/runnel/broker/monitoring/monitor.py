"""Registers the metrics of the whole broker, and decides whether it is ready.

Expensive readings are cached (`Throttled`). Readings that have to be awaited are made in `refresh`, which the reporter
calls every interval and an exposition calls before it reads the registry, and in `watch_disk`.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Final, Protocol

import msgspec

from runnel.broker.monitoring import metric_families as families
from runnel.broker.monitoring.events import Events
from runnel.broker.monitoring.exposed_metrics import exposed_metrics
from runnel.broker.monitoring.loop_lag import LoopLag
from runnel.broker.monitoring.metric_families import CursorLag, JournalRoster
from runnel.broker.monitoring.metric_tables import ConnectionStats
from runnel.broker.monitoring.metrics import AtLimit, Family, Metrics, MetricUnit
from runnel.broker.monitoring.store_statistics import StoreReading, StoreStatistics
from runnel.broker.monitoring.throttled import Throttled, ThrottledAsync
from runnel.config import Settings
from runnel.formats.metrics_report import ExposedMetric
from runnel.formats.wire import CursorState
from runnel.formats.work_heads import SubscriptionState
from runnel.platform import process
from runnel.platform.clock import Clock
from runnel.platform.disk import Disk

_DISK_SECONDS: Final = 1.0
_FREE_FILES_MIN: Final = 16
"""A journal that begins or rotates creates a few files; with fewer free inodes, the next one may fail."""
_REFUSAL_NS: Final = 10_000_000_000
"""How long a publish that found no room counts: some limits, such as a user's quota, do not show beforehand."""


class DiskRoom(msgspec.Struct, frozen=True, gc=False):
    """The room that is left on the file system of the data directory."""

    free_bytes: int
    free_files: int | None  # None: it has no limit

    @classmethod
    def of(cls, disk: Disk, directory: str) -> DiskRoom:
        return cls(disk.free_bytes(directory), disk.free_files(directory))


class MeasuredReader(Protocol):
    """The part of a live subscription that the metrics read."""

    @property
    def lag(self) -> int: ...

    @property
    def queued_bytes(self) -> int: ...

    @property
    def is_behind(self) -> bool: ...


class LiveSums(msgspec.Struct, gc=False):
    """Sums over all live subscriptions: they come and go too often to have their own series."""

    count: int = 0
    behind: int = 0
    lag: int = 0
    lag_max: int = 0
    queued_bytes: int = 0
    queued_bytes_max: int = 0

    @classmethod
    def of(cls, subscriptions: Iterable[MeasuredReader]) -> LiveSums:
        sums = cls()
        for each in subscriptions:
            lag, queued_bytes = each.lag, each.queued_bytes
            sums.count += 1
            sums.behind += each.is_behind
            sums.lag += lag
            sums.lag_max = max(sums.lag_max, lag)
            sums.queued_bytes += queued_bytes
            sums.queued_bytes_max = max(sums.queued_bytes_max, queued_bytes)
        return sums


class MonitoredParts(msgspec.Struct, frozen=True, kw_only=True):
    """The readings that a broker gives its monitor. Each may take a while where there are many things."""

    live: Callable[[], Iterable[MeasuredReader]]
    ephemeral_topics: Callable[[], int]
    fetches_waiting: Callable[[], int]
    cursors: Callable[[], Awaitable[Sequence[CursorState]]]
    connections: Callable[[], Awaitable[Mapping[int, ConnectionStats]]]
    subscriptions: Callable[[], Awaitable[Sequence[SubscriptionState]]]
    disk_room: Callable[[], Awaitable[DiskRoom]] | None
    """Of the data directory. None: everything is in memory."""


class Monitor:
    """Monitors a broker. Create it within a running loop; `close` it before the broker ends."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Metrics,
        events: Events,
        stores: StoreStatistics,
        parts: MonitoredParts,
        *,
        in_memory: Sequence[str],
    ) -> None:
        """`in_memory`: the names of the logs that keep everything in memory."""
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._events = events
        self._stores = stores
        self._parts = parts
        self._in_memory = in_memory
        self._live = Throttled(lambda: LiveSums.of(parts.live()), clock)
        self._cursors: ThrottledAsync[Sequence[CursorLag]] = ThrottledAsync(
            self._read_cursors, clock, first=()
        )
        self._open_files = Throttled(process.open_files, clock)
        self._connections: Mapping[int, ConnectionStats] = {}
        self._subscriptions_peak = 0  # of one connection
        self._roster = JournalRoster()
        self._journals: tuple[StoreReading, Sequence[Family]] | None = None
        self._states: Sequence[SubscriptionState] = ()
        self._disk_room: DiskRoom | None = None
        self._refused_ns: int | None = None  # when a publish last found no room
        self._refreshing = asyncio.Lock()
        self._listeners: dict[str, Callable[[], int]] = {}
        self._loop_lag = LoopLag(
            metrics.add_histogram("loop_lag", "How late a timer of the event loop fires.")
        )
        stores.register(metrics)
        self._add_gauges()
        self._add_process()
        self._add_limits()
        metrics.add_families(self._families)

    def close(self) -> None:
        self._loop_lag.close()

    def add_listener(
        self, name: str, setting: str, count_max: int, connections: Callable[[], int]
    ) -> None:
        """Report the connections of a listener that was opened; `setting` limits them."""
        self._listeners[name] = connections
        self._metrics.add_limit(setting, count_max, connections)

    async def refresh(self) -> Sequence[SubscriptionState]:
        """Make the readings that have to be awaited: acknowledged subscriptions, connections and the cursors' lag."""
        async with self._refreshing:
            await self._cursors.value()  # counting their lag reads the log
            await self._refresh_connections()
            self._states = await self._parts.subscriptions()
            return self._states

    async def read_metrics(self) -> Sequence[ExposedMetric]:
        """All metrics as of now, as Prometheus has them."""
        await self.refresh()
        found = []
        for exposed in exposed_metrics(self._metrics):
            found.append(exposed)
            # Each metric is bounded, but all together take long: other tasks run in between.
            await asyncio.sleep(0)
        return found

    async def _read_cursors(self) -> Sequence[CursorLag]:
        return [CursorLag.of(each) for each in await self._parts.cursors()]

    async def _refresh_connections(self) -> None:
        rows = await self._parts.connections()
        if rows is not self._connections:
            self._connections = rows
            self._subscriptions_peak = max((row.subscriptions for row in rows.values()), default=0)

    async def watch_disk(self) -> None:
        """Read the room on the disk every second, until cancelled. A disk that does not answer blocks nothing else."""
        if self._parts.disk_room is None:
            return
        while True:
            with suppress(OSError):  # then the last reading stays
                room = await self._parts.disk_room()
                if self._disk_room is None:
                    self._add_disk()
                self._disk_room = room
            await self._clock.sleep(_DISK_SECONDS)

    def troubles(self) -> list[str]:
        """Why the broker cannot accept all messages, as lines for operators; empty if it can."""
        found = []
        if read_only := self._stores.read().total.read_only_shards:
            found.append(f"{read_only} shards are read-only since a sync failed")
        if full := self._full():
            found.append(f"the disk is full: {full}")
        return found

    def warnings(self) -> list[str]:
        """Problems that do not stop the broker's work. Unauthenticated clients see them: no paths, no names."""
        damage = sum(len(log.damage) for log in self._stores.read().logs.values())
        if not damage:
            return []
        places = "1 place" if damage == 1 else f"{damage} places"
        return [
            f"{places} in the data directory damaged: see the broker's log, or `runnel log verify`"
        ]

    def on_no_room(self) -> None:
        """A publish was refused because the disk is full."""
        self._refused_ns = self._clock.monotonic_ns()

    def _full(self) -> str:
        """Why the next batch may find no room on the disk; empty if there is room."""
        reserve = self._settings.log.disk_reserve_bytes
        batch = self._settings.limits.batch_bytes_max
        room = self._disk_room
        # Publishing stops before it uses the reserve, so a full disk has a little more than the reserve free.
        if room is not None and room.free_bytes < reserve + batch:
            return (
                f"{room.free_bytes} bytes are free, log.disk_reserve_bytes = {reserve} of them stay free, and a batch "
                f"may need limits.batch_bytes_max = {batch}"
            )
        if room is not None and room.free_files is not None and room.free_files < _FREE_FILES_MIN:
            return f"{room.free_files} more files can be made (inodes)"
        refused_ns = self._refused_ns
        if refused_ns is not None and self._clock.monotonic_ns() - refused_ns < _REFUSAL_NS:
            return "a publish was refused within the last 10 s"
        return ""

    # --- Gauges ---

    def _add_gauges(self) -> None:
        add = self._metrics.add_gauge
        live, parts = self._live.value, self._parts
        add("ready", "1 if the broker accepts all messages.", self._ready)
        add("subscriptions", "Live subscriptions.", lambda: live().count)
        add(
            "subscriptions_behind",
            "Live subscriptions that are behind and read from the log.",
            lambda: live().behind,
        )
        add(
            "subscriptions_lag",
            "Entries that live subscriptions have not been sent yet, in total.",
            lambda: live().lag,
        )
        add(
            "subscriptions_lag_max",
            "Entries that the most lagging live subscription has not been sent yet.",
            lambda: live().lag_max,
        )
        add(
            "subscriptions_queued_bytes",
            "Bytes of ephemeral topics queued for slow live subscriptions.",
            lambda: live().queued_bytes,
            unit=MetricUnit.BYTES,
        )
        add("subscriptions_durable", "Acknowledged subscriptions.", lambda: len(self._states))
        add("cursors", "Named cursors.", lambda: len(self._cursors.last))
        add("topics_live", "Ephemeral topics.", parts.ephemeral_topics)
        add("fetches_waiting", "Fetches that wait for a message.", parts.fetches_waiting)

    def _add_disk(self) -> None:
        reserve = self._settings.log.disk_reserve_bytes
        self._metrics.add_gauge(
            "disk_free_bytes",
            "Room on the file system that holds the data.",
            lambda: 0 if self._disk_room is None else self._disk_room.free_bytes,
            unit=MetricUnit.BYTES,
        )
        self._metrics.add_gauge(
            "disk_full",
            "1 if the next batch may find no room on the disk.",
            lambda: int(bool(self._full())),
        )
        self._metrics.add_gauge(
            "disk_reserve_bytes",
            "Publishing is refused while less than this is free.",
            lambda: reserve,
            unit=MetricUnit.BYTES,
        )

    def _ready(self) -> int:
        return int(not self.troubles())

    def _add_process(self) -> None:
        metrics = self._metrics
        metrics.add_counter(
            "process_cpu",
            "Time on a processor, in the process's own code and in the kernel's.",
            process.cpu_time_ns,
            unit=MetricUnit.NANOSECONDS,
        )
        metrics.add_gauge(
            "process_resident_memory_bytes",
            "Memory of the process.",
            process.resident_bytes,
            unit=MetricUnit.BYTES,
        )
        metrics.add_gauge(
            "process_open_fds", "Files and sockets that are open.", self._open_files.value
        )
        metrics.add_gauge(
            "process_max_fds", "Files and sockets that may be open.", process.open_files_max
        )
        metrics.add_gauge(
            "process_start_time",
            "When the process began, since 1970.",
            process.started_ns,
            unit=MetricUnit.NANOSECONDS,
        )

    # --- Limits ---

    def _add_limits(self) -> None:
        settings, parts, live = self._settings, self._parts, self._live.value
        limits, log, broker = settings.limits, settings.log, settings.broker
        add, read = self._metrics.add_limit, self._stores.read

        def peak(field: str, logs: Sequence[str] | None = None) -> Callable[[], int]:
            """The fullest shard or journal of all logs, or of the given ones."""
            return lambda: max(
                (
                    int(getattr(peaks, field))
                    for name, peaks in read().peaks.items()
                    if logs is None or name in logs
                ),
                default=0,
            )

        add(
            "limits.topics_max",
            limits.topics_max,
            lambda: max(parts.ephemeral_topics(), *(each.topics for each in read().logs.values())),
        )
        add("limits.producers_max", limits.producers_max, peak("producers"), AtLimit.REPLACES)
        add("limits.cursors_max", limits.cursors_max, lambda: len(self._cursors.last))
        add(
            "limits.durable_subscriptions_max",
            limits.durable_subscriptions_max,
            lambda: len(self._states),
        )
        add(
            "limits.open_files_max",
            limits.open_files_max,
            lambda: sum(each.open_files for each in read().logs.values()),
            AtLimit.REPLACES,
        )
        add("broker.subscriptions_max", broker.subscriptions_max, lambda: live().count)
        add(
            "broker.live_queue_bytes_max",
            broker.live_queue_bytes_max,
            lambda: live().queued_bytes_max,
            AtLimit.REPLACES,
        )
        add("broker.fetches_waiting_max", broker.fetches_waiting_max, parts.fetches_waiting)
        add(
            "log.write_queue_bytes_max",
            log.write_queue_bytes_max,
            peak("queued_bytes"),
            AtLimit.WAITS,
        )
        add(
            "log.write_queue_batches_max",
            log.write_queue_batches_max,
            peak("queued_batches"),
            AtLimit.WAITS,
        )
        add(
            "log.memory_journal_bytes_max",
            log.memory_journal_bytes_max,
            peak("stored_bytes", self._in_memory),
            AtLimit.REPLACES,
        )
        add(
            "native.subscriptions_max",
            settings.native.subscriptions_max,
            lambda: self._subscriptions_peak,
        )

    # --- Metrics with labels ---

    def _families(self) -> Iterator[Family]:
        traffic, settings = self._metrics.traffic, self._settings
        yield families.info_family(
            version=version("runnel"),
            python=platform.python_version(),
            cluster=settings.cluster.name,
            node=settings.cluster.node,
        )
        yield families.event_family(self._events.counts)
        yield from families.listener_families(
            [(name, count()) for name, count in self._listeners.items()]
        )
        yield from families.flow_families(traffic.totals)
        yield from self._storage()
        yield from families.topic_families(traffic)
        yield from families.work_families(self._states, self._clock.time_ns())
        cursors = self._cursors.last
        yield from families.cursor_families(cursors)
        members = sum(len(each.members) for each in self._states)
        yield families.left_out_family(
            journals=self._roster.left_out,
            topics=sum(each.topics for each in traffic.last.others.values()),
            members=max(0, members - families.MEMBERS_MAX),
            cursors=max(0, len(cursors) - families.CURSORS_MAX),
        )

    def _storage(self) -> Sequence[Family]:
        """Built once per reading: with a hundred thousand journals, summing up takes a while."""
        reading = self._stores.read()
        if self._journals is None or self._journals[0] is not reading:
            made = list(families.storage_families(self._roster.divide(reading.journals)))
            self._journals = reading, made
        return self._journals[1]
