"""Live reading over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from runnel.client.results import Gap
from runnel.errors import MalformedError
from runnel.formats.batch import Batch
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.conformance.clients.grpc_forms import batches_of, gap_of, message_of
from tests.conformance.clients.grpc_line import GrpcLine, answers
from tests.conformance.clients.reading import Arrival, RemoteSubscription


class GrpcSubscription(RemoteSubscription):
    """One call of `Subscribe`; `position` is where another one goes on."""

    def __init__(
        self,
        line: GrpcLine,
        request: pb.SubscribeRequest,
        *,
        buffer_bytes: int,
        on_gap: Callable[[Gap], object] | None,
    ) -> None:
        super().__init__(buffer_bytes=buffer_bytes, on_gap=on_gap)
        self.position = request.position
        self.is_closing = False  # the broker said that it is about to go
        self._line = line
        self._request = request
        self._call: Any = None

    async def _begin(self) -> AsyncIterator[Arrival]:
        responses = await self._subscribe()
        return self._arrivals(responses)

    async def _subscribe(self) -> AsyncIterator[pb.SubscribeResponse]:
        self._call = self._line.listen(self._request, pb.SubscribeResponse)
        responses = answers(self._call)
        first = await anext(responses)
        if first.WhichOneof("event") != "subscribed":
            raise MalformedError("response", f"the first is {first}")
        self.position = first.position
        return responses

    async def _end(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _arrivals(
        self, responses: AsyncIterator[pb.SubscribeResponse]
    ) -> AsyncIterator[Arrival]:
        async for response in responses:
            self.position = response.position or self.position
            match response.WhichOneof("event"):
                case "delivery":
                    for message in response.delivery.messages:
                        yield message_of(message)
                case "gap":
                    yield gap_of(response.gap)
                case "closing":
                    self.is_closing = True

    async def batches(self) -> AsyncIterator[Batch]:
        """The same from its beginning, as blocks instead of messages."""
        await self.close()
        self._request.format = pb.FORMAT_BLOCKS
        async for response in await self._subscribe():
            for batch in batches_of(response.delivery.blocks):
                yield batch

    async def to_arrow(self) -> AsyncIterator[Any]:
        async for batch in self.batches():
            yield batch.to_arrow()
