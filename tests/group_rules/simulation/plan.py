"""What is drawn before a history begins: the mode, the options, how many keys, which troubles it meets."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from runnel.group_rules.definition import Mode, Options
from tests.group_rules.history import NS_PER_SECOND, Place, seconds

MS = NS_PER_SECOND // 1000


class Trouble(enum.Enum):
    """What may happen to a history beside plain work."""

    CRASHES = enum.auto()  # the broker dies, and comes back with what was stored
    LOSSES = enum.auto()  # consumers vanish without a word
    STALLS = enum.auto()  # consumers hold on to what they have and do not renew
    NACKS = enum.auto()
    RUBBISH = enum.auto()  # acks of what nobody has, or twice
    OPERATORS = enum.auto()  # subscriptions are moved, paused; dead letters are sent back
    RETENTION = enum.auto()  # messages go before anybody read them
    GRAVES = enum.auto()  # dead letters cannot be stored at first
    LAGS = enum.auto()  # the broker reads slowly and looks at the clock late


@dataclass(frozen=True, slots=True)
class Plan:
    mode: Mode
    options: Options
    places: tuple[Place, ...]
    keys: Sequence[bytes | None]
    waiting_max: int
    members: tuple[str, ...]
    consumers_max: int
    steps: int
    troubles: frozenset[Trouble]

    def __str__(self) -> str:
        options = self.options
        troubles = sorted(trouble.name.lower() for trouble in self.troubles)
        return (
            f"{self.mode.value}; lease {seconds(options.lease_ns)}, at most {options.deliveries_max} deliveries, "
            f"retry after {seconds(options.retry_delay_ns)} to {seconds(options.retry_delay_ns_max)} "
            f"(x {options.backoff}); at most {self.waiting_max} wait; {', '.join(troubles)}"
        )

    @property
    def is_keyed(self) -> bool:
        return self.mode is Mode.KEY_SHARED


def draw(random: Random) -> Plan:
    # Two of five with keys: theirs are the hardest promises.
    mode = random.choice(
        (Mode.SHARED, Mode.SHARED, Mode.KEY_SHARED, Mode.KEY_SHARED, Mode.MULTICAST)
    )
    retry_delay_ns = random.choice((0, 100, 1000)) * MS
    options = Options(
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
        troubles=frozenset(
            trouble
            for trouble in Trouble
            if random.random() < (0.8 if trouble is Trouble.NACKS else 0.5)
        ),
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
