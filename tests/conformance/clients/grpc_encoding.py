"""One gRPC channel: calls by the names of their requests, fields as protobufs, and errors as Runnel has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import msgspec
from google.protobuf.message import Message as Proto
from grpc import aio

from runnel.errors import (
    ClientFault,
    ClosedError,
    ConnectionLostError,
    RunnelError,
    from_details,
)
from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.formats.message import NO_TAGS, Message
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.conformance.clients.remote_publisher import Outgoing

P = TypeVar("P", bound=Proto)

# The library has one thread for all channels and servers. It starts here, before any test, and stays.
aio.init_grpc_aio()

_SERVICE = "/runnel.v1.Runnel/"
# grpcio's text for a request that it cannot hand to a call which ends at that moment.
_CALL_ENDED = "Internal error from Core"
# The broker bounds large answers, not this client.
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class GrpcTransport:
    """One channel. Close it when it is no longer needed."""

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
        """A call with one answer. The request's name has the call's: `FetchRequest` is for `Fetch`."""
        self.check_open()
        call = self._channel.unary_unary(
            _SERVICE + type(request).__name__.removesuffix("Request"),
            request_serializer=_serialized,
            response_deserializer=kind.FromString,
        )
        try:
            return await call(request, metadata=self._metadata)
        except aio.AioRpcError as error:
            raise status_error(error) from None

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
    """The answers of a stream, until it ends. Errors are Runnel's."""
    try:
        while (answer := await call.read()) is not aio.EOF:
            yield answer
        code = await call.code()
    except aio.AioRpcError as error:
        raise status_error(error) from None
    if code is not grpc.StatusCode.OK:
        raise _error(code, await call.details(), await call.trailing_metadata())


async def say(call: Any, request: Proto) -> None:
    """Send one more request of a stream. Raises the error that the call has ended with, if it has."""
    try:
        await call.write(request)
    except asyncio.InvalidStateError:
        told = await call.code(), await call.details(), await call.trailing_metadata()
        raise _error(*told) from None
    except aio.AioRpcError as error:
        raise status_error(error) from None


def status_error(error: aio.AioRpcError) -> RunnelError:
    """The error in the call's status and trailing metadata."""
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


# --- Protobufs ---


def proto_of(kind: type[P], fields: Mapping[str, Any]) -> P:
    """A message with these fields; None leaves a field out. A value that does not fit is a ClientFault."""
    described = kind.DESCRIPTOR.fields_by_name
    made = kind()
    for name, value in fields.items():
        if value is None:
            continue
        try:
            made.MergeFrom(kind(**{name: _encoded(described[name], value)}))
        except (TypeError, ValueError) as error:
            raise ClientFault(f"{name} is {value!r:.200}: {error}") from None
    return made


def _encoded(field: Any, value: Any) -> Any:
    if field.enum_type is not None and isinstance(value, str):
        return _enum_of(field, value)
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return value
    if field.is_repeated:
        return [_nested(field, each) for each in value]
    return _nested(field, value)


def _nested(field: Any, value: Any) -> Proto:
    if isinstance(value, Proto):
        return value
    if isinstance(value, msgspec.Struct):
        value = {
            name: getattr(value, name)
            for name in value.__struct_fields__
            if name in field.message_type.fields_by_name
        }
    kind: type[Proto] = field.message_type._concrete_class
    return proto_of(kind, value)


def _enum_of(field: Any, word: str) -> int:
    """`stored` of Level is LEVEL_STORED."""
    words: dict[str, int] = {
        _word(field, value.number): value.number for value in field.enum_type.values[1:]
    }
    if word not in words:
        raise ClientFault(f"{field.name} {word!r} is unknown: {', '.join(words)}")
    return words[word]


def _word(field: Any, number: int) -> str:
    name: str = field.enum_type.values_by_number[number].name
    return name.removeprefix(f"{field.enum_type.name.upper()}_").lower()


def fields_of(proto: Proto) -> dict[str, Any]:
    """The fields of a message as Python has them. Optional fields that are not set are left out."""
    return {
        field.name: _decoded(field, getattr(proto, field.name))
        for field in proto.DESCRIPTOR.fields
        if not field.has_presence or proto.HasField(field.name)
    }


def _decoded(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        return _word(field, value)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [fields_of(each) if field.message_type is not None else each for each in value]
    return fields_of(value) if field.message_type is not None else value


def message_proto(sent: Outgoing) -> pb.Message:
    message = sent.message
    names = ("topic", "payload", "key", "partition_key", "event_time_ns", "transmit_time_ns", "uid")
    fields = {name: getattr(message, name) for name in names}
    return proto_of(pb.Message, fields | {"partition": sent.partition, "tags": dict(message.tags)})


def message_of(fields: dict[str, Any]) -> Message:
    return Message(**fields | {"tags": fields["tags"] or NO_TAGS})


def batches_of(blocks: Sequence[bytes]) -> list[Batch]:
    """Each block is whole, and no byte follows it."""
    batches = []
    for data in blocks:
        envelope, body, length = block.unpack(memoryview(data), 0)
        assert length == len(data)
        batches.append(Batch(envelope, body))
    return batches


def error_of(told: pb.Error) -> RunnelError:
    return from_details(told.code, told.text, json.loads(told.details or "{}"))
