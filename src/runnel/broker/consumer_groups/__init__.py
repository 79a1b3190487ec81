"""Acknowledged work: subscriptions joined to log, clock and doors.

Read `subscriptions` for what there is, `consumer_group` for how a message gets to a consumer and back, `state` for
what is written down; the rules themselves are in `runnel.group_rules`.
"""

from __future__ import annotations

from runnel.broker.consumer_groups.consumer import WorkConsumer
from runnel.broker.consumer_groups.consumer_groups import ConsumerGroups
from runnel.broker.consumer_groups.sink import WorkDelivery, WorkSink

__all__ = ["ConsumerGroups", "WorkConsumer", "WorkDelivery", "WorkSink"]
