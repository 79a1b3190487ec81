"""The verbs of `Bus`, for every protocol that can call a method by its name and fields."""

from __future__ import annotations

import time as clock
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from runnel.client import BatchReceipt, Gap
from runnel.client.consumer import OffsetMap, StartAt, partition_places, start_of, time_ns_of
from runnel.client.producer import as_bytes
from runnel.client.results import Receipt
from runnel.client.work_verbs import DeadLetterPage, Offsets
from runnel.errors import ClientFault, RunnelError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, CursorState, Owner, PartitionState, TopicState
from runnel.formats.work_heads import MemberState, PartitionWork, SubscriptionState, WorkOptions
from tests.conformance.clients.remote_publisher import Outgoing, RemotePublisher, outgoing
from tests.conformance.clients.remote_readers import (
    Closable,
    RemoteConsumer,
    RemoteSubscription,
)

TOPICS_PER_PAGE = 1000
DEAD_LETTERS_PER_PAGE = 100

S = TypeVar("S", bound=msgspec.Struct)
# What a request or an answer contains: the fields of a message of runnel.proto.
Fields = dict[str, Any]


class RemoteBus(Closable):
    """A client of one address. `call` is the protocol's; the verbs are made of it."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.now_ns = now_ns

    # --- For the protocol ---

    @abstractmethod
    def check_open(self) -> None:
        """Raises ClosedError after `close`."""

    @abstractmethod
    async def call(self, method: str, **fields: Any) -> Fields:
        """Call a method of runnel.proto. Fields that are None are left out."""

    @abstractmethod
    def message_of(self, fields: Fields) -> Message: ...

    @abstractmethod
    async def publish_messages(
        self, group: Sequence[Outgoing], level: str | None
    ) -> Sequence[Receipt]:
        """Publish all of them, or none if one of them is wrong."""

    @abstractmethod
    async def publish_batch(self, batch: Batch, *, level: str | None = None) -> BatchReceipt: ...

    @abstractmethod
    async def fetch_page(self, **fields: Any) -> Any:
        """Call `Fetch`. The page has messages, offsets and gaps."""

    @abstractmethod
    def new_subscription(
        self, request: Fields, buffer_bytes: int, on_gap: Callable[[Gap], object] | None
    ) -> RemoteSubscription: ...

    @abstractmethod
    def new_consumer(
        self, subscription: str, definition: Fields, member: str | None, window_messages: int
    ) -> RemoteConsumer: ...

    async def ping(self) -> float:
        begin = clock.monotonic()
        await self.call("Ping")
        return clock.monotonic() - begin

    # --- Publishing ---

    async def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        key: bytes | None = None,
        level: str | None = None,
        **more: Any,
    ) -> Receipt:
        payload = as_bytes("payload", payload)
        key = None if key is None else as_bytes("key", key)
        sent = outgoing(topic, payload, key=key, **more)
        (receipt,) = await self.publish_messages([sent], level)
        return receipt

    async def publish_group(
        self, group: Sequence[Outgoing], level: str | None
    ) -> Sequence[Receipt | RunnelError]:
        """The receipt of each, or why the broker refused it."""
        try:
            return await self.publish_messages(group, level)
        except ClientFault as error:  # one of them is wrong: which?
            if len(group) == 1:
                return [error]
        return [answer for sent in group for answer in await self.publish_group([sent], level)]

    def publisher(
        self,
        topic: str | None = None,
        *,
        level: str | None = None,
        batch_messages_max: int = 1000,
        batch_bytes_max: int = 256 * 2**10,
        linger_ms: float = 2,
        buffer_bytes_max: int = 16 * 2**20,
    ) -> RemotePublisher:
        self.check_open()
        return RemotePublisher(
            lambda group: self.publish_group(group, level),
            topic,
            batch_messages_max=batch_messages_max,
            buffer_bytes_max=buffer_bytes_max,
        )

    # --- Reading ---

    def subscribe(
        self,
        *patterns: str,
        start: StartAt = "latest",
        overflow: str = "drop_oldest",
        buffer_bytes: int = 8 * 2**20,
        on_gap: Callable[[Gap], object] | None = None,
        position: Any = None,
    ) -> RemoteSubscription:
        """`position` is a former subscription's: this one continues there."""
        self.check_open()
        request = {
            "patterns": patterns,
            "start": start_of(start, patterns),
            "overflow": overflow,
            "position": position,
        }
        return self.new_subscription(request, buffer_bytes, on_gap)

    async def fetch(
        self,
        topic: str,
        offset: int | None = None,
        *,
        partition: int | None = None,
        time: datetime | int | None = None,
        messages_max: int | None = None,
        bytes_max: int | None = None,
        wait_s: float = 0,
    ) -> Any:
        return await self.fetch_page(
            topic=topic,
            offset=offset,
            partition=partition,
            time_ns=time_ns_of(time) if isinstance(time, datetime) else time,
            messages_max=messages_max,
            bytes_max=bytes_max,
            wait_ms=round(wait_s * 1000) or None,
        )

    # --- Topics and cursors ---

    async def topics(self, pattern: str = "*") -> list[TopicState]:
        found: list[TopicState] = []
        is_complete = False
        while not is_complete:
            after = found[-1].name if found else ""
            told = await self.call(
                "ListTopics", pattern=pattern, after=after, limit=TOPICS_PER_PAGE
            )
            found += [topic_of(topic) for topic in told["topics"]]
            is_complete = told["is_complete"]
        return found

    async def topic(self, name: str) -> TopicState:
        return topic_of((await self.call("DescribeTopic", name=name))["topic"])

    async def delete_topic(self, name: str) -> None:
        await self.call("DeleteTopic", name=name)

    async def purge_topic(self, name: str) -> None:
        await self.call("PurgeTopic", name=name)

    async def cursors(self) -> list[CursorState]:
        return [cursor_of(cursor) for cursor in (await self.call("ListCursors"))["cursors"]]

    async def cursor(self, name: str) -> CursorState | None:
        try:
            told = (await self.call("ListCursors", name=name))["cursors"]
        except UnknownTopicError:
            return None
        return cursor_of(told[0]) if told else None

    async def set_cursor(self, name: str, places: OffsetMap | Sequence[CursorPlace]) -> None:
        if isinstance(places, Mapping):
            places = [
                CursorPlace(place.topic, place.partition, place.offset)
                for place in partition_places(places)
            ]
        await self.call("SetCursor", name=name, places=places)

    async def remove_cursor(self, name: str) -> None:
        await self.call("RemoveCursor", name=name)

    # --- Acknowledged work ---

    def consume(
        self,
        subscription: str,
        *patterns: str,
        mode: str | None = None,
        member: str | None = None,
        start: StartAt | None = None,
        window_messages: int = 256,
        **options: Any,
    ) -> RemoteConsumer:
        self.check_open()
        if not window_messages:  # on the wire, 0 is the default
            raise ClientFault("window_messages is 0: nothing could be delivered")
        if mode is None and patterns:
            mode = "shared"
        definition = _definition(patterns, mode, start, options)
        return self.new_consumer(subscription, definition, member, window_messages)

    async def make_subscription(
        self,
        name: str,
        *patterns: str,
        mode: str = "shared",
        start: StartAt | None = None,
        **options: Any,
    ) -> None:
        definition = _definition(patterns, mode, start, options)
        await self.call("MakeSubscription", name=name, **definition)

    async def subscriptions(self) -> list[SubscriptionState]:
        told = await self.call("ListSubscriptions")
        return [subscription_of(each) for each in told["subscriptions"]]

    async def subscription(self, name: str) -> SubscriptionState:
        (told,) = (await self.call("ListSubscriptions", name=name))["subscriptions"]
        return subscription_of(told)

    async def delete_subscription(self, name: str) -> None:
        await self.call("DeleteSubscription", name=name)

    async def pause_subscription(self, name: str) -> None:
        await self.call("PauseSubscription", name=name, is_paused=True)

    async def resume_subscription(self, name: str) -> None:
        await self.call("PauseSubscription", name=name, is_paused=False)

    async def move_subscription(
        self, name: str, start: StartAt, *, member: str | None = None
    ) -> None:
        await self.call("MoveSubscription", name=name, start=start_of(start, ()), member=member)

    async def remove_member(self, name: str, member: str) -> None:
        await self.call("RemoveMember", name=name, member=member)

    # --- Dead letters ---

    async def dead_letter_page(
        self, name: str, offset: int = 0, *, messages_max: int = DEAD_LETTERS_PER_PAGE
    ) -> DeadLetterPage:
        told = await self.call(
            "ListDeadLetters", subscription=name, offset=offset, messages_max=messages_max
        )
        messages = [self.message_of(message) for message in told["messages"]]
        return DeadLetterPage(messages, told["next_offset"] or 0)

    async def dead_letters(self, name: str, *, offset: int = 0) -> AsyncIterator[Message]:
        while True:
            page = await self.dead_letter_page(name, offset)
            for message in page.messages:
                yield message
            offset = page.next_offset
            if not offset:
                return

    async def redrive(self, name: str, offsets: Offsets) -> int:
        return await self._settle(name, offsets, "redrive")

    async def drop_dead(self, name: str, offsets: Offsets) -> int:
        return await self._settle(name, offsets, "drop")

    async def _settle(self, name: str, offsets: Offsets, action: str) -> int:
        if isinstance(offsets, str):
            if offsets != "all":
                raise ClientFault(f"{offsets!r} are no offsets: give numbers, or 'all'")
            chosen: Fields = {"all": True}
        else:
            chosen = {"offsets": tuple(offsets)}
        told = await self.call("SettleDeadLetters", subscription=name, action=action, **chosen)
        settled: int = told["settled"]
        return settled


