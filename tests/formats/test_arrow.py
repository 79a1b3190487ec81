"""Batches as Arrow: the same values, over the same memory."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import MalformedError
from runnel.formats import columns
from runnel.formats.arrow import SCHEMA
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from tests.formats.samples import message_lists, stored


def rows_of(batch: pa.RecordBatch | pa.Table) -> list[dict[str, object]]:
    # Times as numbers: Python's datetime holds neither nanoseconds nor the whole range.
    times = ("event_time", "transmit_time", "receive_time")
    plain = {
        name: batch.column(name).cast(pa.int64()) if name in times else batch.column(name)
        for name in batch.schema.names
    }
    rows: list[dict[str, object]] = pa.table(plain).to_pylist()
    return rows


def as_row(message: Message) -> dict[str, object]:
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "key": message.key,
        "payload": message.payload,
        "tags": list(message.tags.items()),
        "event_time": message.event_time_ns,
        "transmit_time": message.transmit_time_ns,
        "receive_time": message.receive_time_ns,
        "size": message.size,
        "uid": message.uid,
        "partition_key": message.partition_key,
    }


@given(message_lists(), st.sampled_from(list(Codec)), st.booleans())
def test_arrow_has_the_values_of_the_messages(
    messages: list[Message], codec: Codec, is_stored: bool
) -> None:
    batch = Batch.from_messages(messages, codec=codec)
    if is_stored:
        batch = stored(batch)
    batch = Batch.unpack(batch.pack())
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.schema == SCHEMA
    assert rows_of(table) == [as_row(message) for message in batch]


@given(st.lists(st.tuples(message_lists(max_size=5), st.booleans()), max_size=4))
def test_a_table_of_batches_has_the_rows_of_each_in_turn(
    lists: list[tuple[list[Message], bool]],
) -> None:
    batches = []
    for messages, is_stored in lists:
        batch = Batch.from_messages(messages)
        batches.append(Batch.unpack((stored(batch) if is_stored else batch).pack()))
    table = Batch.table(batches)
    table.validate(full=True)
    assert table.schema == SCHEMA
    assert rows_of(table) == [row for batch in batches for row in rows_of(batch.to_arrow())]


@pytest.mark.parametrize(
    "bases",
    [
        pytest.param([7, 10, 13], id="each goes on where the one before ended"),
        pytest.param([7, 10, 14], id="one is missing"),
        pytest.param([7, 4, 1], id="backwards"),
        pytest.param([7, None, 10], id="one is not stored yet"),
        pytest.param([None, 1, 4], id="the first is not stored yet"),
        pytest.param([None, None, None], id="none is stored yet"),
    ],
)
@pytest.mark.parametrize("other", [("t", 2), ("t", 3), ("u", 2)])
def test_a_table_has_the_offsets_and_times_that_each_batch_was_given(
    bases: list[int | None], other: tuple[str, int]
) -> None:
    batches = []
    for number, base in enumerate(bases):
        topic, partition = other if number == 1 else ("t", 2)
        batch = Batch.from_messages([Message(topic, b"x", partition=partition)] * 3)
        if base is not None:
            batch = stored(batch, base_offsets=[base], receive_time_ns=1_000 + number)
        batches.append(batch)
    table = Batch.table(batches)
    table.validate(full=True)
    assert rows_of(table) == [as_row(message) for batch in batches for message in batch]


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([[5] * 100, [5] * 80], id="rows of one length"),
        pytest.param([[5] * 100, [4] * 100], id="each batch has its own"),
        pytest.param([[5] * 100, [4, 6] * 50], id="one batch has several"),
        pytest.param([[5] * 100, [5] * 3], id="one batch is small"),
        pytest.param([[0] * 100, [0] * 100], id="none has a byte"),
        pytest.param([[5] * 40_000, [5] * 40_000], id="more than are kept"),
    ],
)
@pytest.mark.parametrize("has_one_time", [True, False])
def test_a_table_has_the_sizes_and_times_of_each_batch(
    lengths: list[list[int]], has_one_time: bool
) -> None:
    batches = []
    for number, sizes in enumerate(lengths):
        times = range(number, number + len(sizes)) if number or not has_one_time else [7]
        built = columns.build([bytes(size) for size in sizes], event_times_ns=times)
        batches.append(Batch.unpack(Batch.from_columns(built, ["t"], [len(sizes)]).pack()))
    table = Batch.table(batches)
    table.validate(full=True)
    assert table.column("size").to_pylist() == [size for sizes in lengths for size in sizes]
    assert table.column("event_time").cast(pa.int64()).to_pylist() == [
        message.event_time_ns for batch in batches for message in batch
    ]


def alike(number: int, *, topics: int = 1, codec: Codec = Codec.NONE, **changes: object) -> Batch:
    """One of several stored batches of 100 messages that differ in payloads and times alone, but for `changes`."""
    messages = [
        Message(
            f"t/{row * topics // 100}",
            bytes([number, row, 7]),
            event_time_ns=1_000 * number + row,
            transmit_time_ns=number,
        )
        for row in range(100)
    ]
    messages[5] = msgspec.structs.replace(messages[5], **changes)
    batch = Batch.from_messages(messages, codec=codec)
    bases = [100 * number + 1 + run for run in range(topics)]
    batch = stored(batch, base_offsets=bases, receive_time_ns=number - 5)
    return Batch.unpack(batch.pack())


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(alike(1), id="none"),
        pytest.param(alike(1, key=b"k"), id="a key"),
        pytest.param(alike(1, tags={"a": "b"}), id="tags"),
        pytest.param(alike(1, transmit_time_ns=9), id="a time of its own"),
        pytest.param(alike(1, payload=b"longer"), id="a longer payload"),
        pytest.param(alike(1, topics=2), id="two runs"),
        pytest.param(alike(1, codec=Codec.LZ4), id="compressed"),
        pytest.param(Batch.from_messages(alike(1).messages()), id="not stored"),
        pytest.param(alike(1).slice(0, 70), id="fewer messages"),
        pytest.param(alike(1).slice(0, 3), id="few messages"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_table_of_batches_of_one_shape_and_another(odd: Batch, place: int) -> None:
    batches = [alike(0), alike(2)]
    batches.insert(place, odd)
    table = Batch.table(batches)
    table.validate(full=True)
    assert table.schema == SCHEMA
    assert rows_of(table) == [as_row(message) for batch in batches for message in batch]


@pytest.mark.parametrize("topics", [1, 2, 100])
def test_a_table_of_batches_of_one_shape_in_several_runs(topics: int) -> None:
    batches = [alike(number, topics=topics) for number in range(3)]
    assert rows_of(Batch.table(batches)) == [
        as_row(message) for batch in batches for message in batch
    ]


def test_a_table_of_batches_of_one_shape_refuses_the_one_whose_offsets_are_wrong() -> None:
    body = bytearray(alike(1).body)
    body[8 * 100 + 32 + 4 * 50] ^= 64  # where row 50 begins
    wrong = alike(1).envelope
    batches = [alike(0), Batch(wrong, bytes(body)), alike(2)]
    with pytest.raises(MalformedError, match="payload_offsets"):
        Batch.table(batches)


def test_payloads_of_one_shape_lie_in_the_memory_that_was_read() -> None:
    page = b"".join([alike(number).pack() for number in range(3)])
    size = len(page) // 3
    table = Batch.table([Batch.unpack(page, size * number) for number in range(3)])
    begin = pa.py_buffer(page).address
    for number, chunk in enumerate(table.column("payload").chunks):
        data = chunk.buffers()[2]
        assert begin + size * number < data.address < begin + size * (number + 1)


@given(message_lists(), st.data())
def test_selected_rows_are_valid_arrow_too(messages: list[Message], data: st.DataObject) -> None:
    batch = stored(Batch.from_messages(messages))
    rows = sorted(data.draw(st.sets(st.integers(0, len(batch) - 1), min_size=1)))
    table = batch.take(rows).to_arrow()
    table.validate(full=True)
    assert rows_of(table) == [as_row(batch.messages()[row]) for row in rows]


@pytest.mark.parametrize("count", [1, 100, 5_000])
def test_buffers_of_the_body_are_not_copied(count: int) -> None:
    batch = Batch.from_columns(
        columns.build(
            [b"%06d" % row for row in range(count)],
            event_times_ns=range(count),
            keys=[b"k%d" % row if row % 3 else None for row in range(count)],
            partition_keys=[b"p%d" % row for row in range(count)],
            uids=[bytes([1]) * 20] * count,
        ),
        ["t"],
        [count],
    )
    source = np.frombuffer(batch.pack(), np.uint8)
    table = Batch.unpack(source.data).to_arrow()
    table.validate(full=True)
    begin, end = source.ctypes.data, source.ctypes.data + len(source)
    for name in ("payload", "partition_key", "event_time", "uid", *(["key"] if count > 1 else [])):
        for buffer in filter(None, table.column(name).buffers()):
            assert begin <= buffer.address < end, name
            assert (buffer.address - begin) % 8 == 0, name


def test_a_kept_column_is_the_same_for_the_next_batch() -> None:
    tables = [Batch.from_messages([Message("t", b"")] * 10).to_arrow() for _ in range(2)]
    for name in ("topic", "partition", "key", "tags", "uid"):
        assert tables[0].column(name) == tables[1].column(name)


def test_large_batches_with_everything_repeated_are_right() -> None:
    batch = Batch.from_messages([Message("t", b"", tags={"a": "b"}, transmit_time_ns=3)] * 5_000)
    table = batch.to_arrow()
    table.validate(full=True)
    assert rows_of(table.slice(4_999)) == [as_row(batch.messages()[-1])]


def test_everything_but_to_arrow_works_without_pyarrow() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from runnel.formats.batch import Batch\n"
        "from runnel.formats.message import Message\n"
        "batch = Batch.unpack(Batch.from_messages([Message('t', b'x')] * 100).pack())\n"
        "assert len(batch.slice(1).messages()) == 99\n"
        "try: batch.to_arrow()\n"
        "except ImportError: print('as it should be')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "as it should be\n"
