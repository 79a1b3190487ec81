"""Three thousand histories of subscriptions, always the same; `bin/soak subscriptions` runs others."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from tests.group_rules.simulation.history import HistoryFailed, run_history
from tests.group_rules.simulation.mutants import ForgetsAcks

HISTORIES = 3_200
CHUNK = 100


@pytest.mark.parametrize("first", range(0, HISTORIES, CHUNK))
def test_subscriptions_keep_their_promises_in_history(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_history(seed)


def test_history_repeats_from_its_seed() -> None:
    for seed in range(10):
        assert run_history(seed) == run_history(seed)


def test_histories_meet_every_mode_and_do_something() -> None:
    outcomes = [run_history(seed) for seed in range(60)]
    modes = Counter(outcome.plan.mode for outcome in outcomes)
    assert min(modes.values()) >= 5
    assert len(modes) == 3
    assert sum(outcome.restarts for outcome in outcomes) >= 20
    assert sum(outcome.messages for outcome in outcomes) >= 1_000
    assert sum(outcome.deliveries for outcome in outcomes) >= 1_000


def test_failure_tells_seed_transcript_and_replay() -> None:
    seed, failure = next(
        (seed, failure) for seed in range(100) if (failure := _failure(seed)) is not None
    )
    text = str(failure)
    assert f"history {seed}: that " in text
    assert "\n  > " in text  # the lines that concern the message
    assert text.endswith(f"replay: bin/soak subscriptions --seed {seed}")
    # It has to cross from a worker process to bin/soak.
    assert str(pickle.loads(pickle.dumps(failure))) == text


def _failure(seed: int) -> HistoryFailed | None:
    try:
        run_history(seed, make_group=ForgetsAcks)
    except HistoryFailed as failure:
        return failure
    return None
