"""Connections of a Python worker to brokers: one for each address, opened when first needed and kept.

Spark reuses its Python workers, so the next task of the same worker finds it open. A lost connection comes back by
itself; the end of the worker closes it.
"""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec
from pyspark import TaskContext

from runnel.client.api import connect_blocking, usual_token
from runnel.client.blocking import BlockingBus
from runnel.client.link import backoff_s
from runnel.errors import Unavailable
from runnel.formats.wire import DEFAULT_PORT

_CLIENT_NAME: Final = "spark"
# How long anything may wait for a broker. A task waits as long for its first connection, for the query was planned
# with a broker that was there: it may be starting again. Planning itself does not: its user is waiting for it.
_DEADLINE_S: Final = 30.0


class Address(msgspec.Struct, frozen=True):
    """A broker, and how to be let in. It travels to the workers.

    Without a token, that of the variable RUNNEL_TOKEN where the query is planned: workers elsewhere need not have it.
    """

    url: str
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is None:
            msgspec.structs.force_setattr(self, "token", usual_token())

    def __repr__(self) -> str:
        return f"Address({self.url!r})"  # it may get into a plan or a line of diagnostics; the token must not


# By process too: a worker that was forked off another must not use that one's sockets.
_open: dict[tuple[int, Address], BlockingBus] = {}


def usual_url() -> str:
    """Where to connect when nobody says: decided once, where the query is planned."""
    return os.environ.get("RUNNEL_URL") or f"runnel://127.0.0.1:{DEFAULT_PORT}"


def connection(address: Address) -> BlockingBus:
    """This process's connection to a broker."""
    key = (os.getpid(), address)
    bus = _open.get(key)
    if bus is None:
        patience = Patience(_DEADLINE_S if TaskContext.get() is not None else 0.0)
        bus = _open[key] = connected(address, _CLIENT_NAME, _DEADLINE_S, patience)
    return bus


def connected(address: Address, name: str, deadline_s: float, patience: Patience) -> BlockingBus:
    """A new connection, tried for as long as there is patience."""
    while True:
        try:
            return connect_blocking(
                address.url, name=name, token=address.token, deadline_s=deadline_s
            )
        except Unavailable as error:
            patience.wait_or_raise(error)


class Patience:
    """Waits longer each time, and until a deadline."""

    def __init__(self, seconds: float) -> None:
        self._ends_at_s = time.monotonic() + seconds
        self._attempts = 0

    def wait_or_raise(self, error: Unavailable) -> None:
        self._attempts += 1
        left_s = self._ends_at_s - time.monotonic()
        if left_s <= 0:
            raise error
        time.sleep(min(backoff_s(self._attempts), left_s))


def close_connections() -> None:
    """Close those of this process."""
    for key in [key for key in _open if key[0] == os.getpid()]:
        _open.pop(key).close()
