"""Acknowledged work: subscriptions joined to log, clock and doors.

Read `subscriptions` for what there is, `crew` for how a message gets to a consumer and back, `state` for what is
written down; the rules themselves are in `runnel.subscriptions`.
"""

from __future__ import annotations

from runnel.broker.work.consumer import WorkConsumer
from runnel.broker.work.sink import WorkDelivery, WorkSink
from runnel.broker.work.work import Work

__all__ = ["Work", "WorkConsumer", "WorkDelivery", "WorkSink"]
