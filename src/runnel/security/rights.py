"""What somebody may do: rights by topic pattern. Pure.

    publish   publish to topics
    read      subscribe, fetch, and keep cursors
    consume   take part in acknowledged work, and see its dead letters
    admin     delete and purge topics; change subscriptions, and settle their dead letters

A right is written `publish:sensors/*`. As everywhere, `*` sees none of the topics that begin with `!`: a right to
them names them (`read:!system/*`). Whoever asks for a pattern needs one right that covers all of it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import msgspec

from runnel.errors import ClientFault, ForbiddenError, InvalidNameError
from runnel.topics.covering import covers
from runnel.topics.patterns import Pattern

# Answers that are remembered for one token; beyond that they are worked out each time.
_REMEMBERED_MAX: Final = 10_000


class Right(enum.StrEnum):
    PUBLISH = "publish"
    READ = "read"
    CONSUME = "consume"
    ADMIN = "admin"


_WORDS: Final = frozenset(right.value for right in Right)


class Grant(msgspec.Struct, frozen=True):
    """One right to the topics of one pattern."""

    right: Right
    pattern: str

    @classmethod
    def parse(cls, text: str) -> Grant:
        """`publish:sensors/*`; ClientFault says what is wrong with anything else."""
        word, separator, pattern = text.partition(":")
        if not separator or word not in _WORDS:
            raise ClientFault(
                f"{text!r} is not a right: RIGHT:PATTERN, where RIGHT is one of {', '.join(Right)}, "
                "as publish:sensors/*"
            )
        try:
            Pattern(pattern)
        except InvalidNameError as error:
            raise ClientFault(f"right {text!r}: {error}") from None
        return cls(Right(word), pattern)

    def __str__(self) -> str:
        return f"{self.right}:{self.pattern}"


class Rights:
    """Of one token, by the name that it has for people."""

    def __init__(self, name: str, grants: Sequence[Grant]) -> None:
        self.name: Final = name
        self._patterns = {
            right: tuple(Pattern(grant.pattern) for grant in grants if grant.right is right)
            for right in Right
        }
        self._remembered: dict[tuple[Right, str], bool] = {}

    def allows(self, right: Right, topic: str) -> bool:
        """Hot: once for every topic of every batch."""
        known = self._remembered.get((right, topic))
        if known is None:
            known = any(pattern.matches(topic) for pattern in self._patterns[right])
            if len(self._remembered) < _REMEMBERED_MAX:
                self._remembered[right, topic] = known
        return known

    def covers(self, right: Right, pattern: str) -> bool:
        """Whether every topic that the pattern can ever match is allowed."""
        narrow = Pattern(pattern)
        return any(covers(wide, narrow) for wide in self._patterns[right])

    def has_any(self, right: Right) -> bool:
        return bool(self._patterns[right])

    def sees(self, topic: str) -> bool:
        """Whether there is any right to a topic, so that it may be known to exist."""
        return any(self.allows(right, topic) for right in Right)

    def check(self, right: Right, topic: str) -> None:
        if not self.allows(right, topic):
            raise self.refusal(right, f"topic {topic!r}")

    def check_patterns(self, right: Right, patterns: Sequence[str]) -> None:
        for pattern in patterns:
            if not self.covers(right, pattern):
                raise self.refusal(right, f"pattern {pattern!r}")

    def refusal(self, right: Right, what: str) -> ForbiddenError:
        return ForbiddenError(f"token {self.name!r} has no right to {right} for {what}")
