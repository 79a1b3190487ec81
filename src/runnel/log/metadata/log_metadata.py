"""`LogMetadata`, the base of every store: its topics, named cursors and subscription definitions, in memory.

A store on disk records each change in its catalogue before it applies it here. A store in memory just applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runnel.config import Settings
from runnel.errors import ClosedError, UnknownTopicError
from runnel.log.log import Cursor, LogTopic, ShardId, SubscriptionHolds
from runnel.log.metadata.cursors import CursorTable
from runnel.log.metadata.definitions import DefinitionTable
from runnel.log.metadata.last_values import LastValues
from runnel.log.metadata.topic_table import Partition, Topic, TopicTable
from runnel.log.retention.holds import ShardHolds
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Policies, Policy


class LogMetadata:
    """Answers questions that need no messages. `DiskLog` and `MemoryLog` inherit it."""

    def __init__(
        self, settings: Settings, policies: Policies, on_topic_made: Callable[[Topic], None]
    ) -> None:
        limits = settings.limits
        self._topics = TopicTable(policies, limits.topics_max, on_topic_made)
        self._cursors = CursorTable(limits.cursors_max, self._shard_of)
        self._subscriptions = DefinitionTable(limits.durable_subscriptions_max)
        self._last_values = LastValues()
        # The broker sets it. None: no subscription holds anything, and `until = "acked"` removes nothing.
        self.subscription_holds: SubscriptionHolds | None = None
        self._is_closed = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the log is closed")

    # --- Topics ---

    def topics(self) -> list[LogTopic]:
        return [topic.info() for topic in self._topics if not topic.is_deleted]

    def topic(self, name: str) -> LogTopic:
        return self._known_topic(name).info()

    def has_topic(self, name: str) -> bool:
        return self._topics.find(name) is not None

    def policy(self, name: str) -> Policy:
        """The policy of a topic that exists."""
        return self._known_topic(name).policy

    def topics_owned_by(self, owner: str) -> int:
        """The number of topics that this token made."""
        return self._topics.owned_by(owner)

    def floor(self, topic: str, partition: int) -> int:
        """Messages below this offset are hidden: purged, or of a deleted topic of the same name."""
        return self._topics.partition(topic, partition).floor

    def next_offset(self, topic: str, partition: int) -> int:
        """The offset behind the partition's last message that readers can see."""
        return self._topics.partition(topic, partition).visible_next

    def _known_topic(self, name: str) -> Topic:
        topic = self._topics.find(name)
        if topic is None:
            raise UnknownTopicError(f"topic {name!r} does not exist")
        return topic

    def _find_partition(self, key: TopicPartition) -> Partition | None:
        topic = self._topics.find(key[0])
        if topic is None or key[1] >= len(topic.partitions):
            return None
        return topic.partitions[key[1]]

    def _shard_of(self, key: TopicPartition) -> ShardId | None:
        partition = self._find_partition(key)
        return None if partition is None else partition.shard

    # --- Last values ---

    def _keeps_last_value(self, partition: Partition) -> bool:
        topic = self._topics.find(partition.key[0])
        return topic is not None and topic.policy.last_value

    def _last_of(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, Partition]:
        """The partitions whose wanted message is the last one and is kept whatever its age."""
        return {
            key: partition
            for key, offset in wanted.items()
            if (partition := self._find_partition(key)) is not None
            and offset == partition.visible_next - 1
            and self._keeps_last_value(partition)
        }

    # --- Cursors and subscriptions ---

    def cursors(self) -> list[Cursor]:
        return self._cursors.all()

    def cursors_owned_by(self, owner: str) -> int:
        """The number of cursors that this token made."""
        return self._cursors.owned_by(owner)

    def cursor_owner(self, name: str) -> str | None:
        """The token that made a cursor, empty if no token did; None: the cursor does not exist."""
        return self._cursors.owner(name)

    def subscriptions(self) -> dict[str, bytes]:
        """The definitions of durable subscriptions, by name."""
        return self._subscriptions.all()

    def _holds_on(self, shard: ShardId) -> ShardHolds:
        return ShardHolds(shard, self._cursors, lambda: self.subscription_holds)
