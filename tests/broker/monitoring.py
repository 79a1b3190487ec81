"""Somebody who watches a broker: keeps what is published for him, and lets the loop turn until all is quiet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from runnel.errors import RunnelError


class Watcher:
    """Stands where the broker's publishing would be."""

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
