"""Random histories of consumer groups: some seeds are fixed, some change every day.

`bin/soak subscriptions` runs new seeds for as long as you like.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

import pytest

from runnel.group_rules.group import Group
from tests.group_rules.simulation.history import run_history
from tests.group_rules.simulation.mutants import MUTANTS, ForgetsAcks
from tests.group_rules.simulation.plan import draw
from tests.group_rules.simulation.slips import SLIPS
from tests.simulation.mutants import Mutant, check_repeats, check_report, first_failure
from tests.simulation.seeds import Seeds

SEEDS = Seeds(fixed=1_200, daily=400, chunk=100)
# Each mutant has to show within so many histories.
SEEDS_FOR_A_MUTANT = range(250)


@pytest.mark.parametrize("seeds", SEEDS.chunks())
def test_subscriptions_keep_their_promises_in_history(seeds: range) -> None:
    for seed in seeds:
        run_history(seed)


def test_history_repeats_from_its_seed() -> None:
    check_repeats(run_history, range(10))


def test_plans_have_every_mode() -> None:
    modes = Counter(draw(Random(seed)).mode for seed in range(60))
    assert min(modes.values()) >= 5
    assert len(modes) == 3


def test_histories_do_something() -> None:
    outcomes = [run_history(seed) for seed in range(60)]
    assert sum(outcome.counts["restarts"] for outcome in outcomes) >= 20
    assert sum(outcome.counts["messages"] for outcome in outcomes) >= 1_000
    assert sum(outcome.counts["deliveries"] for outcome in outcomes) >= 1_000


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_rule_is_found(mutant: type[Group]) -> None:
    first_failure(partial(run_history, make_group=mutant), SEEDS_FOR_A_MUTANT)


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.__name__)
def test_slip_inside_is_found(slip: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    slip(monkeypatch)
    first_failure(run_history, SEEDS_FOR_A_MUTANT)


def test_failure_reports_seed_transcript_and_replay() -> None:
    failure = first_failure(partial(run_history, make_group=ForgetsAcks), SEEDS_FOR_A_MUTANT)
    assert "\n  > " in str(failure)  # the lines that concern the message
    check_report(failure, problem="that ", replay="bin/soak subscriptions")
