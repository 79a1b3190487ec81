"""The Python client: an asyncio bus, and the same without `await`."""

from runnel.client.api import connect, connect_blocking, open_bus
from runnel.client.blocking import BlockingBus, BlockingPublisher, BlockingSubscription
from runnel.client.blocking_consumer import (
    BlockingConsumer,
    BlockingWork,
    BlockingWorkBatch,
)
from runnel.client.bus import Bus
from runnel.client.consumer import Consumer
from runnel.client.ledger import ConsumerStatistics
from runnel.client.publisher import Publisher
from runnel.client.results import BatchReceipt, Gap, Page, Receipt
from runnel.client.subscription import Subscription
from runnel.client.work import LateWork, Work, WorkBatch
from runnel.client.work_verbs import DeadLetterPage

__all__ = [
    "BatchReceipt",
    "BlockingBus",
    "BlockingConsumer",
    "BlockingPublisher",
    "BlockingSubscription",
    "BlockingWork",
    "BlockingWorkBatch",
    "Bus",
    "Consumer",
    "ConsumerStatistics",
    "DeadLetterPage",
    "Gap",
    "LateWork",
    "Page",
    "Publisher",
    "Receipt",
    "Subscription",
    "Work",
    "WorkBatch",
    "connect",
    "connect_blocking",
    "open_bus",
]
