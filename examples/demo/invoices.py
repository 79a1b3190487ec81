"""The invoices that workers make, and the fate of all orders, counted from them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from examples.demo.evidence import Sum, WorkFound
from examples.demo.world import OrderSource, cents, is_poisonous, order_name


class Invoice(msgspec.Struct, frozen=True):
    """The invoice that a worker makes of an order."""

    order: str
    cents: int
    attempt: int  # the delivery that it was made in: 1, or more if it came again


def order_numbers(sent: Mapping[OrderSource, int]) -> dict[str, int]:
    """Every order by its name."""
    return {
        order_name(source.topic, number): number
        for source, count in sent.items()
        for number in range(1, count + 1)
    }


def count_work(
    sent: Mapping[OrderSource, int],
    invoices: Iterable[bytes],
    dead: Iterable[tuple[str, int]],
    *,
    left: int,
) -> WorkFound:
    """From the payloads of the invoices, and topic and offset of each dead letter."""
    numbers = order_numbers(sent)
    sums = Sum()
    seen: Counter[str] = Counter()
    money = wrong = 0
    again: set[str] = set()
    for payload in invoices:
        sums.add(payload)
        invoice = msgspec.json.decode(payload, type=Invoice)
        number = numbers.get(invoice.order)
        if number is None or is_poisonous(number) or invoice.cents != cents(number):
            wrong += 1
            continue
        if not seen[invoice.order]:
            money += invoice.cents
        seen[invoice.order] += 1
        if invoice.attempt > 1:
            again.add(invoice.order)
    letters = Counter(order_name(topic, offset) for topic, offset in dead)
    poisonous = {name for name, number in numbers.items() if is_poisonous(number)}
    return WorkFound(
        invoiced=len(seen),
        invoices=sums,
        cents=money,
        more_than_once=seen.total() - len(seen),
        came_again=len(again),
        wrong=wrong,
        dead=len(poisonous & letters.keys()),
        dead_wrong=len(letters.keys() - poisonous),
        dead_again=letters.total() - len(letters),
        left=left,
    )
