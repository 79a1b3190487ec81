"""Histories of a broker with acknowledged work, always the same ones; `bin/soak subscriptions` runs others."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from tests.broker.consumer_groups.simulation.history import HistoryFailed, run_history
from tests.broker.consumer_groups.simulation.mutants import (
    CHANGES,
    MUTANTS,
    Mutant,
    acks_are_said_to_be_stored_before_they_are,
)
from tests.broker.consumer_groups.simulation.plan import Plan

HISTORIES = 400
CHUNK = 10
# Each mistake has to show within so many histories.
SEEDS_FOR_A_MUTANT = 200


@pytest.mark.parametrize("first", range(0, HISTORIES, CHUNK))
def test_acknowledged_work_keeps_its_promises_in_history(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_history(seed)


def test_history_repeats_from_its_seed() -> None:
    for seed in range(5):
        assert run_history(seed) == run_history(seed)


def test_histories_do_something() -> None:
    outcomes = [run_history(seed) for seed in range(20)]
    assert sum(outcome.messages for outcome in outcomes) >= 500
    assert sum(outcome.deliveries for outcome in outcomes) >= 300
    assert sum(outcome.restarts for outcome in outcomes) >= 30
    assert sum(outcome.dead_letters for outcome in outcomes) >= 10


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mistake_with_acknowledged_work_is_found(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    change = CHANGES.get(mutant, lambda plan: plan)
    for seed in range(SEEDS_FOR_A_MUTANT):
        failure = _failure(seed, change)
        if failure is not None:
            # Found out by a promise that it broke, not by falling over its own feet.
            assert not failure.problem.startswith("unexpected"), str(failure)
            return
    pytest.fail(f"none of {SEEDS_FOR_A_MUTANT} histories broke a promise")


def _failure(seed: int, change: Callable[[Plan], Plan] = lambda plan: plan) -> HistoryFailed | None:
    try:
        run_history(seed, change)
    except HistoryFailed as failure:
        return failure
    return None


def test_failure_tells_seed_transcript_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    acks_are_said_to_be_stored_before_they_are(monkeypatch)
    failure = next(found for seed in range(SEEDS_FOR_A_MUTANT) if (found := _failure(seed)))
    text = str(failure)
    assert f"history {failure.seed}: s" in text
    assert "\n  > " in text  # the lines that concern the message
    assert text.endswith(f"replay: bin/soak subscriptions --seed {failure.seed}")
    # It has to cross from a worker process to bin/soak.
    assert str(pickle.loads(pickle.dumps(failure))) == text
