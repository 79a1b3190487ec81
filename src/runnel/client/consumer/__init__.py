"""Reading: live subscriptions, and consumers with leases and acks. Read `consumer.py` or `subscription.py` first."""

from runnel.client.consumer.consumer import Consumer
from runnel.client.consumer.consumer_session import ConsumerSession
from runnel.client.consumer.deliveries import (
    BEGUN,
    RECALLED,
    HeldDelivery,
    LeasedItem,
    LeaseHolder,
)
from runnel.client.consumer.ledger import ConsumerStatistics, Ledger
from runnel.client.consumer.part import ConsumerPart, LeasePart
from runnel.client.consumer.start import OffsetMap, StartAt, partition_places, start_of, time_ns_of
from runnel.client.consumer.subscription import Subscription
from runnel.client.consumer.subscription_parts import (
    NodeLinks,
    PartDelivery,
    PartsRequest,
    SubscriptionParts,
)
from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.client.consumer.work import LateWork, LeasedBatch, Work, WorkBatch, WorkItem
from runnel.client.consumer.worker_pool import OnError, is_async

__all__ = [
    "BEGUN",
    "RECALLED",
    "Consumer",
    "ConsumerPart",
    "ConsumerSession",
    "ConsumerStatistics",
    "HeldDelivery",
    "LateWork",
    "LeaseHolder",
    "LeasePart",
    "LeasedBatch",
    "LeasedItem",
    "Ledger",
    "NodeLinks",
    "OffsetMap",
    "OnError",
    "PartDelivery",
    "PartsRequest",
    "StartAt",
    "Subscription",
    "SubscriptionParts",
    "SubscriptionPosition",
    "Work",
    "WorkBatch",
    "WorkItem",
    "is_async",
    "partition_places",
    "start_of",
    "time_ns_of",
]
