"""Definitions of durable subscriptions by name, as bytes that only their owner interprets. No files here."""

from __future__ import annotations

from types import EllipsisType

from runnel.errors import LimitExceededError, Unavailable
from runnel.topics.names import Label, check_label


class DefinitionTable:
    """The definitions of all durable subscriptions of a store."""

    def __init__(self, subscriptions_max: int) -> None:
        self._subscriptions_max = subscriptions_max
        self._contents: dict[str, bytes] = {}

    def check(self, name: str) -> None:
        """Check a definition's name and the limit. The caller puts it into the table once it is recorded."""
        check_label(Label.SUBSCRIPTION, name)
        if name not in self._contents and len(self._contents) >= self._subscriptions_max:
            raise LimitExceededError(
                f"subscription {name!r} would be one more than "
                f"limits.durable_subscriptions_max = {self._subscriptions_max}"
            )

    def check_replaced(self, name: str, replaces: bytes | EllipsisType | None) -> None:
        """Unavailable if `replaces` is given and is not the present definition."""
        if replaces is not ... and self._contents.get(name) != replaces:
            raise Unavailable(f"subscription {name!r} was changed at the same time; try again")

    def find(self, name: str) -> bytes | None:
        return self._contents.get(name)

    def put(self, name: str, content: bytes) -> None:
        self._contents[name] = content

    def remove(self, name: str) -> None:
        self._contents.pop(name, None)

    def all(self) -> dict[str, bytes]:
        """A copy, made in one step."""
        return self._contents.copy()
