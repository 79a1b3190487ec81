"""Every test of the contract runs once for each kind of state."""

from __future__ import annotations

import pytest

from tests.cluster.contract.places import Kind


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> Kind:
    found = request.param
    assert isinstance(found, Kind)
    return found
