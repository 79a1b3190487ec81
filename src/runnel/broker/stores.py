"""Finds where a topic is kept: in the store of its `keep`, or nowhere; the shard that it lies in, and who serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final, Protocol

from runnel.broker.live_shards import LIVE_SHARD, LiveShards
from runnel.broker.shard_loads import ShardLoads
from runnel.cluster import ClusterNode
from runnel.config import Keep
from runnel.errors import (
    ClientFault,
    InvalidNameError,
    LimitExceededError,
    MovedError,
    Unavailable,
    UnknownTopicError,
)
from runnel.formats.wire import Owner, Route
from runnel.log.log import OwnedShard, ShardId, Store
from runnel.topics.names import LIVE_JOURNAL, TopicPartition, check_topic, is_reserved
from runnel.topics.policies import Difference, Policies

# The most names in one request for routes: they are looked up on the loop, one after the other.
ROUTES_MAX: Final = 10_000

# What a MovedError carries: for other topics the client asks again.
MOVED_ROUTES_MAX: Final = 100
MOVED_OWNERS_MAX: Final = 1_000


class EphemeralNames(Protocol):
    """The part of `EphemeralTopics` that routes and rules need."""

    @property
    def epoch(self) -> int: ...

    def knows(self, topic: str) -> bool: ...

    def find(self, topic: str) -> object | None: ...

    def follow_rules(self) -> Iterator[None]: ...


class Stores:
    """The stores of a broker. A topic's `keep` decides which of them has it.

    `main` keeps the topics with `keep = "disk"`, the definitions of subscriptions, and the terms of named publishers.
    A shard is *away* while its log does not serve it.
    """

    def __init__(
        self,
        policies: Policies,
        main: Store,
        memory: Store,
        live_shards: LiveShards | None = None,
        node: ClusterNode | None = None,
    ) -> None:
        """With a `node` this broker is one of several, and serves the shards that the node takes."""
        self.policies = policies
        self.main: Final = main
        self.kept: Final = (main, memory)
        self.by_name: Final[Mapping[str, Store]] = {
            Keep.DISK.value: main,
            Keep.MEMORY.value: memory,
        }
        self.ephemeral: EphemeralNames  # the broker sets it before anything is published
        self.term_changes = 0
        """Rises whenever a shard goes or comes. What was read before an await may be of a lost term if it has risen."""
        self.node: Final = node
        self.live_shards: Final = live_shards
        self.loads: ShardLoads  # the broker sets it, if it is one of several
        self._away: set[ShardId] = set()
        self._acquired: dict[ShardId, Store | LiveShards] = {}  # where there are several brokers
        self._used: set[ShardId] = (
            set()
        )  # by topics, with several brokers: perhaps never served yet
        self._memory = memory
        self._main_topics = main.metadata.topics
        self._memory_topics = memory.metadata.topics

    async def follow_rules(self, policies: Policies) -> Sequence[Difference]:
        """Apply other topic rules from now on. Returns where existing topics differ from them and stay as they are."""
        self.policies.follow(policies)
        for _ in self.ephemeral.follow_rules():
            await asyncio.sleep(0)
        return [each for log in self.kept for each in await log.follow_rules()]

    # --- By topic ---

    def log_of(self, topic: str) -> Store | None:
        """The log that has this topic; None if no log has it. Hot: once for each batch that is published."""
        if self._main_topics.has(topic):
            return self.main
        return self._memory if self._memory_topics.has(topic) else None

    def log_for(self, topic: str) -> Store | None:
        """The log that this topic's messages go to; None: they are not kept."""
        log = self.log_of(topic)
        if log is not None or self.ephemeral.knows(topic):
            return log
        match self.policies.for_topic(topic).keep:
            case Keep.DISK:
                return self.main
            case Keep.MEMORY:
                return self._memory
        return None

    def existing(self, topic: str) -> Store:
        """The log that has this topic; otherwise an error says why no log has it."""
        log = self.log_of(topic)
        if log is not None:
            return log
        check_topic(topic)
        if self.policies.for_topic(topic).keep is Keep.NONE:
            raise ClientFault(
                f"topic {topic!r} is not kept, so there is nothing to fetch: subscribe to it"
            )
        raise UnknownTopicError(f"topic {topic!r} does not exist")

    def shards_of(self, topic: str) -> Sequence[ShardId]:
        """The shard of each partition, whether the topic exists or not."""
        log = self.log_of(topic)
        if log is not None:
            return log.metadata.topics.get(topic).shards
        check_topic(topic)
        policy = self.policies.for_topic(topic)
        log = self.log_for(topic)
        if log is None:
            return self._live_shards_of(topic, policy.partitions)
        return log.metadata.topics.shards_for(topic, policy)

    def routes(self, topics: Sequence[str]) -> list[Route]:
        """Who serves each partition. Epoch 0: nobody has used the shard yet."""
        if len(topics) > ROUTES_MAX:
            raise LimitExceededError(
                f"routes of {len(topics)} topics at once; at most {ROUTES_MAX} can be asked for"
            )
        return [self._route(topic) for topic in topics]

    def _route(self, topic: str) -> Route:
        shards = self.shards_of(topic)
        log = self.log_for(topic)
        if log is None:
            is_known = self.ephemeral.find(topic) is not None
            owners = [self._live_owner(topic, shard) for shard in shards]
            return Route(topic, Keep.NONE, owners, is_known)
        topics = log.metadata.topics
        known = topics.has(topic)
        policy = topics.policy(topic) if known else self.policies.for_topic(topic)
        by_shard = {shard: self._owner(log, shard) for shard in dict.fromkeys(shards)}
        return Route(topic, policy.keep, [by_shard[shard] for shard in shards], known)

    def _live_shards_of(self, topic: str, partitions: int) -> Sequence[ShardId]:
        live = self.live_shards
        if live is None or is_reserved(topic):  # each node publishes its own reports itself
            return [LIVE_SHARD] * partitions
        return [live.shard_of(topic)] * partitions

    def _live_owner(self, topic: str, shard: ShardId) -> Owner:
        live = self.live_shards
        if live is None or is_reserved(topic):
            return Owner(shard.journal, shard.shard, self.ephemeral.epoch, self._own_address)
        if live.has(shard):
            return Owner(shard.journal, shard.shard, live.epoch(shard), self._own_address)
        return self._owner_elsewhere(shard)

    def _owner(self, log: Store, shard: ShardId) -> Owner:
        try:
            return Owner(shard.journal, shard.shard, log.shard(shard).epoch, self._own_address)
        except (UnknownTopicError, MovedError):
            return self._owner_elsewhere(shard)

    @property
    def _own_address(self) -> str:
        return "" if self.node is None else self.node.address

    def _owner_elsewhere(self, shard: ShardId) -> Owner:
        if self.node is None:
            return Owner(shard.journal, shard.shard, 0)
        place = self.node.locate(shard)
        return Owner(shard.journal, shard.shard, place.epoch, place.address)

    def moved(self, error: MovedError, topics: Iterable[str]) -> MovedError:
        """The error of a log as clients get it: with the routes of the first of these topics that are away."""
        if error.routes:
            return error
        routes: list[Route] = []
        owners = 0
        for topic in islice(dict.fromkeys(topics), MOVED_ROUTES_MAX):
            if owners < MOVED_OWNERS_MAX and (self.has_away(topic) or self._has_live_away(topic)):
                routes.append(self._route(topic))
                owners += len(routes[-1].owners)
        return MovedError(str(error), routes)

    def shard_moved(self, error: MovedError, shard: ShardId) -> MovedError:
        """The error of a log for a request about a shard: its route has no topic."""
        if error.routes or self.node is None:
            return error
        return MovedError(str(error), [Route("", "", [self._owner_elsewhere(shard)])])

    async def take_term(self, producer: str) -> int:
        """A term for a named publisher, higher than all that any store knows. `main` records it."""
        known = await self._memory.metadata.take_term(producer)
        return await self.main.metadata.take_term(producer, known)

    # --- Several brokers ---

    async def acquire(self, shard: ShardId, above: int) -> int:
        """See `ShardHost`, as for the next three."""
        store = self._store_for(shard)
        term = await store.acquire(shard, above)
        self._acquired[shard] = store
        return term.epoch

    async def release(self, shard: ShardId) -> None:
        store = self._acquired.get(shard)
        if store is not None:
            await store.release(shard)
            self._acquired.pop(shard, None)  # dropped meanwhile, perhaps

    async def drop(self, shard: ShardId) -> None:
        await self._acquired.pop(shard, self._store_for(shard)).drop(shard)

    def used_shards(self) -> Iterable[ShardId]:
        found: dict[ShardId, None] = {}
        for log in self.kept:
            for name in log.metadata.topics.names():
                found.update(dict.fromkeys(log.metadata.topics.get(name).shards))
        return found

    def load(self) -> tuple[float, Mapping[ShardId, float]]:
        return self.loads.loop_lag_ms(), self.loads.by_shard

    def elsewhere(self) -> list[Owner]:
        """The kept shards that exist, and are not served here now."""
        if self.node is None:
            return []
        here = {shard.id for _, shard in self.shards()}
        return [
            self._owner_elsewhere(shard)
            for shard in self._used.union(self.node.view.owners) - here
            if shard.journal != LIVE_JOURNAL
        ]

    def use(self, shards: Iterable[ShardId]) -> None:
        """Topics that exist lie in these shards."""
        self._used.update(shards)

    def _store_for(self, shard: ShardId) -> Store | LiveShards:
        """Who serves the shard when it is acquired: the log on disk, if it has topics in its journal."""
        if shard.journal == LIVE_JOURNAL and self.live_shards is not None:
            return self.live_shards
        is_memory = self.policies.keep_of_journal(shard.journal) is Keep.MEMORY
        return self._memory if is_memory and not _is_used(self.main, shard) else self.main

    def is_coming(self, topic: str, partition: int | None = None) -> bool:
        """Whether this node will serve the topic's partition, or one of its partitions, in a moment."""
        node = self.node
        if node is None:
            return False
        return any(node.is_coming(shard) for shard in self._shards_at(topic, partition))

    def partition_here(self, topic: str) -> int:
        """A partition of the topic that is served here; 0 if none is, or if it is not kept."""
        log, node = self.log_for(topic), self.node
        if log is None or node is None:
            return 0
        shards = self.shards_of(topic)
        return next((number for number, shard in enumerate(shards) if node.serves(shard)), 0)

    async def wait_here(self, topics: Iterable[str], partition: int | None = None) -> bool:
        """Wait for those shards of these topics that this node will serve in a moment. Returns whether there were any.

        Without a partition, all partitions of each. Unavailable if one takes too long.
        """
        node, has_waited = self.node, False
        if node is not None:
            for topic in topics:
                for shard in self._shards_at(topic, partition):
                    if node.is_coming(shard):
                        has_waited = True
                        with suppress(MovedError):  # it goes to another node after all
                            await node.wait_here(shard)
        return has_waited

    def _shards_at(self, topic: str, partition: int | None) -> Iterable[ShardId]:
        try:
            shards = self.shards_of(topic)
        except InvalidNameError:
            return ()
        if partition is None:
            return dict.fromkeys(shards)
        return shards[min(partition, len(shards) - 1) :][:1]

    # --- Shards that go and come ---

    def on_shard_acquired(self, shard: OwnedShard) -> bool:
        """A log serves the shard from now on. Returns whether it did before."""
        self.term_changes += 1
        was_here = shard.id in self._away
        self._away.discard(shard.id)
        return was_here

    def on_shard_released(self, shard: OwnedShard) -> None:
        self.term_changes += 1
        self._away.add(shard.id)

    def has_away(self, topic: str, shard: ShardId | None = None) -> bool:
        """Whether this shard is away and the topic lies in it; without a shard, whether any of its shards is away.

        The topic need not exist: another owner may make it.
        """
        with suppress(InvalidNameError):  # then no topic has this name
            log = self.log_for(topic)
            if log is not None:
                shards = set(self.shards_of(topic))
                return any(_is_away(log, each) for each in shards if shard is None or each == shard)
        return False

    def _has_live_away(self, topic: str) -> bool:
        """Whether the topic is ephemeral, and another node serves a partition of it."""
        live = self.live_shards
        if live is None or is_reserved(topic):
            return False
        with suppress(InvalidNameError):
            return self.log_for(topic) is None and not all(map(live.has, self.shards_of(topic)))
        return False

    def lies_in(self, topic: str, shard: ShardId) -> bool:
        """Whether a partition of the topic lies in the shard, or will: it need not exist."""
        with suppress(InvalidNameError):
            return self.log_for(topic) is not None and shard in self.shards_of(topic)
        return False

    @property
    def is_any_away(self) -> bool:
        return bool(self._away)

    def check_here(self, topics: Iterable[str]) -> None:
        """Raise MovedError if a shard of these topics is away."""
        for topic in topics:
            if self.has_away(topic):
                raise MovedError(f"topic {topic!r} is not served here now")

    def check_all_here(self) -> None:
        """Raise MovedError if a shard has gone. Readers by pattern read all shards."""
        if self._away:
            # Without the shard's name: not every client may know the journal of a single topic.
            raise MovedError("a shard is not served here now, and a reader by pattern reads all")

    # --- By shard ---

    def shards(self) -> Iterator[tuple[Store, OwnedShard]]:
        """The shards that are served here, with the log of each. The walk may be interrupted by awaits."""
        for log in self.kept:
            for shard in log.shards():
                with suppress(MovedError):  # released since the walk began
                    yield log, log.shard(shard)

    def shard(self, shard: ShardId) -> tuple[Store, OwnedShard]:
        """A shard that is served here, and its log. UnknownTopicError if there is no such shard."""
        for log in self.kept:
            with suppress(UnknownTopicError):
                return log, log.shard(shard)
        raise UnknownTopicError(f"there is no shard {shard}")

    def log_of_shard(self, shard: ShardId) -> Store:
        """The log of a shard, whether it is served here or not. UnknownTopicError if there is no such shard."""
        for log in self.kept:
            with suppress(UnknownTopicError):
                with suppress(MovedError):
                    log.shard(shard)
                return log
        raise UnknownTopicError(f"there is no shard {shard}")

    async def close(self) -> None:
        try:
            await self.main.close()
        finally:
            await self._memory.close()


