"""A partner: orders over gRPC, invoices as a stream, with messages generated from proto/runnel/v1/runnel.proto.

python -m examples.demo.grpc_client grpc://127.0.0.1:7490 [NUMBER OF THE FIRST ORDER]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import grpc

from examples.demo.shop import NoAnswerError, RefusedError, Shop
from examples.demo.world import OrderSource
from runnel.protocols.grpc.generated import runnel_pb2 as pb

_SERVICE: Final = "/runnel.v1.Runnel/"
_ANSWER_MAX_S: Final = 10.0
# The library waits longer and longer between attempts to connect: here up to half a second.
_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_ABSENT: Final = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OUT_OF_RANGE)


class GrpcShopClient:
    """A channel, which reconnects by itself."""

    def __init__(self, url: str) -> None:
        channel = grpc.insecure_channel(url.removeprefix("grpc://"), options=_OPTIONS)
        self._publish = channel.unary_unary(
            _SERVICE + "Publish",
            request_serializer=pb.PublishRequest.SerializeToString,
            response_deserializer=pb.PublishResponse.FromString,
        )
        self._fetch = channel.unary_unary(
            _SERVICE + "Fetch",
            request_serializer=pb.FetchRequest.SerializeToString,
            response_deserializer=pb.FetchResponse.FromString,
        )
        self._subscribe = channel.unary_stream(
            _SERVICE + "Subscribe",
            request_serializer=pb.SubscribeRequest.SerializeToString,
            response_deserializer=pb.SubscribeResponse.FromString,
        )
        self._position = b""

    def publish(self, topic: str, payload: bytes, event_time_ns: int) -> int:
        message = pb.Message(topic=topic, payload=payload, event_time_ns=event_time_ns)
        try:
            answer = self._publish(pb.PublishRequest(messages=[message]), timeout=_ANSWER_MAX_S)
        except grpc.RpcError as error:
            raise _away(error) from error
        return int(answer.offsets[0])

    def has(self, topic: str, offset: int) -> bool:
        try:
            request = pb.FetchRequest(topic=topic, offset=offset, messages_max=1)
            return bool(self._fetch(request, timeout=_ANSWER_MAX_S).messages)
        except grpc.RpcError as error:
            if error.code() in _ABSENT:
                return False
            raise _away(error) from error

    def follow(self, topic: str, *, from_now: bool) -> Iterator[int]:
        """Each response has a position, where a later call continues."""
        kind = pb.Start.KIND_LATEST if from_now else pb.Start.KIND_EARLIEST
        request = pb.SubscribeRequest(
            patterns=[topic], start=pb.Start(kind=kind), position=self._position
        )
        try:
            for response in self._subscribe(request):
                yield from (message.offset for message in response.delivery.messages)
                self._position = response.position or self._position
        except grpc.RpcError as error:
            raise _away(error) from error
        raise NoAnswerError  # the broker ended the stream


def _away(error: grpc.RpcError) -> Exception:
    return NoAnswerError() if error.code() in _AWAY else RefusedError(error.details())


def main() -> None:
    url, first = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    Shop(GrpcShopClient(url), GrpcShopClient(url), OrderSource.PARTNER, first).run()


if __name__ == "__main__":
    main()
