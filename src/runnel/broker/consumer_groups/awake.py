"""The crews that are awake, and who of them is told of a batch that was stored: each of its runs, once.

What was stored goes into the larder first, so that it is delivered from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from runnel.broker.consumer_groups.crew import Crew
from runnel.broker.consumer_groups.larder import Larder, StoredRun, run_of
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.log.log import Stored

_CREWS_REMEMBERED_MAX: Final = 65_536  # topics whose crews are remembered


class AwakeCrews:
    """A crew is awake while somebody consumes."""

    def __init__(self, larder: Larder) -> None:
        self._larder = larder
        self._awake: dict[Crew, Callable[[str], bool]] = {}
        self._crews_of: dict[str, tuple[Crew, ...]] = {}

    def __len__(self) -> int:
        return len(self._awake)

    def __contains__(self, crew: Crew) -> bool:
        return crew in self._awake

    def add(self, crew: Crew, matches: Callable[[str], bool]) -> None:
        """From now on it is told of the topics that match."""
        self._awake[crew] = matches
        self._crews_of.clear()

    def discard(self, crew: Crew) -> None:
        if self._awake.pop(crew, None) is not None:
            self._crews_of.clear()

    def clear(self) -> None:
        self._awake.clear()
        self._crews_of.clear()

    def on_stored(self, stored: Stored) -> None:
        """Hot: once a batch."""
        if not self._awake:
            return
        head = stored.envelope
        if len(head.topics) == 1:
            crews = self.of(head.topics[0])
            if crews:
                key = (head.topics[0], int.from_bytes(head.partitions, "little"))
                end = int.from_bytes(head.base_offsets, "little") + head.message_count
                run = run_of(stored)
                if run is not None:
                    self._larder.put(key, run)
                for crew in crews:
                    crew.extend(key, end)
                    crew.wake()
            return
        self._on_stored_runs(stored)

    def _on_stored_runs(self, stored: Stored) -> None:
        """The same for a batch of several runs: everybody is woken once."""
        head = stored.envelope
        batch = Batch(head, stored.body) if head.codec == Codec.NONE else None
        woken: dict[Crew, None] = {}
        bases = head.column64(head.base_offsets)
        counts = head.column32(head.counts)
        for number, key in enumerate(zip(head.topics, head.column32(head.partitions), strict=True)):
            crews = self.of(key[0])
            if crews and batch is not None:
                run = StoredRun(batch, bases[number], counts[number], run=number)
                self._larder.put(key, run)
            for crew in crews:
                crew.extend(key, bases[number] + counts[number])
                woken[crew] = None
        for crew in woken:
            crew.wake()

    def of(self, topic: str) -> tuple[Crew, ...]:
        """Those that a topic belongs to."""
        crews = self._crews_of.get(topic)
        if crews is None:
            if len(self._crews_of) >= _CREWS_REMEMBERED_MAX:
                self._crews_of.clear()
            crews = tuple(crew for crew, matches in self._awake.items() if matches(topic))
            self._crews_of[topic] = crews
        return crews
