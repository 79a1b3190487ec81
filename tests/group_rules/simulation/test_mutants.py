"""A group that breaks a rule is found out, by what it does and not by how it is made."""

from __future__ import annotations

import pytest

from runnel.group_rules.group import Group
from tests.group_rules.simulation.history import HistoryFailed, run_history
from tests.group_rules.simulation.mutants import MUTANTS
from tests.group_rules.simulation.slips import SLIPS, Slip

# Each mistake has to show within so many histories.
SEEDS_FOR_A_MUTANT = 250


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_rule_is_found(mutant: type[Group]) -> None:
    _assert_found(mutant)


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.__name__)
def test_slip_inside_is_found(slip: Slip, monkeypatch: pytest.MonkeyPatch) -> None:
    slip(monkeypatch)
    _assert_found(Group)


def _assert_found(make_group: type[Group]) -> None:
    for seed in range(SEEDS_FOR_A_MUTANT):
        try:
            run_history(seed, make_group=make_group)
        except HistoryFailed as failure:
            # Found out by a promise that it broke, not by falling over its own feet.
            if failure.problem.startswith("unexpected"):
                raise
            return
    pytest.fail(f"none of {SEEDS_FOR_A_MUTANT} histories broke a promise")
