"""The access of a caller to a cluster: the verbs answer for all nodes, whichever of them is asked.

What this node serves is done here, as by a single broker. The rest is asked of the nodes that serve it, with the
caller's own token, so a relayed request has the caller's rights and quotas, which both nodes check. Verbs about one
partition go to its owner. Verbs about many shards are done by every node for its own, and merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec.structs import replace

from runnel.broker.access import Access, MakeAccess, Scope, audited
from runnel.broker.broker import Level, Published, ShardId
from runnel.broker.consumer_groups import HeldPart, OpenConsumer, SettleRequest, WorkSink
from runnel.broker.cursors import PlaceEnds
from runnel.broker.fetcher import FetchRequest, FetchResult
from runnel.broker.live.subscription import OpenSubscription, Overflow, SubscribeRequest
from runnel.broker.monitoring.exposed_metrics import NodeMetrics
from runnel.broker.pages import Listed
from runnel.broker.shard_fetcher import ShardFetchRequest, ShardFetchResult
from runnel.client.connection import Deadline
from runnel.config import Keep
from runnel.errors import (
    ClientFault,
    MovedError,
    OffsetAheadError,
    OffsetGoneError,
    RunnelError,
    Unavailable,
    UnknownSubscriptionError,
    UnknownTopicError,
)
from runnel.formats import block, envelope, wire
from runnel.formats import work_heads as work
from runnel.formats.batch import Batch, unpack_blocks
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, CursorState, ShardState, Start, TopicState
from runnel.formats.work_heads import Consume, SubscriptionState
from runnel.relay import merging, monitoring
from runnel.relay.live import RelayedSubscription
from runnel.relay.peers import NodeLostError
from runnel.relay.publish_lines import RelayedPublish
from runnel.relay.relays import Relays
from runnel.relay.work import RelayedConsumer
from runnel.security.authenticator import AuthenticatedClient
from runnel.security.rights import Right
from runnel.topics.names import dead_letter_topic
from runnel.topics.partitions import partition_of_key
from runnel.topics.patterns import Pattern

_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000
# A wait for a message is asked for in steps: the other node does not hear that the caller has gone.
_WAIT_NS_MAX: Final = 5 * _NS_PER_S


def access_maker(relays: Relays) -> MakeAccess:
    """Access to a node of a cluster."""

    def make(client: AuthenticatedClient, peer: str, scope: Scope = Scope.CLUSTER) -> Access:
        match scope:
            case Scope.CLUSTER:
                return RelayingAccess(relays, client, peer)
            case Scope.PARTS:
                return ClusterAccess(relays, client, peer)
            case Scope.NODE:
                return PartAccess(relays, client, peer)

    return make


class PartAccess(Access):
    """The access of another node, with a caller's token: verbs answer for the shards that are served here."""

    __slots__ = ("_relays",)

    def __init__(self, relays: Relays, client: AuthenticatedClient, peer: str) -> None:
        super().__init__(relays.broker, client.rights, peer, part_only=True)
        self._relays = relays

    def served_stamp(self) -> int:
        return self._relays.served_stamp()


