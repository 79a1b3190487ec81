"""Runnel: a message broker that starts with one command and hands its data to Spark.

What programs use stands here; each part is imported when it is first asked for.
"""

from __future__ import annotations

# As typing's, whose import takes longer than all else here: until it is done, Ctrl-C shows a traceback.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from runnel.client import Consumer, LateWork, Work, WorkBatch, connect, connect_blocking
    from runnel.config import Settings
    from runnel.embedded import Broker
    from runnel.errors import (
        BusyError,
        ClientFault,
        ClosedError,
        ConnectionLostError,
        CorruptionError,
        DiskFullError,
        HandshakeError,
        InvalidNameError,
        LateAckError,
        LimitExceededError,
        MemberReplacedError,
        OffsetAheadError,
        OffsetGoneError,
        ProducerFencedError,
        QuotaExceededError,
        ReadOnlyError,
        RunnelError,
        SettingsError,
        SlowReaderError,
        SubscriptionDiffersError,
        TimeoutExpiredError,
        Unavailable,
        UnknownSubscriptionError,
        UnknownTopicError,
    )
    from runnel.formats.batch import Batch
    from runnel.formats.message import Message

_PLACES = {
    "Batch": "runnel.formats.batch",
    "Broker": "runnel.embedded",
    "BusyError": "runnel.errors",
    "ClientFault": "runnel.errors",
    "ClosedError": "runnel.errors",
    "ConnectionLostError": "runnel.errors",
    "Consumer": "runnel.client",
    "CorruptionError": "runnel.errors",
    "DiskFullError": "runnel.errors",
    "HandshakeError": "runnel.errors",
    "InvalidNameError": "runnel.errors",
    "LateAckError": "runnel.errors",
    "LateWork": "runnel.client",
    "LimitExceededError": "runnel.errors",
    "MemberReplacedError": "runnel.errors",
    "Message": "runnel.formats.message",
    "OffsetAheadError": "runnel.errors",
    "OffsetGoneError": "runnel.errors",
    "ProducerFencedError": "runnel.errors",
    "QuotaExceededError": "runnel.errors",
    "ReadOnlyError": "runnel.errors",
    "RunnelError": "runnel.errors",
    "Settings": "runnel.config",
    "SettingsError": "runnel.errors",
    "SlowReaderError": "runnel.errors",
    "SubscriptionDiffersError": "runnel.errors",
    "TimeoutExpiredError": "runnel.errors",
    "Unavailable": "runnel.errors",
    "UnknownSubscriptionError": "runnel.errors",
    "UnknownTopicError": "runnel.errors",
    "Work": "runnel.client",
    "WorkBatch": "runnel.client",
    "connect": "runnel.client",
    "connect_blocking": "runnel.client",
}

_PARTS = ("client", "config", "errors", "spark", "testing")

__all__ = [
    "Batch",
    "Broker",
    "BusyError",
    "ClientFault",
    "ClosedError",
    "ConnectionLostError",
    "Consumer",
    "CorruptionError",
    "DiskFullError",
    "HandshakeError",
    "InvalidNameError",
    "LateAckError",
    "LateWork",
    "LimitExceededError",
    "MemberReplacedError",
    "Message",
    "OffsetAheadError",
    "OffsetGoneError",
    "ProducerFencedError",
    "QuotaExceededError",
    "ReadOnlyError",
    "RunnelError",
    "Settings",
    "SettingsError",
    "SlowReaderError",
    "SubscriptionDiffersError",
    "TimeoutExpiredError",
    "Unavailable",
    "UnknownSubscriptionError",
    "UnknownTopicError",
    "Work",
    "WorkBatch",
    "connect",
    "connect_blocking",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _PARTS:
        return import_module(f"{__name__}.{name}")
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(place), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
