"""Batches to test with: strategies for messages, and what the broker would fill in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from hypothesis import strategies as st

from runnel.formats.batch import Batch
from runnel.formats.envelope import pack64
from runnel.formats.message import Message

INT64 = st.integers(-(2**63), 2**63 - 1)
TOPICS = st.sampled_from(["sensors/a", "sensors/b", "orders", "größe/µ", "!system/x"])
TAGS = st.sampled_from([{}, {"unit": "C"}, {"unit": "F"}, {"site": "ä", "unit": "C"}, {"": ""}])
UIDS = st.binary(min_size=20, max_size=20).filter(any)
KEYS = st.binary(max_size=6)


class Placed(NamedTuple):
    """A message with all that must survive when rows are taken, cut, sliced and joined."""

    message: Message
    epoch: int
    entry: int
    row: int


@st.composite
def message_lists(draw: st.DrawFn, max_size: int = 12) -> list[Message]:
    """Messages whose optional fields are there for all rows, for some, or for none."""
    count = draw(st.integers(1, max_size))

    def optional(values: st.SearchStrategy[bytes]) -> list[bytes | None]:
        column = draw(st.sampled_from([st.none(), values, st.none() | values]))
        return [draw(column) for _ in range(count)]

    keys, partition_keys, uids = optional(KEYS), optional(KEYS), optional(UIDS)
    tags = draw(st.sampled_from([st.just({}), st.just({"unit": "C"}), TAGS]))
    times = draw(st.sampled_from([st.just(0), INT64]))
    topics = draw(st.sampled_from([st.just("sensors/a"), TOPICS]))
    return [
        Message(
            topic=draw(topics),
            payload=draw(st.binary(max_size=20)),
            key=keys[row],
            tags=draw(tags),
            event_time_ns=draw(INT64),
            transmit_time_ns=draw(times),
            partition=draw(st.integers(0, 2)),
            uid=uids[row],
            partition_key=partition_keys[row],
        )
        for row in range(count)
    ]


def as_read(message: Message) -> Message:
    """The message as a reader gets it: a partition key that was not given is the key."""
    if message.partition_key is not None:
        return message
    return msgspec.structs.replace(message, partition_key=message.key)


def stored(
    batch: Batch,
    *,
    entry: int = 1,
    epoch: int = 1,
    receive_time_ns: int = 7_000,
    base_offsets: Sequence[int] | None = None,
) -> Batch:
    """The batch as the broker would store it: run k begins at offset 1,000 k + 1."""
    bases = base_offsets or [1_000 * run + 1 for run in range(batch.envelope.run_count)]
    head = msgspec.structs.replace(
        batch.envelope,
        base_offsets=pack64(bases),
        receive_times=pack64([receive_time_ns]),
        epochs=pack64([epoch]),
        entries=pack64([entry]),
    )
    return Batch(head, batch.body)


def placed(batch: Batch) -> list[Placed]:
    """The rows of a batch, read from its runs and messages."""
    places = [
        (run.epoch, run.entry, run.row + number)
        for run in batch.runs()
        for number in range(run.count)
    ]
    return [
        Placed(message, *place) for message, place in zip(batch.messages(), places, strict=True)
    ]
