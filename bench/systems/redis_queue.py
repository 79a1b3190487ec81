"""Redis Streams as a queue: a consumer group that four processes share, with redis-py and hiredis.

- The blocking client, RESP2. Publishing: pipelines of 2,500 XADD; 1,000 and 5,000 came out the same or a little slower.
- Consuming: XREADGROUP of up to 1,000 entries, one XACK for all of them, and the next XREADGROUP in the same pipeline
  while there is more than one read can take.
- The stream keeps what was acknowledged, as Runnel's topic and JetStream's stream do here.
"""

from __future__ import annotations

import time
from typing import Any

from bench.processes import RolePipe, RoleReport
from bench.systems import redis_system
from bench.systems.system import payloads
from bench.systems.work import SUBSCRIPTION, TOPIC, AckTally, WorkPlan

NAME = redis_system.NAME
absence, serve, version = redis_system.absence, redis_system.serve, redis_system.version

_XADDS_MAX = 2500
_ENTRIES_PER_READ = 1000
_BLOCK_MS = 50


def _connect(plan: WorkPlan) -> Any:
    import redis

    return redis.Redis.from_url(plan.url, protocol=2)


def produce(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    client, data = _connect(plan), payloads()
    client.ping()
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    for begin in range(0, plan.count, _XADDS_MAX):
        with client.pipeline(transaction=False) as pipeline:
            for number in range(begin, min(begin + _XADDS_MAX, plan.count)):
                pipeline.xadd(TOPIC, {b"m": data[number % len(data)]})
            pipeline.execute()
    return RoleReport(begin_ns, time.time_ns(), plan.count)


def consume(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    import redis

    client = _connect(plan)
    try:
        client.xgroup_create(TOPIC, SUBSCRIPTION, id="0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):  # another consumer was first
            raise
    with AckTally(plan.tally, plan.place) as tally:
        authenticator.ready()
        ids: list[bytes] = []
        while not authenticator.is_over():
            with client.pipeline(transaction=False) as pipeline:
                if ids:
                    pipeline.xack(TOPIC, SUBSCRIPTION, *ids)
                pipeline.xreadgroup(
                    SUBSCRIPTION,
                    str(plan.place),
                    {TOPIC: ">"},
                    count=_ENTRIES_PER_READ,
                    block=_BLOCK_MS,
                )
                answers = pipeline.execute()
            if ids:
                tally.add(answers[0])
            ids = [entry for _, entries in answers[-1] for entry, _ in entries]
            if 0 < len(ids) < _ENTRIES_PER_READ:  # the next read may have to wait: not with these
                tally.add(client.xack(TOPIC, SUBSCRIPTION, *ids))
                ids = []
        return tally.report()


def audit(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    """The number of acknowledged messages, by the server. XREADGROUP delivers nothing twice unless asked to."""
    client = _connect(plan)
    authenticator.ready()
    (group,) = client.xinfo_groups(TOPIC)
    is_read = group["last-delivered-id"] == client.xinfo_stream(TOPIC)["last-generated-id"]
    return RoleReport(messages=client.xlen(TOPIC) - group["pending"] if is_read else 0)
