"""`LogMetadata`, the base of every store's metadata: its views, and the terms of named publishers.

A store on disk records each change in its catalogue before it applies it to the tables. A store in memory just applies
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from runnel.errors import UnknownTopicError
from runnel.log.log import CursorView, LogTopic, ShardId, TopicView
from runnel.log.metadata.log_tables import LogTables
from runnel.log.metadata.topic_table import Topic, TopicTable
from runnel.platform.clock import Clock
from runnel.topics.names import Label, check_label
from runnel.topics.policies import Policy

_NS_PER_MS: Final = 1_000_000


class TableView:
    """The `TopicView` of a table of topics."""

    def __init__(self, table: TopicTable) -> None:
        self._table = table

    def has(self, name: str) -> bool:
        return self._table.find(name) is not None

    def find(self, name: str) -> LogTopic | None:
        topic = self._table.find(name)
        return None if topic is None else topic.info()

    def get(self, name: str) -> LogTopic:
        return self._known(name).info()

    def policy(self, name: str) -> Policy:
        return self._known(name).policy

    def shards_for(self, name: str, policy: Policy) -> Sequence[ShardId]:
        return self._table.shards_of_new(name, policy)

    def shard_of(self, name: str, partition: int) -> ShardId:
        return self._table.partition(name, partition).shard

    def names(self) -> list[str]:
        return self._table.names()

    def owned_by(self, owner: str) -> int:
        return self._table.owned_by(owner)

    def _known(self, name: str) -> Topic:
        topic = self._table.find(name)
        if topic is None:
            raise UnknownTopicError(f"topic {name!r} does not exist")
        return topic


class LogMetadata:
    """Answers from the tables of a store, and gives out terms. The stores' own metadata add the changes.

    `stored_term` returns the highest term of a named publisher that a shard has seen, -1 if none has.
    """

    def __init__(
        self,
        tables: LogTables,
        clock: Clock,
        check_open: Callable[[], None],
        stored_term: Callable[[str], int],
        member: str = "",
    ) -> None:
        self.member: Final = member
        self.topics: TopicView = TableView(tables.topics)
        self.cursors: CursorView = tables.cursors
        self._tables = tables
        self._clock = clock
        self._check_open = check_open
        self._stored_term = stored_term

    def subscriptions(self) -> dict[str, bytes]:
        return self._tables.subscriptions.all()

    def subscription(self, name: str) -> bytes | None:
        return self._tables.subscriptions.find(name)

    async def take_term(self, producer: str, above: int = -1) -> int:
        """See `MetadataStore`. A term is at least the wall clock's milliseconds."""
        self._check_open()
        check_label(Label.PRODUCER, producer)
        terms = self._tables.terms
        newest = max(terms.newest(producer), self._stored_term(producer), above)
        term = max(newest + 1, self._clock.time_ns() // _NS_PER_MS)
        terms.put(producer, term)
        return term
