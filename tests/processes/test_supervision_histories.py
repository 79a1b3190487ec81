"""Random histories of a supervisor, and deliberate mistakes that they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest

from runnel.processes.supervisor import (
    AnnounceAll,
    KillChild,
    ReapChild,
    StartChild,
    Supervisor,
    SupervisorAction,
)
from tests.processes.supervision import run_history
from tests.simulation.mutants import check_repeats, first_failure
from tests.simulation.seeds import Seeds

SEEDS = Seeds(fixed=300, daily=100, chunk=100)
SEEDS_FOR_A_MUTANT = range(300)


@pytest.mark.parametrize("seeds", SEEDS.chunks())
def test_supervision_keeps_its_promises_in_history(seeds: range) -> None:
    for seed in seeds:
        run_history(seed)


def test_history_repeats_from_its_seed() -> None:
    check_repeats(run_history, range(5))


def test_histories_do_something() -> None:
    counts: Counter[str] = Counter()
    for seed in range(100):
        counts.update(run_history(seed).counts)
    assert counts["starts"] > 300
    assert counts["kills"] > 50
    assert counts["announced"] > 50
    assert counts["sleeps"] > 50
    assert counts["reloads"] > 50


class SpinsInACrashLoop(Supervisor):
    def _delay_ns(self, short_lives: int) -> int:
        return self._rules.delay_ns_min


class ForgetsASilentChild(Supervisor):
    def tick(self, now_ns: int) -> Sequence[SupervisorAction]:
        return [each for each in super().tick(now_ns) if not isinstance(each, KillChild)]


class KillsAfterASleep(Supervisor):
    def _forgive_sleep(self, now_ns: int) -> None:
        self._looked_ns = now_ns


class StartsWhileItEnds(Supervisor):
    def stop(self, now_ns: int) -> Sequence[SupervisorAction]:
        waiting = [child for child in self.children.values() if not child.has_process]
        actions = super().stop(now_ns)
        return [*actions, *(self._start(child, now_ns) for child in waiting)]


class StartsOneLess(Supervisor):
    def tick(self, now_ns: int) -> Sequence[SupervisorAction]:
        self.children[1].restart_ns = 2**63
        return super().tick(now_ns)


class AnnouncesTheFirst(Supervisor):
    def serves(self, number: int, life: int, now_ns: int) -> Sequence[SupervisorAction]:
        actions = super().serves(number, life, now_ns)
        if number == 1 and not self._has_announced:
            self._has_announced = True
            return [AnnounceAll()]
        return actions


class NeverKillsAtTheEnd(Supervisor):
    def stop(self, now_ns: int) -> Sequence[SupervisorAction]:
        actions = super().stop(now_ns)
        self._kill_ns = 2**63
        return actions


class ReapsNobody(Supervisor):
    def ended(
        self, number: int, life: int, exit_code: int, now_ns: int
    ) -> Sequence[SupervisorAction]:
        actions = super().ended(number, life, exit_code, now_ns)
        return [each for each in actions if not isinstance(each, ReapChild)]


class StartsTwice(Supervisor):
    def begin(self, now_ns: int) -> Sequence[SupervisorAction]:
        actions = super().begin(now_ns)
        return [*actions, StartChild(1, 1)]


@pytest.mark.parametrize(
    "mutant",
    [
        SpinsInACrashLoop,
        ForgetsASilentChild,
        KillsAfterASleep,
        StartsWhileItEnds,
        StartsOneLess,
        AnnouncesTheFirst,
        NeverKillsAtTheEnd,
        ReapsNobody,
        StartsTwice,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_broken_supervisor_is_found(mutant: type[Supervisor]) -> None:
    first_failure(partial(run_history, make=mutant), SEEDS_FOR_A_MUTANT)
