"""The Python client: an asyncio bus, and the same without `await`. Read `bus.py` first."""

from runnel.client.api import Opening, connect, connect_blocking, open_bus
from runnel.client.blocking import BlockingBus, BlockingPublisher, BlockingSubscription
from runnel.client.blocking_consumer import (
    BlockingConsumer,
    BlockingWork,
    BlockingWorkBatch,
)
from runnel.client.bus import Bus
from runnel.client.consumer import (
    Consumer,
    ConsumerStatistics,
    LateWork,
    Subscription,
    Work,
    WorkBatch,
)
from runnel.client.producer import Publisher
from runnel.client.results import BatchReceipt, ClusterStatus, Gap, Page, Receipt, ShardPage
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
    "ClusterStatus",
    "Consumer",
    "ConsumerStatistics",
    "DeadLetterPage",
    "Gap",
    "LateWork",
    "Opening",
    "Page",
    "Publisher",
    "Receipt",
    "ShardPage",
    "Subscription",
    "Work",
    "WorkBatch",
    "connect",
    "connect_blocking",
    "connection",
    "consumer",
    "open_bus",
]
