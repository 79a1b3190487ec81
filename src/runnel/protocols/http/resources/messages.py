"""The resource of stored messages: pages of a partition, which may wait for the next message, and single ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from litestar import Request, get
from litestar.params import FromPath, PathParameter, QueryParameter

from runnel.broker.broker import FetchResult
from runnel.broker.fetcher import FetchRequest
from runnel.errors import ClosedError, OffsetAheadError, OffsetGoneError
from runnel.formats.message import Message
from runnel.protocols.http.encoding.messages import (
    TIMES_TEXT,
    Gap,
    MessageOut,
    PayloadForm,
    TimeForm,
    gap_out,
    message_out,
    messages_out,
)
from runnel.protocols.http.encoding.parameters import (
    INT64_MAX,
    LAST,
    Duration,
    Offset,
    Time,
    duration_ns,
    offset_of,
    time_ns,
)
from runnel.protocols.http.encoding.problems import NoLastMessageError
from runnel.protocols.http.encoding.raw_messages import headers_of
from runnel.protocols.http.server.answers import Answer
from runnel.protocols.http.server.calls import HttpCall, call_of

LIMIT_MAX: Final = 10_000
_BYTES_MAX: Final = 4 * 2**20
# Messages that are encoded as JSON in one step: all other requests wait meanwhile.
_MESSAGES_AT_ONCE: Final = 500


class MessagePage(msgspec.Struct, frozen=True):
    """Messages of one partition in order, and where the next page begins."""

    messages: Sequence[MessageOut]
    next_offset: int
    first_offset: int
    end_offset: int
    gaps: Sequence[Gap]


@get("/v1/topics/{topic:str}/messages", operation_id="readMessages", tags=["read"])
async def read_messages(
    request: Request[Any, Any, Any],
    topic: FromPath[str],
    partition: Annotated[
        int | None,
        QueryParameter(
            ge=0, le=INT64_MAX, description="Required if the topic has several partitions."
        ),
    ] = None,
    offset: Annotated[
        Offset | None,
        QueryParameter(
            description="The first message to read: its number, or `last`. Default: the first there is."
        ),
    ] = None,
    time: Annotated[
        Time | None,
        QueryParameter(
            description="Instead of an offset: the first message that was received then or later. RFC 3339 with a "
            "zone, or nanoseconds since 1970."
        ),
    ] = None,
    limit: Annotated[
        int, QueryParameter(ge=1, le=LIMIT_MAX, description="Maximum number of messages per page.")
    ] = 1000,
    bytes_max: Annotated[
        int,
        QueryParameter(
            name="bytes",
            ge=1,
            le=_BYTES_MAX,
            description="Approximate size of the page in bytes; at least one message is returned.",
        ),
    ] = 2**20,
    wait: Annotated[
        Duration | None,
        QueryParameter(
            description="If nothing is there: how long to wait for a message, in seconds or with a unit. At most "
            "broker.fetch_wait_max."
        ),
    ] = None,
    payload: Annotated[
        PayloadForm, QueryParameter(description="The form of the payloads.")
    ] = PayloadForm.AUTO,
    times: Annotated[TimeForm, QueryParameter(description=TIMES_TEXT)] = TimeForm.NS,
) -> MessagePage:
    """Read messages again, as often as you like."""
    call = call_of(request)
    wait_ns = duration_ns("wait", wait)
    from_ns = None if time is None else time_ns("time", time)
    first = offset_of("offset", offset)
    if first == LAST:
        first = (await _end(call, topic, partition)).last

    async def fetched(wait_ns: int) -> FetchResult:
        return await call.access.fetch(
            FetchRequest(
                topic,
                partition,
                offset=first,
                time_ns=from_ns,
                messages_max=limit,
                bytes_max=bytes_max,
                wait_ns=wait_ns,
                while_waiting=lambda: _as_stream(call),
            )
        )

    if wait_ns:
        try:
            page = await call.unless_ended(fetched(wait_ns))
        except ClosedError:
            if not call.server.is_closing or call.access.is_slowed_out:
                raise  # the token's rights have changed, or its rate leaves no time for the read
            page = await fetched(0)  # the broker shuts down: a waiting request gets what is stored
    else:
        page = await call.read(fetched(0))
    messages: list[MessageOut] = []
    for batch in page.batches:
        of_batch = batch.messages()
        for begin in range(0, len(of_batch), _MESSAGES_AT_ONCE):
            messages += messages_out(of_batch[begin : begin + _MESSAGES_AT_ONCE], payload, times)
            if len(messages) >= _MESSAGES_AT_ONCE:
                await asyncio.sleep(0)
        call.flow.messages_out += len(of_batch)
        call.flow.bytes_out += len(batch.body)
    return MessagePage(
        messages,
        page.next_offset,
        page.first_offset,
        page.end_offset,
        [gap_out(gap) for gap in page.gaps],
    )


class _End(NamedTuple):
    """Where a partition ends: the offset of its last message, or the next one if it has none."""

    last: int
    next: int


async def _end(call: HttpCall, topic: str, partition: int | None) -> _End:
    page = await call.read(
        call.access.fetch(FetchRequest(topic, partition, messages_max=1, bytes_max=1))
    )
    return _End(max(page.first_offset, page.end_offset - 1), page.end_offset)


@get("/v1/topics/{topic:str}/messages/last", operation_id="readLastMessage", tags=["read"])
async def read_last_message(
    request: Request[Any, Any, Any],
    topic: FromPath[str],
    partition: Annotated[
        int | None,
        QueryParameter(
            ge=0, le=INT64_MAX, description="Required if the topic has several partitions."
        ),
    ] = None,
    payload: Annotated[
        PayloadForm, QueryParameter(description="The form of the payloads.")
    ] = PayloadForm.AUTO,
    times: Annotated[TimeForm, QueryParameter(description=TIMES_TEXT)] = TimeForm.NS,
) -> MessageOut:
    """Read the last message of a partition. 404 if it has none."""
    call = call_of(request)
    end = await _end(call, topic, partition)
    where = f"topic {topic!r}" if partition is None else f"partition {partition} of topic {topic!r}"
    if end.last >= end.next:
        raise NoLastMessageError(
            f"{where} has no message now; the next one will have offset {end.next}"
        )
    page = await call.read(
        call.access.fetch(
            FetchRequest(topic, partition, offset=end.last, messages_max=1, bytes_max=1)
        )
    )
    if not page.batches:  # rewriting left a hole, or damage did
        raise NoLastMessageError(f"the last message of {where}, offset {end.last}, is gone")
    message = next(iter(page.batches[0]))
    call.flow.messages_out += 1
    call.flow.bytes_out += message.size
    return message_out(message, payload, times)


@asynccontextmanager
async def _as_stream(call: HttpCall) -> AsyncIterator[None]:
    with call.server.enter_stream():
        yield


@get(
    "/v1/topics/{topic:str}/messages/{offset:int}",
    operation_id="readMessage",
    tags=["read"],
    media_type="application/octet-stream",
)
async def read_message(
    request: Request[Any, Any, Any],
    topic: FromPath[str],
    offset: Annotated[int, PathParameter(description="The message's number.")],
    partition: Annotated[
        int | None,
        QueryParameter(
            ge=0, le=INT64_MAX, description="Required if the topic has several partitions."
        ),
    ] = None,
) -> Answer:
    """Read one message: the payload is the body, everything else is in headers, percent-encoded."""
    call = call_of(request)
    page = await call.read(
        call.access.fetch(
            FetchRequest(topic, partition, offset=offset, messages_max=1, bytes_max=1)
        )
    )
    message: Message | None = None
    if page.batches:
        message = next(iter(page.batches[0]))
    elif not page.gaps:
        raise OffsetAheadError(topic, partition or 0, offset, page.next_offset)
    if message is None or message.offset != offset:  # rewriting left a hole, or damage did
        raise OffsetGoneError(
            topic, partition or 0, offset, page.next_offset if message is None else message.offset
        )
    call.flow.messages_out += 1
    call.flow.bytes_out += message.size
    return Answer(
        message.payload, content_type="application/octet-stream", headers=headers_of(message)
    )


read_handlers = [read_messages, read_last_message, read_message]
