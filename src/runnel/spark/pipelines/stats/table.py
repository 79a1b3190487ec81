"""Stores figures in a Delta table, each micro-batch once, however often it is repeated."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import DeltaError

from runnel.errors import ClientFault
from runnel.spark.pipelines.stats.windows import FIGURES

# Each micro-batch adds a small file. After this many, the files are joined.
COMPACT_EVERY: Final = 100
_DESCRIPTION: Final = "runnel pipeline stats"

logger = logging.getLogger("runnel.spark")


def check_table(uri: str, *, must_be_new: bool = False) -> None:
    """ClientFault if the table has other columns than figures, or if it exists and `must_be_new`."""
    if "://" not in uri and Path(uri).is_file():
        raise ClientFault(f"the table {uri} is a file: it must be a directory")
    if not DeltaTable.is_deltatable(uri):
        return
    if must_be_new:
        raise ClientFault(
            f"there is a table at {uri} already, and history is counted from its beginning: "
            "give another path, or remove it"
        )
    _opened(uri)


def _opened(uri: str) -> DeltaTable:
    table = DeltaTable(uri)
    found = [(field.name, str(field.type)) for field in table.schema().fields]
    if found != [(field.name, str(field.type)) for field in _schema().fields]:
        raise ClientFault(
            f"the table at {uri} is not one of statistics: its columns are "
            f"{', '.join(name for name, _ in found)}. Give another path"
        )
    return table


def _schema() -> Schema:
    return Schema.from_arrow(FIGURES)


def append_once(uri: str, rows: pa.Table, *, query_id: str, batch_id: int) -> bool:
    """Add a micro-batch's figures unless the table has them; returns whether they were added."""
    if not DeltaTable.is_deltatable(uri):
        DeltaTable.create(uri, _schema(), mode="ignore", description=_DESCRIPTION)
    table = _opened(uri)
    last = table.transaction_version(query_id)
    if last is not None and last >= batch_id:
        return False
    commit = CommitProperties(app_transactions=[Transaction(query_id, batch_id)])
    write_deltalake(table, rows, mode="append", commit_properties=commit)
    table.update_incremental()
    if table.version() % COMPACT_EVERY == 0:
        _join_files(table)
    return True


def _join_files(table: DeltaTable) -> None:
    """Join small files. A failure is only logged, because the figures are stored anyway."""
    try:
        table.optimize.compact()
        table.vacuum(dry_run=False)  # removes files that left the table a week ago
    except (DeltaError, OSError) as error:
        logger.warning("%s: small files were not joined: %s", table.table_uri, error)


def write_new(uri: str, batches: Iterable[pa.RecordBatch]) -> None:
    """Write all these figures to a new table, in one transaction."""
    check_table(uri, must_be_new=True)
    reader = pa.RecordBatchReader.from_batches(FIGURES, batches)
    write_deltalake(uri, reader, mode="error", description=_DESCRIPTION)
