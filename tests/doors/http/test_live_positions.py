"""Ids of events: what is written is read, and nothing else is taken."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.doors.http.positions import ID_CHARS_MAX, Position, resumed
from runnel.doors.http.problems import FieldFault
from runnel.formats.batch import Batch
from runnel.formats.heads import PartitionPlace, ShardPlace, Start
from runnel.formats.message import Message
from runnel.formats.wire import GapState

_NUMBERS = st.integers(0, 2**63 - 1)
_NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)


@given(
    st.dictionaries(
        st.tuples(_NAMES, _NUMBERS), st.tuples(_NUMBERS, _NUMBERS, _NUMBERS), max_size=8
    )
)
def test_places_in_shards_come_back_as_they_were(
    places: dict[tuple[str, int], tuple[int, int, int]],
) -> None:
    position = Position(["a/*"], Start("latest"))
    shards = [ShardPlace(*key, *place) for key, place in places.items()]
    position.begin(shards, ())
    text = position.current()
    assert text is not None
    start, seen = resumed(text, ["a/*"])
    assert (start.kind, list(start.shards), seen) == ("resume", shards, "")


@given(st.lists(st.tuples(_NUMBERS, _NUMBERS, _NUMBERS), max_size=8))
def test_places_in_partitions_come_back_as_they_were(
    places: list[tuple[int, int, int]],
) -> None:
    position = Position(["b", "a"], Start("latest"))
    partitions = {
        number: PartitionPlace("ab"[number % 2], *place) for number, place in enumerate(places)
    }
    unique = {(each.topic, each.partition): each for each in partitions.values()}
    position.begin((), list(unique.values()))
    text = position.current()
    assert text is not None
    start, _ = resumed(text, ["a", "b"])
    assert list(start.partitions) == list(unique.values())


@given(st.text(max_size=60) | st.from_regex(r"[A-Za-z0-9_-]{4,40}(\.[0-9]{1,20}){0,3}(~.{0,30})?"))
def test_what_is_no_id_is_refused_and_nothing_worse(text: str) -> None:
    with pytest.raises(FieldFault):
        resumed(text, ["a/*"])


def test_every_change_of_one_character_is_refused_or_still_an_id() -> None:
    position = Position(["a/*"], Start("last"))
    position.begin([ShardPlace("main", 0, 3, 17, 4)], ())
    text = position.current()
    assert text is not None
    for at in range(len(text)):
        for other in "A.~-0é ":
            try:
                start, _ = resumed(text[:at] + other + text[at + 1 :], ["a/*"])
            except FieldFault:
                continue
            assert start.kind in ("resume", "resume_last")


def _stored(*messages: Message, entry: int) -> Batch:
    batch = Batch.from_messages(messages)
    runs = len(batch.envelope.topics)
    column = entry.to_bytes(8, "little") * runs
    return Batch(
        msgspec.structs.replace(
            batch.envelope,
            base_offsets=b"".join((n + 1).to_bytes(8, "little") for n in range(runs)),
            receive_times=column,
            epochs=column,
            entries=column,
        ),
        batch.body,
    )


def test_each_message_of_an_entry_has_an_id_of_its_own_and_the_last_is_the_next_entry() -> None:
    position = Position(["*"], Start("latest"))
    batch = _stored(Message("a", b"1"), Message("b", b"2"), Message("b", b"3"), entry=7)
    ids = list(position.ids(batch, "main", 0, 2, 8, is_whole=True))
    found = []
    for text in ids:
        assert text is not None
        [place] = resumed(text, ["*"])[0].shards
        found.append((place.epoch, place.entry, place.row))
    assert found == [(2, 7, 1), (2, 7, 2), (2, 8, 0)]


def test_a_gap_of_a_partition_is_passed() -> None:
    position = Position(["a"], Start("latest"))
    position.begin((), [PartitionPlace("a", 0, 5, 1)])
    text = position.missed(GapState("retention", 4, "a", 0, 5, 9, ""))
    assert text is not None
    assert resumed(text, ["a"])[0].partitions == [PartitionPlace("a", 0, 9, 1)]
    assert position.missed(GapState("retention", 4, "b", 0, 5, 9, "")) is None


def test_more_places_than_an_id_can_hold_give_none() -> None:
    position = Position(["*"], Start("latest"))
    position.begin([ShardPlace(f"journal-{n}", 0, 1, n) for n in range(500)], ())
    assert position.current() is None
    with pytest.raises(FieldFault):
        resumed("A" * (ID_CHARS_MAX + 4), ["*"])
