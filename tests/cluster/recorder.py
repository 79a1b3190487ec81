"""A process that records metadata in SQLite, as one of several, and prints what it does.

python -m tests.cluster.recorder FILE NAME COUNT TOTAL

It adds COUNT records, several at a time, and prints "stored N" for each one that is acknowledged. Once it has seen
TOTAL records of all processes it prints them in their order, and ends. With a COUNT of 0 it adds records without end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterable

from runnel.log.metadata.records import MetadataRecord, SubscriptionSet
from runnel.log.metadata.sqlite.database import ClusterDatabase
from runnel.log.metadata.sqlite.sqlite_metadata import SqliteMetadata

IN_FLIGHT = 4


def tell(text: str) -> None:
    print(text, flush=True)


class Recorder:
    """Notes each record that it sees: its own, and those of others."""

    def __init__(self, metadata: SqliteMetadata, total: int) -> None:
        self._metadata = metadata
        self._total = total
        self.seen: list[str] = []
        self.has_all = asyncio.Event()

    async def load(self) -> None:
        self._see(await self._metadata.load(self._see))

    def _see(self, found: Iterable[MetadataRecord]) -> None:
        self.seen += [each.name for each in found if isinstance(each, SubscriptionSet)]
        if len(self.seen) >= self._total:
            self.has_all.set()

    async def add(self, names: Iterable[str]) -> None:
        for name in names:
            record = SubscriptionSet(name, b"content of " + name.encode())
            await self._metadata.add(record, apply=lambda record=record: self._see([record]))  # type: ignore[misc]
            tell(f"stored {name}")


async def run(path: str, name: str, count: int, total: int) -> None:
    database = await ClusterDatabase.open(path)
    try:
        metadata = SqliteMetadata(database, name)
        recorder = Recorder(metadata, total)
        await recorder.load()
        tell("loaded")
        sys.stdin.readline()  # until all processes have loaded
        numbers = iter(range(count)) if count else itertools.count()
        names = (f"{name}/{number}" for number in numbers)
        await asyncio.gather(*(recorder.add(names) for _ in range(IN_FLIGHT)))
        await recorder.has_all.wait()
        await metadata.close()
    finally:
        await database.close()
    tell(json.dumps(recorder.seen))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
