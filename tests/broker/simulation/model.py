"""What a broker has to know and to serve, as plainly as it can be said: lists and dicts, no files, no bytes.

The model hears of every publish, purge, deletion, cursor and passing of time, and says of each message whether readers
must get it, may get it, or must not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runnel.config import Keep
from runnel.topics.names import TopicPartition
from runnel.topics.policies import Policies, Policy


@dataclass(slots=True)
class Sent:
    """One message. Messages of a run are kept and dropped together, so the run's end matters."""

    payload: bytes
    time_ns: int
    run_end: int  # the offset behind its run
    may_be_gone: bool = False  # retention was allowed to take it, once


@dataclass
class Partition:
    """Messages by offset, from 1 on: every number that was ever given."""

    sent: list[Sent] = field(default_factory=list)
    floor: int = 1  # below it everything was purged
    stored_next: int = 1  # everything below is known to be stored

    @property
    def next_offset(self) -> int:
        return len(self.sent) + 1

    def at(self, offset: int) -> Sent | None:
        return self.sent[offset - 1] if 1 <= offset <= len(self.sent) else None


class Model:
    """Topics that are kept. Those that are not are between publisher and reader alone."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._partitions: dict[TopicPartition, Partition] = {}
        self.existing: set[str] = set()
        self.cursors: dict[str, Mapping[TopicPartition, int]] = {}

    def policy(self, topic: str) -> Policy:
        return self._policies.for_topic(topic)

    def partition(self, key: TopicPartition) -> Partition:
        return self._partitions.setdefault(key, Partition())

    def keys(self, topics: Iterable[str]) -> list[TopicPartition]:
        return [
            (topic, number)
            for topic in sorted(topics)
            for number in range(self.policy(topic).partitions)
        ]

    # --- What happens ---

    def publish(self, runs: Iterable[tuple[TopicPartition, list[bytes]]], now_ns: int) -> None:
        """A batch is taken: its offsets are given in this moment."""
        for key, payloads in runs:
            self.existing.add(key[0])
            partition = self.partition(key)
            end = partition.next_offset + len(payloads)
            partition.sent += [Sent(payload, now_ns, end) for payload in payloads]

    def refused(self, runs: Iterable[tuple[TopicPartition, list[bytes]]]) -> None:
        """The batch that was published last was not taken after all. Its topics may have been made."""
        for key, payloads in runs:
            partition = self.partition(key)
            del partition.sent[-len(payloads) :]

    def lose(self, keys: Iterable[TopicPartition]) -> None:
        """A shard in memory goes, and its messages with it."""
        for key in keys:
            self.partition(key).floor = self.partition(key).next_offset

    def stored(self, key: TopicPartition, next_offset: int) -> None:
        partition = self.partition(key)
        partition.stored_next = max(partition.stored_next, next_offset)

    def purge(self, topic: str) -> None:
        for key in self.keys([topic]):
            self.partition(key).floor = self.partition(key).next_offset

    def delete(self, topic: str) -> None:
        self.purge(topic)
        self.existing.discard(topic)

    def restart(self) -> None:
        """What was in memory is gone, and its numbers begin again; so are the cursors there."""
        memory = {name for name in self.existing if self.policy(name).keep is Keep.MEMORY}
        self.existing -= memory
        for key in [key for key in self._partitions if self.policy(key[0]).keep is Keep.MEMORY]:
            del self._partitions[key]
        for name, places in list(self.cursors.items()):
            if any(self.policy(topic).keep is Keep.MEMORY for topic, _ in places):
                del self.cursors[name]

    def look(self, now_ns: int) -> None:
        """Retention may act from now on by this time and these cursors."""
        for key, partition in self._partitions.items():
            if self.policy(key[0]).retain.age_ns is not None:
                for sent in partition.sent:
                    if not sent.may_be_gone and not self.is_fresh(key, sent, now_ns):
                        sent.may_be_gone = True

    # --- What follows ---

    def is_fresh(self, key: TopicPartition, sent: Sent, now_ns: int) -> bool:
        """Not past its age, or held by a cursor."""
        age_ns = self.policy(key[0]).retain.age_ns
        if age_ns is None or sent.time_ns >= now_ns - age_ns:
            return True
        return any(places.get(key, sent.run_end) < sent.run_end for places in self.cursors.values())

    def must_have(self, key: TopicPartition, offset: int) -> bool:
        """Whether every reader who asks for it gets this message."""
        partition = self.partition(key)
        sent = partition.at(offset)
        return (
            sent is not None
            and offset >= partition.floor
            and not sent.may_be_gone
            and self.policy(key[0]).retain.bytes_max is None
        )

    def may_have(self, key: TopicPartition, offset: int, now_ns: int) -> bool:
        """Whether any reader may still get it."""
        partition = self.partition(key)
        sent = partition.at(offset)
        return sent is not None and offset >= partition.floor and self.is_fresh(key, sent, now_ns)
