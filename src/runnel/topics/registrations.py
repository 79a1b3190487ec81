"""Who asked for which patterns, arranged by what the patterns begin with; remembers no answers.

Every change, a registration or its removal, has a number: 1, 2, 3 … Patterns lie in groups by their
literal beginning, so a topic meets only the groups whose beginning it shares; the group of the
empty beginning holds the patterns that start with a wildcard. A group lists each pattern once,
however many asked for it, ordered by its newest registration. What was registered since a given
change is therefore found from the group's end without looking at the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from runnel.topics.patterns import Pattern

S = TypeVar("S", bound=Hashable)


class Candidate(Generic[S]):
    """A pattern, and the subscribers that asked for it by the number of their registration."""

    __slots__ = ("newest", "pattern", "subscribers")

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.subscribers: dict[int, S] = {}  # numbers ascend
        self.newest = 0

    def registered(self, *, after: int, upto: int) -> list[S]:
        """Who asked for the pattern in changes `after` + 1 to `upto`, and still does."""
        if not after and self.newest <= upto:
            return list(self.subscribers.values())
        found = []
        for number, subscriber in reversed(self.subscribers.items()):
            if number <= after:
                break
            if number <= upto:
                found.append(subscriber)
        return found


Group = dict[str, Candidate[S]]  # by the pattern's text, the oldest `newest` first


class Registration(msgspec.Struct, frozen=True):
    """All that one subscriber asked for, in one change."""

    number: int
    patterns: tuple[Pattern, ...]


# Stands for no registration where numbers are compared: later than every change.
_GONE: Final = Registration(number=2**63, patterns=())


class Registrations(Generic[S]):
    """Every subscriber's patterns, as they are now.

    `number` is that of the latest change, `removal_number` that of the latest removal.
    """

    __slots__ = (
        "_by_subscriber",
        "_groups",
        "_length_counts",
        "_lengths",
        "_literals",
        "number",
        "removal_number",
    )

    def __init__(self) -> None:
        self.number = 0
        self.removal_number = 0
        self._by_subscriber: dict[S, Registration] = {}
        self._literals: dict[str, Group[S]] = {}  # by the one topic they match
        self._groups: dict[str, Group[S]] = {}  # the others, by their beginning
        self._length_counts: Counter[int] = Counter()  # how many beginnings have which length
        self._lengths: list[int] = []  # those lengths, ascending

    def __len__(self) -> int:
        return len(self._by_subscriber)

    def __contains__(self, subscriber: S) -> bool:
        return subscriber in self._by_subscriber

    def add(self, subscriber: S, patterns: Sequence[Pattern]) -> None:
        """Register a subscriber that is not there."""
        self.number += 1
        # A repeated pattern would be taken out twice.
        registration = Registration(number=self.number, patterns=tuple(dict.fromkeys(patterns)))
        self._by_subscriber[subscriber] = registration
        for pattern in registration.patterns:
            self._enter(pattern, registration.number, subscriber)

    def remove(self, subscriber: S) -> Registration:
        """Take out a subscriber that is there; returns what it had asked for."""
        registration = self._by_subscriber.pop(subscriber)
        self.number += 1
        self.removal_number = self.number
        for pattern in registration.patterns:
            self._withdraw(pattern, registration.number)
        return registration

    def remaining(self, subscribers: tuple[S, ...], *, since: int) -> tuple[S, ...]:
        """Those of the subscribers who have been there without a break since change `since`.

        The same object if that is all of them.
        """
        if since >= self.removal_number:
            return subscribers
        registered = self._by_subscriber
        left = tuple(
            subscriber
            for subscriber in subscribers
            if registered.get(subscriber, _GONE).number <= since
        )
        return subscribers if len(left) == len(subscribers) else left

    def candidates(self, topic: str, *, after: int) -> list[Candidate[S]]:
        """The patterns that share their beginning with `topic` and were asked for since `after`.

        They may match the topic, and no others do. The list is the caller's.
        """
        found: list[Candidate[S]] = []
        if (same := self._literals.get(topic)) is not None:
            _collect(same, found, after=after)
        for length in self._lengths:
            if length > len(topic):
                break
            if (group := self._groups.get(topic[:length])) is not None:
                _collect(group, found, after=after)
        return found

    def _enter(self, pattern: Pattern, number: int, subscriber: S) -> None:
        groups = self._literals if pattern.is_literal else self._groups
        if (group := groups.get(pattern.prefix)) is None:
            group = groups[pattern.prefix] = {}
            if groups is self._groups:
                self._length_counts[len(pattern.prefix)] += 1
                self._lengths = sorted(self._length_counts)
        candidate = group.pop(pattern.text, None) or Candidate(pattern)
        candidate.subscribers[number] = subscriber
        candidate.newest = number
        group[pattern.text] = candidate  # at the end: it is now the newest

    def _withdraw(self, pattern: Pattern, number: int) -> None:
        groups = self._literals if pattern.is_literal else self._groups
        group = groups[pattern.prefix]
        candidate = group[pattern.text]
        del candidate.subscribers[number]
        if not candidate.subscribers:
            del group[pattern.text]
        if not group:
            del groups[pattern.prefix]
            if groups is self._groups:
                self._length_counts[len(pattern.prefix)] -= 1
                self._length_counts += Counter()  # drops what has come to zero
                self._lengths = sorted(self._length_counts)


def _collect(group: Group[S], found: list[Candidate[S]], *, after: int) -> None:
    if not after:
        found.extend(group.values())
        return
    for candidate in reversed(group.values()):
        if candidate.newest <= after:
            return
        found.append(candidate)
