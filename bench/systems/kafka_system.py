"""Kafka, one broker in KRaft mode, with confluent-kafka, used the fastest way that its documentation has.

- The broker: broker and controller in one process, one partition a topic, the Java settings of Kafka's own scripts.
  Java compiles as it goes, so the server stands for a whole part and has a run that is not counted; every run has
  topics of its own. Starting it for each run would measure its compiler. It sleeps while others are measured, and its
  controller does not mind (`broker.session.timeout.ms`).
- Publishing: `produce` for each message and `poll(0)` now and then, `flush` at the end. `linger.ms` 20 and batches of
  up to 1 MB, as the guides for throughput have it (librdkafka's default is 5 ms); `produce_batch`, tried beside it,
  came out the same. acks=all, the default: with one replica that is the leader's own word.
- Subscribing: `consume` of up to 1,000 at a time, each asked for its value; a group and its coordinator are not needed
  for one reader, so partitions are assigned. Ten consumers of a process have a thread each.
- One by one, for latency: `linger.ms` 0 and `poll` for each message, as the guide for low latency has it, and five
  requests in flight, as Kafka's own client has it: with librdkafka's default of a million it falls behind 5,000 a
  second, since every message becomes a request.
- What it keeps: every topic is on disk. By default Kafka acknowledges before it syncs and leaves that to the operating
  system; with `flush.messages=1` it syncs each batch that it appends before it acknowledges.
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
from bench.systems import kafka_jars
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
    when_up,
)

NAME = "Kafka"
STANDS = True
REMEDY = "apt-get install default-jre-headless maven; confluent-kafka comes with the bench group"
SYNCED = "always"  # what `stored` says for flush.messages=1
_START_SECONDS_MAX = 90.0
_MESSAGES_PER_CONSUME = 1000
_MESSAGES_PER_POLL = 250
_MESSAGES_PER_RECORD_BATCH = 10_000
_PRODUCER = {
    "linger.ms": 20,
    "batch.size": 1_000_000,
    "batch.num.messages": 10_000,
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 1_048_576,
}
_PRODUCER_PROMPT = {"linger.ms": 0, "max.in.flight.requests.per.connection": 5}
_JAVA = [
    "-Xms1g",
    "-Xmx1g",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-Djava.awt.headless=true",
]
_CLUSTER = "cnVubmVsLWJlbmNoLTEwMQ"  # any 16 bytes in base64
_CONFIG = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={directory}/logs
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=500
"""
# A server that sleeps keeps its session. One that is killed is let in again only when the last session is over.
_SLEEPS = "broker.session.timeout.ms=3600000\n"


def absence() -> str | None:
    """Why it cannot be measured here, or nothing."""
    if shutil.which("java") is None:
        return "no java"
    if find_spec("confluent_kafka") is None:
        return "no confluent-kafka"
    return None if kafka_jars.are_here() else "its jars are not here"


def version() -> str:
    return f"Kafka {kafka_jars.VERSION}"


def _java(main: str, *arguments: str) -> list[str]:
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
    java = shutil.which("java")
    assert java is not None, absence()
    return [java, *_JAVA, quiet, "-cp", kafka_jars.class_path(), main, *arguments]


@contextmanager
def serve(*, stored: str = "") -> Iterator[RunningServer]:  # noqa: ARG001 - topics say how they are synced
    with scratch() as directory, serve_in(directory, free_port(), more=_SLEEPS) as served:
        yield served


