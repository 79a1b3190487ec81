"""Two thousand histories of the log on a disk that fails, always the same; `bin/soak log` runs others."""

from __future__ import annotations

import pickle

import pytest

from tests.log.simulation.history import HistoryFailed, run_history
from tests.log.simulation.mutants import MUTANTS, Mutant, segments_are_not_synced

HISTORIES = 2_000
CHUNK = 50
# Each mistake has to show within so many histories; when this was written the rarest took the 80th.
SEEDS_FOR_A_MUTANT = 120
# Mistakes that take more than that many show here.
SEEDS_OF_RARE_MISTAKES = (363, 1263)


@pytest.mark.parametrize("first", range(0, HISTORIES, CHUNK))
def test_log_keeps_its_promises_in_history(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_history(seed)


def test_cursor_whose_last_record_was_damaged_is_what_it_was_before() -> None:
    run_history(975_395_682)  # found by bin/soak


def test_batch_with_two_runs_of_a_partition_is_rewritten_in_part() -> None:
    run_history(975_395_976)  # found by bin/soak


def test_history_repeats_from_its_seed() -> None:
    for seed in range(10):
        assert run_history(seed) == run_history(seed)


def test_histories_meet_recoveries_and_store_messages() -> None:
    outcomes = [run_history(seed) for seed in range(30)]
    assert sum(outcome.recoveries for outcome in outcomes) >= 10
    assert sum(outcome.messages for outcome in outcomes) >= 300


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mistake_in_the_log_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(_fails(seed) for seed in (*range(SEEDS_FOR_A_MUTANT), *SEEDS_OF_RARE_MISTAKES))


def _fails(seed: int) -> bool:
    try:
        run_history(seed)
    except HistoryFailed:
        return True
    return False


def test_failure_tells_seed_transcript_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    segments_are_not_synced(monkeypatch)
    seed = next(seed for seed in range(SEEDS_FOR_A_MUTANT) if _fails(seed))
    with pytest.raises(HistoryFailed) as failure:
        run_history(seed)
    text = str(failure.value)
    assert f"history {seed}: " in text
    assert "\n  append #1 " in text
    assert text.endswith(f"replay: bin/soak log --seed {seed}")
    # It has to cross from a worker process to bin/soak.
    assert str(pickle.loads(pickle.dumps(failure.value))) == text
