"""Distributes a publisher's rows to the senders of their shards, and asks for the routes of new topics."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from runnel.client.connection import Deadline, Link, Router, Timers, backoff_s, sleep
from runnel.client.producer.batch_builder import PendingRows
from runnel.client.producer.shard_sender import (
    Flush,
    PublisherOptions,
    SenderKey,
    SenderOwner,
    ShardSender,
)
from runnel.errors import RunnelError
from runnel.formats import wire
from runnel.topics.partitions import KeylessTurns, partition_of_key, partitions_of_keys


class _PartitionedTopic:
    """A topic of several partitions: a sender for each, and the partition that is next for messages without a key."""

    __slots__ = ("senders", "turns")

    def __init__(self, senders: list[ShardSender], begin: int) -> None:
        self.senders = senders
        self.turns = KeylessTurns(len(senders), begin=begin)


class RowDistributor:
    """All shard senders of one publisher. Rows whose topics have no known route wait here, in their order."""

    def __init__(
        self,
        router: Router,
        timers: Timers,
        owner: SenderOwner,
        topic: str | None,
        options: PublisherOptions,
        is_flushing: Callable[[], bool],
    ) -> None:
        self.options = options  # a named publisher replaces them when it has got its term
        self._router = router
        self._timers = timers
        self._owner = owner
        self._topic = topic
        self._is_flushing = is_flushing
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._senders: Final[dict[SenderKey, ShardSender]] = {}
        self._single: Final[dict[str, ShardSender]] = {}  # by topic: those of one partition
        self._partitioned: Final[dict[str, _PartitionedTopic]] = {}  # by topic: all others
        self._unrouted: Final[deque[PendingRows]] = deque()
        self._routing: asyncio.Task[None] | None = None
        self._seeking: Final[dict[ShardSender, asyncio.Task[None]]] = {}

    @property
    def links(self) -> Iterable[Link]:
        """Each link that a sender uses, once."""
        return dict.fromkeys(sender.link for sender in self._senders.values())

    def add(self, rows: PendingRows) -> None:
        """Give rows to the senders of their shards, or keep them until their routes are known."""
        if self._unrouted or not self._distribute(rows):
            self._wait_for_routes(rows)

    def pump(self, flush: Flush) -> None:
        """Let every sender send what may leave now."""
        for sender in self._senders.values():
            sender.pump(flush)

    def _distribute(self, rows: PendingRows) -> bool:
        """Give rows to the senders of their shards. False: the route of a topic is not known yet."""
        if not rows.topics and self._topic is not None:
            if sender := self._single.get(self._topic):
                sender.add(rows)
                return True
            if partitioned := self._partitioned.get(self._topic):
                self._distribute_partitioned(rows, partitioned)
                return True
            return False
        rows.name_all()
        senders = set(map(self._single.get, rows.topics))
        if None not in senders and len(senders) == 1:
            for sender in senders:
                assert sender is not None
                sender.add(rows)
            return True
        if any(
            t not in self._single and t not in self._partitioned for t in rows.distinct_topics()
        ):
            return False
        self._distribute_mixed(rows)
        return True

    def _distribute_partitioned(self, rows: PendingRows, partitioned: _PartitionedTopic) -> None:
        """Distribute rows of one topic that has several partitions."""
        keyless = partitioned.turns.current
        partitioned.turns.next_batch()
        if rows.keys or rows.partition_keys:
            keys = {**rows.keys, **rows.partition_keys}
            wanted = map(keys.get, range(len(rows)))
            rows.partitions = partitions_of_keys(wanted, len(partitioned.senders), keyless=keyless)
        else:
            rows.partitions = [keyless] * len(rows)
        self._add_by_sender(rows, [partitioned.senders[partition] for partition in rows.partitions])

    def _distribute_mixed(self, rows: PendingRows) -> None:
        """Distribute rows of topics that are in several shards, or have several partitions."""
        keyless = {
            topic: partitioned.turns.next_batch()
            for topic in rows.distinct_topics()
            if (partitioned := self._partitioned.get(topic))
        }
        partitions = [0] * len(rows)
        senders: list[ShardSender] = []
        for row, topic in enumerate(rows.topics):
            if sender := self._single.get(topic):
                senders.append(sender)
                continue
            partitioned = self._partitioned[topic]
            key = rows.partition_keys.get(row, rows.keys.get(row))
            if key is None:
                partition = keyless[topic]
            else:
                partition = partition_of_key(key, len(partitioned.senders))
            partitions[row] = partition
            senders.append(partitioned.senders[partition])
        rows.partitions = partitions
        self._add_by_sender(rows, senders)

    def _add_by_sender(self, rows: PendingRows, senders: list[ShardSender]) -> None:
        if senders.count(senders[0]) == len(senders):
            senders[0].add(rows)
            return
        by_sender: dict[ShardSender, list[int]] = {}
        for row, sender in enumerate(senders):
            by_sender.setdefault(sender, []).append(row)
        for sender, chosen in by_sender.items():
            sender.add(rows.select(chosen))

    def forget(self, topics: Iterable[str]) -> None:
        """Ask for the routes of these topics again: they may have changed."""
        for topic in topics:
            self._single.pop(topic, None)
            self._partitioned.pop(topic, None)

    def close(self, error: RunnelError) -> None:
        """Settle everything that is not acknowledged with this error."""
        self._is_closed = True
        for task in (self._routing, *self._seeking.values()):
            if task is not None:
                task.cancel()
        while self._unrouted:
            self._owner.settled(self._unrouted.popleft(), error)
        for sender in self._senders.values():
            sender.close(error)

    # --- Owners ---

    def seek_owner(self, sender: ShardSender) -> None:
        """Ask other nodes who owns a sender's shard, until its link is connected."""
        if sender not in self._seeking and not self._is_closed:
            task = self._loop.create_task(self._seek_owner(sender), name="runnel owner")
            self._seeking[sender] = task

    async def _seek_owner(self, sender: ShardSender) -> None:
        attempt = 0
        deadline = Deadline(self._timers, self.options.deadline_s)
        try:
            while sender.link.connection is None and deadline.left_s > 0:
                topic = sender.a_topic
                if topic is None:
                    return  # nothing waits any more
                with suppress(RunnelError):  # its messages fail with the deadline of their own
                    await self._router.resolve([topic], deadline, is_afresh=True)
                    sender.follow(topic)
                if sender.link.connection is None:
                    attempt += 1
                    await sleep(self._timers, backoff_s(attempt))
        finally:
            del self._seeking[sender]
        sender.pump(Flush.DUE if not self._is_flushing() else Flush.ALL)

    # --- Routes ---

    def _wait_for_routes(self, rows: PendingRows) -> None:
        """Keep rows of topics without a route, and all rows behind them, so that the order holds."""
        self._unrouted.append(rows)
        if self._routing is None:
            self._routing = self._loop.create_task(self._find_routes(), name="runnel routes")

    async def _find_routes(self) -> None:
        deadline = Deadline(self._timers, self.options.deadline_s)
        try:
            while self._unrouted and not self._is_closed:
                topics = list(
                    dict.fromkeys(t for rows in self._unrouted for t in rows.distinct_topics())
                )
                try:
                    await self._router.resolve(topics, deadline)
                except RunnelError as error:
                    for _ in range(len(self._unrouted)):
                        self._owner.settled(self._unrouted.popleft(), error)
                    continue
                self._take_routes(topics)
                while self._unrouted and self._distribute(self._unrouted[0]):
                    self._unrouted.popleft()
                self.pump(Flush.DUE if not self._is_flushing() else Flush.ALL)
        finally:
            self._routing = None

    def _take_routes(self, topics: list[str]) -> None:
        for topic in topics:
            route = self._router.routes.get(topic)
            if route is None or topic in self._single or topic in self._partitioned:
                continue
            senders = [self._sender(route.keep, owner) for owner in route.owners]
            if len(senders) == 1:
                self._single[topic] = senders[0]
            else:
                # Publishers begin at different partitions: otherwise they would all fill the same one.
                self._partitioned[topic] = _PartitionedTopic(senders, begin=id(self) >> 4)

    def _sender(self, keep: str, owner: wire.Owner) -> ShardSender:
        key = SenderKey(keep, owner.journal, owner.shard)
        sender = self._senders.get(key)
        if sender is None:
            sender = self._senders[key] = ShardSender(
                key, owner.address, self._router, self._owner, self.options, self._timers
            )
        return sender
