"""For tests of programs that use Runnel: brokers in memory, and a clock in the test's hand.

In the test's own event loop, with time that the test moves (retention and lingering obey it):

    async with open_broker(clock=VirtualClock()) as broker, broker.connect() as bus: ...

As a pytest fixture, in a thread of its own and with a URL, for tests of any kind (no configuration needed):

    def test_order_is_announced(runnel_broker):
        with runnel_broker.connect_blocking() as bus: ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runnel.testing.brokers import BrokerThread, open_broker
    from runnel.testing.clock import VirtualClock
    from runnel.testing.cluster import open_cluster

# Imported when they are first asked for: every pytest run comes by here, on its way to the plugin.
_PLACES = {
    "BrokerThread": "runnel.testing.brokers",
    "VirtualClock": "runnel.testing.clock",
    "open_cluster": "runnel.testing.cluster",
    "open_broker": "runnel.testing.brokers",
}

__all__ = ["BrokerThread", "VirtualClock", "open_broker", "open_cluster"]


def __getattr__(name: str) -> object:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(place), name)
    globals()[name] = found
    return found
