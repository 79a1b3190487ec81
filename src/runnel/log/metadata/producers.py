"""The sequences of named publishers in one shard: accepts the next batch, recognises repetitions, refuses others. Pure.

A producer numbers its batches 0, 1, 2 … within a term. The shard accepts the next number of the current term, or number
0 of a higher term, which fences the predecessor. A repeated number is answered with the entry of the original batch, as
far back as the window reaches.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

import msgspec

from runnel.errors import ProducerFault, ProducerFencedError, ProducerForgottenError
from runnel.formats.envelope import Envelope
from runnel.topics.names import Label, check_label

# How many batches back the entry of a batch, and so its offsets, are remembered. More than clients keep in flight.
WINDOW: Final = 256


class ProducerState(msgspec.Struct, frozen=True):
    """A producer's sequence as the catalogue keeps it."""

    producer: str
    term: int
    number: int
    last_used_ns: int
    entries: tuple[int, ...]  # of the last batches, up to `number`


class Repeated(msgspec.Struct, frozen=True):
    """The batch has been appended before, as this entry (None: the entry is no longer remembered)."""

    entry: int | None


class _Sequence(msgspec.Struct):
    """A producer's sequence in memory."""

    term: int
    number: int
    last_used_ns: int
    entries: deque[int]


def check_same_batch(stored: Envelope, repeated: Envelope) -> None:
    """Check that a repetition has the original's shape: a number belongs to one batch. Its send time may differ."""
    if _shape(stored) != _shape(repeated):
        raise ProducerFault(
            f"producer {repeated.producer!r} has used number {repeated.number} of term {repeated.term} for "
            "another batch: what is sent again must be the same"
        )


def _shape(head: Envelope) -> tuple[object, ...]:
    return (head.topics, head.partitions, head.counts, head.body_bytes)


class ProducerTable:
    """All producers of a shard, least recently used first, bounded in number and age.

    A shard has two tables. The table of accepted batches decides which number comes next. The table of stored batches
    is what the catalogue may record and what the first table returns to after a failed write.
    """

    def __init__(self, producers_max: int, age_max_ns: int) -> None:
        self._producers_max = producers_max
        self._age_max_ns = age_max_ns
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def term(self, producer: str) -> int:
        """The producer's current term; -1 if the producer is unknown."""
        known = self._sequences.get(producer)
        return -1 if known is None else known.term

    def check(self, producer: str, term: int, number: int) -> Repeated | None:
        """None if this batch is the next one, or the repetition that it is. ProducerFault if it is neither."""
        known = self._sequences.get(producer)
        if known is None:
            check_label(Label.PRODUCER, producer)
            if number != 0:
                raise ProducerForgottenError(
                    f"producer {producer!r} is not known here, so number {number} of term {term} cannot "
                    "follow anything: begin a new term with number 0"
                )
            return None
        if term < known.term:
            raise ProducerFencedError(
                f"producer {producer!r} has moved on to term {known.term}; term {term} may not publish"
            )
        if term > known.term:
            if number != 0:
                raise ProducerFault(
                    f"producer {producer!r} must begin term {term} with number 0, not {number}"
                )
            return None
        if number > known.number + 1:
            raise ProducerFault(
                f"producer {producer!r} skipped: number {known.number + 1} of term {term} is missing before "
                f"{number}"
            )
        if number <= known.number:
            back = known.number - number
            return Repeated(known.entries[-1 - back] if back < len(known.entries) else None)
        return None

    def accept(self, producer: str, term: int, number: int, entry: int, now_ns: int) -> None:
        """Record a batch that `check` has passed."""
        known = self._sequences.get(producer)
        if known is None or known.term != term:
            known = _Sequence(term, number, now_ns, deque(maxlen=WINDOW))
            self._sequences[producer] = known
        known.number = number
        known.last_used_ns = now_ns
        known.entries.append(entry)
        self._sequences.move_to_end(producer)
        self._forget(now_ns)

    def replay(self, producer: str, term: int, number: int, entry: int, time_ns: int) -> None:
        """Record a batch found in the log, unless the catalogue already knew it."""
        known = self._sequences.get(producer)
        if known is None or (term, number) > (known.term, known.number):
            self.accept(producer, term, number, entry, time_ns)

    def reset(self, producer: str, stored: ProducerTable) -> None:
        """Return to the stored sequence of a producer whose later batches could not be stored."""
        known = stored._sequences.get(producer)
        if known is None:
            self._sequences.pop(producer, None)
        else:
            self.load([_state(producer, known)])

    def load(self, states: Iterable[ProducerState]) -> None:
        """Take over recorded states, replacing those of the same producers."""
        for state in states:
            self._sequences[state.producer] = _Sequence(
                state.term, state.number, state.last_used_ns, deque(state.entries, maxlen=WINDOW)
            )

    def states(self, used_since_ns: int = 0) -> list[ProducerState]:
        """The states to record, of producers used since a time."""
        return [
            _state(producer, sequence)
            for producer, sequence in list(self._sequences.items())
            if sequence.last_used_ns >= used_since_ns
        ]

    def _forget(self, now_ns: int) -> None:
        oldest_ns = now_ns - self._age_max_ns
        while self._sequences:
            producer, sequence = next(iter(self._sequences.items()))
            if len(self._sequences) <= self._producers_max and sequence.last_used_ns >= oldest_ns:
                return
            del self._sequences[producer]


def _state(producer: str, sequence: _Sequence) -> ProducerState:
    return ProducerState(
        producer, sequence.term, sequence.number, sequence.last_used_ns, tuple(sequence.entries)
    )
