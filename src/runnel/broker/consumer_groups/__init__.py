"""Acknowledged work: joins the rules of consumer groups to log, clock and listeners.

Read `subscriptions.py` for what there is, `consumer_group.py` for how a message gets to a consumer and back,
`ack_journals.py` for what is stored. The rules themselves are in `runnel.group_rules`.
"""

from runnel.broker.consumer_groups.consumer import OpenConsumer, WorkConsumer
from runnel.broker.consumer_groups.consumer_groups import ConsumerGroups
from runnel.broker.consumer_groups.dead_letter_queues import SettleRequest
from runnel.broker.consumer_groups.group_holds import GroupHolds
from runnel.broker.consumer_groups.sink import HeldPart, WorkDelivery, WorkSink
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest

__all__ = [
    "ConsumerGroups",
    "GroupHolds",
    "HeldPart",
    "OpenConsumer",
    "SettleRequest",
    "SubscriptionRequest",
    "WorkConsumer",
    "WorkDelivery",
    "WorkSink",
]
