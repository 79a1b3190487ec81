"""The listeners that the suite runs against, and the broker in process. Another one is one more line in `LISTENERS`.

Each opens a broker for the settings and the clock of a test, and gives a factory of clients: anything with the verbs
of `Bus`. `cannot` lists the abilities that a listener lacks; tests that need them are not run there.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, cast

import msgspec

import runnel
from runnel.client import Bus
from runnel.config import GrpcSettings, HttpSettings, Settings
from runnel.embedded import MEMORY
from runnel.protocols.grpc.listener import GrpcListener
from runnel.protocols.http.listener import HttpListener
from runnel.testing import VirtualClock, open_cluster
from tests.conformance.clients.grpc_bus import connect_grpc
from tests.conformance.clients.http_bus import connect_http
from tests.fakes.moving_shards import moving_shards

# Opens a client that is closed at the end of the `async with`.
Connect = Callable[[], AbstractAsyncContextManager[Bus]]


class Ability(enum.Enum):
    """Abilities that some listeners lack."""

    RESTART = "what is kept on disk is there when the broker is opened again"
    STORED = "level stored is reached"
    BATCHES = "messages travel as batches: of several topics, in columns, compressed"
    NAMED = "publishers have names, so that what is sent twice is stored once"
    SHARDS = "shards are listed and read"
    CREDIT = "a reader says how much may be under way to it"
    OFFSETS = "a live subscription begins at offsets"
    TOLD = "a consumer hears at once that the broker has ended it"
    GREETING = "a client is told of the broker when it connects"
    ALONE = "one broker has everything, and few shards"
    NATIVE = "the client is the one that comes with Runnel"


Open = Callable[[Settings, VirtualClock], AbstractAsyncContextManager[Connect]]


@dataclass(frozen=True)
class ListenerSetup:
    name: str
    open: Open
    is_on_disk: bool
    cannot: frozenset[Ability] = frozenset()
    suites: frozenset[str] | None = None  # the modules that it is there for; None: all

    def can(self, needs: frozenset[Ability]) -> bool:
        return not needs & self.cannot

    def is_for(self, module: str) -> bool:
        return self.suites is None or module.rpartition(".")[2] in self.suites

    def data(self, directory: str) -> str:
        """The data directory of its broker: this directory of the test, or memory."""
        return directory if self.is_on_disk else MEMORY


@asynccontextmanager
async def _in_process(settings: Settings, clock: VirtualClock) -> AsyncIterator[Connect]:
    async with runnel.Broker.open(settings, clock=clock) as broker:
        yield broker.connect


@asynccontextmanager
async def _over_tcp(settings: Settings, clock: VirtualClock) -> AsyncIterator[Connect]:
    async with runnel.Broker.open(settings, clock=clock) as broker, broker.listen() as url:
        yield lambda: runnel.connect(url)


@asynccontextmanager
async def _over_http(settings: Settings, clock: VirtualClock) -> AsyncIterator[Connect]:
    http = HttpSettings(listen=_ANYWHERE, idle_timeout_ns=_NEVER_NS)
    settings = msgspec.structs.replace(settings, http=http)
    async with runnel.Broker.open(settings, clock=clock) as broker:
        listener = await HttpListener.open(broker._core, broker._authenticator, settings)
        async with _closing(listener):
            yield cast(Connect, lambda: connect_http(listener.address, now_ns=clock.time_ns))


@asynccontextmanager
async def _over_grpc(settings: Settings, clock: VirtualClock) -> AsyncIterator[Connect]:
    grpc = GrpcSettings(listen=_ANYWHERE)
    settings = msgspec.structs.replace(settings, grpc=grpc)
    async with runnel.Broker.open(settings, clock=clock) as broker:
        listener = await GrpcListener.open(broker._core, broker._authenticator, settings)
        async with _closing(listener):
            yield cast(Connect, lambda: connect_grpc(listener.address, now_ns=clock.time_ns))


@asynccontextmanager
async def _over_moving_nodes(settings: Settings, clock: VirtualClock) -> AsyncIterator[Connect]:
    async with (
        open_cluster(3, settings, clock=clock) as cluster,
        moving_shards(cluster, pause_s=_BETWEEN_MOVES_S, is_disk_only=True),
    ):
        addresses = ",".join(node.url.removeprefix("runnel://") for node in cluster.nodes)
        yield lambda: runnel.connect(f"runnel://{addresses}")


@asynccontextmanager
async def _http_of_nodes(settings: Settings, clock: VirtualClock) -> AsyncIterator[Connect]:
    """One node of three, for clients that know nothing of the others."""
    http = HttpSettings(listen=_ANYWHERE, idle_timeout_ns=_NEVER_NS)
    settings = msgspec.structs.replace(settings, http=http)
    async with open_cluster(3, settings, clock=clock) as cluster:
        broker = cluster.nodes[0].broker
        listener = await HttpListener.open(
            broker._core, broker._authenticator, settings, broker.make_access
        )
        async with (
            _closing(listener),
            moving_shards(cluster, pause_s=_BETWEEN_MOVES_S, is_disk_only=True),
        ):
            yield cast(Connect, lambda: connect_http(listener.address, now_ns=clock.time_ns))


@asynccontextmanager
async def _grpc_of_nodes(settings: Settings, clock: VirtualClock) -> AsyncIterator[Connect]:
    settings = msgspec.structs.replace(settings, grpc=GrpcSettings(listen=_ANYWHERE))
    async with open_cluster(3, settings, clock=clock) as cluster:
        broker = cluster.nodes[0].broker
        listener = await GrpcListener.open(
            broker._core, broker._authenticator, settings, broker.make_access
        )
        async with (
            _closing(listener),
            moving_shards(cluster, pause_s=_BETWEEN_MOVES_S, is_disk_only=True),
        ):
            yield cast(Connect, lambda: connect_grpc(listener.address, now_ns=clock.time_ns))


@asynccontextmanager
async def _closing(listener: HttpListener | GrpcListener) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await listener.close()


_ANYWHERE: Final = "127.0.0.1:0"
# Tests let days pass within a moment. No connection may be idle for that long.
_NEVER_NS: Final = 10_000 * 86_400 * 1_000_000_000

_BETWEEN_MOVES_S: Final = 0.02

# What the client does with several nodes by itself.
_BY_PARTS: Final = frozenset(
    {
        "test_consuming",
        "test_dead_letters",
        "test_fetching",
        "test_live_transition",
        "test_named_publishers",
        "test_publishing",
        "test_shards",
        "test_slow_readers",
        "test_subscribing",
        "test_subscriptions",
    }
)

# What a node relays for clients that know nothing of nodes.
_RELAYED: Final = frozenset(
    {"test_fetching", "test_shards", "test_slow_readers", "test_subscribing", "test_topics"}
)
_CONSUMED: Final = frozenset({"test_consuming", "test_dead_letters", "test_subscriptions"})
_IN_A_CLUSTER: Final = frozenset({Ability.RESTART, Ability.ALONE})

_FORGETS = frozenset({Ability.RESTART, Ability.STORED})
# A REST request is about one topic and single messages. TCP decides how far a stream runs ahead of its reader. A
# consumer has no connection: it exists again with its next request, also after it was replaced or removed.
_NOT_OVER_HTTP = frozenset(
    {
        Ability.BATCHES,
        Ability.NAMED,
        Ability.SHARDS,
        Ability.CREDIT,
        Ability.OFFSETS,
        Ability.TOLD,
        Ability.GREETING,
        Ability.NATIVE,
    }
)
# The windows of HTTP/2 decide how far a stream runs ahead of its reader.
_NOT_OVER_GRPC = frozenset({Ability.CREDIT, Ability.NATIVE})

LISTENERS = (
    ListenerSetup("in process, in memory", _in_process, is_on_disk=False, cannot=_FORGETS),
    ListenerSetup("in process, on disk", _in_process, is_on_disk=True),
    ListenerSetup("tcp, on disk", _over_tcp, is_on_disk=True),
    ListenerSetup(
        "three nodes whose shards move",
        _over_moving_nodes,
        is_on_disk=True,
        cannot=_IN_A_CLUSTER,
        suites=_BY_PARTS,
    ),
    ListenerSetup("http, on disk", _over_http, is_on_disk=True, cannot=_NOT_OVER_HTTP),
    ListenerSetup("grpc, on disk", _over_grpc, is_on_disk=True, cannot=_NOT_OVER_GRPC),
    ListenerSetup(
        "http at one of three nodes whose shards move",
        _http_of_nodes,
        is_on_disk=True,
        cannot=_NOT_OVER_HTTP | _IN_A_CLUSTER,
        suites=_RELAYED,
    ),
    ListenerSetup(
        "grpc at one of three nodes whose shards move",
        _grpc_of_nodes,
        is_on_disk=True,
        cannot=_NOT_OVER_GRPC | _IN_A_CLUSTER,
        suites=_RELAYED | _CONSUMED,
    ),
)
