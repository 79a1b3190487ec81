"""What Runnel says of its own work: lines of the standard library's `logging`, with named fields.

A program that has a broker inside sees warnings as it sees those of any library, and nothing below unless it asks.
What the lines of `runnel serve` look like is decided in `runnel.cli.diagnostics`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

_THROTTLED_SECONDS: Final = 60.0
_OPTIONS: Final = frozenset(("exc_info", "stack_info", "stacklevel"))


class Logger(logging.LoggerAdapter[logging.Logger]):
    """`logger.warning("metrics could not be published", topic=topic)`.

    A plain handler writes "metrics could not be published topic=a/b". The record has both parts for handlers that
    can use them: `record.event` and `record.fields`. Nothing is put together for a level that nobody listens to.
    """

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        options = {name: kwargs[name] for name in _OPTIONS & kwargs.keys()}
        fields = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
        return _line(str(msg), fields), {**options, "extra": {"event": msg, "fields": fields}}


class Throttled:
    """Decides when something that may happen very often is logged: the first time, and then once a minute."""

    __slots__ = ("_count", "_next_s")

    def __init__(self) -> None:
        self._count = 0
        self._next_s = float("-inf")

    def count(self, now_s: float) -> int:
        """It has happened once more. How often it has since it was logged last; 0: log nothing now."""
        self._count += 1
        if now_s < self._next_s:
            return 0
        self._next_s = now_s + _THROTTLED_SECONDS
        count, self._count = self._count, 0
        return count


def get_logger(name: str) -> Logger:
    """By names that begin with "runnel", so that one setting of a program's logging is for all of them."""
    return Logger(logging.getLogger(name), {})


def _line(event: str, fields: Mapping[str, object]) -> str:
    return " ".join((event, *(f"{name}={_value(value)}" for name, value in fields.items())))


def _value(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(" =\"'") else repr(value)
