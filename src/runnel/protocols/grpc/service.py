"""The methods of the .proto, each joined to its verb: a call is let in, heard, done and answered; or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from runnel.errors import RunnelError
from runnel.protocols.grpc.encoding.messages import parsed
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.methods import consuming, live, publishing, reading, topics, work
from runnel.protocols.grpc.methods.sending import request_in
from runnel.protocols.grpc.server.admission import enter
from runnel.protocols.grpc.server.calls import Context, GrpcCall, single_request
from runnel.protocols.grpc.server.grpc_server import GrpcServer
from runnel.protocols.grpc.server.statuses import refused
from runnel.protocols.grpc.server.sturdy_server import Services

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Runnel"]

# For the one request of a call to come, whole. A stream may take its time with each of its.
_REQUEST_SECONDS_MAX: Final = 30.0

T = TypeVar("T")
Verb: TypeAlias = Callable[[GrpcCall, Any], Awaitable[Message]]
Writing: TypeAlias = Callable[[GrpcCall, Any], Awaitable[None]]
Talking: TypeAlias = Callable[[GrpcCall], Awaitable[None]]

_VERBS: Final[Mapping[str, Verb]] = {
    "Publish": publishing.publish,
    "NewTerm": publishing.new_term,
    "Fetch": reading.fetch,
    "ListShards": reading.list_shards,
    "FetchShard": reading.fetch_shard,
    "MakeSubscription": work.make_subscription,
    "ListSubscriptions": work.list_subscriptions,
    "DeleteSubscription": work.delete_subscription,
    "PauseSubscription": work.pause_subscription,
    "MoveSubscription": work.move_subscription,
    "RemoveMember": work.remove_member,
    "ListDeadLetters": work.list_dead_letters,
    "SettleDeadLetters": work.settle_dead_letters,
    "ListTopics": topics.list_topics,
    "DescribeTopic": topics.describe_topic,
    "DeleteTopic": topics.delete_topic,
    "PurgeTopic": topics.purge_topic,
    "ListRoutes": topics.list_routes,
    "SetCursor": topics.set_cursor,
    "ListCursors": topics.list_cursors,
    "RemoveCursor": topics.remove_cursor,
    "GetStatistics": topics.get_statistics,
    "Ping": topics.ping,
}
_WRITING: Final[Mapping[str, Writing]] = {"Subscribe": live.subscribe}
_TALKING: Final[Mapping[str, Talking]] = {
    "PublishStream": publishing.publish_stream,
    "Consume": consuming.consume,
}


def services_of(server: GrpcServer) -> Services:
    """Everything that the service can do."""
    return {SERVICE.full_name: {method.name: _method(server, method) for method in SERVICE.methods}}


def _method(server: GrpcServer, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    # Requests come as bytes: what cannot be parsed is answered as every other mistake of a client's. All are taken as
    # streams, which is the same on the wire: grpcio would read a single request before anybody is asked who calls, and
    # wait for the rest of it for ever.
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(_talked(server, _TALKING[method.name]))
    request_type = GetMessageClass(method.input_type)
    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _written(server, _WRITING[method.name], request_type)
        )
    return grpc.stream_unary_rpc_method_handler(
        _answered(server, _VERBS[method.name], request_type)
    )


def _answered(server: GrpcServer, verb: Verb, request_type: type[Message]) -> Any:
    parse = request_in if request_type is pb.PublishRequest else partial(parsed, request_type)

    async def handle(_: object, context: Context) -> bytes:
        async def answer(call: GrpcCall) -> bytes:
            response = await verb(call, parse(await _request(context)))
            return response.SerializeToString()

        return await _within_call(server, context, answer)

    return handle


def _written(server: GrpcServer, writing: Writing, request_type: type[Message]) -> Any:
    async def handle(_: object, context: Context) -> None:
        async def write(call: GrpcCall) -> None:
            request = parsed(request_type, await _request(context))
            await call.begin_stream()
            await writing(call, request)

        await _within_call(server, context, write)

    return handle


def _talked(server: GrpcServer, talking: Talking) -> Any:
    async def handle(_: object, context: Context) -> None:
        async def speak(call: GrpcCall) -> None:
            await call.begin_stream()
            await talking(call)

        await _within_call(server, context, speak)

    return handle


async def _request(context: Context) -> bytes:
    data: bytes = await single_request(context, seconds_max=_REQUEST_SECONDS_MAX)
    return data


async def _within_call(
    server: GrpcServer, context: Context, work: Callable[[GrpcCall], Awaitable[T]]
) -> T:
    """The boundary of a call: whatever happens within becomes its status."""
    call: GrpcCall | None = None
    failure: BaseException
    try:
        call = await enter(server, context)
        return await work(call)
    except asyncio.CancelledError:
        if call is None or call.end is None:
            raise  # the client has left
        call.uncancel()
        failure = call.end
    except Exception as error:  # noqa: BLE001 - the boundary: a bug costs one call
        failure = error
    finally:
        if call is not None:
            call.leave()
    if call is not None:
        await call.wait_begun()
    if context.cancelled() or isinstance(failure, grpc.aio.InternalError):
        raise asyncio.CancelledError  # the client has left: what failed was to tell it something
    if call is not None and not isinstance(failure, RunnelError):
        call.broken(failure)
    server.broker.metrics.counters.requests_failed += 1
    return await refused(context, failure)
