"""A publisher of events and metrics that keeps them in a list, and a wait until simulated workers are done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from runnel.errors import RunnelError


class FakePublisher:
    """Takes the place of the broker's own publisher of system topics. `failure`: the error of each publish."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, Mapping[str, str]]] = []
        self.failure: RunnelError | None = None

    def publish(self, topic: str, payload: bytes, tags: Mapping[str, str] | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        self.seen.append((topic, msgspec.json.decode(payload), tags or {}))

    def documents(self, topic: str) -> list[Any]:
        return [document for name, document, _ in self.seen if name == topic]

    def events(self, kind: str) -> list[Any]:
        return [document for _, document, tags in self.seen if tags.get("kind") == kind]


async def settle(turns: int = 300) -> None:
    """Let the loop turn often enough for whatever waits for simulated workers."""
    for _ in range(turns):
        await asyncio.sleep(0)
