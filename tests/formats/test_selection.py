"""Rows taken, runs cut, slices and joins, against a plain list of placed messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import LimitExceededError, MalformedError
from runnel.formats import columns
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from tests.formats.samples import Placed, message_lists, placed, stored

CODECS = st.sampled_from(list(Codec))


@st.composite
def batches(draw: st.DrawFn, max_size: int = 12) -> Batch:
    """A batch as published or as stored, in any codec."""
    batch = Batch.from_messages(
        draw(message_lists(max_size)), codec=draw(CODECS), producer="p", term=1, number=2
    )
    if draw(st.booleans()):
        batch = stored(batch, entry=draw(st.integers(1, 50)), epoch=draw(st.integers(0, 3)))
    return Batch.unpack(batch.pack())


def check(result: Batch, expected: Sequence[Placed], *, is_stored: bool) -> None:
    """The result holds what the model holds, and so it does when written and read again."""
    for batch in (result, Batch.unpack(result.pack())):
        rows = placed(batch)
        assert [row.message for row in rows] == [row.message for row in expected]
        if is_stored:
            assert rows == list(expected)
        assert batch.envelope.codec == Codec.NONE
        assert batch.envelope.producer is None
        assert (batch.envelope.term, batch.envelope.number) == (0, 0)
        assert columns.encode(columns.decode(batch.body, len(batch))) == batch.body


@given(batches(), st.data())
def test_taken_rows_keep_everything(batch: Batch, data: st.DataObject) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, len(batch) - 1), min_size=1)))
    taken = batch.take(np.array(rows) if data.draw(st.booleans()) else rows)
    if len(rows) == len(batch):
        assert taken is batch
        return
    before = placed(batch)
    check(taken, [before[row] for row in rows], is_stored=batch.envelope.is_stored)


@given(batches())
def test_one_message_is_what_it_is_among_all(batch: Batch) -> None:
    for part in (batch.uncompressed(), batch.cut([0])):  # the second: of one run
        assert [part.message(row) for row in range(len(part))] == part.messages()


@given(batches(), st.data())
def test_cut_runs_keep_everything(batch: Batch, data: st.DataObject) -> None:
    run_count = batch.envelope.run_count
    runs = sorted(data.draw(st.sets(st.integers(0, run_count - 1), min_size=1)))
    cut = batch.cut(runs)
    if len(runs) == run_count:
        assert cut is batch
        return
    before = placed(batch)
    starts = batch.envelope.run_starts().tolist()
    expected = [row for run in runs for row in before[starts[run] : starts[run + 1]]]
    check(cut, expected, is_stored=batch.envelope.is_stored)
    assert cut.envelope.topics == [batch.envelope.topics[run] for run in runs]


@given(batches(), st.data())
def test_slices_keep_everything(batch: Batch, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(batch) - 1))
    end = data.draw(st.none() | st.integers(begin + 1, len(batch)))
    part = batch.slice(begin, end)
    before = placed(batch)
    if len(part) == len(batch):
        assert part is batch
        return
    check(part, before[begin:end], is_stored=batch.envelope.is_stored)


@given(st.lists(batches(5), min_size=1, max_size=5), st.booleans())
def test_joined_batches_keep_everything(parts: list[Batch], is_stored: bool) -> None:
    if is_stored:
        parts = [stored(part, entry=entry) for entry, part in enumerate(parts, 1)]
    else:
        parts = [Batch.from_messages(part.messages()) for part in parts]
    joined = Batch.join(parts)
    if len(parts) == 1:
        assert joined is parts[0]
        return
    expected = [row for part in parts for row in placed(part)]
    check(joined, expected, is_stored=is_stored)
    assert not is_stored or joined.envelope.entry == len(parts)


@given(st.lists(batches(6), min_size=2, max_size=4), st.data())
def test_pieces_of_joined_pieces_still_know_their_entry_and_row(
    parts: list[Batch], data: st.DataObject
) -> None:
    pieces: list[Batch] = []
    expected: list[Placed] = []
    for entry, part in enumerate(parts, 1):
        whole = stored(part, entry=entry)
        rows = sorted(data.draw(st.sets(st.integers(0, len(whole) - 1), min_size=1)))
        pieces.append(whole.take(rows))
        expected += [placed(whole)[row] for row in rows]
    joined = Batch.join(pieces)
    begin = data.draw(st.integers(0, len(joined) - 1))
    assert placed(Batch.unpack(joined.slice(begin).pack())) == expected[begin:]


def test_a_cut_batch_of_one_run_keeps_the_row_it_began_at() -> None:
    whole = stored(Batch.from_messages([Message("t", b"%d" % row) for row in range(10)]), entry=4)
    (run,) = whole.slice(6).runs()
    assert (run.base_offset, run.entry, run.row, run.count) == (7, 4, 6, 4)


def test_rows_that_are_not_neighbours_become_runs_of_their_own() -> None:
    whole = stored(Batch.from_messages([Message("t", b"")] * 6))
    runs = whole.take([0, 1, 4]).runs()
    assert [(run.base_offset, run.row, run.count) for run in runs] == [(1, 0, 2), (5, 4, 1)]


def test_tag_sets_that_no_row_uses_any_more_are_dropped() -> None:
    batch = Batch.from_messages([Message("t", b"", tags={"n": str(row)}) for row in range(5)])
    assert [dict(tags) for tags in batch.take([1, 3]).columns.tag_sets] == [{"n": "1"}, {"n": "3"}]
    assert batch.take([1]).columns.tag_sets == ({"n": "1"},)


def test_a_slice_refers_to_the_payload_bytes_it_was_cut_from() -> None:
    batch = Batch.unpack(Batch.from_messages([Message("t", b"12345678")] * 100).pack())
    assert batch.slice(10, 20).columns.payloads.data.obj is batch.columns.payloads.data.obj


@pytest.mark.parametrize("rows", [[], [1, 0], [1, 1], [-1], [3], [0, 3], [[0, 1]]])
def test_rows_and_runs_that_are_not_there_or_do_not_rise_are_refused(rows: list[int]) -> None:
    batch = Batch.from_messages([Message(f"t{row}", b"") for row in range(3)])
    for select in (batch.take, batch.cut):
        with pytest.raises(MalformedError):
            select(rows)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (0, 4), (2, 2), (2, 1), (3, None)])
def test_slices_outside_the_batch_are_refused(begin: int, end: int | None) -> None:
    with pytest.raises(MalformedError):
        Batch.from_messages([Message("t", b"")] * 3).slice(begin, end)


def test_batches_that_do_not_belong_together_are_not_joined() -> None:
    batch = Batch.from_messages([Message("t", b"")])
    other = Batch.from_columns(batch.columns, ["t"], [1], shard=1)
    for odd in (stored(batch), other):
        with pytest.raises(MalformedError, match="one shard"):
            Batch.join([batch, odd])


def test_joining_more_than_a_batch_may_hold_is_refused() -> None:
    batch = Batch.from_messages([Message("t", bytes(2**20))])
    with pytest.raises(LimitExceededError):
        Batch.join([batch] * 65)
