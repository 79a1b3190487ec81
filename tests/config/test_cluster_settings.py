"""The table of the cluster: processes, and names that were keys of their own before."""

from __future__ import annotations

import pytest

from runnel.config import AUTO, ClusterSettings
from runnel.config.keys import PLAIN_KEYS
from tests.config.sources import merged, problems

SHORT = [
    ("cluster", "RUNNEL_CLUSTER", "cluster.name", "plant"),
    ("node", "RUNNEL_NODE", "cluster.node", "cellar"),
    ("processes", "RUNNEL_PROCESSES", "cluster.processes", 3),
]


def test_the_table_of_the_cluster() -> None:
    loaded = merged('[cluster]\nname = "plant"\nnode = "a"\nprocesses = "auto"\nbalance = false')
    assert loaded.settings.cluster == ClusterSettings(
        name="plant", node="a", processes=AUTO, balance=False
    )
    assert PLAIN_KEYS["cluster.processes"].write(AUTO) == '"auto"'
    assert PLAIN_KEYS["cluster.processes"].write(4) == "4"


@pytest.mark.parametrize(("short", "variable", "name", "value"), SHORT)
def test_short_names_are_accepted_in_every_source(
    short: str, variable: str, name: str, value: object
) -> None:
    text = str(value)
    toml = f"log_level = 'info'\n{short} = {value!r}"
    full = merged(assignments=[f"{name}={text}"]).settings
    for loaded, place in (
        (merged(toml), "runnel.toml:2"),
        (merged(environment={variable: text}), variable),
        (merged(assignments=[f"{short}={text}"]), f"--set {short}"),
        (merged(assignments=[f"{name}=9", f"{short}={text}"]), f"--set {short}"),
    ):
        assert loaded.settings == full
        assert str(loaded.sources[name]) == place


def test_both_names_in_one_source_are_refused_with_their_places() -> None:
    assert problems('node = "a"\n[cluster]\nnode = "b"') == [
        "cluster.node (runnel.toml:3) and node (runnel.toml:1) are the same setting; give one of them"
    ]
    both = {"RUNNEL_PROCESSES": "2", "RUNNEL_CLUSTER_PROCESSES": "2"}
    assert problems(environment=both) == [
        "cluster.processes (RUNNEL_CLUSTER_PROCESSES) and processes (RUNNEL_PROCESSES) are the same setting; "
        "give one of them"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0", "too small; the least is 1"),
        ("65", "too large; the most is 64"),
        ("many", 'neither a whole number nor "auto"; write one such as 4'),
    ],
)
def test_a_wrong_number_of_processes_is_refused(text: str, problem: str) -> None:
    (found,) = problems(assignments=[f"processes={text}"])
    assert found.endswith(problem)
    assert found.startswith("cluster.processes = ")
    (found,) = problems(f"[cluster]\nprocesses = {text if text.isdigit() else repr(text)}")
    assert found.endswith(problem)


@pytest.mark.parametrize("processes", ["2", "auto"])
def test_several_processes_need_a_directory(processes: str) -> None:
    (found,) = problems(assignments=["data=memory:", f"processes={processes}"])
    assert "cannot be with" in found
    assert 'data = "memory:" (--set data)' in found
    assert "cluster.processes = 1" in found
    assert merged(assignments=["data=memory:", "processes=1"]).settings.cluster.processes == 1


def test_every_process_needs_a_port_of_its_own() -> None:
    (found,) = problems(assignments=["cluster.first_port=65534", "processes=3"])
    assert "cluster.first_port = 65534 (--set cluster.first_port) leaves too few ports" in found
    assert (
        merged(assignments=["cluster.first_port=65533", "processes=3"]).settings.cluster.first_port
        == 65533
    )


@pytest.mark.parametrize(
    ("assignments", "shards"),
    [
        ([], 1),
        (["processes=1"], 1),
        (["processes=2"], 16),
        (["processes=auto"], 16),
        (["processes=2", "log.journal_shards=4"], 4),
        (["processes=2", "log.journal_shards=1"], 1),
    ],
)
def test_new_journals_have_more_shards_with_several_processes(
    assignments: list[str], shards: int
) -> None:
    assert merged(assignments=assignments).settings.log.journal_shards == shards
