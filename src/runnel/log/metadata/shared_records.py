"""Metadata that several logs of one test share: records in one list, which each log follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from runnel.errors import Unavailable
from runnel.log.metadata.records import MetadataRecord, TermTaken, TopicMade
from runnel.log.metadata.shared_metadata import Apply, Follow


class SharedRecords:
    """All records, in the order in which they were committed."""

    def __init__(self, records: Iterable[MetadataRecord] = ()) -> None:
        self.records = list(records)
        self.follows: dict[str, Follow] = {}

    def member(self, name: str) -> MemberMetadata:
        return MemberMetadata(self, name)

    def topic(self, name: str) -> TopicMade | None:
        """The newest record of a topic, deleted or not."""
        made = [each for each in self.records if isinstance(each, TopicMade) and each.name == name]
        return made[-1] if made else None

    def newest_term(self, producer: str) -> int:
        terms = [
            each.term
            for each in self.records
            if isinstance(each, TermTaken) and each.producer == producer
        ]
        return max(terms, default=-1)


class MemberMetadata:
    """One log's access. A commit takes a turn of the loop, during which others may commit."""

    def __init__(self, shared: SharedRecords, member: str) -> None:
        self._shared = shared
        self._member = member

    @property
    def member(self) -> str:
        return self._member

    async def load(self, follow: Follow) -> Sequence[MetadataRecord]:
        self._shared.follows[self._member] = follow
        return list(self._shared.records)

    def add(self, *records: MetadataRecord, apply: Apply | None = None) -> asyncio.Future[None]:
        return self.add_made(lambda: records, apply)

    def add_made(
        self, make: Callable[[], Sequence[MetadataRecord]], apply: Apply | None = None
    ) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        recorded: asyncio.Future[None] = loop.create_future()
        loop.call_soon(self._commit, make, apply, recorded)
        return recorded

    def _commit(
        self,
        make: Callable[[], Sequence[MetadataRecord]],
        apply: Apply | None,
        recorded: asyncio.Future[None],
    ) -> None:
        shared, new = self._shared, list(make())
        for record in list(new):
            known = shared.topic(record.name) if isinstance(record, TopicMade) else None
            if known is not None and known.generation >= record.generation:  # type: ignore[union-attr]
                if _policy(known) != _policy(record):
                    recorded.set_exception(Unavailable(f"{known.name} was made by another log"))
                    recorded.exception()
                    asyncio.get_running_loop().call_soon(shared.follows[self._member], [known])
                    return
                new.remove(record)
        shared.records += new
        if apply is not None:
            apply()
        for member, follow in shared.follows.items():
            if member != self._member and new:
                follow(new)
        if not recorded.done():
            recorded.set_result(None)

    async def take_term(self, producer: str, term: int) -> int:
        taken = max(term, self._shared.newest_term(producer) + 1)
        await self.add(TermTaken(producer, taken))
        return taken

    async def pause(self) -> None:
        """Nothing is written."""

    def resume(self) -> None:
        """Nothing is written."""

    async def close(self, *records: MetadataRecord) -> None:  # noqa: ARG002 - nothing is written
        self.release()

    def release(self) -> None:
        self._shared.follows.pop(self._member, None)


def _policy(record: MetadataRecord) -> object:
    assert isinstance(record, TopicMade)
    return record.keep, record.partitions, record.journal
