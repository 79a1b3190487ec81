"""The archive syncs files before it commits them, and reports every disk error."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from runnel.spark.pipelines.archive import file_sync, file_writer
from runnel.spark.pipelines.archive.file_sync import EarlySync
from runnel.spark.pipelines.archive.file_writer import FileWriter
from tests.spark.pipelines.archived_rows import rows


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was synced, in this order."""
    found: list[Path] = []
    sync = file_sync.sync_path

    def note(path: Path, *, leaves_cache: bool = False) -> None:
        sync(path, leaves_cache=leaves_cache)
        found.append(path)

    monkeypatch.setattr(file_sync, "sync_path", note)
    return found


def test_files_and_the_directories_that_name_them_are_synced(
    tmp_path: Path, synced: list[Path]
) -> None:
    with FileWriter(tmp_path) as writer:
        writer.add(rows(["a", "b"]))
        paths = {tmp_path / file.path for file in writer.finish()}
    directories = {path.parent for path in paths} | {path.parent.parent for path in paths}
    assert set(synced) == paths | directories | {tmp_path}


def test_a_file_that_grows_is_synced_early_and_again_when_it_is_complete(
    tmp_path: Path, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "GROUP_ROWS", 2)
    with FileWriter(tmp_path) as writer:
        writer.add(rows(["a", "a"]))
        writer.add(rows(["a"], first_offset=3))
        (file,) = writer.finish()
    assert synced.count(tmp_path / file.path) == 2


def test_what_leaves_the_cache_is_still_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    file_sync.sync_path(path, leaves_cache=True)
    assert path.read_bytes() == b"x" * 10_000


def test_one_sync_is_under_way_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    begun: list[Path] = []

    def wait(path: Path, *, leaves_cache: bool) -> None:
        assert leaves_cache
        begun.append(path)
        assert may_go_on.wait(10)

    monkeypatch.setattr(file_sync, "sync_path", wait)
    early = EarlySync()
    for _ in range(3):
        early.begin(tmp_path)
    may_go_on.set()
    early.check()
    early.stop()
    assert begun == [tmp_path]


def test_an_error_of_an_early_sync_fails_the_task_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "GROUP_ROWS", 2)
    fsync = os.fsync
    is_first = threading.Event()

    def fail_once(handle: int) -> None:
        if not is_first.is_set():
            is_first.set()
            raise OSError(5, "Input/output error")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(OSError, match="Input/output error"), FileWriter(tmp_path) as writer:  # noqa: PT012
        writer.add(rows(["a", "a"]))
        writer.finish()
    assert not list(tmp_path.rglob("*.parquet"))
