"""Connections of a Python worker to brokers: one for each address, opened when first needed and kept.

Spark reuses its Python workers, so the next task of the same worker finds it open. A lost connection comes back by
itself; the end of the worker closes it.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from runnel.client.api import connect_blocking
from runnel.client.blocking import BlockingBus
from runnel.formats.wire import DEFAULT_PORT

_CLIENT_NAME: Final = "spark"


class Address(msgspec.Struct, frozen=True):
    """A broker, and how to be let in. It travels to the workers."""

    url: str
    token: str | None = None


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
        bus = _open[key] = connect_blocking(address.url, name=_CLIENT_NAME, token=address.token)
    return bus


def close_connections() -> None:
    """Close those of this process."""
    for key in [key for key in _open if key[0] == os.getpid()]:
        _open.pop(key).close()