def _definition(
    patterns: Sequence[str], mode: str | None, start: StartAt | None, options: Fields
) -> Fields:
    return {
        "patterns": patterns,
        "mode": mode,
        "start": None if start is None else start_of(start, patterns),
        "options": work_options(**options),
    }


def work_options(
    *,
    lease_s: float | None = None,
    processing_max_s: float | None = None,
    deliveries_max: int | None = None,
    retry_delay_s: float | None = None,
    retry_delay_max_s: float | None = None,
    backoff: float | None = None,
    absent_max_s: float | None = None,
) -> WorkOptions | None:
    """The options of a subscription; None if all are the broker's defaults."""

    def ms(seconds: float | None) -> int | None:
        return None if seconds is None else round(seconds * 1000)

    options = WorkOptions(
        ms(lease_s),
        ms(processing_max_s),
        deliveries_max,
        ms(retry_delay_s),
        ms(retry_delay_max_s),
        backoff,
        ms(absent_max_s),
    )
    return None if options == WorkOptions() else options


# --- From the fields of an answer ---


def build(kind: type[S], fields: Fields, **made: Any) -> S:
    """A struct with these fields. Texts beside times in nanoseconds are for people, and left out."""
    return kind(
        **{name: value for name, value in (fields | made).items() if f"{name}_ns" not in fields}
    )


def topic_of(fields: Fields) -> TopicState:
    partitions = [
        PartitionState(each["first_offset"], each["next_offset"], build(Owner, owner_of(each)))
        for each in fields.get("partitions", ())
    ]
    return build(TopicState, fields, partitions=partitions)


def owner_of(partition: Fields) -> Fields:
    """JSON has the owner's fields among the partition's."""
    owner: Fields = partition.get("owner") or {
        name: partition[name] for name in ("journal", "shard", "epoch")
    }
    return owner


def cursor_of(fields: Fields) -> CursorState:
    places = [build(CursorPlace, place) for place in fields["places"]]
    return build(CursorState, fields, places=places)


def subscription_of(fields: Fields) -> SubscriptionState:
    return build(
        SubscriptionState,
        fields,
        options=build(WorkOptions, fields["options"]),
        members=[build(MemberState, member) for member in fields["members"]],
        partitions=[build(PartitionWork, each) for each in fields.get("partitions", ())],
    )
