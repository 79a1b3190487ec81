"""Addresses that listeners bind to: parsed from `host:port`, resolved, and checked for being loopback."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from runnel.config import GrpcSettings, HttpSettings, NativeSettings
from runnel.errors import SettingsError

# The defaults serve as examples in error messages.
_EXAMPLES: Final[Mapping[str, str | None]] = {
    "native.listen": NativeSettings().listen,
    "http.listen": HttpSettings().listen,
    "grpc.listen": GrpcSettings().listen,
}


class Endpoint(NamedTuple):
    """A resolved address to bind to."""

    family: int
    address: tuple[Any, ...]  # host and port; IPv6 has two more fields

    def __str__(self) -> str:
        return format_address(*self.address[:2])

    @property
    def is_loopback(self) -> bool:
        return _is_loopback(self.address[0])


def parse_address(text: str, *, key: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`; `key` names the setting in an error."""
    host, separator, port = text.rpartition(":")
    example = _EXAMPLES.get(key) or "127.0.0.1:7470"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        _, _, usual_port = example.rpartition(":")
        raise SettingsError(
            f'{key} = "{text}": an IPv6 address stands in brackets, as "[::1]:{usual_port}"'
        )
    if not separator or not host:
        raise SettingsError(f'{key} = "{text}" is not host:port, as "{example}"')
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise SettingsError(f'{key} = "{text}": the port {port!r} is not a number from 0 to 65535')
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches `host:port`; the host must be an IP address."""
    host, _, _ = address.rpartition(":")
    return _is_loopback(host.strip("[]"))


def _is_loopback(host: str) -> bool:
    ip, _, _ = host.partition("%")  # fe80::1%eth0
    return ipaddress.ip_address(ip).is_loopback


async def resolve(text: str, *, key: str) -> Endpoint:
    """Resolve `host:port` to its first IP address."""
    host, port = parse_address(text, key=key)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f'{key} = "{text}": {host!r} is no address here: {error}') from None
    for family, _, _, _, address in found:
        if family in (socket.AF_INET, socket.AF_INET6):
            return Endpoint(family, (str(address[0]), *address[1:]))
    raise SettingsError(f'{key} = "{text}": {host!r} is no IP address here')
