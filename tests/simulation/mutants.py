"""Checks that a simulator finds deliberate mistakes ("mutants"), and that its failures can be replayed."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping

import pytest

from tests.simulation.history import HistoryFailed, Outcome

# A mutant patches the code under test.
Mutant = Callable[[pytest.MonkeyPatch], None]
RunHistory = Callable[[int], Outcome]


def seeds_for(mutant: Mutant, shown_by: Mapping[Mutant, int], others: Iterable[int]) -> list[int]:
    """The seed that showed this mutant before, if one is noted, and then the others.

    A rare mutant would run dozens of histories; when the noted seed no longer shows it, one of the others has to.
    """
    return [shown_by[mutant], *others] if mutant in shown_by else [*others]


def first_failure(run_history: RunHistory, seeds: Iterable[int]) -> HistoryFailed:
    """The failure of the first seed that breaks a promise. Fails the test if all seeds hold.

    A promise has to break: an unexpected error shows that the mutant crashes, not that the model notices it.
    """
    count = 0
    for seed in seeds:
        count += 1
        try:
            run_history(seed)
        except HistoryFailed as failure:
            if not failure.is_violation:
                raise
            return failure
    pytest.fail(f"none of {count} histories broke a promise")


def check_repeats(run_history: RunHistory, seeds: Iterable[int]) -> None:
    """A seed always gives the same history."""
    for seed in seeds:
        assert run_history(seed) == run_history(seed)


def check_report(failure: HistoryFailed, problem: str, replay: str) -> None:
    """The text names the seed, the problem and the replay command, also after a worker process pickled it."""
    text = str(failure)
    assert f"history {failure.seed}: {problem}" in text
    assert text.endswith(f"replay: {replay} --seed {failure.seed}")
    assert str(pickle.loads(pickle.dumps(failure))) == text
