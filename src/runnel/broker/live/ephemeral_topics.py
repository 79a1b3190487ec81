"""Ephemeral topics: they exist while they have readers. No loop and no files here.

An ephemeral topic exists from the first message that a reader receives until its last reader leaves; created again, it
begins at offset 1 in a new epoch. With `last_value` in its policy, it exists from its first message on, and stays.
Names of topics without readers are remembered for a while, so that publishing to them costs one look-up in a dict.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.live_shards import LiveShards, live_shard_is_elsewhere
from runnel.config import Keep
from runnel.errors import ClientFault, LimitExceededError, UnknownTopicError
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope, run_prefix
from runnel.formats.single_messages import messages_of
from runnel.log.log import ShardId, VisibleBatch
from runnel.topics.names import check_topic, is_reserved
from runnel.topics.policies import Policies, Policy

_UNREAD_MAX: Final = 10_000
_TOPICS_AT_ONCE: Final = 100  # whose policy is updated in one step
_PARTITION_0: Final = bytes(4)
# A last value keeps its whole batch if the batch is no larger than this: cutting the message out costs more.
_WHOLE_BYTES_MAX: Final = 16 * 1024


class EphemeralTopic:
    """The name, policy and next offsets of a topic. The topic need not exist (yet, or any more)."""

    __slots__ = (
        "epoch",
        "exists",
        "keeps_last",
        "last",
        "name",
        "next_offsets",
        "policy",
        "readers",
        "readers_change",
        "shard",
    )

    def __init__(self, name: str, policy: Policy, epoch: int, shard: ShardId | None = None) -> None:
        self.name = name
        self.policy = policy
        self.keeps_last = policy.last_value
        self.exists = False
        # The readers as of `readers_change`, the index's count of changes: quicker than asking the index again.
        self.readers: tuple[LiveSubscription, ...] = ()
        self.readers_change = -1
        self.epoch = epoch
        self.next_offsets = [1] * policy.partitions
        self.last: list[Batch | None] = [None] * policy.partitions
        self.shard = shard  # None: it belongs to no shard that nodes own

    def last_message(self, partition: int) -> Batch | None:
        """The partition's last message, as a batch of one."""
        batch = self.last[partition]
        if batch is None or len(batch) == 1:
            return batch
        key = (self.name, partition)
        return dict(messages_of(batch, {key: self.next_offsets[partition] - 1})).get(key)


