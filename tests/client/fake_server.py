"""A broker made of frames only, on a real socket: it answers as usual unless a test says otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, cast

import msgspec

from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.envelope import pack64
from runnel.formats.frames import FrameReader
from runnel.formats.message import Message

H = TypeVar("H", bound=wire.Head)
Reaction = Callable[["Peer", H, memoryview], None]

RECEIVE_TIME_NS = 1_700_000_000_000_000_000


class Peer(asyncio.Protocol):
    """One client, as the server sees it."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.has_subscribed = False
        self._frames = FrameReader(2**27)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.server.peers.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.server.peers:
            self.server.peers.remove(self)

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            request = wire.decode_request(frame)
            self.server.requests.append(request)
            self.has_subscribed = self.has_subscribed or isinstance(request, wire.Subscribe)
            self.server.react(self, request, frame.tail)

    def say(self, head: wire.Head, tail: bytes = b"") -> None:
        self.transport.write(wire.encode(head, len(tail)) + tail)

    def deliver(self, number: int, batches: Sequence[Batch], *, next_entry: int) -> None:
        """Batches of journal main."""
        tail = b"".join(batch.pack() for batch in batches)
        self.say(wire.Deliver(number, "main", 0, 1, next_entry), tail)


class FakeServer:
    """Takes everything it is asked to publish, and remembers it; subscriptions are the test's to serve."""

    def __init__(
        self,
        *,
        idle_timeout_ms: int = 60_000,
        message_bytes_max: int = 2**20,
        node: str = "",
    ) -> None:
        """With a `node` it is one of several, which `nodes` lists."""
        self.node = node
        self.nodes: list[wire.NodeState] = []
        self.idle_timeout_ms = idle_timeout_ms
        self.message_bytes_max = message_bytes_max
        self.peers: list[Peer] = []
        self.requests: list[wire.Request] = []
        self.batches: list[Batch] = []
        self.stored: dict[tuple[str, int], list[bytes]] = {}
        self.routes: dict[str, wire.Route] = {}
        self.producers: dict[str, tuple[int, int, list[wire.Published]]] = {}
        self.terms = 0
        self.hold_answers = False  # to publishes; `release` gives them
        self._held: list[tuple[Peer, wire.Published]] = []
        self._reactions: dict[type[wire.Head], Callable[..., None]] = {}
        self._late_listeners: asyncio.Server | None = None
        self._port = 0

    # --- Being there ---

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"runnel://{self.address}"

    @property
    def peer(self) -> Peer:
        return self.peers[-1]

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._late_listeners = await loop.create_server(lambda: Peer(self), "127.0.0.1", self._port)
        self._port = self._late_listeners.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from here on, and drop those there are."""
        if self._late_listeners is not None:
            self._late_listeners.close()
            self._late_listeners = None
        for _ in range(5):  # clients that are being admitted come first
            await asyncio.sleep(0)
        while self.peers:
            self.drop()
            await asyncio.sleep(0)

    def drop(self) -> None:
        for peer in self.peers:
            peer.transport.abort()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    # --- Reacting ---

    def on(self, kind: type[H], reaction: Reaction[H]) -> None:
        """React to such requests in the test's way instead of the usual one."""
        self._reactions[kind] = reaction

    def usual(self, kind: type[wire.Head]) -> None:
        self._reactions.pop(kind, None)

    def asked(self, kind: type[H]) -> list[H]:
        return [request for request in self.requests if isinstance(request, kind)]

    def react(self, peer: Peer, request: wire.Request, tail: memoryview) -> None:
        if reaction := self._reactions.get(type(request)):
            reaction(peer, request, tail)
        else:
            self.react_usually(peer, request, tail)

    def react_usually(self, peer: Peer, request: wire.Request, tail: memoryview) -> None:
        match request:
            case wire.Hello():
                peer.say(self._welcome(request))
            case wire.Ping():
                peer.say(wire.Pong(request.id, RECEIVE_TIME_NS))
            case wire.Nodes():
                peer.say(wire.NodeList(request.id, 1, self.nodes))
            case wire.Routes():
                peer.say(wire.RouteList(request.id, [self.route(t) for t in request.topics]))
            case wire.Producer():
                self.terms += 1
                self.producers[request.name] = (self.terms, 0, [])
                peer.say(wire.Term(request.id, self.terms))
            case wire.Publish():
                self._publish(peer, request, Batch.unpack(bytes(tail)))
            case wire.Send():
                offset = self._store(request.topic, request.partition or 0, [request.payload])
                if request.level != "none":
                    peer.say(self._published(request.id, [offset]))
            case wire.Subscribe():
                peer.say(wire.Subscribed(request.id, request.subscription))
            case wire.Unsubscribe() | wire.SetCursor() | wire.RemoveCursor():
                peer.say(wire.Done(request.id))
            case wire.DeleteTopic() | wire.PurgeTopic():
                peer.say(wire.Done(request.id))

    def _welcome(self, request: wire.Hello) -> wire.Welcome:
        return wire.Welcome(
            request.id,
            wire.VERSION,
            (wire.NODES, wire.PARTS) if self.node else (),
            "test",
            self.node or "node-1",
            "fake/1",
            2**24,
            2**22,
            self.message_bytes_max,
            self.idle_timeout_ms,
        )

    def route(self, topic: str) -> wire.Route:
        return self.routes.get(topic) or wire.Route(topic, "disk", [wire.Owner("main", 0, 1)])

    # --- Publishing ---

    def _publish(self, peer: Peer, request: wire.Publish, batch: Batch) -> None:
        head = batch.envelope
        answers: list[wire.Published] = []
        if head.producer is not None:
            term, expected, answers = self.producers[head.producer]
            if head.term < term:
                peer.say(wire.Error(request.id, "producer_fenced", "a newer term", retriable=False))
                return
            if head.number < expected:
                repeated = msgspec.structs.replace(
                    answers[head.number], id=request.id, is_repeated=True
                )
                self._answer(peer, repeated)
                return
            if head.number > expected:
                text = f"{head.number} where {expected} must come"
                peer.say(wire.Error(request.id, "producer_gap", text, retriable=False))
                return
        self.batches.append(batch)
        payloads = [message.payload for message in batch]
        bases = []
        for run in batch.runs():
            bases.append(self._store(run.topic, run.partition, payloads[: run.count]))
            del payloads[: run.count]
        answer = self._published(request.id, bases)
        if head.producer is not None:
            self.producers[head.producer] = (head.term, head.number + 1, [*answers, answer])
        if request.level != "none":
            self._answer(peer, answer)

    def _answer(self, peer: Peer, answer: wire.Published) -> None:
        if self.hold_answers:
            self._held.append((peer, answer))
        else:
            peer.say(answer)

    def release(self, count: int | None = None) -> None:
        """Give the oldest answers that were held back; all of them, if no number is said."""
        released = self._held[:count]
        del self._held[: len(released)]
        for peer, answer in released:
            peer.say(answer)

    def _published(self, request_id: int, bases: Sequence[int]) -> wire.Published:
        return wire.Published(request_id, bases, len(self.batches), 1, RECEIVE_TIME_NS, "stored")

    def _store(self, topic: str, partition: int, payloads: Sequence[bytes]) -> int:
        held = self.stored.setdefault((topic, partition), [])
        held += payloads
        return len(held) - len(payloads) + 1


def refusing(code: str, *, retriable: bool) -> Callable[[Peer, wire.Request, memoryview], None]:
    """A reaction: every such request is refused."""

    def refuse(peer: Peer, request: wire.Request, tail: memoryview) -> None:
        number = getattr(request, "id", 0)
        assert number, f"{request} is not answered"
        peer.say(wire.Error(number, code, f"refused with {code}", retriable=retriable))

    return refuse


def silent(peer: Peer, request: wire.Head, tail: memoryview) -> None:
    """A reaction: no answer."""


def stored_batch(
    topic: str, first_offset: int, payloads: Sequence[bytes], *, entry: int = 1, partition: int = 0
) -> Batch:
    """A batch as a broker delivers it."""
    messages = [Message(topic, payload, partition=partition) for payload in payloads]
    batch = Batch.from_messages(messages)
    batch.envelope = msgspec.structs.replace(
        batch.envelope,
        base_offsets=pack64([first_offset]),
        receive_times=pack64([RECEIVE_TIME_NS]),
        epochs=pack64([1]),
        entries=pack64([entry]),
    )
    return batch
