"""Opens a bus: by URL, or over any transport."""

from __future__ import annotations

import os
import ssl as tls
from collections.abc import Callable, Generator, Sequence
from importlib import metadata
from types import TracebackType
from typing import Any, Final

from runnel.client.blocking import BlockingBus
from runnel.client.bus import Bus
from runnel.client.connection import (
    Dial,
    DialTarget,
    Identity,
    Link,
    LoopTimers,
    Router,
    Timers,
    dial_to,
    parse_host,
    parse_urls,
    token_from_environment,
)
from runnel.errors import ClientFault

_DEFAULT_URL: Final = "runnel://127.0.0.1:7470"
# The commands use the same variable.
_URL_VARIABLE: Final = "RUNNEL_URL"


class Opening:
    """A bus that is being opened: `async with connect(…) as bus`, or `bus = await connect(…)` and close it."""

    def __init__(
        self,
        home: Sequence[DialTarget],
        dial_elsewhere: Callable[[str], Dial],
        *,
        timers: Timers | None,
        name: str | None,
        token: str | None,
        deadline_s: float | None,
        connect_timeout_s: float,
        advice: str = "",
    ) -> None:
        self._home = home
        self._dial_elsewhere = dial_elsewhere
        self._timers = timers
        self._identity = Identity(client=_client_text(name), token=token)
        self._deadline_s = deadline_s
        self._connect_timeout_s = connect_timeout_s
        self._advice = advice
        self._bus: Bus | None = None

    def __await__(self) -> Generator[Any, None, Bus]:
        return self._open().__await__()

    async def __aenter__(self) -> Bus:
        self._bus = await self._open()
        return self._bus

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bus is not None:
            # After an error, a program does not want to wait for acknowledgements first.
            await self._bus.close(is_flushing=error is None)

    async def _open(self) -> Bus:
        timers = self._timers or LoopTimers()

        def link_to(address: str) -> Link:
            return self._link(DialTarget(address, self._dial_elsewhere(address)), timers)

        first, *others = self._home
        home = self._link(first, timers, others, self._advice)
        await home.connect()
        router = Router(home, link_to, timers, self._dial_elsewhere)
        return Bus(router, timers, deadline_s=self._deadline_s)

    def _link(
        self,
        endpoint: DialTarget,
        timers: Timers,
        others: Sequence[DialTarget] = (),
        advice: str = "",
    ) -> Link:
        return Link(
            endpoint.address,
            endpoint.dial,
            self._identity,
            timers,
            connect_timeout_s=self._connect_timeout_s,
            advice=advice,
            others=others,
        )


def connect(
    url: str | None = None,
    *,
    name: str | None = None,
    token: str | None = None,
    deadline_s: float | None = 30,
    connect_timeout_s: float = 5,
    ssl: tls.SSLContext | None = None,
    timers: Timers | None = None,
) -> Opening:
    """Open a bus to the broker at a URL. The default is the variable RUNNEL_URL, or the broker on this machine.

    The broker lists the connection with `name`. `token` authenticates the client; the default is the variable
    RUNNEL_TOKEN. `deadline_s` limits every wait; None: no limit. TLS: runnels://…, with `ssl` or the options in the
    URL (`parse_urls`). The first connection is tried once; a lost connection is restored. Several addresses in the URL,
    runnel://a,b:7471,c, are nodes of one broker: each of them is as good, and replaces one that is lost.
    """
    addresses = parse_urls(url if url is not None else _usual_url(), ssl)
    return Opening(
        [DialTarget(str(address), dial_to(address)) for address in addresses],
        lambda elsewhere: dial_to(parse_host(elsewhere, addresses[0].ssl)),
        timers=timers,
        name=name,
        token=token if token is not None else token_from_environment(),
        deadline_s=deadline_s,
        connect_timeout_s=connect_timeout_s,
        advice=". Is a broker running there? `runnel serve` starts one",
    )


def open_bus(
    dial: Dial,
    *,
    timers: Timers | None = None,
    address: str = "in-process",
    name: str | None = None,
    deadline_s: float | None = 30,
    connect_timeout_s: float = 5,
    dial_elsewhere: Callable[[str], Dial] | None = None,
) -> Opening:
    """Open a bus over any transport: `dial` connects a protocol to a transport, and returns the transport."""

    def nowhere(elsewhere: str) -> Dial:
        raise ClientFault(f"the broker named {elsewhere}, which cannot be reached from {address}")

    return Opening(
        [DialTarget(address, dial)],
        dial_elsewhere or nowhere,
        timers=timers,
        name=name,
        token=None,
        deadline_s=deadline_s,
        connect_timeout_s=connect_timeout_s,
    )


def connect_blocking(
    url: str | None = None,
    *,
    name: str | None = None,
    token: str | None = None,
    deadline_s: float | None = 30,
    connect_timeout_s: float = 5,
    ssl: tls.SSLContext | None = None,
) -> BlockingBus:
    """Open a bus without `await`: its loop runs in a thread of its own. Use it in a `with`, or close it."""

    async def open_it() -> Bus:
        return await connect(
            url,
            name=name,
            token=token,
            deadline_s=deadline_s,
            connect_timeout_s=connect_timeout_s,
            ssl=ssl,
        )

    return BlockingBus(open_it)


def _usual_url() -> str:
    return os.environ.get(_URL_VARIABLE) or _DEFAULT_URL


def _client_text(name: str | None) -> str:
    text = f"runnel-python/{metadata.version('runnel')}"
    return text if name is None else f"{text} {name}"
