"""For tests of programs that use Runnel: brokers in memory, and a clock in the test's hand.

In the test's own event loop, with time that the test moves (retention and lingering obey it):

    async with open_broker(clock=VirtualClock()) as broker, broker.connect() as bus: ...

As a pytest fixture, in a thread of its own and with a URL, for tests of any kind (no configuration needed):

    def test_order_is_announced(runnel_broker):
        with runnel_broker.connect_blocking() as bus: ...
"""

from runnel.testing.brokers import BrokerThread, open_broker
from runnel.testing.clock import VirtualClock

__all__ = ["BrokerThread", "VirtualClock", "open_broker"]
