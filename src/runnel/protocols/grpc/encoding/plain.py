"""Plain publish requests, whose messages have only payloads: recognizes them by their bytes, joins them to batches.

Reading the payload of each message object takes longer than all other handling of a message, so none are made if the
bytes show payloads of one length. Many small batches take longer than a large one (bench/listeners.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from runnel.broker.broker import Level, Published
from runnel.formats.column_builder import build, build_even
from runnel.formats.columns import Columns
from runnel.protocols.grpc.encoding.fields import field_bytes, varint
from runnel.protocols.grpc.encoding.messages import LEVELS, proto_level
from runnel.protocols.grpc.generated import runnel_pb2 as pb

# The largest batch that is joined from smaller requests.
_JOINED_BYTES_MAX: Final = 2**18
_JOINED_MESSAGES_MAX: Final = 4000

# Protobuf tags: a field's number and the encoding of its value.
_ID, _LEVEL, _MESSAGE, _TOPIC = 0x08, 0x10, 0x1A, 0x22  # of a request
_PAYLOAD = 0x12  # of a message
_UINT64_MAX: Final = 2**64 - 1


class PlainRequest(NamedTuple):
    """A request with only payloads. They are `rows`, or, all of one `width`, concatenated in `data`."""

    id: int
    level: Level | None
    topic: str
    size: int  # of the request
    messages: int
    rows: Sequence[bytes] = ()
    data: bytes = b""
    width: int = 0

    def payloads(self) -> Sequence[bytes]:
        if not self.width:
            return self.rows
        rows: list[bytes] = np.frombuffer(self.data, f"V{self.width}").tolist()
        return rows


class OtherRequest(NamedTuple):
    """A request that is not plain."""

    parsed: pb.PublishRequest
    size: int


# --- Reading ---


def even_in(data: bytes) -> PlainRequest | None:
    """A request of two or more payloads of one length, for its topic, in the order in which protobuf writes fields.

    None: the bytes are another request, or no request; the parser decides that.

        08 id  10 level  (1a size 12 width payload)…  22 length topic
                          ╰──── the same ────╯
    """
    position = request_id = level = 0
    try:
        if data[position] == _ID:
            request_id, position = varint(data, position + 1)
        if data[position] == _LEVEL:
            level, position = varint(data, position + 1)
        first = position
        if data[first] != _MESSAGE:
            return None
        size, inner = varint(data, first + 1)
        if data[inner] != _PAYLOAD:
            return None
        width, begin = varint(data, inner + 1)
        row_bytes = begin + width - first
        tags = data[first::row_bytes]
        count = len(tags) - len(tags.lstrip(b"\x1a"))
        end = first + count * row_bytes
        if data[end] != _TOPIC:
            return None
        topic_bytes, name = varint(data, end + 1)
    except IndexError:
        return None
    head_bytes = begin - first
    if (
        not width
        or count < 2
        or begin + width != inner + size
        or name + topic_bytes != len(data)
        or request_id > _UINT64_MAX
        or level not in LEVELS
    ):
        return None
    for place in range(first + 1, begin):
        if data[place:end:row_bytes].count(data[place]) != count:
            return None
    table = np.frombuffer(data, np.uint8, end - first, first).reshape(count, row_bytes)
    try:
        topic = data[name:].decode()
    except UnicodeDecodeError:
        return None
    payloads = table[:, head_bytes:].tobytes()
    return PlainRequest(
        request_id, LEVELS[level], topic, len(data), count, data=payloads, width=width
    )


def plain_of(request: pb.PublishRequest, size: int) -> PlainRequest | None:
    """A parsed request as a plain one, with payloads of any lengths. None: it is not plain."""
    if len(request.messages) < 2 or request.batch or request.level not in LEVELS:
        return None
    payloads = [message.payload for message in request.messages]
    if not _has_only_payloads(request, payloads):
        return None
    level = LEVELS[request.level]
    return PlainRequest(request.id, level, request.topic, size, len(payloads), rows=payloads)


def _has_only_payloads(request: pb.PublishRequest, payloads: Sequence[bytes]) -> bool:
    """Whether the messages have only payloads: then the request has no byte more than these take.

    Asking each message for each of its fields would take six times as long as all other steps.
    """
    head = pb.PublishRequest(id=request.id, level=request.level, topic=request.topic)
    lengths = list(map(len, payloads))
    shortest, longest = _head_bytes(min(lengths)), _head_bytes(max(lengths))
    if shortest == longest:
        heads = shortest * len(lengths)
    else:
        heads = sum(map(_head_bytes, lengths))
    return request.ByteSize() == head.ByteSize() + heads + sum(lengths)


def _head_bytes(length: int) -> int:
    """The bytes of a message in a request besides its payload. They never decrease with the payload's length."""
    return field_bytes(field_bytes(length) if length else 0) - length


# --- Joining ---


def joinable(
    requests: Iterable[PlainRequest | OtherRequest],
) -> Iterator[Sequence[PlainRequest] | OtherRequest]:
    """Group neighbouring plain requests of one topic and level, up to the size of a batch. Others stay alone."""
    together: list[PlainRequest] = []
    size = count = 0
    for request in requests:
        if isinstance(request, OtherRequest):
            if together:
                yield together
                together = []
            yield request
            continue
        if together and (
            request.topic != together[0].topic
            or request.level is not together[0].level
            or size + request.size > _JOINED_BYTES_MAX
            or count + request.messages > _JOINED_MESSAGES_MAX
        ):
            yield together
            together = []
        if not together:
            size = count = 0
        together.append(request)
        size += request.size
        count += request.messages
    if together:
        yield together


def columns_of(requests: Sequence[PlainRequest]) -> Columns:
    """The payloads of all requests."""
    width = requests[0].width
    if width and all([request.width == width for request in requests]):  # noqa: C419 - quicker
        return build_even(b"".join([request.data for request in requests]), width)
    payloads = [payload for request in requests for payload in request.payloads()]
    return build(payloads, event_times_ns=(0,))


# --- Answering ---


def answers_to(
    requests: Sequence[PlainRequest], published: Published, partition: int
) -> list[bytes]:
    """An encoded `PublishResponse` for each of the joined requests.

    Encoded fields may be concatenated. So the fields that all responses share are encoded once, and the partitions
    once for each number of messages.
    """
    shared = pb.PublishResponse(
        level=proto_level(published.level),
        receive_time_ns=published.receive_time_ns,
        entry=published.entry,
        epoch=published.epoch,
        receivers=published.receivers,
    ).SerializeToString()
    base = published.base_offsets[0]
    answers = []
    for request in requests:
        own = pb.PublishResponse(id=request.id, offsets=offsets_from(base, request.messages))
        answers.append(
            own.SerializeToString() + _partitions_field(request.messages, partition) + shared
        )
        if base:
            base += request.messages
    return answers


def offsets_from(base: int, count: int) -> Sequence[int]:
    """The offsets of `count` messages. Base 0: an ephemeral topic without readers, whose messages have no offsets."""
    return range(base, base + count) if base else (0,) * count


@lru_cache(maxsize=64)
def _partitions_field(count: int, partition: int) -> bytes:
    return pb.PublishResponse(partitions=(partition,) * count).SerializeToString()
