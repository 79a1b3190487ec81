"""An archive's Delta table: opens, upgrades, lists and changes it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Field, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, Transaction

from runnel.errors import ClientFault, FormatVersionError, Unavailable
from runnel.spark.pipelines.archive.file_sync import sync_path
from runnel.spark.pipelines.archive.file_writer import remove_files
from runnel.spark.pipelines.archive.layout import (
    CURRENT,
    PARTITION_COLUMNS,
    PROPERTY,
    STATISTICS,
    TIMES,
    ArchiveFile,
    Layout,
)

_LOG: Final = "_delta_log"
_STATISTICS_PROPERTY: Final = "delta.dataSkippingStatsColumns"
# Attempts at a transaction. If another writer was first, the next attempt begins with its version.
_ATTEMPTS_MAX: Final = 30
_RETRY_S: Final = 0.05


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the table. Values that its statistics do not have are None."""

    path: str  # within the table
    size_bytes: int
    rows: int | None
    topic: str
    date: date
    partition: int | None  # None also if the file has several
    first_offset: int | None
    last_offset: int | None
    first_receive_ns: int | None
    last_receive_ns: int | None


def table_path(table: str | os.PathLike[str]) -> Path:
    """The path of a table. ClientFault unless it is a directory, or could become one."""
    text = os.fspath(table)
    parts = urlsplit(text)
    if parts.scheme == "file":
        text = unquote(parts.path)
    elif "://" in text:
        raise ClientFault(
            f"table {text!r}: an archive is in a directory, on this machine or on a file system that all of "
            f"Spark's workers share; {parts.scheme}:// is not supported"
        )
    if not text:
        raise ClientFault("the table's path is empty: it must be a directory")
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ClientFault(f"table {str(path)!r} is a file: it must be a directory")
    return path


