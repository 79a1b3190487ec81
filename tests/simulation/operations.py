"""The operations of a history, with weights that say how often each is drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import Random
from typing import Generic, TypeVar

from tests.simulation.troubles import Trouble

Operation = TypeVar("Operation")


class OperationTable(Generic[Operation]):
    """Draws operations: the plain ones always, the others only in histories with their trouble.

    Operations in `beside` sometimes run beside those that follow, with the probability `beside_share`.
    """

    def __init__(
        self,
        plain: Mapping[Operation, float],
        troubles: Mapping[Trouble, Mapping[Operation, float]],
        beside: Collection[Operation] = (),
        beside_share: float = 0.0,
    ) -> None:
        self._plain = plain
        self._troubles = troubles
        self._beside = frozenset(beside)
        self._beside_share = beside_share

    def draw(self, random: Random, troubles: Collection[Trouble]) -> tuple[Operation, bool]:
        """One operation, and whether it runs beside those that follow."""
        [operation] = self.draw_many(random, troubles, 1)
        is_beside = operation in self._beside and random.random() < self._beside_share
        return operation, is_beside

    def draw_many(
        self, random: Random, troubles: Collection[Trouble], count: int
    ) -> list[Operation]:
        choices = list(self._plain.items())
        for trouble, operations in self._troubles.items():
            if trouble in troubles:
                choices += operations.items()
        weights = [weight for _, weight in choices]
        return random.choices([operation for operation, _ in choices], weights, k=count)
