"""A short seeded round of what bin/soak does at length: vandals at every door of a real server."""

from __future__ import annotations

import asyncio

import pytest

from tests.soak.door import DOORS, visit_door
from tests.soak.tls_vandals import TLS_VANDALS

EVERY_WAY = {vandal.__name__ for vandals in DOORS.values() for vandal in vandals}


@pytest.mark.slow
def test_vandals_at_all_doors_disturb_nobody_and_leave_nothing_behind() -> None:
    outcome = asyncio.run(visit_door(0.1, seed=1, warm_up_s=0))
    assert outcome.visits.keys() == EVERY_WAY
    assert outcome.messages.keys() == DOORS.keys()


@pytest.mark.slow
def test_vandals_at_a_door_with_tls_disturb_nobody_and_leave_nothing_behind() -> None:
    outcome = asyncio.run(visit_door(0.1, seed=1, doors=("native",), with_tls=True, warm_up_s=0))
    assert outcome.visits.keys() >= {vandal.__name__ for vandal in TLS_VANDALS}
    assert outcome.messages["native"] > 0
