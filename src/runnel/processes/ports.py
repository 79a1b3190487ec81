"""The ports of a broker of several processes: the parent holds them, whichever of its children live.

Native and HTTP children inherit the parent's listening sockets and accept from them. grpcio binds its port itself, so
its children bind the same port with SO_REUSEPORT. Any process of this user could then join them and get a part of the
connections; so brokers do that under a lock for each port.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import Final, Self

from runnel.config import Authentication, Settings
from runnel.errors import SettingsError
from runnel.platform.addresses import Endpoint, format_address
from runnel.platform.diagnostics import get_logger
from runnel.platform.extras import has_extra, how_to_install
from runnel.platform.listening_socket import listen

logger = get_logger("runnel")

_LOCK_MODE: Final = 0o600


class SharedPorts:
    """The open ports. Make them with `await SharedPorts.open(…)`, and close them when the children are told to end."""

    def __init__(self) -> None:
        self.sockets: Final[dict[str, socket.socket]] = {}
        self.addresses: Final[dict[str, str]] = {}
        """`host:port` of each listener, in the order native, HTTP, gRPC."""
        self._grpc: _ReusedPort | None = None

    @classmethod
    async def open(cls, settings: Settings) -> Self:
        """SettingsError says which port cannot be had, and why."""
        ports = cls()
        try:
            await ports._open(settings)
        except BaseException:
            ports.close()
            raise
        return ports

    async def _open(self, settings: Settings) -> None:
        asks = settings.security.authentication is not Authentication.NONE
        wanted = {
            "native": (settings.native.listen, settings.native.allow_remote),
            "http": (settings.http.listen, settings.http.allow_remote),
            "grpc": (settings.grpc.listen, settings.grpc.allow_remote),
        }
        for name, (address, allow_remote) in wanted.items():
            if address is None:
                continue
            if name != "native" and not has_extra(name):
                logger.info(
                    f"the {name} listener stays closed; to open it, " + how_to_install(name)
                )
                continue
            listening = await listen(
                address, section=name, is_allowed_remotely=asks or allow_remote
            )
            self.addresses[name] = format_address(*listening.getsockname()[:2])
            if name == "grpc":
                self._grpc = _ReusedPort(listening)
            else:
                self.sockets[name] = listening

    def close(self) -> None:
        """Close the parent's ends; the children's stay open. May be called again."""
        for listening in self.sockets.values():
            listening.close()
        if self._grpc is not None:
            self._grpc.close()
            self._grpc = None


class _ReusedPort:
    """A port that children bind with SO_REUSEPORT: reserved by a socket that does not listen, and locked."""

    def __init__(self, listening: socket.socket) -> None:
        """`listening` has shown that nobody else listens there; it is closed."""
        endpoint = Endpoint(listening.family, listening.getsockname())
        self._lock = _lock(endpoint)
        listening.close()
        # It gets no connections, but keeps the number from other users and from being chosen for port 0.
        self._reserving = socket.socket(endpoint.family, socket.SOCK_STREAM)
        try:
            self._reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._reserving.bind(endpoint.address)
        except OSError as error:
            self.close()
            raise SettingsError(f"grpc.listen: cannot bind {endpoint}: {error.strerror}") from None

    def close(self) -> None:
        self._reserving.close()
        os.close(self._lock)


def _lock(endpoint: Endpoint) -> int:
    """A descriptor with the lock of a port. Only processes of one user can share a port, so each user has its locks."""
    name = f"runnel-{os.geteuid()}-grpc-{endpoint.address[1]}.lock"
    path = Path(tempfile.gettempdir()) / name
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _LOCK_MODE)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        problem = f"cannot lock {path}: {error.strerror}"
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            problem = f"the address {endpoint} is in use by another broker (it holds {path})"
        raise SettingsError(f"grpc.listen: {problem}") from None
    return descriptor
