"""What clients were told, and what every client must find from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runnel.topics.names import TopicPartition

if TYPE_CHECKING:
    from tests.cluster.simulation.node import NodeLife

Place = tuple[TopicPartition, int]  # an offset
# A place in a topic that is not on disk: each term begins with new offsets.
EpochPlace = tuple[TopicPartition, int, int]


@dataclass
class Model:
    """`problems` has what is wrong; the history raises the first."""

    stored: dict[Place, bytes] = field(default_factory=dict)
    """Messages whose publisher was told that they are stored."""
    received: dict[Place, tuple[bytes, NodeLife]] = field(default_factory=dict)
    """Messages that a process has in memory, as their publisher was told: lost only if it is killed."""
    named: set[bytes] = field(default_factory=set)
    """Payloads of named publishers: each is there once at most."""
    seen: dict[Place, bytes] = field(default_factory=dict)
    """What anybody has seen at an offset."""
    seen_in_memory: dict[EpochPlace, bytes] = field(default_factory=dict)
    acked: set[Place] = field(default_factory=set)
    """Acknowledgements that are stored."""
    leased: set[Place] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    published: int = 0

    def see(self, key: TopicPartition, offset: int, payload: bytes, who: str) -> None:
        """Somebody was told that this message has this offset."""
        known = self.seen.setdefault((key, offset), payload)
        if known != payload:
            self.problems.append(f"{key} {offset} is {known!r}, and {payload!r} for {who}")

    def see_in_memory(
        self, key: TopicPartition, epoch: int, offset: int, payload: bytes, who: str
    ) -> None:
        known = self.seen_in_memory.setdefault((key, epoch, offset), payload)
        if known != payload:
            self.problems.append(
                f"{key} {offset} of epoch {epoch} is {known!r}, and {payload!r} for {who}"
            )

    def delivered(self, key: TopicPartition, offset: int, payload: bytes) -> None:
        """A message was leased to a worker."""
        self.see(key, offset, payload, "a worker")
        self.leased.add((key, offset))
        if (key, offset) in self.acked:
            self.problems.append(f"{key} {offset} is delivered again, though its ack is stored")

    def killed(self, life: NodeLife) -> None:
        """What this process had only in memory may be lost."""
        self.received = {
            place: (payload, owner)
            for place, (payload, owner) in self.received.items()
            if owner is not life
        }

    def check_partition(self, key: TopicPartition, found: Sequence[tuple[int, bytes]]) -> None:
        """Compare everything that a partition holds at the end."""
        offsets = [offset for offset, _ in found]
        if offsets != list(range(1, len(found) + 1)):
            self.problems.append(f"{key} has holes or goes back: {offsets}")
        for offset, payload in found:
            self.see(key, offset, payload, "the last reader")
        there = dict(found)
        for (partition, offset), payload in self.stored.items():
            if partition == key and there.get(offset) != payload:
                self.problems.append(f"{key} {offset}: {payload!r} is lost, though it was stored")
        for (partition, offset), (payload, life) in self.received.items():
            if partition == key and there.get(offset) != payload:
                self.problems.append(
                    f"{key} {offset}: {payload!r} is lost, though {life} had it and was never killed"
                )
        payloads = [payload for _, payload in found]
        for payload in self.named.intersection(payloads):
            if payloads.count(payload) > 1:
                self.problems.append(f"{key}: {payload!r} of a named publisher is there twice")
        by_publisher: dict[bytes, list[int]] = {}
        for payload in dict.fromkeys(payloads):
            publisher, _, number = payload.partition(b" ")
            by_publisher.setdefault(publisher, []).append(int(number))
        for publisher, numbers in by_publisher.items():
            if numbers != sorted(numbers):
                self.problems.append(
                    f"{key}: messages of {publisher!r} are out of order: {numbers}"
                )
