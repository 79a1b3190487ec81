"""The verbs of `Bus` over gRPC."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from runnel.client import BatchReceipt, Gap, ShardPage
from runnel.client.producer import checked_level
from runnel.client.producer.batch_builder import codec_of
from runnel.client.results import Page, Receipt
from runnel.errors import ClientFault, ConnectionLostError, RunnelError
from runnel.formats import block, envelope
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import Owner, Route, ShardState, Welcome
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.conformance.clients.grpc_encoding import (
    GrpcTransport,
    answers,
    batches_of,
    error_of,
    fields_of,
    message_of,
    message_proto,
    proto_of,
    say,
)
from tests.conformance.clients.grpc_readers import GrpcConsumer, GrpcSubscription
from tests.conformance.clients.remote_bus import Fields, RemoteBus, build
from tests.conformance.clients.remote_publisher import Outgoing, RemotePublisher
from tests.conformance.clients.remote_readers import RemoteConsumer, RemoteSubscription


class GrpcBus(RemoteBus):
    """One channel, and one call of `PublishStream` on it, which keeps everything in order."""

    def __init__(self, address: str, token: str | None, now_ns: Callable[[], int]) -> None:
        super().__init__(now_ns)
        self.transport = GrpcTransport(address, token)
        self.server: Welcome
        self._stream: Any = None  # of publishing
        self._ids = itertools.count(1)
        self._publishing: dict[int, asyncio.Future[pb.PublishResponse]] = {}
        self._answering: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()  # one write at a time, in order

    async def greet(self) -> None:
        told = await self.transport.ask(pb.PingRequest(), pb.PingResponse)
        sizes = (0, told.batch_bytes_max, told.message_bytes_max)
        self.server = Welcome(0, 1, (), told.cluster, told.node, told.server, *sizes, 0)

    async def close(self) -> None:
        await self.transport.close()
        if self._answering is not None:
            await asyncio.wait({self._answering})

    def check_open(self) -> None:
        self.transport.check_open()

    async def call(self, method: str, **fields: Any) -> Fields:
        request = proto_of(getattr(pb, f"{method}Request"), fields)
        return fields_of(await self.transport.ask(request, getattr(pb, f"{method}Response")))

    def message_of(self, fields: Fields) -> Message:
        return message_of(fields)

    async def statistics(self) -> Fields:
        told = await self.call("GetStatistics")
        return msgspec.json.decode(told["json"], type=Fields)

    # --- Publishing ---

    async def publish_messages(
        self, group: Sequence[Outgoing], level: str | None
    ) -> Sequence[Receipt]:
        messages = [message_proto(sent) for sent in group]
        answer = await self._publish(level, messages=messages)
        if answer is None:
            return [Receipt(sent.message.topic, 0, 0, 0, 0, "none") for sent in group]
        offsets, partitions = answer["offsets"], answer["partitions"]
        where = answer["epoch"], answer["receive_time_ns"], answer["level"]
        return [
            Receipt(sent.message.topic, partition, offset, *where, answer.get("receivers"))
            for sent, partition, offset in zip(group, partitions, offsets, strict=True)
        ]

    async def publish_batch(self, batch: Batch, *, level: str | None = None) -> BatchReceipt:
        packed = block.pack(envelope.encode(batch.envelope), batch.body)
        answer = await self._publish(level, batch=b"".join(packed))
        assert answer is not None
        names = BatchReceipt.__struct_fields__
        told = {name: answer[name] for name in names if name in answer}
        return BatchReceipt(base_offsets=answer["offsets"], **told)

    async def _publish(self, level: str | None, **fields: Any) -> Fields | None:
        fields["level"] = checked_level(level)
        answer = await self._ask_stream(proto_of(pb.PublishRequest, fields))
        return None if answer is None else fields_of(answer)

    async def _ask_stream(self, request: pb.PublishRequest) -> pb.PublishResponse | None:
        """The answer; None at level none, which has no answer."""
        self.check_open()
        if self._stream is None:
            self._stream = self.transport.talk("PublishStream", pb.PublishStreamResponse)
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
            raise error_of(answer.error)
        return answer

    async def _take_answers(self) -> None:
        failure: RunnelError = ConnectionLostError("the stream has ended")
        try:
            async for response in answers(self._stream):
                for answer in response.answers:
                    answered = self._publishing.pop(answer.id, None)
                    # Without a waiter: it asked for no answer and failed, or was cancelled.
                    if answered is not None and not answered.done():
                        answered.set_result(answer)
        except RunnelError as error:
            failure = error
        except asyncio.CancelledError:  # the channel was closed under it
            pass
        for waiting in self._publishing.values():
            if not waiting.done():
                waiting.set_exception(failure)
                waiting.exception()  # it may have no waiter any more

    def publisher(
        self,
        topic: str | None = None,
        *,
        name: str | None = None,
        level: str | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> RemotePublisher:
        if name is not None and level not in (None, "stored"):
            raise ClientFault(f"level {level!r}: a named publisher always uses stored")
        made = super().publisher(topic, level=level, **options)
        if name is not None or compression is not None:
            columns = _ColumnSender(self, name, compression)
            made.publish_many = columns.publish
            made.open_first = None if name is None else columns.take_term
        return made

    # --- Reading and consuming ---

    async def fetch_page(self, **fields: Any) -> Page:
        told = await self.call("Fetch", format="blocks", **fields)
        return Page(
            batches_of(told["blocks"]),
            next_offset=told["next_offset"],
            first_offset=told["first_offset"],
            end_offset=told["end_offset"],
            gaps=[build(Gap, gap) for gap in told["gaps"]],
        )

    async def shards(self, *patterns: str, time: int | None = None) -> list[ShardState]:
        told = await self.call("ListShards", patterns=patterns, time_ns=time)
        return [build(ShardState, shard) for shard in told["shards"]]

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
        told = await self.call(
            "FetchShard",
            journal=journal,
            shard=shard,
            entry=entry,
            end_entry=end_entry,
            patterns=patterns,
            bytes_max=bytes_max,
        )
        return ShardPage(
            batches_of(told["blocks"]),
            told["epoch"],
            told["next_entry"],
            told["first_entry"],
            told["end_entry"],
            [build(Gap, gap) for gap in told["gaps"]],
        )

    async def routes(self, *topics: str) -> dict[str, Route]:
        told = await self.call("ListRoutes", topics=topics)
        return {
            route["topic"]: build(
                Route, route, owners=[build(Owner, owner) for owner in route["owners"]]
            )
            for route in told["routes"]
        }

    def new_subscription(
        self, request: Fields, buffer_bytes: int, on_gap: Callable[[Gap], object] | None
    ) -> RemoteSubscription:
        asked = proto_of(pb.SubscribeRequest, request)
        return GrpcSubscription(self.transport, asked, buffer_bytes, on_gap)

    def new_consumer(
        self, subscription: str, definition: Fields, member: str | None, window_messages: int
    ) -> RemoteConsumer:
        window = {"messages": window_messages}
        fields = {"subscription": subscription, "member": member, "window": window}
        opening = proto_of(pb.ConsumeOpen, fields | definition)
        return GrpcConsumer(self.transport, opening, self.now_ns)


class _ColumnSender:
    """Publishes groups as batches: of a named producer with its term and numbers, or compressed."""

    def __init__(self, bus: GrpcBus, name: str | None, compression: str | None) -> None:
        self._bus = bus
        self._name = name
        self._codec = codec_of(compression)
        self._term = 0
        self._numbers = itertools.count()

    async def take_term(self) -> None:
        self._term = (await self._bus.call("NewTerm", producer=self._name))["term"]

    async def publish(self, group: Sequence[Outgoing]) -> Sequence[Receipt]:
        messages = [sent.message for sent in group]
        named: dict[str, Any] = {}
        if self._name is not None:
            named = {"producer": self._name, "number": next(self._numbers)}
        batch = Batch.from_messages(messages, codec=self._codec, term=self._term, **named)
        receipt = await self._bus.publish_batch(batch)
        return [
            Receipt(run.topic, run.partition, first + row, receipt.epoch, 0, receipt.level)
            for run, first in zip(batch.runs(), receipt.base_offsets, strict=True)
            for row in range(run.count)
        ]


@asynccontextmanager
async def connect_grpc(
    address: str, token: str | None = None, now_ns: Callable[[], int] = time.time_ns
) -> AsyncIterator[GrpcBus]:
    """A client that is closed at the end of the `async with`."""
    async with GrpcBus(address, token, now_ns) as bus:
        await bus.greet()
        yield bus
