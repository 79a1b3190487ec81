"""Counts how much work is done between two turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import pytest


class LoopProbe:
    """Counts calls of some functions; `most` is how many of them were made between two turns of the loop.

    Used as `async with`: what happens inside is measured.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._count = 0
        self._turning: asyncio.Task[None] | None = None
        self.most = 0
        self.total = 0
        self.turns = 0

    def count(self, owner: type, name: str) -> None:
        """Each call of this method counts as one."""
        original: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            self._count += 1
            return original(*args, **options)

        self._monkeypatch.setattr(owner, name, counted)

    async def __aenter__(self) -> Self:
        await asyncio.sleep(0)
        self._count = 0
        self._turning = asyncio.create_task(self._turn())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._turning is not None
        self._turning.cancel()
        await asyncio.wait({self._turning})
        self._note()

    async def _turn(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turns += 1
            self._note()

    def _note(self) -> None:
        self.most = max(self.most, self._count)
        self.total += self._count
        self._count = 0
