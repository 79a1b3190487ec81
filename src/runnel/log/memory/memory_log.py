"""`MemoryLog`: the log in memory. It keeps the promises of the log on disk, except for surviving the process.

Each new one begins at offset 1 in a new epoch. A position of another epoch is gone. No call waits: methods are `async`
only because the interface says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from runnel.config import Keep, Settings
from runnel.errors import ClientFault, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope
from runnel.log.log import (
    SCAN_BYTES,
    Appended,
    Chosen,
    Creator,
    CursorPosition,
    EntryPage,
    Level,
    LogListener,
    LogStatistics,
    LogTopic,
    NullListener,
    OffsetBounds,
    PartitionPage,
    Position,
    ShardId,
    SomeMade,
    Trimmed,
    Turn,
)
from runnel.log.memory.shard import MemoryShard
from runnel.log.metadata.last_values import fits, messages_of, only_message
from runnel.log.metadata.log_metadata import LogMetadata
from runnel.log.metadata.producers import ProducerTable
from runnel.log.metadata.state_journal import MemoryState
from runnel.log.metadata.topic_table import Partition, Topic, check_append, check_offset
from runnel.platform.clock import Clock
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Difference, Policies


class MemoryLog(LogMetadata):
    """The log of the topics with one `keep`. Its epoch is its creation time unless given: later logs have higher."""

    def __init__(
        self,
        *,
        settings: Settings,
        policies: Policies,
        clock: Clock,
        keep: Keep = Keep.MEMORY,
        epoch: int | None = None,
        listener: LogListener | None = None,
    ) -> None:
        super().__init__(settings, policies, self._on_topic_made)
        self._listener = listener or NullListener()
        self._settings = settings
        self._policies = policies
        self._clock = clock
        self._keep = keep
        self.epoch = clock.time_ns() if epoch is None else epoch
        self._shards: dict[ShardId, MemoryShard] = {}
        self._states: dict[ShardId, MemoryState] = {}

    def _on_topic_made(self, topic: Topic) -> None:
        if topic.policy.keep is not self._keep:
            self._topics.forget(topic)
            raise ClientFault(
                f"topic {topic.name!r} has keep = {topic.policy.keep}; this log is for {self._keep}"
            )
        self._listener.on_topic_made(topic.info())

    def _shard(self, shard_id: ShardId) -> MemoryShard:
        shard = self._shards.get(shard_id)
        if shard is None:
            settings = self._settings
            shard = self._shards[shard_id] = MemoryShard(
                shard_id,
                self._policies.for_journal(shard_id.journal, keep=self._keep),
                self._clock,
                ProducerTable(settings.limits.producers_max, settings.log.producer_age_max_ns),
                settings.log,
                self.epoch,
                find=self._find_partition,
                shard_holds=self._holds_on(shard_id),
                keep_last=self._keep_last,
                listener=self._listener,
            )
        return shard

    async def follow_rules(self) -> Sequence[Difference]:
        """Apply the current rules to retention. Returns where existing topics differ from the rules."""
        self._check_open()
        for shard_id, shard in self._shards.items():
            shard.use_policy(self._policies.for_journal(shard_id.journal, keep=self._keep))
        return await self._topics.follow_rules()

    def _known_shard(self, shard: ShardId) -> MemoryShard:
        known = self._shards.get(shard)
        if known is None:
            raise UnknownTopicError(f"there is no shard {shard}")
        return known

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

    def make_topics(
        self, envelope: Envelope, run: int, made_max: int, creator: Creator | None = None
    ) -> SomeMade:
        """Make up to `made_max` topics of a batch, from run `run` on, before the batch is appended."""
        self._check_open()
        return self._topics.make_some(envelope, run, made_max, creator)

    async def wait_room(self, shard: ShardId) -> None:  # noqa: ARG002 - there is no queue
        self._check_open()

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

    def newest_term(self, producer: str) -> int:
        """The highest term of a named publisher in any shard; -1 if the publisher is unknown."""
        return max((shard.newest_term(producer) for shard in self._shards.values()), default=-1)

    def entries(self, shard: ShardId) -> OffsetBounds:
        """The first entry of a shard, and its next one."""
        return self._known_shard(shard).entries()

    async def count(self, shard: ShardId, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        """Count a shard's messages from an entry on whose topics match. The count is exact or too high."""
        self._check_open()
        return await self._known_shard(shard).count(entry, patterns, turn)

    def count_stamp(self, shard: ShardId) -> tuple[int, int]:
        """A value that changes whenever `count` may rise. While it stays, `count` stays or falls."""
        known = self._known_shard(shard)
        return known.entries().next_offset, known.hide_count

    async def messages_at(
        self, shard: ShardId, wanted: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[Sequence[Chosen], None]:
        """Find messages of one shard, one offset per partition; yield the batches that hold them, one at a time.

        Missing messages are left out. The last message of a topic that keeps last values is found however old it is.
        """
        self._check_open()
        found = self._shard(shard)
        lasting = self._last_of(wanted)
        left = dict(wanted)
        for entry, keys in found.entries_with(wanted).items():
            # No variable: it would keep the batch in memory while the reader waits.
            yield found.choose(entry, keys, wanted, left, lasting)
        for key, offset in left.items():
            if key in lasting:
                message = self._last_values.at(lasting[key], offset)
                if message is not None:
                    yield (Chosen(message, (0,)),)

    async def last(self, topic: str, partition: int) -> Batch | None:
        """The last message of a partition, if the log still holds it or its topic keeps last values."""
        self._check_open()
        found = self._topics.partition(topic, partition)
        return await only_message(
            self.messages_at(found.shard, {found.key: found.visible_next - 1})
        )

    def _keep_last(self, batch: Batch, partitions: Sequence[Partition]) -> None:
        """Keep the last messages of these partitions: the batch that holds them is about to be removed."""
        wanted = {
            partition.key: partition.visible_next - 1
            for partition in partitions
            if self._keeps_last_value(partition)
        }
        if wanted:
            for key, message in messages_of(batch, wanted):
                if fits(message, self._settings.log):
                    self._last_values.put(key, message.pack())

    # --- Topics ---

    async def ensure_topic(self, name: str) -> LogTopic:
        """Get the topic, or make it."""
        self._check_open()
        return self._topics.ensure(name).info()

    async def purge_topic(self, name: str) -> None:
        """Hide all messages that are stored now, and free their room."""
        self._check_open()
        for partition in self._known_topic(name).partitions:
            partition.floor = partition.visible_next
            self._shard(partition.shard).hide(partition)
        self._last_values.forget(name)

    async def delete_topic(self, name: str) -> None:
        """Hide the topic and its messages. A new topic of this name continues after the last offset."""
        await self.purge_topic(name)
        self._topics.delete(name)
        self._listener.on_topic_deleted(name)

    # --- Cursors ---

    async def set_cursor(
        self, name: str, positions: Sequence[CursorPosition], owner: str = ""
    ) -> None:
        """Keep a named cursor. It holds the messages behind its positions until it is removed."""
        self._check_open()
        self._cursors.put(self._cursors.make(name, positions, self._clock.time_ns(), owner))

    async def remove_cursor(self, name: str) -> None:
        self._check_open()
        self._cursors.remove(name)

    # --- Subscriptions ---

    async def set_subscription(self, name: str, content: bytes) -> None:
        """Keep or replace the definition of a subscription."""
        self._check_open()
        self._subscriptions.check(name)
        self._subscriptions.put(name, content)

    async def remove_subscription(self, name: str) -> None:
        self._check_open()
        self._subscriptions.remove(name)

    def state(self, shard: ShardId) -> MemoryState:
        """The stand-in for the journal of subscriptions' progress in this shard. It keeps nothing."""
        return self._states.setdefault(shard, MemoryState())

    # --- Maintenance ---

    async def trim_shard(self, shard: ShardId) -> Trimmed:
        """Apply retention to one shard."""
        self._check_open()
        return self._known_shard(shard).trim()

    async def trim(self) -> Trimmed:
        self._check_open()
        return Trimmed.of([shard.trim() for shard in self._shards.values()])

    def shards(self) -> list[ShardId]:
        return list(self._shards)

    def statistics(self) -> LogStatistics:
        return LogStatistics(
            topics=len(self._topics),
            shards=[shard.statistics() for shard in self._shards.values()],
            open_files=0,
            damage=(),
        )

    async def close(self) -> None:
        """Drop all messages."""
        self._is_closed = True
        self._shards.clear()
