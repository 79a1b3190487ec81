"""Joins small files of an archive into large ones, and removes files that are no longer needed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from runnel.errors import ClientFault
from runnel.spark.pipelines.archive.file_writer import rewrite
from runnel.spark.pipelines.archive.table import ArchiveTable, StoredFile

TARGET_BYTES: Final = 128 * 2**20
VACUUM_OLDER_HOURS: Final = 7 * 24
# A micro-batch's files exist before its commit, and running queries may read files that were replaced meanwhile.
_VACUUM_OLDER_HOURS_MIN: Final = 1
# The limits of one transaction: small enough that little work is lost if it fails.
_TRANSACTION_BYTES: Final = 1024 * 2**20
_TRANSACTION_FILES: Final = 1000


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a compaction: files replaced, files written in their place, and files removed from the disk."""

    files_before: int
    files_after: int
    files_vacuumed: int


def compact(
    table: str | os.PathLike[str],
    *,
    target_bytes: int = TARGET_BYTES,
    vacuum_older_hours: int | None = VACUUM_OLDER_HOURS,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Compacted:
    """Join small files of an archive, and delete files that left the table more than `vacuum_older_hours` ago.

    Does not disturb readers or a running archive. `vacuum_older_hours` None: delete nothing. Once `is_wanted` returns
    False, it ends after the current step.
    """
    if target_bytes < 1:
        raise ClientFault(f"target_bytes is {target_bytes}: it must be a number from 1 on")
    if vacuum_older_hours is not None and vacuum_older_hours < _VACUUM_OLDER_HOURS_MIN:
        raise ClientFault(
            f"files are kept for at least {_VACUUM_OLDER_HOURS_MIN} hour after they were replaced, not "
            f"{vacuum_older_hours}: someone may be reading them"
        )
    opened = ArchiveTable.open(table)  # a missing table is a mistake, and is not created
    opened.bring_up_to_date()
    before = after = 0
    for step in _steps(groups(opened.files(), target_bytes)):
        if not is_wanted():
            break
        new = [
            file
            for group in step
            for file in rewrite(opened.path, group[0].topic, [old.path for old in group])
        ]
        old = [file for group in step for file in group]
        if opened.replace(old, new):
            before, after = before + len(old), after + len(new)
    vacuumed = 0
    if vacuum_older_hours is not None and is_wanted():
        opened.reload()
        vacuumed = opened.vacuum(vacuum_older_hours)
    return Compacted(files_before=before, files_after=after, files_vacuumed=vacuumed)


def groups(files: Iterable[StoredFile], target_bytes: int) -> Iterator[list[StoredFile]]:
    """The files to join: neighbours by offset of one topic, partition and day, up to the target size together.

    Files of half the target size or more stay, so that a row is rewritten a few times and not with every compaction.
    """
    together: dict[object, list[StoredFile]] = defaultdict(list)
    for file in files:
        if file.partition is not None:
            together[file.topic, file.partition, file.date].append(file)
    for neighbours in together.values():
        group: list[StoredFile] = []
        for file in sorted(neighbours, key=lambda one: one.first_offset or 0):
            is_large = file.size_bytes * 2 >= target_bytes
            size = sum(one.size_bytes for one in group)
            if group and (is_large or size + file.size_bytes > target_bytes):
                if len(group) > 1:
                    yield group
                group = []
            if not is_large:
                group.append(file)
        if len(group) > 1:
            yield group


def _steps(wanted: Iterable[list[StoredFile]]) -> Iterator[Sequence[list[StoredFile]]]:
    """Groups of files, combined for each transaction."""
    step: list[list[StoredFile]] = []
    size = count = 0
    for group in wanted:
        step.append(group)
        size += sum(file.size_bytes for file in group)
        count += len(group)
        if size >= _TRANSACTION_BYTES or count >= _TRANSACTION_FILES:
            yield step
            step, size, count = [], 0, 0
    if step:
        yield step