class ArchiveTable:
    """One version of the table. `reload` loads the newest; methods that change the table do so themselves."""

    def __init__(self, path: Path, delta: DeltaTable, layout: Layout) -> None:
        self.path = path
        self._delta = delta
        self._layout = layout

    @classmethod
    def open(
        cls,
        table: str | os.PathLike[str],
        *,
        version: int | None = None,
        layout: Layout = CURRENT,
    ) -> ArchiveTable:
        """Open it for reading. ClientFault if there is none; FormatVersionError if it is newer than this Runnel."""
        path = table_path(table)
        try:
            delta = DeltaTable(path, version=version)
        except TableNotFoundError:
            raise ClientFault(f"there is no archive in {str(path)!r}") from None
        except DeltaError as error:
            wanted = "" if version is None else f", version {version}"
            raise ClientFault(f"table {str(path)!r}{wanted}: {error}") from None
        opened = cls(path, delta, layout)
        opened._check()
        return opened

    @classmethod
    def prepare(cls, table: str | os.PathLike[str], *, layout: Layout = CURRENT) -> ArchiveTable:
        """Open it for writing: create it if there is none, upgrade it if it has an older layout."""
        path = table_path(table)
        if not (path / _LOG).exists():
            _create(path, layout)
        opened = cls.open(path, layout=layout)
        opened.bring_up_to_date()
        return opened

    def reload(self) -> None:
        self._delta.update_incremental()
        self._check()

    def _check(self) -> None:
        version = self.layout_version
        if version > self._layout.version:
            raise FormatVersionError(
                f"the archive {str(self.path)!r} has layout {version}, and this Runnel knows layouts up to "
                f"{self._layout.version}: use a newer one"
            )

    def bring_up_to_date(self) -> None:
        """Upgrade to the layout that it was opened with. Files stay unchanged; their new columns are null."""
        found = self.layout_version
        if found >= self._layout.version:
            return
        names = set(self._delta.schema().to_arrow().names)
        missing = [column for column in self._layout.added_since(found) if column.name not in names]
        if missing:
            fields = Schema.from_arrow(
                pa.schema([(column.name, column.kind) for column in missing])
            ).fields
            self._delta.alter.add_columns([Field(one.name, one.type) for one in fields])
        # Last, so that a table with a layout's version has all its columns.
        self._delta.alter.set_table_properties(
            {PROPERTY: str(self._layout.version)}, raise_if_not_exists=False
        )
        self.reload()

    # --- Properties ---

    @property
    def layout_version(self) -> int:
        text = self._delta.metadata().configuration.get(PROPERTY) or ""
        if not text.isdecimal():
            raise ClientFault(
                f"the Delta table {str(self.path)!r} is not an archive of Runnel's: it has no property {PROPERTY}; "
                "choose a directory of its own for the archive"
            )
        return int(text)

    @property
    def version(self) -> int:
        return int(self._delta.version())

    @property
    def table_id(self) -> str:
        return str(self._delta.metadata().id)

    def last_change_ms(self) -> int:
        """The time of its last change, in milliseconds since 1970."""
        return int(self._delta.history(1)[0]["timestamp"])

    def last_batch(self, app_id: str) -> int | None:
        """The last micro-batch of a query in the table."""
        found = self._delta.transaction_version(app_id)
        return None if found is None else int(found)

    # --- Content ---

    def topics(self) -> list[str]:
        return sorted(pc.unique(self._actions().column("partition.topic")).to_pylist())

    def files(self, wants_topic: Callable[[str], bool] = lambda _: True) -> list[StoredFile]:
        """The files of the wanted topics, in the order of topic, partition and offset."""
        actions = self._of_topics(wants_topic)
        columns = [_column(actions, name) for name in _STORED]
        found = [_stored(*values) for values in zip(*columns, strict=True)]
        return sorted(
            found, key=lambda file: (file.topic, file.partition or 0, file.first_offset or 0)
        )

    def next_offsets(
        self, wants_topic: Callable[[str], bool] = lambda _: True
    ) -> dict[tuple[str, int], int]:
        """The next offset after the table's last message, for each topic-partition.

        The table has all messages before it, because queries add them in order.
        """
        ends: dict[tuple[str, int], int] = {}
        for topic, partition, last in self._last_offsets(wants_topic):
            ends[topic, partition] = max(ends.get((topic, partition), 0), last + 1)
        return ends

    def _last_offsets(self, wants_topic: Callable[[str], bool]) -> Iterator[tuple[str, int, int]]:
        for file in self.files(wants_topic):
            if file.partition is not None and file.last_offset is not None:
                yield file.topic, file.partition, file.last_offset
                continue
            # Another program wrote the file, so it has to be read.
            rows = pq.read_table(
                self.path / file.path, columns=["partition", "offset"], partitioning=None
            )
            ends = rows.group_by("partition").aggregate([("offset", "max")])
            for row in ends.to_pylist():
                yield file.topic, row["partition"], row["offset_max"]

    def _actions(self) -> pa.Table:
        return pa.table(self._delta.get_add_actions(flatten=True))

    def _of_topics(self, wants_topic: Callable[[str], bool]) -> pa.Table:
        actions = self._actions()
        topics = actions.column("partition.topic")
        wanted = [name for name in pc.unique(topics).to_pylist() if wants_topic(name)]
        return actions.filter(pc.is_in(topics, pa.array(wanted, pa.string())))

    # --- Changes ---

    def add(
        self,
        files: Sequence[ArchiveFile],
        app_id: str,
        batch_id: int,
        *,
        may_repeat_offsets: bool = False,
    ) -> bool:
        """Add a query's micro-batch in one transaction. False if the table already has it; then removes the files.

        ClientFault if the table already has messages with these offsets from another source.
        """
        self._check_visible(files)
        self.reload()
        for _ in range(_ATTEMPTS_MAX):
            last = self.last_batch(app_id)
            if last is not None and last >= batch_id:
                return self._has(files)
            if not may_repeat_offsets:
                self._check_new(files)
            # Fails if another process has committed for the same query since the table was loaded.
            properties = CommitProperties(
                app_transactions=[Transaction(app_id, batch_id)],
                custom_metadata={"runnel.query": app_id, "runnel.batch": str(batch_id)},
            )
            try:
                self._commit([_add_action(file, is_new=True) for file in files], properties)
                return True
            except CommitFailedError:
                self._wait_and_reload()
        raise self._busy()

    def replace(self, old: Sequence[StoredFile], new: Sequence[ArchiveFile]) -> bool:
        """Replace files by others with the same rows. False if some no longer exist; then removes the new files."""
        names = {file.path for file in old}
        topics = {file.topic for file in old}
        self.reload()
        for _ in range(_ATTEMPTS_MAX):
            if not names <= {file.path for file in self.files(topics.__contains__)}:
                remove_files(self.path, new)
                return False
            # No other commit may come in between: two commits that replace the same file would double its rows.
            properties = CommitProperties(
                max_commit_retries=0, custom_metadata={"runnel.operation": "compaction"}
            )
            actions: list[AddAction | RemoveAction] = [_remove_action(file) for file in old]
            actions += [_add_action(file, is_new=False) for file in new]
            try:
                self._commit(actions, properties)
                return True
            except CommitFailedError:
                self._wait_and_reload()
        raise self._busy()

    def vacuum(self, older_hours: int) -> int:
        """Delete files that left the table this long ago, or are as old and never were in it; returns their number."""
        return len(
            self._delta.vacuum(
                older_hours, dry_run=False, enforce_retention_duration=False, full=True
            )
        )

    def _commit(
        self, actions: Sequence[AddAction | RemoveAction], properties: CommitProperties
    ) -> None:
        self._delta.create_write_transaction(
            list(actions),
            "append",
            self._delta.schema(),
            list(PARTITION_COLUMNS),
            commit_properties=properties,
        )
        self._delta.update_incremental()
        # Spark considers the micro-batch done when this returns, so no crash may undo it.
        sync_path(self.path / _LOG / f"{self._delta.version():020}.json")
        sync_path(self.path / _LOG)

    def _has(self, files: Sequence[ArchiveFile]) -> bool:
        """Whether the committed micro-batch consists of these files; if not, removes them."""
        stored = {file.path for file in self.files({file.topic for file in files}.__contains__)}
        if stored.isdisjoint(file.path for file in files):
            remove_files(self.path, files)
            return False
        return True

    def _wait_and_reload(self) -> None:
        time.sleep(_RETRY_S)
        self.reload()

    def _busy(self) -> Unavailable:
        return Unavailable(
            f"the archive {str(self.path)!r} is written to by too many at once: "
            f"{_ATTEMPTS_MAX} attempts at a transaction failed"
        )

    def _check_visible(self, files: Iterable[ArchiveFile]) -> None:
        for file in files:
            path = self.path / file.path
            if not path.exists() or path.stat().st_size != file.size_bytes:
                raise ClientFault(
                    f"{str(path)!r} was written by a worker of Spark's, but it is not here: the table must be in a "
                    "directory that the driver and all workers share"
                )

    def _check_new(self, files: Sequence[ArchiveFile]) -> None:
        ends = self.next_offsets({file.topic for file in files}.__contains__)
        for file in files:
            end = ends.get((file.topic, file.partition), 0)
            if file.first_offset < end:
                raise ClientFault(
                    f"the archive {str(self.path)!r} has {file.topic}[{file.partition}] up to offset {end - 1}, and "
                    f"would get offset {file.first_offset} again: another query archives the same topic into this "
                    "table, or this one has lost its checkpoint. Each topic needs one query, and a query its checkpoint"
                )


