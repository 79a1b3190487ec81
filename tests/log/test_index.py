"""The index of a segment: growing, sealed, and a naive one that looks at everything."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import MalformedError
from runnel.log.segments.index import HEADER_BYTES, GrowingIndex, Index, RunPlace, SealedIndex
from runnel.topics.names import TopicPartition
from tests.log.samples import batch
from tests.log.segment_samples import Numbers, keys_of

TOPICS = ["a", "b", "größe", "a/b", "A"]


class NaiveRun(NamedTuple):
    key: TopicPartition
    place: RunPlace


class Naive:
    """All runs in a list."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int, int]] = []
        self.runs: list[NaiveRun] = []
        self.covered_bytes = 64

    def runs_from(self, key: TopicPartition, offset: int) -> list[RunPlace]:
        return [
            run.place
            for run in self.runs
            if run.key == key and run.place.base_offset + run.place.count > offset
        ]

    def next_offset(self, key: TopicPartition) -> int:
        places = self.runs_from(key, 0)
        return places[-1].base_offset + places[-1].count if places else 0

    def first_offset(self, key: TopicPartition) -> int:
        places = self.runs_from(key, 0)
        return places[0].base_offset if places else 0


@st.composite
def indexes(draw: st.DrawFn) -> tuple[GrowingIndex, Naive]:
    growing, naive = GrowingIndex(64), Naive()
    numbers = Numbers(entry=draw(st.integers(1, 10)))
    time_ns = draw(st.integers(0, 10))
    for number in range(draw(st.integers(0, 8))):
        runs = draw(
            st.lists(
                st.tuples(st.sampled_from(TOPICS), st.integers(1, 3), st.integers(0, 2)),
                min_size=1,
                max_size=6,
            )
        )
        published = batch(*((topic, [b"x"] * count, part) for topic, count, part in runs))
        for key in keys_of(published):  # holes, as rewriting leaves them
            numbers.partition(key).next_offset += draw(st.integers(0, 2))
        numbers.entry += draw(st.integers(0, 2))
        time_ns += draw(st.integers(0, 3))
        stored = numbers.store(published, time_ns)
        position = naive.covered_bytes + 8 * draw(st.integers(0, 1))  # damage may lie between
        size = 8 * draw(st.integers(3, 9))
        growing.add(stored.envelope, keys_of(stored), position, size)
        naive.covered_bytes = position + size
        naive.blocks.append((stored.envelope.entry, position, time_ns))
        naive.runs += [
            NaiveRun((run.topic, run.partition), RunPlace(run.base_offset, run.count, number, at))
            for at, run in enumerate(stored.runs())
        ]
    return growing, naive


def check(index: Index, naive: Naive) -> None:
    assert index.covered_bytes == naive.covered_bytes
    assert index.block_count() == len(naive.blocks)
    assert [index.block_place(number) for number in range(index.block_count())] == naive.blocks
    entries = [entry for entry, _, _ in naive.blocks]
    times = [time for _, _, time in naive.blocks]
    positions = [position for _, position, _ in naive.blocks]
    for value in range(60):
        assert index.first_block_from_entry(value) == sum(entry < value for entry in entries)
        assert index.first_block_from_time(value) == sum(time < value for time in times)
    for value in range(64, naive.covered_bytes + 8, 8):
        assert index.first_block_from_position(value) == sum(at < value for at in positions)
    ends = [*positions[1:], naive.covered_bytes]
    for begin in range(len(positions)):
        for end in range(begin + 1, len(positions) + 1):
            assert index.block_positions(begin, end) == [*positions[begin:end], ends[end - 1]]
    keys = {run.key for run in naive.runs}
    assert set(index.keys()) == keys
    for key in [*keys, ("a", 9), ("nowhere", 0)]:
        assert index.next_offset(key) == naive.next_offset(key)
        assert index.first_offset(key) == naive.first_offset(key)
        for offset in range(naive.next_offset(key) + 2):
            assert list(index.runs_from(key, offset)) == naive.runs_from(key, offset)
    check_table(index, naive)


def check_table(index: Index, naive: Naive) -> None:
    table = index.run_table(lambda key: key[0] != "b")
    begin = 0
    found: list[NaiveRun] = []
    for key, end in zip(table.keys, table.ends.tolist(), strict=True):
        for at in range(begin, end):
            place = RunPlace(
                int(table.base_offsets[at]),
                int(table.counts[at]),
                int(table.blocks[at]),
                int(table.runs[at]),
            )
            found.append(NaiveRun(key, place))
        begin = end
    expected = [run for run in naive.runs if run.key[0] != "b"]
    assert sorted(found, key=str) == sorted(expected, key=str)


@given(indexes())
def test_growing_sealed_and_resumed_index_agree_with_the_naive_one(
    made: tuple[GrowingIndex, Naive],
) -> None:
    growing, naive = made
    check(growing, naive)
    sealed = SealedIndex(growing.encode(3))
    assert sealed.header.generation == 3
    check(sealed, naive)
    resumed = GrowingIndex.resume(sealed)
    check(resumed, naive)
    assert resumed.encode(3) == growing.encode(3)


def small() -> tuple[GrowingIndex, Numbers]:
    growing, numbers = GrowingIndex(64), Numbers()
    for number in range(3):
        stored = numbers.store(batch(("b", [b"1"]), ("a", [b"2", b"3"])), time_ns=100 + number)
        growing.add(stored.envelope, keys_of(stored), growing.covered_bytes, 80)
    return growing, numbers


def test_resumed_index_goes_on_where_the_sealed_one_ended() -> None:
    growing, numbers = small()
    resumed = GrowingIndex.resume(SealedIndex(growing.encode(0)))
    stored = numbers.store(batch(("a", [b"4"]), ("c", [b"5"])), time_ns=200)
    for index in (growing, resumed):
        index.add(stored.envelope, keys_of(stored), index.covered_bytes, 96)
    assert resumed.encode(0) == growing.encode(0)
    assert resumed.next_offsets() == {("a", 0): 8, ("b", 0): 4, ("c", 0): 2}


def test_keys_of_a_sealed_index_are_sorted() -> None:
    growing, _ = small()
    assert list(SealedIndex(growing.encode(0)).keys()) == [("a", 0), ("b", 0)]


def test_header_tells_what_the_segment_holds() -> None:
    growing, _ = small()
    header = SealedIndex(growing.encode(7)).header
    assert (header.first_entry, header.last_entry) == (1, 3)
    assert (header.first_time_ns, header.last_time_ns) == (100, 102)
    assert (header.blocks, header.keys, header.runs) == (3, 2, 6)
    assert (header.generation, header.covered_bytes) == (7, 64 + 3 * 80)


def test_empty_index_is_an_index() -> None:
    sealed = SealedIndex(GrowingIndex(64).encode(0))
    assert len(GrowingIndex(64).encode(0)) == HEADER_BYTES
    assert sealed.block_count() == 0
    assert sealed.first_block_from_entry(1) == 0
    assert list(sealed.runs_from(("a", 0), 1)) == []


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    data = small()[0].encode(0)
    for length in range(len(data)):
        with pytest.raises(MalformedError):
            SealedIndex(data[:length])
    with pytest.raises(MalformedError):
        SealedIndex(data + b"\0")
    padding = range(HEADER_BYTES - 4, HEADER_BYTES)
    for position in range(len(data)):
        if position in padding:
            continue
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(MalformedError):
            SealedIndex(bytes(damaged))
