"""What a worker process tells the test of its work: a line a note, each with a time of the machine's one clock."""

from __future__ import annotations

import time
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec


class Where(NamedTuple):
    """A message's place in the log."""

    topic: str
    partition: int
    offset: int


class _Note(msgspec.Struct, frozen=True, array_like=True, tag=True):
    at_ns: int


class Ready(_Note, frozen=True):
    """The broker has accepted the consumer."""


class Begun(_Note, frozen=True):
    """Work on a message begins; so often it had failed before."""

    where: Where
    key: str | None
    payload: str
    failures: int


class Done(_Note, frozen=True):
    """It was done, and is acknowledged next."""

    where: Where


class Failed(_Note, frozen=True):
    """It was not, and is given back next."""

    where: Where


class Stored(_Note, frozen=True):
    """The broker has said that these acknowledgements are stored."""

    places: list[Where]


Note: TypeAlias = Ready | Begun | Done | Failed | Stored
Kind = TypeVar("Kind", Begun, Done, Failed, Stored)

encode: Final = msgspec.json.Encoder().encode
decode: Final = msgspec.json.Decoder(Note).decode
now_ns: Final = time.monotonic_ns  # the same for all processes
