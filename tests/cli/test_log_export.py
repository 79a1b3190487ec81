"""`runnel log export` writes every requested message exactly, into a file that is complete or absent."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runnel.cli import export
from runnel.cli.main import run
from runnel.cli.render.times import format_time
from runnel.formats import ksuid
from runnel.formats.message import Message
from runnel.log.reading import OfflineLog
from tests.cli.data_directory import START_NS, STEP_NS, sensor_batches, write


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Message]]:
    directory = tmp_path_factory.mktemp("export") / "data"
    return directory, write(directory, sensor_batches())


# --- Round trips ---


def read_jsonl(path: Path) -> list[Message]:
    return [message_of_json(json.loads(line)) for line in path.read_text().splitlines()]


def message_of_json(row: dict[str, Any]) -> Message:
    def data(name: str) -> bytes | None:
        if row.get(f"{name}_encoding") == "base64":
            return base64.b64decode(row[name])
        return None if row[name] is None else str(row[name]).encode()

    payload = data("payload")
    assert payload is not None
    assert row["size"] == len(payload)
    for name in ("event_time", "transmit_time", "receive_time"):
        assert row[name] == format_time(row[f"{name}_ns"])
    return Message(
        row["topic"],
        payload,
        data("key"),
        row["tags"],
        row["event_time_ns"],
        row["transmit_time_ns"],
        row["receive_time_ns"],
        row["partition"],
        row["offset"],
        None if row["uid"] is None else ksuid.from_text(row["uid"]),
        data("partition_key"),
    )


def messages_of_table(table: pa.Table) -> list[Message]:
    times = {
        name: table[name].cast(pa.int64()).to_pylist()
        for name in ("event_time", "transmit_time", "receive_time")
    }
    rows = table.drop_columns(list(times)).to_pylist()
    return [
        Message(
            row["topic"],
            row["payload"],
            row["key"],
            dict(row["tags"]),
            times["event_time"][number],
            times["transmit_time"][number],
            times["receive_time"][number],
            row["partition"],
            row["offset"],
            row["uid"],
            row["partition_key"],
        )
        for number, row in enumerate(rows)
    ]


READERS: dict[str, Callable[[Path], list[Message]]] = {
    "jsonl": read_jsonl,
    "arrow": lambda path: messages_of_table(pa.ipc.open_file(path).read_all()),
    "parquet": lambda path: messages_of_table(pq.read_table(path)),
}


@pytest.mark.parametrize("kind", READERS)
def test_everything_survives_exactly(
    kind: str, data: tuple[Path, list[Message]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, expected = data
    target = tmp_path / f"out.{kind}"
    assert run(["log", "export", str(directory), "--to", str(target)]) == 0
    assert READERS[kind](target) == expected
    assert f"120 messages to {target}, " in capsys.readouterr().err
    assert os.listdir(tmp_path) == [target.name]


def test_standard_output_gets_json_lines(
    data: tuple[Path, list[Message]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, expected = data
    assert run(["log", "export", str(directory), "--to", "-"]) == 0
    captured = capsys.readouterr()
    rows = [message_of_json(json.loads(line)) for line in captured.out.splitlines()]
    assert rows == expected
    assert captured.err.startswith("120 messages to standard output")


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_columnar_files_gather_small_batches_and_number_topics_once(
    kind: str, data: tuple[Path, list[Message]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = data
    monkeypatch.setattr(export, "_GATHER_ROWS", 50)
    target = tmp_path / f"out.{kind}"
    assert run(["log", "export", str(directory), "--to", str(target)]) == 0
    if kind == "parquet":
        groups = pq.ParquetFile(target).num_row_groups
    else:
        groups = pa.ipc.open_file(target).num_record_batches
    assert groups == 3
    assert READERS[kind](target) == expected


@pytest.mark.parametrize("kind", READERS)
def test_export_of_nothing_is_an_empty_file_of_its_kind(
    kind: str, data: tuple[Path, list[Message]], tmp_path: Path
) -> None:
    target = tmp_path / f"out.{kind}"
    assert run(["log", "export", str(data[0]), "--topic", "none", "--to", str(target)]) == 0
    assert READERS[kind](target) == []


# --- Selecting ---


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--topic", "sensors/a"], lambda m: m.topic == "sensors/a"),
        (["--topic", "*/a", "--topic", "*/b"], lambda m: m.topic[-1] in "ab"),
        (["--partition", "1"], lambda m: m.partition == 1),
        (["--tag", "unit=C"], lambda m: m.tags.get("unit") == "C"),
        (["--tag", "unit=F", "--tag", "ort=Köln"], lambda m: "ort" in m.tags),
        (
            ["--since", "2023-11-14T22:13:40Z", "--until", "2023-11-14T22:14:00Z"],
            lambda m: START_NS + 20 * 10**9 <= m.receive_time_ns < START_NS + 40 * 10**9,
        ),
        (
            ["--since", str(START_NS + STEP_NS), "--until", str(START_NS + STEP_NS + 1)],
            lambda m: m.receive_time_ns == START_NS + STEP_NS,
        ),
        (
            ["--time", "event", "--since", str(START_NS - 10 * 10**9)],
            lambda m: m.event_time_ns >= START_NS - 10 * 10**9,
        ),
        (["--since", "1h"], lambda m: False),
        (["--until", "1h"], lambda m: True),
    ],
)
def test_only_what_was_asked_for_is_exported(
    arguments: list[str],
    wanted: Callable[[Message], bool],
    data: tuple[Path, list[Message]],
    tmp_path: Path,
) -> None:
    directory, expected = data
    target = tmp_path / "out.jsonl"
    assert run(["log", "export", str(directory), *arguments, "--to", str(target)]) == 0
    assert read_jsonl(target) == [message for message in expected if wanted(message)]


@pytest.mark.parametrize("limit", [0, 1, 7, 120, 500])
def test_limit_ends_within_a_batch(
    limit: int, data: tuple[Path, list[Message]], tmp_path: Path
) -> None:
    directory, expected = data
    target = tmp_path / "out.jsonl"
    assert run(["log", "export", str(directory), "--limit", str(limit), "--to", str(target)]) == 0
    assert read_jsonl(target) == expected[:limit]


# --- What is wrong ---


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--to", "out.csv"], "--to out.csv: the name must end in .parquet, .arrow or .jsonl"),
        (
            ["--to", "-", "--topic", "a["],
            "pattern 'a[' has at character 2 a set that is not closed",
        ),
        (["--to", "-", "--since", "soon"], "--since: 'soon' is not a time"),
        (["--to", "-", "--until", "x"], "--until: 'x' is not a time"),
        (["--to", "-", "--since", "1h", "--until", "2h"], "--since 1h is not before --until 2h"),
        (["--to", "-", "--tag", "unit"], "--tag 'unit': write it as NAME=VALUE"),
        (
            ["--to", "nowhere/out.jsonl"],
            "cannot write nowhere/out.jsonl: No such file or directory",
        ),
        (["--to", "folder.jsonl"], "cannot write folder.jsonl: it is a directory"),
        (["--to", "-", "--partition", "-1"], "Invalid value for '--partition'"),
        (["--to", "-", "--time", "now"], "Invalid value for '--time'"),
        ([], "Missing option '--to'"),
    ],
)
def test_wrong_request_is_refused_with_exit_code_2(
    arguments: list[str],
    problem: str,
    data: tuple[Path, list[Message]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    assert run(["log", "export", str(data[0]), *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["folder.jsonl"]


def test_target_in_the_data_directory_is_refused(
    data: tuple[Path, list[Message]], capsys: pytest.CaptureFixture[str]
) -> None:
    target = data[0] / "journals" / "out.jsonl"
    assert run(["log", "export", str(data[0]), "--to", str(target)]) == 2
    assert "lies in the data directory" in capsys.readouterr().err


def test_missing_pyarrow_is_reported_with_what_to_install(
    data: tuple[Path, list[Message]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(["log", "export", str(data[0]), "--to", str(tmp_path / "out.parquet")]) == 2
    assert "needs pyarrow: pip install '.[arrow]'" in capsys.readouterr().err
    assert run(["log", "export", str(data[0]), "--to", str(tmp_path / "out.jsonl")]) == 0


def test_damage_is_reported_and_everything_else_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "data"
    expected = write(directory, sensor_batches(20))
    stretch = next(iter(OfflineLog(str(directory)).plan()))
    block = stretch.blocks[2]
    content = bytearray(Path(stretch.path).read_bytes())
    content[block.position + block.size - 30] ^= 1
    Path(stretch.path).write_bytes(content)
    target = tmp_path / "out.jsonl"
    assert run(["log", "export", str(directory), "--to", str(target)]) == 1
    lost_ns = START_NS + 2 * STEP_NS
    assert read_jsonl(target) == [m for m in expected if m.receive_time_ns != lost_ns]
    told = capsys.readouterr().err
    assert f"damage: {stretch.path}:{block.position}: block body" in told


def test_failed_export_leaves_the_former_file_and_nothing_else(
    data: tuple[Path, list[Message]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("former")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.JsonLinesSink, "finish", fail)
    assert run(["log", "export", str(data[0]), "--to", str(target)]) == 1
    assert target.read_text() == "former"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_killed_export_leaves_no_half_file_under_the_final_name(
    data: tuple[Path, list[Message]], tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    code = (
        "import os, signal\n"
        "from runnel.cli import export\n"
        "from runnel.cli.main import run\n"
        "def die(self):\n"
        "    self._out.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "export.JsonLinesSink.finish = die\n"
        f"run(['log', 'export', {str(data[0])!r}, '--to', {str(target)!r}])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert not target.exists()
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".out.jsonl.")
    assert left.endswith(".unfinished")
