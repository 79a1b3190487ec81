"""The patterns of all subscribers, grouped by their literal beginning.

Every change, a registration or its removal, has a number: 1, 2, 3 … Patterns are grouped by their literal beginning, so
a topic is compared only with the groups whose beginning it shares; the group of the empty beginning holds the patterns
that start with a wildcard. A group lists each pattern once, however many subscribers have it, ordered by its newest
registration. So the patterns registered since a given change are at the group's end, and the rest is not searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from runnel.topics.patterns import Pattern

S = TypeVar("S", bound=Hashable)


class Candidate(Generic[S]):
    """A pattern and its subscribers, by the number of their registration."""

    __slots__ = ("newest", "pattern", "subscribers")

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.subscribers: dict[int, S] = {}  # numbers ascend
        self.newest = 0

    def registered(self, *, after: int, upto: int) -> list[S]:
        """The current subscribers that registered the pattern in changes `after` + 1 to `upto`."""
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
    """All patterns of one subscriber, and the number of the change that added them."""

    number: int
    patterns: tuple[Pattern, ...]


# Stands for a missing registration when numbers are compared: later than every change.
_GONE: Final = Registration(number=2**63, patterns=())


class Registrations(Generic[S]):
    """The current patterns of every subscriber.

    `number` is the number of the latest change, `removal_number` that of the latest removal.
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
        self._literals: dict[
            str, Group[S]
        ] = {}  # patterns without wildcards, by the topic they match
        self._groups: dict[str, Group[S]] = {}  # all other patterns, by their literal beginning
        self._length_counts: Counter[int] = Counter()  # the number of beginnings of each length
        self._lengths: list[int] = []  # these lengths, ascending

    def __len__(self) -> int:
        return len(self._by_subscriber)

    def __contains__(self, subscriber: S) -> bool:
        return subscriber in self._by_subscriber

    def add(self, subscriber: S, patterns: Sequence[Pattern]) -> None:
        """Register a subscriber that is not registered yet."""
        self.number += 1
        # Without duplicates: `remove` would remove a repeated pattern twice.
        registration = Registration(number=self.number, patterns=tuple(dict.fromkeys(patterns)))
        self._by_subscriber[subscriber] = registration
        for pattern in registration.patterns:
            self._enter(pattern, registration.number, subscriber)

    def remove(self, subscriber: S) -> Registration:
        """Remove a registered subscriber; returns its registration."""
        registration = self._by_subscriber.pop(subscriber)
        self.number += 1
        self.removal_number = self.number
        for pattern in registration.patterns:
            self._withdraw(pattern, registration.number)
        return registration

    def remaining(self, subscribers: tuple[S, ...], *, since: int) -> tuple[S, ...]:
        """The subscribers among these that have been registered without a break since change `since`.

        Returns the same object if all of them have.
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
        """The patterns registered since `after` that may match `topic`, by their literal beginning; no others can.

        The caller may change the list.
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
        group[pattern.text] = candidate  # at the end, because it is now the newest

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
                self._length_counts += Counter()  # drops lengths whose count is zero
                self._lengths = sorted(self._length_counts)


def _collect(group: Group[S], found: list[Candidate[S]], *, after: int) -> None:
    if not after:
        found.extend(group.values())
        return
    for candidate in reversed(group.values()):
        if candidate.newest <= after:
            return
        found.append(candidate)
