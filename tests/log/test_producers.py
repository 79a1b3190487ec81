"""Sequences of named publishers, as pure bookkeeping."""

from __future__ import annotations

import pytest

from runnel.errors import ProducerFault, ProducerFencedError, ProducerForgottenError
from runnel.log.metadata.producers import WINDOW, ProducerTable, Repeated


def table(producers_max: int = 10, age_max_ns: int = 1000) -> ProducerTable:
    return ProducerTable(producers_max, age_max_ns)


def accept(producers: ProducerTable, name: str, term: int, number: int, entry: int = 1) -> None:
    assert producers.check(name, term, number) is None
    producers.accept(name, term, number, entry, 0)


def test_next_number_passes_and_a_repeated_one_tells_its_entry() -> None:
    producers = table()
    for number in range(5):
        accept(producers, "p", 0, number, entry=10 + number)
    for number in range(5):
        assert producers.check("p", 0, number) == Repeated(10 + number)
    assert producers.check("p", 0, 5) is None


def test_repetition_from_before_the_window_is_known_but_not_its_entry() -> None:
    producers = table()
    for number in range(WINDOW + 10):
        accept(producers, "p", 0, number, entry=number + 1)
    assert producers.check("p", 0, 9) == Repeated(None)
    assert producers.check("p", 0, 10) == Repeated(11)


def test_gap_older_term_and_unknown_publisher_are_told_apart() -> None:
    producers = table()
    accept(producers, "p", 2, 0)
    with pytest.raises(ProducerFault) as gap:
        producers.check("p", 2, 2)
    assert gap.value.code == "producer_gap"
    with pytest.raises(ProducerFault) as late:
        producers.check("p", 3, 1)
    assert late.value.code == "producer_gap"
    with pytest.raises(ProducerFencedError):
        producers.check("p", 1, 0)
    with pytest.raises(ProducerForgottenError):
        producers.check("q", 0, 1)


def test_new_term_forgets_the_numbers_of_the_old() -> None:
    producers = table()
    accept(producers, "p", 1, 0, entry=5)
    accept(producers, "p", 1, 1, entry=6)
    accept(producers, "p", 7, 0, entry=9)
    assert producers.check("p", 7, 0) == Repeated(9)
    assert producers.check("p", 7, 1) is None


def test_least_recently_used_go_first() -> None:
    producers = table(producers_max=2)
    accept(producers, "p", 0, 0)
    accept(producers, "q", 0, 0)
    accept(producers, "p", 0, 1)
    accept(producers, "r", 0, 0)
    assert len(producers) == 2
    with pytest.raises(ProducerForgottenError):
        producers.check("q", 0, 1)
    assert producers.check("p", 0, 2) is None


def test_unused_ones_go_with_age() -> None:
    producers = table(age_max_ns=100)
    producers.accept("p", 0, 0, 1, 0)
    producers.accept("q", 0, 0, 2, 100)
    assert len(producers) == 2
    producers.accept("q", 0, 1, 3, 101)
    assert len(producers) == 1


def test_states_can_be_loaded_into_another_table() -> None:
    producers = table()
    for number in range(3):
        producers.accept("p", 4, number, 10 + number, 50)
    producers.accept("q", 0, 0, 20, 60)
    loaded = table()
    loaded.load(producers.states())
    assert loaded.states() == producers.states()
    assert loaded.check("p", 4, 1) == Repeated(11)
    assert loaded.check("p", 4, 3) is None
    assert [state.producer for state in producers.states(used_since_ns=55)] == ["q"]


def test_replaying_what_is_known_changes_nothing_and_what_is_newer_is_taken_over() -> None:
    producers = table()
    producers.accept("p", 1, 5, 10, 0)
    producers.replay("p", 1, 5, 99, 0)
    producers.replay("p", 1, 4, 99, 0)
    producers.replay("p", 0, 9, 99, 0)
    assert producers.check("p", 1, 5) == Repeated(10)
    producers.replay("p", 1, 6, 11, 0)
    assert producers.check("p", 1, 6) == Repeated(11)
    producers.replay("p", 2, 0, 12, 0)
    assert producers.check("p", 2, 0) == Repeated(12)


def test_reset_goes_back_to_what_is_stored() -> None:
    producers, stored = table(), table()
    for known in (producers, stored):
        known.accept("p", 0, 0, 1, 0)
    producers.accept("p", 0, 1, 2, 0)
    producers.accept("q", 0, 0, 3, 0)
    producers.reset("p", stored)
    producers.reset("q", stored)
    assert producers.check("p", 0, 1) is None
    assert producers.states() == stored.states()
    producers.accept("p", 0, 1, 9, 0)
    assert stored.check("p", 0, 1) is None  # what was loaded is not shared
