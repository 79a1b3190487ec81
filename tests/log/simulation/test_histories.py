"""Random histories of the log on a disk that fails: some seeds are fixed, some change every day.

`bin/soak log` runs new seeds for as long as you like.
"""

from __future__ import annotations

import pytest

from tests.log.simulation.history import run_history
from tests.log.simulation.mutants import MUTANTS, SHOWN_BY, segments_are_not_synced
from tests.simulation.mutants import Mutant, check_repeats, check_report, first_failure, seeds_for
from tests.simulation.seeds import Seeds

SEEDS = Seeds(fixed=750, daily=250, chunk=50)
# Each mutant has to show within so many histories, unless a seed is noted that shows it.
SEEDS_FOR_A_MUTANT = range(120)


@pytest.mark.parametrize("seeds", SEEDS.chunks())
def test_log_keeps_its_promises_in_history(seeds: range) -> None:
    for seed in seeds:
        run_history(seed)


def test_cursor_whose_last_record_was_damaged_is_what_it_was_before() -> None:
    run_history(975_395_682)  # found by bin/soak


def test_batch_with_two_runs_of_a_partition_is_rewritten_in_part() -> None:
    run_history(975_395_976)  # found by bin/soak


def test_history_repeats_from_its_seed() -> None:
    check_repeats(run_history, range(10))


def test_histories_meet_recoveries_and_store_messages() -> None:
    outcomes = [run_history(seed) for seed in range(30)]
    assert sum(outcome.counts["recoveries"] for outcome in outcomes) >= 10
    assert sum(outcome.counts["messages"] for outcome in outcomes) >= 300


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mistake_in_the_log_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    first_failure(run_history, seeds_for(mutant, SHOWN_BY, SEEDS_FOR_A_MUTANT))


def test_failure_reports_seed_transcript_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    segments_are_not_synced(monkeypatch)
    failure = first_failure(run_history, SEEDS_FOR_A_MUTANT)
    assert "\n  append #1 " in str(failure)
    check_report(failure, problem="", replay="bin/soak log")