def _is_away(log: Store, shard: ShardId) -> bool:
    try:
        log.shard(shard)
    except MovedError:
        return True
    except UnknownTopicError:
        pass  # nobody has used it yet
    return False


def _is_used(log: Store, shard: ShardId) -> bool:
    """Whether topics of the log use the shard, or did."""
    try:
        log.shard(shard)
    except MovedError:
        pass
    except UnknownTopicError:
        return False
    return True


def moved(shard: ShardId) -> MovedError:
    """The error of a request for a shard that is away."""
    return MovedError(f"shard {shard} is not served here now")


def owned_shard(log: Store, key: TopicPartition) -> OwnedShard:
    """The shard of a topic-partition, as its owner sees it. UnknownTopicError if the topic-partition does not exist."""
    return log.shard(log.metadata.topics.shard_of(*key))


async def check_epoch(log: Store, shard: OwnedShard, epoch: int) -> None:
    """Check a read position's epoch before the position is used. The only place where a later epoch is judged.

    Either the position is of a past that was lost, and the reader gets a gap. Or another broker has taken the shard
    over and this one does not know it yet: then reading here would send the reader back, so it is Unavailable.
    """
    if epoch > shard.epoch and not await log.is_still_mine(shard.id):
        raise Unavailable(
            f"shard {shard.id}: the position is of epoch {epoch}, this broker's is {shard.epoch}, and it could not "
            "make sure that the shard is still its own; ask again"
        )
