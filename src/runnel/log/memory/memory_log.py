"""The log that forgets: the same promises as on disk, but for surviving the process.

Made anew, it begins at offset 1 in a new epoch; a position of another epoch is answered as gone. No call waits for
anything, so whatever is `async` here is so for the interface.
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
    Trimmed,
)
from runnel.log.match_count import Turn
from runnel.log.memory.shard import MemoryShard
from runnel.log.metadata.last_values import fits, messages_of, only
from runnel.log.metadata.log_metadata import LogMetadata
from runnel.log.metadata.producers import ProducerTable
from runnel.log.metadata.state_journal import MemoryState
from runnel.log.metadata.topic_table import (
    Partition,
    SomeMade,
    Topic,
    check_append,
    check_offset,
)
from runnel.platform.clock import Clock
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Difference, Policies


class MemoryLog(LogMetadata):
    """Topics of one `keep`. The epoch is the time of making, unless given: later logs have higher ones."""

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
        """Retain as the rules say now; what stays as it was made, though they say otherwise."""
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
        """See `Log`. ManyTopicsError: more than so many topics would have to be made."""
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
        """Make topics of a batch before it is appended, from a run on: at most so many."""
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
        """The highest term of a named publisher in any shard; -1 if it is not known."""
        return max((shard.newest_term(producer) for shard in self._shards.values()), default=-1)

    def entries(self, shard: ShardId) -> OffsetBounds:
        """The first entry of a shard and the next to come."""
        return self._known_shard(shard).entries()

    async def count(self, shard: ShardId, entry: int, patterns: tuple[str, ...], turn: Turn) -> int:
        """Messages of a shard from an entry on whose topics match: right, or too high."""
        self._check_open()
        return await self._known_shard(shard).count(entry, patterns, turn)

    def count_stamp(self, shard: ShardId) -> tuple[int, int]:
        """While this is the same, so is `count`, or it is less."""
        known = self._known_shard(shard)
        return known.entries().next_offset, known.hidings

    async def messages_at(
        self, shard: ShardId, wanted: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[Sequence[Chosen], None]:
        """These messages of one shard, an offset a partition: the batches that hold them, one at a time.

        What is not there is left out; the last message of a topic that keeps last values is there, however old it is.
        """
        self._check_open()
        found = self._shard(shard)
        lasting = self._last_of(wanted)
        left = dict(wanted)
        for entry, keys in found.entries_with(wanted).items():
            # In no variable: it would keep the batch from leaving while the reader waits.
            yield found.choose(entry, keys, wanted, left, lasting)
        for key, offset in left.items():
            if key in lasting:
                message = self._last_values.at(lasting[key], offset)
                if message is not None:
                    yield (Chosen(message, (0,)),)

    async def last(self, topic: str, partition: int) -> Batch | None:
        """The last message of a partition, if the log still has it or its topic keeps last values."""
        self._check_open()
        found = self._topics.partition(topic, partition)
        return await only(self.messages_at(found.shard, {found.key: found.visible_next - 1}))

    def _keep_last(self, batch: Batch, partitions: Sequence[Partition]) -> None:
        """The batch with the last messages of these partitions leaves."""
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
        """The topic, made now if there is none."""
        self._check_open()
        return self._topics.ensure(name).info()

    async def purge_topic(self, name: str) -> None:
        """Hide all messages that are there now and free their room."""
        self._check_open()
        for partition in self._known_topic(name).partitions:
            partition.floor = partition.visible_next
            self._shard(partition.shard).hide(partition)
        self._last_values.forget(name)

    async def delete_topic(self, name: str) -> None:
        """Hide the topic and its messages. Made again, it goes on after its last offset."""
        await self.purge_topic(name)
        self._topics.delete(name)
        self._listener.on_topic_deleted(name)

    # --- Cursors ---

    async def set_cursor(
        self, name: str, positions: Sequence[CursorPosition], owner: str = ""
    ) -> None:
        """Keep a named position. It holds retention back for what lies behind it, until removed."""
        self._check_open()
        self._cursors.put(self._cursors.make(name, positions, self._clock.time_ns(), owner))

    async def remove_cursor(self, name: str) -> None:
        self._check_open()
        self._cursors.remove(name)

    # --- Subscriptions ---

    async def set_subscription(self, name: str, content: bytes) -> None:
        """Keep the definition of a subscription, or another one in its place."""
        self._check_open()
        self._subscriptions.check(name)
        self._subscriptions.put(name, content)

    async def remove_subscription(self, name: str) -> None:
        self._check_open()
        self._subscriptions.remove(name)

    def state(self, shard: ShardId) -> MemoryState:
        """Where subscriptions would write down what they have done in this shard, if anything were kept."""
        return self._states.setdefault(shard, MemoryState())

    # --- Keeping house ---

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
        """All messages are gone."""
        self._is_closed = True
        self._shards.clear()
