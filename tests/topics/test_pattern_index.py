"""Who matches a topic, which topics match a pattern, and what finding out touches."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import LimitExceededError
from runnel.topics.pattern_index import PATTERNS_PER_SUBSCRIBER_MAX, PatternIndex
from runnel.topics.patterns import Pattern


class CountedPattern(Pattern):
    """A pattern that writes down the names it was compared with."""

    __slots__ = ()
    compared: ClassVar[list[str]] = []

    def matches(self, name: str) -> bool:
        self.compared.append(name)
        return super().matches(name)


@pytest.fixture(autouse=True)
def _fresh_count() -> None:
    CountedPattern.compared.clear()


def index_of(topics: list[str], patterns: dict[str, list[str]]) -> PatternIndex[str]:
    index: PatternIndex[str] = PatternIndex()
    for topic in topics:
        index.add_topic(topic)
    for subscriber, texts in patterns.items():
        index.add(subscriber, [Pattern(text) for text in texts])
    return index


# --- Who matches this topic? ---


def test_finds_the_subscribers_by_literal_prefix_and_wildcard() -> None:
    index = index_of(
        ["a/x", "b/x"],
        {"literal": ["a/x"], "prefix": ["a/*"], "suffix": ["*/x"], "other": ["b/*"]},
    )
    assert set(index.subscribers("a/x")) == {"literal", "prefix", "suffix"}
    assert set(index.subscribers("b/x")) == {"suffix", "other"}


def test_a_subscriber_with_several_matching_patterns_is_found_once() -> None:
    index = index_of(["a/x"], {"s": ["a/x", "a/*", "*x", "[a]/x", "a/*"]})
    assert index.subscribers("a/x") == ("s",)
    index.remove("s")
    assert index.subscribers("a/x") == ()


def test_system_topics_are_seen_only_by_patterns_that_name_them() -> None:
    index = index_of(["!dead/a"], {"all": ["*"], "set": ["[!a]*"], "system": ["!*"]})
    assert index.subscribers("!dead/a") == ("system",)


def test_a_topic_that_is_not_known_is_answered_but_not_remembered() -> None:
    index = index_of([], {"s": ["a*"]})
    assert index.subscribers("a") == ("s",)
    assert index.recall("a") is None
    assert index.answers_count == 0


def test_a_topic_seen_before_is_recalled_without_a_comparison() -> None:
    index = index_of(["a/x"], {})
    index.add("s", [CountedPattern("*x")])
    assert index.recall("a/x") is None
    assert index.subscribers("a/x") == ("s",)
    CountedPattern.compared.clear()
    assert index.recall("a/x") == ("s",)
    assert not CountedPattern.compared


@pytest.mark.parametrize("pattern", ["a/x", "a/*", "*x"])
def test_a_new_pattern_is_in_the_very_next_answer_and_gone_after_its_removal(pattern: str) -> None:
    index = index_of(["a/x", "b/y"], {"old": ["*"]})
    assert index.subscribers("a/x") == ("old",)
    assert index.subscribers("b/y") == ("old",)
    index.add("new", [Pattern(pattern)])
    assert set(index.subscribers("a/x")) == {"old", "new"}
    assert index.subscribers("b/y") == ("old",)
    index.remove("new")
    assert index.subscribers("a/x") == ("old",)
    assert index.subscribers("b/y") == ("old",)


def test_a_subscriber_that_comes_back_has_only_its_new_patterns() -> None:
    index = index_of(["a", "b"], {"s": ["a"]})
    assert index.subscribers("a") == ("s",)
    index.remove("s")
    index.add("s", [Pattern("b*")])
    assert index.subscribers("a") == ()
    assert index.subscribers("b") == ("s",)


def test_a_later_subscriber_of_an_older_pattern_is_found() -> None:
    index = index_of(["a/x"], {"first": ["*x"], "second": ["*y"]})
    assert index.subscribers("a/x") == ("first",)
    index.add("third", [Pattern("*x")])
    assert set(index.subscribers("a/x")) == {"first", "third"}


def test_the_answer_for_a_removed_topic_is_forgotten() -> None:
    index = index_of(["a/x"], {})
    assert index.subscribers("a/x") == ()
    index.remove_topic("a/x")
    assert index.answers_count == 0
    index.add("s", [Pattern("a/*")])
    assert index.subscribers("a/x") == ("s",)


def test_a_subscriber_registers_once_and_with_a_bounded_number_of_patterns() -> None:
    index = index_of([], {"s": ["a"]})
    with pytest.raises(ValueError, match="already"):
        index.add("s", [Pattern("b")])
    with pytest.raises(LimitExceededError, match="1024"):
        index.add("t", [Pattern("b")] * (PATTERNS_PER_SUBSCRIBER_MAX + 1))


# --- Searching in steps ---


def test_a_search_compares_no_more_than_its_slice_allows() -> None:
    index = index_of(["x"], {})
    for i in range(100):
        index.add(f"s{i}", [CountedPattern(f"*{i}")])
    search = index.search("x")
    steps = 1
    while not search.step(comparisons_max=10):
        assert len(CountedPattern.compared) == 10 * steps
        steps += 1
    assert len(CountedPattern.compared) == 100
    assert search.subscribers == ()


def test_a_slice_counts_costly_comparisons_for_more() -> None:
    index = index_of(["x"], {})
    for i in range(10):
        index.add(f"s{i}", [CountedPattern(f"*[!b][!b]?{i}*")])
    assert not index.search("x").step(comparisons_max=20)
    assert len(CountedPattern.compared) == 1


def test_a_search_under_way_notices_who_comes_and_goes() -> None:
    index = index_of(["a/x"], {f"s{i}": [f"*{i}*"] for i in range(20)} | {"gone": ["*x"]})
    search = index.search("a/x")
    while search.step(comparisons_max=4):
        raise AssertionError("this search has to take several steps")
    index.remove("gone")
    index.add("new", [Pattern("a/*")])
    index.add("newer", [Pattern("*/x")])
    index.remove("newer")
    while not search.step(comparisons_max=4):
        assert index.recall("a/x") is None
    assert search.subscribers == ("new",)
    assert index.recall("a/x") == ("new",)


def test_a_search_under_way_finds_a_newcomer_to_a_pattern_it_has_yet_to_compare_once() -> None:
    index = index_of(["a/x"], {"old": ["*x"], "other": ["*y"]})
    search = index.search("a/x")
    assert not search.step(comparisons_max=1)
    index.add("new", [Pattern("*x")])
    assert search.step()
    assert sorted(search.subscribers) == ["new", "old"]


def test_a_finished_search_can_be_stepped_on_and_stays_exact() -> None:
    index = index_of(["a/x"], {"s": ["*x"]})
    search = index.search("a/x")
    assert search.step()
    assert search.step()
    assert search.subscribers == ("s",)
    index.add("t", [Pattern("a*")])
    assert search.step()
    assert sorted(search.subscribers) == ["s", "t"]
    index.remove("s")
    assert search.step()
    assert search.subscribers == index.recall("a/x") == ("t",)


def test_a_topic_removed_during_its_search_is_not_remembered() -> None:
    index = index_of(["a"], {"s": ["*"], "t": ["?"]})
    search = index.search("a")
    assert not search.step(comparisons_max=1)
    index.remove_topic("a")
    assert search.step()
    assert set(search.subscribers) == {"s", "t"}
    assert index.answers_count == 0


# --- Which topics match this pattern? ---


def test_a_walk_finds_the_matching_topics_in_order() -> None:
    index = index_of(["b/x", "a/x", "a/y", "!dead/x", "a"], {})
    assert index.topics(Pattern("*x")) == ["a/x", "b/x"]
    assert index.topics(Pattern("a/*")) == ["a/x", "a/y"]
    assert index.topics(Pattern("a")) == ["a"]
    assert index.topics(Pattern("b")) == []
    assert index.topics(Pattern("!*")) == ["!dead/x"]


def test_a_walk_gives_the_topics_of_its_beginning_without_those_removed_before_it_comes_by() -> (
    None
):
    index = index_of(["b", "d", "f", "h"], {})
    walk = index.walk(Pattern("*"))
    found = walk.step(comparisons_max=2)
    assert found == ["b", "d"]
    for new in ("a", "c", "e", "g"):
        index.add_topic(new)
    for old in ("d", "f"):
        index.remove_topic(old)
    index.remove_topic("h")
    index.add_topic("h")  # another topic, made after the walk began
    while not walk.done:
        found += walk.step(comparisons_max=1)
    assert found == ["b", "d"]


def test_a_walk_for_a_literal_pattern_is_a_single_look() -> None:
    index = index_of(["a", "b"], {})
    walk = index.walk(Pattern("a"))
    index.add_topic("c")
    assert walk.step(comparisons_max=1) == ["a"]
    assert walk.done
    late = index.walk(Pattern("z"))
    index.add_topic("z")
    assert late.step() == []


# --- What a change touches ---


def many_topics() -> list[str]:
    return [f"site-{i % 100:02}/sensor-{i}" for i in range(20_000)]


def test_a_pattern_with_a_literal_beginning_touches_only_names_that_share_it() -> None:
    topics = many_topics()
    index = index_of(topics, {"old": ["site-*"]})
    for topic in topics:
        index.subscribers(topic)
    sharing = {topic for topic in topics if topic.startswith("site-42/")}

    index.add("new", [CountedPattern("site-42/*7")])
    assert {topic for topic in topics if index.recall(topic) is None} == sharing
    for topic in topics:
        index.subscribers(topic)
    assert sorted(CountedPattern.compared) == sorted(sharing)

    CountedPattern.compared.clear()
    assert len(index.topics(CountedPattern("site-43/*7"))) == 0
    assert len(CountedPattern.compared) == 200
    index.remove("new")
    assert {topic for topic in topics if index.recall(topic) is None} == sharing


def test_a_topic_meets_only_patterns_that_share_their_beginning_with_it() -> None:
    index = index_of(["site-42/a"], {})
    for i in range(10_000):
        index.add(f"s{i}", [CountedPattern(f"site-{i}/*a"), CountedPattern(f"literal-{i}")])
    assert index.subscribers("site-42/a") == ("s42",)
    assert CountedPattern.compared == ["site-42/a"]


def test_a_new_wildcard_is_compared_once_with_each_topic_that_is_asked_for_and_no_other() -> None:
    topics = many_topics()[:1000]
    index = index_of(topics, {})
    for i in range(50):
        index.add(f"s{i}", [CountedPattern(f"*-{i}")])
    for topic in topics:
        index.subscribers(topic)
    assert len(CountedPattern.compared) == 50 * 1000
    CountedPattern.compared.clear()

    index.add("new", [CountedPattern("*-7?")])
    assert not CountedPattern.compared
    for topic in topics[:200] * 2:
        index.subscribers(topic)
    # The fifty patterns from before are not compared again.
    assert CountedPattern.compared == topics[:200]


def test_a_pattern_that_many_subscribers_share_is_compared_once() -> None:
    index = index_of(["a/x"], {})
    for i in range(1000):
        index.add(f"s{i}", [CountedPattern("*x")])
    assert len(index.subscribers("a/x")) == 1000
    assert len(CountedPattern.compared) == 1


def test_a_broad_prefix_withdraws_all_answers_at_a_stroke_and_they_stay_exact() -> None:
    index: PatternIndex[str] = PatternIndex(withdrawn_max=5)
    topics = [f"a/{i}" for i in range(20)] + ["b/0"]
    for topic in topics:
        index.add_topic(topic)
        assert index.subscribers(topic) == ()
    index.add("broad", [CountedPattern("a/*")])
    assert all(index.recall(topic) is None for topic in topics)
    assert index.subscribers("b/0") == ()
    assert not CountedPattern.compared
    assert all(index.subscribers(topic) == ("broad",) for topic in topics[:-1])


@pytest.mark.parametrize("withdrawn_max", [5, 2000])
def test_answers_stay_exact_while_many_leave_and_some_topics_are_asked_for_in_between(
    withdrawn_max: int,
) -> None:
    index: PatternIndex[int] = PatternIndex(withdrawn_max=withdrawn_max)
    topics = [f"a/{i}" for i in range(20)]
    for topic in topics:
        index.add_topic(topic)
    patterns = [Pattern(text) for text in ("a/*", "a/1", "*", "a/1*")]
    left = list(range(40))
    for subscriber in left:
        index.add(subscriber, [patterns[subscriber % 4]])

    def expected(topic: str) -> list[int]:
        return [each for each in left if patterns[each % 4].matches(topic)]

    while left:
        index.remove(left.pop(len(left) // 2))
        if len(left) % 3 == 0:
            asked = topics[len(left) % 20]
            assert sorted(index.subscribers(asked)) == expected(asked)
        if len(left) % 5 == 0:
            assert all(sorted(index.subscribers(topic)) == expected(topic) for topic in topics)
        recalled = {topic: index.recall(topic) for topic in topics}
        assert all(
            sorted(answer) == expected(topic)
            for topic, answer in recalled.items()
            if answer is not None
        )


# --- What is remembered ---


def test_equal_answers_are_one_object() -> None:
    topics = [f"a/{i}" for i in range(100)]
    index = index_of(topics, {"s": ["a/*"], "t": ["*"]})
    for topic in topics[:50]:
        index.subscribers(topic)
    index.add("u", [Pattern("*")])
    index.remove("s")
    # Half of them come to the same answer by another way than the other half.
    assert len({id(index.subscribers(topic)) for topic in topics}) == 1
    assert set(index.subscribers("a/0")) == {"t", "u"}


def test_remembered_answers_are_bounded_and_forgetting_loses_nothing() -> None:
    index: PatternIndex[str] = PatternIndex(answers_max=30)
    topics = [f"a/{i}" for i in range(200)]
    for topic in topics:
        index.add_topic(topic)
    index.add("s", [Pattern("*7")])
    for topic in topics + topics[::-1] + topics[::3] * 3:
        assert index.subscribers(topic) == (("s",) if topic.endswith("7") else ())
        assert index.answers_count <= 30


def test_the_subscribers_that_answers_name_are_bounded_too() -> None:
    index: PatternIndex[int] = PatternIndex(answer_entries_max=300)
    topics = [f"a/{i}" for i in range(200)]
    for i, topic in enumerate(topics):
        index.add_topic(topic)
        index.add(i, [Pattern("*")])  # so every answer is longer than the one before
        assert len(index.subscribers(topic)) == i + 1
    remembered = [answer for topic in topics if (answer := index.recall(topic)) is not None]
    assert sum(map(len, remembered)) <= 300
    assert index.answers_count < 10


def test_what_is_asked_for_often_stays_remembered_while_other_topics_pass() -> None:
    index: PatternIndex[str] = PatternIndex(answers_max=30)
    for i in range(500):
        index.add_topic(f"t{i}")
    index.add("s", [CountedPattern("*")])
    for i in range(1, 500):
        index.subscribers(f"t{i}")
        index.subscribers("t0")
    assert CountedPattern.compared.count("t0") == 1


@given(
    known=st.sets(st.text("ab/", min_size=1, max_size=4), max_size=12),
    asked=st.text("ab/*?", min_size=1, max_size=3),
    visible=st.lists(st.text("ab/*?", min_size=1, max_size=3), max_size=4),
    after=st.text("ab/", max_size=2),
)
def test_walk_of_what_is_visible_gives_what_both_match_in_order(
    known: set[str], asked: str, visible: list[str], after: str
) -> None:
    index: PatternIndex[str] = PatternIndex()
    for name in known:
        index.add_topic(name)
    patterns = [Pattern(text) for text in visible]
    walk = index.walk(Pattern(asked), after=after, visible=patterns)
    found: list[str] = []
    while not walk.done:
        found += walk.step(2, found_max=1)
    expected = [
        name
        for name in sorted(known)
        if name > after
        and Pattern(asked).matches(name)
        and any(pattern.matches(name) for pattern in patterns)
    ]
    assert found == expected