class ClusterAccess(Access):
    """The access of a caller that follows routes: what concerns one shard is done here, or is `moved`."""

    __slots__ = ("_relays", "_token_text")

    def __init__(self, relays: Relays, client: AuthenticatedClient, peer: str) -> None:
        super().__init__(relays.broker, client.rights, peer, part_only=True)
        self._relays = relays
        self._token_text = client.token

    # --- Topics ---

    async def topics(
        self, pattern: str = "*", *, after: str = "", limit: int = 1000
    ) -> Listed[TopicState]:
        own, others = await self._relays.everywhere(
            self._token_text,
            partial(super().topics, pattern, after=after, limit=limit),
            wire.TopicList,
            lambda number: wire.Topics(number, pattern, after, limit),
            f"listing topics {pattern}",
        )
        assert own is not None
        known = {topic.name for topic in own[0]}

        def merge(parts: Sequence[TopicState]) -> TopicState | None:
            # What is deleted here is deleted; another node may not have heard of it yet.
            if merging.is_shared_topic(parts[0]) and parts[0].name not in known:
                return None
            return merging.merged_topic(parts)

        pages = [own, *((answer.topics, answer.is_complete) for answer, _ in others)]
        return merging.merged_page(pages, lambda topic: topic.name, merge, max(1, limit))

    async def describe_topic(self, name: str) -> TopicState:
        own, others = await self._relays.everywhere(
            self._token_text,
            partial(super().describe_topic, name),
            wire.TopicList,
            lambda number: wire.DescribeTopic(number, name),
            f"describing {name}",
            (UnknownTopicError,),
        )
        parts = [] if own is None else [own]
        topic = merging.merged_topic([*parts, *(answer.topics[0] for answer, _ in others)])
        if topic.keep != "none" and (missing := merging.missing_partitions(topic)):
            return await self._completed(topic, missing)
        return topic

    async def _completed(self, topic: TopicState, missing: Sequence[int]) -> TopicState:
        """The topic with partitions that nobody has used yet, and so nobody has described."""
        owners = self._broker.routes([topic.name])[0].owners
        partitions = list(topic.partitions)
        for number in missing:
            partitions[number] = wire.PartitionState(1, 1, owners[number])
        return replace(topic, partitions=partitions)

    async def delete_topic(self, name: str) -> None:
        [route] = self._broker.routes([name])
        if route.exists and route.keep == Keep.DISK:
            # The record of the deletion reaches every node. Asked twice, it could hit a topic that was made again.
            await super().delete_topic(name)
            return
        await self._relays.everywhere(
            self._token_text,
            partial(super().delete_topic, name),
            wire.Done,
            lambda number: wire.DeleteTopic(number, name),
            f"deleting {name}",
            (UnknownTopicError,),
        )

    async def purge_topic(self, name: str) -> None:
        await self._relays.everywhere(
            self._token_text,
            partial(super().purge_topic, name),
            wire.Done,
            lambda number: wire.PurgeTopic(number, name),
            f"purging {name}",
            (UnknownTopicError,),
        )

    # --- Shards ---

    async def shards(self, patterns: Sequence[str], time_ns: int | None = None) -> list[ShardState]:
        own, others = await self._relays.everywhere(
            self._token_text,
            partial(super().shards, patterns, time_ns),
            wire.ShardList,
            lambda number: wire.Shards(number, patterns, time_ns),
            "asking for shards",
        )
        assert own is not None
        return merging.merged_shards([own, *(answer.shards for answer, _ in others)])

    # --- Cursors ---

    async def cursors(self, *, after: str = "", limit: int = 0) -> Listed[CursorState]:
        async def ask() -> Listed[CursorState]:
            own, others = await self._relays.everywhere(
                self._token_text,
                partial(Access.cursors, self, after=after, limit=limit),
                wire.CursorListHead,
                lambda number: wire.Cursors(number, None, after, limit),
                "listing cursors",
            )
            assert own is not None
            return merging.merged_page(
                [own, *((answer.cursors, answer.is_complete) for answer, _ in others)],
                lambda cursor: cursor.name,
                merging.merged_cursor,
                limit,
                lambda cursor: len(cursor.places),
            )

        found, is_complete = await self._relays.until(
            ask, lambda page: all(map(self._has_lags, page[0])), "listing cursors"
        )
        return [merging.without_marks(cursor) for cursor in found], is_complete

    async def cursor(self, name: str) -> list[CursorState]:
        async def ask() -> list[CursorState]:
            own, others = await self._relays.everywhere(
                self._token_text,
                partial(Access.cursor, self, name),
                wire.CursorListHead,
                lambda number: wire.Cursors(number, name),
                f"asking for cursor {name}",
            )
            parts = [*(own or ()), *(each for answer, _ in others for each in answer.cursors)]
            return [merging.merged_cursor(parts)] if parts else []

        found = await self._relays.until(
            ask, lambda cursors: all(map(self._has_lags, cursors)), f"asking for cursor {name}"
        )
        return [merging.without_marks(cursor) for cursor in found]

    def _has_lags(self, cursor: CursorState) -> bool:
        """Whether every shard of a cursor was counted by its owner, who may not have heard of a new cursor yet."""
        view = self._relays.node.view
        return all(
            place.lag >= 0 or not view.is_served(shard)
            for place in cursor.places
            for shard in (self._shard_of(place),)
        )

    def _shard_of(self, place: CursorPlace) -> ShardId:
        if place.topic is None:
            return ShardId(place.journal or "", place.shard)
        owner = self._relays.owner_of(place.topic, place.partition)
        return ShardId(owner.journal, owner.shard)

    async def set_cursor(
        self,
        name: str,
        places: Sequence[CursorPlace],
        *,
        ends: PlaceEnds | None = None,  # noqa: ARG002 - it is asked of their owners
    ) -> None:
        addresses = {self._address_of(place) for place in places}
        elsewhere = addresses - {"", self._relays.node.address}
        set_here = super().set_cursor

        async def set_all() -> None:
            await set_here(name, places, ends=await self._ends_of(places))

        async def set_there(address: str) -> None:
            await self._relays.peers.get(self._token_text, address).ask(
                wire.Done,
                lambda number: wire.SetCursor(number, name, places),
                deadline=deadline,
                what=f"setting cursor {name}",
            )

        deadline = self._relays.deadline()
        only = (
            elsewhere.pop() if len(addresses) == len(elsewhere) == 1 else self._relays.node.address
        )
        await self._relays.at_owner(lambda: only, set_all, set_there, deadline)

    async def remove_cursor(self, name: str) -> None:
        try:
            await super().remove_cursor(name)
        except (
            ClientFault
        ):  # perhaps it stands in topics in memory, of which their owner alone knows
            if not await self.cursor(name):
                raise
            await self._relays.everywhere(
                self._token_text,
                partial(Access.remove_cursor, self, name),
                wire.Done,
                lambda number: wire.RemoveCursor(number, name),
                f"removing cursor {name}",
                (ClientFault,),
            )

    def _address_of(self, place: CursorPlace) -> str:
        """The address of the node that serves a place; empty: not known, and this node says what is wrong."""
        try:
            return self._relays.node.view.address(self._shard_of(place)) or ""
        except RunnelError:
            return ""

    async def _ends_of(self, places: Sequence[CursorPlace]) -> PlaceEnds:
        """What the owners of these places say of their ends."""
        ends: dict[tuple[str, int], int] = {}
        for topic in dict.fromkeys(place.topic for place in places if place.topic is not None):
            with suppress(UnknownTopicError):  # this node says why
                for number, each in enumerate((await self.describe_topic(topic)).partitions):
                    ends[topic, number] = each.next_offset
        for place in places:
            if place.journal is not None and place.topic is None:
                self._check_used(place.journal, place.shard)
                end = await self._end_of_shard(place)
                if end:
                    ends[place.journal, place.shard] = end
        return ends

    def _check_used(self, journal: str, number: int) -> None:
        shard = ShardId(journal, number)
        if shard not in self._relays.node.view.owners:
            raise UnknownTopicError(f"there is no shard {shard}")

    async def _end_of_shard(self, place: CursorPlace) -> int:
        """The next entry of a shard that another node serves; 0: this node knows it, or what is wrong."""
        address = self._address_of(place)
        if address in ("", self._relays.node.address):
            return 0
        try:
            answer, _ = await self._relays.peers.get(self._token_text, address).ask(
                wire.ShardFetched,
                lambda number: wire.FetchShard(
                    number,
                    place.journal or "",
                    place.shard,
                    max(1, place.entry),
                    0,
                    place.patterns or ("*",),
                    0,
                    1,
                ),
                deadline=self._relays.deadline(),
                what="asking for the end of a shard",
            )
        except OffsetAheadError as error:
            return error.next_offset
        except OffsetGoneError as error:
            return error.first_offset
        return answer.end_entry

    # --- Acknowledged work ---
    #
    # A definition is a record that reaches every node: making, pausing and deleting one needs this node alone.

    async def move_subscription(self, name: str, start: Start, member: str | None = None) -> None:
        await self._relays.everywhere(
            self._token_text,
            partial(super().move_subscription, name, start, member),
            wire.Done,
            lambda number: work.MoveSubscription(number, name, start, member),
            f"moving subscription {name!r}",
            hears_later=(UnknownSubscriptionError,),
        )

    async def subscription(self, name: str) -> SubscriptionState:
        own, others = await self._relays.everywhere(
            self._token_text,
            partial(super().subscription, name),
            work.SubscriptionListHead,
            lambda number: work.ListSubscriptions(number, name),
            f"describing subscription {name!r}",
            hears_later=(UnknownSubscriptionError,),
        )
        assert own is not None
        return merging.merged_subscription(
            [own, *(answer.subscriptions[0] for answer, _ in others)]
        )

    async def subscriptions(self, *, after: str = "", limit: int = 0) -> Listed[SubscriptionState]:
        own, others = await self._relays.everywhere(
            self._token_text,
            partial(super().subscriptions, after=after, limit=limit),
            work.SubscriptionListHead,
            lambda number: work.ListSubscriptions(number, None, after, limit),
            "listing subscriptions",
        )
        assert own is not None
        known = {subscription.name for subscription in own[0]}

        def merge(parts: Sequence[SubscriptionState]) -> SubscriptionState | None:
            # What is deleted here is deleted; another node may not have heard of it yet.
            return merging.merged_subscription(parts) if parts[0].name in known else None

        pages = [own, *((answer.subscriptions, answer.is_complete) for answer, _ in others)]
        return merging.merged_page(
            pages, lambda each: each.name, merge, limit, lambda each: len(each.members)
        )

    async def dead_letters(
        self, subscription: str, offset: int, messages_max: int
    ) -> tuple[Sequence[Batch], int]:
        here = partial(super().dead_letters, subscription, offset, messages_max)

        async def there(address: str) -> tuple[Sequence[Batch], int]:
            answer, tail = await self._relays.peers.get(self._token_text, address).ask(
                work.DeadList,
                lambda number: work.DeadLettersHead(number, subscription, offset, messages_max),
                deadline=deadline,
                what=f"listing dead letters of {subscription!r}",
            )
            return unpack_blocks(tail), answer.next_offset

        deadline = self._relays.deadline()
        address_of = partial(self._letters_address, subscription)
        return await self._relays.at_owner(address_of, here, there, deadline)

    async def settle_dead(self, request: SettleRequest) -> int:
        here = partial(super().settle_dead, request)

        async def there(address: str) -> int:
            try:
                answer, _ = await self._relays.peers.get(self._token_text, address).ask(
                    work.SettledHead,
                    lambda number: work.SettleDead(
                        number,
                        request.subscription,
                        request.is_redriven,
                        request.offsets,
                        request.is_all,
                    ),
                    deadline=deadline,
                    what=f"settling dead letters of {request.subscription!r}",
                )
            except NodeLostError as error:  # done twice, it would count other letters
                raise Unavailable(str(error)) from None
            return answer.messages

        deadline = self._relays.deadline()
        address_of = partial(self._letters_address, request.subscription)
        return await self._relays.at_owner(address_of, here, there, deadline)

    def _letters_address(self, subscription: str) -> str:
        """The address of the node that has a subscription's dead letters; this one if there are none."""
        [route] = self._broker.routes([dead_letter_topic(subscription)])
        return route.owners[0].address if route.exists else self._relays.node.address


