"""A cache of the subscribers that match each topic. `PatternIndex` finds them; this module only remembers them.

An answer carries the number of the change up to which it is right. Equal answers share one object, so a hundred
thousand topics with the same subscribers cost one list of subscribers.

The cache forgets answers in three generations. Current answers are served. Answers set aside were outdated by a change,
or were not used since the last turn; they are not served, but a search continues from them. Leaving answers were still
aside at the next turn; they are freed a few at a time, because freeing a hundred thousand answers at once would hold
the loop for 20 ms.
"""

from __future__ import annotations

from typing import Final, Generic

from runnel.topics.registrations import Registrations, S

SHARED_MAX: Final = 4096
"""Most answers that are compared to find an equal one. Beyond this, equal answers may exist twice."""

FREED_AT_ONCE: Final = 4


class Matches(Generic[S]):
    """The subscribers that matched when change `number` was the latest. Immutable; compared by identity."""

    __slots__ = ("number", "subscribers")

    def __init__(self, number: int, subscribers: tuple[S, ...]) -> None:
        self.number: Final = number
        self.subscribers: Final = subscribers


class Answers(Generic[S]):
    """The cached answers by topic: at most `topics_max` answers, which name at most `entries_max` subscribers.

    Both limits hold for the three generations together. `entries_max` counts each answer's list when it is made, so a
    shared list counts once.
    """

    __slots__ = (
        "_aside",
        "_current",
        "_entries_count",
        "_entries_turn",
        "_followers",
        "_leaving",
        "_nothing",
        "_oldest_served",
        "_registrations",
        "_same",
        "_shared_number",
        "_topics_turn",
        "kept",
    )

    def __init__(
        self, registrations: Registrations[S], *, topics_max: int, entries_max: int
    ) -> None:
        self._registrations = registrations
        self.kept = 0  # how many answers were cached so far
        self._current: dict[str, Matches[S]] = {}
        self._aside: dict[str, Matches[S]] = {}
        self._nothing: Matches[S] = Matches(0, ())
        self._oldest_served = 0
        self._leaving: list[dict[str, Matches[S]]] = []
        self._topics_turn = max(1, topics_max // 3)
        self._entries_turn = max(1, entries_max // 3)
        self._entries_count = 0
        # Both hold for one change only: the successor of an answer, and answers by content.
        self._followers: dict[tuple[Matches[S], tuple[S, ...]], Matches[S]] = {}
        self._same: dict[tuple[S, ...], Matches[S]] = {}
        self._shared_number = 0

    def __len__(self) -> int:
        return len(self._current) + len(self._aside) + sum(map(len, self._leaving))

    def recall(self, topic: str) -> tuple[S, ...] | None:
        """The cached answer, if it is right now."""
        answer = self._current.get(topic)
        if answer is None or answer.number < self._oldest_served:
            return None
        return answer.subscribers

    def latest(self, topic: str) -> Matches[S]:
        """The answer to continue from. It is right as of its number, which is 0 if none is cached."""
        return self._current.get(topic) or self._aside.get(topic) or self._nothing

    def advance(self, answer: Matches[S], joined: tuple[S, ...], *, number: int) -> Matches[S]:
        """The answer as of change `number`: with the subscribers that joined since, without those that left."""
        if self._shared_number != number or len(self._followers) >= SHARED_MAX:
            self._shared_number = number
            self._stop_sharing()
        # Topics that shared an answer continue to share it. Only the first of them builds the list.
        step = (answer, joined)
        if (follower := self._followers.get(step)) is None:
            subscribers = self._left_of(answer) + joined
            if (follower := self._same.get(subscribers)) is None:
                follower = self._same[subscribers] = Matches(number, subscribers)
                if subscribers is not answer.subscribers:
                    self._entries_count += len(subscribers)
            self._followers[step] = follower
        return follower

    def keep(self, topic: str, answer: Matches[S]) -> None:
        """Cache an answer that is right now."""
        self.kept += 1
        self._free_some()
        full = len(self._current) >= self._topics_turn and topic not in self._current
        if full or self._entries_count > self._entries_turn:
            self._leaving.append(self._aside)
            self._aside = self._current
            self._current = {}
            self._entries_count = len(answer.subscribers)
            self._stop_sharing()  # otherwise the lists it holds would escape the limit of entries
        self._aside.pop(topic, None)
        self._current[topic] = answer

    def set_aside(self, topic: str) -> None:
        """Stop serving this topic's answer: a change may have outdated it."""
        if (answer := self._current.pop(topic, None)) is not None:
            if len(self._aside) >= self._topics_turn:
                self._leaving.append(self._aside)
                self._aside = {}
            self._aside[topic] = answer

    def set_all_aside(self) -> None:
        """Stop serving all older answers: the latest change may have outdated each of them."""
        self._oldest_served = self._registrations.number

    def forget(self, topic: str) -> None:
        """Drop the answer of a deleted topic."""
        self._current.pop(topic, None)
        self._aside.pop(topic, None)

    def _free_some(self) -> None:
        # Several for each answer cached, so that one generation is freed before the next one leaves.
        for _ in range(FREED_AT_ONCE):
            while self._leaving and not self._leaving[-1]:
                self._leaving.pop()
            if not self._leaving:
                return
            self._leaving[-1].popitem()

    def _stop_sharing(self) -> None:
        self._followers = {}
        self._same = {}

    def _left_of(self, answer: Matches[S]) -> tuple[S, ...]:
        return self._registrations.remaining(answer.subscribers, since=answer.number)
