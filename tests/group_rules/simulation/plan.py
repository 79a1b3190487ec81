"""The plan of a history, drawn from its seed: mode, options, keys, consumers and troubles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from runnel.group_rules.definition import Mode, SubscriptionOptions
from tests.group_rules.history import NS_PER_SECOND, Place, seconds
from tests.simulation.troubles import Trouble, draw_troubles, names

MS = NS_PER_SECOND // 1000


TROUBLES: Final = (
    Trouble.POWER_LOSS,
    Trouble.LOST_CONSUMER,
    Trouble.STALLED_CONSUMER,
    Trouble.NACK,
    Trouble.BAD_ACK,
    Trouble.OPERATOR,
    Trouble.RETENTION,
    Trouble.DEAD_LETTER_FAULT,
    Trouble.LAG,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one history of consumer groups."""

    mode: Mode
    options: SubscriptionOptions
    places: tuple[Place, ...]
    keys: Sequence[bytes | None]
    waiting_max: int
    members: tuple[str, ...]
    consumers_max: int
    steps: int
    troubles: frozenset[Trouble]

    def __str__(self) -> str:
        options = self.options
        return (
            f"{self.mode.value}; lease {seconds(options.lease_ns)}, at most {options.deliveries_max} deliveries, "
            f"retry after {seconds(options.retry_delay_ns)} to {seconds(options.retry_delay_ns_max)} "
            f"(x {options.backoff}); at most {self.waiting_max} wait; {names(self.troubles)}"
        )

    @property
    def is_keyed(self) -> bool:
        return self.mode is Mode.KEY_SHARED


def draw(random: Random) -> Plan:
    # Two of five have keys: they have the hardest promises.
    mode = random.choice(
        (Mode.SHARED, Mode.SHARED, Mode.KEY_SHARED, Mode.KEY_SHARED, Mode.MULTICAST)
    )
    retry_delay_ns = random.choice((0, 100, 1000)) * MS
    options = SubscriptionOptions(
        lease_ns=random.choice((100, 1000, 30_000)) * MS,
        deliveries_max=random.choice((0, 1, 2, 2, 3, 8)),
        retry_delay_ns=retry_delay_ns,
        retry_delay_ns_max=max(retry_delay_ns, random.choice((200, 5000)) * MS),
        backoff=random.choice((1.0, 1.5, 2.0)),
    )
    places = tuple(("orders", partition) for partition in range(random.choice((1, 1, 2, 3))))
    if random.random() < 0.3:
        places += (("events", 0),)
    return Plan(
        mode=mode,
        options=options,
        places=places,
        keys=_keys(random),
        waiting_max=random.choice((65_536, 65_536, 4)),
        members=("ann", "bob", "cid")[: random.randint(1, 3)],
        consumers_max=random.randint(2, 4),
        steps=random.choice((25, 60, 140)),
        troubles=draw_troubles(random, TROUBLES, 0.5, {Trouble.NACK: 0.8}),
    )


def _keys(random: Random) -> Sequence[bytes | None]:
    kind = random.choice(
        ("one", "few", "few", "few", "some without", "some without", "many", "none")
    )
    match kind:
        case "one":
            return (b"k",)
        case "few":
            return (b"a", b"b", b"c")
        case "some without":
            return (b"a", b"b", None)
        case "many":
            return tuple(b"k%d" % number for number in range(40))
    return (None,)
