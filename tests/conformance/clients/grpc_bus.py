"""The verbs of `Bus` over gRPC."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import msgspec

from runnel.client.checking import check_natural, check_time
from runnel.client.gathering import codec_of
from runnel.client.intake import as_bytes, check_tags
from runnel.client.places import StartAt, time_ns_of
from runnel.client.publisher import checked_level
from runnel.client.results import BatchReceipt, Gap, Page, Receipt, ShardPage
from runnel.client.work_verbs import DeadLetterPage
from runnel.errors import ClientFault, ConnectionLostError, RunnelError, UnknownTopicError
from runnel.formats import block, envelope
from runnel.formats.batch import Batch
from runnel.formats.wire import (
    CursorPlace,
    CursorState,
    Route,
    ShardState,
    TopicState,
    Welcome,
)
from runnel.formats.work_heads import SubscriptionState
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.conformance.clients import grpc_forms as forms
from tests.conformance.clients.grpc_line import GrpcLine, answers, say
from tests.conformance.clients.grpc_reading import GrpcSubscription
from tests.conformance.clients.grpc_working import GrpcConsumer
from tests.conformance.clients.publishing import Outgoing, RemotePublisher, outgoing
from tests.conformance.clients.remote_bus import (
    DEAD_LETTERS_PER_PAGE,
    TOPICS_PER_PAGE,
    RemoteBus,
)
from tests.conformance.clients.working import work_options


class GrpcBus(RemoteBus):
    """One channel, and one call of `PublishStream` on it, which keeps everything in order."""

    def __init__(self, address: str, token: str | None, now_ns: Callable[[], int]) -> None:
        self.line = GrpcLine(address, token)
        self.server: Welcome
        self._now_ns = now_ns
        self._stream: Any = None  # of publishing
        self._ids = itertools.count(1)
        self._publishing: dict[int, asyncio.Future[pb.PublishResponse]] = {}
        self._answering: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()  # one write at a time, in order

    async def greet(self) -> None:
        told = await self.line.ask(pb.PingRequest(), pb.PingResponse)
        sizes = (0, told.batch_bytes_max, told.message_bytes_max)
        self.server = Welcome(0, 1, (), told.cluster, told.node, told.server, *sizes, 0)

    async def close(self) -> None:
        await self.line.close()
        if self._answering is not None:
            await asyncio.wait({self._answering})

    async def ping(self) -> float:
        begin = time.monotonic()
        await self.line.ask(pb.PingRequest(), pb.PingResponse)
        return time.monotonic() - begin

    async def statistics(self) -> dict[str, Any]:
        told = await self.line.ask(pb.GetStatisticsRequest(), pb.GetStatisticsResponse)
        return msgspec.json.decode(told.json, type=dict[str, Any])

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
    ) -> Receipt:
        # What a protobuf message cannot hold.
        payload = as_bytes("payload", payload)
        key = None if key is None else as_bytes("key", key)
        check_tags(tags)
        check_time("event_time_ns", event_time_ns)
        if partition is not None and partition < 0:
            raise UnknownTopicError(f"{topic} has partitions 0 to 2, not {partition}")
        sent = outgoing(
            topic,
            payload,
            key=key,
            tags=tags,
            event_time_ns=event_time_ns,
            partition=partition,
            partition_key=partition_key,
            uid=uid,
        )
        (receipt,) = await self._publish_messages([sent], level)
        return receipt

    async def _publish_messages(
        self, group: Sequence[Outgoing], level: str | None
    ) -> list[Receipt]:
        request = pb.PublishRequest(
            level=forms.enum_of(pb.Level, "level", checked_level(level)),
            messages=[forms.pb_message(sent) for sent in group],
        )
        answer = await self._ask_stream(request)
        if answer is None:
            return [Receipt(sent.message.topic, 0, 0, 0, 0, "none") for sent in group]
        assert len(answer.offsets) == len(answer.partitions) == len(group)
        return [
            Receipt(
                sent.message.topic,
                partition,
                offset,
                answer.epoch,
                answer.receive_time_ns,
                forms.word_of(pb.Level, "level", answer.level),
                forms.optional(answer, "receivers"),
            )
            for sent, partition, offset in zip(
                group, answer.partitions, answer.offsets, strict=True
            )
        ]

    async def publish_batch(self, batch: Batch, *, level: str | None = None) -> BatchReceipt:
        packed = block.pack(envelope.encode(batch.envelope), batch.body)
        request = pb.PublishRequest(
            level=forms.enum_of(pb.Level, "level", checked_level(level)), batch=b"".join(packed)
        )
        answer = await self._ask_stream(request)
        assert answer is not None
        return BatchReceipt(
            list(answer.offsets),
            answer.entry,
            answer.epoch,
            answer.receive_time_ns,
            forms.word_of(pb.Level, "level", answer.level),
            answer.is_repeated,
            forms.optional(answer, "receivers"),
        )

    async def _ask_stream(self, request: pb.PublishRequest) -> pb.PublishResponse | None:
        """The answer, or None where none comes."""
        self.line.check_open()
        if self._stream is None:
            self._stream = self.line.talk("PublishStream", pb.PublishStreamResponse)
            self._answering = asyncio.get_running_loop().create_task(self._take_answers())
        request.id = next(self._ids)
        answered: asyncio.Future[pb.PublishResponse] = asyncio.get_running_loop().create_future()
        if request.level != pb.LEVEL_NONE:
            self._publishing[request.id] = answered
        async with self._writing:
            await say(self._stream, request)
        if request.level == pb.LEVEL_NONE:
            return None
        answer = await answered
        if answer.HasField("error"):
            raise forms.error_of(answer.error)
        return answer

    async def _take_answers(self) -> None:
        failure: RunnelError = ConnectionLostError("the stream has ended")
        try:
            async for response in answers(self._stream):
                for answer in response.answers:
                    answered = self._publishing.pop(answer.id, None)
                    # Nobody waits: it asked for no answer and failed, or was cancelled meanwhile.
                    if answered is not None and not answered.done():
                        answered.set_result(answer)
        except RunnelError as error:
            failure = error
        except asyncio.CancelledError:  # the channel was closed under it
            pass
        for waiting in self._publishing.values():
            if not waiting.done():
                waiting.set_exception(failure)
                waiting.exception()  # perhaps nobody waits any more

    def publisher(
        self,
        topic: str | None = None,
        *,
        name: str | None = None,
        level: str | None = None,
        batch_messages_max: int = 1000,
        batch_bytes_max: int = 256 * 2**10,
        linger_ms: float = 2,
        buffer_bytes_max: int = 16 * 2**20,
        compression: str | None = None,
    ) -> RemotePublisher:
        self.line.check_open()
        if name is not None and level not in (None, "stored"):
            raise ClientFault(f"level {level!r}: a named publisher always uses stored")
        codec = codec_of(compression)
        term = 0
        numbers = itertools.count()

        async def take_term() -> None:
            nonlocal term
            request = pb.NewTermRequest(producer=name)
            term = (await self.line.ask(request, pb.NewTermResponse)).term

        async def publish_columns(group: Sequence[Outgoing]) -> Sequence[Receipt]:
            messages = [sent.message for sent in group]
            named = {} if name is None else {"producer": name, "number": next(numbers)}
            batch = Batch.from_messages(messages, codec=codec, term=term, **named)  # type: ignore[arg-type]
            receipt = await self.publish_batch(batch)
            return [
                Receipt(run.topic, run.partition, first + row, receipt.epoch, 0, receipt.level)
                for run, first in zip(batch.runs(), receipt.base_offsets, strict=True)
                for row in range(run.count)
            ]

        async def publish_group(group: Sequence[Outgoing]) -> Sequence[Receipt | RunnelError]:
            if name is not None or compression is not None:
                return await publish_columns(group)
            try:
                return await self._publish_messages(group, level)
            except ClientFault as error:  # one of them is wrong: which?
                if len(group) == 1:
                    return [error]
            return [answer for sent in group for answer in await publish_group([sent])]

        return RemotePublisher(
            publish_group,
            topic,
            batch_messages_max=batch_messages_max,
            buffer_bytes_max=buffer_bytes_max,
            open_first=None if name is None else take_term,
        )

    # --- Reading ---

    def subscribe(
        self,
        *patterns: str,
        start: StartAt = "latest",
        overflow: str = "drop_oldest",
        buffer_bytes: int = 8 * 2**20,
        on_gap: Callable[[Gap], object] | None = None,
        position: bytes = b"",
    ) -> GrpcSubscription:
        self.line.check_open()
        request = pb.SubscribeRequest(
            patterns=patterns,
            start=forms.pb_start(start, patterns),
            position=position,
            overflow=forms.enum_of(pb.SubscribeRequest.Overflow, "overflow", overflow),
        )
        return GrpcSubscription(self.line, request, buffer_bytes=buffer_bytes, on_gap=on_gap)

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
        if wait_s < 0:
            raise ClientFault(f"wait_s is {wait_s!r}: it must be seconds from 0 on")
        numbers = {
            "offset": offset,
            "partition": partition,
            "messages_max": messages_max,
            "bytes_max": bytes_max,
        }
        for name, value in numbers.items():
            check_natural(name, value)
        told = await self.line.ask(
            pb.FetchRequest(
                topic=topic,
                time_ns=time_ns_of(time) if isinstance(time, datetime) else time,
                wait_ms=round(wait_s * 1000),
                format=pb.FORMAT_BLOCKS,
                **numbers,
            ),
            pb.FetchResponse,
        )
        return Page(
            forms.batches_of(told.blocks),
            next_offset=told.next_offset,
            first_offset=told.first_offset,
            end_offset=told.end_offset,
            gaps=[forms.gap_of(gap) for gap in told.gaps],
        )

    async def shards(self, *patterns: str, time: int | None = None) -> list[ShardState]:
        request = pb.ListShardsRequest(patterns=patterns, time_ns=time)
        told = await self.line.ask(request, pb.ListShardsResponse)
        return [forms.shard_of(shard) for shard in told.shards]

    async def fetch_shard(
        self,
        journal: str,
        shard: int,
        entry: int,
        *,
        end_entry: int = 0,
        patterns: Sequence[str] = ("*",),
        bytes_max: int = 2**20,
    ) -> ShardPage:
        request = pb.FetchShardRequest(
            journal=journal,
            shard=shard,
            entry=entry,
            end_entry=end_entry,
            patterns=patterns,
            bytes_max=bytes_max,
        )
        told = await self.line.ask(request, pb.FetchShardResponse)
        return ShardPage(
            forms.batches_of(told.blocks),
            told.epoch,
            told.next_entry,
            told.first_entry,
            told.end_entry,
            [forms.gap_of(gap) for gap in told.gaps],
        )

    # --- Topics ---

    async def topics_page(self, pattern: str, after: str) -> tuple[list[TopicState], bool]:
        request = pb.ListTopicsRequest(pattern=pattern, after=after, limit=TOPICS_PER_PAGE)
        told = await self.line.ask(request, pb.ListTopicsResponse)
        return [forms.topic_of(topic) for topic in told.topics], told.is_complete

    async def topic(self, name: str) -> TopicState:
        request = pb.DescribeTopicRequest(name=name)
        return forms.topic_of((await self.line.ask(request, pb.DescribeTopicResponse)).topic)

    async def routes(self, *topics: str) -> dict[str, Route]:
        told = await self.line.ask(pb.ListRoutesRequest(topics=topics), pb.ListRoutesResponse)
        return {
            route.topic: Route(
                route.topic,
                route.keep,
                [forms.owner_of(owner) for owner in route.owners],
                route.exists,
            )
            for route in told.routes
        }

    async def delete_topic(self, name: str) -> None:
        await self.line.ask(pb.DeleteTopicRequest(name=name), pb.DeleteTopicResponse)

    async def purge_topic(self, name: str) -> None:
        await self.line.ask(pb.PurgeTopicRequest(name=name), pb.PurgeTopicResponse)

    # --- Cursors ---

    async def cursors(self) -> list[CursorState]:
        told = await self.line.ask(pb.ListCursorsRequest(), pb.ListCursorsResponse)
        return [forms.cursor_of(cursor) for cursor in told.cursors]

    async def cursor(self, name: str) -> CursorState | None:
        told = await self.line.ask(pb.ListCursorsRequest(name=name), pb.ListCursorsResponse)
        return forms.cursor_of(told.cursors[0]) if told.cursors else None

    async def put_cursor(self, name: str, places: Sequence[CursorPlace]) -> None:
        request = pb.SetCursorRequest(name=name, places=[forms.pb_place(each) for each in places])
        await self.line.ask(request, pb.SetCursorResponse)

    async def remove_cursor(self, name: str) -> None:
        await self.line.ask(pb.RemoveCursorRequest(name=name), pb.RemoveCursorResponse)

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
    ) -> GrpcConsumer:
        self.line.check_open()
        if mode is None and patterns:
            mode = "shared"
        if not window_messages:  # on the wire that means: as many as usual
            raise ClientFault("window_messages is 0: nothing could be delivered")
        opening = pb.ConsumeOpen(
            subscription=subscription,
            patterns=patterns,
            mode=forms.enum_of(pb.Mode, "mode", mode),
            window=pb.Window(messages=window_messages),
            member=member or "",
            start=forms.pb_start(start, patterns),
            options=forms.pb_options(work_options(**options)),
        )
        return GrpcConsumer(self.line, opening, self._now_ns)

    async def make_subscription(
        self,
        name: str,
        *patterns: str,
        mode: str = "shared",
        start: StartAt | None = None,
        **options: Any,
    ) -> None:
        request = pb.MakeSubscriptionRequest(
            name=name,
            patterns=patterns,
            mode=forms.enum_of(pb.Mode, "mode", mode),
            start=forms.pb_start(start, patterns),
            options=forms.pb_options(work_options(**options)),
        )
        await self.line.ask(request, pb.MakeSubscriptionResponse)

    async def subscriptions(self) -> list[SubscriptionState]:
        told = await self.line.ask(pb.ListSubscriptionsRequest(), pb.ListSubscriptionsResponse)
        return [forms.subscription_of(each) for each in told.subscriptions]

    async def subscription(self, name: str) -> SubscriptionState:
        request = pb.ListSubscriptionsRequest(name=name)
        (told,) = (await self.line.ask(request, pb.ListSubscriptionsResponse)).subscriptions
        return forms.subscription_of(told)

    async def delete_subscription(self, name: str) -> None:
        request = pb.DeleteSubscriptionRequest(name=name)
        await self.line.ask(request, pb.DeleteSubscriptionResponse)

    async def set_paused(self, name: str, *, is_paused: bool) -> None:
        request = pb.PauseSubscriptionRequest(name=name, is_paused=is_paused)
        await self.line.ask(request, pb.PauseSubscriptionResponse)

    async def move_subscription(
        self, name: str, start: StartAt, *, member: str | None = None
    ) -> None:
        request = pb.MoveSubscriptionRequest(
            name=name, start=forms.pb_start(start, ()), member=member
        )
        await self.line.ask(request, pb.MoveSubscriptionResponse)

    async def remove_member(self, name: str, member: str) -> None:
        request = pb.RemoveMemberRequest(name=name, member=member)
        await self.line.ask(request, pb.RemoveMemberResponse)

    async def dead_letter_page(
        self, name: str, offset: int = 0, *, messages_max: int = DEAD_LETTERS_PER_PAGE
    ) -> DeadLetterPage:
        request = pb.ListDeadLettersRequest(
            subscription=name, offset=offset, messages_max=messages_max
        )
        told = await self.line.ask(request, pb.ListDeadLettersResponse)
        return DeadLetterPage(
            [forms.message_of(message) for message in told.messages], told.next_offset
        )

    async def settle_dead(
        self, name: str, offsets: Sequence[int], *, is_all: bool, is_redriven: bool
    ) -> int:
        action = pb.SettleDeadLettersRequest.Action
        request = pb.SettleDeadLettersRequest(
            subscription=name,
            action=action.ACTION_REDRIVE if is_redriven else action.ACTION_DROP,
            offsets=offsets,
            all=is_all,
        )
        return (await self.line.ask(request, pb.SettleDeadLettersResponse)).settled


@asynccontextmanager
async def connect_grpc(
    address: str, token: str | None = None, now_ns: Callable[[], int] = time.time_ns
) -> AsyncIterator[GrpcBus]:
    """A client that is closed at the end of the `async with`."""
    async with GrpcBus(address, token, now_ns) as bus:
        await bus.greet()
        yield bus