def _create(path: Path, layout: Layout) -> None:
    if path.exists() and any(path.iterdir()):
        raise ClientFault(
            f"the directory {str(path)!r} is not empty and has no archive in it: choose another"
        )
    try:
        DeltaTable.create(
            str(path),
            layout.schema,
            mode="ignore",  # another process may create it at the same time
            partition_by=list(PARTITION_COLUMNS),
            name=path.name,
            description="Messages archived by Runnel",
            configuration={
                PROPERTY: str(layout.version),
                _STATISTICS_PROPERTY: ",".join((*STATISTICS, *TIMES)),
            },
            raise_if_key_not_exists=False,
        )
    except (DeltaError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ClientFault(f"the table {str(path)!r} cannot be made: {reason}") from None


# --- Conversion to and from Delta's actions ---

_STORED: Final = (
    "path",
    "size_bytes",
    "num_records",
    "partition.topic",
    "partition.date",
    "min.partition",
    "max.partition",
    "min.offset",
    "max.offset",
    "min.receive_time_ns",
    "max.receive_time_ns",
)


def _column(actions: pa.Table, name: str) -> list[Any]:
    """The values of a column. A statistic that no file has gives no column, so all its values are None."""
    found = name in actions.column_names
    values: list[Any] = actions.column(name).to_pylist() if found else [None] * len(actions)
    return values


def _stored(
    path: str,
    size_bytes: int,
    rows: int | None,
    topic: str,
    day: date,
    first_partition: int | None,
    last_partition: int | None,
    first_offset: int | None,
    last_offset: int | None,
    first_receive_ns: int | None,
    last_receive_ns: int | None,
) -> StoredFile:
    return StoredFile(
        path=unquote(path),  # Delta's log has it as a URL
        size_bytes=size_bytes,
        rows=rows,
        topic=topic,
        date=day,
        partition=first_partition if first_partition == last_partition else None,
        first_offset=first_offset,
        last_offset=last_offset,
        first_receive_ns=first_receive_ns,
        last_receive_ns=last_receive_ns,
    )


def _add_action(file: ArchiveFile, *, is_new: bool) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.size_bytes,
        partition_values={"topic": file.topic, "date": file.date},
        modification_time=time.time_ns() // 10**6,
        data_change=is_new,
        stats=msgspec.json.encode(file.statistics).decode(),
    )


def _remove_action(file: StoredFile) -> RemoveAction:
    return RemoveAction(
        path=file.path,
        data_change=False,
        deletion_timestamp=time.time_ns() // 10**6,
        size=file.size_bytes,
        partition_values={"topic": file.topic, "date": file.date.isoformat()},
    )
