"""The table of topics and partitions, and the numbering of batches: offsets, entry, time. No files here.

A partition's `next_offset` is the offset of the next message. `visible_next` is the offset behind the last message that
readers see, which on disk is the last synced one. Messages below `floor` have been purged, or belong to a deleted topic
of the same name.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from runnel.config import Keep, LimitSettings
from runnel.errors import ClientFault, LimitExceededError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Envelope, run_prefix
from runnel.log.log import Creator, Level, LogTopic, ManyTopicsError, ShardId, SomeMade
from runnel.topics.names import TopicPartition, check_topic
from runnel.topics.partitions import shard_of_partition
from runnel.topics.policies import Difference, Policies, Policy

# Topics processed between two turns of the loop, which takes about a millisecond.
_TOPICS_AT_ONCE: Final = 100


class Partition:
    """The numbers of one partition. Small, because there may be a hundred thousand of them."""

    __slots__ = ("floor", "key", "next_offset", "shard", "visible_next")

    def __init__(self, key: TopicPartition, shard: ShardId, next_offset: int = 1) -> None:
        self.key = key
        self.shard = shard
        self.next_offset = next_offset
        self.visible_next = next_offset
        self.floor = 1

    def reset(self) -> None:
        """Forget all numbers: another log may have changed them, and this one is about to read them."""
        self.next_offset = self.visible_next = self.floor = 1

    def advance(self, next_offset: int) -> None:
        """Take over a recorded next offset if it is higher."""
        if next_offset > self.next_offset:
            self.next_offset = self.visible_next = next_offset


class Topic:
    """A topic with its policy and partitions. A deleted topic stays, so that a new one continues from its offsets.

    A topic that is made again has the next generation. By it a shard tells the messages of the two apart
    (`records.PartitionAt`).
    """

    __slots__ = ("former", "generation", "is_deleted", "name", "owner", "partitions", "policy")

    def __init__(
        self,
        name: str,
        policy: Policy,
        partitions: tuple[Partition, ...],
        former: Topic | None = None,
        owner: str = "",
        generation: int = 1,
    ) -> None:
        self.name = name
        self.policy = policy
        self.partitions = partitions
        self.generation = generation
        self.former = former  # the deleted topic of the same name
        self.owner = owner  # the token that made it, if any
        self.is_deleted = False

    def info(self) -> LogTopic:
        return LogTopic(self.name, self.policy, [part.shard for part in self.partitions])


class TopicTable:
    """All topics of a store. The first publication makes a topic, by the rules of `policies`.

    The first topic of a journal makes the journal, with `journal_shards` shards. It keeps them.
    """

    def __init__(
        self,
        policies: Policies,
        topics_max: int,
        on_made: Callable[[Topic], None] | None = None,
        *,
        journal_shards: int = 1,
    ) -> None:
        self._policies = policies
        self._topics_max = topics_max
        self._on_made = on_made
        self._journal_shards = journal_shards
        self._topics: dict[str, Topic] = {}
        # By journal. One object for each shard: `resolve` compares identities.
        self._journals: dict[str, tuple[ShardId, ...]] = {}
        self._owned: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._topics)

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._topics.values())

    def owned_by(self, owner: str) -> int:
        """The number of topics that this token made."""
        return self._owned[owner]

    def _count(self, topic: Topic, change: int) -> None:
        if topic.owner and not topic.is_deleted:
            self._owned[topic.owner] += change
            if not self._owned[topic.owner]:
                del self._owned[topic.owner]

    def names(self) -> list[str]:
        return [topic.name for topic in self._topics.values() if not topic.is_deleted]

    def find(self, name: str) -> Topic | None:
        """The topic, unless it does not exist or was deleted."""
        topic = self._topics.get(name)
        return None if topic is None or topic.is_deleted else topic

    def recorded(self, name: str) -> Topic | None:
        """The topic of this name, also if it was deleted."""
        return self._topics.get(name)

    def uses(self, shard: ShardId) -> bool:
        """Whether a topic's journal has this shard, or had."""
        return 0 <= shard.shard < len(self._journals.get(shard.journal, ()))

    # --- Journals ---

    def shards_of(self, journal: str) -> Sequence[ShardId]:
        """The shards of a journal; none if it does not exist."""
        return self._journals.get(journal, ())

    def shard_count(self, journal: str) -> int | None:
        """The number of shards of a journal; None: the journal does not exist."""
        shards = self._journals.get(journal)
        return None if shards is None else len(shards)

    def restore_journal(self, journal: str, shard_count: int) -> None:
        """Put a journal into the table. If another number was assumed, its topics get their right shards."""
        before = self.shard_count(journal)
        if before == shard_count:
            return
        self._journals[journal] = _shards(journal, shard_count)
        if before is not None:
            for topic in self._topics.values():
                if topic.policy.journal == journal:
                    for partition in topic.partitions:
                        partition.shard = self._shard_of(journal, partition.key)

    def shards_of_new(self, topic: str, policy: Policy) -> list[ShardId]:
        """The shards, by partition, of a topic that does not exist yet."""
        journal = policy.journal
        shards = self._journals.get(journal) or _shards(journal, self._new_shard_count(journal))
        return [
            shards[shard_of_partition(topic, number, len(shards))]
            for number in range(policy.partitions)
        ]

    def _new_shard_count(self, journal: str) -> int:
        return self._journal_shards if self._policies.may_split(journal) else 1

    def _shard_of(self, journal: str, key: TopicPartition) -> ShardId:
        shards = self._journals[journal]
        return shards[shard_of_partition(*key, len(shards))]

    # --- Topics ---

    def partition(self, name: str, number: int) -> Partition:
        topic = self.find(name)
        if topic is None:
            raise UnknownTopicError(f"topic {name!r} does not exist")
        if not 0 <= number < len(topic.partitions):
            raise UnknownTopicError(
                f"topic {name!r} has partitions 0 to {len(topic.partitions) - 1}, not {number}"
            )
        return topic.partitions[number]

    def ensure(self, name: str, creator: Creator | None = None) -> Topic:
        """Get the topic, or make it."""
        topic = self._topics.get(name)
        if topic is not None and not topic.is_deleted:
            return topic
        if topic is None and len(self._topics) >= self._topics_max:
            raise LimitExceededError(
                f"topic {name!r} would be one more than limits.topics_max = {self._topics_max}"
            )
        check_topic(name)
        owner = ""
        if creator is not None:
            creator.check_topic(name)
            owner = creator.name
        policy = self._policies.for_topic(name)
        if policy.journal not in self._journals:
            self.restore_journal(policy.journal, self._new_shard_count(policy.journal))
        generation = 1 if topic is None else topic.generation + 1
        made = self.restore(name, policy, owner, generation)
        if self._on_made is not None:
            self._on_made(made)
        return made

    def restore(self, name: str, policy: Policy, owner: str = "", generation: int = 1) -> Topic:
        """Put a topic with this policy into the table. It continues from the offsets of a former topic.

        A journal that is not in the table has one shard.
        """
        former = self._topics.get(name)
        if former is not None:
            former.former = None
            self._count(former, -1)
        if policy.journal not in self._journals:
            self.restore_journal(policy.journal, 1)
        partitions = []
        for number in range(policy.partitions):
            key = (name, number)
            partition = Partition(key, self._shard_of(policy.journal, key))
            if former is not None and number < len(former.partitions):
                before = former.partitions[number]
                partition.advance(before.next_offset)
                partition.floor = before.floor
                if former.is_deleted:  # offsets that it gave back are not used again either
                    partition.advance(before.floor)
                    partition.floor = partition.next_offset
            partitions.append(partition)
        topic = Topic(name, policy, tuple(partitions), former, owner, generation)
        self._topics[name] = topic
        self._count(topic, 1)
        return topic

    def partitions_in(self, shard: ShardId) -> Iterator[tuple[Topic, Partition]]:
        """The partitions that lie in a shard, also those of deleted topics. Slow: walks over all topics.

        A worker may iterate over it beside the loop.
        """
        for topic in list(self._topics.values()):
            if topic.policy.journal == shard.journal:
                for partition in topic.partitions:
                    if partition.shard == shard:
                        yield topic, partition

    def recorded_partition(self, name: str, number: int) -> Partition | None:
        """A recorded partition, also of a deleted topic; None if it is not recorded."""
        topic = self._topics.get(name)
        return topic.partitions[number] if topic and number < len(topic.partitions) else None

    async def follow_rules(self) -> list[Difference]:
        """Apply the current rules to every topic, in steps: there may be a million topics.

        Returns where the fixed policies of existing topics differ from the rules.
        """
        differences: list[Difference] = []
        for number, topic in enumerate(list(self._topics.values()), 1):
            fixed = topic.policy.fixed
            topic.policy = self._policies.for_recorded(topic.name, fixed)
            if not topic.is_deleted:
                differences += self._policies.differences(topic.name, fixed)
            if number % _TOPICS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return differences

    def delete(self, name: str) -> Sequence[Partition]:
        """Delete a topic. Its offsets are not used again: a new topic begins at its partitions' floors."""
        topic = self._topics.get(name)
        if topic is None:
            return ()
        self._count(topic, -1)
        topic.is_deleted = True
        for partition in topic.partitions:
            partition.floor = max(partition.floor, partition.next_offset)
        return topic.partitions

    def undelete(self, name: str) -> None:
        """Restore a topic that was made again without a record of it. Deleted messages stay below its floors."""
        topic = self._topics.get(name)
        if topic is not None and topic.is_deleted:
            topic.is_deleted = False
            self._count(topic, 1)

    def found_generation(self, name: str, generation: int) -> None:
        """A shard knows this generation of the topic. If the table does not, the record of its making is lost."""
        topic = self._topics[name]
        if generation > topic.generation:
            topic.generation = generation
            self.undelete(name)

    def forget(self, topic: Topic) -> None:
        """Undo the making of a topic that could not be recorded."""
        if self._topics.get(topic.name) is topic:
            self._count(topic, -1)
            if topic.former is None:
                del self._topics[topic.name]
            else:
                self._topics[topic.name] = topic.former
                self._count(topic.former, 1)

    def resolve(
        self,
        envelope: Envelope,
        creator: Creator | None = None,
        made_max: int | None = None,
    ) -> list[Partition]:
        """The partition of each run, with missing topics made. All must lie in one shard; an error names the run.

        ManyTopicsError if more than `made_max` topics are missing: that many have been made then.
        """
        topics = self._topics
        made = 0
        partitions: list[Partition] = []
        shard: ShardId | None = None
        for run, (name, number) in enumerate(
            zip(envelope.topics, envelope.column32(envelope.partitions), strict=True)
        ):
            topic = topics.get(name)
            if topic is None or topic.is_deleted:
                if made == made_max:
                    raise ManyTopicsError("many topics have to be made first; wait for room")
                made += 1
                topic = self._ensure_run(envelope, run, creator)
            if number >= len(topic.partitions):
                raise UnknownTopicError(
                    f"{run_prefix(envelope, run)}topic {name!r} has partitions 0 to "
                    f"{len(topic.partitions) - 1}, not {number}"
                )
            partition = topic.partitions[number]
            if partition.shard is not shard:
                if shard is not None:
                    raise ClientFault(
                        f"run {run}: {name!r} lies in shard {partition.shard}, the runs before it in "
                        f"{shard}; a batch goes to one shard"
                    )
                shard = partition.shard
            partitions.append(partition)
        return partitions

    def make_some(
        self, envelope: Envelope, run: int, made_max: int, creator: Creator | None
    ) -> SomeMade:
        """Make up to `made_max` topics of a batch, from run `run` on."""
        made = 0
        for at in range(run, envelope.run_count):
            if self.find(envelope.topics[at]) is not None:
                continue
            if made == made_max:
                return SomeMade(at)
            made += 1
            try:
                self._ensure_run(envelope, at, creator)
            except ClientFault as fault:
                return SomeMade(at, fault)
        return SomeMade(envelope.run_count)

    def _ensure_run(self, envelope: Envelope, run: int, creator: Creator | None) -> Topic:
        try:
            return self.ensure(envelope.topics[run], creator)
        except ClientFault as fault:
            raise type(fault)(f"{run_prefix(envelope, run)}{fault}") from None


