"""The journal of metadata, and the catalogue of each shard: journals of records that must outlive segments.

Both are journals of records (`record_journal`) whose owner's memory follows the file: a snapshot contains what the file
said before the write that triggers the snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from runnel.log.log import ShardId
from runnel.log.metadata import record_journal
from runnel.log.metadata.record_journal import Apply, LoadedRecords, RecordJournal
from runnel.log.metadata.records import Closed, MetadataRecord, Record, ShardRecord, TermTaken
from runnel.log.segments import paths
from runnel.log.segments.synced_marks import Mark, SyncedMarks
from runnel.platform.disk import Disk
from runnel.platform.workers import Workers

LoadedMetadata = LoadedRecords[MetadataRecord]
LoadedCatalogue = LoadedRecords[ShardRecord]

_metadata_decoder: Final = msgspec.msgpack.Decoder(list[MetadataRecord])
_shard_decoder: Final = msgspec.msgpack.Decoder(list[ShardRecord])
_format_one_decoder: Final = msgspec.msgpack.Decoder(list[Record])


class MetadataJournal(RecordJournal[MetadataRecord]):
    """The metadata of a data directory, for the process that writes it."""

    def __init__(
        self,
        disk: Disk,
        workers: Workers,
        folder: str,
        *,
        marks: SyncedMarks,
        bytes_max: int,
        snapshot: Callable[[], Sequence[MetadataRecord]],
    ) -> None:
        super().__init__(
            disk,
            workers,
            folder,
            _metadata_decoder,
            marks=marks,
            name="the metadata",
            bytes_max=bytes_max,
            snapshot=snapshot,
        )

    def add(
        self,
        *records: MetadataRecord,
        apply: Apply | None = None,
        replaces: Mapping[str, bytes | None] | None = None,  # noqa: ARG002 - nobody else changes any
    ) -> asyncio.Future[None]:
        """See `MetadataRecords`."""
        return self.add_made(lambda: records, apply)

    async def take_term(self, producer: str, term: int) -> int:
        """See `MetadataRecords`. Nobody else takes terms, so this one is recorded as it is."""
        await self.add(TermTaken(producer, term))
        return term


class ShardCatalogue(RecordJournal[ShardRecord]):
    """The catalogue of one shard, for its owner, who sets `snapshot` before anything is added.

    It has no file before its first record, and keeps no file open between two writes.
    """

    def __init__(
        self,
        disk: Disk,
        workers: Workers,
        shard: ShardId,
        shard_folder: str,
        *,
        marks: SyncedMarks,
        bytes_max: int,
        make_shard_folder: Callable[[], None],
    ) -> None:
        self.folder: Final = paths.catalogue_folder(shard_folder)
        self.snapshot: Callable[[], Iterable[ShardRecord]] | None = None
        self.is_changed = False
        """Records have been added since it was opened, or it did not end in good order before."""
        super().__init__(
            disk,
            workers,
            self.folder,
            _shard_decoder,
            marks=marks,
            name=f"the catalogue of shard {shard}",
            bytes_max=bytes_max,
            snapshot=self._all_known,
            before_begin=make_shard_folder,
            keeps_open=False,
            remedy="the shard is reopened",
        )

    def add_made(
        self, make: Callable[[], Sequence[ShardRecord]], apply: Apply | None = None
    ) -> asyncio.Future[None]:
        self.is_changed = True
        return super().add_made(make, apply)

    def begin(self, records: Sequence[ShardRecord]) -> None:
        self.is_changed = True
        super().begin(records)

    async def end(self, epoch: int) -> None:
        """Close it in good order."""
        await self.close(*((Closed(epoch),) if self.is_changed else ()))

    def _all_known(self) -> Iterable[ShardRecord]:
        assert self.snapshot is not None
        return self.snapshot()


def read_metadata(disk: Disk, directory: str, mark: Mark | None = None) -> LoadedMetadata:
    """Read the metadata beside its owner: see `record_journal.read_newest`."""
    folder = f"{directory}/{paths.METADATA}"
    return record_journal.read_newest(disk, folder, _metadata_decoder, mark)


def read_catalogue(disk: Disk, shard_folder: str, mark: Mark | None = None) -> LoadedCatalogue:
    """Read the catalogue of a shard beside its owner: see `record_journal.read_newest`."""
    folder = paths.catalogue_folder(shard_folder)
    return record_journal.read_newest(disk, folder, _shard_decoder, mark)


def read_format_one(disk: Disk, directory: str, mark: Mark | None = None) -> LoadedRecords[Record]:
    """Read the catalogue of a directory of format 1, which has all records."""
    folder = f"{directory}/{paths.CATALOGUE}"
    return record_journal.read_newest(disk, folder, _format_one_decoder, mark)
