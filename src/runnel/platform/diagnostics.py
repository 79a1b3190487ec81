"""Log lines about Runnel's own work: the standard library's `logging`, with named fields.

A program that embeds a broker sees warnings as it sees those of any library, and lower levels only if it asks for them.
`runnel.cli.diagnostics` decides what the lines of `runnel serve` look like.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

_THROTTLED_SECONDS: Final = 60.0
_OPTIONS: Final = frozenset(("exc_info", "stack_info", "stacklevel"))


class Logger(logging.LoggerAdapter[logging.Logger]):
    """`logger.warning("metrics could not be published", topic=topic)`.

    A plain handler writes "metrics could not be published topic=a/b". Handlers that can use both parts find them in
    `record.event` and `record.fields`. A level that is switched off costs no formatting.
    """

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        options = {name: kwargs[name] for name in _OPTIONS & kwargs.keys()}
        fields = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
        return _line(str(msg), fields), {**options, "extra": {"event": msg, "fields": fields}}


class LogThrottle:
    """Decides when a frequent event is logged: the first time, and then once a minute."""

    __slots__ = ("_count", "_next_s")

    def __init__(self) -> None:
        self._count = 0
        self._next_s = float("-inf")

    def count(self, now_s: float) -> int:
        """Count one more event. Returns how many happened since the last log line; 0: do not log now."""
        self._count += 1
        if now_s < self._next_s:
            return 0
        self._next_s = now_s + _THROTTLED_SECONDS
        count, self._count = self._count, 0
        return count


def get_logger(name: str) -> Logger:
    """`name` begins with "runnel", so that a program can configure all of Runnel's loggers at once."""
    return Logger(logging.getLogger(name), {})


def _line(event: str, fields: Mapping[str, object]) -> str:
    return " ".join((event, *(f"{name}={_value(value)}" for name, value in fields.items())))


def _value(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(" =\"'") else repr(value)
