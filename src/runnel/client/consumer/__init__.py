"""Reading: live subscriptions, and consumers with leases and acks. Read `consumer.py` or `subscription.py` first."""

from runnel.client.consumer.consumer import Consumer
from runnel.client.consumer.deliveries import HeldDelivery, LeasedItem
from runnel.client.consumer.ledger import ConsumerStatistics
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
    "Consumer",
    "ConsumerStatistics",
    "HeldDelivery",
    "LateWork",
    "LeasedBatch",
    "LeasedItem",
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
