"""What tests of reading share: messages with everything in them, and rows to compare them with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql import DataFrame, Row

from runnel.client import BlockingBus
from runnel.formats.message import Message

START_NS = 1_700_000_000 * 10**9


def sensor_messages(count: int) -> list[Message]:
    """Of two topics, with all that a message can have, and times that are no round numbers."""
    return [
        Message(
            f"sensors/{'ab'[row % 2]}",
            b"21.%d" % row,
            key=(None, b"plain", b"\x80\x00")[row % 3],
            tags=({}, {"unit": "C"}, {"unit": "F", "Ort": "Köln"})[row % 3],
            event_time_ns=START_NS + row * 1_000_000_007,
            uid=bytes([row % 250 + 1]) * 20 if row % 2 else None,
        )
        for row in range(count)
    ]


def publish(bus: BlockingBus, messages: Iterable[Message]) -> None:
    with bus.publisher(batch_messages_max=50) as publisher:
        for message in messages:
            publisher.send(
                message.payload,
                message.topic,
                message.key,
                message.tags,
                message.event_time_ns,
                None,
                message.uid,
            )


def stored(bus: BlockingBus, *topics: str) -> list[Message]:
    """What the broker has, by topic, partition and offset."""
    found: list[Message] = []
    for topic in topics:
        for partition, at in enumerate(bus.topic(topic).partitions):
            offset = at.first_offset
            while offset < at.next_offset:
                page = bus.fetch(topic, offset, partition=partition)
                found += page.messages
                offset = page.next_offset
    return found


def fields(message: Message) -> tuple[Any, ...]:
    return (
        message.topic,
        message.partition,
        message.offset,
        message.key,
        message.payload,
        dict(message.tags),
        message.event_time_ns,
        message.transmit_time_ns,
        message.receive_time_ns,
        len(message.payload),
        message.uid,
    )


def row_fields(row: Row) -> tuple[Any, ...]:
    return (
        row.topic,
        row.partition,
        row.offset,
        None if row.key is None else bytes(row.key),
        bytes(row.payload),
        row.tags,
        row.event_time_ns,
        row.transmit_time_ns,
        row.receive_time_ns,
        row.size,
        None if row.uid is None else bytes(row.uid),
    )


def assert_same(frame: DataFrame, messages: Sequence[Message]) -> None:
    """Each message once, with every field."""
    found = sorted(map(row_fields, frame.collect()), key=lambda row: row[:3])
    assert found == sorted(map(fields, messages), key=lambda row: row[:3])
