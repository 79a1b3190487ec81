"""Messages into Parquet files: which file a row goes to, what the table is told, and what an error leaves."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runnel.spark.pipelines.archive import file_writer
from runnel.spark.pipelines.archive.file_writer import FileWriter
from runnel.spark.pipelines.archive.layout import CURRENT, directory, says_topic
from tests.spark.pipelines.archived_rows import ODD_TOPICS, START_NS, rows, write

DAY_NS = 86_400 * 10**9


def test_each_topic_partition_and_day_has_a_file_of_its_own(tmp_path: Path) -> None:
    batch = rows(
        ["a", "b", "a", "a", "a"],
        partitions=[0, 0, 1, 0, 0],
        receive_ns=[START_NS, START_NS, START_NS, START_NS, START_NS + DAY_NS],
    )
    files = write(tmp_path, batch, rows(["a"], first_offset=6))
    found = {
        (file.topic, file.partition, file.date): (file.first_offset, file.last_offset)
        for file in files
    }
    assert found == {
        ("a", 0, "2023-11-14"): (1, 6),
        ("b", 0, "2023-11-14"): (2, 2),
        ("a", 1, "2023-11-14"): (3, 3),
        ("a", 0, "2023-11-15"): (5, 5),
    }
    by_topic = {(file.topic, file.partition, file.date): file for file in files}
    stored = pq.ParquetFile(tmp_path / by_topic["a", 0, "2023-11-14"].path).read()
    assert stored.column("offset").to_pylist() == [1, 4, 6]
    assert stored.schema.equals(CURRENT.file_schema)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    batch = rows(["a"] * 5, receive_ns=[START_NS + row * 1_000_000_007 for row in range(5)])
    (file,) = write(tmp_path, batch)
    stored = pq.ParquetFile(tmp_path / file.path).read()
    assert stored.to_pylist() == batch.to_pylist()
    assert file.size_bytes == (tmp_path / file.path).stat().st_size


def test_the_table_is_told_the_bounds_of_numbers_and_times(tmp_path: Path) -> None:
    first_ns, last_ns = START_NS + 1_999, START_NS + 5_000_001_001
    (file,) = write(tmp_path, rows(["a", "a"], receive_ns=[first_ns, last_ns]))
    told = file.statistics
    assert told.rows == 2
    assert (told.least["receive_time_ns"], told.greatest["receive_time_ns"]) == (first_ns, last_ns)
    assert told.least["receive_time"] == "2023-11-14T22:13:20.000001Z"
    assert told.greatest["receive_time"] == "2023-11-14T22:13:25.000001Z"
    assert set(told.nulls.values()) == {0}


def test_times_before_1970_belong_to_their_day(tmp_path: Path) -> None:
    (file,) = write(tmp_path, rows(["a"], receive_ns=[-1]))
    assert file.date == "1969-12-31"
    assert file.statistics.least["receive_time"] == "1969-12-31T23:59:59.999999Z"


def test_directories_have_only_plain_characters_and_fit(tmp_path: Path) -> None:
    places = [directory(topic, "2024-01-01") for topic in ODD_TOPICS]
    assert len(set(places)) == len(ODD_TOPICS)
    for topic, place in zip(ODD_TOPICS, places, strict=True):
        name, date = place.split("/")
        assert len(name) <= 255
        assert date == "date=2024-01-01"
        assert name.isascii()
        assert says_topic(place) == (topic.isascii() and len(topic) < 100)
    assert directory("with/slash", "2024-01-01") == "topic=with%2Fslash/date=2024-01-01"


def test_an_error_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "GROUP_ROWS", 2)
    with pytest.raises(RuntimeError), FileWriter(tmp_path) as writer:  # noqa: PT012
        writer.add(rows(["a", "a", "a", "b"]))
        assert list(tmp_path.rglob("*.parquet"))
        raise RuntimeError
    assert not list(tmp_path.rglob("*.parquet"))


def test_what_is_held_in_memory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "_HELD_BYTES_MAX", 1)
    files = write(tmp_path, rows(["a"] * 3), rows(["a"] * 2, first_offset=4))
    assert sorted((file.first_offset, file.last_offset) for file in files) == [(1, 3), (4, 5)]


def test_row_groups_are_cut_and_their_bounds_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "GROUP_ROWS", 2)
    (file,) = write(tmp_path, *(rows(["a"] * 3, first_offset=1 + 3 * part) for part in range(3)))
    assert pq.ParquetFile(tmp_path / file.path).num_row_groups == 3
    assert (file.first_offset, file.last_offset, file.statistics.rows) == (1, 9, 9)


def test_files_of_an_older_layout_are_rewritten_with_nulls(tmp_path: Path) -> None:
    (file,) = write(tmp_path, rows(["a"] * 2))
    older = pq.ParquetFile(tmp_path / file.path).read().drop_columns(["uid", "tags"])
    pq.write_table(older, tmp_path / file.path)
    (again,) = file_writer.rewrite(tmp_path, "a", [file.path])
    stored = pq.ParquetFile(tmp_path / again.path).read()
    assert stored.schema.equals(CURRENT.file_schema)
    assert stored.column("tags").to_pylist() == [None, None]


def test_many_topics_in_one_batch_keep_their_order(tmp_path: Path) -> None:
    names = [f"t{row % 100}" for row in range(1000)]
    files = write(tmp_path, rows(names))
    assert len(files) == 100
    for file in files:
        offsets = pq.ParquetFile(tmp_path / file.path).read().column("offset").to_pylist()
        assert offsets == [row + 1 for row in range(1000) if names[row] == file.topic]


def test_no_rows_make_no_files(tmp_path: Path) -> None:
    assert write(tmp_path, rows([])) == []
    assert isinstance(rows([]), pa.Table)
