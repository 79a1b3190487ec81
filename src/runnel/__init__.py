"""Runnel: a message broker that starts with one command and hands its data to Spark.

What programs use stands here; each part is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runnel.client.api import connect, connect_blocking
    from runnel.config import Settings
    from runnel.embedded import Broker
    from runnel.errors import RunnelError
    from runnel.formats.batch import Batch
    from runnel.formats.message import Message

_PLACES = {
    "Batch": "runnel.formats.batch",
    "Broker": "runnel.embedded",
    "Message": "runnel.formats.message",
    "RunnelError": "runnel.errors",
    "Settings": "runnel.config",
    "connect": "runnel.client.api",
    "connect_blocking": "runnel.client.api",
}

__all__ = [
    "Batch",
    "Broker",
    "Message",
    "RunnelError",
    "Settings",
    "connect",
    "connect_blocking",
]


def __getattr__(name: str) -> object:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(place), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