class RelayingAccess(ClusterAccess):
    """The access of a caller that knows nothing of nodes: what concerns one shard is relayed to its owner, too."""

    __slots__ = ()

    # --- Monitoring ---

    async def metrics_of_nodes(self) -> Sequence[NodeMetrics]:
        self.check_monitoring()
        return await monitoring.metrics_of_nodes(self._relays, self._token_text, self.metrics)

    async def statistics_of_nodes(self) -> dict[str, object]:
        own = self.statistics()
        return await monitoring.statistics_of_nodes(self._relays, self._token_text, own)

    # --- Publishing ---

    def publish(self, batch: Batch, level: Level | None = None) -> asyncio.Future[Published]:
        append = partial(super().publish, batch, level)
        head = batch.envelope
        topic, partition = head.topics[0], head.column32(head.partitions)[0]

        def relayed() -> RelayedPublish:
            tail = block.pack(envelope.encode(head), batch.body)
            return RelayedPublish(
                append,
                lambda number: wire.Publish(number, _asked(level)),
                tail,
                len(batch.body),
                level,
                is_numbered=head.producer is not None,
            )

        return self._append_or_relay(append, relayed, topic, partition)

    def send(
        self, message: Message, level: Level | None = None, *, partition: int | None = None
    ) -> asyncio.Future[Published]:
        append = partial(super().send, message, level, partition=partition)
        at = self._partition_of(message) if partition is None else partition

        def relayed() -> RelayedPublish:
            def make(number: int) -> wire.Head:
                return wire.Send(
                    number,
                    _asked(level),
                    message.topic,
                    message.payload,
                    message.key,
                    dict(message.tags) or None,
                    message.event_time_ns,
                    message.transmit_time_ns,
                    at,
                    message.partition_key,
                    message.uid,
                )

            return RelayedPublish(append, make, (), message.size, level, is_numbered=False)

        return self._append_or_relay(append, relayed, message.topic, at)

    def _append_or_relay(
        self,
        append: Callable[[], asyncio.Future[Published]],
        relayed: Callable[[], RelayedPublish],
        topic: str,
        partition: int,
    ) -> asyncio.Future[Published]:
        """Append here, or behind what is on its way to another node: the order of publishes is a promise."""
        relays, token = self._relays, self._token_text
        owner = relays.owner_of(topic, partition)
        shard = ShardId(owner.journal, owner.shard)
        line = relays.known_line(token, shard)
        if line is None:
            try:
                published = append()
            except MovedError:
                line = relays.line(token, shard, topic, partition)
            else:
                return _relayed_if_moved(
                    published,
                    lambda: relays.line(token, shard, topic, partition).push_again(relayed()),
                )
        return line.push(relayed())

    def _partition_of(self, message: Message) -> int:
        """The partition of a single message, chosen as the broker chooses it."""
        count = len(self._broker.routes([message.topic])[0].owners)
        key = message.key if message.partition_key is None else message.partition_key
        return 0 if key is None else partition_of_key(key, count)

    async def wait_room(self, topic: str, partition: int | None = None) -> None:
        owner = self._relays.owner_of(topic, partition or 0)
        line = self._relays.known_line(self._token_text, ShardId(owner.journal, owner.shard))
        if line is not None:
            await line.wait_room()
            return
        try:
            await super().wait_room(topic, partition)
        except MovedError:
            await asyncio.sleep(0)  # the next try is relayed

    # --- Reading ---

    @audited
    async def fetch(self, request: FetchRequest) -> FetchResult:
        self._rules.check_topic(Right.READ, request.topic)
        wait_ns = request.wait_ns
        deadline = self._relays.deadline(extra_s=wait_ns / _NS_PER_S)
        partition = request.partition or 0
        here = super().fetch

        return await self._relays.at_owner(
            lambda: self._relays.owner_of(request.topic, partition).address,
            lambda: here(request),
            lambda address: self._fetch_at(address, request, deadline),
            deadline,
        )

    async def _fetch_at(
        self, address: str, request: FetchRequest, deadline: Deadline
    ) -> FetchResult:
        """Fetch from another node; wait there in steps."""
        clock = self._broker.clock
        ends_ns = clock.monotonic_ns() + request.wait_ns
        left_ns = request.wait_ns
        while True:
            wait_ns = min(left_ns, _WAIT_NS_MAX)
            answer, tail = await self._fetch_step(address, request, wait_ns, deadline)
            left_ns = ends_ns - clock.monotonic_ns()
            if tail or left_ns <= 0 or answer.gaps:
                return FetchResult(
                    unpack_blocks(tail),
                    answer.next_offset,
                    answer.first_offset,
                    answer.end_offset,
                    answer.gaps,
                )
            request = replace(request, offset=answer.next_offset, time_ns=None)

    async def _fetch_step(
        self, address: str, request: FetchRequest, wait_ns: int, deadline: Deadline
    ) -> tuple[wire.Fetched, memoryview]:
        def make(number: int) -> wire.Head:
            return wire.Fetch(
                number,
                request.topic,
                request.partition,
                request.offset,
                request.time_ns,
                request.messages_max,
                request.bytes_max,
                wait_ns // _NS_PER_MS,
            )

        peers, token, what = self._relays.peers, self._token_text, f"fetching from {request.topic}"
        if not wait_ns:
            peer = peers.get(token, address)
            return await peer.ask(wire.Fetched, make, deadline=deadline, what=what)
        peer = peers.for_waiting(token, address)
        async with request.while_waiting():
            with peer.while_waiting():
                return await peer.ask(wire.Fetched, make, deadline=deadline, what=what)

    @audited
    async def subscribe(self, request: SubscribeRequest) -> OpenSubscription:
        """Relayed by all nodes, which charge what they deliver to the token's rate."""
        self._rules.check_read(request.patterns)
        for text in request.patterns:
            Pattern(text)
        Overflow.checked(request.overflow)
        subscription = RelayedSubscription(self._relays, self._token_text, request)
        await subscription.open()
        return subscription

    @audited
    async def consume(
        self, number: int, sink: WorkSink, request: Consume, part: HeldPart | None = None
    ) -> OpenConsumer:
        """With a part at every node, which charges what it leases to the token's rate."""
        self._rules.check_patterns(Right.CONSUME, request.patterns)
        self._rules.check_subscription(
            request.subscription, Right.CONSUME, is_new=bool(request.patterns)
        )
        if part is not None:  # it joins at the other nodes by itself
            return await super().consume(number, sink, request, part)
        consumer = RelayedConsumer(self._relays, self._token_text, number, sink, request)
        await consumer.open()
        return consumer

    async def consume_polling(self, number: int, sink: WorkSink, request: Consume) -> OpenConsumer:
        """Refused while several nodes live: the next request may come to another process."""
        if len(self._relays.node.nodes) > 1:
            raise ClientFault(
                "this broker has several nodes, and REST requests may come to any of them: consume acknowledged work "
                "over gRPC or the native protocol instead"
            )
        return await super().consume(number, sink, request)

    @audited
    async def fetch_shard(self, request: ShardFetchRequest) -> ShardFetchResult:
        self._rules.check_read(request.patterns)
        self._rules.check_journals((request.shard.journal,))
        deadline = self._relays.deadline()
        here = super().fetch_shard
        node = self._relays.node

        async def there(address: str) -> ShardFetchResult:
            answer, tail = await self._relays.peers.get(self._token_text, address).ask(
                wire.ShardFetched,
                lambda number: wire.FetchShard(
                    number,
                    request.shard.journal,
                    request.shard.shard,
                    request.entry,
                    request.end_entry,
                    request.patterns,
                    request.epoch,
                    request.bytes_max,
                ),
                deadline=deadline,
                what=f"fetching shard {request.shard}",
            )
            blocks, messages = _blocks_in(tail)
            return ShardFetchResult(
                blocks,
                messages,
                answer.epoch,
                answer.next_entry,
                answer.first_entry,
                answer.end_entry,
                answer.gaps,
            )

        return await self._relays.at_owner(
            # A shard that was never served is unknown, and this node says so.
            lambda: node.view.address(request.shard) or node.address,
            lambda: here(request),
            there,
            deadline,
        )


