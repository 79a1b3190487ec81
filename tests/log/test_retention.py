"""What may go and what is served: pure decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from runnel.config import Keep, Pin, Retain
from runnel.log.log import Cursor, CursorPosition, Hold, Position, ShardId
from runnel.log.retention.holds import Holds, holds_of_cursor
from runnel.log.retention.rules import (
    Removal,
    SegmentFacts,
    rotation_period,
    served_at,
    served_runs,
)
from runnel.topics.policies import JournalPolicy
from tests.log.samples import batch
from tests.log.segment_samples import Numbers

MAIN = ShardId("main")
NO_PIN = Pin(age_ns=None, bytes_max=None)


class Held(NamedTuple):
    """A segment, and the readers that hold it."""

    facts: SegmentFacts
    held_by: frozenset[str]


class Decision(NamedTuple):
    """The numbers of the segments that go, of those that only a hold keeps, and the readers whose holds are passed."""

    remove: list[int]
    held: list[int]
    holds_passed: set[str]


def facts(*times: int, held: dict[int, set[str]] | None = None) -> list[Held]:
    """Segments of 100 bytes, numbered from 1, with these last times."""
    return [
        Held(SegmentFacts(number, 100, time), frozenset((held or {}).get(number, ())))
        for number, time in enumerate(times, 1)
    ]


def decided(
    segments: Sequence[Held],
    retain: Retain,
    pin: Pin = NO_PIN,
    *,
    active_bytes: int = 0,
    now_ns: int = 1000,
) -> Decision:
    total = active_bytes + sum(segment.facts.bytes for segment in segments)
    removal = Removal(total, retain, pin, now_ns)
    decision = Decision([], [], set())
    for each, held_by in segments:
        if not removal.is_due(each):
            break
        if removal.takes(each, held_by):
            decision.remove.append(each.number)
            decision.holds_passed.update(held_by)
        else:
            decision.held.append(each.number)
    return decision


def test_without_rules_nothing_goes() -> None:
    assert decided(facts(1, 2, 3), Retain()).remove == []


def test_segments_go_when_their_last_message_has_passed_the_age() -> None:
    assert decided(facts(899, 900, 901), Retain(age_ns=100)).remove == [1]


def test_oldest_segments_go_until_the_rest_fits() -> None:
    segments = facts(1, 2, 3, 4)
    assert decided(segments, Retain(bytes_max=250)).remove == [1, 2]
    assert decided(segments, Retain(bytes_max=400)).remove == []
    assert decided(segments, Retain(bytes_max=400), active_bytes=1).remove == [1]
    assert decided(segments, Retain(bytes_max=1)).remove == [1, 2, 3, 4]


def test_active_segment_counts_but_never_goes() -> None:
    assert decided([], Retain(bytes_max=1), active_bytes=1000).remove == []


def test_held_segment_stays_and_is_named_and_those_behind_it_go() -> None:
    decision = decided(facts(1, 2, 3, held={2: {"c"}}), Retain(age_ns=100))
    assert decision == Decision([1, 3], [2], set())


def test_hold_is_passed_at_its_age() -> None:
    segments = facts(100, 600, 880, held={1: {"a", "b"}, 2: {"b"}, 3: {"c"}})
    decision = decided(segments, Retain(age_ns=100), Pin(age_ns=500, bytes_max=None))
    assert decision == Decision([1], [2, 3], {"a", "b"})


def test_hold_is_passed_at_its_bytes() -> None:
    segments = facts(1, 2, 3, 4, held={1: {"a"}, 2: {"a"}, 3: {"b"}})
    decision = decided(segments, Retain(bytes_max=100), Pin(age_ns=None, bytes_max=250))
    assert decision == Decision([1, 2, 4], [3], {"a"})


def naive(
    segments: Sequence[Held], total: int, retain: Retain, pin: Pin, now_ns: int
) -> Iterator[Held]:
    """What goes, judged anew for each segment from all that is left: the twin of `Removal`."""
    left = {(each.facts.shard, each.facts.number): each for each in segments}
    for each in sorted(segments, key=lambda held: (held.facts.last_time_ns, held.facts.shard)):
        gone = sum(one.facts.bytes for one in segments) - sum(
            one.facts.bytes for one in left.values()
        )
        age = now_ns - each.facts.last_time_ns
        is_old = retain.age_ns is not None and age > retain.age_ns
        is_over = retain.bytes_max is not None and total - gone > retain.bytes_max
        is_pinned = each.held_by and not (
            (pin.age_ns is not None and age > pin.age_ns)
            or (pin.bytes_max is not None and total - gone > pin.bytes_max)
        )
        if (is_old or is_over) and not is_pinned:
            del left[each.facts.shard, each.facts.number]
            yield each


BOUND = st.none() | st.integers(0, 60)


@given(
    times=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 9))),
    held=st.sets(st.integers(0, 20)),
    active_bytes=st.integers(0, 20),
    retain=st.tuples(BOUND, BOUND),
    pin=st.tuples(BOUND, BOUND),
)
def test_segments_of_all_shards_go_as_if_the_journal_were_one(
    times: list[tuple[int, int, int]],
    held: set[int],
    active_bytes: int,
    retain: tuple[int | None, int | None],
    pin: tuple[int | None, int | None],
) -> None:
    in_order = sorted(times, key=lambda each: (each[1], each[0]))
    segments = [
        Held(SegmentFacts(number, size, time, shard), frozenset({"r"} if number in held else ()))
        for number, (shard, time, size) in enumerate(in_order)
    ]
    assert segments == sorted(segments, key=lambda each: each.facts.age_order)
    rule = Retain(age_ns=retain[0], bytes_max=retain[1])
    ceiling = Pin(age_ns=pin[0], bytes_max=pin[1])
    total = active_bytes + sum(size for _, _, size in times)
    found = decided(segments, rule, ceiling, active_bytes=active_bytes, now_ns=50)
    expected = [each.facts.number for each in naive(segments, total, rule, ceiling, 50)]
    assert found.remove == expected


# --- Holds ---


def test_cursor_on_a_partition_holds_its_messages_from_the_offset_on() -> None:
    hold = Hold("c", ("a", 1), 5, 0, ())
    assert hold.holds(("a", 1), 6, 1)
    assert not hold.holds(("a", 1), 5, 1)
    assert not hold.holds(("a", 0), 9, 1)
    assert not hold.holds(("b", 1), 9, 1)


def test_cursor_over_patterns_holds_matching_topics_from_the_entry_on() -> None:
    hold = Hold("c", None, 0, 5, ("x/*", "y"))
    assert hold.holds(("x/1", 3), 1, 5)
    assert hold.holds(("y", 0), 1, 9)
    assert not hold.holds(("x/1", 3), 1, 4)
    assert not hold.holds(("z", 0), 1, 9)


def test_cursor_holds_only_what_lies_in_the_shard() -> None:
    other = ShardId("other")
    cursor = Cursor(
        "c",
        (
            CursorPosition(topic="here", offset=3),
            CursorPosition(topic="there", offset=4),
            CursorPosition(topic="deleted", offset=5),
            CursorPosition(shard=MAIN, position=Position(1, 7), patterns=("*",)),
            CursorPosition(shard=other, position=Position(1, 8), patterns=("*",)),
        ),
        0,
    )
    shards = {"here": MAIN, "there": other}
    assert holds_of_cursor(cursor, MAIN, lambda key: shards.get(key[0])) == [
        Hold("c", ("here", 0), 3, 0, ()),
        Hold("c", None, 0, 7, ("*",)),
    ]


# --- Serving ---


def policy(retain: Retain, pin: Pin = NO_PIN) -> JournalPolicy:
    return JournalPolicy(keep=Keep.DISK, retain=retain, pin=pin)


def no_holds() -> Holds:
    return Holds([])


def test_message_is_served_up_to_its_age() -> None:
    is_served = served_at(1000, policy(Retain(age_ns=100)), floor_of=None, holds=no_holds)
    assert is_served(("a", 0), 2, 900, 1)
    assert not is_served(("a", 0), 2, 899, 1)


def test_held_message_is_served_up_to_the_ceiling_of_holds() -> None:
    asked = 0

    def holds() -> Holds:
        nonlocal asked
        asked += 1
        return Holds([Hold("c", ("a", 0), 5, 0, ())])

    holding = policy(Retain(age_ns=100), Pin(age_ns=500, bytes_max=None))
    is_served = served_at(1000, holding, floor_of=None, holds=holds)
    assert is_served(("b", 0), 9, 950, 1)
    assert asked == 0  # only for what has passed its age
    assert is_served(("a", 0), 6, 500, 1)
    assert not is_served(("a", 0), 5, 500, 1)
    assert not is_served(("b", 0), 6, 500, 1)
    assert not is_served(("a", 0), 6, 499, 1)
    assert asked == 1


def test_purged_messages_are_not_served() -> None:
    floors = {("a", 0): 5, ("b", 0): 1}
    is_served = served_at(1000, policy(Retain()), floor_of=floors.get, holds=no_holds)
    assert is_served(("a", 0), 6, 0, 1)
    assert not is_served(("a", 0), 5, 0, 1)
    assert is_served(("b", 0), 2, 0, 1)
    assert not is_served(("deleted", 0), 9, 0, 1)


def test_runs_that_are_served_are_chosen_out_of_a_batch() -> None:
    stored = Numbers().store(batch(("a", [b"1"]), ("b", [b"2"]), ("a", [b"3"])), time_ns=5)
    head = stored.envelope
    assert served_runs(head, lambda *_: True) is None
    assert served_runs(head, lambda *_: False) == ()
    assert served_runs(head, lambda key, *_: key[0] == "a") == (0, 2)
    assert served_runs(head, lambda key, end, *_: end == 3) == (2,)
    assert served_runs(head, lambda key, end, time_ns, entry: (time_ns, entry) == (5, 1)) is None


# --- Periods ---


def test_period_changes_at_the_offset_and_not_before() -> None:
    assert rotation_period(99, 100, 0) == 0
    assert rotation_period(100, 100, 0) == 1
    assert rotation_period(129, 100, 30) == 0
    assert rotation_period(130, 100, 30) == 1
    assert rotation_period(29, 100, 30) == -1
    assert rotation_period(10**18, None, 30) == rotation_period(0, None, 0)
