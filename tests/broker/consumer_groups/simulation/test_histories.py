"""Random histories of a broker with consumer groups: some seeds are fixed, some change every day.

`bin/soak subscriptions` runs new seeds for as long as you like.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.broker.consumer_groups.simulation.history import run_history
from tests.broker.consumer_groups.simulation.mutants import (
    CHANGES,
    MUTANTS,
    SHOWN_BY,
    acks_are_said_to_be_stored_before_they_are,
)
from tests.simulation.mutants import Mutant, check_repeats, check_report, first_failure, seeds_for
from tests.simulation.seeds import Seeds

SEEDS = Seeds(fixed=150, daily=50, chunk=10)
# Each mutant has to show within so many histories.
SEEDS_FOR_A_MUTANT = range(200)


@pytest.mark.parametrize("seeds", SEEDS.chunks())
def test_acknowledged_work_keeps_its_promises_in_history(seeds: range) -> None:
    for seed in seeds:
        run_history(seed)


def test_history_repeats_from_its_seed() -> None:
    check_repeats(run_history, range(5))


def test_histories_do_something() -> None:
    outcomes = [run_history(seed) for seed in range(20)]
    assert sum(outcome.counts["messages"] for outcome in outcomes) >= 500
    assert sum(outcome.counts["deliveries"] for outcome in outcomes) >= 300
    assert sum(outcome.counts["restarts"] for outcome in outcomes) >= 30
    assert sum(outcome.counts["dead letters"] for outcome in outcomes) >= 10


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mistake_with_acknowledged_work_is_found(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    change = CHANGES.get(mutant, lambda plan: plan)
    seeds = seeds_for(mutant, SHOWN_BY, SEEDS_FOR_A_MUTANT)
    first_failure(partial(run_history, change=change), seeds)


def test_failure_reports_seed_transcript_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = acks_are_said_to_be_stored_before_they_are
    mutant(monkeypatch)
    failure = first_failure(run_history, seeds_for(mutant, SHOWN_BY, SEEDS_FOR_A_MUTANT))
    assert "\n  > " in str(failure)  # the lines that concern the message
    check_report(failure, problem="s", replay="bin/soak subscriptions")
