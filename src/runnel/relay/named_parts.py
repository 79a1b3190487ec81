"""Parts of deliveries as requests name them, and which of these a consumer does not have. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runnel.client.consumer import BEGUN, HeldDelivery
from runnel.formats.work_heads import DeliveryPart, Picked
from runnel.group_rules import masks


def named_parts(number: int, ranges: Iterable[tuple[int, int]]) -> list[DeliveryPart]:
    return [DeliveryPart(number, begin, end) for begin, end in ranges]


def joined_parts(number: int, offsets: Iterable[int]) -> list[DeliveryPart]:
    """Parts of ascending offsets; neighbouring ones share a part."""
    parts: list[DeliveryPart] = []
    for offset in offsets:
        if parts and parts[-1].end == offset:
            parts[-1] = DeliveryPart(number, parts[-1].begin, offset + 1)
        else:
            parts.append(DeliveryPart(number, offset, offset + 1))
    return parts


def unpicked(picked: Iterable[Picked]) -> Iterator[DeliveryPart]:
    for each in picked:
        mask = int.from_bytes(each.bits, "little")
        yield from named_parts(each.delivery, masks.runs(each.begin, mask))


def not_begun(delivery: HeldDelivery, part: DeliveryPart, *others: int) -> list[DeliveryPart]:
    """What the caller does not have of a part, or has only in one of these other states."""
    first, last = max(part.begin, delivery.begin), min(part.end, delivery.end)
    if first < last:
        states = delivery.states[first - delivery.begin : last - delivery.begin]
        if sum(map(states.count, (BEGUN, *others))) == part.end - part.begin:
            return []  # the usual case
    found: list[DeliveryPart] = []
    position = part.begin
    ranges = sorted(each for state in (BEGUN, *others) for each in delivery.ranges_in(state))
    for begin, end in ranges:
        if end <= position or begin >= part.end:
            continue
        if position < begin:
            found.append(DeliveryPart(part.delivery, position, begin))
        position = end
    if position < part.end:
        found.append(DeliveryPart(part.delivery, position, part.end))
    return found
