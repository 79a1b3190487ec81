"""RabbitMQ as a queue: a durable queue and persistent messages, with aio-pika.

- Under uvloop. Publishing: publisher confirms, with 1,000 publishes waiting for theirs at a time.
- Consuming: `queue.consume` with a callback and a prefetch of 1,000; an acknowledgement of all messages so far on the
  channel (`multiple=True`) for every 250, and for what is left when nothing more comes.
- A server that stands for the whole part, and a queue for each run: rabbit_system.py.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems import rabbit_system
from bench.systems.rabbit_system import open_queue, publish_confirmed
from bench.systems.system import payloads
from bench.systems.work import TOPIC, AckTally, WorkPlan

NAME, STANDS, REMEDY = rabbit_system.NAME, rabbit_system.STANDS, rabbit_system.REMEDY
absence, serve, version = rabbit_system.absence, rabbit_system.serve, rabbit_system.version

_PREFETCH = 1000
_MESSAGES_PER_ACK = 250
_ACK_SECONDS_MAX = 0.01


async def _open(plan: WorkPlan, *, confirms: bool) -> tuple[Any, Any, Any]:
    return await open_queue(plan.url, TOPIC, plan.mode, confirms=confirms)


def produce(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        connection, channel, queue = await _open(plan, confirms=True)
        data = payloads()
        authenticator.ready()
        authenticator.wait_go()
        begin_ns = time.time_ns()
        await publish_confirmed(channel, queue.name, data, plan.count)
        report = RoleReport(begin_ns, time.time_ns(), plan.count)
        await connection.close()
        return report

    return uvloop.run(work())


def consume(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        connection, channel, queue = await _open(plan, confirms=False)
        await channel.set_qos(prefetch_count=_PREFETCH)
        with AckTally(plan.tally, plan.place) as tally:
            unacknowledged = _Unacknowledged(tally)
            await queue.consume(unacknowledged.take)
            authenticator.ready()
            await authenticator.wait_over()
            await connection.close()
            return tally.report(misplaced=unacknowledged.redelivered)

    return uvloop.run(work())


class _Unacknowledged:
    """What has come on a channel since its last acknowledgement, which is sent in time also when little comes."""

    def __init__(self, tally: AckTally) -> None:
        self._tally = tally
        self._count = 0
        self._last: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._acking: set[asyncio.Task[None]] = set()
        self.redelivered = 0

    async def take(self, message: Any) -> None:
        self.redelivered += message.redelivered
        self._last = message
        self._count += 1
        if self._count >= _MESSAGES_PER_ACK:
            await self._ack()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_ACK_SECONDS_MAX, self._ack_rest)

    def _ack_rest(self) -> None:
        self._timer = None
        if self._count:
            task = asyncio.create_task(self._ack())
            self._acking.add(task)
            task.add_done_callback(self._acking.discard)

    async def _ack(self) -> None:
        count, last = self._count, self._last
        self._count = 0
        await last.ack(multiple=True)
        self._tally.add(count)


def audit(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    """What the server says is acknowledged: with its consumers gone, all that is left in the queue is not."""

    async def work() -> RoleReport:
        connection, _, queue = await _open(plan, confirms=False)
        authenticator.ready()
        left = queue.declaration_result.message_count
        await connection.close()
        return RoleReport(messages=plan.count - left)

    return uvloop.run(work())
