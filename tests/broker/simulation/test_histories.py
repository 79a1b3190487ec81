"""Histories of the broker, always the same ones; `bin/soak broker` runs others."""

from __future__ import annotations

import pickle

import pytest

from tests.broker.simulation.history import HistoryFailed, run_history
from tests.broker.simulation.mutants import (
    MUTANTS,
    Mutant,
    pattern_is_not_looked_at,
)

HISTORIES = 120
CHUNK = 6
# Each mistake has to show within so many histories.
SEEDS_FOR_A_MUTANT = 300  # the rarest mistake shows in one history of fifty


@pytest.mark.parametrize("first", range(0, HISTORIES, CHUNK))
def test_broker_keeps_its_promises_in_history(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_history(seed)


def test_history_repeats_from_its_seed() -> None:
    for seed in range(3):
        assert run_history(seed) == run_history(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mistake_in_the_broker_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(_fails(seed) for seed in range(SEEDS_FOR_A_MUTANT))


def _fails(seed: int) -> bool:
    try:
        run_history(seed)
    except HistoryFailed:
        return True
    return False


def test_failure_tells_seed_transcript_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern_is_not_looked_at(monkeypatch)
    seed = next(seed for seed in range(SEEDS_FOR_A_MUTANT) if _fails(seed))
    with pytest.raises(HistoryFailed) as failure:
        run_history(seed)
    text = str(failure.value)
    assert f"history {seed}: reader " in text
    assert text.endswith(f"replay: bin/soak broker --seed {seed}")
    # It has to cross from a worker process to bin/soak.
    assert str(pickle.loads(pickle.dumps(failure.value))) == text
