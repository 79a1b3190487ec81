"""What a load shall be, and what the processes that make it tell each other: a JSON line each."""

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
    """What all processes together published to the topics that are subscribed to."""

    messages: int


class Received(msgspec.Struct, frozen=True, tag="received"):
    """What the subscribers of one process saw, added up."""

    subscribers: int
    messages: int
    bytes: int
    disordered: int
    told_missed: int
    foreign: int
    last_ns: int
    latencies: tuple[int, ...]
