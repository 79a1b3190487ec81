"""Ids of events: the listener reads the ids that it writes, and refuses all others."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from runnel.formats.batch import Batch
from runnel.formats.heads import PartitionPlace, ShardPlace, Start
from runnel.formats.message import Message
from runnel.formats.wire import GapState
from runnel.protocols.http.encoding.event_ids import ID_CHARS_MAX, EventIds, resumed
from runnel.protocols.http.encoding.problems import FieldFault
from runnel.protocols.http.encoding.sent_last_values import SentLists

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
    position = EventIds(["a/*"], Start("latest"), SentLists())
    shards = [ShardPlace(*key, *place) for key, place in places.items()]
    position.begin(shards, ())
    text = position.current()
    assert text is not None
    start, seen = resumed(text, ["a/*"], SentLists())
    assert (start.kind, list(start.shards), seen) == ("resume", shards, ())


@given(st.lists(st.tuples(_NUMBERS, _NUMBERS, _NUMBERS), max_size=8))
def test_places_in_partitions_come_back_as_they_were(
    places: list[tuple[int, int, int]],
) -> None:
    position = EventIds(["b", "a"], Start("latest"), SentLists())
    partitions = {
        number: PartitionPlace("ab"[number % 2], *place) for number, place in enumerate(places)
    }
    unique = {(each.topic, each.partition): each for each in partitions.values()}
    position.begin((), list(unique.values()))
    text = position.current()
    assert text is not None
    start, _ = resumed(text, ["a", "b"], SentLists())
    assert list(start.partitions) == list(unique.values())


@given(st.text(max_size=60) | st.from_regex(r"[A-Za-z0-9_-]{4,40}(\.[0-9]{1,20}){0,3}(~.{0,30})?"))
def test_what_is_no_id_is_refused_and_nothing_worse(text: str) -> None:
    with pytest.raises(FieldFault):
        resumed(text, ["a/*"], SentLists())


def test_every_change_of_one_character_is_refused_or_still_an_id() -> None:
    position = EventIds(["a/*"], Start("last"), SentLists())
    position.begin([ShardPlace("main", 0, 3, 17, 4)], ())
    text = position.current()
    assert text is not None
    for at in range(len(text)):
        for other in "A.~-0é ":
            try:
                start, _ = resumed(text[:at] + other + text[at + 1 :], ["a/*"], SentLists())
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
    position = EventIds(["*"], Start("latest"), SentLists())
    batch = _stored(Message("a", b"1"), Message("b", b"2"), Message("b", b"3"), entry=7)
    ids = list(position.ids(batch, "main", 0, 2, 8, is_whole=True))
    found = []
    for text in ids:
        assert text is not None
        [place] = resumed(text, ["*"], SentLists())[0].shards
        found.append((place.epoch, place.entry, place.row))
    assert found == [(2, 7, 1), (2, 7, 2), (2, 8, 0)]


def test_a_gap_of_a_partition_is_passed() -> None:
    position = EventIds(["a"], Start("latest"), SentLists())
    position.begin((), [PartitionPlace("a", 0, 5, 1)])
    text = position.missed(GapState("retention", 4, "a", 0, 5, 9, ""))
    assert text is not None
    assert resumed(text, ["a"], SentLists())[0].partitions == [PartitionPlace("a", 0, 9, 1)]
    assert position.missed(GapState("retention", 4, "b", 0, 5, 9, "")) is None


def test_more_places_than_an_id_can_hold_give_none() -> None:
    position = EventIds(["*"], Start("latest"), SentLists())
    position.begin([ShardPlace(f"journal-{n}", 0, 1, n) for n in range(500)], ())
    assert position.current() is None
    with pytest.raises(FieldFault):
        resumed("A" * (ID_CHARS_MAX + 4), ["*"], SentLists())


# --- Last values ---


def _last_ids(position: EventIds, *topics: str) -> list[tuple[bool, str | None]]:
    batch = _stored(*(Message(topic, b"x") for topic in topics), entry=7)
    return list(position.last_values(batch))


def test_ids_of_last_values_stay_short_and_say_how_many_came() -> None:
    lists = SentLists()
    topics = [f"a/{number:04}" for number in range(2000)]
    position = EventIds(["a/*"], Start("last"), lists)
    position.begin([ShardPlace("main", 0, 3, 17, 4)], ())
    ids = [text for _, text in _last_ids(position, *topics)]
    assert max(len(text or "") for text in ids) < 70
    text = ids[1499]
    assert text is not None
    start, seen = resumed(text, ["a/*"], lists)
    again = EventIds(["a/*"], start, lists, seen)
    repeated = [is_repeated for is_repeated, _ in _last_ids(again, *topics)]
    assert repeated == [True] * 1500 + [False] * 500
    # And once more, from an id of the second stream.
    again.begin([ShardPlace("main", 0, 3, 17, 4)], ())
    text = again.current()
    assert text is not None
    start, seen = resumed(text, ["a/*"], lists)
    third = EventIds(["a/*"], start, lists, seen)
    assert all(is_repeated for is_repeated, _ in _last_ids(third, *topics))


def test_an_id_whose_list_is_not_remembered_brings_all_last_values_again() -> None:
    position = EventIds(["a/*"], Start("last"), SentLists())
    position.begin([ShardPlace("main", 0, 3, 17, 4)], ())
    text = _last_ids(position, "a/1", "a/2")[-1][1]
    assert text is not None
    start, seen = resumed(text, ["a/*"], SentLists())  # as after a restart
    assert (start.kind, list(start.shards)) == ("resume_last", [ShardPlace("main", 0, 3, 17, 4)])
    assert not seen


def test_an_id_of_an_earlier_version_is_taken() -> None:
    """It has the last values themselves, a digest of 11 characters each."""
    old = EventIds(["a/*"], Start("last"), SentLists())
    old.begin([ShardPlace("main", 0, 3, 17, 4)], ())
    text = old.current() or ""
    named = ["a/1\0000\0007\0001", "a/2\0000\0007\0002"]
    digests = [urlsafe_b64encode(xxhash.xxh3_64_digest(each.encode())) for each in named]
    text += "~" + "".join(digest[:11].decode() for digest in digests)
    lists = SentLists()
    start, seen = resumed(text, ["a/*"], lists)
    position = EventIds(["a/*"], start, lists, seen)
    found = _last_ids(position, "a/1", "a/2", "a/3")
    assert [is_repeated for is_repeated, _ in found] == [True, True, False]


@pytest.mark.parametrize("end", ["~abc", "~token.", "~token.x", "~token.-1", "~!!!!!!!!!!!"])
def test_what_is_no_list_of_last_values_is_refused(end: str) -> None:
    position = EventIds(["a/*"], Start("last"), SentLists())
    position.begin([ShardPlace("main", 0, 3, 17, 4)], ())
    with pytest.raises(FieldFault):
        resumed(f"{position.current()}{end}", ["a/*"], SentLists())


def test_lists_of_last_values_have_a_limit_together_and_the_oldest_make_room() -> None:
    lists = SentLists(remembered_max=100)
    first, second = lists.begin(), lists.begin()
    digests = [number.to_bytes(8, "little") for number in range(200)]
    assert all(first.add(digest) for digest in digests[:60])
    assert all(second.add(digest) for digest in digests[:60])
    assert lists.count == 60
    assert not lists.recall(first.token, 60)
    assert not first.add(digests[60])
    assert lists.recall(second.token, 2) == {digests[0], digests[1]}
    assert [second.add(digest) for digest in digests[60:]].count(True) == 40
    assert lists.count == 100
