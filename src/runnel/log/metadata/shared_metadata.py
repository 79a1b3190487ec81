"""Where the metadata of a log is recorded: in a journal of its own, or in a store that it shares with other logs.

Several logs may serve one data directory, each of them other shards. What belongs to a shard lies beside it and moves
with it; metadata belongs to all of them. So they record it in one place, and each log follows what the others record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from runnel.log.metadata.records import MetadataRecord

Apply = Callable[[], None]
Follow = Callable[[Sequence[MetadataRecord]], None]


class MetadataRecords(Protocol):
    """Records changes of metadata. A change is applied to the tables of its log once it is recorded."""

    def add(
        self,
        *records: MetadataRecord,
        apply: Apply | None = None,
        replaces: Mapping[str, bytes | None] | None = None,
    ) -> asyncio.Future[None]:
        """Add records. The future is done once they are stored and applied.

        `replaces` has the definitions that subscriptions must still have, by name; None: there is none. Where several
        logs change them it fails as Unavailable if another one was faster.
        """
        ...

    def add_made(
        self, make: Callable[[], Sequence[MetadataRecord]], apply: Apply | None = None
    ) -> asyncio.Future[None]:
        """Like `add`, for records that a worker makes because that takes a while."""
        ...

    async def take_term(self, producer: str, term: int) -> int:
        """Record that a named publisher takes this term, or the next one above those recorded before. Returns it."""
        ...

    async def pause(self) -> None:
        """Finish the write under way, then write nothing until `resume`. Records added meanwhile wait."""
        ...

    def resume(self) -> None:
        """Write again."""
        ...

    async def close(self, *records: MetadataRecord) -> None:
        """Write these records last. Nothing may be added any more."""
        ...

    def release(self) -> None:
        """End without writing anything."""
        ...


class SharedMetadata(MetadataRecords, Protocol):
    """One log's access to the metadata that it shares with others.

    Every log sees all records in the same order: those of others by `follow`, its own by their `apply`. Of two topics
    of one name and generation the first one recorded counts. If the second has the same policy, recording it does
    nothing; otherwise, or if the first was deleted meanwhile, it fails as Unavailable, after `follow` got the record of
    the first. So it is with the number of shards of a journal.

    A log that was opened again elsewhere, or whose node was declared dead, gets FencedError for every change.
    """

    @property
    def member(self) -> str:
        """The name of this log among those of its directory."""
        ...

    async def load(self, follow: Follow) -> Sequence[MetadataRecord]:
        """Read everything that is recorded. From now on `follow` gets what the other logs record, on the loop."""
        ...
