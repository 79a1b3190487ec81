"""Parses the URLs of brokers, and dials their addresses."""

from __future__ import annotations

import asyncio
import os
import ssl as tls
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from runnel.client.connection.link import Dial
from runnel.errors import ClientFault
from runnel.formats.wire import DEFAULT_PORT

_PLAIN: Final = "runnel"
_ENCRYPTED: Final = "runnels"
_OPTIONS: Final = ("ca", "certificate", "key")
_TOKEN_VARIABLE: Final = "RUNNEL_TOKEN"
_ADDRESSES_MAX: Final = 100  # in one URL


class BrokerAddress(msgspec.Struct, frozen=True):
    """A host, a port, and TLS or not."""

    host: str
    port: int
    ssl: tls.SSLContext | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_url(url: str, ssl: tls.SSLContext | None = None) -> BrokerAddress:
    """Parse a URL as `parse_urls` does; returns the first of its addresses."""
    return parse_urls(url, ssl)[0]


def parse_urls(url: str, ssl: tls.SSLContext | None = None) -> Sequence[BrokerAddress]:
    """Parse runnel://host[:port], or runnels://… for TLS. Several addresses, with commas, are nodes of one broker.

    TLS options: `?ca=FILE` for a private authority; `certificate=FILE` and `key=FILE` for a client certificate. A
    context given as `ssl` takes precedence over them.
    """
    try:
        parts = urlsplit(url)
        nodes = [urlsplit(f"//{node}") for node in parts.netloc.split(",")]
        places = [(node.hostname, node.port or DEFAULT_PORT) for node in nodes]
    except ValueError as error:
        raise ClientFault(f"{url!r} is not a Runnel URL: {error}") from None
    hosts = [host for host, _ in places if host]
    is_complete = len(hosts) == len(places) and parts.path in ("", "/")
    if parts.scheme not in (_PLAIN, _ENCRYPTED) or not is_complete:
        raise ClientFault(
            f"{url!r} is not a Runnel URL: runnel://host[:port], or runnels://host[:port] for TLS; "
            "several nodes of one broker with commas: runnel://host1,host2"
        )
    if any(node.username is not None or node.password is not None for node in nodes):
        raise ClientFault(
            f"the URL for {', '.join(hosts)} has a user or password, and Runnel's have none: runnel://host[:port] "
            "(a program gives its token apart, to `connect`)"
        )
    if len(places) > _ADDRESSES_MAX:
        raise ClientFault(f"{len(places)} addresses in a URL; at most {_ADDRESSES_MAX} are tried")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options).difference(_OPTIONS)):
        raise ClientFault(f"{unknown[0]!r} in {url!r} is unknown: {', '.join(_OPTIONS)}")
    context: tls.SSLContext | None = None
    if parts.scheme == _ENCRYPTED:
        context = ssl or _context(options)
    elif options or ssl is not None:
        raise ClientFault(f"{url!r} is without TLS, but has options of it: runnels://…")
    return [BrokerAddress(host or "", port, context) for host, port in dict.fromkeys(places)]


def parse_host(address: str, ssl: tls.SSLContext | None) -> BrokerAddress:
    """Parse host:port, as routes name other nodes. It uses TLS if the first connection does."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        host, port = None, 0
    if not host:
        raise ClientFault(f"the broker named {address!r} as an address: it must be host:port")
    return BrokerAddress(host, port, ssl)


def token_from_environment() -> str | None:
    """The token for programs that give none. Fewer people see a variable than the arguments of a command."""
    return os.environ.get(_TOKEN_VARIABLE, "").strip() or None


def _context(options: dict[str, str]) -> tls.SSLContext:
    try:
        context = tls.create_default_context(cafile=options.get("ca"))
        if "certificate" in options:
            context.load_cert_chain(options["certificate"], options.get("key"))
    except (OSError, tls.SSLError) as error:
        files = " ".join(f"{name}={value}" for name, value in options.items())
        raise ClientFault(f"TLS options cannot be used: {error} ({files})") from None
    return context


def dial_to(address: BrokerAddress) -> Dial:
    """A dial over TCP, with TLS if the address says so."""

    async def dial(
        protocol_factory: Callable[[], asyncio.BufferedProtocol],
    ) -> asyncio.BaseTransport:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            protocol_factory,
            address.host,
            address.port,
            ssl=address.ssl,
            server_hostname=address.host if address.ssl is not None else None,
        )
        return transport

    return dial
