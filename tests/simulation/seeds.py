"""Which seeds a test run uses: some are the same in every run, some are chosen by the date.

The same seeds find nothing new after their first run, and new seeds in every run would make a failure hard to repeat.
So each simulator runs a few fixed seeds and a few seeds of the day. `TEST_SEED=20261118 bin/test` repeats a day.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import pytest
from _pytest.mark import ParameterSet

# Not RUNNEL_…: a server that a test starts would refuse the variable as an unknown setting.
VARIABLE: Final = "TEST_SEED"
# Seeds of a day: 20261118_000 to 20261118_999.
_DAILY_MAX: Final = 1_000


def seed_of_the_day() -> int:
    """The number that chooses the daily seeds: TEST_SEED, else today's date as 20261118 (UTC)."""
    chosen = os.environ.get(VARIABLE)
    return int(chosen) if chosen else int(datetime.now(UTC).strftime("%Y%m%d"))


def fix_seed_of_the_day() -> str:
    """Set TEST_SEED for this process and the test processes it starts, and return a line that names it.

    Without it, test processes that start before and after midnight would collect different seeds.
    """
    seed = os.environ[VARIABLE] = str(seed_of_the_day())
    return f"seeds of the day: {VARIABLE}={seed} bin/test … repeats them"


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seeds of one simulator: so many fixed ones from 0 on, so many of the day, tested in chunks."""

    fixed: int
    daily: int
    chunk: int

    def __post_init__(self) -> None:
        assert self.daily <= _DAILY_MAX

    def chunks(self) -> list[ParameterSet]:
        """Parameters of a test: ranges of seeds. Their names are the same every day, so reports can be compared."""
        return [*self._chunks("fixed", 0, self.fixed), *self._chunks("daily", _today(), self.daily)]

    def _chunks(self, name: str, first: int, count: int) -> Iterator[ParameterSet]:
        for begin in range(0, count, self.chunk):
            seeds = range(first + begin, first + min(begin + self.chunk, count))
            yield pytest.param(seeds, id=f"{name}-{begin}")


def _today() -> int:
    return seed_of_the_day() * _DAILY_MAX
