"""A short seeded round of what bin/soak does at length: vandals at the door of a real server."""

from __future__ import annotations

import asyncio

import pytest

from tests.soak.door import visit_door
from tests.soak.vandals import VANDALS


@pytest.mark.slow
def test_vandals_at_the_door_disturb_nobody_and_leave_nothing_behind() -> None:
    outcome = asyncio.run(visit_door(1.0, seed=1))
    assert len(outcome.visits) == len(VANDALS)
    assert outcome.messages > 0
