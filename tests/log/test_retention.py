"""What may go and what is served: pure decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runnel.config import Keep, Pin, Retain
from runnel.log.log import Cursor, CursorPosition, Hold, Position, ShardId
from runnel.log.retention.holds import Holds, holds_of_cursor
from runnel.log.retention.rules import (
    Decision,
    SegmentFacts,
    decide,
    rotation_period,
    served_at,
    served_runs,
)
from runnel.topics.policies import JournalPolicy
from tests.log.samples import batch
from tests.log.segment_samples import Numbers

MAIN = ShardId("main")
NO_PIN = Pin(age_ns=None, bytes_max=None)


def facts(*times: int, held: dict[int, set[str]] | None = None) -> list[SegmentFacts]:
    """Segments of 100 bytes, numbered from 1, with these last times."""
    return [
        SegmentFacts(number, 100, time, frozenset((held or {}).get(number, ())))
        for number, time in enumerate(times, 1)
    ]


def decided(
    segments: Sequence[SegmentFacts],
    retain: Retain,
    pin: Pin = NO_PIN,
    *,
    active_bytes: int = 0,
    now_ns: int = 1000,
) -> Decision:
    total = active_bytes + sum(segment.bytes for segment in segments)
    return decide(segments, total, retain, pin, now_ns)


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
    assert decision.remove == [1, 3]
    assert decision.held == [2]
    assert decision.holds_passed == frozenset()


def test_hold_is_passed_at_its_age() -> None:
    segments = facts(100, 600, 880, held={1: {"a", "b"}, 2: {"b"}, 3: {"c"}})
    decision = decided(segments, Retain(age_ns=100), Pin(age_ns=500, bytes_max=None))
    assert decision.remove == [1]
    assert decision.held == [2, 3]
    assert decision.holds_passed == {"a", "b"}


def test_hold_is_passed_at_its_bytes() -> None:
    segments = facts(1, 2, 3, 4, held={1: {"a"}, 2: {"a"}, 3: {"b"}})
    decision = decided(segments, Retain(bytes_max=100), Pin(age_ns=None, bytes_max=250))
    assert decision.remove == [1, 2, 4]
    assert decision.held == [3]
    assert decision.holds_passed == {"a"}


def test_no_more_segments_are_looked_at_than_needed() -> None:
    looked: list[int] = []

    def lazily() -> Iterator[SegmentFacts]:
        for segment in facts(1, 2, 900, 950, 960):
            looked.append(segment.number)
            yield segment

    assert decide(lazily(), 500, Retain(age_ns=200), NO_PIN, 1000).remove == [1, 2]
    assert looked == [1, 2, 3]


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
