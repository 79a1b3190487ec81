"""A named publisher as a history plays it: pipelines, retries, new terms, and sometimes what it may not do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from runnel.errors import ProducerFault, ProducerFencedError
from runnel.log.log import Appended, Level
from runnel.topics.names import TopicPartition
from tests.log.simulation.facts import Fate, Sent
from tests.log.simulation.model import Model


class ProducerClient:
    """Sends its batches in order; after a failure it begins again with the first that failed.

    A batch that was sent keeps its content for ever, so a retry can be told from another batch.
    """

    def __init__(self, name: str, topic: str, model: Model) -> None:
        self.name = name
        self.topic = topic
        self.shard = model.shard_of((topic, 0))  # it numbers its batches in one shard
        self._model = model
        self._term = 0
        self._batches: list[Sent] = []  # of this term, by number
        self._next = 0  # the number to send next
        self._was_stored = False  # any batch of any term

    @property
    def is_known(self) -> bool:
        """Whether the log surely remembers it."""
        return self._was_stored

    def next(
        self, random: Random, draw: Callable[[], Sequence[tuple[TopicPartition, bytes]]]
    ) -> Sent:
        """The batch that follows: one that failed before, or a new one."""
        if self._next == len(self._batches):
            if random.random() < 0.1:
                self._term += random.randint(1, 3)
                self._batches = []
                self._next = 0
            numbered = (self.name, self._term, self._next)
            self._batches.append(self._model.sending(draw(), Level.STORED, numbered))
        sent = self._batches[self._next]
        self._next += 1
        return sent

    def repetition(self, random: Random) -> Sent | None:
        """A batch that was sent before: acknowledged, or still on its way."""
        return random.choice(self._batches[: self._next]) if self._next else None

    def not_taken(self, sent: Sent) -> None:
        """The log refused it on the spot: whatever became of it before, this time it is not in."""
        if sent.fate is not Fate.STORED:
            self._next = min(self._next, sent.sequence)
            if sent.fate is Fate.PENDING:
                sent.fate = Fate.UNKNOWN

    def heard(self, sent: Sent, *, is_stored: bool) -> None:
        if sent.producer != self.name:
            return
        self._was_stored = self._was_stored or is_stored
        if not is_stored and sent.term == self._term and sent.fate is not Fate.STORED:
            self._next = min(self._next, sent.sequence)

    def restarted(self) -> None:
        """Whatever has no answer is sent again."""
        for sent in self._batches:
            if sent.fate is not Fate.STORED:
                self._next = min(self._next, sent.sequence)

    def has_unheard_failure(self, in_flight: dict[asyncio.Future[Appended], Sent]) -> bool:
        return any(
            sent.producer == self.name and future.done() and future.exception() is not None
            for future, sent in in_flight.items()
        )

    def misuse(self, random: Random) -> tuple[type[ProducerFault], int, int]:
        """Something that must be refused: the error, the term, the number."""
        if self._term and random.random() < 0.3 and self._is_term_known():
            return ProducerFencedError, self._term - 1, random.randint(0, 3)
        if random.random() < 0.5:
            return ProducerFault, self._term + 1, random.randint(1, 3)
        return ProducerFault, self._term, len(self._batches) + random.randint(1, 3)

    def _is_term_known(self) -> bool:
        return any(sent.fate is Fate.STORED for sent in self._batches)
