"""Stored batches into Parquet files: every value comes back, and what need not be packed or looked up is not."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.spark.pipelines.archive import row_groups as module
from runnel.spark.pipelines.archive.file_writer import FileWriter, rewrite
from runnel.spark.pipelines.archive.layout import CURRENT, ArchiveFile
from runnel.spark.pipelines.archive.row_groups import row_groups
from runnel.spark.read.schema import rows
from tests.spark.test_schema import ALL, EVEN, STACKS, TAGGED, stacked, stored


def archived(table: Path, batches: Iterable[Batch]) -> list[ArchiveFile]:
    with FileWriter(table) as writer:
        for part in row_groups(batches):
            writer.add(part)
        return writer.finish()


def expected(batches: Sequence[Batch]) -> list[dict[str, object]]:
    """The rows as Spark gets them, in the order in which files are read back here."""
    found = [row for batch in rows(batches, ALL) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row["topic"], row["offset"]))


def read_back(table: Path, files: Sequence[ArchiveFile]) -> list[dict[str, object]]:
    found = [row for file in files for row in pq.ParquetFile(table / file.path).read().to_pylist()]
    return sorted(found, key=lambda row: (row["topic"], row["offset"]))


@pytest.mark.parametrize("parts", STACKS)
@pytest.mark.parametrize("group_rows", [1, 5, 1000])
def test_batches_of_all_kinds_come_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: Sequence[Sequence[Message]],
    group_rows: int,
) -> None:
    monkeypatch.setattr(module, "GROUP_ROWS", group_rows)
    batches = stacked(parts)
    files = archived(tmp_path, batches)
    assert read_back(tmp_path, files) == expected(batches)
    topic = files[0].topic
    joined = rewrite(tmp_path, topic, [file.path for file in files if file.topic == topic])
    wanted = [row for row in expected(batches) if row["topic"] == topic]
    assert read_back(tmp_path, joined) == wanted


def test_a_file_has_the_columns_of_the_layout(tmp_path: Path) -> None:
    (file,) = archived(tmp_path, stacked([TAGGED]))
    found = pq.ParquetFile(tmp_path / file.path).schema_arrow
    kinds = [(field.name, field.type) for field in found]
    assert kinds == [(field.name, field.type) for field in CURRENT.file_schema]
    assert [field.name for field in found if field.nullable] == ["key", "uid"]


def test_files_with_and_without_nulls_declared_are_read_together(tmp_path: Path) -> None:
    before, after = stacked([EVEN, TAGGED])
    (old,) = archived(tmp_path, [before])
    (dense,) = rewrite(tmp_path, "a", [old.path])
    (new,) = archived(tmp_path, [after])
    for files in ([dense, new], [new, dense]):
        paths = [str(tmp_path / file.path) for file in files]
        assert len(pq.read_table(paths, partitioning=None)) == len(EVEN) + len(TAGGED)


def column(table: Path, file: ArchiveFile, path: str) -> pq.ColumnChunkMetaData:
    group = pq.ParquetFile(table / file.path).metadata.row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    return next(chunk for chunk in chunks if chunk.path_in_schema == path)


@pytest.mark.parametrize("group_rows", [1, 1000])
def test_topics_and_tags_are_dictionaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    """Also where each table that a row group is made of came with dictionaries of its own."""
    monkeypatch.setattr(module, "GROUP_ROWS", group_rows)
    parts = [TAGGED * 500, [Message("a", b"o", tags={"site": "elsewhere"})], TAGGED * 500]
    (file,) = archived(tmp_path, stacked(parts, receive_time_ns=0))
    for path in ("topic", "tags.key_value.key", "tags.key_value.value"):
        found = column(tmp_path, file, path)
        assert found.has_dictionary_page
        assert (
            found.total_uncompressed_size < 2 * 4001
        )  # with strings, each would take its length and 4 bytes


def test_tags_that_hardly_repeat_come_back(tmp_path: Path) -> None:
    """More than a dictionary of Parquet's may hold."""
    messages = [Message("a", b"", tags={"id": f"{row:0100}"}) for row in range(20_000)]
    (file,) = archived(tmp_path, [stored(messages)])
    found = pq.ParquetFile(tmp_path / file.path).read(["tags"]).column("tags")
    assert found.to_pylist() == [[("id", f"{row:0100}")] for row in range(20_000)]


@pytest.mark.parametrize("per_batch", [1, 100])
@pytest.mark.parametrize("is_random", [False, True])
def test_payloads_are_compressed_if_that_makes_them_smaller(
    tmp_path: Path, per_batch: int, is_random: bool
) -> None:
    chance = random.Random(1)
    payloads = [chance.randbytes(300) if is_random else b"%0300d" % row for row in range(300)]
    messages = [Message("a", payload) for payload in payloads]
    parts = [messages[row : row + per_batch] for row in range(0, 300, per_batch)]
    (file,) = archived(tmp_path, stacked(parts, receive_time_ns=0))
    assert (column(tmp_path, file, "payload").compression == "UNCOMPRESSED") == is_random
    assert column(tmp_path, file, "key").compression == "SNAPPY"
    stored_payloads = pq.ParquetFile(tmp_path / file.path).read(["payload"]).column("payload")
    assert stored_payloads.to_pylist() == payloads


def test_few_payloads_are_compressed_unseen(tmp_path: Path) -> None:
    parts = [[Message("a", b"\x00\xff")], [Message("a", b"")]]
    (file,) = archived(tmp_path, stacked(parts, receive_time_ns=0))
    assert column(tmp_path, file, "payload").compression == "SNAPPY"


def test_payloads_stay_where_they_lie() -> None:
    """Of large batches; those of small ones are joined."""
    large, small = [Message("a", bytes(100))] * 1000, [Message("a", b"x")]
    (table,) = row_groups(stacked([large, large]))
    assert table.column("payload").num_chunks == 2
    (table,) = row_groups(stacked([small, small]))
    assert table.column("payload").num_chunks == 1
    assert isinstance(table, pa.Table)
