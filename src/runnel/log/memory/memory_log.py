"""`MemoryLog`: the log in memory. It keeps the promises of the log on disk, except for surviving the process.

Each new one begins at offset 1 in a new epoch. A position of another epoch is gone. No call waits: methods are `async`
only because the interface says so.

A shard that is released loses its messages. When it is acquired again it begins at entry 1 in a higher epoch, and its
partitions continue behind their last offsets, so that no offset ever names two messages.

Several logs may serve shards in turn, under the terms that they record. Then a log serves the shards that it has
acquired. What another log had in memory is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

from runnel.config import Keep, Settings
from runnel.errors import ClientFault, ClosedError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.single_messages import messages_of
from runnel.log.ended_terms import EndedTerms
from runnel.log.log import (
    SCAN_BYTES,
    Appended,
    Capabilities,
    Chosen,
    Creator,
    EntryPage,
    Level,
    LogListener,
    LogStatistics,
    NullListener,
    OffsetBounds,
    PartitionPage,
    Position,
    Recovered,
    ShardId,
    SubscriptionHolds,
    TermRecords,
    Trimmed,
    Turn,
)
from runnel.log.memory.memory_metadata import MemoryMetadata
from runnel.log.memory.shard import MemoryShard
from runnel.log.memory.trimmer import MemoryJournal
from runnel.log.metadata.last_values import LastValues, fits
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.producers import ProducerTable
from runnel.log.metadata.state_journal import MemoryState
from runnel.log.metadata.topic_table import Partition, Topic, check_append, check_offset
from runnel.log.retention.holds import ShardHolds
from runnel.log.shard_view import ShardView, moved
from runnel.platform.clock import Clock
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Difference, Policies

_CAPABILITIES: Final = Capabilities(
    is_durable=False,
    is_reopenable=False,
    has_segment_files=False,
    has_free_space=False,
    keeps_positions=False,
)


class MemoryLog:
    """The log of the topics with one `keep`.

    The first epoch of its shards is its creation time unless given: later logs have higher ones. With `terms` it is one
    of several logs.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        policies: Policies,
        clock: Clock,
        keep: Keep = Keep.MEMORY,
        epoch: int | None = None,
        listener: LogListener | None = None,
        holds: SubscriptionHolds | None = None,
        terms: TermRecords | None = None,
    ) -> None:
        self._tables = LogTables(
            settings.limits,
            policies,
            self._on_topic_made,
            journal_shards=settings.log.journal_shards,
        )
        self._topics = self._tables.topics
        self._last_values = LastValues()
        self._listener = listener or NullListener()
        self._settings = settings
        self._policies = policies
        self._clock = clock
        self._keep = keep
        self._holds = holds
        self._first_epoch = clock.time_ns() if epoch is None else epoch
        self._shards: dict[ShardId, MemoryShard] = {}
        self._views: dict[ShardId, ShardView] = {}  # of the same shards
        self._journals: dict[str, MemoryJournal] = {}
        self._states: dict[ShardId, MemoryState] = {}
        self._released: dict[ShardId, int] = {}  # with their last epoch
        self._ended_terms = EndedTerms()
        self._terms = terms
        self._changing: dict[ShardId, asyncio.Lock] = {}  # held while a term begins or ends
        self._is_closed = False
        self.recovered: Final = Recovered()
        self.metadata: Final = MemoryMetadata(
            self._tables,
            self._last_values,
            self._shard,
            self._listener,
            clock,
            self._check_open,
            self._stored_term,
        )

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the log is closed")

    def _on_topic_made(self, topic: Topic) -> None:
        if topic.policy.keep is not self._keep:
            self._topics.forget(topic)
            raise ClientFault(
                f"topic {topic.name!r} has keep = {topic.policy.keep}; this log is for {self._keep}"
            )
        self._listener.on_topic_made(topic.info())

    def _shard(self, shard_id: ShardId) -> MemoryShard:
        """The shard, which begins with its first use. MovedError if it is not served here."""
        shard = self._shards.get(shard_id)
        if shard is None:
            if self._is_away(shard_id):
                raise moved(shard_id)
            shard = self._begin(shard_id, self._first_epoch)
        return shard

    def _is_away(self, shard_id: ShardId) -> bool:
        """Whether another log may serve it."""
        return shard_id not in self._shards and (
            self._terms is not None or shard_id in self._released
        )

    def _known_shard(self, shard_id: ShardId) -> MemoryShard:
        if shard_id not in self._shards and not self._topics.uses(shard_id):
            raise UnknownTopicError(f"there is no shard {shard_id}")
        return self._shard(shard_id)

    def _begin(self, shard_id: ShardId, epoch: int) -> MemoryShard:
        settings = self._settings
        shard = self._shards[shard_id] = MemoryShard(
            shard_id,
            self._policies.for_journal(shard_id.journal, keep=self._keep),
            self._clock,
            ProducerTable(settings.limits.producers_max, settings.log.producer_age_max_ns),
            settings.log,
            epoch,
            journal=self._journals.setdefault(shard_id.journal, MemoryJournal()),
            find=self._tables.find_partition,
            shard_holds=ShardHolds(shard_id, self._tables.cursors, self._holds),
            keep_last=self._keep_last,
            listener=self._listener,
        )
        self._views[shard_id] = ShardView(shard, epoch, self._topics, self._state)
        return shard

    def _state(self, shard: ShardId) -> MemoryState:
        return self._states.setdefault(shard, MemoryState())

    def _stored_term(self, producer: str) -> int:
        return max((shard.newest_term(producer) for shard in self._shards.values()), default=-1)

    # --- Ownership ---

    def shard(self, shard: ShardId) -> ShardView:
        view = self._views.get(shard)
        if view is None:
            self._check_open()
            self._known_shard(shard)
            view = self._views[shard]
        return view

    def shards(self) -> list[ShardId]:
        return list(self._shards)

    async def acquire(self, shard: ShardId, above: int = 0) -> ShardView:
        async with self._changing.setdefault(shard, asyncio.Lock()):
            self._check_open()
            view = self._views.get(shard)
            if view is None:
                former = max(above, self._released.get(shard, self._first_epoch - 1))
                epoch = max(self._first_epoch, self._clock.time_ns(), former + 1)
                if self._terms is not None:
                    await self._terms.begin(shard, epoch, 1, has_lock=False)
                    self._check_open()
                self._released.pop(shard, None)
                self._begin(shard, epoch)
                view = self._views[shard]
                self._listener.on_shard_acquired(view)
            return view

    async def release(self, shard: ShardId) -> None:
        async with self._changing.setdefault(shard, asyncio.Lock()):
            self._check_open()
            view = self._views.get(shard)
            if view is None:
                return
            await self._listener.before_release(view)
            if self._views.get(shard) is not view:
                return  # lost meanwhile
            next_entry = view.entries().next_offset
            self._end_term(shard, view)
            if self._terms is not None:
                await self._terms.end(shard, view.epoch, next_entry)

    async def drop(self, shard: ShardId) -> None:
        self._check_open()
        view = self._views.get(shard)
        if view is not None:
            self._end_term(shard, view)

    def _end_term(self, shard: ShardId, view: ShardView) -> None:
        if self._views.get(shard) is not view:
            return  # it has ended meanwhile, or the log was closed
        del self._views[shard]
        ended = self._shards.pop(shard)
        self._ended_terms.add(ended.statistics())
        ended.leave_journal()
        self._states.pop(shard, None)
        self._released[shard] = view.epoch
        for topic in self._topics:
            for partition in topic.partitions:
                if partition.shard == shard:
                    partition.floor = partition.next_offset
                    self._last_values.drop(partition.key)
        view.end()
        self._listener.on_shard_released(view)

    async def is_still_mine(self, shard: ShardId) -> bool:
        """No other log can have it: what is in this process's memory is nowhere else."""
        return shard in self._shards

    async def follow_rules(self) -> Sequence[Difference]:
        self._check_open()
        for shard_id, shard in self._shards.items():
            shard.use_policy(self._policies.for_journal(shard_id.journal, keep=self._keep))
        return await self._topics.follow_rules()

    # --- Appending ---

    def append(
        self,
        batch: Batch,
        level: Level = Level.STORED,
        creator: Creator | None = None,
        *,
        topics_made_max: int | None = None,
    ) -> asyncio.Future[Appended]:
        """See `MessageLog`."""
        self._check_open()
        level = check_append(batch, level, self._settings.limits)
        partitions = self._topics.resolve(batch.envelope, creator, topics_made_max)
        answer = self._shard(partitions[0].shard).append(batch, partitions, level)
        future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        future.set_result(answer)
        return future

    async def wait_room(self, shard: ShardId) -> None:
        """There is no queue, so there is room."""
        self._check_open()
        if self._is_away(shard):
            raise moved(shard)

    async def sync(self) -> None:
        self._check_open()

    # --- Reading ---

    async def read(
        self, topic: str, partition: int, offset: int, *, bytes_max: int = 2**20
    ) -> PartitionPage:
        self._check_open()
        found = self._topics.partition(topic, partition)
        check_offset(offset)
        return self._shard(found.shard).read(found, offset, bytes_max)

    async def read_shard(
        self, shard: ShardId, position: Position, *, bytes_max: int = SCAN_BYTES
    ) -> EntryPage:
        self._check_open()
        return self._known_shard(shard).read_entries(position, bytes_max)

    async def bounds(self, topic: str, partition: int) -> OffsetBounds:
        self._check_open()
        found = self._topics.partition(topic, partition)
        return self._shard(found.shard).bounds(found)

    async def offset_at(self, topic: str, partition: int, time_ns: int) -> int:
        self._check_open()
        found = self._topics.partition(topic, partition)
        return self._shard(found.shard).offset_at(found, time_ns)

    async def entry_at(self, shard: ShardId, time_ns: int) -> int:
        self._check_open()
        return self._known_shard(shard).entry_at(time_ns)

    async def count(self, shard: ShardId, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        self._check_open()
        return await self._known_shard(shard).count(entry, patterns, turn)

    async def messages_at(
        self, shard: ShardId, wanted: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[Sequence[Chosen], None]:
        self._check_open()
        found = self._known_shard(shard)
        lasting = self._tables.last_of(wanted)
        left = dict(wanted)
        for entry, keys in found.entries_with(wanted).items():
            # No variable: it would keep the batch in memory while the reader waits.
            yield found.choose(entry, keys, wanted, left, lasting)
        for key, offset in left.items():
            if key in lasting:
                message = self._last_values.at(lasting[key], offset)
                if message is not None:
                    yield (Chosen(message, (0,)),)

    def _keep_last(self, batch: Batch, partitions: Sequence[Partition]) -> None:
        """Keep the last messages of these partitions: the batch that holds them is about to be removed."""
        wanted = {
            partition.key: partition.visible_next - 1
            for partition in partitions
            if self._tables.keeps_last_value(partition)
        }
        if wanted:
            for key, message in messages_of(batch, wanted):
                if fits(message, self._settings.log):
                    self._last_values.put(key, message.pack())

    # --- Maintenance ---

    async def trim_shard(self, shard: ShardId) -> Trimmed:
        self._check_open()
        return self._known_shard(shard).trim()

    async def reopen(self, shard: ShardId) -> Sequence[str]:
        """No shard becomes read-only, so there is nothing to recover."""
        self._check_open()
        self._known_shard(shard)
        return ()

    async def checkpoint(self) -> tuple[str, str]:
        raise ClientFault("this broker keeps everything in memory: there is nothing to copy")

    async def drop_checkpoint(self) -> None:
        """Do nothing: there is none."""

    def statistics(self) -> LogStatistics:
        return LogStatistics(
            topics=len(self._topics),
            shards=[shard.statistics() for shard in self._shards.values()],
            open_files=0,
            damage=(),
            ended=self._ended_terms.statistics(),
        )

    async def close(self) -> None:
        """Drop all messages."""
        self._is_closed = True
        self._shards.clear()
        self._views.clear()
        self._journals.clear()
