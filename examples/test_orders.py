"""A broker inside a test: in memory, new for every test, and its time passes when the test says so.

pytest examples/test_orders.py
"""

import pytest

import runnel
from runnel.config import Retain, Settings, TopicRule
from runnel.errors import OffsetGoneError
from runnel.testing import BrokerThread

DAY_NS = 86_400 * 10**9


def announce(order: int, url: str) -> None:
    """The program under test: it knows nothing of tests."""
    with runnel.connect_blocking(url) as bus:
        bus.publish("orders", b"%d" % order)


def test_order_is_announced(runnel_broker: BrokerThread) -> None:
    announce(17, runnel_broker.url)
    with runnel_broker.connect_blocking() as bus:
        assert [message.payload for message in bus.fetch("orders").messages] == [b"17"]


class TestRetention:
    @pytest.fixture
    def runnel_settings(self) -> Settings:
        return Settings(topics=(TopicRule(match="orders", retain=Retain(age_ns=DAY_NS)),))

    def test_old_orders_are_forgotten(self, runnel_broker: BrokerThread) -> None:
        announce(17, runnel_broker.url)
        runnel_broker.advance(2 * 86_400)  # two days pass at once
        with runnel_broker.connect_blocking() as bus, pytest.raises(OffsetGoneError):
            bus.fetch("orders", 1)
