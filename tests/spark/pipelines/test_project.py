"""Projects of Declarative Pipelines, as far as they need no Spark: what `init` makes, and what is said of a run."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest
from pyspark.pipelines.cli import load_pipeline_spec
from pyspark.sql import SparkSession

from runnel.cli.main import run
from runnel.errors import ClientFault
from runnel.spark.pipelines.project import find_spec, init_project, run_project
from runnel.spark.pipelines.project_process import (
    ProjectOutput,
    ProjectProblem,
    ProjectRequest,
    condensed,
    parse_line,
)
from runnel.spark.pipelines.statement import streamed_names


def test_a_new_project_has_all_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["pipeline", "init", "green-house"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "green-house/README.md",
        "green-house/spark-pipeline.yml",
        "green-house/transformations/readings.sql",
        "green-house/transformations/topics.py",
    ]
    project = tmp_path / "green-house"
    spec = load_pipeline_spec(find_spec(project))
    assert spec.name == "green-house"
    assert spec.storage == (project / "storage" / "checkpoints").as_uri()
    topics = (project / "transformations" / "topics.py").read_text()
    ast.parse(topics)
    assert 'DEAD_LETTERS = "!dead/green-house"' in topics
    assert streamed_names((project / "transformations" / "readings.sql").read_text()) == {"events"}
    for path in project.rglob("*"):
        assert path.is_dir() or "$" not in path.read_text(), path


@pytest.mark.parametrize("name", ["-x", "a b", "ü", '"', "x" * 250])
def test_a_name_that_a_project_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ClientFault):
        init_project(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(ClientFault, match="is there already"):
        init_project(tmp_path / "x")


def test_a_directory_without_a_project_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ClientFault, match="runnel pipeline init NAME makes one"):
        find_spec(tmp_path)


def test_requests_come_out_as_they_went_in() -> None:
    request = ProjectRequest(spec="/a b/spark-pipeline.yml", tables=("x", "y"), full_refresh=True)
    assert msgspec.json.decode(request.encode(), type=ProjectRequest) == request


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"said":"Run is COMPLETED."}\n', ProjectOutput("Run is COMPLETED.")),
        ('{"problem":"no"}\n', ProjectProblem("no")),
        ("printed by somebody\n", ProjectOutput("printed by somebody")),
        ('{"mine":1}\n', ProjectOutput("")),
    ],
)
def test_lines_of_the_process(line: str, found: ProjectOutput | ProjectProblem) -> None:
    assert parse_line(line) == found


def test_events_are_told_in_one_line_without_plans() -> None:
    text = (
        "2026-01-01 12:00:00: Failed to resolve flow: 'x'.\n"
        "[UNRESOLVED_COLUMN] No column `a`. SQLSTATE: 42703; line 3 pos 26;\n'Project ['a]\n+- more"
    )
    assert condensed(text) == "Failed to resolve flow: 'x'. No column `a`. (line 3, column 27)"
    assert condensed("2026-01-01 12:00:00: Run is COMPLETED.\n") == "Run is COMPLETED."
    failed = (
        "2026-01-01 12:00:00: Flow 'x' has FAILED.\nError: [STREAM_FAILED] Query terminated.\n"
        "Traceback (most recent call last):\nrunnel.errors.Unavailable: cannot connect to 127.0.0.1:1\n SQLSTATE: 38000"
    )
    assert condensed(failed) == "Flow 'x' has FAILED. cannot connect to 127.0.0.1:1"


def test_a_project_leaves_a_session_alone_that_is_there_already(
    spark: SparkSession, tmp_path: Path
) -> None:
    init_project(tmp_path / "mine")
    with pytest.raises(ClientFault, match="has a Spark session already"):
        run_project(tmp_path / "mine")
    assert spark.range(3).count() == 3
