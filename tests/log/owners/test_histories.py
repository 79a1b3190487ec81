"""Random histories of several logs that hand the shards of one directory to each other.

`bin/soak log` runs new seeds for as long as you like.
"""

from __future__ import annotations

import pytest

from tests.log.owners.history import run_history
from tests.log.owners.mutants import (
    MUTANTS,
    SHOWN_BY,
    lost_shards_are_still_written_and_acknowledged,
)
from tests.simulation.mutants import Mutant, check_repeats, check_report, first_failure, seeds_for
from tests.simulation.seeds import Seeds

SEEDS = Seeds(fixed=200, daily=100, chunk=50)
# Each mutant has to show within so many histories, unless a seed is noted that shows it.
SEEDS_FOR_A_MUTANT = range(400)


@pytest.mark.parametrize("seeds", SEEDS.chunks())
def test_logs_of_one_directory_keep_their_promises_in_history(seeds: range) -> None:
    for seed in seeds:
        run_history(seed)


def test_history_repeats_from_its_seed() -> None:
    check_repeats(run_history, range(10))


def test_histories_have_many_terms_deaths_and_messages() -> None:
    outcomes = [run_history(seed) for seed in range(20)]
    assert sum(outcome.counts["terms"] for outcome in outcomes) >= 100
    assert sum(outcome.counts["deaths"] for outcome in outcomes) >= 10
    assert sum(outcome.counts["messages"] for outcome in outcomes) >= 200


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_mistake_in_handing_over_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    first_failure(run_history, seeds_for(mutant, SHOWN_BY, SEEDS_FOR_A_MUTANT))


def test_failure_reports_seed_transcript_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    lost_shards_are_still_written_and_acknowledged(monkeypatch)
    failure = first_failure(run_history, SEEDS_FOR_A_MUTANT)
    check_report(failure, problem="", replay="bin/soak log")
