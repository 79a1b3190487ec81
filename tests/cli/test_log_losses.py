"""`runnel log` on directories that lost files, and on runs that end too early."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runnel.cli.main import run
from runnel.cli.render.tables import Table
from runnel.errors import ClientFault
from runnel.formats.batch import Batch
from runnel.log.reading import OfflineLog, Selection
from tests.cli.data_directory import sensor_batches, write


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    write(made, sensor_batches())
    return made


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "journals/main/0").glob("*.segment"))


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_missing_segment_is_damage(
    directory: Path, which: int, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = segments(directory)[which]
    lost.unlink()
    run(["log", command, str(directory)])
    out = capsys.readouterr().out
    assert f"{lost}:0: segment is missing, its index is there\n" in out
    assert "not in use" not in out


def test_index_of_a_rewriting_that_crashed_is_no_damage(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = segments(directory)[1].with_suffix(".index")
    index.with_name(index.name.replace("-0.", "-1.")).write_bytes(index.read_bytes())
    assert run(["log", "verify", str(directory)]) == 0
    assert "not in use; the next start removes it" in capsys.readouterr().out


@pytest.mark.parametrize("which", [1, -1])
@pytest.mark.parametrize("left_bytes", [0, 20, 600])
@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_segment_shorter_than_its_index_says_is_damage(
    directory: Path,
    which: int,
    left_bytes: int,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = segments(directory)[which]
    content = short.read_bytes()
    short.write_bytes(content[:left_bytes])
    run(["log", command, str(directory)])
    out = capsys.readouterr().out
    assert (
        f"{short}:{left_bytes}: file has {left_bytes} bytes, its index says {len(content)}" in out
    )
    assert "cuts it off" not in out
    assert "remove the file" not in out


def test_journal_without_its_name_is_damage_and_is_read(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = directory / "journals/main/name"
    name.unlink()
    assert run(["log", "verify", str(directory)]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line == f"{name}:0: missing; the folder is read as journal 'main'"
    assert ", 120 messages, " in summary
    assert [journal.name for journal in OfflineLog(str(directory)).journals()] == ["main"]


def test_folder_of_a_journal_without_segments_needs_no_name(directory: Path) -> None:
    (directory / "journals/other/0").mkdir(parents=True)
    assert run(["log", "verify", str(directory)]) == 0


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_empty_directory_name_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rest = ["--to", str(tmp_path / "x.jsonl")] if command == "export" else []
    assert run(["log", command, "", *rest]) == 2
    assert capsys.readouterr().err == "error: the data directory is an empty text\n"
    with pytest.raises(ClientFault):
        OfflineLog("")


def test_export_says_what_retention_removed_meanwhile(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    removed = segments(directory)[2]
    scan = OfflineLog.scan

    def scan_beside_retention(
        log: OfflineLog, selection: Selection | None = None
    ) -> Iterator[Batch]:
        for number, batch in enumerate(scan(log, selection)):
            if number == 0:
                removed.with_suffix(".index").unlink()
                removed.unlink()
            yield batch

    monkeypatch.setattr(OfflineLog, "scan", scan_beside_retention)
    assert run(["log", "export", str(directory), "--to", str(tmp_path / "x.jsonl")]) == 0
    assert (
        f"note: retention removed segment {removed} while it was read: messages are missing\n"
        in capsys.readouterr().err
    )


# --- Runs that end early ---


@pytest.mark.parametrize("name", ["x.jsonl", "x.arrow", "x.parquet"])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_export_says_so_and_leaves_nothing(
    name: str,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scan = OfflineLog.scan

    def interrupted(log: OfflineLog, selection: Selection | None = None) -> Iterator[Batch]:
        yield next(scan(log, selection))
        raise KeyboardInterrupt

    monkeypatch.setattr(OfflineLog, "scan", interrupted)
    before = os.listdir(tmp_path)
    assert run(["log", "export", str(directory), "--to", str(tmp_path / name)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert os.listdir(tmp_path) == before


@pytest.mark.parametrize("words", [["inspect"], ["export", "--to", "-"]])
def test_full_disk_names_standard_output(directory: Path, words: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    command = f"exec {sys.executable} -m runnel log {words[0]} {directory} {' '.join(words[1:])}"
    ended = subprocess.run(
        ["/bin/sh", "-c", f"{command} >/dev/full"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.stderr == "error: [Errno 28] No space left on device: 'standard output'\n"
    assert ended.returncode == 1


def test_closed_standard_output_is_no_bug(directory: Path) -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m runnel log inspect {directory} >&-"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.stderr, ended.returncode) == ("", 0)


def test_table_keeps_names_and_numbers_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Table(("topic", "size"), [("sensors/a-rather-long-name", "123,456,789")]).show()
    assert "sensors/a-rather-long-name" in capsys.readouterr().out
