"""Runs of `bin/bench`: a part that fails or a process that dies costs that part alone, and is told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench import record, runner, suite
from bench.processes import RoleError
from bench.report import Result
from bench.suite import Job


def fine(*, quick: bool) -> list[Result]:
    return [Result("a figure", 1.0 if quick else 2.0, "messages/s")]


def broken(*, quick: bool) -> list[Result]:
    raise RoleError("the server ended by itself")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("bench.fake")
    module.PARTS = (("broken", broken), ("fine", fine))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.fake", module)
    monkeypatch.setitem(suite._SECONDS, "fake", {"broken": (2, 1), "fine": (4, 1)})
    return "fake"


def test_a_part_that_fails_is_recorded_and_the_next_one_runs(
    benchmark: str, tmp_path: Path
) -> None:
    found = runner.run_parts(benchmark, ("broken", "fine"), quick=True, folder=tmp_path)
    assert [result.value for result in found.results] == [1.0]
    assert len(found.failures) == 1
    parts = record.read(tmp_path, benchmark)
    assert "the server ended by itself" in parts["broken"].failure
    assert parts["fine"].is_good
    assert parts["fine"].is_quick


def test_only_the_parts_that_are_named_run(benchmark: str, tmp_path: Path) -> None:
    runner.run_parts(benchmark, ("fine",), quick=False, folder=tmp_path)
    assert list(record.read(tmp_path, benchmark)) == ["fine"]


def test_nothing_is_kept_unless_a_folder_is_given(benchmark: str, tmp_path: Path) -> None:
    found = runner.run_parts(benchmark, ("fine",), quick=False)
    assert found.results[0].value == 2.0
    assert not list(tmp_path.iterdir())


def test_a_process_that_dies_is_a_failure_of_its_parts_and_the_next_job_runs(
    benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Job] = []

    def run(job: Job, folder: Path, *, quick: bool) -> int:
        ran.append(job)
        if job.titles == ("broken",):
            return -9
        runner.run_parts(job.name, job.titles, quick=quick, folder=folder)
        return 0

    monkeypatch.setattr(runner, "_run_child", run)
    jobs = suite.jobs_of(benchmark, ("broken", "fine"))
    failures = runner.run_jobs(jobs, tmp_path, quick=True)
    assert ran == jobs == [Job(benchmark, ("broken",)), Job(benchmark, ("fine",))]
    assert failures == ["fake, broken: its process ended with -9"]
    parts = record.read(tmp_path, benchmark)
    assert not parts["broken"].is_good
    assert parts["fine"].is_good


def test_parts_that_share_a_setting_share_a_process(benchmark: str) -> None:
    sys.modules["bench.fake"].setting = lambda: None  # type: ignore[attr-defined]
    assert suite.jobs_of(benchmark, ("broken", "fine")) == [Job(benchmark, ("broken", "fine"))]


def test_every_part_says_about_how_long_it_takes() -> None:
    for name in set(suite.NAMES) - {"spark"}:  # which imports Spark
        assert set(suite.titles_of(name)) == set(suite._SECONDS[name])
