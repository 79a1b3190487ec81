"""A small model of the state journal: contents in order, of which a crash keeps those stored and some of the others."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from runnel.errors import MalformedError
from runnel.group_rules.records import Record, StateTable, decode, encode


class ModelJournal:
    """Each content belongs to the event of a history that led to it."""

    def __init__(self) -> None:
        self._contents: list[tuple[int, bytes]] = []
        self._stored = 0
        self.table = StateTable()  # what was added, stored or not

    def add(self, event: int, records: Sequence[Record]) -> None:
        self._contents.append((event, encode(records)))
        for record in records:
            self.table.apply(record)

    @property
    def unstored(self) -> int:
        return len(self._contents) - self._stored

    def store(self, count: int) -> int | None:
        """The next so many contents are on disk. Returns the event of the last of them."""
        self._stored = min(self._stored + count, len(self._contents))
        return self._contents[self._stored - 1][0] if self._stored else None

    def compact(self, event: int) -> None:
        """All of it becomes one content, which is stored."""
        self._contents = [(event, encode(self.table.snapshot()))]
        self._stored = 1

    def crash(self, random: Random) -> int | None:
        """Read what is left after a crash. Returns the first event that was lost."""
        kept = random.randint(self._stored, len(self._contents))
        lost = self._contents[kept][0] if kept < len(self._contents) else None
        if lost is not None:
            self._check_torn(random, self._contents[kept][1])
        self._contents = self._contents[:kept]
        self._stored = kept
        self.table = StateTable()
        for _, content in self._contents:
            for record in decode(content):
                for _ in range(random.choice((1, 1, 2))):  # twice must be as good as once
                    self.table.apply(record)
        return lost

    def _check_torn(self, random: Random, content: bytes) -> None:
        """The log cuts a torn content off by its checksum; without one, it would still be refused."""
        try:
            decode(content[: random.randrange(len(content))])
        except MalformedError:
            return
        raise AssertionError("a content that was cut short was taken for whole")
