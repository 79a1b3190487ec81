"""The bus: a client of the broker, with all its verbs."""

from __future__ import annotations

import asyncio
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from runnel.client.arguments import check_natural, check_patterns, check_time
from runnel.client.cluster_requests import ClusterRequests
from runnel.client.connection import ConnectionWatch, Deadline, Router, Timers, Usual
from runnel.client.consumer import Consumer, StartAt, Subscription, start_of, time_ns_of
from runnel.client.producer import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    Publisher,
    as_bytes,
    check_tags,
    check_uid,
    checked_level,
)
from runnel.client.results import BatchReceipt, Gap, Page, Receipt, ShardPage
from runnel.client.topic_verbs import TopicVerbs
from runnel.client.work_verbs import WorkVerbs
from runnel.errors import ClientFault, ClosedError, RunnelError, UnknownTopicError
from runnel.formats import block, envelope, wire
from runnel.formats.batch import Batch, unpack_blocks
from runnel.formats.wire import NodeState, ShardState, Welcome
from runnel.topics.names import check_topic
from runnel.topics.partitions import partition_of_key

_NOTHING_PUBLISHED: Final = wire.Published(0, (), 0, 0, 0, "none")


class Bus(TopicVerbs, WorkVerbs, ClusterRequests):
    """Publish, subscribe, fetch, consume. Get one with `runnel.connect`, and close it.

    Every wait ends after `deadline_s` with an error that names what did not come.
    """

    def __init__(self, router: Router, timers: Timers, *, deadline_s: float | None = 30) -> None:
        super().__init__(router, timers, deadline_s=deadline_s)
        self.loop: Final = asyncio.get_running_loop()
        self._publishers: dict[Publisher, None] = {}
        self._subscriptions: dict[Subscription, None] = {}
        self._subscription_numbers = itertools.count(1)
        self._turn = itertools.count(id(self) >> 4)  # partitions of single messages without a key

    def __repr__(self) -> str:
        return f"<Bus {'closed' if self._is_closed else self._router.home.state}>"

    def __del__(self) -> None:
        if self._is_closed or self.loop.is_closed():
            return
        warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
        self.loop.call_soon_threadsafe(self._router.abandon)

    # --- The connection ---

    @property
    def server(self) -> Welcome:
        """The broker's welcome: node, cluster, version, limits."""
        welcome = self._router.home.welcome
        assert welcome is not None  # a bus is made after the welcome
        return welcome

    @property
    def nodes(self) -> Sequence[NodeState]:
        """The living nodes, where several serve the topics. Empty if the broker is alone."""
        return self._router.nodes

    @property
    def is_connected(self) -> bool:
        """Whether the bus is connected at this moment. A lost connection is restored automatically."""
        return self._router.home.connection is not None

    def watch_connection(self, on_change: Callable[[bool, str], object]) -> None:
        """Call `on_change` whenever the connection is lost (False) or restored (True), with a text that says so."""
        home = self._router.home
        home.listeners[ConnectionWatch(home, on_change)] = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(is_flushing=error is None)

    async def close(self, *, is_flushing: bool = True) -> None:
        """Flush publishers and consumers that are still open, end subscriptions, disconnect."""
        if self._is_closed:
            return
        self._is_closed = True
        failures: list[RunnelError] = []
        try:
            flushed: tuple[Publisher | Consumer, ...] = (*self._publishers, *self._consumers)
            for unclosed in flushed if is_flushing else ():
                try:
                    await unclosed.close()
                except RunnelError as error:
                    failures.append(error)
        finally:
            for publisher in list(self._publishers):
                publisher.end(ClosedError("the bus has been closed"))
            readers: tuple[Subscription | Consumer, ...] = (*self._subscriptions, *self._consumers)
            for reader in readers:
                reader.abandon()
            await self._router.close()
        if failures:
            raise failures[0]

    async def ping(self) -> float:
        """Ping the broker; returns the round trip in seconds."""
        begin_ns = self._timers.monotonic_ns()
        await self._ask(wire.Pong, wire.Ping, "pinging")
        return (self._timers.monotonic_ns() - begin_ns) / 1e9

    async def statistics(self) -> dict[str, Any]:
        """The broker's statistics: the document that it publishes on !system/metrics/broker."""
        _, tail = await self._ask(wire.StatisticsReport, wire.Statistics, "asking for statistics")
        document: dict[str, Any] = msgspec.json.decode(tail, type=dict[str, Any])
        return document

    # --- Publishing ---

    async def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        key: bytes | None = None,
        tags: Mapping[str, str] | None = None,
        event_time_ns: int | None = None,
        partition: int | None = None,
        partition_key: bytes | None = None,
        uid: bytes | None = None,
        level: str | None = None,
        deadline_s: float | Usual | None = Usual.DEADLINE,
    ) -> Receipt:
        """Publish one message, and wait for its acknowledgement. For many messages use a `publisher`.

        `level`: stored, received or none; by default stored for topics on disk, received for others.
        """
        deadline = self._deadline(deadline_s)
        level = checked_level(level)
        payload = as_bytes("payload", payload)
        check_tags(tags)
        check_uid(uid)
        check_time("event_time_ns", event_time_ns)
        now_ns = self._timers.time_ns()
        partition = await self._partition(topic, partition, key, partition_key, deadline)

        def make(number: int) -> wire.Head:
            return wire.Send(
                number,
                level,
                topic,
                payload,
                None if key is None else as_bytes("key", key),
                dict(tags) if tags else None,
                now_ns if event_time_ns is None else event_time_ns,
                now_ns,
                partition,
                None if partition_key is None else as_bytes("partition_key", partition_key),
                uid,
            )

        answer = await self._publish(topic, partition, make, level, deadline)
        return Receipt(
            topic,
            partition,
            answer.base_offsets[0] if answer.base_offsets else 0,
            answer.epoch,
            answer.receive_time_ns,
            answer.level,
            answer.receivers,
        )

    async def publish_batch(
        self,
        batch: Batch,
        *,
        level: str | None = None,
        deadline_s: float | Usual | None = Usual.DEADLINE,
    ) -> BatchReceipt:
        """Publish a batch that was made elsewhere. All its runs must belong to one shard."""
        deadline = self._deadline(deadline_s)
        level = checked_level(level)
        head = batch.envelope
        topic, partition = head.topics[0], head.column32(head.partitions)[0]
        await self._router.route(topic, deadline)
        tail = block.pack(envelope.encode(head), batch.body)
        answer = await self._publish(
            topic, partition, lambda number: wire.Publish(number, level), level, deadline, tail
        )
        return BatchReceipt(
            answer.base_offsets,
            answer.entry,
            answer.epoch,
            answer.receive_time_ns,
            answer.level,
            answer.is_repeated,
            answer.receivers,
        )

    async def _publish(
        self,
        topic: str,
        partition: int,
        make: Callable[[int], wire.Head],
        level: str | None,
        deadline: Deadline,
        tail: Sequence[bytes | memoryview] = (),
    ) -> wire.Published:
        what = f"publishing to {topic}"
        if level == "none":
            link = self._router.link_of(topic, partition)
            await link.wait_connected(deadline, what)
            link.tell(make(link.next_number()), tail)
            return _NOTHING_PUBLISHED
        answer, _ = await self._router.ask_owner(
            wire.Published,
            topic,
            partition,
            make,
            deadline=deadline,
            what=what,
            is_repeatable=False,
            tail=tail,
        )
        return answer

    async def _partition(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        partition_key: bytes | None,
        deadline: Deadline,
    ) -> int:
        """The partition of a single message, chosen as publishers choose it."""
        route = self._router.routes.get(topic)
        if route is None:
            check_topic(topic)
            route = await self._router.route(topic, deadline)
        count = len(route.owners)
        if partition is not None:
            if not 0 <= partition < count:
                raise UnknownTopicError(f"{topic} has partitions 0 to {count - 1}, not {partition}")
            return partition
        if count == 1:
            return 0
        chosen_by = partition_key if partition_key is not None else key
        if chosen_by is None:
            return next(self._turn) % count
        return partition_of_key(as_bytes("key", chosen_by), count)

    def publisher(
        self,
        topic: str | None = None,
        *,
        name: str | None = None,
        level: str | None = None,
        batch_messages_max: int = BATCH_MESSAGES_MAX,
        batch_bytes_max: int | None = None,
        linger_ms: float = 2,
        buffer_bytes_max: int = 16 * 2**20,
        compression: str | None = None,
        deadline_s: float | Usual | None = Usual.DEADLINE,
        on_room: Callable[[], object] | None = None,
    ) -> Publisher:
        """A publisher for many messages, which it sends in batches. Use it in an `async with`.

        `batch_bytes_max` is by default 1 MiB, or what the broker accepts if that is less. `deadline_s` limits how long
        a message may wait to be acknowledged; None: no limit; default: the deadline of the bus. With a `name`, messages
        that were not acknowledged before a connection was lost are sent again, and stored once.
        """
        self._deadline()  # refuses when closed
        server = self.server
        # The last message of a batch may exceed its limit by its own size.
        most = server.batch_bytes_max - server.message_bytes_max
        if batch_bytes_max is None:
            batch_bytes_max = max(1, min(BATCH_BYTES_MAX, most))
        elif batch_bytes_max > most:
            raise ClientFault(
                f"batch_bytes_max is {batch_bytes_max}: the broker's largest batch is "
                f"{server.batch_bytes_max}, and a message of {server.message_bytes_max} may come "
                "on top"
            )
        publisher = Publisher(
            self._router,
            self._timers,
            topic,
            name=name,
            level=level,
            batch_messages_max=batch_messages_max,
            batch_bytes_max=batch_bytes_max,
            linger_ms=linger_ms,
            buffer_bytes_max=buffer_bytes_max,
            compression=compression,
            deadline_s=self._seconds(deadline_s),
            on_close=_remover(self._publishers),
            on_room=on_room,
        )
        self._publishers[publisher] = None
        return publisher

    # --- Reading ---

    def subscribe(
        self,
        *patterns: str,
        start: StartAt = "latest",
        overflow: str = "drop_oldest",
        buffer_bytes: int = 8 * 2**20,
        on_gap: Callable[[Gap], object] | None = None,
    ) -> Subscription:
        """Subscribe to the messages of all topics that match. Iterate over the subscription.

        `start`: "latest", "last" (the last message of each topic, then live), "earliest", an offset, a datetime,
        ("time", nanoseconds), or a map of topics or (topic, partition) to offsets.
        `overflow`: which messages of ephemeral topics a slow reader misses.
        """
        self._deadline()  # refuses when closed
        subscription = Subscription(
            self._router,
            self._timers,
            next(self._subscription_numbers),
            patterns,
            start_of(start, patterns),
            overflow=overflow,
            buffer_bytes=buffer_bytes,
            on_gap=on_gap,
            deadline_s=self._deadline_s,
            on_close=_remover(self._subscriptions),
        )
        self._subscriptions[subscription] = None
        return subscription

    async def fetch(
        self,
        topic: str,
        offset: int | None = None,
        *,
        partition: int | None = None,
        time: datetime | int | None = None,
        messages_max: int = 0,
        bytes_max: int = 2**20,
        wait_s: float = 0,
    ) -> Page:
        """Fetch messages from an offset or a time on; by default from the first message.

        If there are none, wait up to `wait_s` for one.
        """
        if offset is not None and time is not None:
            raise ClientFault("fetch takes an offset or a time, not both")
        for name, value in (
            ("offset", offset),
            ("partition", partition),
            ("messages_max", messages_max),
            ("bytes_max", bytes_max),
        ):
            check_natural(name, value)
        if not 0 <= wait_s < math.inf:
            raise ClientFault(f"wait_s is {wait_s!r}: it must be seconds from 0 on")
        time_ns = time_ns_of(time) if isinstance(time, datetime) else time
        check_time("time", time_ns)
        answer, tail = await self._router.ask_owner(
            wire.Fetched,
            topic,
            partition or 0,
            lambda number: wire.Fetch(
                number,
                topic,
                partition,
                offset,
                time_ns,
                messages_max,
                bytes_max,
                round(wait_s * 1000),
            ),
            deadline=self._deadline(extra_s=wait_s),
            what=f"fetching from {topic}",
        )
        return Page(
            unpack_blocks(tail),
            next_offset=answer.next_offset,
            first_offset=answer.first_offset,
            end_offset=answer.end_offset,
            gaps=answer.gaps,
        )

    async def shards(self, *patterns: str, time: datetime | int | None = None) -> list[ShardState]:
        """The shards of the topics that match, with their range of entries, and their first entry at `time`."""
        time_ns = time_ns_of(time) if isinstance(time, datetime) else time
        check_time("time", time_ns)
        check_patterns(patterns)
        answer, _ = await self._ask(
            wire.ShardList,
            lambda number: wire.Shards(number, patterns, time_ns),
            "asking for shards",
        )
        self._router.learn_shards(
            (each.journal, each.shard, each.address) for each in answer.shards
        )
        return list(answer.shards)

    async def fetch_shard(
        self,
        journal: str,
        shard: int,
        entry: int,
        *,
        end_entry: int = 0,
        patterns: Sequence[str] = ("*",),
        epoch: int = 0,
        bytes_max: int = 2**20,
    ) -> ShardPage:
        """Fetch the matching messages of a shard from an entry on, in the order of storage: for pipelines."""
        for name, value in (
            ("shard", shard),
            ("entry", entry),
            ("end_entry", end_entry),
            ("epoch", epoch),
            ("bytes_max", bytes_max),
        ):
            check_natural(name, value)
        chosen = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        check_patterns(chosen)
        answer, tail = await self._ask_shard(
            wire.ShardFetched,
            journal,
            shard,
            lambda number: wire.FetchShard(
                number, journal, shard, entry, end_entry, chosen, epoch, bytes_max
            ),
            f"fetching shard {journal}/{shard}",
        )
        return ShardPage(
            unpack_blocks(tail),
            answer.epoch,
            answer.next_entry,
            answer.first_entry,
            answer.end_entry,
            answer.gaps,
        )


_Closable = TypeVar("_Closable")


def _remover(register: dict[_Closable, None]) -> Callable[[_Closable], object]:
    """A callback that removes a closed object from its register. It does not keep the bus alive."""
    return lambda closed: register.pop(closed, None)
