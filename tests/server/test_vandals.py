"""A short seeded round of what bin/soak does at length: attacks on every listener of a real server."""

from __future__ import annotations

import asyncio

import pytest

from tests.soak.listeners import VANDALS, attack_listeners, attack_name
from tests.soak.vandals.tls import TLS_ATTACKS

EVERY_ATTACK = {
    attack_name(name, attack) for name, vandal in VANDALS.items() for attack in vandal.attacks
}


@pytest.mark.slow
def test_vandals_at_all_listeners_disturb_nobody_and_leave_nothing_behind() -> None:
    report = asyncio.run(attack_listeners(0.1, seed=1, warm_up_s=0))
    assert report.attacks.keys() == EVERY_ATTACK
    assert report.messages.keys() == VANDALS.keys()


@pytest.mark.slow
def test_vandals_at_a_listener_with_tls_disturb_nobody_and_leave_nothing_behind() -> None:
    report = asyncio.run(attack_listeners(0.1, 1, ("native",), with_tls=True, warm_up_s=0))
    assert report.attacks.keys() >= {attack_name("tls", attack) for attack in TLS_ATTACKS}
    assert report.messages["native"] > 0
