"""RabbitMQ, with pika, used the fastest way that its documentation has.

- Publishing: pika's blocking connection, `basic_publish` without confirms to a topic exchange, then a request whose
  answer comes after all of them. aio-pika and aiormq, tried beside it, had a third and less than half of that.
- Subscribing: an exclusive queue bound to the exchange, consumed without acknowledgements (`auto_ack`).
- One by one, for latency: the same, with Nagle's algorithm off as pika has it.
- Stored: a durable queue and persistent messages with publisher confirms, which only aio-pika can have many of in
  flight. A stream (a queue of the type `stream`) is what can be read again, for catching up.
- A server of its own on free ports, with its own data directory and epmd: one that the machine runs is left alone. It
  takes seconds to start, so it stands for a whole part; each run has its own exchange and queues.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvloop

from bench.processes import RolePipe, RoleReport
from bench.systems.system import (
    IDLE_SECONDS_MAX,
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
)

NAME = "RabbitMQ"
STANDS = True
REMEDY = "apt-get install rabbitmq-server; pika and aio-pika come with the bench group"

# Debian's /usr/sbin/rabbitmq-server changes the user and takes no settings; this is what it runs.
_DEBIANS = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_START_SECONDS_MAX = 90.0
CONFIRMS_MAX = 1000
_PREFETCH = 1000
_MESSAGES_PER_ACK = 250
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
    missing = [name for name in ("pika", "aio_pika") if not find_spec(name)]
    return f"no {' or '.join(missing)}" if missing else None


def version() -> str:
    """From the folder that Debian's link leads to: asking the program starts Erlang."""
    folder = Path(_program() or "").resolve().parent.parent.name
    return f"RabbitMQ {folder.rpartition('-')[2]}"


@contextmanager
def serve(*, stored: str = "") -> Iterator[RunningServer]:  # noqa: ARG001 - queues say how they are stored
    with scratch() as directory, _serve_in(directory) as served:
        yield served


@contextmanager
def _serve_in(directory: Path) -> Iterator[RunningServer]:
    program, epmd = _program(), shutil.which("epmd")
    assert program is not None, absence()
    assert epmd is not None, absence()
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
        "RABBITMQ_NODENAME": f"{directory.name}@localhost",
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


# --- Clients ---


def address(url: str) -> str:
    return url.partition("#")[0].replace("amqp://", "amqp://guest:guest@")


def named(url: str, name: str) -> str:
    """Each run has its own."""
    return f"{name}-{url.partition('#')[2]}"


def _key(pattern: str) -> str:
    return pattern.replace("/", ".").replace("*", "#")


def _connect(url: str) -> Any:
    import pika

    return pika.BlockingConnection(pika.URLParameters(address(url)))


def _opened(plan: RolePlan) -> tuple[Any, Any, str]:
    connection = _connect(plan.url)
    channel, exchange = connection.channel(), named(plan.url, "live")
    channel.exchange_declare(exchange, "topic")
    return connection, channel, exchange


def _subscribed(plan: RolePlan) -> tuple[Any, Any, str]:
    connection, channel, exchange = _opened(plan)
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(queue, exchange, _key(plan.pattern))
    return connection, channel, queue


# --- Live ---


def _send(
    channel: Any, exchange: str, topics: Sequence[str], data: Sequence[bytes], count: int
) -> None:
    """Round and round over the topics; the payload's number goes on when each has had one."""
    keys = [_key(topic) for topic in topics]
    publish = channel.basic_publish
    sent = turn = 0
    while sent < count:
        payload = data[turn % len(data)]
        for key in keys[: count - sent]:
            publish(exchange, key, payload)
        sent += len(keys)
        turn += 1


