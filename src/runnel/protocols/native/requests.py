"""Checks what a request's type does not say, and converts requests to the values that the broker takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from runnel.errors import LimitExceededError, MalformedError
from runnel.formats import block, wire
from runnel.formats.batch import Batch
from runnel.formats.message import NO_TAGS, Message
from runnel.formats.work_heads import (
    PICKED_BYTES_MAX,
    GiveBack,
    Nack,
    Picked,
    Recalled,
    Renew,
    Window,
    WindowShare,
)

# Deliveries, parts of deliveries, or dead letters that one frame may name.
PARTS_MAX: Final = 100_000


_WITHOUT_ID: Final = (wire.Credit, wire.AsOf, Window, WindowShare, Nack, GiveBack, Renew, Recalled)


def id_of(request: wire.Request) -> int:
    """The id to answer to; 0, the connection's own id, for a request without one."""
    return 0 if isinstance(request, _WITHOUT_ID) else request.id


def name_of(request: wire.Request) -> str:
    return str(type(request).__struct_config__.tag)


def check_no_tail(request: wire.Request, tail: memoryview) -> None:
    if tail:
        raise MalformedError(
            "frame tail", f"{len(tail)} bytes behind {name_of(request)!r}, which has no tail"
        )


def check_count(request: wire.Request, count: int) -> None:
    """Limit how many things a request names: handling it must not block other connections for long."""
    if count > PARTS_MAX:
        raise LimitExceededError(
            f"{name_of(request)} names {count:,} things; at most {PARTS_MAX:,} fit into one frame"
        )


def only_batch(tail: memoryview) -> Batch:
    """The single block of a publish. The broker checks its size."""
    if not tail:
        raise MalformedError("publish tail", "is empty; a block with the batch is needed")
    envelope, body, block_bytes = block.unpack(tail)
    if block_bytes != len(tail):
        raise MalformedError(
            "publish tail",
            f"{len(tail) - block_bytes} bytes follow the block; there must be exactly one",
        )
    return Batch(envelope, body)


def message_of(request: wire.Send) -> Message:
    return Message(
        request.topic,
        request.payload,
        request.key,
        request.tags or NO_TAGS,
        request.event_time_ns,
        request.transmit_time_ns,
        uid=request.uid,
        partition_key=request.partition_key,
    )


def check_picked(picked: Sequence[Picked]) -> None:
    """Limit the bits for a delivery: no delivery spans more messages than `PICKED_BYTES_MAX` can name."""
    for part in picked:
        if len(part.bits) > PICKED_BYTES_MAX:
            raise LimitExceededError(
                f"ack: {len(part.bits)} bytes of bits for delivery {part.delivery}; at most "
                f"{PICKED_BYTES_MAX} are allowed, since no delivery spans more messages"
            )
