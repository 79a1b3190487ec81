"""Random histories of a cluster: some seeds are fixed, some change every day.

`bin/soak cluster` runs new seeds for as long as you like.
"""

from __future__ import annotations

import pytest

from tests.cluster.simulation.history import run_history
from tests.cluster.simulation.mutants import MUTANTS, SHOWN_BY, plan_is_carried_out_twice
from tests.simulation.mutants import Mutant, check_repeats, check_report, first_failure, seeds_for
from tests.simulation.seeds import Seeds

SEEDS = Seeds(fixed=80, daily=60, chunk=20)
# Each mutant has to show within so many histories.
SEEDS_FOR_A_MUTANT = range(300)


@pytest.mark.parametrize("seeds", SEEDS.chunks())
def test_cluster_keeps_its_promises_in_history(seeds: range) -> None:
    for seed in seeds:
        run_history(seed)


def test_history_repeats_from_its_seed() -> None:
    check_repeats(run_history, range(3))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mistake_in_the_cluster_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    first_failure(run_history, seeds_for(mutant, SHOWN_BY, SEEDS_FOR_A_MUTANT))


def test_failure_reports_seed_transcript_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_is_carried_out_twice(monkeypatch)
    failure = first_failure(run_history, SEEDS_FOR_A_MUTANT)
    check_report(failure, problem="", replay="bin/soak cluster")
