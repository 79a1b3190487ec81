"""Kafka as a queue: a consumer group of four processes over four partitions, with confluent-kafka.

- Publishing as in kafka_system.py; messages without a key stay with a partition for a batch, as librdkafka has it.
- Consuming: `consume` of up to 1,000, then `commit` of all of them without waiting for its answer. A message counts as
  acknowledged when the commit that covers it was answered.
- A group acknowledges up to an offset of a partition, not message by message: one that fails holds up or loses its
  place with those behind it, which Runnel's, JetStream's, Redis's and RabbitMQ's do not. Its order by partition is what
  `key_shared` is, with as many keys at work as there are partitions.
- Offsets are kept like any other message: not synced before they are answered.
"""

from __future__ import annotations

import time
from typing import Any

from bench.processes import RolePipe, RoleReport
from bench.systems import kafka_system
from bench.systems.kafka_system import bootstrap, flush, make_topics, named, producer, send_all
from bench.systems.system import payloads
from bench.systems.work import SUBSCRIPTION, TOPIC, AckTally, WorkPlan

NAME, STANDS, REMEDY = kafka_system.NAME, kafka_system.STANDS, kafka_system.REMEDY
absence, serve, version = kafka_system.absence, kafka_system.serve, kafka_system.version

PARTITIONS = 4
_MESSAGES_PER_CONSUME = 1000
_CONSUME_SECONDS_MAX = 0.01
_ASSIGNED_SECONDS_MAX = 30.0


def produce(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    make_topics(plan.url, [TOPIC], PARTITIONS)
    sending, data = producer(plan.url), payloads()
    sending.list_topics(timeout=30)
    authenticator.ready()
    authenticator.wait_go()
    begin_ns = time.time_ns()
    send_all(sending, [named(plan.url, TOPIC)], data, plan.count)
    flush(sending)
    return RoleReport(begin_ns, time.time_ns(), plan.count)


class _Committed:
    """What the coordinator has answered for: the offsets of this consumer's partitions, which all begin at 0."""

    def __init__(self, tally: AckTally) -> None:
        self._tally = tally
        self._offsets: dict[int, int] = {}

    def take(self, error: Any, partitions: list[Any]) -> None:
        if error is not None:
            return  # the next commit covers it too
        for each in partitions:
            if each.error is None and each.offset > 0:
                self._offsets[each.partition] = each.offset
        self._tally.reach(sum(self._offsets.values()))


def consume(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    from confluent_kafka import Consumer

    make_topics(plan.url, [TOPIC], PARTITIONS)
    with AckTally(plan.tally, plan.place) as tally:
        committed = _Committed(tally)
        settings = {
            "group.id": SUBSCRIPTION + named(plan.url, ""),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "on_commit": committed.take,
            "queued.min.messages": 100_000,
        }
        consumer = Consumer(bootstrap(plan.url) | settings)
        consumer.subscribe([named(plan.url, TOPIC)])
        _wait_assigned(consumer)
        authenticator.ready()
        while not authenticator.is_over():
            messages = consumer.consume(_MESSAGES_PER_CONSUME, _CONSUME_SECONDS_MAX)
            for message in messages:
                if message.error() is not None:
                    raise RuntimeError(str(message.error()))
                message.value()
            if messages:
                consumer.commit(asynchronous=True)
        consumer.close()
        return tally.report()


def _wait_assigned(consumer: Any) -> None:
    """The last of them to have a partition is in the group with all others: there is one for each."""
    deadline = time.monotonic() + _ASSIGNED_SECONDS_MAX
    while not consumer.assignment():
        if consumer.poll(0.1) is not None:
            raise RuntimeError("a message before the first was sent")
        if time.monotonic() > deadline:
            raise TimeoutError("no partition was assigned")


def audit(plan: WorkPlan, authenticator: RolePipe) -> RoleReport:
    """What the coordinator says is committed."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"group.id": SUBSCRIPTION + named(plan.url, "")}
    consumer = Consumer(bootstrap(plan.url) | settings)
    authenticator.ready()
    topic = named(plan.url, TOPIC)
    wanted = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    offsets = [each.offset for each in consumer.committed(wanted, timeout=30)]
    consumer.close()
    return RoleReport(messages=sum(offset for offset in offsets if offset > 0))
