"""A replay's directory, and how its work is shared out."""

from __future__ import annotations

from pathlib import Path

import pytest

from runnel.errors import ClientFault
from runnel.spark.pipelines.replay.options import check_options
from runnel.spark.pipelines.replay.plan import (
    PartitionRows,
    ReplayPart,
    ReplayTarget,
    assign,
    rows_by_task,
)
from runnel.spark.pipelines.replay.progress import ProgressWatch
from runnel.spark.pipelines.replay.state import ReplayState, StateDirectory, TaskProgress
from runnel.spark.pipelines.replay.timetable import Cut

OPTIONS = check_options(
    topics=["sensors/a", "sensors/b"],
    rename=["*=again/*"],
    tags={"unit": "C"},
    offsets={("sensors/a", 0): range(3, 9)},
    speed=2,
)
TARGET = ReplayTarget("again/sensors/a", 2, keeps_partition=True)
STATE = ReplayState(
    version=1,
    replay_id="4711",
    options=OPTIONS,
    parts=(
        ReplayPart(PartitionRows("sensors/a", 0, 3, 9, 6), TARGET, 0),
        ReplayPart(PartitionRows("sensors/a", 1, 1, 5, 4), TARGET, 1),
    ),
    first_ns=10 * 10**9,
    last_ns=30 * 10**9,
    cuts=(Cut(20 * 10**9, 4 * 10**9),),
)


def test_what_was_begun_is_found_again(tmp_path: Path) -> None:
    directory = StateDirectory.at(f"file://{tmp_path}/deep/down")
    assert directory.load(OPTIONS) is None
    assert not directory.is_there
    directory.save(STATE)
    assert StateDirectory.at(str(tmp_path / "deep" / "down")).load(OPTIONS) == STATE
    assert directory.is_there


def test_another_replay_is_refused_with_what_differs(tmp_path: Path) -> None:
    directory = StateDirectory.at(str(tmp_path))
    directory.save(STATE)
    other = check_options(topics="sensors/a", rename=["*=again/*"], tags={"unit": "C"}, rate=5)
    with pytest.raises(ClientFault, match="belongs to another replay: topics was") as refused:
        directory.load(other)
    assert "speed was 2.0, and is not given; rate was not given, and is 5.0" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"version": 9}', "is of version 9, and this Runnel knows 1"),
        (b'{"version": 1', "is not the state of a replay"),
        (b'{"version": 1}', "is not the state of a replay"),
    ],
)
def test_a_state_that_cannot_be_read_is_refused(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    (tmp_path / "replay.json").write_bytes(content)
    with pytest.raises(ClientFault, match=problem):
        StateDirectory.at(str(tmp_path)).load(OPTIONS)


def test_a_directory_must_be_of_a_file_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClientFault, match="in a directory of a file system"):
        StateDirectory.at("s3://bucket/state")
    with pytest.raises(ClientFault, match="Not a directory"):
        StateDirectory.at(str(tmp_path / "file" / "state"))


def test_progress_is_what_the_tasks_told_last(tmp_path: Path) -> None:
    directory = StateDirectory.at(str(tmp_path))
    watch = ProgressWatch(STATE, directory, 2)
    found = watch.look()
    assert (found.messages, found.messages_total, found.seconds_left) == (0, 10, 8)
    directory.report(0, TaskProgress(batches=1, rows=2))
    directory.report(0, TaskProgress(batches=2, rows=4, reached_ns=6 * 10**9))
    directory.report(1, TaskProgress(batches=1, rows=1, reached_ns=5 * 10**9))
    found = watch.look()
    assert (found.messages, found.seconds_left) == (5, 2)
    assert found.messages_per_second > 0
    assert directory.progress(0) == TaskProgress(batches=2, rows=4, reached_ns=6 * 10**9)


def test_a_new_replay_does_not_inherit_progress(tmp_path: Path) -> None:
    directory = StateDirectory.at(str(tmp_path))
    directory.report(0, TaskProgress(batches=2, rows=4))
    directory.begin(STATE)
    assert directory.progress(0) == TaskProgress()
    assert directory.load(OPTIONS) == STATE


def test_tasks_share_the_work_evenly_and_always_in_the_same_way() -> None:
    found = [
        PartitionRows("t", number, 1, 100, rows) for number, rows in enumerate((5, 90, 40, 50, 3))
    ]
    assigned = assign(found, 2)
    assert assigned == assign(reversed(found), 2)
    parts = [ReplayPart(each, TARGET, task) for each, task in assigned]
    assert sorted(rows_by_task(parts)) == [93, 95]


def test_no_task_has_nothing_to_do() -> None:
    found = [PartitionRows("t", 0, 1, 2, 1), PartitionRows("t", 1, 1, 2, 1)]
    assert {task for _, task in assign(found, 16)} == {0, 1}
