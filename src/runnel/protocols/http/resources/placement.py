"""Hands the messages of a body to the broker: chooses their partitions, and waits for room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from runnel.broker.broker import Published
from runnel.errors import BusyError, LimitExceededError
from runnel.formats.message import Message
from runnel.formats.traces import trace_tags
from runnel.formats.wire import Owner
from runnel.protocols.http.encoding.problems import TooLargeError
from runnel.protocols.http.server.calls import HttpCall
from runnel.topics.partitions import partition_of_key

_NS_PER_SECOND: Final = 1_000_000_000


def owners_of(call: HttpCall, topic: str) -> Sequence[Owner]:
    """The owners of the topic's partitions."""
    return call.access.routes((topic,))[0].owners


def partition_of(message: Message, partitions: int, *, keyless: int = 0) -> int:
    key = message.key if message.partition_key is None else message.partition_key
    return keyless if key is None or partitions == 1 else partition_of_key(key, partitions)


def at_partition(message: Message, partition: int) -> Message:
    return msgspec.structs.replace(message, partition=partition)


def rows_by_shard(messages: Sequence[Message], owners: Sequence[Owner]) -> list[list[int]]:
    """The indexes of the messages of each shard: a batch goes to one shard. In a batch, partitions are together."""
    partitions = [message.partition for message in messages]
    rows = list(range(len(messages)))
    if partitions.count(partitions[0]) == len(partitions):
        return [rows]
    rows.sort(key=partitions.__getitem__)
    found: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        # The broker refuses a partition that does not exist, whichever shard it gets the message for.
        owner = owners[min(partitions[row], len(owners) - 1)]
        found.setdefault((owner.journal, owner.shard), []).append(row)
    return list(found.values())


def with_trace(message: Message, headers: Mapping[bytes, bytes]) -> Message:
    """The message with the request's trace context, unless it has its own."""
    parent = headers.get(b"traceparent")
    if parent is None:
        return message
    state = headers.get(b"tracestate")
    tags = trace_tags(
        parent.decode("latin-1"), None if state is None else state.decode("latin-1"), message.tags
    )
    return message if tags is message.tags else msgspec.structs.replace(message, tags=tags)


async def publish_when_room(
    call: HttpCall, topic: str, partition: int, publish: Callable[[], asyncio.Future[Published]]
) -> asyncio.Future[Published]:
    """The result of `publish`, once there is room for it. BusyError: there was none within http.request_timeout."""
    try:
        return publish()
    except BusyError:
        pass
    except LimitExceededError as error:
        raise TooLargeError(str(error)) from None
    clock = call.server.broker.clock
    timeout_ns = call.server.settings.http.request_timeout_ns
    ends_ns = clock.monotonic_ns() + timeout_ns
    while True:
        call.connection.suspend_request_timeout()
        await _wait_room(call, topic, partition, ends_ns)
        try:
            return publish()
        except BusyError:
            if clock.monotonic_ns() >= ends_ns:
                raise
        except LimitExceededError as error:
            raise TooLargeError(str(error)) from None


async def _wait_room(call: HttpCall, topic: str, partition: int, ends_ns: int) -> None:
    """Wait until there is room, or the time is up."""
    clock = call.server.broker.clock
    loop = call.server.loop
    room = loop.create_task(call.unless_ended(call.access.wait_room(topic, partition)))
    timeout = loop.create_task(clock.sleep((ends_ns - clock.monotonic_ns()) / _NS_PER_SECOND))
    try:
        await asyncio.wait({room, timeout}, return_when=asyncio.FIRST_COMPLETED)
        if room.done():
            room.result()
    finally:
        room.cancel()
        timeout.cancel()
        await asyncio.wait({room, timeout})


def ignore_result(published: asyncio.Future[Published]) -> None:
    """Ignore the result of a publish at level none: the broker counts a failure, the client gets no error."""
    published.add_done_callback(lambda done: done.cancelled() or done.exception())
