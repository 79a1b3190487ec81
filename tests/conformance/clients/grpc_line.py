"""One gRPC channel: calls by the names of their requests, and errors as Runnel has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message as Proto
from grpc import aio

from runnel.errors import ClosedError, ConnectionLostError, RunnelError, from_details

P = TypeVar("P", bound=Proto)

# The library has one thread for all channels and servers. Begun here, it is there before any test, and stays.
aio.init_grpc_aio()

_SERVICE = "/runnel.v1.Runnel/"
# What grpcio says of a request that it cannot hand to a call which ends at that moment.
_CALL_ENDED = "Internal error from Core"
# A large answer is the broker's to bound, not this client's.
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class GrpcLine:
    """Close it when it is no longer needed."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._channel = aio.insecure_channel(address, options=_OPTIONS)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        await self._channel.close(grace=None)

    def check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the bus has been closed")

    async def ask(self, request: Proto, kind: type[P]) -> P:
        """A call with one answer; its name is in the request's: `FetchRequest` is for `Fetch`."""
        self.check_open()
        call = self._channel.unary_unary(
            _SERVICE + type(request).__name__.removesuffix("Request"),
            request_serializer=_serialized,
            response_deserializer=kind.FromString,
        )
        try:
            return await call(request, metadata=self._metadata)
        except aio.AioRpcError as error:
            raise error_of(error) from None

    def listen(self, request: Proto, kind: type[P]) -> aio.UnaryStreamCall[Proto, P]:
        """A call with many answers."""
        self.check_open()
        return self._channel.unary_stream(
            _SERVICE + type(request).__name__.removesuffix("Request"),
            request_serializer=_serialized,
            response_deserializer=kind.FromString,
        )(request, metadata=self._metadata)

    def talk(self, name: str, kind: type[P]) -> aio.StreamStreamCall[Proto, P]:
        """A call that goes both ways."""
        self.check_open()
        return self._channel.stream_stream(
            _SERVICE + name, request_serializer=_serialized, response_deserializer=kind.FromString
        )(metadata=self._metadata)


async def answers(call: Any) -> AsyncIterator[Any]:
    """What comes of a stream, until it ends; errors as Runnel has them."""
    try:
        while (answer := await call.read()) is not aio.EOF:
            yield answer
        code = await call.code()
    except aio.AioRpcError as error:
        raise error_of(error) from None
    if code is not grpc.StatusCode.OK:
        raise _error(code, await call.details(), await call.trailing_metadata())


async def say(call: Any, request: Proto) -> None:
    """One more request of a stream. Raises what the call has ended with, if it has."""
    try:
        await call.write(request)
    except asyncio.InvalidStateError:
        told = await call.code(), await call.details(), await call.trailing_metadata()
        raise _error(*told) from None
    except aio.AioRpcError as error:
        raise error_of(error) from None


def error_of(error: aio.AioRpcError) -> RunnelError:
    """What the call's status and trailing metadata tell."""
    return _error(error.code(), error.details(), error.trailing_metadata())


def _error(code: grpc.StatusCode, text: str | None, trailing: Any) -> RunnelError:
    told = dict(trailing or ())
    if "runnel-code" not in told:
        is_lost = code in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.OK,
            grpc.StatusCode.CANCELLED,
        )
        if is_lost or (code is grpc.StatusCode.INTERNAL and text == _CALL_ENDED):
            return ConnectionLostError(text or "")
        return RunnelError(f"{code.name}: {text}")
    error = from_details(
        told["runnel-code"], text or "", json.loads(told.get("runnel-details") or "{}")
    )
    assert told["runnel-retriable"] == ("true" if error.retriable else "false")
    # For tests that look at the protocol itself.
    error.status = code  # type: ignore[attr-defined]
    return error


def _serialized(request: Proto) -> bytes:
    return request.SerializeToString()
