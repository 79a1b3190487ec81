"""Prepares publish requests: puts their messages into one batch for each shard, and builds their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from runnel.broker.broker import Level, Published, ShardId
from runnel.errors import ClientFault, LimitExceededError, MalformedError
from runnel.formats import columns
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.protocols.grpc.encoding.fields import varint
from runnel.protocols.grpc.encoding.messages import (
    batch_of,
    level_of,
    message_of,
    parsed,
    proto_level,
    tags_of,
)
from runnel.protocols.grpc.encoding.plain import (
    OtherRequest,
    PlainRequest,
    columns_of,
    even_in,
    offsets_from,
    plain_of,
)
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.server.calls import GrpcCall
from runnel.topics.partitions import partition_of_key

MESSAGES_MAX: Final = 100_000
"""Of one request. A message takes a hundred bytes of memory once it is parsed, and two on the wire if it is empty."""

# Smaller requests cannot have too many messages, so they are not scanned before they are parsed.
_COUNTED_FROM_BYTES: Final = 64 * 2**10


class RequestPart(NamedTuple):
    """The part of a request that goes to one shard."""

    append: Callable[[], asyncio.Future[Published]]  # BusyError: wait for room, then call it again
    topic: str  # of its first message
    rows: Sequence[int] = ()  # which of the request's messages, in the order of the batch
    counts: Sequence[int] = ()  # of its runs
    partition: int = 0  # of its first message


class PreparedPublish(NamedTuple):
    """A request that is ready to be published."""

    id: int
    level: Level | None
    parts: Sequence[RequestPart]
    partitions: Sequence[int]  # of each message; empty for a batch
    messages: int


def request_in(data: bytes) -> pb.PublishRequest:
    """Parse a publish request. The listener limits its size."""
    check_count(data)
    return parsed(pb.PublishRequest, data, bytes_max=len(data))


def classify(call: GrpcCall, data: bytes) -> PlainRequest | OtherRequest:
    """Parse a publish request, plain or not. In a call with a trace none is plain: each message gets its tags."""
    is_traced = call.traceparent is not None
    even = None if is_traced else even_in(data)
    if even is not None and even.messages <= MESSAGES_MAX:
        return even
    request = request_in(data)
    plain = None if is_traced else plain_of(request, len(data))
    return OtherRequest(request, len(data)) if plain is None else plain


def prepare_plain(call: GrpcCall, request: PlainRequest) -> PreparedPublish:
    """Prepare a plain request that is not joined with others."""
    part = join_requests(call, (request,))
    assert part is not None
    partitions = (part.partition,) * request.messages
    return PreparedPublish(request.id, request.level, (part,), partitions, request.messages)


def prepare(call: GrpcCall, request: pb.PublishRequest) -> PreparedPublish:
    """Prepare any request. This checks the request by itself; the broker checks the rest."""
    level = level_of(request.level)
    given = request.messages
    if request.batch:
        if given:
            raise ClientFault("a request has either messages or a batch, not both")
        batch = batch_of(request.batch)
        publish = partial(call.access.publish, batch, level)
        head = batch.envelope
        first = head.column32(head.partitions)[0]
        part = RequestPart(publish, head.topics[0], partition=first)
        return PreparedPublish(request.id, level, (part,), (), len(batch))
    if not given:
        raise ClientFault("a request needs messages, or a batch; it has neither")
    if len(given) == 1:
        return _prepare_single(call, request, level)
    return _prepare_one_run(call, request, level) or _prepare_by_shard(call, request, level)


def join_requests(call: GrpcCall, requests: Sequence[PlainRequest]) -> RequestPart | None:
    """Join the messages of these requests, which have one topic and level, into one batch.

    None: the topic has several partitions, and requests go to them in turn, so each needs its own batch.
    """
    topic, level = requests[0].topic, requests[0].level
    (route,) = call.access.routes((topic,))
    partitions = len(route.owners)
    if partitions > 1 and len(requests) > 1:
        return None
    partition = _choose_partition(None, partitions, keyless=next(call.server.turns))
    table = columns_of(requests)
    batch = Batch.from_columns(table, (topic,), (table.count,), partitions=(partition,))
    publish = partial(call.access.publish, batch, level)
    return RequestPart(publish, topic, range(table.count), (table.count,), partition)


def _prepare_single(
    call: GrpcCall, request: pb.PublishRequest, level: Level | None
) -> PreparedPublish:
    """Prepare a request of one message. The broker puts it into a batch with messages of other requests."""
    (given,) = request.messages
    topic = given.topic or request.topic
    partition, key, partition_key = _keys_of(given)
    if partition is None:
        (route,) = call.access.routes((topic,))
        chosen_by = key if partition_key is None else partition_key
        partition = _choose_partition(chosen_by, len(route.owners), keyless=next(call.server.turns))
    message = message_of(
        given, topic, partition, key, partition_key, call.traceparent, call.tracestate
    )
    send = partial(call.access.send, message, level, partition=partition)
    part = RequestPart(send, topic, (0,), (1,), partition)
    return PreparedPublish(request.id, level, (part,), (partition,), 1)


def _choose_partition(key: bytes | None, count: int, *, keyless: int) -> int:
    """The partition by key. Without a key requests go to partitions in turn, so that a request stays together."""
    if count == 1:
        return 0
    return keyless % count if key is None else partition_of_key(key, count)


def _keys_of(message: pb.Message) -> tuple[int | None, bytes | None, bytes | None]:
    has = message.HasField
    return (
        message.partition if has("partition") else None,
        message.key if has("key") else None,
        message.partition_key if has("partition_key") else None,
    )


def _prepare_one_run(
    call: GrpcCall, request: pb.PublishRequest, level: Level | None
) -> PreparedPublish | None:
    """Prepare a request for one topic with one partition: straight into columns, which is faster. None: another one."""
    given = list(request.messages)
    payloads = [message.payload for message in given]
    topics = {message.topic or request.topic for message in given}
    if len(topics) > 1 or any([message.HasField("partition") for message in given]):  # noqa: C419 - quicker
        return None
    (topic,) = topics
    (route,) = call.access.routes((topic,))
    if len(route.owners) > 1:
        return None
    transmit_times = {message.transmit_time_ns for message in given}
    table = columns.build(
        payloads,
        event_times_ns=[message.event_time_ns for message in given],
        transmit_time_ns=transmit_times.pop()
        if len(transmit_times) == 1
        else [message.transmit_time_ns for message in given],
        keys=[message.key if message.HasField("key") else None for message in given],
        partition_keys=_partition_keys(given),
        uids=[message.uid if message.HasField("uid") else None for message in given],
        tags=[tags_of(message, call.traceparent, call.tracestate) for message in given],
    )
    count = table.count
    batch = Batch.from_columns(table, (topic,), (count,))
    part = RequestPart(partial(call.access.publish, batch, level), topic, range(count), (count,))
    return PreparedPublish(request.id, level, (part,), (0,) * count, count)


def _partition_keys(given: Sequence[pb.Message]) -> list[bytes | None] | None:
    """The partition keys; a message without one uses its key. None: no message has one."""
    if not any([message.HasField("partition_key") for message in given]):  # noqa: C419 - quicker
        return None
    partition_keys = []
    for message in given:
        _, key, partition_key = _keys_of(message)
        partition_keys.append(key if partition_key is None else partition_key)
    return partition_keys


def _prepare_by_shard(
    call: GrpcCall, request: pb.PublishRequest, level: Level | None
) -> PreparedPublish:
    """Prepare one batch for each shard, with the messages of each partition together, in their order."""
    given = request.messages
    default = request.topic
    topics = list(dict.fromkeys([message.topic or default for message in given]))
    routes = {route.topic: route.owners for route in call.access.routes(topics)}
    keyless = next(call.server.turns)
    partitions: list[int] = []
    by_shard: dict[ShardId, dict[tuple[str, int], list[tuple[int, Message]]]] = {}
    for row, message in enumerate(given):
        topic = message.topic or default
        owners = routes[topic]
        partition, key, partition_key = _keys_of(message)
        if partition is None:
            chosen_by = key if partition_key is None else partition_key
            partition = _choose_partition(chosen_by, len(owners), keyless=keyless)
        partitions.append(partition)
        # The broker refuses a partition that does not exist, whichever shard it gets the message for.
        owner = owners[min(partition, len(owners) - 1)]
        runs = by_shard.setdefault(ShardId(owner.journal, owner.shard), {})
        placed = message_of(
            message, topic, partition, key, partition_key, call.traceparent, call.tracestate
        )
        runs.setdefault((topic, partition), []).append((row, placed))
    parts = [_part(call, level, list(runs.values())) for runs in by_shard.values()]
    return PreparedPublish(request.id, level, parts, partitions, len(given))


def _part(
    call: GrpcCall, level: Level | None, runs: list[list[tuple[int, Message]]]
) -> RequestPart:
    rows = list(chain.from_iterable(runs))
    batch = Batch.from_messages([message for _, message in rows])
    return RequestPart(
        partial(call.access.publish, batch, level),
        batch.envelope.topics[0],
        [row for row, _ in rows],
        [len(run) for run in runs],
        rows[0][1].partition,
    )


def answer_to(prepared: PreparedPublish, published: Sequence[Published]) -> pb.PublishResponse:
    """The answer to a request, from one `Published` for each of its parts."""
    last = published[-1]
    answer = pb.PublishResponse(
        id=prepared.id,
        level=proto_level(last.level),
        receive_time_ns=last.receive_time_ns,
        entry=last.entry,
        epoch=last.epoch,
        is_repeated=last.is_repeated,
        receivers=last.receivers,
    )
    if prepared.level is Level.NONE:
        return answer
    if not prepared.partitions:
        answer.offsets.extend(last.base_offsets)
        return answer
    answer.partitions.extend(prepared.partitions)
    if prepared.messages == 1:
        answer.offsets.extend(last.base_offsets)
        return answer
    offsets = [0] * prepared.messages
    for part, part_published in zip(prepared.parts, published, strict=True):
        rows = iter(part.rows)
        for base, count in zip(part_published.base_offsets, part.counts, strict=True):
            for offset in offsets_from(base, count):
                offsets[next(rows)] = offset
    answer.offsets.extend(offsets)
    return answer


def check_count(data: bytes) -> None:
    """Refuse a publish request with too many messages to parse, by one scan of its bytes."""
    if len(data) < _COUNTED_FROM_BYTES:
        return
    position = count = 0
    try:
        while position < len(data):
            tag, position = varint(data, position)
            match tag & 7:
                case 0:
                    _, position = varint(data, position)
                case 1:
                    position += 8
                case 2:
                    length, position = varint(data, position)
                    position += length
                case 5:
                    position += 4
                case _:
                    return  # groups: the .proto has none, and the parser limits their depth
            count += 1
            if count > MESSAGES_MAX:
                raise LimitExceededError(
                    f"more than {MESSAGES_MAX:,} messages in one request; send them in several"
                )
    except IndexError:
        raise MalformedError("runnel.v1.PublishRequest", "a field has no end") from None
