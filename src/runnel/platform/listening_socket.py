"""Opens a listening socket; an address that other machines reach needs authentication, or an explicit permission."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from runnel.errors import SettingsError
from runnel.platform.addresses import Endpoint, resolve

BACKLOG: Final = 1024


async def listen(text: str, *, section: str, is_allowed_remotely: bool) -> socket.socket:
    """A bound, non-blocking socket. `section` names the settings' section; SettingsError says what is wrong."""
    key = f"{section}.listen"
    endpoint = await resolve(text, key=key)
    if not endpoint.is_loopback and not is_allowed_remotely:
        raise SettingsError(
            f'{key} = "{text}" would let other machines in, and no token is required: any client that reaches '
            "the port may read and write everything. Make a token (`runnel token add NAME --allow RIGHT:PATTERN`) and "
            'set security.authentication = "token"; or listen on 127.0.0.1 or [::1]; or, to let every '
            f"client in, set {section}.allow_remote = true as well"
        )
    return _bind(endpoint, f'{key} = "{text}"')


def own_socket_beside(shared: socket.socket, port: int | None) -> socket.socket:
    """A listening socket on the same host, for the clients of one process among several. None: at a free port."""
    host, _, *rest = shared.getsockname()
    return _bind(Endpoint(shared.family, (host, port or 0, *rest)), "cluster.first_port")


def inherited_socket(descriptor: int) -> socket.socket:
    """The listening socket that this process has inherited. Processes that it starts do not inherit it."""
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - its signature
    return socket.socket(fileno=descriptor)


def _bind(endpoint: Endpoint, given: str) -> socket.socket:
    listening = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: an answer never waits for the acknowledgement of the one before.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind(endpoint.address)
        listening.listen(BACKLOG)
        listening.settimeout(0)
    except OSError as error:
        listening.close()
        problem = f"cannot listen on {endpoint}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            problem = f"the address {endpoint} is in use, perhaps by another broker"
        raise SettingsError(f"{given}: {problem}") from None
    return listening
