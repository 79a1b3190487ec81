"""A consumer as a client library would be: it knows what it was sent, and not what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.group_rules.history import Place, Stretch
from tests.group_rules.stage import stretches


class SimulatedConsumer:
    """Its inbox: deliveries with the offsets that it has not answered."""

    def __init__(self, number: int, group: str) -> None:
        self.number = number
        self.group = group
        self.inbox: dict[int, list[int]] = {}
        self.places: dict[int, Place] = {}
        self.answered: list[Stretch] = []
        self.recalled: list[Stretch] = []  # asked back, not yet given back
        self.is_stalled = False

    def take(self, delivery: int, place: Place, offsets: Sequence[int]) -> None:
        self.inbox[delivery] = list(offsets)
        self.places[delivery] = place

    def answer(self, random: Random) -> list[Stretch]:
        """Some messages of one delivery, or of several, in no order; they are answered by this."""
        parts: list[Stretch] = []
        for delivery in random.sample(
            sorted(self.inbox), min(len(self.inbox), random.choice((1, 1, 2)))
        ):
            offsets = self.inbox[delivery]
            if random.random() < 0.6:
                begin = random.choice((0, random.randrange(len(offsets))))
                chosen = offsets[begin : begin + random.choice((1, 1, 2, 5))]
            else:
                chosen = sorted(random.sample(offsets, random.randint(1, len(offsets))))
            parts += stretches(delivery, chosen)
            self._forget(delivery, chosen)
        random.shuffle(parts)
        self.answered += parts
        return parts

    def answer_first(self) -> list[Stretch]:
        """The first message of the first delivery, alone."""
        delivery = min(self.inbox)
        parts = stretches(delivery, self.inbox[delivery][:1])
        self._forget(delivery, self.inbox[delivery][:1])
        self.answered += parts
        return parts

    def answer_whole(self, delivery: int) -> None:
        self.answered += stretches(delivery, self.inbox[delivery])
        self._forget(delivery, self.inbox[delivery])

    def answer_up_to(self, place: Place, offset: int) -> None:
        for delivery in [number for number in self.inbox if self.places[number] == place]:
            self._forget(delivery, [other for other in self.inbox[delivery] if other <= offset])

    def recall(self, part: Stretch) -> None:
        """Asked back: dropped if not begun, which one never knows."""
        self.recalled.append(part)

    def give_back(self, parts: Sequence[Stretch]) -> None:
        for part in parts:
            self.recalled.remove(part)
            if part.delivery in self.inbox:
                self._forget(part.delivery, range(part.begin, part.end))

    def _forget(self, delivery: int, offsets: Sequence[int]) -> None:
        left = [offset for offset in self.inbox[delivery] if offset not in set(offsets)]
        if left:
            self.inbox[delivery] = left
        else:
            del self.inbox[delivery]
