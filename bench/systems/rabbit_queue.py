"""RabbitMQ as a queue: a durable queue and persistent messages, with aio-pika.

- Under uvloop. Publishing: publisher confirms, with 1,000 publishes waiting for theirs at a time.
- Consuming: `queue.consume` with a callback and a prefetch of 1,000; an acknowledgement of all messages so far on the
  channel (`multiple=True`) for every 250, and for what is left when nothing more comes.
- A server of its own on free ports, with its own data directory and epmd: one that the machine runs is left alone.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvloop

from bench.processes import Gate, Report
from bench.systems.system import Served, free_port, payloads, scratch, serving
from bench.systems.work import TOPIC, Tally, WorkPlan

# Debian's /usr/sbin/rabbitmq-server changes the user and takes no settings; this is what it runs.
_DEBIANS = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_START_SECONDS_MAX = 60.0
_CONFIRMS_MAX = 1000
_PREFETCH = 1000
_MESSAGES_PER_ACK = 250
_ACK_SECONDS_MAX = 0.01
_CONFIG = """
listeners.tcp.1 = 127.0.0.1:{port}
log.console = true
log.console.level = warning
"""


def _program() -> str | None:
    return str(_DEBIANS) if _DEBIANS.exists() else shutil.which("rabbitmq-server")


def absence() -> str | None:
    """Why it cannot be measured here, or nothing."""
    if _program() is None:
        return "no rabbitmq-server"
    if shutil.which("epmd") is None:
        return "no epmd"
    return None if find_spec("aio_pika") else "no aio-pika"


def version() -> str:
    """From the folder that Debian's link leads to: asking the program starts Erlang."""
    folder = Path(_program() or "").resolve().parent.parent.name
    return f"RabbitMQ {folder.rpartition('-')[2]}"


@contextmanager
def serve(*, stored: str) -> Iterator[Served]:
    """`stored`: the type of queue makes the difference, not the server."""
    assert stored in ("classic", "quorum")
    program, epmd = _program(), shutil.which("epmd")
    assert program is not None, absence()
    assert epmd is not None, absence()
    with scratch() as directory:
        port, names_port, nodes_port = free_port(), free_port(), free_port()
        config = directory / "rabbitmq.conf"
        config.write_text(_CONFIG.format(port=port))
        (directory / "enabled_plugins").write_text("[].\n")
        environment = os.environ | {
            "HOME": str(directory),  # Erlang's cookie
            "ERL_EPMD_PORT": str(names_port),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_DIST_PORT": str(nodes_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_LOG_BASE": str(directory / "logs"),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
        }
        naming = [epmd, "-port", str(names_port), "-address", "127.0.0.1"]
        with (
            serving(naming, names_port, "epmd", directory),
            serving(
                [program],
                port,
                "amqp",
                directory,
                environment=environment,
                start_seconds_max=_START_SECONDS_MAX,
            ) as served,
        ):
            yield served


# --- Roles ---


async def _open(plan: WorkPlan, *, confirms: bool) -> tuple[Any, Any, Any]:
    import aio_pika

    connection = await aio_pika.connect(plan.url.replace("amqp://", "amqp://guest:guest@"))
    channel = await connection.channel(publisher_confirms=confirms)
    arguments = {"x-queue-type": plan.mode}
    return (
        connection,
        channel,
        await channel.declare_queue(TOPIC, durable=True, arguments=arguments),
    )


def produce(plan: WorkPlan, gate: Gate) -> Report:
    async def work() -> Report:
        from aio_pika import DeliveryMode, Message

        connection, channel, _ = await _open(plan, confirms=True)
        publish, data = channel.default_exchange.publish, payloads()

        async def publish_every(number: int) -> None:
            while number < plan.count:
                message = Message(data[number % len(data)], delivery_mode=DeliveryMode.PERSISTENT)
                await publish(message, TOPIC, mandatory=False)
                number += _CONFIRMS_MAX

        gate.ready()
        gate.wait_go()
        begin_ns = time.time_ns()
        async with asyncio.TaskGroup() as group:
            for first in range(_CONFIRMS_MAX):
                group.create_task(publish_every(first))
        report = Report(begin_ns, time.time_ns(), plan.count)
        await connection.close()
        return report

    return uvloop.run(work())


def consume(plan: WorkPlan, gate: Gate) -> Report:
    async def work() -> Report:
        connection, channel, queue = await _open(plan, confirms=False)
        await channel.set_qos(prefetch_count=_PREFETCH)
        with Tally(plan.tally, plan.place) as tally:
            unacknowledged = _Unacknowledged(tally)
            await queue.consume(unacknowledged.take)
            gate.ready()
            await gate.wait_over()
            await connection.close()
            return tally.report(misplaced=unacknowledged.redelivered)

    return uvloop.run(work())


class _Unacknowledged:
    """What has come on a channel since its last acknowledgement, which is sent in time also when little comes."""

    def __init__(self, tally: Tally) -> None:
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


def audit(plan: WorkPlan, gate: Gate) -> Report:
    """What the server says is acknowledged: with its consumers gone, all that is left in the queue is not."""

    async def work() -> Report:
        connection, _, queue = await _open(plan, confirms=False)
        gate.ready()
        left = queue.declaration_result.message_count
        await connection.close()
        return Report(messages=plan.count - left)

    return uvloop.run(work())
