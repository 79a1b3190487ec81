"""Maintains the logs: applies retention, reopens shards after a failed sync, and emits events about both.

A failure in a round is an event, and the next round tries again. A log or shard that fails does not stop the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Final

import msgspec

from runnel.broker.monitoring.events import EventKind, Events
from runnel.broker.monitoring.store_statistics import StoreReading, StoreStatistics
from runnel.config import Settings
from runnel.errors import ClosedError, MovedError, RunnelError
from runnel.log.log import (
    Cursor,
    CursorPosition,
    Recovered,
    ShardId,
    Store,
    Trimmed,
)
from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger

_CHECK_INTERVAL_NS: Final = 1_000_000_000
_REOPEN_DELAY_MIN_NS: Final = 1_000_000_000
_REOPEN_DELAY_MAX_NS: Final = 60_000_000_000
_REOPENINGS_MAX: Final = 8  # at a time: they share the workers with all other work
_SHOWN_MAX: Final = 10  # places or lines in one event

logger = get_logger("runnel")


class _ReadOnlyShard(msgspec.Struct):
    """A shard that takes no messages: since when, and when it is reopened next."""

    log: Store
    since_ns: int
    next_try_ns: int
    delay_ns: int = _REOPEN_DELAY_MIN_NS
    tries: int = 0
    is_under_way: bool = False


class LogMaintenance:
    """Maintains the logs by name: the same logs that `stores` reads."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        logs: Mapping[str, Store],
        stores: StoreStatistics,
        events: Events,
    ) -> None:
        self._retention_interval_ns = settings.log.retention_interval_ns
        self._clock = clock
        self._logs = logs
        self._stores = stores
        self._events = events
        self._closed: dict[tuple[str, ShardId], _ReadOnlyShard] = {}
        # Damage found at the start is not an event here: recovery has reported it.
        self._last_reading = stores.read()
        self._segments = {
            (name, shard.shard): shard.segments
            for name, log in self._last_reading.logs.items()
            for shard in log.shards
        }

    async def run(self) -> None:
        """Maintain the logs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._retain())
            while True:
                await self._clock.sleep(_CHECK_INTERVAL_NS / 1e9)
                try:
                    self._check_shards(group)
                except Exception:  # the next check may succeed, and retention continues
                    logger.exception("checking the shards of the logs failed")

    # --- Retention ---

    async def _retain(self) -> None:
        while True:
            await self._clock.sleep(self._retention_interval_ns / 1e9)
            await self.trim()

    async def trim(self) -> None:
        """One round of retention over all logs."""
        for log in self._logs.values():
            for shard in log.shards():
                try:
                    trimmed = await log.trim_shard(shard)
                    await self._report_trimmed(str(shard), log, trimmed)
                except ClosedError:
                    break
                except MovedError:
                    continue  # its new owner applies retention
                except Exception as error:  # noqa: BLE001 - an event reports it; other shards must be trimmed
                    self._events.emit(EventKind.RETENTION_FAILED, str(shard), error=_text(error))

    async def _report_trimmed(self, subject: str, log: Store, trimmed: Trimmed) -> None:
        if trimmed.segments_removed or trimmed.segments_rewritten:
            self._events.emit(
                EventKind.RETENTION,
                subject,
                segments_removed=trimmed.segments_removed,
                bytes_removed=trimmed.bytes_removed,
                segments_rewritten=trimmed.segments_rewritten,
            )
        if trimmed.holds_passed:
            for name in trimmed.holds_passed:
                cursor = log.metadata.cursors.find(name)
                if cursor is not None:
                    await self._report_passed(subject, log, cursor)
                else:  # a subscription, which reports each message that it finds missing
                    self._events.emit(EventKind.PIN_PASSED, name, trimmed=subject)

    async def _report_passed(self, subject: str, log: Store, cursor: Cursor) -> None:
        """Report a cursor and what it lost: everything between its position and the first message left."""
        losses = [loss for place in cursor.positions if (loss := await _loss(log, place))]
        self._events.emit(
            EventKind.PIN_PASSED,
            cursor.name,
            trimmed=subject,
            messages_lost=sum(loss.lost for loss in losses if loss.topic is not None),
            entries_lost=sum(loss.lost for loss in losses if loss.topic is None),
            places=[msgspec.structs.asdict(loss) for loss in losses[:_SHOWN_MAX]],
            place_count=len(losses),
            cursor_updated_ns=cursor.updated_ns,
        )

    # --- Shards ---

    def _check_shards(self, group: asyncio.TaskGroup) -> None:
        reading = self._stores.read()
        if reading is not self._last_reading:
            self._report_damage(reading)
            self._report_rotations(reading)
            self._note_closed(reading)
            self._last_reading = reading
        self._reopen_due(group)
        self._events.flush()

    def _report_damage(self, reading: StoreReading) -> None:
        for name, log in reading.logs.items():
            for place in log.damage[len(self._last_reading.logs[name].damage) :]:
                self._events.emit(EventKind.DAMAGE, _printable(place), log=name)

    def _report_rotations(self, reading: StoreReading) -> None:
        """A shard with more segments than at the last check has rotated.

        A rotation in the same second as a removal goes unnoticed, which is good enough for an event.
        """
        for name, log in reading.logs.items():
            if not self._logs[name].capabilities.has_segment_files:
                continue
            for shard in log.shards:
                before = self._segments.get((name, shard.shard), 1)
                if shard.segments != before:
                    self._segments[name, shard.shard] = shard.segments
                if shard.segments > before:
                    self._events.emit(
                        EventKind.SEGMENT_ROTATED,
                        str(shard.shard),
                        segments=shard.segments,
                        stored_bytes=shard.stored_bytes,
                    )

    def _note_closed(self, reading: StoreReading) -> None:
        now_ns = self._clock.monotonic_ns()
        read_only: set[tuple[str, ShardId]] = set()
        for name, statistics in reading.logs.items():
            log = self._logs[name]
            if not log.capabilities.is_reopenable:
                continue
            for shard in statistics.shards:
                if not shard.is_read_only:
                    continue
                read_only.add((name, shard.shard))
                if (name, shard.shard) not in self._closed:
                    self._closed[name, shard.shard] = _ReadOnlyShard(
                        log, now_ns, now_ns + _REOPEN_DELAY_MIN_NS
                    )
                    self._events.emit(EventKind.SHARD_READ_ONLY, str(shard.shard), log=name)
        for key in self._closed.keys() - read_only:
            if not self._closed[key].is_under_way:
                del self._closed[key]  # reopened by other means

    def _reopen_due(self, group: asyncio.TaskGroup) -> None:
        now_ns = self._clock.monotonic_ns()
        room = _REOPENINGS_MAX - sum(closed.is_under_way for closed in self._closed.values())
        due = [
            item
            for item in self._closed.items()
            if not item[1].is_under_way and item[1].next_try_ns <= now_ns
        ]
        due.sort(key=lambda item: item[1].next_try_ns)
        for (name, shard), closed in due[: max(0, room)]:
            closed.is_under_way = True
            group.create_task(self._reopen(name, shard, closed))

    async def _reopen(self, name: str, shard: ShardId, closed: _ReadOnlyShard) -> None:
        closed.tries += 1
        try:
            damage = await _finished(closed.log.reopen(shard))
        except ClosedError:
            return  # the broker is closing
        except MovedError:
            del self._closed[name, shard]
        except Exception as error:  # noqa: BLE001 - an event reports it, and it is tried again
            now_ns = self._clock.monotonic_ns()
            closed.next_try_ns = now_ns + closed.delay_ns
            self._events.emit(
                EventKind.SHARD_REOPEN_FAILED,
                str(shard),
                log=name,
                error=_text(error),
                tries=closed.tries,
                next_try_in_ns=closed.delay_ns,
            )
            closed.delay_ns = min(closed.delay_ns * 2, _REOPEN_DELAY_MAX_NS)
            closed.is_under_way = False
        else:
            del self._closed[name, shard]
            self._stores.forget()  # the last reading says that the shard is read-only
            self._events.emit(
                EventKind.SHARD_REOPENED,
                str(shard),
                log=name,
                tries=closed.tries,
                closed_for_ns=self._clock.monotonic_ns() - closed.since_ns,
                damage=[_printable(place) for place in damage[:_SHOWN_MAX]],
            )


def report_recovery(events: Events, name: str, recovered: Recovered) -> None:
    """Emit events about what opening a log found: none if it was closed cleanly and its topics fit their rules."""
    if not recovered.was_clean or recovered.torn or recovered.damage:
        events.emit(
            EventKind.RECOVERED,
            name,
            was_clean=recovered.was_clean,
            torn=[_printable(place) for place in recovered.torn[:_SHOWN_MAX]],
            torn_count=len(recovered.torn),
            damage=[_printable(place) for place in recovered.damage[:_SHOWN_MAX]],
            damage_count=len(recovered.damage),
        )
    differing: dict[str, list[str]] = {}
    for difference in recovered.differences:
        differing.setdefault(difference.topic, []).append(difference.text)
    for (
        topic,
        texts,
    ) in differing.items():  # one event for a topic: a second one would be suppressed
        events.emit(EventKind.POLICY_DIFFERS, topic, text="; ".join(texts))


class _Loss(msgspec.Struct, frozen=True):
    """The loss of one place of a cursor: messages of a partition, or entries of a shard."""

    topic: str | None
    partition: int
    shard: str | None
    at: int  # the cursor's position
    first: int  # the first message or entry that is left
    lost: int


async def _loss(log: Store, place: CursorPosition) -> _Loss | None:
    try:
        if place.topic is not None:
            at, first = place.offset, (await log.bounds(place.topic, place.partition)).first_offset
        else:
            assert place.shard is not None
            assert place.position is not None
            at, first = place.position.entry, log.shard(place.shard).entries().first_offset
    except ClosedError:
        raise
    except RunnelError:
        return None  # deleted meanwhile
    if first <= at:
        return None
    # Messages are numbered from 1: a cursor at 0 has not lost message 0.
    lost = first - max(at, 1)
    shard = None if place.shard is None else str(place.shard)
    return _Loss(place.topic, place.partition, shard, at, first, lost) if lost else None


async def _finished(work: Awaitable[Sequence[str]]) -> Sequence[str]:
    """Await work that must be finished, even if the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise


def _text(error: Exception) -> str:
    return _printable(f"{type(error).__name__}: {error}")


def _printable(text: str) -> str:
    """The text as valid UTF-8: a path may contain other bytes."""
    return text.encode("utf-8", "backslashreplace").decode()
