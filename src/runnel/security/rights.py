"""The rights of a token, by topic pattern. Pure.

    publish   publish to topics
    read      subscribe, fetch, and keep cursors
    consume   take part in acknowledged work, and see its dead letters
    admin     delete and purge topics; change subscriptions, and settle their dead letters

A right is written `publish:sensors/*`. As everywhere, `*` matches no topic that begins with `!`: a right to such topics
names them (`read:!system/*`). A request with a pattern needs a single right that covers all of the pattern.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from runnel.errors import ClientFault, ForbiddenError, InvalidNameError, LimitExceededError
from runnel.topics.covering import Cover
from runnel.topics.patterns import Pattern

# How many allowed topics and patterns are cached for each right of a token.
_TOPICS_CACHED_MAX: Final = 100_000
_PATTERNS_CACHED_MAX: Final = 10_000
# Patterns of one request. Comparing each with the rights may take some microseconds, and blocks the loop meanwhile.
PATTERNS_MAX: Final = 1024


class Right(enum.StrEnum):
    """What a grant allows; the module's docstring says what each member includes."""

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


class TokenQuotas(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token's own quotas instead of `security.token_…`. None: as the settings say; 0: no quota."""

    topics_max: int | None = None
    cursors_max: int | None = None
    subscriptions_max: int | None = None
    bytes_in_per_s: int | None = None
    messages_in_per_s: int | None = None
    bytes_out_per_s: int | None = None
    messages_out_per_s: int | None = None


class Rights:
    """The rights and quotas of one token, and its name for people."""

    __slots__ = ("_allowed", "_covered", "_covers", "name", "quotas", "visible")

    def __init__(
        self, name: str, grants: Iterable[Grant], quotas: TokenQuotas | None = None
    ) -> None:
        self.name: Final = name
        self.quotas: Final = quotas or TokenQuotas()
        covers: dict[Right, list[Cover]] = {right: [] for right in Right}
        for grant in grants:
            covers[grant.right].append(Cover(Pattern(grant.pattern)))
        self._covers: Final = covers
        # Patterns of the topics to which there is any right, so that their existence is no secret.
        self.visible: Final = tuple(
            {cover.pattern: None for of_right in covers.values() for cover in of_right}
        )
        # Refused topics and patterns are not cached: they may be anything, and are rare in normal use.
        self._allowed: Final[dict[Right, set[str]]] = {right: set() for right in Right}
        self._covered: Final[dict[Right, set[str]]] = {right: set() for right in Right}

    # --- Topics ---

    def allows(self, right: Right, topic: str) -> bool:
        allowed = self._allowed[right]
        if topic in allowed:
            return True
        if not any(cover.pattern.matches(topic) for cover in self._covers[right]):
            return False
        _cache(allowed, topic, _TOPICS_CACHED_MAX)
        return True

    def check(self, right: Right, topic: str) -> None:
        if topic not in self._allowed[right] and not self.allows(right, topic):
            raise self.refusal(right, f"topic {topic!r}")

    def check_all(self, right: Right, topics: Collection[str]) -> None:
        """Hot: called once for every batch, which may have a thousand topics."""
        if not self._allowed[right].issuperset(topics):
            for topic in topics:
                self.check(right, topic)

    def sees(self, topic: str) -> bool:
        """Whether there is any right to a topic, so that its existence is no secret."""
        return any(self.allows(right, topic) for right in Right)

    # --- Patterns ---

    def covers(self, right: Right, pattern: str) -> bool:
        """Whether every topic that the pattern can ever match is allowed."""
        covered = self._covered[right]
        if pattern in covered:
            return True
        narrow = Pattern(pattern)
        if not any(cover.covers(narrow) for cover in self._covers[right]):
            return False
        _cache(covered, pattern, _PATTERNS_CACHED_MAX)
        return True

    def check_patterns(self, right: Right, patterns: Collection[str]) -> None:
        if len(patterns) > PATTERNS_MAX:
            patterns = set(patterns)
            if len(patterns) > PATTERNS_MAX:
                raise LimitExceededError(
                    f"{len(patterns)} patterns; at most {PATTERNS_MAX} are compared with a token's rights at a time"
                )
        for pattern in patterns:
            if not self.covers(right, pattern):
                raise self.refusal(right, f"pattern {pattern!r}")

    def has_any(self, right: Right) -> bool:
        return bool(self._covers[right])

    def refusal(self, right: Right, what: str) -> ForbiddenError:
        return ForbiddenError(f"token {self.name!r} has no right to {right} for {what}")

    def __repr__(self) -> str:
        return f"<Rights of {self.name!r}>"


def _cache(known: set[str], text: str, count_max: int) -> None:
    if len(known) >= count_max:
        known.clear()  # simpler than evicting the least used, and as good
    known.add(text)
