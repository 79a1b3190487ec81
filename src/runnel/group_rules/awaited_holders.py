"""The consumers that had messages of a partition at its former owner, and that its new owner waits for.

When a shard moves as planned, its consumers keep what they have: the new owner leases it to them, under new ids. Until
then it delivers nothing of the partition. A consumer that does not come in time has lost its messages, which are owed
again; that does not count as a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from runnel.group_rules.records import HeldBy

HOLDERS_WAIT_NS: Final = 1_000_000_000
"""How long a new owner waits, from the beginning of its term. A consumer has a part at every node, so it is there
already, unless its connection was just lost or the node is new. Deliveries of the partition pause meanwhile."""


class AwaitedHolders:
    """What consumers held, by consumer, until each has come or the time is over."""

    def __init__(self, held: Iterable[HeldBy], until_ns: int) -> None:
        self.until_ns: Final = until_ns
        self._by_holder: dict[str, list[HeldBy]] = {}
        for each in held:
            self._by_holder.setdefault(each.holder, []).append(each)

    def __bool__(self) -> bool:
        return bool(self._by_holder)

    def holders(self) -> list[str]:
        return list(self._by_holder)

    def of(self, holder: str) -> Sequence[HeldBy]:
        """What a consumer held."""
        return self._by_holder.get(holder, ())

    def pop(self, holder: str) -> Sequence[HeldBy]:
        """What a consumer held, once: it has come."""
        return self._by_holder.pop(holder, ())
