"""A client of the service, built from its description alone, like a generated one."""

from __future__ import annotations

from typing import Any

import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from runnel.protocols.grpc.generated import runnel_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Runnel"]


class Stub:
    """Each method of the service as an attribute: `await stub.Publish(request)`, `stub.Subscribe(request)` …"""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        for method in SERVICE.methods:
            kinds = {
                (False, False): channel.unary_unary,
                (False, True): channel.unary_stream,
                (True, True): channel.stream_stream,
            }
            make: Any = kinds[method.client_streaming, method.server_streaming]
            callable_ = make(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, callable_)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the service has no method {name}")
