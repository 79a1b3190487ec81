"""JetStream as a queue: a durable pull consumer that four processes share, with nats-py.

- Under uvloop. Publishing: `js.publish_async` with 4,000 in flight, then `publish_async_completed`.
- Consuming: `fetch` of 500 messages at a time and `message.ack()` for each, which hands it to the client's buffer;
  `ack_sync`, which waits for the server's word, takes a request for each.
- `max_ack_pending` is raised from 1,000, which four consumers would exhaust with one fetch each.
- The stream keeps what was acknowledged, as Runnel's topic and the Redis stream do here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems import nats_system
from bench.systems.nats_system import IN_FLIGHT_MAX
from bench.systems.system import payloads
from bench.systems.work import AckTally, WorkPlan

NAME = nats_system.NAME
absence, serve, version = nats_system.absence, nats_system.serve, nats_system.version

_STREAM, _SUBJECT, _DURABLE = "WORK", "stored.work", "work"
_MESSAGES_PER_FETCH = 500
_ACKS_PENDING_MAX = 20_000
_FETCH_SECONDS_MAX = 0.5


async def _open(plan: WorkPlan) -> tuple[Any, Any]:
    import nats

    nc = await nats.connect(plan.url, skip_subject_validation=True, connect_timeout=20)
    js = nc.jetstream(timeout=60, publish_async_max_pending=IN_FLIGHT_MAX)
    await js.add_stream(name=_STREAM, subjects=[_SUBJECT])
    return nc, js


def produce(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        nc, js = await _open(plan)
        data = payloads()
        authenticator.ready()
        authenticator.wait_go()
        begin_ns = time.time_ns()
        for number in range(plan.count):
            await js.publish_async(_SUBJECT, data[number % len(data)])
        await js.publish_async_completed()
        report = RoleReport(begin_ns, time.time_ns(), plan.count)
        await nc.close()
        return report

    return uvloop.run(work())


def consume(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        from nats.js.api import AckPolicy, ConsumerConfig

        nc, js = await _open(plan)
        config = ConsumerConfig(
            ack_policy=AckPolicy.EXPLICIT, max_ack_pending=_ACKS_PENDING_MAX, ack_wait=60
        )
        pulling = await js.pull_subscribe(_SUBJECT, _DURABLE, stream=_STREAM, config=config)
        with AckTally(plan.tally, plan.place) as tally:
            authenticator.ready()
            while not authenticator.is_over():
                try:
                    messages = await pulling.fetch(_MESSAGES_PER_FETCH, timeout=_FETCH_SECONDS_MAX)
                except TimeoutError:  # nothing to do
                    continue
                for message in messages:
                    await message.ack()
                tally.add(len(messages))
            await nc.flush(timeout=30)
            await nc.close()
            return tally.report()

    return uvloop.run(work())


def audit(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    """What the server says is acknowledged, and how much it delivered more than once."""

    async def work() -> RoleReport:
        nc, js = await _open(plan)
        authenticator.ready()
        deadline = time.monotonic() + 5
        while True:  # it writes acknowledgements down a moment after they came
            info = await js.consumer_info(_STREAM, _DURABLE)
            acknowledged = info.ack_floor.stream_seq
            if acknowledged == plan.count or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.05)
        await nc.close()
        return RoleReport(messages=acknowledged, misplaced=info.delivered.consumer_seq - plan.count)

    return uvloop.run(work())
