"""Hypothesis chooses the operations of a history instead of a seed, and shrinks a failure to the fewest of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.broker.simulation.history import History
from tests.broker.simulation.mutants import (
    page_is_cut_short,
    reader_is_called_live_too_early,
)
from tests.simulation.history import Violation
from tests.simulation.mutants import Mutant

QUICKLY = settings(
    max_examples=40,
    stateful_step_count=30,
    # Hypothesis also draws what an operation draws, so that it shrinks; an operation draws a lot.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


TIMES = st.sampled_from((1, 2, 8))
TURNS = st.sampled_from((0, 1, 3, 20))  # of the event loop, after an operation


class BrokerAgainstModel(RuleBasedStateMachine):
    """A broker with topics on disk, in memory and not kept, read live and by fetching, compared with the model."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._history: History | None = None
        self._has_failed = False

    @initialize(random=st.randoms(use_true_random=False), timing=st.integers(0, 2**16))
    def begin(self, random: Random, timing: int) -> None:
        self._history = History(random, timing=Random(timing))
        self._do(self._history.open())

    @property
    def history(self) -> History:
        assert self._history is not None
        return self._history

    def _do(self, step: Awaitable[None]) -> None:
        try:
            self._loop.run_until_complete(_awaited(step))
            self.history.raise_problems()
        except BaseException:
            self._has_failed = True
            raise

    @rule(times=TIMES, turns=TURNS)
    def publish(self, times: int, turns: int) -> None:
        for _ in range(times):
            self._do(self.history.traffic.publish())
            self._do(self.history.take_turns(turns))

    @rule()
    def send_single_messages(self) -> None:
        self._do(self.history.traffic.send())

    @rule(times=TIMES)
    def publish_what_is_not_kept(self, times: int) -> None:
        for _ in range(times):
            self._do(self.history.traffic.publish_live())

    @rule()
    def subscribe(self) -> None:
        self._do(self.history.subscribe())

    @rule(times=TIMES, turns=TURNS)
    def grant_credit_or_pause(self, times: int, turns: int) -> None:
        for _ in range(times):
            self._do(self.history.grant())
            self._do(self.history.take_turns(turns))

    @rule(is_back=st.booleans())
    def lose_a_reader(self, *, is_back: bool) -> None:
        self._do(self.history.reconnect() if is_back else self.history.leave())

    @rule()
    def pass_time(self) -> None:
        self._do(self.history.pass_time())

    @rule(is_set=st.booleans())
    def set_or_remove_a_cursor(self, *, is_set: bool) -> None:
        self._do(self.history.set_cursor() if is_set else self.history.remove_cursor())

    @rule(is_whole=st.booleans())
    def purge_or_delete_a_topic(self, *, is_whole: bool) -> None:
        self._do(self.history.delete() if is_whole else self.history.purge())

    @rule(is_back=st.booleans())
    def lose_or_regain_a_shard(self, *, is_back: bool) -> None:
        self._do(self.history.regain_shard() if is_back else self.history.lose_shard())

    @rule()
    def store_in_a_lost_shard(self) -> None:
        self._do(self.history.traffic.publish_elsewhere())

    @rule()
    def wait_for_a_message(self) -> None:
        self._do(self.history.wait_for_message())

    @rule()
    def compare_at_rest(self) -> None:
        self._do(self.history.settle())

    @rule()
    def restart(self) -> None:
        self._do(self.history.restart())

    def teardown(self) -> None:
        try:
            if self._history is not None:
                if not self._has_failed:
                    self._do(self._history.end())
                note("\n".join(self._history.transcript()))
        finally:
            self._loop.run_until_complete(_cancel_others())
            self._loop.close()


async def _awaited(step: Awaitable[None]) -> None:
    await step


async def _cancel_others() -> None:
    """After a failure, tasks still run."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def test_broker_keeps_its_promises_whatever_is_done_in_whatever_order() -> None:
    run_state_machine_as_test(BrokerAgainstModel, settings=QUICKLY)


@pytest.mark.parametrize("mutant", [reader_is_called_live_too_early, page_is_cut_short])
def test_mistake_in_the_broker_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    without_shrinking = settings(QUICKLY, max_examples=80, phases=[Phase.generate])
    with pytest.raises(Violation):
        run_state_machine_as_test(BrokerAgainstModel, settings=without_shrinking)
