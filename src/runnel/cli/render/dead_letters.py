"""Dead letters as tables, lines and JSON: the message and its errors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from runnel.cli.render.messages import as_document, escaped, text_of
from runnel.cli.render.tables import Table, human_bytes
from runnel.cli.render.times import format_time
from runnel.formats.dead_letters import (
    DELIVERIES_TAG,
    ERROR_TAG,
    ERROR_TYPE_TAG,
    FROM_TAG,
    LETTER_TAGS,
    OFFSET_TAG,
    PARTITION_TAG,
    TOPIC_TAG,
    TRACEBACK_TAG,
)
from runnel.formats.message import Message
from runnel.formats.work_heads import SubscriptionState

_ERROR_SHOWN_CHARS: Final = 100  # in a table


def count_table(states: Iterable[SubscriptionState]) -> Table:
    rows = [(state.name, f"{state.dead:,}") for state in states]
    return Table(("subscription", "dead letters"), rows, frozenset(("dead letters",)))


def letter_table(letters: Sequence[Message]) -> Table:
    return Table(
        ("offset", "since", "was", "deliveries", "error"),
        [
            (
                str(letter.offset),
                _since(letter),
                _origin(letter),
                letter.tags.get(DELIVERIES_TAG, "?"),
                _shortened(letter.tags.get(ERROR_TAG, "")),
            )
            for letter in letters
        ],
        frozenset(("offset", "deliveries")),
    )


def letter_lines(subscription: str, letter: Message) -> list[str]:
    """All facts except the payload."""
    tags = message_tags(letter)
    facts = {
        "subscription": subscription,
        "offset": str(letter.offset),
        "since": _since(letter),
        "was": _origin(letter),
        "deliveries": letter.tags.get(DELIVERIES_TAG, "?"),
        "error": letter.tags.get(ERROR_TAG, ""),
        "error type": letter.tags.get(ERROR_TYPE_TAG, ""),
        "key": "none" if letter.key is None else text_of(letter.key),
        "tags": " ".join(f"{name}={value}" for name, value in tags.items()) or "none",
        "event time": format_time(letter.event_time_ns),
        "size": human_bytes(letter.size),
    }
    lines = [
        f"{name + ':':<13} {escaped(value)}"
        for name, value in facts.items()
        if value or name != "error type"
    ]
    if trace := letter.tags.get(TRACEBACK_TAG):
        lines.append("traceback:")
        lines += [f"  {escaped(line)}" for line in trace.splitlines()]
    return lines


def document(letter: Message) -> dict[str, Any]:
    """The letter as JSON, with the broker's tags apart from the message's own tags."""
    tags = letter.tags
    said = {
        "subscription": tags.get(FROM_TAG),
        "topic": tags.get(TOPIC_TAG),
        "partition": _number(tags.get(PARTITION_TAG)),
        "offset": _number(tags.get(OFFSET_TAG)),
        "deliveries": _number(tags.get(DELIVERIES_TAG)),
        "error": tags.get(ERROR_TAG),
        "error_type": tags.get(ERROR_TYPE_TAG),
        "traceback": tags.get(TRACEBACK_TAG),
    }
    return {**as_document(letter), "tags": message_tags(letter), "dead": said}


def message_tags(letter: Message) -> dict[str, str]:
    """The tags that the message had before it failed."""
    return {name: value for name, value in letter.tags.items() if name not in LETTER_TAGS}


def _origin(letter: Message) -> str:
    tags = letter.tags
    return f"{tags.get(TOPIC_TAG, '?')}[{tags.get(PARTITION_TAG, '?')}]@{tags.get(OFFSET_TAG, '?')}"


def _number(text: str | None) -> int | str | None:
    """Parse a number if it is one: a publisher with rights on system topics may write anything."""
    return int(text) if text is not None and text.isdecimal() else text


def _since(letter: Message) -> str:
    return f"{format_time(letter.receive_time_ns)[:19]}Z"


def _shortened(text: str) -> str:
    shown = escaped(text)
    if len(shown) <= _ERROR_SHOWN_CHARS:
        return shown
    return f"{shown[: _ERROR_SHOWN_CHARS - 1]}…"
