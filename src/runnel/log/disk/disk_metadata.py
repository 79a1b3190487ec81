"""`DiskMetadata`: the topics, cursors, subscriptions and terms of a data directory. Each change is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import EllipsisType

from runnel.formats.envelope import Envelope
from runnel.log.disk.topic_creation import TopicCreation
from runnel.log.disk.topic_removal import TopicRemoval
from runnel.log.log import Creator, CursorPosition, LogTopic, SomeMade
from runnel.log.metadata import records
from runnel.log.metadata.log_metadata import LogMetadata
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.shared_metadata import MetadataRecords
from runnel.platform.clock import Clock


class DiskMetadata(LogMetadata):
    """Records changes, then applies them to the tables."""

    def __init__(
        self,
        tables: LogTables,
        recorded: MetadataRecords,
        creation: TopicCreation,
        removal: TopicRemoval,
        clock: Clock,
        check_open: Callable[[], None],
        stored_term: Callable[[str], int],
        member: str,
    ) -> None:
        super().__init__(tables, clock, check_open, stored_term, member)
        self._recorded = recorded
        self._creation = creation
        self._removal = removal

    # --- Topics ---

    async def ensure_topic(self, name: str) -> LogTopic:
        self._check_open()
        try:
            topic = self._tables.topics.ensure(name)
        finally:
            self._creation.record()
        for recorded in self._creation.unrecorded((name,)):
            await asyncio.shield(recorded)  # batches wait for the same future
        return topic.info()

    async def make_topics(
        self, envelope: Envelope, run: int, made_max: int, creator: Creator | None = None
    ) -> SomeMade:
        self._check_open()
        try:
            return self._tables.topics.make_some(envelope, run, made_max, creator)
        finally:
            self._creation.record()

    async def purge_topic(self, name: str, *, part_only: bool = False) -> None:
        self._check_open()
        await self._removal.purge(name, part_only=part_only)

    async def delete_topic(self, name: str, *, part_only: bool = False) -> None:
        self._check_open()
        await self._removal.delete(name, part_only=part_only)

    # --- Cursors ---

    async def set_cursor(
        self, name: str, positions: Sequence[CursorPosition], owner: str = ""
    ) -> None:
        self._check_open()
        cursors = self._tables.cursors
        cursor = cursors.make(name, positions, self._clock.time_ns(), owner)
        await self._recorded.add(records.CursorSet(cursor), apply=lambda: cursors.put(cursor))

    async def remove_cursor(self, name: str) -> None:
        self._check_open()
        await self._recorded.add(
            records.CursorRemoved(name), apply=lambda: self._tables.cursors.remove(name)
        )

    # --- Subscriptions ---

    async def set_subscription(
        self, name: str, content: bytes, *, replaces: bytes | EllipsisType | None = ...
    ) -> None:
        self._check_open()
        subscriptions = self._tables.subscriptions
        subscriptions.check(name)
        subscriptions.check_replaced(name, replaces)
        await self._recorded.add(
            records.SubscriptionSet(name, content),
            apply=lambda: subscriptions.put(name, content),
            replaces=None if replaces is ... else {name: replaces},
        )

    async def remove_subscription(self, name: str) -> None:
        self._check_open()
        await self._recorded.add(
            records.SubscriptionRemoved(name),
            apply=lambda: self._tables.subscriptions.remove(name),
        )

    # --- Terms of named publishers ---

    async def take_term(self, producer: str, above: int = -1) -> int:
        term = await super().take_term(producer, above)
        recorded = await self._recorded.take_term(producer, term)
        self._tables.terms.put(producer, recorded)
        return recorded
