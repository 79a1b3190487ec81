"""Events that a worker process reports to the test, one a line. All processes take their times from the same clock."""

from __future__ import annotations

import time
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec


class MessageId(NamedTuple):
    """Where a message is stored."""

    topic: str
    partition: int
    offset: int


class _Note(msgspec.Struct, frozen=True, array_like=True, tag=True):
    at_ns: int


class WorkerReady(_Note, frozen=True):
    """The broker has accepted the consumer."""


class WorkBegun(_Note, frozen=True):
    """Work on a message begins. It has failed so many times before."""

    message: MessageId
    key: str | None
    payload: str
    failures: int


class WorkDone(_Note, frozen=True):
    """The work is done, and is acknowledged next."""

    message: MessageId


class WorkFailed(_Note, frozen=True):
    """The work has failed, and is nacked next."""

    message: MessageId


class AcksStored(_Note, frozen=True):
    """The broker has answered that these acknowledgements are stored."""

    messages: list[MessageId]


WorkerEvent: TypeAlias = WorkerReady | WorkBegun | WorkDone | WorkFailed | AcksStored
EventT = TypeVar("EventT", WorkBegun, WorkDone, WorkFailed, AcksStored)

encode: Final = msgspec.json.Encoder().encode
decode: Final = msgspec.json.Decoder(WorkerEvent).decode
now_ns: Final = time.monotonic_ns  # the same for all processes
