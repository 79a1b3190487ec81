"""Who matches this topic, and which topics match this pattern: for many of both.

**Adding a pattern compares nothing.** A remembered answer carries the number of the change up to
which it is right (answers.py). A change only withdraws the answers that it may have outdated: those
of topics that share the pattern's literal beginning or, where these are many or there is no literal
beginning, all of them. A withdrawn answer is brought up to date when its topic is next asked for,
by comparing the topic with the patterns registered since and no others. So an answer is exact at
every moment, there is no addition half done that a lookup would have to look out for, and a topic
that nobody publishes to costs nothing, however many patterns come and go.

**Nothing holds the loop.** `recall` is a dictionary access. Whatever may take long is an object
with a `step`: `Search` for a topic without an exact answer, `Walk` over the topics of a pattern. A
step compares about SLICE_COMPARISONS times, weighed by what a comparison costs (Pattern.cost), and
the caller lets others run between steps. Everything may change between two steps.

    answer = index.recall(topic)
    if answer is None:
        search = index.search(topic)
        while not search.step():
            ...let others run...
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
"""Comparisons in one step: measured, 0.7 ms if most fail early and 2 ms if all match."""

WITHDRAWN_MAX: Final = 2000
"""Answers that one change withdraws by name; one that concerns more withdraws all at a stroke."""

SUBSCRIBERS_PER_COMPARISON: Final = 16
"""Noting so many subscribers of a matching pattern counts as one comparison more."""

PATTERNS_PER_SUBSCRIBER_MAX: Final = 1024

ANSWERS_MAX: Final = 3 * 131_072
"""Remembered answers; a third of them are in use at a time."""

ANSWER_ENTRIES_MAX: Final = 16 * 1024 * 1024
"""Subscribers that all the remembered answers name, 8 bytes each."""


class Search(Generic[S]):
    """Finds who matches a topic, in steps. Stepping on after the end brings it up to date again.

    It goes in rounds: each compares the topic with the patterns registered between two changes,
    and the search is over when a round has reached the latest change.
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
        """Who matched when `step` last returned True; in no particular order, each once."""
        return self._answer.subscribers

    def step(self, comparisons_max: int = SLICE_COMPARISONS) -> bool:
        """Go on for a slice. True: `subscribers` is exact until the next change."""
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
            self._joined.clear()  # they are in the answer now; a step too many must not repeat them
            self._answer = self._answers.advance(self._answer, joined, number=self._upto)
            if self._upto == self._registrations.number:
                break
            self._open_round()
        # Only of known topics: a change finds the answers that it outdates through their names.
        if topic in self._known:
            self._answers.keep(topic, self._answer)
        return True

    def _open_round(self) -> None:
        self._upto = self._registrations.number
        self._joined: dict[S, None] = {}  # one subscriber may match by several patterns
        self._to_compare = self._registrations.candidates(self.topic, after=self._answer.number)

    def _join(self, candidate: Candidate[S]) -> int:
        joined = candidate.registered(after=self._answer.number, upto=self._upto)
        self._joined.update(dict.fromkeys(joined))
        return len(joined) // SUBSCRIBERS_PER_COMPARISON


class _Range(NamedTuple):
    """Names to look at: those that begin with `prefix`, or that name alone."""

    prefix: str
    is_exact: bool


class Walk:
    """Finds the known topics that match a pattern, in steps and in order of their names.

    It gives the topics that were known when it began, without those removed before it came by. A
    topic that appears while it is under way is left to the lookup with which that topic begins, so
    that whoever registers a pattern and then walks meets every topic exactly once.

    `visible`: only topics that one of these patterns matches too. Names that begin with the literal
    beginning of none of them are not even looked at.
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
    """Where names lie that the pattern and any of `visible` can match: the last range first, none within another."""
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
    for each in sorted(found):  # of one prefix the wide one first
        if wide_prefix is not None and each.prefix.startswith(wide_prefix):
            continue
        ordered.append(each)
        if not each.is_exact:
            wide_prefix = each.prefix
    ordered.reverse()
    return ordered


class PatternIndex(Generic[S]):
    """Many subscribers' patterns and the topics there are. A subscriber is anything hashable."""

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
        # Who matches this topic, if that is remembered and exact; None: `search` finds it. A bound
        # method and no method of ours, because a second call would double what the lookup takes.
        self.recall: Final = self._answers.recall
        self._names = SortedNames()
        self._known: dict[str, int] = {}  # topics, numbered in the order of their making
        self._topics_made = 0
        self._withdrawn_max = withdrawn_max
        # Beginnings whose answers have been withdrawn and, as none was kept since, need not be again:
        # ten thousand subscribers who leave together go through their names once. "" is of all.
        self._withdrawn: set[str] = set()
        self._withdrawn_when = 0

    @property
    def changes(self) -> int:
        """Goes up with every subscriber that comes or leaves; while it stands, so do all answers."""
        return self._registrations.number

    @property
    def answers_count(self) -> int:
        """How many answers are remembered."""
        return len(self._answers)

    # --- Topics ---

    def add_topic(self, name: str) -> None:
        """A topic exists from now on. Its name has been checked."""
        if name not in self._known:
            self._topics_made += 1
            self._known[name] = self._topics_made
            self._names.add(name)

    def remove_topic(self, name: str) -> None:
        """A topic exists no more."""
        if self._known.pop(name, None) is not None:
            self._names.remove(name)
            self._answers.forget(name)

    def walk(
        self, pattern: Pattern, *, after: str = "", visible: Sequence[Pattern] | None = None
    ) -> Walk:
        """Which known topics match this pattern, behind a name or all of them? `visible`: see `Walk`."""
        return Walk(
            pattern, self._names, self._known, upto=self._topics_made, after=after, visible=visible
        )

    def topics(self, pattern: Pattern) -> list[str]:
        """The same at once, for callers that have no loop to hold."""
        walk = self.walk(pattern)
        found = walk.step()
        while not walk.done:
            found += walk.step()
        return found

    # --- Subscribers ---

    def add(self, subscriber: S, patterns: Sequence[Pattern]) -> None:
        """From now on the subscriber matches every topic that one of its patterns matches.

        Its patterns are fixed; a subscriber that is there already is a mistake of the caller.
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
        """From now on the subscriber matches nothing."""
        self._withdraw_answers(self._registrations.remove(subscriber).patterns)

    def search(self, topic: str) -> Search[S]:
        """Who matches this topic?"""
        return Search(topic, self._registrations, self._answers, self._known)

    def subscribers(self, topic: str) -> tuple[S, ...]:
        """The same at once, for callers that have no loop to hold."""
        if (remembered := self.recall(topic)) is not None:
            return remembered
        search = self.search(topic)
        while not search.step():
            pass
        return search.subscribers

    def _withdraw_answers(self, patterns: Sequence[Pattern]) -> None:
        """Serve no more the answers that these patterns, coming or going, may have outdated."""
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
