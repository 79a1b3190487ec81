"""Decides what a caller's rights allow it to see and to do.

Where the broker asks for no token, a caller may do everything. An error never reveals whether something exists that
the caller may not see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from runnel.broker.broker import Broker
from runnel.errors import (
    ClientFault,
    ForbiddenError,
    UnknownSubscriptionError,
    UnknownTopicError,
)
from runnel.formats.batch import Batch
from runnel.formats.dead_letters import TOPIC_TAG
from runnel.formats.wire import CursorPlace, CursorState
from runnel.security.rights import Right, Rights
from runnel.topics.names import dead_letter_topic

EVERYTHING: Final = ("*",)


class AccessRules:
    """The rights of one caller, applied to topics, patterns, cursors and subscriptions."""

    __slots__ = ("_broker", "_rights")

    def __init__(self, broker: Broker, rights: Rights | None) -> None:
        """`rights` is None where the broker asks for no token."""
        self._broker = broker
        self._rights = rights

    # --- Topics and patterns ---

    def check_topic(self, right: Right, topic: str) -> None:
        """The caller must have this right to the topic."""
        if self._rights is not None:
            self._rights.check(right, topic)

    def check_patterns(self, right: Right, patterns: Sequence[str]) -> None:
        """The caller must have this right to every topic that could match the patterns."""
        if self._rights is not None:
            self._rights.check_patterns(right, patterns)

    def covers(self, right: Right, patterns: Iterable[str]) -> bool:
        """Whether the caller has this right to every topic that could match the patterns."""
        return self._rights is None or all(
            self._rights.covers(right, pattern) for pattern in patterns
        )

    def check_read(self, patterns: Sequence[str]) -> None:
        """The caller must have the right to read what matches.

        Reading a shard without patterns needs the right to read everything: it shows how far the shard has come.
        """
        self.check_patterns(Right.READ, patterns or EVERYTHING)

    def check_seen(self, topic: str) -> None:
        """The caller must have any right to the topic."""
        if self._rights is not None and not self._rights.sees(topic):
            raise ForbiddenError(f"token {self._rights.name!r} has no right to topic {topic!r}")

    def check_journals(self, journals: Iterable[str]) -> None:
        """Refuse journals of single topics that the caller has no right to.

        Such a journal has its topic's name, and its length shows how much was published.
        """
        if self._rights is None:
            return
        for journal in journals:
            topic = self._broker.policies.topic_of_journal(journal)
            if topic is not None:
                self.check_seen(topic)

    # --- Cursors ---

    def check_cursor(
        self, name: str, places: Sequence[CursorPlace], known: Sequence[CursorState]
    ) -> None:
        """The caller must have the right to read every new place of a cursor, and every place it has so far."""
        if self._rights is None:
            return
        self._check_places(places)
        try:
            for each in known:
                self._check_places(each.places)
        except ForbiddenError as error:  # it names places that the caller may not know
            raise ForbiddenError(
                f"token {self._rights.name!r} has no right to read for all places of cursor {name!r}"
            ) from error

    def check_cursor_removal(self, name: str, known: Sequence[CursorState]) -> None:
        """The caller must have the right to read, or to administer, every place of the cursor."""
        if self._rights is not None and not (known and all(map(self.sees_cursor, known))):
            raise self._neutral(
                f"cursor {name!r}", "places", (Right.READ, Right.ADMIN), UnknownTopicError
            )

    def _check_places(self, places: Sequence[CursorPlace]) -> None:
        assert self._rights is not None
        self._rights.check_all(
            Right.READ, {place.topic for place in places if place.topic is not None}
        )
        self._rights.check_patterns(Right.READ, _patterns_of(places))
        self.check_journals({place.journal for place in places if place.journal is not None})

    def sees_cursor(self, cursor: CursorState) -> bool:
        """Whether the caller may read every place of a cursor, or administer every place."""
        rights = self._rights
        return rights is None or any(
            all(
                rights.allows(right, place.topic)
                for place in cursor.places
                if place.topic is not None
            )
            and self.covers(right, _patterns_of(cursor.places))
            for right in (Right.READ, Right.ADMIN)
            if rights.has_any(right)
        )

    # --- Subscriptions ---

    def sees_subscription(self, patterns: Sequence[str]) -> bool:
        """Whether the caller may consume, or administer, everything that the patterns match."""
        return self.covers(Right.CONSUME, patterns) or self.covers(Right.ADMIN, patterns)

    def check_letters_seen(self, name: str) -> None:
        """The caller must have a right to the subscription, or may read its dead-letter topic."""
        if not self.reads_letters(name):
            self.check_subscription(name, Right.CONSUME, Right.ADMIN)

    def reads_letters(self, subscription: str) -> bool:
        """Whether the caller may read the dead-letter topic itself."""
        return self._rights is None or self._rights.allows(
            Right.READ, dead_letter_topic(subscription)
        )

    def own_letters(self, batch: Batch) -> Iterable[Batch]:
        """The letters of topics that the caller may consume or administer."""
        assert self._rights is not None
        rows = [
            row
            for row, letter in enumerate(batch)
            if any(
                self._rights.allows(right, letter.tags.get(TOPIC_TAG, ""))
                for right in (Right.CONSUME, Right.ADMIN)
            )
        ]
        return [batch if len(rows) == len(batch) else batch.take(rows)] if rows else ()

    def check_subscription(self, name: str, *any_of: Right, is_new: bool = False) -> None:
        """The caller must have one of the rights to all patterns of a subscription. `is_new`: it need not exist."""
        if self._rights is None:
            return
        try:
            patterns: Sequence[str] = self._broker.consumer_groups.patterns_of(name)
        except UnknownSubscriptionError:
            if is_new:
                return
            patterns = ()
        if patterns and any(self.covers(right, patterns) for right in any_of):
            return
        if is_new:
            raise self.refusal_of(name, any_of[0])
        raise self._neutral(f"subscription {name!r}", "patterns", any_of, UnknownSubscriptionError)

    def _neutral(
        self, what: str, parts: str, any_of: Sequence[Right], unknown: type[ClientFault]
    ) -> ClientFault:
        """One error for things that the caller may not see and for things that do not exist.

        So the caller cannot distinguish the two. For a caller with a right to every topic the error is the one of a
        thing that does not exist, which is nearly always true.
        """
        assert self._rights is not None
        is_for_all = any(self._rights.covers(right, "*") for right in any_of)
        kind = unknown if is_for_all else ForbiddenError
        return kind(
            f"{what} does not exist, or token {self._rights.name!r} has no right to {' or '.join(any_of)} "
            f"for all of its {parts}"
        )

    def refusal_of(self, subscription: str, right: Right) -> ForbiddenError:
        """The error for a subscription over topics that the caller has no right to."""
        assert self._rights is not None
        return self._rights.refusal(right, f"all patterns of subscription {subscription!r}")


def _patterns_of(places: Sequence[CursorPlace]) -> set[str]:
    """The patterns of the places in shards; a place without patterns is over the whole shard."""
    return {
        pattern
        for place in places
        if place.topic is None
        for pattern in place.patterns or EVERYTHING
    }
