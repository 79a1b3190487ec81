"""Metadata that several logs of one process share, in memory: records in one list, which each log follows.

For embedded clusters and tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from runnel.errors import FencedError, Unavailable
from runnel.log.metadata.records import (
    JournalMade,
    MetadataRecord,
    SubscriptionRemoved,
    SubscriptionSet,
    TermTaken,
    TopicDeleted,
    TopicMade,
)
from runnel.log.metadata.shared_metadata import Apply, Follow


class SharedRecords:
    """All records, in the order in which they were committed."""

    def __init__(self, records: Iterable[MetadataRecord] = ()) -> None:
        self.records = list(records)
        self.members: dict[str, MemberMetadata] = {}

    def member(self, name: str) -> MemberMetadata:
        return MemberMetadata(self, name)

    def topic(self, name: str) -> tuple[TopicMade | None, bool]:
        """The newest record of a topic, and whether it was deleted since."""
        made: TopicMade | None = None
        is_deleted = False
        for each in self.records:
            if isinstance(each, TopicMade) and each.name == name:
                made, is_deleted = each, False
            elif isinstance(each, TopicDeleted) and each.name == name:
                is_deleted = True
        return made, is_deleted

    def journal(self, name: str) -> JournalMade | None:
        made = [each for each in self.records if isinstance(each, JournalMade)]
        return next((each for each in made if each.name == name), None)

    def definition(self, name: str) -> bytes | None:
        content = None
        for each in self.records:
            if isinstance(each, SubscriptionSet) and each.name == name:
                content = each.content
            elif isinstance(each, SubscriptionRemoved) and each.name == name:
                content = None
        return content

    def newest_term(self, producer: str) -> int:
        terms = [
            each.term
            for each in self.records
            if isinstance(each, TermTaken) and each.producer == producer
        ]
        return max(terms, default=-1)


class MemberMetadata:
    """One log's access. A commit takes a turn of the loop, during which others may commit.

    `follow` gets what the others record.
    """

    def __init__(self, shared: SharedRecords, member: str) -> None:
        self._shared = shared
        self._member = member
        self.follow: Follow = lambda _: None
        self._queue: list[Callable[[], None]] = []
        self._is_paused = False

    @property
    def member(self) -> str:
        return self._member

    async def load(self, follow: Follow) -> Sequence[MetadataRecord]:
        self.follow = follow
        self._shared.members[self._member] = self
        return list(self._shared.records)

    def add(
        self,
        *records: MetadataRecord,
        apply: Apply | None = None,
        replaces: Mapping[str, bytes | None] | None = None,
    ) -> asyncio.Future[None]:
        return self._add(lambda: records, apply, replaces or {})

    def add_made(
        self, make: Callable[[], Sequence[MetadataRecord]], apply: Apply | None = None
    ) -> asyncio.Future[None]:
        return self._add(make, apply, {})

    def _add(
        self,
        make: Callable[[], Sequence[MetadataRecord]],
        apply: Apply | None,
        replaces: Mapping[str, bytes | None],
    ) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        recorded: asyncio.Future[None] = loop.create_future()
        self._queue.append(lambda: self._commit(make, apply, replaces, recorded))
        loop.call_soon(self._commit_next)
        return recorded

    def _commit_next(self) -> None:
        if self._queue and not self._is_paused:
            self._queue.pop(0)()

    def _commit(
        self,
        make: Callable[[], Sequence[MetadataRecord]],
        apply: Apply | None,
        replaces: Mapping[str, bytes | None],
        recorded: asyncio.Future[None],
    ) -> None:
        try:
            if self._shared.members.get(self._member) is not self:
                raise FencedError(f"{self._member} has not loaded, or was opened again")
            for name, content in replaces.items():
                if self._shared.definition(name) != content:
                    raise Unavailable(f"{name} was changed by another log")
            new = [record for record in make() if self._is_news(record)]
        except Unavailable as error:
            if not recorded.done():
                recorded.set_exception(error)
                recorded.exception()
            return
        self._shared.records += new
        if apply is not None:
            apply()
        for member in self._shared.members.values():
            if member is not self and new:
                member.follow(new)
        if not recorded.done():
            recorded.set_result(None)

    def _is_news(self, record: MetadataRecord) -> bool:
        if isinstance(record, TopicMade):
            known, is_deleted = self._shared.topic(record.name)
            if known is None or known.generation < record.generation:
                return True
            if is_deleted or _place(known) != _place(record):
                raise Unavailable(f"{known.name} was made by another log")
            return False
        if isinstance(record, JournalMade):
            journal = self._shared.journal(record.name)
            if journal is not None and journal.shards != record.shards:
                raise Unavailable(f"{journal.name} was made by another log")
            return journal is None
        return True

    async def take_term(self, producer: str, term: int) -> int:
        taken = term

        def make() -> Sequence[MetadataRecord]:
            nonlocal taken
            taken = max(term, self._shared.newest_term(producer) + 1)
            return [TermTaken(producer, taken)]

        await self.add_made(make)
        return taken

    async def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        for _ in self._queue:
            asyncio.get_running_loop().call_soon(self._commit_next)

    async def close(self, *records: MetadataRecord) -> None:
        if records:
            await self.add(*records)
        self.release()

    def release(self) -> None:
        if self._shared.members.get(self._member) is self:
            del self._shared.members[self._member]


def _place(record: TopicMade) -> object:
    return record.generation, record.keep, record.partitions, record.journal
