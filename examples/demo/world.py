"""The small world: its stations and its orders, and what each of them says. Pure, and the standard library alone.

The same numbers give the same bytes, and every message says its number: so a reader knows which are missing, and
how many dead letters there must be.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

WEATHER: Final = "weather/*"
ORDERS: Final = "orders/*"
INVOICES: Final = "invoices"
BILLING: Final = "billing"  # the subscription through which orders are worked on

REGIONS: Final = {"coast": 14, "forest": 11, "hills": 8, "lakes": 13, "plain": 16, "town": 18}
STATIONS_PER_REGION: Final = 4
GATEWAYS: Final = 4

POISONOUS_EVERY: Final = 50
FAILS_AT_FIRST_EVERY: Final = 10


@dataclass(frozen=True, slots=True)
class Station:
    """A weather station, with its own topic."""

    region: str
    number: int

    @property
    def topic(self) -> str:
        return f"weather/{self.region}/{self.number}"

    def celsius(self, number: int) -> float:
        usual = REGIONS[self.region]
        return round(usual + 3 * math.sin(number / 40 + self.number + usual), 2)

    def reading(self, number: int) -> bytes:
        """Readings are numbered 1, 2, 3 …, and so are the offsets of the topic."""
        return b'{"n": %d, "celsius": %.2f}' % (number, self.celsius(number))


STATIONS: Final = tuple(
    Station(region, number) for region in REGIONS for number in range(1, STATIONS_PER_REGION + 1)
)


def stations_of(gateway: int) -> tuple[Station, ...]:
    return STATIONS[gateway::GATEWAYS]


class OrderSource(Enum):
    """The two shops that send orders."""

    WEB = "web"
    PARTNER = "partner"

    @property
    def topic(self) -> str:
        return f"orders/{self.value}"


def cents(number: int) -> int:
    """The price of an order."""
    return 100 + number * 37 % 9_900


def is_poisonous(number: int) -> bool:
    """No invoice can be made of it: it becomes a dead letter."""
    return number % POISONOUS_EVERY == 17


def fails_at_first(number: int) -> bool:
    """Its first attempt fails, a later one succeeds."""
    return number % FAILS_AT_FIRST_EVERY == 3


def has_to_wait(number: int) -> bool:
    """The worker gives it back the first time, for a later attempt."""
    return number % FAILS_AT_FIRST_EVERY == 6


def many(count: int, noun: str) -> str:
    """1 order, 2 orders."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def order_name(topic: str, number: int) -> str:
    return f"{topic.rpartition('/')[2]}-{number}"


def order(source: OrderSource, number: int) -> bytes:
    """Orders are numbered 1, 2, 3 …, and so are the offsets of their topic."""
    price: object = "a fortune" if is_poisonous(number) else cents(number)
    return json.dumps({"order": order_name(source.topic, number), "cents": price}).encode()


def payable(count: int) -> list[int]:
    """The numbers of those orders that can be billed."""
    return [number for number in range(1, count + 1) if not is_poisonous(number)]
