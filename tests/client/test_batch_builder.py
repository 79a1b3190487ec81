"""`send` collects messages, and the builder makes batches of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.client.producer import PendingRows, SendBuffer
from runnel.client.producer.batch_builder import build_batch
from runnel.client.results import Receipt
from runnel.errors import ClientFault, InvalidNameError, LimitExceededError, MalformedError
from runnel.formats.batch import Batch
from runnel.formats.envelope import BODY_BYTES_CEILING
from runnel.formats.message import Message
from runnel.formats.wire import Published


class Collecting(SendBuffer):
    """A send buffer that appends everything to a list."""

    def __init__(self, topic: str | None = None, *, bytes_max: int = 2**20) -> None:
        super().__init__(topic, lambda: 77, chunk_messages=1000, chunk_bytes_max=bytes_max)
        self.full: list[PendingRows] = []

    def _make_room(self) -> None:
        if rows := self._take():
            self.full.append(rows)
        self._open()

    def taken(self) -> PendingRows:
        rows = self._take()
        assert rows is not None
        return rows


class Noted:
    """A future, as far as rows need one."""

    def __init__(self) -> None:
        self.result: object = None

    def done(self) -> bool:
        return self.result is not None

    def set_result(self, result: object) -> None:
        self.result = result

    def set_exception(self, exception: BaseException) -> None:
        self.result = exception


def batch_of(rows: PendingRows) -> Batch:
    gathered = build_batch(rows, transmit_time_ns=99)
    packed = b"".join(gathered.block)
    assert len(packed) == gathered.block_bytes
    return Batch.unpack(packed)


def test_a_single_topic_makes_one_run_in_the_order_sent() -> None:
    buffer = Collecting("a")
    for number in range(3):
        buffer.send(b"%d" % number, event_time_ns=number)
    batch = batch_of(buffer.taken())
    assert [run.topic for run in batch.runs()] == ["a"]
    assert [(m.payload, m.event_time_ns, m.transmit_time_ns) for m in batch] == [
        (b"0", 0, 99),
        (b"1", 1, 99),
        (b"2", 2, 99),
    ]


@pytest.mark.parametrize("is_named", [False, True])
@given(
    st.lists(st.binary(max_size=9), min_size=1, max_size=70),
    st.integers(0, 2**31 - 1),
    st.none() | st.binary(max_size=3),
)
def test_few_plain_messages_make_the_same_block_as_any_others(
    is_named: bool, payloads: list[bytes], partition: int, key: bytes | None
) -> None:
    buffer = Collecting(None if is_named else "a")
    for number, payload in enumerate(payloads):
        buffer.send(payload, "a" if is_named else None, key, event_time_ns=number)
    rows = buffer.taken()
    rows.partitions = [partition] * len(payloads)
    messages = [
        Message("a", payload, key, event_time_ns=at, transmit_time_ns=99, partition=partition)
        for at, payload in enumerate(payloads)
    ]
    assert (
        b"".join(build_batch(rows, transmit_time_ns=99).block)
        == Batch.from_messages(messages).pack()
    )


def test_a_message_that_no_batch_can_hold_is_refused() -> None:
    rows = PendingRows("a")
    rows.payloads, rows.event_times_ns = [bytes(BODY_BYTES_CEILING)], [0]
    rows.size = rows.weighed()
    with pytest.raises(LimitExceededError):
        build_batch(rows, transmit_time_ns=0)


def test_the_event_time_is_the_clocks_unless_it_is_given() -> None:
    buffer = Collecting("a")
    buffer.send(b"")
    buffer.send(b"", event_time_ns=5)
    assert [message.event_time_ns for message in batch_of(buffer.taken())] == [77, 5]


def test_messages_of_a_topic_stand_together_in_their_order() -> None:
    buffer = Collecting()
    for number in range(6):
        buffer.send(b"%d" % number, topic="ab"[number % 2], key=b"k%d" % number)
    batch = batch_of(buffer.taken())
    assert [(run.topic, run.count) for run in batch.runs()] == [("a", 3), ("b", 3)]
    assert [(m.payload, m.key) for m in batch] == [
        (b"%d" % number, b"k%d" % number) for number in (0, 2, 4, 1, 3, 5)
    ]


def test_a_thousand_topics_are_a_thousand_runs() -> None:
    buffer = Collecting()
    for number in range(1000):
        buffer.send(b"x", f"t{number}")
    assert batch_of(buffer.taken()).envelope.run_count == 1000


def test_another_topic_than_the_default_can_be_named_for_single_messages() -> None:
    buffer = Collecting("a")
    buffer.send(b"0")
    buffer.send(b"1", topic="b")
    buffer.send(b"2")
    assert {m.payload: m.topic for m in batch_of(buffer.taken())} == {
        b"0": "a",
        b"1": "b",
        b"2": "a",
    }


def test_tags_are_those_at_the_time_of_sending() -> None:
    buffer = Collecting("a")
    tags = {"n": "0"}
    buffer.send(b"0", tags=tags)
    tags["n"] = "1"
    buffer.send(b"1", tags=tags)
    buffer.send(b"2")
    assert [dict(m.tags) for m in batch_of(buffer.taken())] == [{"n": "0"}, {"n": "1"}, {}]


def test_keys_partition_keys_and_uids_stay_with_their_message() -> None:
    buffer = Collecting("a")
    buffer.send(b"0", key=b"k", uid=b"u" * 20)
    buffer.send(b"1", partition_key=b"p")
    buffer.send(b"2", key=b"k2", partition_key=b"p2")
    assert [(m.key, m.partition_key, m.uid) for m in batch_of(buffer.taken())] == [
        (b"k", b"k", b"u" * 20),
        (None, b"p", None),
        (b"k2", b"p2", None),
    ]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key": "text"}, MalformedError),
        ({"tags": {"a": 1}}, MalformedError),
        ({"tags": ["a"]}, MalformedError),
        ({"uid": b"short"}, MalformedError),
        ({"event_time_ns": "now"}, MalformedError),
        ({"event_time_ns": 2**63}, MalformedError),
        ({"topic": ""}, InvalidNameError),
        ({"topic": "", "key": b"k"}, InvalidNameError),
    ],
)
def test_a_refused_message_leaves_no_trace(
    options: Mapping[str, object], error: type[ClientFault]
) -> None:
    buffer = Collecting("a")
    buffer.send(b"0", key=b"k0")
    with pytest.raises(error):
        buffer.send(b"wrong", **options)  # type: ignore[arg-type]
    buffer.send(b"1")
    assert [(m.topic, m.payload, m.key) for m in batch_of(buffer.taken())] == [
        ("a", b"0", b"k0"),
        ("a", b"1", None),
    ]


def test_text_is_not_bytes() -> None:
    with pytest.raises(MalformedError, match="encode"):
        Collecting("a").send("text")  # type: ignore[arg-type]


def test_buffers_that_may_change_are_copied() -> None:
    buffer = Collecting("a")
    payload = bytearray(b"before")
    buffer.send(payload)  # type: ignore[arg-type]
    payload[:] = b"after!"
    assert [m.payload for m in batch_of(buffer.taken())] == [b"before"]


def test_without_a_topic_nothing_can_be_sent() -> None:
    with pytest.raises(ClientFault, match="topic"):
        Collecting().send(b"")


def test_a_send_buffer_is_full_at_its_bytes() -> None:
    buffer = Collecting("a", bytes_max=1000)
    for _ in range(10):
        buffer.send(bytes(136))  # 200 with what each weighs besides
    assert [len(rows) for rows in buffer.full] == [5]


def test_a_send_buffer_settles_at_the_number_of_messages_wanted() -> None:
    buffer = Collecting("a")
    for _ in range(5000):
        buffer.send(bytes(100))
    assert [len(rows) for rows in buffer.full][-2:] == [1000, 1000]


messages = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.binary(max_size=8),
        st.none() | st.binary(max_size=3),
        st.none() | st.dictionaries(st.sampled_from("xy"), st.sampled_from("12"), max_size=2),
    ),
    min_size=1,
    max_size=30,
)


@given(messages, st.integers(1, 29))
def test_cutting_and_joining_rows_loses_and_reorders_nothing(
    sent: list[tuple[str, bytes, bytes | None, dict[str, str] | None]], at: int
) -> None:
    buffer = Collecting("a")
    for topic, payload, key, tags in sent:
        buffer.send(payload, topic, key, tags)
    rows = buffer.taken()
    size = rows.size
    assert rows.weighed() == size
    first = rows.cut(min(at, len(rows)))
    assert first.size + rows.size == size
    first.extend(rows)
    assert (len(first), first.size) == (len(sent), size)
    received = list(batch_of(first))
    for name in "abc":
        assert [(m.payload, m.key, dict(m.tags)) for m in received if m.topic == name] == [
            (p, k, t or {}) for topic, p, k, t in sent if topic == name
        ]


def test_receipts_have_the_offset_of_their_own_message() -> None:
    buffer = Collecting()
    futures = {}
    for number in range(4):
        buffer.send(b"%d" % number, topic="ab"[number % 2])
        futures[number] = buffer._rows.futures[number] = Noted()
    gathered = build_batch(buffer.taken(), transmit_time_ns=0)
    gathered.succeed(Published(1, [10, 20], 5, 1, 7, "stored"))
    receipts = [futures[number].result for number in range(4)]
    assert all(isinstance(receipt, Receipt) for receipt in receipts)
    assert [(r.topic, r.offset) for r in receipts if isinstance(r, Receipt)] == [
        ("a", 10),
        ("b", 20),
        ("a", 11),
        ("b", 21),
    ]


def test_receipts_of_a_single_topic_follow_each_other() -> None:
    buffer = Collecting("a")
    futures = {}
    for number in range(3):
        buffer.send(b"%d" % number)
        if number != 1:
            futures[number] = buffer._rows.futures[number] = Noted()
    rows = buffer.taken()
    rows.partitions = [4] * 3
    build_batch(rows, transmit_time_ns=0).succeed(Published(1, [10], 5, 1, 7, "stored"))
    assert [
        (r.topic, r.partition, r.offset)
        for future in futures.values()
        if isinstance(r := future.result, Receipt)
    ] == [("a", 4, 10), ("a", 4, 12)]


def test_rows_are_counted_by_messages_and_by_bytes() -> None:
    buffer = Collecting("a")
    for _ in range(10):
        buffer.send(bytes(36))  # 100 each
    rows = buffer.taken()
    assert rows.count_within(4, 10_000) == 4
    assert rows.count_within(10, 350) == 3
    assert rows.count_within(10, 10) == 1
    assert rows.count_within(100, 1000) == 10
