"""Writes one shard: numbers and queues batches at once, stores them in groups, shows them to readers after the sync.

One group is under way at a time. Batches that arrive meanwhile share the next: the slower the disk, the larger the
groups. The group store (`log/group_store.py`) makes a group durable; the loop decides before and applies after.

    append: number, queue ──▶ commit: take a group, rotate if due ──▶ group store: write + sync in a worker
                                        ▲                                       │
                                        └── index, visible_next, answers ◀──────┘

The store gets the next group before the group just stored is applied: the disk is idle only while the loop picks the
batches.

A group that failed also fails everything queued behind it: numbers go back, as if none of it had been appended. Bytes
that a write may have left are cut off, durably. After a failed sync the content of the disk is unknown: the shard
accepts nothing more until `reopen`.

While the outcome of a group is unknown, nothing is answered or taken back. The same group is stored again, after
growing delays, until it is stored; batches queue up behind it. `drop` gives the shard up instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from runnel.config import LogSettings
from runnel.errors import BusyError, ReadOnlyError, RunnelError, Unavailable
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.log.disk.group_writer import GroupWriter, MakeGroupStore
from runnel.log.disk.pending import PendingBatch, WriteCounters
from runnel.log.group_store import BatchGroup, Failed, Outcome, Stored, Unknown
from runnel.log.log import Appended, Level, LogListener, ShardId, VisibleBatch
from runnel.log.metadata.catalogue import ShardCatalogue
from runnel.log.metadata.producers import ProducerTable, check_same_batch
from runnel.log.metadata.records import Opened, ShardAt
from runnel.log.metadata.topic_table import Partition, give_back, number_runs
from runnel.log.retention.rules import rotation_period
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.segment import SegmentHeader
from runnel.log.segments.segments import Segment, SegmentFolder, describe_by
from runnel.log.segments.synced_marks import SyncedMarks
from runnel.platform.clock import Clock
from runnel.platform.disk import Disk
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers
from runnel.topics.policies import JournalPolicy

# While an outcome is unknown the group is stored again: at once, then after delays that double between these.
REPEAT_SECONDS_MIN: Final = 0.05
REPEAT_SECONDS_MAX: Final = 5.0
# How long a shard that takes no more batches waits for an unknown outcome before it drops what is queued.
UNKNOWN_SECONDS_MAX: Final = 10.0


class _StoredGroup(NamedTuple):
    """A stored group with its batches. `in_segment` is done when readers can read it; None: they can."""

    group: BatchGroup
    batches: list[PendingBatch]
    in_segment: asyncio.Future[None] | None


class ShardParts(msgspec.Struct, frozen=True):
    """What the parts of a shard share: its catalogue and epoch; the others are the same for all shards of a log."""

    disk: Disk
    clock: Clock
    workers: Workers
    files: OpenFiles
    tasks: OwnedTasks
    settings: LogSettings
    listener: LogListener
    marks: SyncedMarks
    make_group_store: MakeGroupStore
    catalogue: ShardCatalogue
    epoch: int


class ShardWriter:
    """Numbers, queues and stores the batches of one shard, and rotates and seals its segments."""

    def __init__(
        self,
        shard: ShardId,
        parts: ShardParts,
        policy: JournalPolicy,
        folder: SegmentFolder,
        segments: list[Segment],
        producers: ProducerTable,
        stored_producers: ProducerTable,
        make_folder: Callable[[], None],
    ) -> None:
        self._shard = shard
        self._parts = parts
        self._policy = policy
        self._folder = folder
        self._segments = segments
        self._producers = producers
        self._stored_producers = stored_producers
        self._queue: deque[PendingBatch] = deque()
        self._files = GroupWriter(
            parts.disk,
            parts.files,
            parts.settings,
            folder,
            policy.rotate.bytes_max,
            parts.marks,
            make_folder=make_folder,
            is_resting=lambda: not self._queue,
        )
        self._store = parts.make_group_store(shard, self._files)
        self._group: list[PendingBatch] = []
        self._is_attempted = False  # the group store has been given the group
        self._stored: _StoredGroup | None = None  # not applied yet
        self._room: list[asyncio.Future[None]] = []
        self._idle: list[asyncio.Future[None]] = []
        self._is_committing = False
        self._is_paused = False
        self.is_begun = False
        """The catalogue has the term's epoch. Nothing is stored before."""
        self._refusal: RunnelError | None = None
        self._is_ending = False  # no batch will be accepted any more
        self._dropped: RunnelError | None = None
        self._is_unknown = False  # the outcome of the group under way has been unknown
        self._delay: asyncio.Task[None] | None = None  # before an attempt is repeated
        self._giving_up: asyncio.Task[None] | None = None
        # Why a batch failed that no publisher waited for; `sync` raises it.
        self._unreported: RunnelError | None = None
        self.queued_bytes = 0
        self.next_entry = 1
        self.visible_next_entry = 1  # behind the last stored entry
        self.last_time_ns = 0
        self.counters = WriteCounters()
        self.unsealed: list[Segment] = []  # full segments whose index is not on disk yet
        self.sealing = asyncio.Lock()
        # The highest segment number ever used, also by a removed segment: readers remember numbers.
        self.last_number = 0

    def use_policy(self, policy: JournalPolicy) -> None:
        """Use this policy from the next group on."""
        self._policy = policy
        self._files.segment_bytes_max = policy.rotate.bytes_max

    # --- Appending ---

    @property
    def queued_batches(self) -> int:
        stored = 0 if self._stored is None else len(self._stored.batches)
        return stored + len(self._group) + len(self._queue)

    @property
    def is_read_only(self) -> bool:
        return isinstance(self._refusal, ReadOnlyError)

    @property
    def active(self) -> Segment | None:
        """The segment for the next group, unless it is full by then."""
        last = self._segments[-1] if self._segments else None
        return None if last is None or last.growing is None or last in self.unsealed else last

    def append(
        self,
        batch: Batch,
        partitions: Sequence[Partition],
        level: Level,
        unrecorded: Sequence[asyncio.Future[None]],
    ) -> asyncio.Future[Appended]:
        """Number the batch and queue it. A producer's batch must have passed `ProducerTable.check`."""
        self._check_room()
        parts = self._parts
        head = batch.envelope
        self.last_time_ns = max(self.last_time_ns, parts.clock.time_ns())
        entry = self.next_entry
        numbered = number_runs(
            head,
            partitions,
            shard=self._shard.shard,
            epoch=parts.epoch,
            entry=entry,
            receive_time_ns=self.last_time_ns,
        )
        try:
            encoded = envelopes.encode(numbered)
        except BaseException:
            give_back(head, partitions)
            raise
        if head.producer is not None:
            self._producers.accept(head.producer, head.term, head.number, entry, self.last_time_ns)
        self.next_entry = entry + 1
        pending = PendingBatch(numbered, encoded, batch.body, partitions, unrecorded)
        self._queue.append(pending)
        self.queued_bytes += pending.size
        if not self._is_committing and not self._is_paused:
            self._is_committing = True
            parts.tasks.start(self._commit())
        return self._answer(pending, level)

    def _answer(self, pending: PendingBatch, level: Level) -> asyncio.Future[Appended]:
        future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        if level is Level.STORED:
            pending.answers.append((future, False))
        else:
            future.set_result(pending.answer(level, is_repeated=False))
        return future

    def repeat(self, entry: int, repeated: Envelope) -> asyncio.Future[Appended] | None:
        """The future answer to a repetition of a queued batch; None if entry `entry` is not queued."""
        stored = () if self._stored is None else self._stored.batches
        for pending in (*stored, *self._group, *self._queue):
            if pending.envelope.entry == entry:
                check_same_batch(pending.envelope, repeated)
                future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
                pending.answers.append((future, True))
                return future
        return None

    def _check_room(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        settings = self._parts.settings
        if (
            self.queued_bytes >= settings.write_queue_bytes_max
            or self.queued_batches >= settings.write_queue_batches_max
        ):
            raise BusyError(
                f"shard {self._shard}: {self.queued_batches} batches of {self.queued_bytes} bytes wait to be "
                "stored; wait for room"
            )

    async def wait_room(self) -> None:
        while True:
            try:
                self._check_room()
            except BusyError:
                future = asyncio.get_running_loop().create_future()
                self._room.append(future)
                await future
            else:
                return

    async def wait_idle(self) -> None:
        """Wait until nothing is queued or being written."""
        while self._is_committing or self._queue or self._stored is not None:
            await self._wait_committed()

    async def _wait_committed(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._idle.append(future)
        await future

    async def sync(self) -> None:
        """Wait until nothing is queued. Raises if a batch that no publisher waited for failed since the last call."""
        await self.wait_idle()
        failure, self._unreported = self._unreported, None
        if failure is not None:
            raise failure

    def refuse(self, reason: RunnelError) -> None:
        """Accept no batches any more. Queued batches are still stored.

        If an outcome stays unknown for `UNKNOWN_SECONDS_MAX` from now on, they are dropped: waiting for them ends.
        """
        if self._dropped is None:
            self._refusal = reason
            self._is_ending = True
            self._limit_unknown()

    def continue_from(self, next_entry: int, last_time_ns: int) -> None:
        """Continue behind entries that were found to be stored."""
        self.next_entry = max(self.next_entry, next_entry)
        self.visible_next_entry = max(self.visible_next_entry, next_entry)
        self.last_time_ns = max(self.last_time_ns, last_time_ns)

    def skip_entries(self, count: int) -> None:
        """Skip numbers of entries that may exist but cannot be read any more."""
        self.continue_from(self.next_entry + count, 0)

    def accept_again(self) -> None:
        """Accept batches again after the shard has been reopened."""
        self._refusal = None

    def check_kept(self) -> None:
        """Raise the reason of `drop` if the shard was dropped: nothing more may be written then."""
        if self._dropped is not None:
            raise self._dropped

    # --- Committing ---

    async def _commit(self) -> None:
        while self._queue and not self._is_paused:
            self._take_group()
            try:
                failed = await self._store_group()
            except RunnelError as error:  # a record could not be written
                failed = Failed(error)
            if failed is not None:
                await self._show_stored()
                self._fail(failed)
            if not self._queue or self._is_paused:
                self._apply_stored()
            _wake(self._room)
        self._is_committing = False
        _wake(self._idle)

    def _take_group(self) -> None:
        """Take as many batches as one write may have: one segment, one period, a bounded size."""
        settings = self._parts.settings
        first = self._queue[0]
        active = self.active
        position = (
            active.end if active is not None and not self._is_rotation_due(active, first) else 0
        )
        limit = min(settings.group_bytes_max, self._policy.rotate.bytes_max - position)
        period = self._period(first)
        size = 0
        while self._queue:
            pending = self._queue[0]
            size += pending.size
            if self._group and (size > limit or self._period(pending) != period):
                break
            self._group.append(self._queue.popleft())

    def _period(self, pending: PendingBatch) -> int:
        rotate = self._policy.rotate
        time_ns = int.from_bytes(pending.envelope.receive_times, "little", signed=True)
        return rotation_period(time_ns, rotate.every_ns, rotate.at_ns)

    def _is_rotation_due(self, active: Segment, first: PendingBatch) -> bool:
        if active.is_empty:
            return False
        assert active.growing is not None
        rotate = self._policy.rotate
        return (
            active.end + first.size > rotate.bytes_max
            or active.growing.run_count() >= self._parts.settings.segment_runs_max
            or rotation_period(active.first_time_ns, rotate.every_ns, rotate.at_ns)
            != self._period(first)
        )

    async def _store_group(self) -> Failed | None:
        batches = self._group
        active = self.active
        is_new = active is None or self._is_rotation_due(active, batches[0])
        unrecorded = [recorded for pending in batches for recorded in pending.unrecorded]
        if not self.is_begun:
            unrecorded.append(self.begin_term())
        if is_new or unrecorded:
            await self._show_stored()  # its publishers need not wait for the catalogue too
        # These records first: a crash here leaves topics without messages, never messages without topics.
        for recorded in unrecorded:
            await recorded
        if is_new and active is not None:
            await self.checkpoint(active)
        if self._group is not batches:
            return None  # dropped meanwhile
        started_ns = self._parts.clock.monotonic_ns()
        group = self._place(batches, None if is_new else active)
        self._is_attempted = True
        storing = self._store.store(group)
        await self._show_stored()
        outcome = await storing
        if isinstance(outcome, Unknown):
            outcome = await self._settle(group, outcome)
        if self._group is not batches:
            return None
        self._is_attempted = False
        if not isinstance(outcome, Stored):
            assert isinstance(outcome, Failed)
            return outcome
        self._count_sync(self._parts.clock.monotonic_ns() - started_ns)
        self._stored = _StoredGroup(group, batches, outcome.in_segment)
        if outcome.in_segment is not None:
            outcome.in_segment.add_done_callback(self._on_in_segment)
        segment = group.segment
        segment.end += group.size
        self._group = []
        if is_new:
            if active is not None:
                self._retire(active)
            self._segments.append(segment)
            self.last_number = segment.number
            await self._show_stored()  # so that the segment's index tells when it is full
        return None

    def begin_term(self) -> asyncio.Future[None]:
        """Record the epoch: from now on the catalogue knows that the shard may have changed since it was closed."""
        now_ns = self._parts.clock.time_ns()
        return self._parts.catalogue.add(Opened(self._parts.epoch, now_ns), apply=self._on_begun)

    def _on_begun(self) -> None:
        self.is_begun = True

    def _place(self, batches: list[PendingBatch], active: Segment | None) -> BatchGroup:
        """The group of these batches, behind what the active segment holds, or in a new segment."""
        entry = batches[0].envelope.entry
        header = None
        if active is None:
            header = SegmentHeader(
                shard=self._shard.shard,
                number=self._next_number(),
                first_entry=entry,
                generation=0,
                epoch=self._parts.epoch,
                created_ns=self._parts.clock.time_ns(),
            )
            active = self._folder.new_segment(header)
        size = 0
        for pending in batches:
            size += pending.size
        return BatchGroup(
            self._shard,
            self._parts.epoch,
            entry,
            entry + len(batches),
            batches,
            size,
            active,
            active.end,
            header,
        )

    async def _settle(self, group: BatchGroup, outcome: Outcome) -> Outcome:
        """Store a group with an unknown outcome again until it is stored, or until the shard is dropped.

        `failed` does not end this: an earlier attempt may still be stored.
        """
        self._is_unknown = True
        self._limit_unknown()
        delay = 0.0
        while not isinstance(outcome, Stored):
            self.counters.unknown_outcomes += 1
            if self._dropped is None:
                self._delay = self._parts.tasks.start_awaited(self._parts.clock.sleep(delay))
                await asyncio.wait((self._delay,))  # drop cancels it
                self._delay = None
                delay = min(max(2 * delay, REPEAT_SECONDS_MIN), REPEAT_SECONDS_MAX)
            if self._dropped is not None:
                return outcome
            outcome = await self._store.store(group)
        self._is_unknown = False
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        return outcome

    def _next_number(self) -> int:
        return max(self.last_number, self._segments[-1].number if self._segments else 0) + 1

    async def checkpoint(self, segment: Segment) -> None:
        """Record the shard's next entry, offsets and producers at the end of this segment."""
        growing = segment.growing
        assert growing is not None
        producers = self._stored_producers.states(used_since_ns=segment.first_time_ns)
        next_entry = segment.last_entry + 1
        last_time_ns = segment.last_time_ns

        def records() -> list[ShardAt]:  # in a worker: there may be a million offsets
            offsets = [(*key, offset) for key, offset in growing.next_offsets().items()]
            return [
                ShardAt(
                    self._shard.journal,
                    self._shard.shard,
                    next_entry,
                    last_time_ns,
                    offsets,
                    producers,
                )
            ]

        await self._parts.catalogue.add_made(records)

    async def _show_stored(self) -> None:
        """Wait until readers can read the stored group, if there is one, and apply it."""
        if self._stored is not None:
            if self._stored.in_segment is not None:
                await self._stored.in_segment
            self._apply_stored()

    def _on_in_segment(self, done: asyncio.Future[None]) -> None:
        if self._stored is not None and self._stored.in_segment is done:
            self._apply_stored()
            _wake(self._room)
            _wake(self._idle)

    def _apply_stored(self) -> None:
        """Apply a stored group that readers can read: index it, show it to readers, answer its publishers."""
        if self._stored is None:
            return
        group, batches, in_segment = self._stored
        if in_segment is not None and not in_segment.done():
            return
        self._stored = None
        segment, position = group.segment, group.position
        growing = segment.growing
        assert growing is not None
        counters = self.counters
        for pending in batches:
            head = pending.envelope
            growing.add(head, [part.key for part in pending.partitions], position, pending.size)
            position += pending.size
            counters.messages += head.message_count
            if head.producer is not None:
                time_ns = int.from_bytes(head.receive_times, "little", signed=True)
                self._stored_producers.accept(
                    head.producer, head.term, head.number, head.entry, time_ns
                )
        describe_by(segment, growing)
        counters.entries += len(batches)
        counters.bytes += group.size
        self.visible_next_entry = group.next_entry
        self.queued_bytes -= group.size
        for pending in batches:
            head = pending.envelope
            for partition, base, count in zip(
                pending.partitions,
                head.column64(head.base_offsets),
                head.column32(head.counts),
                strict=True,
            ):
                partition.visible_next = base + count
        self._parts.listener.on_stored(
            self._shard,
            [VisibleBatch(pending.envelope, pending.body, pending.encoded) for pending in batches],
        )
        for pending in batches:
            for future, is_repeated in pending.answers:
                if not future.done():
                    future.set_result(pending.answer(Level.STORED, is_repeated=is_repeated))

    def _count_sync(self, took_ns: int) -> None:
        counters = self.counters
        counters.syncs += 1
        counters.sync_time_ns += took_ns
        counters.sync_time_max_ns = max(counters.sync_time_max_ns, took_ns)
        self._parts.listener.on_synced(self._shard, took_ns)

    # --- Failing ---

    def _fail(self, failed: Failed) -> None:
        """Undo the numbering of all batches that are not stored, and fail their answers."""
        if failed.needs_reopening:
            self._refusal = failed.error
        batches = [*self._group, *self._queue]
        if not batches:
            return  # dropped meanwhile
        self._group = []
        self._queue.clear()
        self.queued_bytes = 0
        self.next_entry = batches[0].envelope.entry
        for pending in batches:
            for partition in pending.partitions:
                partition.next_offset = partition.visible_next
            if pending.envelope.producer is not None:
                self._producers.reset(pending.envelope.producer, self._stored_producers)
        self._fail_answers(batches, failed.error)

    def _fail_answers(self, batches: Sequence[PendingBatch], failure: RunnelError) -> None:
        self.counters.failed_batches += len(batches)
        for pending in batches:
            if not pending.answers:
                self._unreported = failure
            for future, _ in pending.answers:
                if not future.done():
                    future.set_exception(failure)

    def drop(self, reason: RunnelError) -> None:
        """Give the shard up without storing what is queued: it is lost, or an outcome stays unknown for too long.

        No number is taken back, and nothing more is accepted or written. `reason` is for batches that the group store
        was never given: nothing of them is stored. `wait_idle` then waits until the store has let go of its files.
        """
        if self._dropped is not None:
            return
        self._dropped = self._refusal = reason
        never_given = list(self._queue)
        maybe_stored = [] if self._stored is None else self._stored.batches
        if self._is_attempted:
            maybe_stored = [*maybe_stored, *self._group]
        else:
            never_given = [*self._group, *never_given]
        self._stored = None
        self._group = []
        self._queue.clear()
        self.queued_bytes = 0
        self._fail_answers(never_given, reason)
        self._fail_answers(
            maybe_stored,
            Unavailable(
                f"shard {self._shard}: it is unknown whether this batch is stored: {reason}. A named publisher can "
                "send it again; without a name that may store it twice"
            ),
        )
        self._store.abandon()
        for task in (self._delay, self._giving_up):
            if task is not None:
                task.cancel()
        _wake(self._room)
        if not self._is_committing:
            _wake(self._idle)

    def _limit_unknown(self) -> None:
        """Give up later if the outcome is unknown and the shard takes no more batches."""
        is_due = self._is_unknown and self._is_ending and self._dropped is None
        if is_due and self._giving_up is None:
            self._giving_up = self._parts.tasks.start_awaited(self._give_up())

    async def _give_up(self) -> None:
        await self._parts.clock.sleep(UNKNOWN_SECONDS_MAX)
        self._giving_up = None
        assert self._refusal is not None
        self.drop(self._refusal)

    # --- At rest ---

    async def pause(self) -> None:
        """Finish the group under way, then write nothing until `resume`. Queued batches wait."""
        self.pause_at_once()
        while self._is_committing or self._stored is not None:
            await self._wait_committed()

    def pause_at_once(self) -> None:
        """Pause without waiting. For a writer with nothing under way."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        if self._queue and not self._is_committing:
            self._is_committing = True
            self._parts.tasks.start(self._commit())

    # --- Sealing ---

    def _retire(self, segment: Segment) -> None:
        self.unsealed.append(segment)
        self._parts.tasks.start(self.seal(segment))

    async def seal(self, segment: Segment) -> None:
        """Write a full segment's index. If that fails, the index stays in memory and a later call tries again."""
        async with self.sealing:
            if segment not in self.unsealed:
                return  # another task sealed it while this one waited for the lock
            try:
                await self._parts.workers.submit(self._folder.seal, segment)
            except OSError:
                return
            if segment in self.unsealed:
                self.unsealed.remove(segment)
            segment.growing = None

    async def end_active(self) -> None:
        """Close the active segment: record and seal it. Nothing more is written to it."""
        await self.wait_idle()
        active = self.active
        if active is None or self._dropped is not None:
            return
        # As during a commit: batches that arrive meanwhile wait, and then go to a new segment.
        self._is_committing = True
        try:
            await self.checkpoint(active)
            self.unsealed.append(active)
        finally:
            self._parts.tasks.start(self._commit())
        await self.seal(active)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(None)
    waiters.clear()
