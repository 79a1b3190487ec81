"""PatternIndex against a model that tries every pattern on every topic, under random histories.

Searches and walks are left half done while subscribers and topics come and go. The limits are
small, so that answers are withdrawn by name and at a stroke, set aside and forgotten all the time.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runnel.topics.pattern_index import PatternIndex, Search, Walk
from runnel.topics.patterns import Pattern
from tests.topics.naive import naive_matches

# Few of each, so that a history meets the same topic and the same pattern again and again.
TOPICS = ["a", "a/", "a/x", "a/y", "ab", "b/x", "é", "!a", "!a/x"]
LITERAL = ["a", "a/x", "b/x", "!a/x"]
PREFIXED = ["a/*", "a/[xy]", "a*", "b?x", "!*"]
WILD = ["?/x", "*x", "*", "[!a]*"]
PIECES = ["a", "b", "/", "x", "*", "*", "?", "[ab]", "[!a]"]

topics = st.sampled_from(TOPICS)
patterns = st.one_of(
    st.sampled_from(LITERAL),
    st.sampled_from(PREFIXED),
    st.sampled_from(WILD),
    st.builds("".join, st.lists(st.sampled_from(PIECES), min_size=1, max_size=4)),
)
# A wildcard withdraws every answer and would hide what goes wrong with the others, so half of the
# subscribers have none.
registered = st.one_of(
    st.lists(st.sampled_from(LITERAL + PREFIXED), min_size=1, max_size=2),
    st.lists(patterns, min_size=1, max_size=3),
)
subscribers = st.integers(0, 6)
slices = st.integers(1, 4)


class IndexAgainstModel(RuleBasedStateMachine):
    @initialize(
        answers_max=st.sampled_from([1000, 9, 3]),
        entries_max=st.sampled_from([1000, 3]),
        withdrawn_max=st.sampled_from([1000, 2, 0]),
    )
    def begin(self, answers_max: int, entries_max: int, withdrawn_max: int) -> None:
        self.index: PatternIndex[int] = PatternIndex(
            answers_max=answers_max, answer_entries_max=entries_max, withdrawn_max=withdrawn_max
        )
        self.answers_max = answers_max
        self.registered: dict[int, list[str]] = {}
        self.known: dict[str, int] = {}  # by a number that is new each time a topic is made
        self.made = 0
        self.searches: list[Search[int]] = []
        self.walks: list[tuple[Walk, str, dict[str, int], list[str]]] = []
        for topic in TOPICS[::2]:
            self.add_topic(topic)

    def model(self, topic: str) -> set[int]:
        return {
            subscriber
            for subscriber, texts in self.registered.items()
            if any(naive_matches(text, topic) for text in texts)
        }

    def check(self, topic: str, answer: tuple[int, ...]) -> None:
        assert len(set(answer)) == len(answer)
        assert set(answer) == self.model(topic)

    @rule(topic=topics)
    def add_topic(self, topic: str) -> None:
        self.index.add_topic(topic)
        if topic not in self.known:
            self.made += 1
            self.known[topic] = self.made

    @rule(topic=topics)
    def remove_topic(self, topic: str) -> None:
        self.index.remove_topic(topic)
        self.known.pop(topic, None)

    @rule(subscriber=subscribers, texts=registered)
    def add_or_replace(self, subscriber: int, texts: list[str]) -> None:
        if subscriber in self.registered:
            self.index.remove(subscriber)
        self.index.add(subscriber, [Pattern(text) for text in texts])
        self.registered[subscriber] = texts

    @rule(subscriber=subscribers)
    def remove(self, subscriber: int) -> None:
        if self.registered.pop(subscriber, None) is not None:
            self.index.remove(subscriber)

    @rule(some=st.sets(topics))
    def look_up_some(self, some: set[str]) -> None:
        for topic in sorted(some):
            self.check(topic, self.index.subscribers(topic))

    @rule()
    def look_up_all(self) -> None:
        self.look_up_some(set(TOPICS))

    @rule(topic=topics)
    def begin_search(self, topic: str) -> None:
        self.searches.append(self.index.search(topic))

    @precondition(lambda self: self.searches)
    @rule(data=st.data(), comparisons_max=slices)
    def step_search(self, data: st.DataObject, comparisons_max: int) -> None:
        search = data.draw(st.sampled_from(self.searches))
        if search.step(comparisons_max):
            self.check(search.topic, search.subscribers)
            self.searches.remove(search)

    @rule(text=patterns)
    def begin_walk(self, text: str) -> None:
        self.walks.append((self.index.walk(Pattern(text)), text, dict(self.known), []))

    @precondition(lambda self: self.walks)
    @rule(data=st.data(), comparisons_max=slices)
    def step_walk(self, data: st.DataObject, comparisons_max: int) -> None:
        place = data.draw(st.integers(0, len(self.walks) - 1))
        walk, text, at_beginning, found = self.walks[place]
        found += walk.step(comparisons_max)
        assert found == sorted(set(found))
        if walk.done:
            matching = {topic for topic in at_beginning if naive_matches(text, topic)}
            throughout = {t for t in matching if self.known.get(t) == at_beginning[t]}
            assert throughout <= set(found) <= matching
            del self.walks[place]

    @rule(text=patterns)
    def list_topics(self, text: str) -> None:
        expected = sorted(topic for topic in self.known if naive_matches(text, topic))
        assert self.index.topics(Pattern(text)) == expected

    @invariant()
    def what_is_recalled_is_exact_and_bounded(self) -> None:
        for topic in TOPICS:
            if (answer := self.index.recall(topic)) is not None:
                self.check(topic, answer)
        assert self.index.answers_count <= self.answers_max


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(stateful_step_count=80)
