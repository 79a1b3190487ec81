"""The archive's Delta table: what it takes, once; what it refuses; and who else can read it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from runnel.errors import ClientFault, CorruptionError, FormatVersionError
from runnel.spark.pipelines.archive import query_record
from runnel.spark.pipelines.archive.compaction import Compacted, compact, groups
from runnel.spark.pipelines.archive.job import ArchivePlan, topic_options
from runnel.spark.pipelines.archive.layout import CURRENT, PROPERTY, Column, Layout
from runnel.spark.pipelines.archive.query_record import QueryRecord
from runnel.spark.pipelines.archive.status import archive_status
from runnel.spark.pipelines.archive.table import ArchiveTable, StoredFile, table_path
from tests.spark.pipelines.archived_rows import ODD_TOPICS, START_NS, rows, write

NEWER = Layout(2, (*CURRENT.columns, Column("partition_key", pa.binary(), since=2)))


@pytest.fixture
def table(tmp_path: Path) -> ArchiveTable:
    return ArchiveTable.prepare(tmp_path / "table")


def fill(
    table: ArchiveTable, batch_id: int, first_offset: int, count: int, topics: Sequence[str] = "a"
) -> bool:
    """So many messages of each topic, with offsets of their own."""
    files = [
        file
        for topic in topics
        for file in write(table.path, rows([topic] * count, first_offset=first_offset))
    ]
    return table.add(files, "q", batch_id)


def offsets(table: ArchiveTable, topic: str = "a") -> list[int]:
    """By a reader that knows nothing of Runnel."""
    found = DeltaTable(table.path).to_pyarrow_table()
    return sorted(
        row["offset"]
        for row in found.select(["topic", "offset"]).to_pylist()
        if row["topic"] == topic
    )


def parquet_files(table: ArchiveTable) -> set[Path]:
    return {path for path in table.path.rglob("*.parquet") if "_delta_log" not in path.parts}


# --- Once ---


def test_a_batch_that_is_added_again_is_there_once_and_leaves_no_file(table: ArchiveTable) -> None:
    assert fill(table, 0, 1, 3)
    before = parquet_files(table)
    assert not fill(table, 0, 1, 3)
    assert offsets(table) == [1, 2, 3]
    assert parquet_files(table) == before
    assert fill(table, 1, 4, 2)
    assert not fill(table, 0, 1, 3)
    assert offsets(table) == [1, 2, 3, 4, 5]


def test_two_drivers_of_one_query_add_a_batch_once(table: ArchiveTable) -> None:
    others = [ArchiveTable.open(table.path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        added = list(pool.map(lambda other: fill(other, 0, 1, 3), others))
    assert sorted(added) == [False, False, False, True]
    assert offsets(table) == [1, 2, 3]
    assert len(parquet_files(table)) == 1


def test_queries_of_different_topics_fill_one_table(table: ArchiveTable) -> None:
    assert fill(table, 0, 1, 2)
    other = write(table.path, rows(["b"]))
    assert table.add(other, "another", 0)
    assert table.topics() == ["a", "b"]
    assert (table.last_batch("q"), table.last_batch("another"), table.last_batch("x")) == (
        0,
        0,
        None,
    )


def test_offsets_that_are_there_are_refused_from_elsewhere(table: ArchiveTable) -> None:
    fill(table, 0, 1, 5)
    again = write(table.path, rows(["a"] * 2, first_offset=5))
    with pytest.raises(
        ClientFault, match=r"has a\[0\] up to offset 5, and would get offset 5 again"
    ):
        table.add(again, "another", 0)
    assert offsets(table) == [1, 2, 3, 4, 5]
    assert table.add(again, "another", 0, may_repeat_offsets=True)


def test_files_that_the_driver_does_not_see_are_refused(table: ArchiveTable) -> None:
    files = write(table.path, rows(["a"]))
    (table.path / files[0].path).unlink()
    with pytest.raises(ClientFault, match="driver and all workers share"):
        table.add(files, "q", 0)


def test_what_queries_have_added_outlives_checkpoints_of_the_table(table: ArchiveTable) -> None:
    for batch in range(3):
        fill(table, batch, 1 + batch, 1)
    DeltaTable(table.path).create_checkpoint()
    again = ArchiveTable.open(table.path)
    assert again.last_batch("q") == 2
    assert not fill(again, 2, 3, 1)


# --- Reading ---


def test_odd_topics_are_read_alike_by_everyone(table: ArchiveTable) -> None:
    fill(table, 0, 1, 2, ODD_TOPICS)
    fill(table, 1, 3, 1, ODD_TOPICS)
    for _ in range(2):
        stored = DeltaTable(table.path)
        found = duckdb.from_arrow(stored.to_pyarrow_dataset())
        found = found.aggregate('topic, count(*), max("offset")')
        assert sorted(found.fetchall()) == sorted((topic, 3, 3) for topic in ODD_TOPICS)
        frame = stored.to_pandas(columns=["topic", "offset"])
        assert frame.groupby("topic").size().to_dict() == dict.fromkeys(ODD_TOPICS, 3)
        one = stored.to_pandas(filters=[("topic", "=", "with/slash")])
        assert one["offset"].sum() == 6
        # Without the table's log, by the names of directories.
        named = [uri for uri in stored.file_uris() if "topic~" not in uri]
        by_name = duckdb.execute(
            "SELECT topic, count(*) FROM read_parquet(?, hive_partitioning = true, "
            "hive_types_autocast = false) GROUP BY topic",
            [named],
        )
        assert sorted(by_name.fetchall()) == sorted(
            (topic, 3) for topic in ODD_TOPICS if len(topic) < 100
        )
        assert all(Path(uri).is_file() for uri in stored.file_uris())
        assert compact(table.path).files_before in (2 * len(ODD_TOPICS), 0)


def test_the_next_offset_of_each_partition_is_known(table: ArchiveTable) -> None:
    files = write(table.path, rows(["a"] * 4 + ["b"], partitions=[0, 1, 0, 1, 0]))
    table.add(files, "q", 0)
    assert table.next_offsets() == {("a", 0): 4, ("a", 1): 5, ("b", 0): 6}
    assert table.next_offsets("b".__eq__) == {("b", 0): 6}


def test_the_next_offset_is_read_from_files_that_others_have_joined(table: ArchiveTable) -> None:
    table.add(write(table.path, rows(["a"] * 4, partitions=[0, 1, 0, 1])), "q", 0)
    DeltaTable(table.path).optimize.compact()
    table.reload()
    (file,) = table.files()
    assert file.partition is None
    assert table.next_offsets() == {("a", 0): 4, ("a", 1): 5}
    assert list(groups(table.files(), 10**9)) == []


def test_an_older_version_can_be_opened(table: ArchiveTable) -> None:
    fill(table, 0, 1, 2)
    version = table.version
    fill(table, 1, 3, 2)
    assert ArchiveTable.open(table.path, version=version).next_offsets() == {("a", 0): 3}
    with pytest.raises(ClientFault, match="version 99"):
        ArchiveTable.open(table.path, version=99)


# --- Compaction ---


def test_compaction_joins_files_and_keeps_rows_and_order(table: ArchiveTable) -> None:
    for batch in range(4):
        fill(table, batch, 1 + 2 * batch, 2, "ab")
    assert compact(table.path) == Compacted(files_before=8, files_after=2, files_vacuumed=0)
    table.reload()
    assert offsets(table, "a") == offsets(table, "b") == list(range(1, 9))
    for file in table.files():
        assert (file.first_offset, file.last_offset, file.rows) == (1, 8, 8)
        stored = pq.ParquetFile(table.path / file.path).read()
        assert stored.column("offset").to_pylist() == list(range(1, 9))
    assert compact(table.path) == Compacted(files_before=0, files_after=0, files_vacuumed=0)
    assert fill(table, 4, 9, 1)
    assert table.next_offsets() == {("a", 0): 10, ("b", 0): 9}


def test_two_compactions_at_once_do_not_double_rows(table: ArchiveTable) -> None:
    for batch in range(3):
        fill(table, batch, 1 + batch, 1)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(compact, [table.path] * 3))
    assert sum(one.files_before for one in done) == 3
    assert offsets(table) == [1, 2, 3]


def test_an_archive_goes_on_while_it_is_compacted(table: ArchiveTable) -> None:
    def add(batch: int) -> bool:
        return fill(ArchiveTable.open(table.path), batch, 1 + batch, 1)

    with ThreadPoolExecutor(2) as pool:
        adding = pool.submit(lambda: [add(batch) for batch in range(12)])
        while not adding.done():
            compact(table.path, vacuum_older_hours=None)
        assert all(adding.result())
    assert offsets(table) == list(range(1, 13))


def test_large_files_are_left_alone() -> None:
    def file(first: int, size: int, topic: str = "a") -> StoredFile:
        return StoredFile(
            path=f"{topic}{first}",
            size_bytes=size,
            rows=1,
            topic=topic,
            date=date(2024, 1, 1),
            partition=0,
            first_offset=first,
            last_offset=first,
            first_receive_ns=0,
            last_receive_ns=0,
        )

    files = [file(5, 10), file(1, 10), file(2, 60), file(3, 40), file(4, 40), file(1, 10, "b")]
    found = [[one.path for one in group] for group in groups(files, 100)]
    assert found == [["a3", "a4", "a5"]]


def test_vacuum_removes_what_failed_attempts_left_and_nothing_else(table: ArchiveTable) -> None:
    fill(table, 0, 1, 1)
    (failed,) = write(table.path, rows(["b"]))
    (young,) = write(table.path, rows(["c"]))
    kept = query_record.directory(table.path, "main") / "checkpoint" / "offsets" / "0"
    kept.parent.mkdir(parents=True)
    kept.write_text("x")
    old_s = time.time() - 8 * 86_400
    for path in (kept, *(parquet_files(table) - {table.path / young.path})):
        os.utime(path, (old_s, old_s))
    assert compact(table.path).files_vacuumed == 1
    assert not (table.path / failed.path).exists()
    assert (table.path / young.path).exists()
    assert kept.exists()
    assert offsets(table) == [1]


def test_compaction_refuses_what_would_take_files_from_readers(table: ArchiveTable) -> None:
    with pytest.raises(ClientFault, match="at least 1 hour"):
        compact(table.path, vacuum_older_hours=0)
    with pytest.raises(ClientFault, match="target_bytes is 0"):
        compact(table.path, target_bytes=0)


def test_compaction_of_a_table_that_is_not_there_makes_none(tmp_path: Path) -> None:
    with pytest.raises(ClientFault, match="there is no archive in"):
        compact(tmp_path / "misspelt")
    assert not (tmp_path / "misspelt").exists()


def test_a_table_that_cannot_be_made_is_told_of_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClientFault, match=r"^the table '.*file/table' cannot be made: .*$"):
        ArchiveTable.prepare(tmp_path / "file" / "table")


# --- Layouts, and tables that are none of ours ---


def test_a_table_of_an_older_layout_is_brought_up_to_date(table: ArchiveTable) -> None:
    fill(table, 0, 1, 2)
    newer = ArchiveTable.prepare(table.path, layout=NEWER)
    assert newer.layout_version == 2
    found = DeltaTable(table.path).to_pyarrow_table()
    assert found.column("partition_key").to_pylist() == [None, None]
    assert ArchiveTable.prepare(table.path, layout=NEWER).version == newer.version
    assert newer.add(write(table.path, rows(["a"], first_offset=3)), "q", 1)
    assert offsets(newer) == [1, 2, 3]


def test_an_upgrade_that_was_interrupted_is_finished(table: ArchiveTable) -> None:
    ArchiveTable.prepare(table.path, layout=NEWER)
    DeltaTable(table.path).alter.set_table_properties({PROPERTY: "1"}, raise_if_not_exists=False)
    assert ArchiveTable.prepare(table.path, layout=NEWER).layout_version == 2


def test_a_newer_layout_is_refused(table: ArchiveTable) -> None:
    ArchiveTable.prepare(table.path, layout=NEWER)
    with pytest.raises(
        FormatVersionError, match="has layout 2, and this Runnel knows layouts up to 1"
    ):
        ArchiveTable.open(table.path)
    with pytest.raises(FormatVersionError, match="layout 2"):
        fill(table, 0, 1, 1)


def test_tables_that_are_not_archives_are_refused(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path / "delta", pa.schema([("x", pa.int64())]))
    with pytest.raises(
        ClientFault, match=f"not an archive of Runnel's: it has no property {PROPERTY}"
    ):
        ArchiveTable.prepare(tmp_path / "delta")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    with pytest.raises(ClientFault, match="is not empty and has no archive in it"):
        ArchiveTable.prepare(tmp_path / "full")
    with pytest.raises(ClientFault, match="there is no archive in"):
        ArchiveTable.open(tmp_path / "nothing")
    with pytest.raises(ClientFault, match="is a file"):
        table_path(tmp_path / "full" / "notes.txt")


@pytest.mark.parametrize("text", ["s3://bucket/archive", "abfss://x/y", "hdfs://host/x"])
def test_object_stores_are_refused(text: str) -> None:
    with pytest.raises(ClientFault, match="is not supported"):
        table_path(text)


def test_a_table_may_be_named_by_a_file_url(tmp_path: Path) -> None:
    assert table_path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"


# --- What is asked of an archive ---


def test_a_plan_is_for_the_same_topics_every_time(tmp_path: Path) -> None:
    plan = ArchivePlan.make(tmp_path / "table", pattern="sensors/*")
    query_record.save(plan.table, plan.record)
    assert ArchivePlan.make(tmp_path / "table", pattern="sensors/*").record == plan.record
    with pytest.raises(ClientFault, match=r"is of pattern sensors/\*, not of topics a, b"):
        ArchivePlan.make(tmp_path / "table", topics=["a", "b"])
    other = ArchivePlan.make(tmp_path / "table", topics=["a", "b"], name="others")
    assert other.record.cursor != plan.record.cursor
    assert other.record.checkpoint.endswith("/_runnel/others/checkpoint")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "which topics"),
        ({"topics": "a", "pattern": "b"}, "not both"),
        ({"topics": ["a", "b,c"]}, "with a comma"),
        ({"topics": "a\nb"}, "option topics"),
        ({"pattern": "[a"}, "option pattern"),
        ({"pattern": "*", "starting": "yesterday"}, "starting is 'yesterday'"),
        ({"pattern": "*", "name": "../x"}, "the archive's name is"),
        ({"pattern": "*", "rows_per_trigger_max": 0}, "option maxRowsPerTrigger"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_is_made(
    tmp_path: Path, arguments: dict[str, object], problem: str
) -> None:
    with pytest.raises(ClientFault, match=problem):
        ArchivePlan.make(tmp_path / "table", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "table").exists()


def test_a_topic_with_a_comma_can_be_named_alone() -> None:
    assert topic_options("a,b[1]", None) == {"pattern": "a,b[[]1]"}
    assert topic_options(["a", "b"], None) == {"topics": "a,b"}


def test_the_status_tells_of_the_table_and_why_a_lag_is_not_known(table: ArchiveTable) -> None:
    fill(table, 0, 1, 3, "ab")
    record = QueryRecord(
        name="main",
        topics=("a", "b"),
        pattern=None,
        url="runnel://127.0.0.1:1",
        checkpoint="c",
        cursor="x",
        query_id="id",
    )
    query_record.save(table.path, record)
    found = archive_status(table.path)
    assert (found.rows, found.files, found.topics, found.layout) == (6, 2, 2, 1)
    assert found.first_date == found.last_date == "2023-11-14"
    assert abs(found.last_change_ms / 1000 - time.time()) < 60
    (query,) = found.queries
    assert (query.name, query.last_batch, query.messages_behind) == ("main", None, None)
    assert query.problem is not None
    assert "cannot connect" in query.problem
    (query_record.directory(table.path, "main") / "archive.json").write_text("{")
    with pytest.raises(CorruptionError, match=r"archive\.json"):
        archive_status(table.path)


def test_files_know_their_receive_times(table: ArchiveTable) -> None:
    received = [START_NS + 5, START_NS + 70]
    table.add(write(table.path, rows(["a", "a"], receive_ns=received)), "q", 0)
    (file,) = table.files()
    assert [file.first_receive_ns, file.last_receive_ns] == received
