"""The resource to publish: one message or an array of them as JSON, a raw body, or lines without end (`bulk`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, post
from litestar.params import FromPath, QueryParameter
from msgspec import UNSET, Meta, UnsetType

from runnel.broker.broker import Level, Published
from runnel.formats.batch import Batch
from runnel.protocols.http.encoding.messages import MESSAGE_FIELDS, MessageIn, decoded
from runnel.protocols.http.encoding.parameters import INT64_MAX
from runnel.protocols.http.encoding.problems import FieldFault, TooLargeError
from runnel.protocols.http.encoding.raw_messages import message_of
from runnel.protocols.http.resources.bulk import publish_lines
from runnel.protocols.http.resources.placement import (
    at_partition,
    ignore_result,
    owners_of,
    partition_of,
    publish_when_room,
    rows_by_shard,
    with_trace,
)
from runnel.protocols.http.server.answers import Answer, encode_json
from runnel.protocols.http.server.bodies import JSON, NDJSON, content_type, read_body
from runnel.protocols.http.server.calls import HttpCall, call_of

ARRAY_MAX: Final = 10_000
"""Messages of an array: all are decoded in one step, which blocks all other requests meanwhile."""

_one: Final = msgspec.json.Decoder(MessageIn)
_many: Final = msgspec.json.Decoder(list[MessageIn])


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Where a message is, and how safe. At level none, its offset is not known yet."""

    topic: str
    partition: int
    offset: int | UnsetType = UNSET
    epoch: int | UnsetType = UNSET
    receive_time_ns: int | UnsetType = UNSET
    level: Level = Level.NONE
    receivers: Annotated[
        int | UnsetType,
        Meta(
            description="Only for ephemeral topics: the number of subscriptions that got the message."
        ),
    ] = UNSET


class Receipts(msgspec.Struct, frozen=True):
    """The receipts of an array, in its order."""

    published: int
    receipts: Sequence[Receipt]


@post("/v1/topics/{topic:str}/messages", status_code=200, operation_id="publish", tags=["publish"])
async def publish(
    request: Request[Any, Any, Any],
    topic: FromPath[str],
    level: Annotated[
        Level | None,
        QueryParameter(
            description="When it is answered: at once (none), once in memory (received), or once it has survived a "
            "sync (stored). Default: stored for topics on disk, received for others."
        ),
    ] = None,
    partition: Annotated[
        int | None,
        QueryParameter(
            ge=0, le=INT64_MAX, description="Default: by the partition key, or the key."
        ),
    ] = None,
) -> Answer:
    """Publish messages to a topic, which is made if it is new."""
    call = call_of(request)
    kind = content_type(call)
    if kind == NDJSON:
        return await publish_lines(call, request, topic, level, partition)
    body = await read_body(call, request)
    if kind != JSON:
        message = message_of(topic, body, request.scope["headers"])
    elif body[:64].lstrip()[:1] == b"[":
        _check_count(body)
        messages = decoded(_many, body, fields=MESSAGE_FIELDS)
        return await _publish_many(call, topic, messages, level, partition)
    else:
        message = decoded(_one, body, fields=MESSAGE_FIELDS).to_message(topic)
    message = with_trace(message, call.headers)
    if partition is None:
        count = len(owners_of(call, topic))
        partition = 0
        if count > 1:
            partition = partition_of(message, count, keyless=call.server.next_keyless(count))
    answer = await publish_when_room(
        call, topic, partition, lambda: call.access.send(message, level, partition=partition)
    )
    flow = call.flow
    flow.messages_in += 1
    flow.bytes_in += message.size
    if level is Level.NONE:
        ignore_result(answer)
        return Answer(encode_json(Receipt(topic, partition)), status=202)
    return Answer(encode_json(_receipt(topic, partition, await answer)))


def _check_count(body: bytes) -> None:
    """Refuse an array of too many messages before it is decoded.

    A message has at least one brace, so the messages have to be counted only if there are many braces.
    """
    if body.count(b"{") <= ARRAY_MAX:
        return
    count = 0

    class Element(msgspec.Struct):
        """One message, whose fields are ignored."""

        def __post_init__(self) -> None:
            nonlocal count
            count += 1
            if count > ARRAY_MAX:
                raise TooLargeError(
                    f"the array has more than {ARRAY_MAX} messages; {NDJSON} takes any number, one a line"
                )

    # Decoding the messages themselves raises these again.
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        msgspec.json.decode(body, type=list[Element])


async def _publish_many(
    call: HttpCall,
    topic: str,
    given: Sequence[MessageIn],
    level: Level | None,
    partition: int | None,
) -> Answer:
    """Publish an array as a batch for each shard. A batch is stored whole or not at all."""
    if not given:
        raise FieldFault("$", "the array is empty; at least one message is needed")
    owners = owners_of(call, topic)
    count = len(owners)
    keyless = call.server.next_keyless(count)
    messages = []
    for at, each in enumerate(given):
        message = with_trace(each.to_message(topic, f"$[{at}]"), call.headers)
        place = partition_of(message, count, keyless=keyless) if partition is None else partition
        messages.append(message if place == 0 else at_partition(message, place))
    parts: list[tuple[list[int], Batch, asyncio.Future[Published]]] = []
    try:
        for rows in rows_by_shard(messages, owners):
            batch = Batch.from_messages([messages[row] for row in rows])
            send = partial(call.access.publish, batch, level)
            answer = await publish_when_room(call, topic, messages[rows[0]].partition, send)
            parts.append((rows, batch, answer))
            call.flow.messages_in += len(rows)
            call.flow.bytes_in += len(batch.body)
    except BaseException:
        for _, _, answer in parts:
            ignore_result(answer)
        raise
    if level is Level.NONE:
        for _, _, answer in parts:
            ignore_result(answer)
        receipts = [Receipt(topic, message.partition) for message in messages]
        return Answer(encode_json(Receipts(len(receipts), receipts)), status=202)
    await asyncio.gather(*(answer for _, _, answer in parts))
    found: dict[int, Receipt] = {}
    for rows, batch, answer in parts:
        done, numbers = answer.result(), iter(rows)
        for run, base_offset in zip(batch.runs(), done.base_offsets, strict=True):
            for offset in range(base_offset, base_offset + run.count):
                found[next(numbers)] = _receipt(topic, run.partition, done, offset)
    return Answer(encode_json(Receipts(len(found), [found[at] for at in range(len(found))])))


def _receipt(topic: str, partition: int, done: Published, offset: int | None = None) -> Receipt:
    if offset is None:
        offset = done.base_offsets[0]
    return Receipt(
        topic,
        partition,
        offset,
        done.epoch,
        done.receive_time_ns,
        done.level,
        UNSET if done.receivers is None else done.receivers,
    )


publish_handlers = [publish]
