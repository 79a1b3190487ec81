"""Connections of a Python worker to brokers: one for each address, opened when first needed and kept.

Spark reuses its Python workers, so the next task of the same worker finds it open. A lost connection comes back by
itself; the end of the worker closes it.
"""

from __future__ import annotations

import os
import time
from typing import Final, Generic, TypeVar

import msgspec
from pyspark import TaskContext

from runnel.client import BlockingBus, connect_blocking
from runnel.client.connection import backoff_s, token_from_environment
from runnel.errors import Unavailable
from runnel.formats.wire import DEFAULT_PORT

_CLIENT_NAME: Final = "spark"
# How long anything may wait for a broker. A task waits as long for its first connection, for the query was planned
# with a broker that was there: it may be starting again. Planning itself does not: its user is waiting for it.
_DEADLINE_S: Final = 30.0


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BrokerLogin(msgspec.Struct, frozen=True):
    """A broker, and how to be let in. It travels to the workers.

    Without a token, that of the variable RUNNEL_TOKEN where the query is planned: workers elsewhere need not have it.
    """

    url: str
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is None:
            msgspec.structs.force_setattr(self, "token", token_from_environment())

    def __repr__(self) -> str:
        return f"Address({self.url!r})"  # it may get into a plan or a line of diagnostics; the token must not


class ProcessCache(Generic[_Key, _Value]):
    """Objects that stay open for the next task of this process.

    Each process sees only its own: a worker that was forked off another must not use that one's sockets.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, _Key], _Value] = {}

    def get(self, key: _Key) -> _Value | None:
        return self._values.get((os.getpid(), key))

    def put(self, key: _Key, value: _Value) -> None:
        self._values[os.getpid(), key] = value

    def pop(self, key: _Key) -> _Value | None:
        return self._values.pop((os.getpid(), key), None)

    def pop_all(self) -> list[_Value]:
        own = [key for pid, key in self._values if pid == os.getpid()]
        return [value for key in own if (value := self.pop(key)) is not None]


_connections: Final[ProcessCache[BrokerLogin, BlockingBus]] = ProcessCache()


def usual_url() -> str:
    """Where to connect when nobody says: decided once, where the query is planned."""
    return os.environ.get("RUNNEL_URL") or f"runnel://127.0.0.1:{DEFAULT_PORT}"


def connection(address: BrokerLogin) -> BlockingBus:
    """This process's connection to a broker."""
    bus = _connections.get(address)
    if bus is None:
        backoff = Backoff(_DEADLINE_S if TaskContext.get() is not None else 0.0)
        bus = connected(address, _CLIENT_NAME, _DEADLINE_S, backoff)
        _connections.put(address, bus)
    return bus


def connected(address: BrokerLogin, name: str, deadline_s: float, backoff: Backoff) -> BlockingBus:
    """A new connection, tried for as long as there is patience."""
    while True:
        try:
            return connect_blocking(
                address.url, name=name, token=address.token, deadline_s=deadline_s
            )
        except Unavailable as error:
            backoff.wait_or_raise(error)


class Backoff:
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
    for bus in _connections.pop_all():
        bus.close()