def _shards(journal: str, count: int) -> tuple[ShardId, ...]:
    return tuple(ShardId(journal, number) for number in range(count))


def number_runs(
    envelope: Envelope,
    partitions: Sequence[Partition],
    *,
    shard: int,
    epoch: int,
    entry: int,
    receive_time_ns: int,
) -> Envelope:
    """Fill in the broker's part of the envelope, and advance the partitions' next offsets.

    Hot: runs once per batch, its loop once per run (bench/log.py, "runs").
    """
    bases = array("q")
    for partition, count in zip(partitions, envelope.column32(envelope.counts), strict=True):
        base = partition.next_offset
        bases.append(base)
        partition.next_offset = base + count
    return msgspec.structs.replace(
        envelope,
        base_offsets=bases.tobytes(),
        receive_times=receive_time_ns.to_bytes(8, "little", signed=True),
        epochs=epoch.to_bytes(8, "little"),
        entries=entry.to_bytes(8, "little"),
        rows=b"",
        shard=shard,
    )


def give_back(envelope: Envelope, partitions: Sequence[Partition]) -> None:
    """Undo the latest `number_runs` for a batch that was not accepted."""
    for partition, count in zip(partitions, envelope.column32(envelope.counts), strict=True):
        partition.next_offset -= count


def check_append(batch: Batch, level: Level, limits: LimitSettings) -> Level:
    """Check the batch and the level of an append. Returns the level."""
    if not isinstance(batch, Batch):
        raise ClientFault(f"{type(batch).__name__} cannot be appended: make a Batch of it")
    size = batch.envelope.body_bytes
    if size > limits.batch_bytes_max:
        raise LimitExceededError(
            f"a batch of {size} bytes is larger than limits.batch_bytes_max = {limits.batch_bytes_max}"
        )
    return Level.checked(level)


def check_offset(offset: int) -> None:
    if type(offset) is not int or offset < 1:
        raise ClientFault(f"offset {offset!r}: messages are numbered 1, 2, 3 …")


def kept_elsewhere(topic: Topic, here: str) -> str:
    """The error text for a topic that this store does not keep."""
    keep = topic.policy.keep
    where = {Keep.NONE: "not kept", Keep.MEMORY: "kept in memory", Keep.DISK: "kept on disk"}[keep]
    rule = "by default" if topic.policy.rule is None else f"by the rule for {topic.policy.rule!r}"
    return f"topic {topic.name!r} is {where} {rule}; this log is for topics kept {here}"
