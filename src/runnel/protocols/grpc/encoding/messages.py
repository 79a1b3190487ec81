"""Translates messages, blocks and gaps between the .proto and the broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from runnel.broker.broker import Level
from runnel.errors import ClientFault, LimitExceededError, MalformedError
from runnel.formats import block, wire
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.formats.message import NO_TAGS, Message
from runnel.formats.traces import trace_tags
from runnel.protocols.grpc.generated import runnel_pb2 as pb

P = TypeVar("P", bound=ProtoMessage)

NATURAL_MAX: Final = 2**63 - 1
REQUEST_BYTES_MAX: Final = 4 * 2**20
"""The largest request, except a publish: parsed, a request of many empty parts takes up to a hundred times as much."""

LEVELS: Final[Mapping[int, Level | None]] = {
    pb.LEVEL_UNSPECIFIED: None,
    pb.LEVEL_NONE: Level.NONE,
    pb.LEVEL_RECEIVED: Level.RECEIVED,
    pb.LEVEL_STORED: Level.STORED,
}
_PROTO_LEVELS: Final = {
    Level.NONE: pb.LEVEL_NONE,
    Level.RECEIVED: pb.LEVEL_RECEIVED,
    Level.STORED: pb.LEVEL_STORED,
}


def parsed(request_type: type[P], data: bytes, *, bytes_max: int = REQUEST_BYTES_MAX) -> P:
    """The request in these bytes. MalformedError: they are not a message of this type."""
    if len(data) > bytes_max:
        raise LimitExceededError(
            f"a {request_type.DESCRIPTOR.name} of {len(data)} bytes; at most {bytes_max} are allowed"
        )
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        name = request_type.DESCRIPTOR.full_name
        raise MalformedError(name, f"{len(data)} bytes that are no such message: {error}") from None


def natural(name: str, value: int) -> int:
    """Check an offset, an entry or a size: the .proto has 64 bits for it, the broker 63."""
    if value > NATURAL_MAX:
        raise ClientFault(f"{name} = {value} is larger than {NATURAL_MAX}")
    return value


# --- Publishing ---


def level_of(level: pb.Level) -> Level | None:
    try:
        return LEVELS[level]
    except KeyError:
        raise ClientFault(f"level {level} is unknown; 0 to 3 are defined") from None


def proto_level(level: Level) -> pb.Level:
    return _PROTO_LEVELS[level]


def message_of(
    message: pb.Message,
    topic: str,
    partition: int,
    key: bytes | None,
    partition_key: bytes | None,
    traceparent: str | None,
    tracestate: str | None,
) -> Message:
    """A message to publish. Hot: called for each message."""
    return Message(
        topic,
        message.payload,
        key,
        tags_of(message, traceparent, tracestate),
        message.event_time_ns,
        message.transmit_time_ns,
        0,
        partition,
        0,
        message.uid if message.HasField("uid") else None,
        partition_key,
    )


def tags_of(
    message: pb.Message, traceparent: str | None, tracestate: str | None
) -> Mapping[str, str]:
    """The message's own tags, and those of its call's trace."""
    given = message.tags
    tags: Mapping[str, str] | None = dict(given) if given else None
    if traceparent is not None:
        tags = trace_tags(traceparent, tracestate, tags)
    return tags or NO_TAGS


def batch_of(data: bytes) -> Batch:
    """The single block of a publish. The broker checks its size."""
    envelope, body, block_bytes = block.unpack(data)
    if block_bytes != len(data):
        raise MalformedError(
            "batch", f"{len(data) - block_bytes} bytes follow the block; there must be exactly one"
        )
    return Batch(envelope, body)


# --- Reading ---


def proto_messages(batch: Batch) -> list[pb.Message]:
    return list(map(proto_message, batch.messages()))


def proto_message(message: Message) -> pb.Message:
    """A message for a reader. Hot: called for each message."""
    key, partition_key = message.key, message.partition_key
    return pb.Message(
        topic=message.topic,
        payload=message.payload,
        key=key,
        partition_key=None if partition_key == key else partition_key,
        partition=message.partition,
        tags=message.tags or None,
        event_time_ns=message.event_time_ns,
        transmit_time_ns=message.transmit_time_ns,
        uid=message.uid,
        receive_time_ns=message.receive_time_ns,
        offset=message.offset,
    )


def is_blocks(form: pb.Format) -> bool:
    if form not in (pb.FORMAT_UNSPECIFIED, pb.FORMAT_MESSAGES, pb.FORMAT_BLOCKS):
        raise ClientFault(f"format {form} is unknown; 0 to 2 are defined")
    return form == pb.FORMAT_BLOCKS


def block_of(batch: Batch) -> bytes:
    return b"".join(block.pack(envelopes.encode(batch.envelope), batch.body))


def blocks_in(data: bytes) -> list[bytes]:
    """The blocks in these bytes, not decoded. Mostly there is one."""
    first = block.read_header(data).block_bytes if data else 0
    if first == len(data):
        return [data] if data else []
    blocks = []
    position = 0
    while position < len(data):
        end = position + block.read_header(data, position).block_bytes
        blocks.append(data[position:end])
        position = end
    return blocks


def proto_gap(gap: wire.GapState) -> pb.Gap:
    return pb.Gap(
        reason=gap.reason,
        missed=gap.missed,
        topic=gap.topic,
        partition=gap.partition,
        first_offset=gap.first_offset,
        next_offset=gap.next_offset,
        text=gap.text,
    )


def proto_gaps(gaps: Iterable[wire.GapState]) -> Sequence[pb.Gap]:
    return [proto_gap(gap) for gap in gaps]
