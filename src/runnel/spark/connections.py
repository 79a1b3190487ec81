"""Connections of a Python worker to brokers: one for each broker, opened when first needed and kept open.

Spark reuses its Python workers, so the next task of a worker finds the connection open. A lost connection reconnects by
itself. The end of the worker closes it.
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
# Time limit for waiting for a broker. A task waits this long for its first connection too: planning has reached the
# broker, so it may be restarting. Planning itself does not wait, because the user is waiting for it.
_DEADLINE_S: Final = 30.0


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BrokerLogin(msgspec.Struct, frozen=True):
    """A broker's URL and the token for it. Spark sends it to the workers.

    The default token is the variable RUNNEL_TOKEN of the process that plans the query: workers need not have it.
    """

    url: str
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is None:
            msgspec.structs.force_setattr(self, "token", token_from_environment())

    def __repr__(self) -> str:
        return f"Address({self.url!r})"  # it may appear in a plan or a log line; the token must not


class ProcessCache(Generic[_Key, _Value]):
    """Objects that stay open for the next task of this process.

    Each process sees only its own objects: a forked worker must not use its parent's sockets.
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


def default_url() -> str:
    """The broker's URL if no option gives it. The process that plans the query decides it once."""
    return os.environ.get("RUNNEL_URL") or f"runnel://127.0.0.1:{DEFAULT_PORT}"


def connection(address: BrokerLogin) -> BlockingBus:
    """This process's connection to a broker."""
    bus = _connections.get(address)
    if bus is None:
        backoff = Backoff(_DEADLINE_S if TaskContext.get() is not None else 0.0)
        bus = open_connection(address, _CLIENT_NAME, _DEADLINE_S, backoff)
        _connections.put(address, bus)
    return bus


def open_connection(
    address: BrokerLogin, name: str, deadline_s: float, backoff: Backoff
) -> BlockingBus:
    """Open a new connection, retrying as long as `backoff` allows."""
    while True:
        try:
            return connect_blocking(
                address.url, name=name, token=address.token, deadline_s=deadline_s
            )
        except Unavailable as error:
            backoff.wait_or_raise(error)


class Backoff:
    """Waits between attempts, longer each time, until a deadline."""

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
    """Close all connections of this process."""
    for bus in _connections.pop_all():
        bus.close()
