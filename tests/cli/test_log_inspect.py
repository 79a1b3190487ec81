"""`runnel log inspect` shows the content of a data directory, for programs and for people."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from runnel.cli.main import run
from runnel.formats.message import Message
from runnel.log.log import CursorPosition
from runnel.platform.workers import ThreadWorkers
from tests.cli.data_directory import open_log, sensor_batches, write


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_json_tells_all_of_a_small_directory(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(directory, [[Message("a", b"x"), Message("a", b"y")], [Message("b", b"z", partition=1)]])
    assert run(["log", "inspect", str(directory), "--json", "--topics"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (segment,) = shown["journals"][0]["segments"]
    path = directory / "journals/main/0/00000000000000000001-0.segment"
    size = path.stat().st_size
    assert shown == {
        "directory": str(directory),
        "format": 2,
        "open_in_process": None,
        "epoch": 1,
        "was_closed": True,
        "journals": [
            {
                "name": "main",
                "folder": f"{directory}/journals/main",
                "shards": [{"shard": 0, "epoch": 1}],
                "file_bytes": size,
                "segments": [
                    {
                        "shard": 0,
                        "number": 1,
                        "generation": 0,
                        "path": str(path),
                        "file_bytes": size,
                        "used_bytes": size,
                        "index_bytes": path.with_suffix(".index").stat().st_size,
                        "is_sealed": True,
                        "entries": 2,
                        "first_entry": 1,
                        "last_entry": 2,
                        "first_time": "2023-11-14T22:13:20.000000000Z",
                        "first_time_ns": 1_700_000_000_000_000_000,
                        "last_time": "2023-11-14T22:13:21.500000001Z",
                        "last_time_ns": 1_700_000_001_500_000_001,
                        "topic_partitions": 2,
                        "runs": 2,
                    }
                ],
            }
        ],
        "cursors": [],
        "topics": [
            {
                "name": "a",
                "journal": "main",
                "partitions": [
                    partition(0, 1, 3, 2, "2023-11-14T22:13:20.000000000Z", 1_700_000_000 * 10**9),
                    partition(1, 1, 1, 0, None, None),
                ],
            },
            {
                "name": "b",
                "journal": "main",
                "partitions": [
                    partition(0, 1, 1, 0, None, None),
                    partition(
                        1, 1, 2, 1, "2023-11-14T22:13:21.500000001Z", 1_700_000_001_500_000_001
                    ),
                ],
            },
        ],
        "damage": [],
        "notes": [],
    }
    assert segment["path"].startswith(shown["journals"][0]["folder"])


def partition(
    number: int, first: int, end: int, messages: int, time: str | None, time_ns: int | None
) -> dict[str, object]:
    return {
        "partition": number,
        "first_offset": first,
        "next_offset": end,
        "messages": messages,
        "last_time": time,
        "last_time_ns": time_ns,
    }


def test_tables_are_plain_text_where_there_is_no_terminal(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(directory, sensor_batches(40))
    assert run(["log", "inspect", str(directory), "--topics"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0] == f"{directory}: format 2, closed"
    assert lines[1].startswith("1 journal, 4 segments, 40 batches, ")
    assert lines[1].endswith(" KiB, 3 topics, 0 cursors")
    assert lines[3].split() == [
        *("journal", "shard", "segment", "size", "batches"),
        *("first", "received", "last", "received"),
    ]
    assert lines[4].split()[:3] == ["main", "0", "1-0"]
    assert lines[4].endswith("sealed")
    assert "\x1b" not in shown
    (first,) = [line for line in lines if line.startswith("sensors/a") and " 0  main" in line]
    assert first.split()[3:6] == ["1", "41", "40"]


def test_topics_are_left_out_unless_asked_for(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(directory, sensor_batches(3))
    assert run(["log", "inspect", str(directory)]) == 0
    assert "sensors/a" not in capsys.readouterr().out
    assert run(["log", "inspect", str(directory), "--json"]) == 0
    assert "topics" not in json.loads(capsys.readouterr().out)


def test_open_directory_is_reported_with_its_process_and_cursors(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        workers = ThreadWorkers(1)
        try:
            log = await open_log(directory, workers)
            await log.metadata.ensure_topic("a")
            await log.metadata.set_cursor("reader", [CursorPosition(topic="a", offset=7)])
            assert run(["log", "inspect", str(directory)]) == 0
            await log.close()
        finally:
            workers.close()

    asyncio.run(scenario())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{directory}: format 2, open in process {os.getpid()}"
    assert lines[1] == "0 journals, 0 segments, 0 batches, 0 B, 1 topic, 1 cursor"
    assert lines[4].split() == ["reader", "a[0]@7", "2023-11-14T22:13:20.000Z"]


def test_names_cannot_steer_the_terminal(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(directory, [[Message("a\u202eb", b"")]])
    assert run(["log", "inspect", str(directory), "--topics"]) == 0
    assert "\u202e" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.write_text(""), "is not a directory"),
        (lambda path: path.mkdir(), "is not a data directory of Runnel: there is no runnel.json"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_what_is_no_data_directory_is_refused_with_exit_code_2(
    command: str, make: object, problem: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(make)
    make(directory)
    arguments = ["--to", "-"] if command == "export" else []
    assert run(["log", command, str(directory), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert problem in captured.err


def test_newer_format_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(directory, sensor_batches(1))
    (directory / "runnel.json").write_text('{"format": 3}')
    assert run(["log", "inspect", str(directory)]) == 1
    assert (
        "the directory has format 3, this Runnel reads formats 1, 2 and 4"
        in capsys.readouterr().err
    )
