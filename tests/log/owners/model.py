"""What the logs of a directory have promised together. Simple on purpose: it predicts nothing.

- A message that was answered as stored, or that a reader was given, is there at every later owner, at its offset.
- An offset, and an entry with its epoch, names one batch for ever; no batch is there twice.
- A batch that was refused is never found. One of unknown fate may be, once.
- Each term of a shard has a higher epoch than all before it, and each stored batch the epoch of its term.
- What a subscription was told to be stored in a shard is there in every later term.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runnel.formats.message import Message
from runnel.log.log import Appended, OffsetBounds, ShardId
from runnel.topics.names import TopicPartition
from tests.simulation.history import Violation


class Fate(enum.Enum):
    OPEN = enum.auto()  # no answer, or one that leaves it open
    STORED = enum.auto()
    PURGED = enum.auto()  # stored, and some of it removed before anybody was told where it was
    REFUSED = enum.auto()


@dataclass(slots=True, eq=False)
class Sent:
    """A batch of messages to one partition."""

    key: TopicPartition
    payloads: list[bytes]
    producer: tuple[str, int] | None = None  # with the batch's number
    generation: int = 0  # of the topic
    epoch: int = 0  # of the term in which it was given to its log last
    fate: Fate = Fate.OPEN
    offset: int = 0
    entry: int = 0

    def __str__(self) -> str:
        publisher = "" if self.producer is None else " of {}:{}".format(*self.producer)
        return f"batch {self.payloads[0].split(b'.')[0].decode()}{publisher}"


class Removed(NamedTuple):
    """The floors of partitions, and the generations of topics, at one moment."""

    floors: dict[TopicPartition, int]
    generations: dict[str, int]


@dataclass(slots=True)
class ShardModel:
    """What is known of a shard."""

    id: ShardId
    owner: object | None = None  # the process that serves it
    epoch: int = 0  # of its last term
    stored_contents: set[bytes] = field(default_factory=set)
    open_contents: set[bytes] = field(default_factory=set)


class Model:
    """The promises of a history."""

    def __init__(self) -> None:
        self.shards: dict[ShardId, ShardModel] = {}
        self.generations: dict[str, int] = {}  # of each topic, by the shared metadata
        self.floors: dict[TopicPartition, int] = {}  # messages below are hidden
        self._floors_max: dict[TopicPartition, int] = {}  # messages below may be hidden
        self._sent: dict[bytes, Sent] = {}
        self._at: dict[tuple[TopicPartition, int], bytes] = {}
        self._entries: dict[tuple[ShardId, int], Sent] = {}
        self.message_count = 0

    def shard(self, shard: ShardId) -> ShardModel:
        return self.shards.setdefault(shard, ShardModel(shard))

    # --- Terms ---

    def acquired(self, shard: ShardId, owner: object, epoch: int) -> ShardModel:
        known = self.shard(shard)
        if known.owner is not None:
            raise Violation(f"{owner} has acquired {shard}, which {known.owner} serves")
        if epoch <= known.epoch:
            raise Violation(f"{owner} serves {shard} in epoch {epoch}, after epoch {known.epoch}")
        known.owner, known.epoch = owner, epoch
        return known

    def check_contents(self, shard: ShardId, contents: Iterable[bytes]) -> None:
        known, found = self.shard(shard), set(contents)
        if missing := known.stored_contents - found:
            raise Violation(f"{shard} has lost what a subscription stored: {sorted(missing)}")
        if unknown := found - known.stored_contents - known.open_contents:
            raise Violation(f"{shard} has contents that nobody added: {sorted(unknown)}")
        known.stored_contents |= found
        known.open_contents.clear()

    # --- Publishing ---

    def sending(
        self, key: TopicPartition, payloads: list[bytes], producer: tuple[str, int] | None = None
    ) -> Sent:
        sent = Sent(key, payloads, producer)
        self._sent.update(dict.fromkeys(payloads, sent))
        return sent

    def stored(self, shard: ShardId, sent: Sent, appended: Appended) -> None:
        if not appended.is_repeated and appended.epoch != sent.epoch:
            raise Violation(
                f"{sent} was stored in epoch {appended.epoch}, and given to {sent.epoch}"
            )
        if not appended.base_offsets:
            if not appended.is_repeated or sent.key not in self._floors_max:
                raise Violation(f"{sent} was answered without offsets")
            sent.fate = Fate.PURGED if sent.fate is Fate.OPEN else sent.fate
            return
        self._establish(shard, sent, appended.base_offsets[0], appended.entry)

    def refused(self, sent: Sent) -> None:
        if sent.fate is Fate.STORED:
            raise Violation(f"{sent} is stored, and was refused")
        if sent.producer is None:  # a named publisher sends it again
            sent.fate = Fate.REFUSED

    def _establish(self, shard: ShardId, sent: Sent, offset: int, entry: int) -> None:
        if sent.fate is Fate.REFUSED:
            raise Violation(f"{sent} was refused, and is in {shard} at entry {entry}")
        if sent.fate is Fate.STORED and (sent.offset, sent.entry) != (offset, entry):
            raise Violation(
                f"{sent} has offset {sent.offset} and entry {sent.entry}, and again {offset} and {entry}"
            )
        known = self._entries.setdefault((shard, entry), sent)
        if known is not sent:
            raise Violation(f"entry {entry} of {shard} is {known}, and then {sent}")
        for at, payload in enumerate(sent.payloads, offset):
            before = self._at.setdefault((sent.key, at), payload)
            if before != payload:
                raise Violation(f"{sent.key}@{at} is {before!r}, and then {payload!r}")
        if sent.fate is not Fate.STORED:
            self.message_count += len(sent.payloads)
        sent.fate, sent.offset, sent.entry = Fate.STORED, offset, entry

    # --- Hiding ---

    def hiding(self, key: TopicPartition, floor: int) -> None:
        """Whatever becomes of the request, messages below may be hidden from now on."""
        self._floors_max[key] = max(self._floors_max.get(key, 1), floor)

    def hidden(self, key: TopicPartition, floor: int) -> None:
        self.floors[key] = max(self.floors.get(key, 1), floor)

    # --- Reading ---

    def removed(self) -> Removed:
        """What a reader that begins now must not be given."""
        return Removed(dict(self.floors), dict(self.generations))

    def saw(
        self,
        shard: ShardId,
        owner_epoch: int,
        removed: Removed,
        message: Message,
        entry: int,
        epoch: int,
    ) -> None:
        """A reader at an owner was given a message. `removed` is of the moment when it asked."""
        key = (message.topic, message.partition)
        sent = self._sent.get(message.payload)
        if sent is None or sent.key != key:
            raise Violation(
                f"{key}@{message.offset} is {message.payload!r}, which nobody sent there"
            )
        row = sent.payloads.index(message.payload)
        self._establish(shard, sent, message.offset - row, entry)
        is_former = sent.generation < removed.generations.get(key[0], 1)
        if is_former or message.offset < removed.floors.get(key, 1):
            raise Violation(f"{key}@{message.offset} ({sent}) was removed, and is served")
        if epoch > owner_epoch or (sent.producer is None and epoch != sent.epoch):
            raise Violation(f"{sent} has epoch {epoch}, and was given to {sent.epoch}")

    def required(self, key: TopicPartition) -> set[int]:
        """The offsets that a reader of everything must find, if retention takes nothing."""
        hidden_max = max(self._floors_max.get(key, 1), self.floors.get(key, 1))
        generation = self.generations.get(key[0], 1)
        return {
            at
            for (of, at), payload in self._at.items()
            if of == key and at >= hidden_max and self._sent[payload].generation == generation
        }

    def check_partition(
        self,
        key: TopicPartition,
        required: set[int],
        bounds: OffsetBounds,
        offsets: Sequence[int],
        *,
        keeps_all: bool,
    ) -> None:
        """A reader of everything was given these offsets. `required` and `bounds` are of the moment when it began."""
        if list(offsets) != sorted(set(offsets)):
            raise Violation(f"{key} was read out of order: {offsets}")
        if keeps_all and list(offsets) != list(range(bounds.first_offset, bounds.next_offset)):
            raise Violation(f"{key} has {bounds}, and these were read: {offsets}")
        if keeps_all and (missing := required - set(offsets)):
            raise Violation(
                f"{key}@{sorted(missing)} were stored, and are missing; it has {bounds}"
            )
        if required and max(required) >= bounds.next_offset:
            raise Violation(f"{key} ends at {bounds.next_offset}, and had {max(required)}")

    def newest(self, key: TopicPartition) -> bytes | None:
        """The last message of a partition, as far as anybody was told."""
        found = [at for of, at in self._at if of == key]
        if not found or max(found) < self._floors_max.get(key, 1):
            return None
        payload = self._at[key, max(found)]
        is_former = self._sent[payload].generation < self.generations.get(key[0], 1)
        return None if is_former else payload
