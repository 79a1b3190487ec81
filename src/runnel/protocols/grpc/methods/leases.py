"""Translates leases, and the parts of deliveries that consumers name, between the .proto and the broker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from runnel.broker.consumer_groups import WorkDelivery
from runnel.errors import LimitExceededError
from runnel.formats.batch import unpack_blocks
from runnel.formats.work_heads import DeliveryPart
from runnel.group_rules.effects import OFFSET_MAX
from runnel.protocols.grpc.encoding.messages import natural, proto_messages
from runnel.protocols.grpc.generated import runnel_pb2 as pb

PARTS_MAX: Final = 100_000
"""How many deliveries, parts of them and single messages one request may name."""

PartOrPicked = pb.Part | pb.Picked


def check_count(*named: Sequence[object], picked: Sequence[pb.Picked] = ()) -> None:
    """Refuse a request that names too many: handling it would delay all other calls."""
    count = sum(map(len, named)) + sum(len(each.offsets) for each in picked)
    if count > PARTS_MAX:
        raise LimitExceededError(
            f"a request that names {count:,} deliveries, parts and messages; at most {PARTS_MAX:,} are allowed"
        )


def parts_of(parts: Iterable[pb.Part], picked: Iterable[pb.Picked]) -> list[DeliveryPart]:
    """The parts, with neighbouring single messages joined to parts."""
    found = [_part_of(part) for part in parts]
    for each in picked:
        delivery = natural("delivery", each.delivery)
        begin = end = 0
        for offset in sorted(set(each.offsets)):
            if begin and offset == end:
                end += 1
                continue
            if begin:
                found.append(DeliveryPart(delivery, begin, end))
            begin, end = natural("offset", offset), offset + 1
        if begin:
            found.append(DeliveryPart(delivery, begin, end))
    return found


def whole(delivery: int) -> DeliveryPart:
    return DeliveryPart(natural("delivery", delivery), 0, OFFSET_MAX)


def _part_of(part: pb.Part) -> DeliveryPart:
    if not part.begin and not part.end:
        return whole(part.delivery)
    return DeliveryPart(
        natural("delivery", part.delivery),
        natural("begin", part.begin),
        natural("end", part.end),
    )


def late_parts(late: Iterable[DeliveryPart], asked: Iterable[DeliveryPart]) -> list[DeliveryPart]:
    """The parts that really came too late. A request that names a whole delivery also names offsets it never had."""
    wholes = {part.delivery for part in asked if (part.begin, part.end) == (0, OFFSET_MAX)}
    return [
        part
        for part in late
        if part.delivery not in wholes or (part.begin, part.end) == (0, OFFSET_MAX)
    ]


def proto_parts(parts: Iterable[DeliveryPart]) -> list[pb.Part]:
    return [
        pb.Part(delivery=part.delivery)
        if (part.begin, part.end) == (0, OFFSET_MAX)
        else pb.Part(delivery=part.delivery, begin=part.begin, end=part.end)
        for part in parts
    ]


def proto_lease(delivery: WorkDelivery, *, is_blocks: bool) -> pb.Lease:
    lease = delivery.lease
    data = b"".join(delivery.buffers)
    attempts = [
        pb.Attempt(
            offset=attempt.offset,
            failures=attempt.failures,
            first_delivery_ns=attempt.first_delivery_ns,
        )
        for attempt in lease.attempts
    ]
    return pb.Lease(
        delivery=lease.delivery,
        topic=lease.topic,
        partition=lease.partition,
        begin=lease.begin,
        end=lease.end,
        block=data if is_blocks else b"",
        messages=()
        if is_blocks
        else [message for batch in unpack_blocks(data) for message in proto_messages(batch)],
        attempts=attempts,
    )