def _relayed_if_moved(
    published: asyncio.Future[Published], relay: Callable[[], asyncio.Future[Published]]
) -> asyncio.Future[Published]:
    """The result of a publish here; or of relaying it, if the shard went before it was stored."""
    if published.done():
        return published
    result: asyncio.Future[Published] = asyncio.get_running_loop().create_future()

    def on_done(done: asyncio.Future[Published]) -> None:
        if result.done():
            done.cancelled() or done.exception()
        elif done.cancelled():
            result.cancel()
        elif (error := done.exception()) is None:
            result.set_result(done.result())
        elif isinstance(error, MovedError) and done is published:
            relay().add_done_callback(on_done)
        else:
            result.set_exception(error)

    published.add_done_callback(on_done)
    return result


def _blocks_in(tail: memoryview) -> tuple[list[memoryview], int]:
    """The blocks that follow each other in a tail, and how many messages they have."""
    blocks: list[memoryview] = []
    messages = position = 0
    while position < len(tail):
        head, _, block_bytes = block.unpack(tail, position)
        blocks.append(tail[position : position + block_bytes])
        messages += head.message_count
        position += block_bytes
    return blocks, messages


def _asked(level: Level | None) -> str | None:
    """The level that the owner is asked for. Without an answer nothing would say that the shard has moved."""
    return None if level is None else (Level.RECEIVED if level is Level.NONE else level).value
