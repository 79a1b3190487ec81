"""A broker that asks for tokens, with all its listeners open, and clients of each listener with the same verbs."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import msgspec

import runnel
from runnel.broker.limits.quotas import Quotas
from runnel.client import Bus
from runnel.config import (
    Authentication,
    GrpcSettings,
    HttpSettings,
    LogSettings,
    SecuritySettings,
    Settings,
    TopicRule,
)
from runnel.protocols.grpc.listener import GrpcListener
from runnel.protocols.http.listener import HttpListener
from runnel.security.rights import Grant, TokenQuotas
from runnel.security.tokens import TokenFile, new_token
from runnel.testing import VirtualClock
from tests.conformance.clients.grpc_bus import connect_grpc
from tests.conformance.clients.http_bus import connect_http

LISTENER_CLASSES: Final[dict[str, Any]] = {"http": HttpListener, "grpc": GrpcListener}
LISTENERS: Final = ("native", "http", "grpc")
EVERYTHING: Final = tuple(
    f"{right}:{pattern}"
    for right in ("publish", "read", "consume", "admin")
    for pattern in ("*", "!*")
)
# A test that waits longer waits in vain.
_PATIENCE_S: Final = 30.0
_USUAL: Final = SecuritySettings()
ANYWHERE: Final = HttpSettings(listen="127.0.0.1:0")
# Time passes ten times as fast: the broker delays clients that send wrong tokens.
_TICK_S: Final = 0.001
_TICK_NS: Final = 10_000_000


class Guarded:
    """Its listeners, and tokens for them."""

    def __init__(
        self, file: TokenFile, clock: VirtualClock, addresses: dict[str, str], quotas: Quotas
    ) -> None:
        self.addresses = addresses
        self._quotas = quotas
        self.clock = clock
        self._file = file
        self._numbers = itertools.count(1)
        self._opened = AsyncExitStack()

    def token(
        self,
        *allow: str,
        name: str | None = None,
        connections_max: int | None = None,
        quotas: TokenQuotas | None = None,
    ) -> str:
        """A new one, with these rights."""
        grants = [Grant.parse(text) for text in allow]
        entry, text = new_token(
            name or f"t{next(self._numbers)}",
            grants,
            now_ns=self.clock.time_ns(),
            connections_max=connections_max,
            quotas=quotas,
        )
        with self._file.changing() as tokens:
            tokens.append(entry)
        return text

    def has_waiting_reads(self, name: str) -> bool:
        """Whether fetches with the token of this name wait for its rate."""
        return self._quotas._accounts[name]._out_turn.locked()

    def revoke(self, text: str) -> None:
        token_id = text.split("_")[1]
        with self._file.changing() as tokens:
            tokens[:] = [token for token in tokens if token.id != token_id]

    def connecting(self, listener: str, token: str | None) -> AbstractAsyncContextManager[Bus]:
        """A client that shows this."""
        address = self.addresses[listener]
        if listener == "native":
            return runnel.connect(address, token=token)
        connect: Any = {"http": connect_http, "grpc": connect_grpc}[listener]
        return cast("AbstractAsyncContextManager[Bus]", connect(address, token))

    async def client(self, listener: str, *allow: str) -> Bus:
        """A client with a new token of these rights; closed at the end of the test."""
        return await self._opened.enter_async_context(self.connecting(listener, self.token(*allow)))

    async def close(self) -> None:
        await self._opened.aclose()


@asynccontextmanager
async def open_guarded(
    directory: Path,
    *listeners: str,
    http: HttpSettings = ANYWHERE,
    security: SecuritySettings = _USUAL,
    topics: tuple[TopicRule, ...] = (),
) -> AsyncIterator[Guarded]:
    """The native listener is always open; of the others, these."""
    settings = Settings(
        data=str(directory / "data"),
        log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0),
        http=msgspec.structs.replace(http, listen="127.0.0.1:0"),
        grpc=GrpcSettings(listen="127.0.0.1:0"),
        security=msgspec.structs.replace(
            security,
            authentication=Authentication.TOKEN,
            tokens_file=str(directory / "tokens.json"),
        ),
        topics=topics,
    )
    clock = VirtualClock()
    async with AsyncExitStack() as opened:
        broker = await opened.enter_async_context(runnel.Broker.open(settings, clock=clock))
        native = await opened.enter_async_context(broker.listen())
        addresses = {"native": native}
        for name in {*listeners} - {"native"}:
            listener = await LISTENER_CLASSES[name].open(
                broker._core, broker._authenticator, settings
            )
            opened.push_async_callback(listener.close)
            addresses[name] = listener.address
        guarded = Guarded(
            TokenFile(directory / "tokens.json"), clock, addresses, broker._core.quotas
        )
        ticking = asyncio.get_running_loop().create_task(_tick(clock))
        opened.push_async_callback(_ended, ticking)
        opened.push_async_callback(guarded.close)
        yield guarded


async def _tick(clock: VirtualClock) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        clock.advance(_TICK_NS)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def run_guarded(
    scenario: Callable[[Guarded], Awaitable[None]],
    *listeners: str,
    http: HttpSettings = ANYWHERE,
    security: SecuritySettings = _USUAL,
    topics: tuple[TopicRule, ...] = (),
) -> None:
    """A test, with a broker of its own and these listeners besides the native one."""

    async def run(directory: Path) -> None:
        opening = open_guarded(directory, *listeners, http=http, security=security, topics=topics)
        async with asyncio.timeout(_PATIENCE_S), opening as guarded:
            await scenario(guarded)

    with tempfile.TemporaryDirectory(prefix="runnel-test-") as directory:
        asyncio.run(run(Path(directory)))
