"""A history whose operations are written down instead of drawn, to be cut at every operation of its disk."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from runnel.config import (
    LimitSettings,
    LogSettings,
    Retain,
    Rotate,
    Settings,
    TopicRule,
    Until,
)
from runnel.topics.policies import Policies
from tests.fakes.disk import FakeDisk
from tests.fakes.power import PowerLoss
from tests.log.simulation import operations
from tests.log.simulation.checks import check_everything
from tests.log.simulation.history import History
from tests.log.simulation.plan import Plan
from tests.log.simulation.played_subscription import acknowledge
from tests.simulation import history as kernel

_RULES = (
    TopicRule(
        match="*",
        journal="all",
        rotate=Rotate(bytes_max=3_000, every_ns=None),
        retain=Retain(until=Until.ACKED),
    ),
)
PLAN = Plan(
    settings=Settings(
        data="data",
        limits=LimitSettings(open_files_max=16),
        log=LogSettings(
            allocate_bytes=512,
            disk_reserve_bytes=0,
            catalogue_log_bytes_max=900,
            state_log_bytes_max=40,
        ),
        topics=_RULES,
    ),
    policies=Policies(_RULES),
    topics=("a", "b", "c"),
    covered=("a", "b"),
    producers=("p",),
    steps=0,
    worker_turns_max=0,
    troubles=frozenset(),
    ends_in_damage=False,
)

EndProcess = Callable[[FakeDisk], None]


class Script(History):
    """Append, rotate, acknowledge, trim, rewrite, purge, delete, close, open; then once more over what is there.

    `end` is called with the disk of the process of that number, 0 or 1, and says how it ends.
    """

    def __init__(self, seed: int, life: int = 0, end: EndProcess | None = None) -> None:
        super().__init__(PLAN, Random(7))
        self.disk.random = Random(seed)
        self._life = life
        self._end = end
        self.lives: list[int] = []  # how many operations each process did

    async def live(self) -> None:
        try:
            await self._act(0)
            await self._act(1)
        except PowerLoss:
            await self._recover()
            await self._after()
        await self.open()
        await check_everything(self)
        await self.close()

    async def _act(self, life: int) -> None:
        if self._end is not None and life == self._life:
            self._end(self.disk)
        await self.open()
        for _ in range(2):
            await operations.append(self)
            await operations.append_named(self)
            await operations.sync(self)
        await operations.set_cursor(self)
        await acknowledge(self)
        await operations.trim(self)
        await operations.rewrite(self)
        await operations.purge(self)
        await operations.append_named(self)
        await operations.delete(self)
        await operations.append(self)
        done = self._disk_operations
        await self.close()
        self.lives.append(self._disk_operations - done)

    async def _after(self) -> None:
        """What is stored by the next process has to survive a power loss too."""
        await self.traffic.append_surely()
        await self.traffic.append_surely()
        self.say("power loss")
        self.disk.crash()
        await self._recover()
        await self.traffic.append_surely()
        await self.close()


def run_script(seed: int = 0, life: int = 0, end: EndProcess | None = None) -> Script:
    """Raises HistoryFailed as `run_history` does."""
    script = Script(seed, life, end)
    kernel.run(script, seed, "bin/test tests/log/test_crash_points.py")
    return script