@contextmanager
def serve_in(directory: Path, port: int, *, more: str = "") -> Iterator[RunningServer]:
    """On what is there, or on a directory that it makes ready first. `more` settings are lines of its file."""
    controller_port = free_port()
    config = directory / "server.properties"
    text = _CONFIG.format(port=port, controller_port=controller_port, directory=directory)
    config.write_text(text + more)
    if not (directory / "logs" / "meta.properties").exists():
        formatting = _java("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(config))
        subprocess.run(formatting, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    with serving(
        _java("kafka.Kafka", str(config)),
        port,
        "kafka",
        directory,
        start_seconds_max=_START_SECONDS_MAX,
    ) as served:
        yield served


# --- Clients ---


def bootstrap(url: str) -> dict[str, Any]:
    address = url.removeprefix("kafka://").partition("#")[0]
    return {"bootstrap.servers": address, "log_level": 3}


def named(url: str, topic: str) -> str:
    """Kafka's names have no /, and each run has its own."""
    return f"{topic.replace('/', '.')}-{url.partition('#')[2]}"


def make_topics(url: str, topics: Sequence[str], partitions: int = 1) -> None:
    """Those that another role has made are left as they are."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic

    run = url.partition("#")[2]
    config = {"flush.messages": "1"} if run.startswith(SYNCED) else {}
    admin = AdminClient(bootstrap(url))
    wanted = [NewTopic(named(url, topic), partitions, 1, config=config) for topic in topics]
    for made in admin.create_topics(wanted, operation_timeout=60).values():
        try:
            made.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise


def producer(url: str, settings: dict[str, Any] | None = None) -> Any:
    from confluent_kafka import Producer

    return Producer(bootstrap(url) | (settings or _PRODUCER))


def _consumer(url: str, topic: str) -> Any:
    """From the first message on: topics are new in each run."""
    from confluent_kafka import Consumer, TopicPartition

    own = {"group.id": "bench", "enable.auto.commit": False, "queued.min.messages": 100_000}
    consumer = Consumer(bootstrap(url) | own)
    consumer.assign([TopicPartition(named(url, topic), 0, 0)])
    return consumer


def send_all(sending: Any, names: Sequence[str], data: Sequence[bytes], count: int) -> None:
    """Round and round over the topics; the payload's number goes on when each has had one."""
    produce, poll = sending.produce, sending.poll
    sent = turn = 0
    while sent < count:
        payload = data[turn % len(data)]
        for name in names[: count - sent]:
            while True:
                try:
                    produce(name, payload)
                    break
                except BufferError:  # its queue is full: as documented, poll and try again
                    poll(0.01)
        sent += len(names)
        turn += 1
        if not turn % _MESSAGES_PER_POLL:
            poll(0)


def flush(sending: Any) -> None:
    left = sending.flush(120)
    if left:
        raise TimeoutError(f"{left:,} messages are not acknowledged")


# --- Roles ---


def publish(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    make_topics(plan.url, plan.topics)
    sending, names = producer(plan.url), [named(plan.url, topic) for topic in plan.topics]
    data = payloads()
    sending.list_topics(timeout=30)  # connected
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    send_all(sending, names, data, plan.count)
    flush(sending)
    return RoleReport(begin_ns, time.time_ns(), plan.count)


publish_stored = publish  # it returns when everything is acknowledged, or raises


def publish_steadily(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    make_topics(plan.url, plan.topics)
    sending, name = producer(plan.url, _PRODUCER_PROMPT), named(plan.url, plan.topics[0])
    sending.list_topics(timeout=30)  # connected
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    for number in ticks(plan.rate, plan.count):
        sending.produce(name, stamped(number))
        sending.poll(0)
    flush(sending)
    return RoleReport(begin_ns, time.time_ns(), plan.count)


def _read(consumer: Any, arrivals: ReceivedMessages, topic: str, expected: int) -> None:
    """All that is expected, by large pieces, or one by one where the time of each counts."""
    take, left = arrivals.take, expected
    moved = time.monotonic()
    while left:
        messages = consumer.consume(min(left, _MESSAGES_PER_CONSUME), 0.5)
        for message in messages:
            if message.error() is not None:
                raise RuntimeError(str(message.error()))
            take(topic, message.value())
        left -= len(messages)
        if messages or not arrivals.count:
            moved = time.monotonic()
        elif time.monotonic() - moved > IDLE_SECONDS_MAX:
            return


def _read_one_by_one(consumer: Any, arrivals: ReceivedMessages, topic: str, expected: int) -> None:
    take, left = arrivals.take, expected
    while left:
        message = consumer.poll(IDLE_SECONDS_MAX)
        if message is None:
            if arrivals.count:
                return
            continue
        if message.error() is not None:
            raise RuntimeError(str(message.error()))
        take(topic, message.value())
        left -= 1


def subscribe(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    make_topics(plan.url, plan.topics)
    read = _read_one_by_one if plan.order is PayloadOrder.STAMPED else _read
    consumers = [_consumer(plan.url, plan.pattern) for _ in range(plan.connections)]
    all_arrivals = [ReceivedMessages(plan.count, plan.order) for _ in consumers]
    for consumer in consumers:
        consumer.list_topics(timeout=30)
    authenticator.ready()
    in_threads(
        [
            partial(read, consumer, arrivals, plan.pattern, plan.count)
            for consumer, arrivals in zip(consumers, all_arrivals, strict=True)
        ]
    )
    return report_of(all_arrivals)


def clients(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Each connection publishes over all topics and listens to one of them: a thread for either."""
    make_topics(plan.url, plan.topics)
    names = [named(plan.url, topic) for topic in plan.topics]
    to_come = plan.clients * plan.count // len(plan.topics)
    consumers = [_consumer(plan.url, plan.pattern) for _ in range(plan.connections)]
    producers = [producer(plan.url) for _ in range(plan.connections)]
    all_arrivals = [ReceivedMessages(to_come, PayloadOrder.PUBLISHER) for _ in consumers]
    for client in (*consumers, *producers):
        client.list_topics(timeout=30)

    def send(place: int) -> None:
        send_all(producers[place], names, payloads(plan.first_client + place), plan.count)
        flush(producers[place])

    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    places = range(plan.connections)
    reading = [
        partial(_read, consumers[place], all_arrivals[place], plan.pattern, to_come)
        for place in places
    ]
    sending = [partial(send, place) for place in places]
    in_threads([*reading, *sending])
    report = report_of(all_arrivals)
    return RoleReport(begin_ns, report.end_ns, report.messages, report.misplaced)


def catch_up(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    from confluent_kafka import TopicPartition

    consumer = _consumer(plan.url, plan.pattern)
    consumer.unassign()
    consumer.list_topics(timeout=30)
    arrivals = ReceivedMessages(plan.count, plan.order)
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    consumer.assign([TopicPartition(named(plan.url, plan.pattern), 0, 0)])
    _read(consumer, arrivals, plan.pattern, plan.count)
    report = report_of([arrivals])
    return RoleReport(begin_ns, report.end_ns, report.messages, report.misplaced)


def catch_up_arrow(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """To record batches of offset, time and payload, made of every 10,000 messages: it has no columns of its own."""
    import pyarrow as pa
    from confluent_kafka import TopicPartition

    consumer = _consumer(plan.url, plan.pattern)
    consumer.unassign()
    consumer.list_topics(timeout=30)
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    consumer.assign([TopicPartition(named(plan.url, plan.pattern), 0, 0)])
    left, misplaced, before = plan.count, 0, -1
    while left:
        messages = consumer.consume(min(left, _MESSAGES_PER_RECORD_BATCH), IDLE_SECONDS_MAX)
        if not messages:
            break
        rows = pa.record_batch(
            {
                "offset": [message.offset() for message in messages],
                "timestamp": [message.timestamp()[1] for message in messages],
                "payload": pa.array([message.value() for message in messages], pa.binary()),
            }
        )
        misplaced += rows.column("offset")[0].as_py() != before + 1
        before = rows.column("offset")[-1].as_py()
        left -= rows.num_rows
    return RoleReport(begin_ns, time.time_ns(), plan.count - left, misplaced)


def fill(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Round and round over the topics, acknowledged."""
    make_topics(plan.url, plan.topics)
    sending, names = producer(plan.url), [named(plan.url, topic) for topic in plan.topics]
    authenticator.ready()
    send_all(sending, names, [bytes(plan.payload_bytes)], plan.count)
    flush(sending)
    return RoleReport(messages=plan.count)


def wait_up(plan: RolePlan, authenticator: RolePipe) -> RoleReport:
    """Until a stored message of the last topic can be read."""
    import confluent_kafka  # noqa: F401 - before the clock runs

    def read() -> int:
        consumer = _consumer(plan.url, plan.topics[-1])
        message = consumer.poll(IDLE_SECONDS_MAX)
        end_ns = time.time_ns()
        consumer.close()
        if message is None or message.error() is not None:
            raise ConnectionError("not yet")
        assert len(message.value()) == plan.payload_bytes
        return end_ns

    authenticator.ready()
    authenticator.wait_go()
    return RoleReport(end_ns=when_up(plan.url, read))