class EphemeralTopics:
    """All ephemeral topics. `on_known` and `on_forgotten` are called with names, whether the topics exist or not."""

    def __init__(
        self,
        policies: Policies,
        topics_max: int,
        epoch: int,
        *,
        on_known: Callable[[str], None],
        on_forgotten: Callable[[str], None],
        on_made: Callable[[EphemeralTopic], None],
        live_shards: LiveShards | None = None,
    ) -> None:
        self._policies = policies
        self._topics_max = topics_max
        self._on_known = on_known
        self._on_forgotten = on_forgotten
        self._on_made = on_made
        self._known: dict[str, EphemeralTopic] = {}
        self._unread: dict[str, None] = {}  # known names of topics without readers, oldest first
        self._next_entry = 1
        self._is_one_epoch = True  # no topic has vanished yet, so all have the same epoch
        self.epoch = epoch  # of topics that are created from now on
        self._live_shards = live_shards
        self._vanished = 0  # topics, so far
        if live_shards is not None:
            self._is_one_epoch = False
            live_shards.on_ended = self._on_shard_ended

    def __len__(self) -> int:
        return len(self._known) - len(self._unread)

    def __iter__(self) -> Iterator[EphemeralTopic]:
        return (topic for topic in self._known.values() if topic.exists)

    def names(self) -> list[str]:
        """All known names, whether the topics exist or not."""
        return list(self._known)

    @property
    def next_entry(self) -> int:
        return self._next_entry

    def knows(self, name: str) -> bool:
        """Whether the name is known as an ephemeral topic. False: its policy decides."""
        return name in self._known

    def known(self, name: str) -> EphemeralTopic | None:
        """The topic, if its name is known, whether or not it exists."""
        return self._known.get(name)

    def find(self, name: str) -> EphemeralTopic | None:
        """The topic, if it exists."""
        topic = self._known.get(name)
        return topic if topic is not None and topic.exists else None

    def resolve(self, envelope: Envelope) -> list[EphemeralTopic]:
        """The topic of each run; an error names the run. Hot path: once per run (bench/live.py, "small batches")."""
        known = self._known
        try:
            topics = [known[name] for name in envelope.topics]
        except KeyError:
            topics = [
                known.get(name) or self._learn(envelope, run)
                for run, name in enumerate(envelope.topics)
            ]
        self.check_partitions(envelope, topics)
        return topics

    def learned(self, envelope: Envelope, run: int) -> EphemeralTopic:
        """The topic of one run, whose name becomes known."""
        return self._known.get(envelope.topics[run]) or self._learn(envelope, run)

    def check_partitions(self, envelope: Envelope, topics: Sequence[EphemeralTopic]) -> None:
        """Check that the topic of each run has the run's partition; an error names the run."""
        if any(envelope.partitions):  # every topic has partition 0
            _check_partitions(envelope, topics)

    def resolve_run(self, envelope: Envelope) -> EphemeralTopic:
        """The topic of a batch of one run."""
        topic = self._known.get(envelope.topics[0])
        if topic is None or envelope.partitions != _PARTITION_0:
            (topic,) = self.resolve(envelope)
        return topic

    def _learn(self, envelope: Envelope, run: int) -> EphemeralTopic:
        name = envelope.topics[run]
        try:
            check_topic(name)
            policy = self._policies.for_topic(name)
        except ClientFault as fault:
            raise type(fault)(f"{run_prefix(envelope, run)}{fault}") from None
        if policy.keep is not Keep.NONE:
            raise ClientFault(
                f"run {run}: topic {name!r} is kept ({policy.keep}), the runs before it are not; a "
                "batch goes to one shard"
            )
        topic = self._known[name] = EphemeralTopic(name, policy, self.epoch, self._shard_of(name))
        self._on_known(name)
        self._mark_unread(topic)
        return topic

    # --- Shards that nodes own ---

    def _shard_of(self, name: str) -> ShardId | None:
        live = self._live_shards
        if live is None or is_reserved(name):  # each node publishes its own reports itself
            return None
        return live.shard_of(name)

    def check_here(self, topics: Sequence[EphemeralTopic]) -> None:
        """Raise MovedError if another node owns the shard of one of these topics."""
        live = self._live_shards
        if live is not None:
            for topic in topics:
                if topic.shard is not None and not live.has(topic.shard):
                    raise live_shard_is_elsewhere(topic.shard)

    def _on_shard_ended(self, shard: ShardId) -> None:
        for topic in [topic for topic in self if topic.shard == shard]:
            self.vanish(topic)

    def _epoch_of(self, topic: EphemeralTopic) -> int:
        """The epoch of a topic that is made now: of the broker, or in the term of its shard."""
        if self._live_shards is None or topic.shard is None:
            return self.epoch
        return self._live_shards.epoch(topic.shard) + self._vanished

    def follow_rules(self) -> Iterator[None]:
        """Apply the rules on last values that hold now, in steps. A topic stays ephemeral as long as it exists."""
        for number, topic in enumerate(list(self._known.values()), 1):
            topic.policy = self._policies.for_recorded(topic.name, topic.policy.fixed)
            topic.keeps_last = topic.policy.last_value
            if not topic.keeps_last:
                self.purge(topic)
            if number % _TOPICS_AT_ONCE == 0:
                yield

    def _mark_unread(self, topic: EphemeralTopic) -> None:
        """Remember the name of a topic without readers. Beyond the limit, forget the oldest name."""
        self._unread[topic.name] = None
        if len(self._unread) > _UNREAD_MAX:
            oldest = next(iter(self._unread))
            del self._unread[oldest], self._known[oldest]
            self._on_forgotten(oldest)

    def make(self, topic: EphemeralTopic) -> None:
        """Create a topic: it has a reader, or keeps last values."""
        if len(self) >= self._topics_max and not is_reserved(topic.name):
            raise LimitExceededError(
                f"topic {topic.name!r} would be one more than limits.topics_max = {self._topics_max}"
            )
        if self._unread.pop(topic.name, topic) is topic:  # it was forgotten since it was learned
            self._known[topic.name] = topic
            self._on_known(topic.name)
        topic.exists = True
        topic.epoch = self._epoch_of(topic)
        topic.next_offsets = [1] * topic.policy.partitions
        self._on_made(topic)

    def vanish(self, topic: EphemeralTopic) -> None:
        """Remove a topic whose last reader has left, or that is deleted. Created again, it has a later epoch."""
        topic.exists = False
        self._vanished += 1
        if topic.shard is None:
            self.epoch = max(self.epoch, topic.epoch + 1)
        self._is_one_epoch = False
        topic.last = [None] * topic.policy.partitions
        topic.readers, topic.readers_change = (), -1
        self._mark_unread(topic)

    def purge(self, topic: EphemeralTopic) -> None:
        """Remove the last values: there is nothing else to remove."""
        topic.last = [None] * topic.policy.partitions

    def number(
        self, batch: Batch, topics: Sequence[EphemeralTopic], receive_time_ns: int
    ) -> tuple[Envelope, bytes]:
        """Give the runs of a batch their offsets. Hot path: once per run (bench/live.py, "small batches").

        Topics that do not exist are numbered too, which has no effect: `make` resets their offsets.
        """
        head = batch.envelope
        if len(topics) == 1 or self._is_one_epoch:
            epochs = topics[0].epoch.to_bytes(8, "little")
        else:
            epochs = envelopes.pack64([topic.epoch for topic in topics])
        entry = self._next_entry
        self._next_entry = entry + 1
        numbered = Envelope(  # positional arguments take a quarter of the time of `replace`
            head.version,
            head.topics,
            head.partitions,
            head.counts,
            _next_bases(head, topics),
            receive_time_ns.to_bytes(8, "little", signed=True),
            epochs,
            entry.to_bytes(8, "little"),
            b"",  # rows
            0,  # shard
            None,  # producer
            0,  # term
            0,  # number
            head.codec,
            head.body_bytes,
            head.body_crc,
        )
        return numbered, envelopes.encode(numbered)

    def keep_last(
        self, stored: VisibleBatch, topics: Sequence[EphemeralTopic], bytes_max: int
    ) -> None:
        """Remember the last messages of topics with `last_value`."""
        head = stored.envelope
        if True not in [topic.keeps_last for topic in topics]:
            return
        batch = Batch(
            head, bytes(stored.body)
        )  # a copy, which does not hold other bytes that arrived with it
        keeping = {
            (topic.name, number): topic
            for topic, number in zip(topics, head.column32(head.partitions), strict=True)
            if topic.keeps_last
        }
        if head.body_bytes <= _WHOLE_BYTES_MAX:
            for (_, number), topic in keeping.items():
                topic.last[number] = batch
            return
        wanted = {key: topic.next_offsets[key[1]] - 1 for key, topic in keeping.items()}
        for key, last in messages_of(batch, wanted):
            is_small = last.envelope.body_bytes <= bytes_max
            keeping[key].last[key[1]] = last if is_small else None


def _next_bases(head: Envelope, topics: Sequence[EphemeralTopic]) -> bytes:
    """Take the next offsets for each run, and return the first offset of each as a column."""
    if len(topics) == 1:
        number = int.from_bytes(head.partitions, "little")
        offsets = topics[0].next_offsets
        base = offsets[number]
        offsets[number] = base + int.from_bytes(head.counts, "little")
        return base.to_bytes(8, "little")
    bases: list[int] = []
    add = bases.append
    for topic, number, count in zip(
        topics, head.column32(head.partitions), head.column32(head.counts), strict=True
    ):
        offsets = topic.next_offsets
        base = offsets[number]
        add(base)
        offsets[number] = base + count
    return array("q", bases).tobytes()


def _check_partitions(envelope: Envelope, topics: Sequence[EphemeralTopic]) -> None:
    partitions = envelope.column32(envelope.partitions)
    for run, (topic, number) in enumerate(zip(topics, partitions, strict=True)):
        if number >= topic.policy.partitions:
            raise UnknownTopicError(
                f"{run_prefix(envelope, run)}topic {topic.name!r} has partitions 0 to "
                f"{topic.policy.partitions - 1}, not {number}"
            )
