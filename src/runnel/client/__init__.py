"""The Python client: an asyncio bus, and the same without `await`."""

from runnel.client.api import connect, connect_blocking, open_bus
from runnel.client.blocking import BlockingBus, BlockingPublisher, BlockingSubscription
from runnel.client.bus import Bus
from runnel.client.publisher import Publisher
from runnel.client.results import BatchReceipt, Gap, Page, Receipt
from runnel.client.subscription import Subscription

__all__ = [
    "BatchReceipt",
    "BlockingBus",
    "BlockingPublisher",
    "BlockingSubscription",
    "Bus",
    "Gap",
    "Page",
    "Publisher",
    "Receipt",
    "Subscription",
    "connect",
    "connect_blocking",
    "open_bus",
]
