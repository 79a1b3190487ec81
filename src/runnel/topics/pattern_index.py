"""Finds the subscribers that match a topic and the topics that match a pattern, for large numbers of both.

**Adding a pattern compares nothing.** A cached answer carries the number of the change up to which it is right
(answers.py). A change only withdraws the answers that it may have outdated: the answers of topics that share the
pattern's literal beginning or, if these are many or there is no literal beginning, all answers. A lookup brings a
withdrawn answer up to date by comparing its topic with the patterns registered since, and with no others. So answers
are always exact, a lookup never meets a half-finished addition, and a topic without publishers costs nothing, however
many patterns come and go.

**Nothing holds the loop.** `recall` is a dictionary access. Work that may take long is an object with a `step`:
`Search` for a topic without an exact answer, `Walk` over the topics of a pattern. A step makes about SLICE_COMPARISONS
comparisons, weighed by their cost (Pattern.cost), and the caller lets other tasks run between steps. Everything may
change between two steps.

    answer = index.recall(topic)
    if answer is None:
        search = index.search(topic)
        while not search.step():
            ...let other tasks run...
        answer = search.subscribers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, NamedTuple

from runnel.errors import LimitExceededError
from runnel.topics.answers import Answers
from runnel.topics.patterns import Pattern, any_of
from runnel.topics.registrations import Candidate, Registrations, S
from runnel.topics.sorted_names import SortedNames

SLICE_COMPARISONS: Final = 2000
"""Comparisons in one step. Measured: 0.7 ms if most fail early, 2 ms if all match."""

WITHDRAWN_MAX: Final = 2000
"""Most answers that one change withdraws by name. A change that concerns more withdraws all at once."""

SUBSCRIBERS_PER_COMPARISON: Final = 16
"""Collecting this many subscribers of a matching pattern counts as one more comparison."""

PATTERNS_PER_SUBSCRIBER_MAX: Final = 1024

ANSWERS_MAX: Final = 3 * 131_072
"""Most cached answers; a third of them are current at a time."""

ANSWER_ENTRIES_MAX: Final = 16 * 1024 * 1024
"""Most subscribers that all cached answers name together, 8 bytes each."""


class Search(Generic[S]):
    """Finds the subscribers that match a topic, in steps. A step after the end brings the result up to date again.

    A search goes in rounds. Each round compares the topic with the patterns registered between two changes; the search
    ends when a round has reached the latest change.
    """

    __slots__ = (
        "_answer",
        "_answers",
        "_joined",
        "_known",
        "_registrations",
        "_to_compare",
        "_upto",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        registrations: Registrations[S],
        answers: Answers[S],
        known: Mapping[str, int],
    ) -> None:
        self.topic: Final = topic
        self._registrations = registrations
        self._answers = answers
        self._known = known
        self._answer = answers.latest(topic)
        self._open_round()

    @property
    def subscribers(self) -> tuple[S, ...]:
        """The subscribers that matched when `step` last returned True, each once, in no particular order."""
        return self._answer.subscribers

    def step(self, comparisons_max: int = SLICE_COMPARISONS) -> bool:
        """Continue for one slice. True: `subscribers` is exact until the next change."""
        topic = self.topic
        spent = 0
        while True:
            to_compare = self._to_compare
            while to_compare:
                if spent >= comparisons_max:
                    return False
                candidate = to_compare.pop()
                spent += candidate.pattern.cost
                if candidate.pattern.matches(topic):
                    spent += self._join(candidate)
            joined = tuple(self._joined)
            self._joined.clear()  # they are in the answer now, and a further step must not add them again
            self._answer = self._answers.advance(self._answer, joined, number=self._upto)
            if self._upto == self._registrations.number:
                break
            self._open_round()
        # Only for known topics: a change finds the answers that it outdates by the names of topics.
        if topic in self._known:
            self._answers.keep(topic, self._answer)
        return True

    def _open_round(self) -> None:
        self._upto = self._registrations.number
        self._joined: dict[
            S, None
        ] = {}  # a dict, because several patterns of one subscriber may match
        self._to_compare = self._registrations.candidates(self.topic, after=self._answer.number)

    def _join(self, candidate: Candidate[S]) -> int:
        joined = candidate.registered(after=self._answer.number, upto=self._upto)
        self._joined.update(dict.fromkeys(joined))
        return len(joined) // SUBSCRIBERS_PER_COMPARISON


class _Range(NamedTuple):
    """A range of names: all that begin with `prefix`, or exactly that name."""

    prefix: str
    is_exact: bool


class Walk:
    """Finds the known topics that match a pattern, in steps and in order of their names.

    A walk finds the topics that were known when it began, except those removed before it reached them. It leaves out
    topics created meanwhile: each new topic begins with a lookup of its subscribers. So a subscriber that registers a
    pattern and then walks meets every topic exactly once.

    `visible`: find only topics that one of these patterns matches too. Names that begin with none of their literal
    beginnings are skipped.
    """

    __slots__ = ("_after", "_cost", "_known", "_matches", "_names", "_ranges", "_upto", "done")

    def __init__(
        self,
        pattern: Pattern,
        names: SortedNames,
        known: Mapping[str, int],
        *,
        upto: int,
        after: str,
        visible: Sequence[Pattern] | None = None,
    ) -> None:
        self._names = names
        self._known = known
        self._upto = upto
        self._after = after
        self._cost = pattern.cost
        self._matches: Callable[[str], bool] = pattern.matches
        if visible is None:
            self._ranges = [_Range(pattern.prefix, pattern.is_literal)]
        else:
            self._ranges = _ranges(pattern, visible)
            self._cost += sum(each.cost for each in visible if not each.is_literal)
            is_visible = any_of(visible)
            self._matches = lambda name: pattern.matches(name) and is_visible(name)
        self.done = not self._ranges

    def step(
        self, comparisons_max: int = SLICE_COMPARISONS, *, found_max: int | None = None
    ) -> list[str]:
        """The topics found in the next slice, at most `found_max`; more may follow until `done`."""
        found: list[str] = []
        known, upto, matches = self._known, self._upto, self._matches
        left = comparisons_max
        while left > 0 and self._ranges and (found_max is None or len(found) < found_max):
            prefix, is_exact = self._ranges[-1]
            names: Sequence[str]
            if is_exact:
                names = (prefix,) if prefix in known and prefix > self._after else ()
            else:
                names_max = max(1, left // self._cost)
                if found_max is not None:
                    names_max = min(names_max, found_max - len(found))
                names = self._names.page(prefix, self._after, names_max)
            found += [name for name in names if known[name] <= upto and matches(name)]
            left -= max(1, len(names) * self._cost)
            if names:
                self._after = names[-1]
            if is_exact or not names:
                self._ranges.pop()
        self.done = not self._ranges
        return found


def _ranges(pattern: Pattern, visible: Sequence[Pattern]) -> list[_Range]:
    """The ranges of names that the pattern and any of `visible` can match: the last first, none inside another."""
    found: set[_Range] = set()
    for other in visible:
        if pattern.is_literal or other.is_literal:
            exact, wide = (pattern, other) if pattern.is_literal else (other, pattern)
            if wide.matches(exact.prefix):
                found.add(_Range(exact.prefix, is_exact=True))
        elif other.prefix.startswith(pattern.prefix):
            found.add(_Range(other.prefix, is_exact=False))
        elif pattern.prefix.startswith(other.prefix):
            found.add(_Range(pattern.prefix, is_exact=False))
    ordered: list[_Range] = []
    wide_prefix: str | None = None
    for each in sorted(found):  # for equal prefixes, the range before the exact name
        if wide_prefix is not None and each.prefix.startswith(wide_prefix):
            continue
        ordered.append(each)
        if not each.is_exact:
            wide_prefix = each.prefix
    ordered.reverse()
    return ordered


class PatternIndex(Generic[S]):
    """The patterns of all subscribers and the names of all topics. A subscriber is anything hashable."""

    __slots__ = (
        "_answers",
        "_known",
        "_names",
        "_registrations",
        "_topics_made",
        "_withdrawn",
        "_withdrawn_max",
        "_withdrawn_when",
        "recall",
    )

    def __init__(
        self,
        *,
        answers_max: int = ANSWERS_MAX,
        answer_entries_max: int = ANSWER_ENTRIES_MAX,
        withdrawn_max: int = WITHDRAWN_MAX,
    ) -> None:
        self._registrations: Registrations[S] = Registrations()
        self._answers: Answers[S] = Answers(
            self._registrations, topics_max=answers_max, entries_max=answer_entries_max
        )
        # The subscribers of a topic, if the cache has an exact answer; None: use `search`. The cache's bound method
        # instead of a method of this class, because a second call would double the time of a lookup.
        self.recall: Final = self._answers.recall
        self._names = SortedNames()
        self._known: dict[str, int] = {}  # topics, numbered in order of creation
        self._topics_made = 0
        self._withdrawn_max = withdrawn_max
        # Prefixes whose answers are withdrawn. While no answer is cached, they need not be withdrawn again: ten
        # thousand subscribers that leave together go through the names once. "" stands for all names.
        self._withdrawn: set[str] = set()
        self._withdrawn_when = 0

    @property
    def changes(self) -> int:
        """Rises with every subscriber that comes or leaves. While it stays, all answers stay right."""
        return self._registrations.number

    @property
    def answers_count(self) -> int:
        """How many answers are cached."""
        return len(self._answers)

    # --- Topics ---

    def add_topic(self, name: str) -> None:
        """Add a topic, whose name has been checked."""
        if name not in self._known:
            self._topics_made += 1
            self._known[name] = self._topics_made
            self._names.add(name)

    def remove_topic(self, name: str) -> None:
        """Remove a deleted topic."""
        if self._known.pop(name, None) is not None:
            self._names.remove(name)
            self._answers.forget(name)

    def walk(
        self, pattern: Pattern, *, after: str = "", visible: Sequence[Pattern] | None = None
    ) -> Walk:
        """Find the known topics that match a pattern, beginning after the name `after`. `visible`: see `Walk`."""
        return Walk(
            pattern, self._names, self._known, upto=self._topics_made, after=after, visible=visible
        )

    def topics(self, pattern: Pattern) -> list[str]:
        """All known topics that match, without steps: for callers outside a loop."""
        walk = self.walk(pattern)
        found = walk.step()
        while not walk.done:
            found += walk.step()
        return found

    # --- Subscribers ---

    def add(self, subscriber: S, patterns: Sequence[Pattern]) -> None:
        """Add a subscriber, which then matches every topic that one of its patterns matches.

        Its patterns never change. Adding a subscriber twice is a mistake of the caller.
        """
        if subscriber in self._registrations:
            raise ValueError(f"{subscriber!r} has its patterns already")
        if len(patterns) > PATTERNS_PER_SUBSCRIBER_MAX:
            raise LimitExceededError(
                f"{len(patterns)} patterns for one subscriber: "
                f"at most {PATTERNS_PER_SUBSCRIBER_MAX} are allowed"
            )
        self._registrations.add(subscriber, patterns)
        self._withdraw_answers(patterns)

    def remove(self, subscriber: S) -> None:
        """Remove a subscriber; it no longer matches any topic."""
        self._withdraw_answers(self._registrations.remove(subscriber).patterns)

    def search(self, topic: str) -> Search[S]:
        """Find the subscribers that match a topic."""
        return Search(topic, self._registrations, self._answers, self._known)

    def subscribers(self, topic: str) -> tuple[S, ...]:
        """All subscribers that match, without steps: for callers outside a loop."""
        if (remembered := self.recall(topic)) is not None:
            return remembered
        search = self.search(topic)
        while not search.step():
            pass
        return search.subscribers

    def _withdraw_answers(self, patterns: Sequence[Pattern]) -> None:
        """Stop serving the answers that adding or removing these patterns may have outdated."""
        if self._withdrawn_when != self._answers.kept:
            self._withdrawn_when = self._answers.kept
            self._withdrawn.clear()
        if "" in self._withdrawn:
            return
        room = self._withdrawn_max
        for pattern in patterns:
            if pattern.is_literal:
                self._answers.set_aside(pattern.prefix)
                continue
            if pattern.prefix in self._withdrawn:
                continue
            after = ""
            while pattern.prefix and room > 0:
                page = self._names.page(pattern.prefix, after, room)
                if not page:
                    break
                for name in page:
                    self._answers.set_aside(name)
                room -= len(page)
                after = page[-1]
            else:
                self._answers.set_all_aside()
                self._withdrawn.add("")
                return
            self._withdrawn.add(pattern.prefix)
