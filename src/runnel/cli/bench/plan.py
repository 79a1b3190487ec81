"""The load of one process, and the messages between the processes of a bench: one JSON line each."""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part of a load: the clients with these numbers."""

    url: str
    run: int
    clients: tuple[int, ...]
    topics: tuple[str, ...]
    subscribe: tuple[str, ...]
    interval_s: float
    batch: int
    size: int
    level: str | None
    duration_s: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """All clients are connected and subscribed."""


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """Everything was published and acknowledged."""

    messages: dict[str, int]  # by topic
    first_ns: int
    last_ns: int


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """The number of messages that all processes published to the subscribed topics."""

    messages: int


class Received(msgspec.Struct, frozen=True, tag="received"):
    """Totals of the subscribers of one process."""

    subscribers: int
    messages: int
    bytes: int
    disordered: int
    told_missed: int
    foreign: int
    last_ns: int
    latencies: tuple[int, ...]