def publish(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    connection, channel, exchange = _opened(plan)
    data = payloads()
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    _send(channel, exchange, plan.topics, data, plan.count)
    channel.exchange_declare(exchange, "topic")  # answered after what came before it
    report = RoleReport(begin_ns, time.time_ns(), plan.count)
    connection.close()
    return report


def publish_steadily(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    connection, channel, exchange = _opened(plan)
    key = _key(plan.topics[0])
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    for number in ticks(plan.rate, plan.count):
        channel.basic_publish(exchange, key, stamped(number))
    report = RoleReport(begin_ns, time.time_ns(), plan.count)
    connection.close()
    return report


def _read(channel: Any, queue: str, arrivals: ReceivedMessages) -> None:
    take = arrivals.take
    for method, _, body in channel.consume(
        queue, auto_ack=True, inactivity_timeout=IDLE_SECONDS_MAX
    ):
        if method is None:  # nothing came for a while
            if arrivals.count:
                return
            continue
        if take(method.routing_key, body):
            return


def subscribe(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    opened = [_subscribed(plan) for _ in range(plan.connections)]
    all_arrivals = [ReceivedMessages(plan.count, plan.order) for _ in opened]
    authenticator.ready()
    in_threads(
        [
            partial(_read, channel, queue, arrivals)
            for (_, channel, queue), arrivals in zip(opened, all_arrivals, strict=True)
        ]
    )
    return report_of(all_arrivals)


def clients(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Each publishes over all topics and listens to one of them: a connection and a thread for either."""
    to_come = plan.clients * plan.count // len(plan.topics)
    listening = [_subscribed(plan) for _ in range(plan.connections)]
    publishing = [_opened(plan) for _ in range(plan.connections)]
    all_arrivals = [ReceivedMessages(to_come, PayloadOrder.PUBLISHER) for _ in listening]

    def read(place: int) -> None:
        _, channel, queue = listening[place]
        _read(channel, queue, all_arrivals[place])

    def send(place: int) -> None:
        _, channel, exchange = publishing[place]
        data = payloads(plan.first_client + place)
        _send(channel, exchange, plan.topics, data, plan.count)
        channel.exchange_declare(exchange, "topic")

    places = range(plan.connections)
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    in_threads(
        [partial(read, place) for place in places] + [partial(send, place) for place in places]
    )
    report = report_of(all_arrivals)
    return RoleReport(begin_ns, report.end_ns, report.messages, report.misplaced)


# --- Stored ---


async def open_queue(url: str, name: str, kind: str, *, confirms: bool) -> tuple[Any, Any, Any]:
    """A connection, its channel, and a durable queue of that type: classic, quorum or stream."""
    import aio_pika

    connection = await aio_pika.connect(address(url))
    channel = await connection.channel(publisher_confirms=confirms)
    queue = await channel.declare_queue(
        named(url, name), durable=True, arguments={"x-queue-type": kind}
    )
    return connection, channel, queue


async def publish_confirmed(channel: Any, queue: str, data: Sequence[bytes], count: int) -> None:
    """Persistent, with so many waiting for their confirms at a time."""
    from aio_pika import DeliveryMode, Message

    publish = channel.default_exchange.publish

    async def publish_every(number: int) -> None:
        while number < count:
            message = Message(data[number % len(data)], delivery_mode=DeliveryMode.PERSISTENT)
            await publish(message, queue, mandatory=False)
            number += CONFIRMS_MAX

    async with asyncio.TaskGroup() as group:
        for first in range(CONFIRMS_MAX):
            group.create_task(publish_every(first))


def _kind(url: str) -> str:
    """What `stored` said, which the run's name begins with."""
    return url.partition("#")[2].partition("-")[0]


def publish_stored(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    async def work() -> RoleReport:
        connection, channel, queue = await open_queue(
            plan.url, plan.topics[0], _kind(plan.url), confirms=True
        )
        data = payloads()
        authenticator.ready()
        authenticator.wait_go()
        begin_ns = time.time_ns()
        await publish_confirmed(channel, queue.name, data, plan.count)
        report = RoleReport(begin_ns, time.time_ns(), plan.count)
        await connection.close()
        return report

    return uvloop.run(work())


def catch_up(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """A stream from its beginning: it has to be acknowledged, which only asks for more. Its offsets say whether
    anything is missing: confirmed publishes are in flight together, in no certain order."""
    connection = _connect(plan.url)
    channel = connection.channel()
    channel.basic_qos(prefetch_count=_PREFETCH)
    count = misplaced = 0
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    for method, properties, _ in channel.consume(
        named(plan.url, plan.pattern),
        arguments={"x-stream-offset": "first"},
        inactivity_timeout=IDLE_SECONDS_MAX,
    ):
        if method is None:
            break
        misplaced += properties.headers["x-stream-offset"] != count
        count += 1
        if count == plan.count:
            break
        if not count % _MESSAGES_PER_ACK:
            channel.basic_ack(method.delivery_tag, multiple=True)
    end_ns = time.time_ns()
    connection.close()
    return RoleReport(begin_ns, end_ns, count, misplaced)
