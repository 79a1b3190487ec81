"""Publishes lines without end: one JSON object per line, stored in order, in batches as they arrive.

A few batches are in flight at a time; until one of them is stored, nothing more is read. There is one answer, at the
end. If a line is wrong, the lines before it have been published, and the answer says how many.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from litestar import Request

from runnel.broker.broker import Level, Published
from runnel.errors import ConnectionLostError, LimitExceededError, RunnelError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.protocols.http.encoding.messages import MESSAGE_FIELDS, MessageIn, decoded
from runnel.protocols.http.encoding.problems import BulkError, TooLargeError
from runnel.protocols.http.resources.placement import (
    at_partition,
    owners_of,
    partition_of,
    publish_when_room,
    rows_by_shard,
    with_trace,
)
from runnel.protocols.http.server.answers import Answer, encode_json
from runnel.protocols.http.server.calls import HttpCall

_IN_FLIGHT_MAX: Final = 8
# A piece is decoded in one step, which blocks all other requests meanwhile.
_PIECE_BYTES_MAX: Final = 256 * 1024
_PIECE_LINES_MAX: Final = 10_000  # approximate: assumes lines of the same length

_lines: Final = msgspec.json.Decoder(MessageIn)


class PublishedRange(msgspec.Struct, frozen=True):
    """The range of a partition's offsets that contains the messages; other publishers' messages may lie between."""

    partition: int
    first_offset: int
    next_offset: int


class BulkReceipt(msgspec.Struct, frozen=True):
    """How many lines were published, and where their messages are."""

    published: int
    level: str | None
    partitions: Sequence[PublishedRange]


async def publish_lines(
    call: HttpCall,
    request: Request[Any, Any, Any],
    topic: str,
    level: Level | None,
    partition: int | None,
) -> Answer:
    bulk = _Bulk(call, topic, level, partition)
    try:
        await bulk.read(request)
        await bulk.settle(0)
    except RunnelError as error:
        raise await bulk.failure(error) from None
    return Answer(encode_json(bulk.receipt()), status=202 if level is Level.NONE else 200)


class _Bulk:
    """The lines of one request: reads and publishes them."""

    def __init__(
        self, call: HttpCall, topic: str, level: Level | None, partition: int | None
    ) -> None:
        self._call = call
        self._topic = topic
        self._level = level
        self._partition = partition
        self._owners = owners_of(call, topic)
        self._partition_count = len(self._owners)
        self._in_flight: deque[tuple[asyncio.Future[Published], Batch]] = deque()
        self._is_traced = b"traceparent" in call.headers
        self._keyless = call.server.next_keyless(self._partition_count)
        self._line = 0  # lines read so far
        self._fault_line: int | None = None
        self._published = 0
        self._reached: Level | None = None
        self._ranges: dict[int, tuple[int, int]] = {}

    # --- Reading ---

    async def read(self, request: Request[Any, Any, Any]) -> None:
        call = self._call
        line_bytes_max = call.server.settings.http.body_bytes_max
        rest = bytearray()  # of a line whose end has not arrived
        while True:
            call.connection.restart_request_timeout()
            event = await call.unless_ended(_receive(request))
            call.check_not_ended()  # `unless_ended` returns data that is ready, and a fast client always has some
            if event["type"] != "http.request":
                raise ConnectionLostError("the client has gone in the middle of its lines")
            chunk, is_last = event["body"], not event["more_body"]
            end = len(chunk) if is_last else chunk.rfind(b"\n") + 1
            if end or is_last:
                piece = bytes(rest) + chunk[:end] if rest else chunk[:end]
                rest = bytearray(chunk[end:])
                await self._take(piece)
            else:
                rest += chunk
            if len(rest) > line_bytes_max:
                self._fault_line = self._line + 1
                raise TooLargeError(
                    f"the line is longer than http.body_bytes_max = {line_bytes_max}"
                )
            if is_last:
                return

    async def _take(self, piece: bytes) -> None:
        """Publish whole lines, in pieces of limited size."""
        bytes_max = _PIECE_BYTES_MAX
        lines = piece.count(b"\n")
        if lines > _PIECE_LINES_MAX:
            bytes_max = min(bytes_max, len(piece) * _PIECE_LINES_MAX // lines)
        begin = 0
        while begin < len(piece):
            end = len(piece)
            if end - begin > bytes_max:
                end = piece.rfind(b"\n", begin, begin + bytes_max) + 1
                end = end or piece.find(b"\n", begin) + 1 or len(piece)
            await self._take_some(piece[begin:end])
            begin = end
            if begin < len(piece):
                await asyncio.sleep(0)

    async def _take_some(self, piece: bytes) -> None:
        first = self._line + 1
        count = piece.count(b"\n") + (not piece.endswith(b"\n"))
        try:
            messages = [
                self._message(given)
                for given in _lines.decode_lines(piece)  # many times faster than one by one
            ]
        except (RunnelError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            messages = []
        # msgspec takes any blanks between objects: if no line is empty and the counts agree, each line is one object.
        if len(messages) == count and not _may_have_empty_lines(piece):
            self._line += count
            await self._publish(messages, range(first, first + count))
        else:  # a line is wrong, or lines are empty: decode them one by one
            await self._take_one_by_one(piece.split(b"\n")[:count])

    async def _take_one_by_one(self, lines: Sequence[bytes]) -> None:
        messages: list[Message] = []
        numbers: list[int] = []
        for line in lines:
            self._line += 1
            if not line or line.isspace():
                continue
            try:
                messages.append(self._message(decoded(_lines, line, fields=MESSAGE_FIELDS)))
                numbers.append(self._line)
            except RunnelError:
                wrong = self._line
                await self._publish(messages, numbers)
                self._fault_line = wrong
                raise
        await self._publish(messages, numbers)

    def _message(self, given: MessageIn) -> Message:
        message = given.to_message(self._topic)
        if self._is_traced:
            message = with_trace(message, self._call.headers)
        partition = self._partition
        if partition is None and self._partition_count > 1:
            partition = partition_of(message, self._partition_count, keyless=self._keyless)
        return at_partition(message, partition) if partition else message

    # --- Publishing ---

    async def _publish(self, messages: Sequence[Message], lines: Sequence[int]) -> None:
        """Publish the messages of each shard. If a line is too large, publish all lines before it."""
        failure: LimitExceededError | None = None
        for rows in rows_by_shard(messages, self._owners) if messages else ():
            end = self._fault_line
            before = [row for row in rows if end is None or lines[row] < end]
            try:
                await self._publish_in_shard(
                    [messages[row] for row in before], [lines[row] for row in before]
                )
            except LimitExceededError as error:
                failure = error
        if failure is not None:
            raise failure

    async def _publish_in_shard(self, messages: Sequence[Message], lines: Sequence[int]) -> None:
        if not messages:
            return
        await self.settle(_IN_FLIGHT_MAX - 1)
        self._call.check_not_ended()
        try:
            batch = Batch.from_messages(messages)
            answer = await publish_when_room(
                self._call,
                self._topic,
                messages[0].partition,
                lambda: self._call.access.publish(batch, self._level),
            )
        except LimitExceededError:
            if len(messages) == 1:
                self._fault_line = lines[0]
                raise
            # The batch or one message is too large: publish two halves, until the large message is found.
            half = len(messages) // 2
            await self._publish_in_shard(messages[:half], lines[:half])
            await self._publish_in_shard(messages[half:], lines[half:])
            return
        self._in_flight.append((answer, batch))
        self._keyless = self._call.server.next_keyless(self._partition_count)
        flow = self._call.flow
        flow.messages_in += len(messages)
        flow.bytes_in += len(batch.body)

    async def settle(self, in_flight_max: int) -> None:
        """Wait until no more batches than this are under way."""
        while len(self._in_flight) > in_flight_max:
            self._call.connection.suspend_request_timeout()
            answer, batch = self._in_flight[0]
            done = await asyncio.shield(answer)
            self._in_flight.popleft()
            self._count(batch, done)

    def _count(self, batch: Batch, done: Published) -> None:
        self._published += len(batch)
        self._reached = done.level
        for run, offset in zip(batch.runs(), done.base_offsets, strict=False):
            first, next_offset = self._ranges.get(run.partition, (offset, offset))
            self._ranges[run.partition] = (min(first, offset), max(next_offset, offset + run.count))

    # --- Answering ---

    def receipt(self) -> BulkReceipt:
        return BulkReceipt(
            self._published,
            self._reached,
            [PublishedRange(number, *self._ranges[number]) for number in sorted(self._ranges)],
        )

    async def failure(self, error: RunnelError) -> BulkError:
        """The error to answer with, after the batches in flight have settled."""
        for answer, batch in self._in_flight:
            try:
                self._count(batch, await asyncio.shield(answer))
            except RunnelError:
                continue  # only the first failure is reported
        return BulkError(error, self._fault_line, self._published)


def _may_have_empty_lines(piece: bytes) -> bool:
    """Whether a line begins with a blank. Searching for each kind is many times faster than a pattern."""
    return piece[:1].isspace() or any(
        begin in piece for begin in (b"\n\n", b"\n\r", b"\n ", b"\n\t")
    )


async def _receive(request: Request[Any, Any, Any]) -> Any:
    return await request.receive()
