"""The pytest fixtures. Every pytest run with Runnel installed imports this module: fixtures import the rest on use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runnel.config import Settings
    from runnel.testing.brokers import BrokerThread


@pytest.fixture
def runnel_settings() -> Settings | None:
    """The settings of `runnel_broker`. Override this fixture for rules and limits of your own."""
    return None


@pytest.fixture
def runnel_broker(runnel_settings: Settings | None) -> Iterator[BrokerThread]:
    """A broker in memory for one test, in a thread of its own: `url`, `connect`, `connect_blocking`, `advance`."""
    from runnel.testing.brokers import BrokerThread

    broker = BrokerThread(runnel_settings)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()
