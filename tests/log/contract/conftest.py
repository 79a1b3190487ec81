"""Every test of the contract runs once for each store."""

from __future__ import annotations

import pytest

from tests.log.contract.stores import Store


@pytest.fixture(params=list(Store), ids=lambda store: store.value.replace(" ", "-"))
def store(request: pytest.FixtureRequest) -> Store:
    found = request.param
    assert isinstance(found, Store)
    return found
