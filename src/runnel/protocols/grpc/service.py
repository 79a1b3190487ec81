"""Binds each method of the .proto to the function that does it: admits the call, parses its request and answers."""

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
from runnel.protocols.grpc.methods import (
    consume_stream,
    fetch,
    live,
    publish_stream,
    topics,
    work,
)
from runnel.protocols.grpc.methods.publish_requests import request_in
from runnel.protocols.grpc.server.admission import enter
from runnel.protocols.grpc.server.calls import Context, GrpcCall, single_request
from runnel.protocols.grpc.server.grpc_server import GrpcServer
from runnel.protocols.grpc.server.statuses import refused
from runnel.protocols.grpc.server.sturdy_server import Services

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Runnel"]

# How long the single request of a call may take to arrive. The requests of a stream have no such limit.
_REQUEST_SECONDS_MAX: Final = 30.0

T = TypeVar("T")
UnaryMethod: TypeAlias = Callable[[GrpcCall, Any], Awaitable[Message]]
ServerStream: TypeAlias = Callable[[GrpcCall, Any], Awaitable[None]]
TwoWayStream: TypeAlias = Callable[[GrpcCall], Awaitable[None]]

_UNARY_METHODS: Final[Mapping[str, UnaryMethod]] = {
    "Publish": publish_stream.publish,
    "NewTerm": publish_stream.new_term,
    "Fetch": fetch.fetch,
    "ListShards": fetch.list_shards,
    "FetchShard": fetch.fetch_shard,
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
_SERVER_STREAMS: Final[Mapping[str, ServerStream]] = {"Subscribe": live.subscribe}
_TWO_WAY_STREAMS: Final[Mapping[str, TwoWayStream]] = {
    "PublishStream": publish_stream.publish_stream,
    "Consume": consume_stream.consume,
}


def services_of(server: GrpcServer) -> Services:
    """The handlers of all methods of the service."""
    return {
        SERVICE.full_name: {method.name: _handler(server, method) for method in SERVICE.methods}
    }


def _handler(server: GrpcServer, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    # Handlers take requests as bytes, so that a request that cannot be parsed is answered as every other mistake of a
    # client. They take all requests as streams, which are the same on the wire: grpcio would read a single request
    # before the client is authenticated, and wait for the rest of it for ever.
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _two_way_handler(server, _TWO_WAY_STREAMS[method.name])
        )
    request_type = GetMessageClass(method.input_type)
    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _server_stream_handler(server, _SERVER_STREAMS[method.name], request_type)
        )
    return grpc.stream_unary_rpc_method_handler(
        _unary_handler(server, _UNARY_METHODS[method.name], request_type)
    )


def _unary_handler(server: GrpcServer, method: UnaryMethod, request_type: type[Message]) -> Any:
    parse = request_in if request_type is pb.PublishRequest else partial(parsed, request_type)

    async def handle(_: object, context: Context) -> bytes:
        async def answer(call: GrpcCall) -> bytes:
            response = await method(call, parse(await _request(context)))
            return response.SerializeToString()

        return await _within_call(server, context, answer)

    return handle


def _server_stream_handler(
    server: GrpcServer, stream: ServerStream, request_type: type[Message]
) -> Any:
    async def handle(_: object, context: Context) -> None:
        async def write(call: GrpcCall) -> None:
            request = parsed(request_type, await _request(context))
            await call.begin_stream()
            await stream(call, request)

        await _within_call(server, context, write)

    return handle


def _two_way_handler(server: GrpcServer, stream: TwoWayStream) -> Any:
    async def handle(_: object, context: Context) -> None:
        async def exchange(call: GrpcCall) -> None:
            await call.begin_stream()
            await stream(call)

        await _within_call(server, context, exchange)

    return handle


async def _request(context: Context) -> bytes:
    data: bytes = await single_request(context, seconds_max=_REQUEST_SECONDS_MAX)
    return data


async def _within_call(
    server: GrpcServer, context: Context, work: Callable[[GrpcCall], Awaitable[T]]
) -> T:
    """Do the work of a call. Every failure of it becomes the call's status."""
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
        raise asyncio.CancelledError  # the client has left: writing to it failed
    if call is not None and not isinstance(failure, RunnelError):
        call.log_bug(failure)
    server.broker.metrics.counters.requests_failed += 1
    return await refused(context, failure)
