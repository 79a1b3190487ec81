"""`MemoryMetadata`: the topics, cursors and subscriptions of a log in memory. A change is applied at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import EllipsisType

from runnel.errors import MovedError, UnknownTopicError
from runnel.formats.envelope import Envelope
from runnel.log.log import Creator, CursorPosition, LogListener, LogTopic, ShardId, SomeMade
from runnel.log.memory.shard import MemoryShard
from runnel.log.metadata.last_values import LastValues
from runnel.log.metadata.log_metadata import LogMetadata
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.topic_table import Partition
from runnel.platform.clock import Clock


class MemoryMetadata(LogMetadata):
    """Applies changes to the tables, and hides messages in the shards. `shard` raises MovedError if it is not here."""

    def __init__(
        self,
        tables: LogTables,
        last_values: LastValues,
        shard: Callable[[ShardId], MemoryShard],
        listener: LogListener,
        clock: Clock,
        check_open: Callable[[], None],
        stored_term: Callable[[str], int],
    ) -> None:
        super().__init__(tables, clock, check_open, stored_term)
        self._last_values = last_values
        self._shard = shard
        self._listener = listener

    # --- Topics ---

    async def ensure_topic(self, name: str) -> LogTopic:
        self._check_open()
        return self._tables.topics.ensure(name).info()

    async def make_topics(
        self, envelope: Envelope, run: int, made_max: int, creator: Creator | None = None
    ) -> SomeMade:
        self._check_open()
        return self._tables.topics.make_some(envelope, run, made_max, creator)

    async def purge_topic(self, name: str, *, part_only: bool = False) -> None:
        """Hide all messages that are stored now, and free their room."""
        self._check_open()
        topic = self._tables.topics.find(name)
        if topic is None:
            raise UnknownTopicError(f"topic {name!r} does not exist")
        served: list[tuple[Partition, MemoryShard]] = []
        for partition in topic.partitions:
            with suppress(*((MovedError,) if part_only else ())):
                served.append((partition, self._shard(partition.shard)))
        for partition, shard in served:
            partition.floor = partition.visible_next
            shard.hide(partition)
        self._last_values.forget(name)

    async def delete_topic(self, name: str, *, part_only: bool = False) -> None:
        await self.purge_topic(name, part_only=part_only)
        self._tables.topics.delete(name)
        self._listener.on_topic_deleted(name)

    # --- Cursors ---

    async def set_cursor(
        self, name: str, positions: Sequence[CursorPosition], owner: str = ""
    ) -> None:
        self._check_open()
        cursors = self._tables.cursors
        cursors.put(cursors.make(name, positions, self._clock.time_ns(), owner))

    async def remove_cursor(self, name: str) -> None:
        self._check_open()
        self._tables.cursors.remove(name)

    # --- Subscriptions ---

    async def set_subscription(
        self, name: str, content: bytes, *, replaces: bytes | EllipsisType | None = ...
    ) -> None:
        self._check_open()
        self._tables.subscriptions.check(name)
        self._tables.subscriptions.check_replaced(name, replaces)
        self._tables.subscriptions.put(name, content)

    async def remove_subscription(self, name: str) -> None:
        self._check_open()
        self._tables.subscriptions.remove(name)
