"""The rules for names of topics, cursors, producers, subscriptions and journals.

A name is 1 to 255 bytes of UTF-8 without control characters. Names are compared code point by code point. They are not
normalised, folded or trimmed, so two spellings of "é" are two names. The forbidden characters are a fixed set, so that
a newer Unicode never makes an old name invalid:

- U+0000 to U+001F and U+007F to U+009F: the control characters (exactly Unicode's category Cc);
- U+2028 and U+2029: they end a line where lines are split by Unicode's rules, so they could forge a line of a listing
  just as a newline could;
- U+D800 to U+DFFF: a lone surrogate has no UTF-8.
"""

from __future__ import annotations

import enum
import re
from typing import Final, TypeAlias

from runnel.errors import InvalidNameError

TopicPartition: TypeAlias = tuple[str, int]
"""The name of a topic and the number of one of its partitions."""

NAME_BYTES_MAX: Final = 255

SYSTEM_MARK: Final = "!"
"""Names that begin with it belong to the system; publishing there needs a right."""

DEAD_LETTER_PREFIX: Final = "!dead/"
"""`!dead/<subscription>` holds messages that a subscription could not deliver or a pipeline could not process."""

REPORTS_PREFIX: Final = "!system/"
"""The broker's own metrics and events."""

STATS_PREFIX: Final = "!system/stats/"
"""Statistics that pipelines publish."""

LIVE_JOURNAL: Final = "live"
"""The pseudo-journal of ephemeral topics. It has no files, and no real journal may have its name."""

# System names that clients may publish to: pipelines publish their statistics and dead letters there.
_OPEN_PREFIXES: Final = (DEAD_LETTER_PREFIX, STATS_PREFIX)

_FORBIDDEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Label(enum.StrEnum):
    """The kinds of names that are not topics."""

    CURSOR = "cursor"
    PRODUCER = "producer"
    SUBSCRIPTION = "subscription"
    JOURNAL = "journal"


def check_topic(name: str) -> None:
    """Raise InvalidNameError, saying what is wrong and where, unless `name` is valid for a topic."""
    check_text("topic name", name)


def check_label(kind: Label, name: str) -> None:
    """Raise InvalidNameError, saying what is wrong and where, unless `name` is valid for a `kind`."""
    check_text(f"{kind} name", name)
    if kind is Label.SUBSCRIPTION:
        # Its dead-letter topic has a longer name than the subscription itself.
        bytes_max = NAME_BYTES_MAX - len(DEAD_LETTER_PREFIX)
        if len(name.encode()) > bytes_max:
            raise InvalidNameError(
                f"subscription name {_shown(name)} is longer than {bytes_max} bytes of UTF-8, "
                f"so its dead-letter topic {DEAD_LETTER_PREFIX}… would have no room"
            )
    elif kind is Label.JOURNAL and name == LIVE_JOURNAL:
        raise InvalidNameError(
            f"journal name {LIVE_JOURNAL!r} is reserved for topics that are not kept"
        )


def check_text(kind: str, text: str) -> None:
    """Raise InvalidNameError unless `text` has the length and the characters of a name."""
    if not text:
        raise InvalidNameError(f"the {kind} is empty: it needs 1 to {NAME_BYTES_MAX} bytes")
    if found := _FORBIDDEN.search(text):
        place = found.start()
        raise InvalidNameError(
            f"{kind} {_shown(text)} has {_described(found.group())} at character {place + 1}"
        )
    # Counting bytes encodes the text; a text that is far too long is not encoded.
    if len(text) > NAME_BYTES_MAX or len(text.encode()) > NAME_BYTES_MAX:
        raise InvalidNameError(
            f"{kind} {_shown(text)} is longer than {NAME_BYTES_MAX} bytes of UTF-8"
        )


def is_system(name: str) -> bool:
    """Whether a name belongs to the system: `!system/…`, `!dead/…` and the like."""
    return name.startswith(SYSTEM_MARK)


def is_reserved(topic: str) -> bool:
    """Whether only the broker itself may publish to this topic."""
    return topic.startswith(SYSTEM_MARK) and not topic.startswith(_OPEN_PREFIXES)


def is_dead_letter(topic: str) -> bool:
    """Whether a topic holds dead letters."""
    return topic.startswith(DEAD_LETTER_PREFIX)


def has_wildcard(text: str) -> bool:
    """Whether a name, or several names joined together, contain a wildcard character."""
    return "*" in text or "?" in text or "[" in text


def dead_letter_topic(subscription: str) -> str:
    """The topic to which a subscription's undeliverable messages go."""
    return DEAD_LETTER_PREFIX + subscription


def _described(character: str) -> str:
    point = ord(character)
    if 0xD800 <= point <= 0xDFFF:
        return f"the lone surrogate U+{point:04X}, which has no UTF-8,"
    if point in (0x2028, 0x2029):
        return f"the line separator U+{point:04X}"
    return f"the control character U+{point:04X}"


def _shown(text: str) -> str:
    """The text for an error message: escaped, and shortened to 61 characters."""
    return repr(text) if len(text) <= 64 else repr(text[:61]) + "…"
