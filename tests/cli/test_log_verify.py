"""`runnel log verify` reports each damage and its place, and exits with 1."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runnel.cli.main import run
from runnel.log.reading import OfflineLog
from tests.cli.data_directory import sensor_batches, write
from tests.log.images import without_segment_marks


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    write(made, sensor_batches())
    return made


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_sound_directory_ends_with_0_and_a_summary(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["log", "verify", str(directory)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert re.fullmatch(
        r"no damage: 4 segments, 120 messages, [0-9.]+ KiB in [0-9.]+ s \([0-9.]+ .iB/s\)\n",
        captured.out,
    )


def test_flipped_bit_is_reported_by_file_and_position(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stretch = list(OfflineLog(str(directory)).plan())[1]
    block = stretch.blocks[4]
    flip_bit(Path(stretch.path), block.position + block.size - 20)
    assert run(["log", "verify", str(directory)]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line == (
        f"{stretch.path}:{block.position}: block body: does not match the envelope's checksum"
    )
    assert summary.startswith("1 place of damage: 4 segments, ")


def test_json_tells_the_same(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = sorted((directory / "journals/main/0").glob("*.index"))[2]
    flip_bit(index, 100)
    assert run(["log", "verify", str(directory), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["is_sound"] is False
    assert shown["damage_count"] == 1
    assert shown["damage"][0] == {
        "path": str(index),
        "position": 100,
        "size": index.stat().st_size - 100,
        "problem": "index: does not match its checksum; remove the file to have it made anew",
    }
    assert (shown["segments"], shown["messages"], shown["notes"]) == (4, 120, [])


def test_torn_tail_is_a_note_and_no_damage_unless_it_is_known_to_have_been_stored(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = sorted((directory / "journals/main/0").glob("*.segment"))[-1]
    last.with_suffix(".index").unlink()
    last.write_bytes(last.read_bytes()[:-10])
    assert run(["log", "verify", str(directory)]) == 1
    assert capsys.readouterr().out.startswith(f"{last}:")
    marks = directory / "synced"
    marks.write_bytes(without_segment_marks(marks.read_bytes()))
    assert run(["log", "verify", str(directory)]) == 0
    note, summary = capsys.readouterr().out.splitlines()
    assert note.startswith(f"note: {last}:")
    assert note.endswith("the next start cuts it off")
    assert summary.startswith("no damage: ")


def test_verifying_and_inspecting_change_no_file(directory: Path) -> None:
    next(iter((directory / "journals/main/0").glob("*.index"))).unlink()

    def state() -> dict[Path, tuple[int, bytes]]:
        return {
            path: (path.stat().st_mtime_ns, path.read_bytes())
            for path in directory.rglob("*")
            if path.is_file()
        }

    before = state()
    assert run(["log", "verify", str(directory)]) == 0
    assert run(["log", "inspect", str(directory), "--topics"]) == 0
    assert state() == before
