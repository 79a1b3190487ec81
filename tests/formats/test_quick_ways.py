"""The common case is read in few steps: these must find what the general way finds, in right and in wrong input."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import MalformedError, RunnelError
from runnel.formats import columns, envelope, plain_bodies
from runnel.formats.batch import Batch, Run
from runnel.formats.columns import Columns
from runnel.formats.envelope import OFFSET_MAX, RUNS_MAX, Codec, Envelope, pack32, pack64
from runnel.formats.frames import FrameReader, pack_head
from runnel.formats.message import Message
from tests.formats.samples import INT64, as_read, message_lists, stored

PLAIN = Message("a", b"21.5", event_time_ns=5, transmit_time_ns=-6)


# --- Frames: a chunk that is one whole frame ---


def fed(chunks: list[bytes]) -> list[tuple[bytes, bytes]] | str:
    """What a reader makes of these chunks: frames, or the text of the error."""
    reader = FrameReader(200)
    try:
        frames = [frame for chunk in chunks for frame in reader.feed(chunk)]
    except RunnelError as error:
        return f"{type(error).__name__}: {error}"
    assert reader.held_bytes in (0, len(chunks[-1]))
    return [(bytes(frame.head), bytes(frame.tail)) for frame in frames]


@given(st.integers(0, 260), st.integers(0, 260))
def test_a_chunk_of_one_frame_is_read_as_its_bytes_one_by_one(
    frame_bytes: int, head_bytes: int
) -> None:
    chunk = struct.pack("<II", frame_bytes, head_bytes) + bytes(range(1, 256)) * 2
    chunk = chunk[: 8 + frame_bytes]
    by_byte = fed([chunk[at : at + 1] for at in range(len(chunk))])
    assert fed([chunk]) == by_byte
    assert fed([b"", chunk]) == by_byte


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.integers(0, 300))
def test_whole_frames_and_pieces_of_frames_may_follow_each_other(
    tails: list[bytes], cut: int
) -> None:
    frames = [pack_head(b"head", len(tail)) + tail for tail in tails]
    expected = [(b"head", tail) for tail in tails]
    stream = b"".join(frames)
    assert fed(frames) == expected
    assert fed([stream[:cut], stream[cut:], *frames]) == expected * 2


# --- Envelopes: every column is one number ---


NUMBERS = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2, 2**31 - 1, OFFSET_MAX, OFFSET_MAX + 1])
COLUMNS = st.one_of(
    st.just(b""),
    NUMBERS.map(lambda number: (number % 2**32).to_bytes(4, "little")),
    NUMBERS.map(lambda number: (number % 2**64).to_bytes(8, "little")),
    st.binary(max_size=17),
)


@given(st.lists(COLUMNS, min_size=7, max_size=7), st.sampled_from([1, 2, 3, RUNS_MAX + 1]))
def test_an_envelope_that_passes_at_once_passes_column_by_column(
    values: list[bytes], runs: int
) -> None:
    given_columns = dict(zip(Envelope.__struct_fields__[2:9], values, strict=True))
    plain = Batch.from_messages([PLAIN]).envelope
    head = msgspec.structs.replace(plain, topics=["a"] * runs, **given_columns)
    count = envelope._plain_count(head)
    if count:
        envelope._check_columns(head, runs)
        assert count == sum(head.column32(head.counts)) == head.message_count


@pytest.mark.parametrize("is_stored", [False, True])
def test_the_envelopes_of_single_messages_pass_at_once(is_stored: bool) -> None:
    batch = Batch.from_messages([PLAIN])
    assert envelope._plain_count(stored(batch).envelope if is_stored else batch.envelope) == 1


@given(st.integers(1, 5), st.integers(-(2**31), 2**31 - 1), INT64)
def test_a_column_of_one_number_stands_for_all_runs(runs: int, small: int, large: int) -> None:
    head = msgspec.structs.replace(Batch.from_messages([PLAIN]).envelope, topics=["a"] * runs)
    assert head.column32(pack32([small])) == head.vector32(pack32([small])).tolist()
    assert head.column64(pack64([large])) == head.vector64(pack64([large])).tolist()


# --- Bodies: one plain row ---


def table_of(body: bytes | memoryview) -> Columns | str:
    try:
        return columns.decode(body, 1)
    except MalformedError as error:
        return str(error)


def general_table_of(body: bytes | memoryview) -> Columns | str:
    try:
        return columns._decode_any(body, 1)
    except MalformedError as error:
        return str(error)


def compared(table: Columns | str) -> object:
    """All of a table but `width`, which the general way does not look for."""
    if isinstance(table, str):
        return table
    payloads = msgspec.structs.replace(table.payloads, width=0)
    return msgspec.structs.replace(table, payloads=payloads)


@given(st.binary(max_size=40), INT64, INT64)
def test_a_plain_row_is_read_as_any_other(payload: bytes, event_time: int, sent: int) -> None:
    message = Message("a", payload, event_time_ns=event_time, transmit_time_ns=sent)
    body = bytes(Batch.from_messages([message]).body)
    begin = plain_bodies.PLAIN_ROW_PAYLOAD_AT
    assert plain_bodies.plain_row(body) == (event_time, sent, begin + len(payload))
    assert compared(table_of(body)) == compared(general_table_of(body))
    assert table_of(memoryview(body)) == table_of(body)


@pytest.mark.parametrize("payload_bytes", [0, 3, 4, 7, 100])
def test_a_plain_row_with_any_byte_changed_is_read_or_refused_as_any_other(
    payload_bytes: int,
) -> None:
    body = bytes(Batch.from_messages([Message("a", b"x" * payload_bytes)]).body)
    for position in range(len(body)):
        for value in {0, 1, 0x7F, 0x80, 0xFF, body[position] ^ 1, body[position] ^ 8}:
            changed = body[:position] + bytes([value]) + body[position + 1 :]
            assert compared(table_of(changed)) == compared(general_table_of(changed))


def test_a_plain_row_whose_payload_ends_anywhere_is_read_or_refused_as_any_other() -> None:
    body = bytes(Batch.from_messages([PLAIN]).body)
    for end in (*range(-16, 17), 2**31 - 1, -(2**31)):
        changed = body[:44] + end.to_bytes(4, "little", signed=True) + body[48:]
        assert compared(table_of(changed)) == compared(general_table_of(changed))


def test_a_plain_row_cut_anywhere_or_with_bytes_behind_is_refused_as_any_other() -> None:
    body = bytes(Batch.from_messages([PLAIN]).body)
    for changed in (*(body[:length] for length in range(len(body))), body + b"\0", body * 2):
        assert isinstance(table_of(changed), str)
        assert table_of(changed) == general_table_of(changed)


# --- Batches: one run, one message ---


@given(message_lists(max_size=1), st.sampled_from(Codec), st.booleans(), st.booleans())
def test_a_message_by_itself_is_the_one_that_its_columns_have(
    messages: list[Message], codec: Codec, is_stored: bool, is_cut: bool
) -> None:
    batch = Batch.from_messages(messages, codec=codec)
    if is_cut:
        batch = Batch.from_messages([PLAIN, *messages], codec=codec).slice(1)
    if is_stored:
        batch = stored(batch, base_offsets=[17])
    direct, by_columns = (Batch(batch.envelope, batch.body) for _ in range(2))
    assert by_columns.columns.count == 1
    assert list(direct) == list(by_columns) == [by_columns.message(0)]
    assert direct.messages()[0].payload == as_read(messages[0]).payload
    assert direct.messages()[0].offset == (17 if is_stored else 0)


def test_a_body_that_is_not_as_long_as_its_envelope_says_is_refused_for_a_single_message() -> None:
    batch = Batch.from_messages([PLAIN])
    head = msgspec.structs.replace(batch.envelope, body_bytes=batch.envelope.body_bytes + 8)
    with pytest.raises(MalformedError):
        list(Batch(head, batch.body))


@given(st.integers(1, 6), st.booleans())
def test_the_only_run_is_what_it_was_among_others(count: int, is_stored: bool) -> None:
    topics = ["a" if number % 2 else "b" for number in range(count)]
    batch = Batch.from_messages([Message(topic, b"", partition=3) for topic in topics])
    several = stored(batch) if is_stored else batch
    for number, run in enumerate(several.runs()):
        alone = several.cut([number])
        # Only what is stored says which row it was of what it was cut out of.
        expected = run if is_stored else msgspec.structs.replace(run, row=0)
        assert alone.runs() == Batch.unpack(alone.pack()).runs() == [expected]
        assert expected == Run(
            topics[number],
            3,
            1,
            *((1_000 * number + 1, 7_000, 1, 1, number) if is_stored else (0, 0, 0, 0, 0)),
        )


# --- A batch that is only checked ---


@given(st.sampled_from([1, 2, 64, 65]), st.integers(0, 2000), st.integers(0, 255))
def test_a_body_is_refused_when_checked_just_as_when_read(count: int, at: int, value: int) -> None:
    """One row, and few and many of one length, with any byte changed."""
    made = stored(Batch.from_messages([PLAIN] * count))
    body = bytearray(made.body)
    body[at % len(body)] = value

    def told(look: Callable[[Batch], object]) -> str:
        try:
            look(Batch(made.envelope, bytes(body)))
        except MalformedError as error:
            return str(error)
        return ""

    assert told(Batch.check) == told(lambda batch: batch.columns)
