"""Migrates directories of format 1, which had one catalogue for all shards, and one epoch; and those of format 2 to 4.

A directory is recovered from its old catalogue as it always was, damage included. Then the metadata and the catalogue
of each shard are written as snapshots of what was recovered, and last the new number of the format. Until then the old
catalogue counts: new files beside it are of a migration that a crash has cut short, and are removed.

Before several brokers serve a directory for the first time, its metadata goes into `cluster.sqlite`. Again the number
of the format comes last: the file counts beside number 4, and the journal of metadata beside number 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from runnel.log.metadata.catalogue import MetadataJournal, ShardCatalogue, read_format_one
from runnel.log.metadata.record_journal import LoadedRecords
from runnel.log.metadata.records import MetadataRecord, Record, ShardRecord
from runnel.log.metadata.sqlite.conversion import make_file, remove_file
from runnel.log.segments import paths
from runnel.log.segments.format_file import FORMAT, SHARED_FORMAT, read_format, write_format
from runnel.log.segments.synced_marks import Mark, SyncedMarks
from runnel.platform.disk import Disk


def load_former(disk: Disk, directory: str, mark: Mark | None) -> LoadedRecords[Record]:
    """Read the old catalogue. Blocks, and changes nothing."""
    try:
        return read_format_one(disk, directory, mark)
    except FileNotFoundError:
        return LoadedRecords((), (), None)


def discard_unfinished(disk: Disk, directory: str, marks: SyncedMarks) -> None:
    """Remove what a migration that was cut short has left. Blocks."""
    root = f"{directory}/{paths.JOURNALS}"
    shards = [
        f"{root}/{journal}/{shard}"
        for journal in disk.list(root)
        for shard in disk.list(f"{root}/{journal}")
        if shard.isdecimal()
    ]
    folders = [f"{directory}/{paths.METADATA}", *map(paths.catalogue_folder, shards)]
    for folder in folders:
        _remove_folder(disk, folder)
    marks.forget(folders)


def migrate(
    disk: Disk,
    directory: str,
    metadata: MetadataJournal,
    of_metadata: Sequence[MetadataRecord],
    of_shards: Iterable[tuple[ShardCatalogue, Sequence[ShardRecord]]],
    marks: SyncedMarks,
) -> None:
    """Write a recovered directory in the present format: the shards first, the number of the format last. Blocks."""
    for catalogue, found in of_shards:
        catalogue.begin(found)
    metadata.begin(of_metadata)
    former = read_format(disk, directory)
    write_format(disk, directory, msgspec.structs.replace(former, format=FORMAT))
    discard_former(disk, directory, marks)


def discard_former(disk: Disk, directory: str, marks: SyncedMarks) -> None:
    """Remove the catalogue of format 1, if it is there. Blocks."""
    folder = f"{directory}/{paths.CATALOGUE}"
    _remove_folder(disk, folder)
    marks.forget([folder])


# --- Format 4 ---


def share(
    disk: Disk, directory: str, of_metadata: Sequence[MetadataRecord], marks: SyncedMarks
) -> None:
    """Let the metadata of a directory of format 2 be in SQLite. Blocks. No log has the directory open."""
    make_file(disk, f"{directory}/{paths.CLUSTER_FILE}", of_metadata)
    former = read_format(disk, directory)
    write_format(disk, directory, msgspec.structs.replace(former, format=SHARED_FORMAT))
    discard_journal(disk, directory, marks)


def discard_journal(disk: Disk, directory: str, marks: SyncedMarks) -> None:
    """Remove the journal of metadata of a directory of format 4, if it is there, and its mark. Blocks."""
    folder = f"{directory}/{paths.METADATA}"
    _remove_folder(disk, folder)
    marks.forget([folder])


def discard_unshared(disk: Disk, directory: str) -> None:
    """Remove the file of SQLite of a directory that was not marked as shared before a crash. Blocks."""
    for suffix in ("", paths.UNFINISHED_SUFFIX):
        remove_file(disk, f"{directory}/{paths.CLUSTER_FILE}{suffix}")


def _remove_folder(disk: Disk, folder: str) -> None:
    for name in disk.list(folder):
        disk.remove(f"{folder}/{name}")
    with suppress(FileNotFoundError):
        disk.remove(folder)
