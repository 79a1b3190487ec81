"""Wildcards and option words of other brokers, translated for "did you mean" hints. Pure."""

from __future__ import annotations

import re
from typing import Final

# MQTT's `#` and `+`, NATS's `>`, RabbitMQ's `#`: each stands for a whole level of a name. `/` or `.` separates levels.
_LEVEL: Final = re.compile(r"(?<![^/.])[#+>](?![^/.])")
_LEVEL_CHARACTERS: Final = re.compile(r"[#+>]")

_LEVELS: Final = {
    "stored": ("fsync", "sync", "synced", "disk", "durable", "persistent", "all", "-1", "2"),
    "received": ("memory", "async", "leader", "written", "ack", "acked", "1"),
    "none": ("fire", "no", "off", "never", "0"),
}
_STARTS: Final = {
    "earliest": ("first", "oldest", "beginning", "begin", "start", "smallest", "all"),
    "latest": ("newest", "end", "tail", "largest", "new", "now", "live", "next"),
    "last": ("last_value", "latest_value", "last_per_subject", "retained"),
}


def glob_meant(pattern: str) -> str | None:
    """The glob for a pattern of MQTT or NATS: `sensors/*` for `sensors/#`; None if it has none of their wildcards."""
    if _LEVEL_CHARACTERS.search(pattern) is None:
        return None
    glob = _LEVEL.sub("*", pattern)
    return None if glob == pattern else glob


def glob_hint(pattern: str, glob: str) -> str:
    """Why a pattern finds nothing. The caller puts the pattern and its origin in front."""
    characters = sorted(set(_LEVEL_CHARACTERS.findall(pattern)))
    stands = "stands for itself" if len(characters) == 1 else "stand for themselves"
    return f"no topic has this name, and {' and '.join(characters)} {stands} in a pattern; did you mean {glob!r}?"


def level_meant(text: object) -> str | None:
    """The acknowledgement level that another broker calls by this word."""
    return _word_meant(text, _LEVELS)


def start_meant(text: object) -> str | None:
    """The start position that another broker calls by this word."""
    return _word_meant(text, _STARTS)


def _word_meant(text: object, words: dict[str, tuple[str, ...]]) -> str | None:
    if not isinstance(text, str):
        return None
    folded = text.strip().lower()
    return next((word for word, other in words.items() if folded in (word, *other)), None)
