"""What a state journal holds, and what its records add up to."""

from __future__ import annotations

import msgspec
import pytest

from runnel.errors import MalformedError
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.effects import Failure
from runnel.group_rules.records import (
    AckedRecord,
    AtRecord,
    FailedAt,
    FailedRecord,
    ForgottenRecord,
    PartitionAcks,
    Record,
    StateTable,
    decode,
    encode,
    pack_ranges,
    unpack_ranges,
)

KEY = ("orders", 0)


def acked(*ranges: tuple[int, int], subscription: int = 1, member: str = "") -> AckedRecord:
    return AckedRecord(subscription, member, *KEY, pack_ranges(ranges))


def failed(offset: int, failures: int, not_before_ns: int = 50) -> FailedRecord:
    return FailedRecord(1, "", *KEY, offset, failures, not_before_ns, 7, "no such customer")


def at(floor: int, *ranges: tuple[int, int], failed: list[FailedAt] | None = None) -> AtRecord:
    return AtRecord(1, "", *KEY, floor, pack_ranges(ranges), failed or [])


def table(*records: Record) -> StateTable:
    states = StateTable()
    for record in records:
        states.apply(record)
    return states


def state(*records: Record) -> PartitionAcks:
    found = table(*records).get(1, "", KEY)
    assert found is not None
    return found


def test_records_are_read_as_they_were_written() -> None:
    records: list[Record] = [
        acked((1, 5), (7, 9)),
        failed(5, 2),
        at(5, (7, 9), failed=[FailedAt(5, 2, 50, 7, "why")]),
        ForgottenRecord(1),
        ForgottenRecord(1, "a", "orders"),
    ]
    assert decode(encode(records)) == records
    assert decode(encode([])) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        encode([acked((1, 2))])[:-1],
        msgspec.msgpack.encode([["unheard", 1]]),
        msgspec.msgpack.encode([["acked", 1, "", "orders", 0, b"123"]]),
        encode([acked((5, 5))]),
        encode([acked((0, 5))]),
        encode([at(1, (9, 3))]),
    ],
)
def test_bytes_that_are_no_records_are_malformed(content: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(content)


def test_ranges_are_pairs_of_64_bits() -> None:
    assert pack_ranges([(1, 2)]) == b"\x01" + bytes(7) + b"\x02" + bytes(7)
    assert unpack_ranges(pack_ranges([(1, 2), (2**62, 2**63 - 1)])) == [(1, 2), (2**62, 2**63 - 1)]


def test_acks_add_up() -> None:
    assert state(acked((1, 3)), acked((5, 6)), acked((3, 4))).acked == AckSet(4, [(5, 6)])


def test_the_last_failure_counts_until_the_message_is_done() -> None:
    records = [failed(5, 1), failed(5, 2, 90)]
    assert state(*records).failures == {5: Failure(2, 90, 7, "no such customer")}
    assert state(*records, acked((1, 10))).failures == {}


def test_a_failure_of_a_message_that_is_done_is_nothing() -> None:
    assert state(acked((5, 6)), failed(5, 1)).failures == {}


def test_a_failure_of_zero_opens_a_message_again() -> None:
    opened = state(failed(5, 8), acked((1, 10)), failed(5, 0))
    assert opened.acked == AckSet(5, [(6, 10)])
    assert opened.failures == {}


def test_an_at_record_replaces_what_was_known() -> None:
    known = state(
        acked((1, 100)), failed(200, 3), at(5, (7, 9), failed=[FailedAt(5, 1, 2, 3, "x")])
    )
    assert known.acked == AckSet(5, [(7, 9)])
    assert known.failures == {5: Failure(1, 2, 3, "x")}


def test_members_and_subscriptions_are_apart() -> None:
    states = table(
        acked((1, 2), member="a"), acked((1, 3), member="b"), acked((1, 4), subscription=2)
    )
    floors = [
        found.acked.floor
        for found in (states.get(1, "a", KEY), states.get(1, "b", KEY), states.get(2, "", KEY))
        if found is not None
    ]
    assert floors == [2, 3, 4]
    assert states.get(1, "", KEY) is None
    assert states.keys(1, "a") == [KEY]
    assert states.keys(3, "") == []


def test_what_is_forgotten_is_no_more() -> None:
    records: list[Record] = [
        AckedRecord(subscription, member, topic, 0, pack_ranges([(1, 2)]))
        for subscription in (1, 2)
        for member in ("a", "b")
        for topic in ("orders", "refunds")
    ]
    whole = table(*records, ForgottenRecord(1))
    assert (whole.keys(1, "a"), len(whole.keys(2, "b"))) == ([], 2)
    member = table(*records, ForgottenRecord(1, "a"))
    assert (member.keys(1, "a"), len(member.keys(1, "b"))) == ([], 2)
    topic = table(*records, ForgottenRecord(1, None, "orders"))
    assert topic.keys(1, "a") == topic.keys(1, "b") == [("refunds", 0)]
    both = table(*records, ForgottenRecord(1, "b", "orders"))
    assert (len(both.keys(1, "a")), both.keys(1, "b")) == (2, [("refunds", 0)])


HISTORY: list[Record] = [
    acked((1, 3), (9, 10)),
    failed(3, 1),
    failed(4, 1),
    acked((3, 4)),
    failed(4, 2, 70),
    failed(9, 0),
    AckedRecord(1, "", "gone", 0, pack_ranges([(1, 2)])),
    ForgottenRecord(1, "", "gone"),
    at(2, (5, 7), failed=[FailedAt(3, 1, 2, 3, "x")]),
    acked((20, 30)),
]


@pytest.mark.parametrize("length", range(1, len(HISTORY) + 1))
def test_a_record_applied_twice_changes_nothing(length: int) -> None:
    records = HISTORY[:length]
    assert table(*records, records[-1]).snapshot() == table(*records).snapshot()


@pytest.mark.parametrize("length", range(len(HISTORY) + 1))
def test_a_snapshot_says_it_all_again(length: int) -> None:
    whole = table(*HISTORY[:length])
    snapshot = whole.snapshot()
    assert table(*snapshot).snapshot() == snapshot
    # A journal may repeat, behind a snapshot, what the snapshot knows.
    again = HISTORY[max(length - 3, 0) : length]
    assert table(*snapshot, *again).snapshot() == snapshot


def test_deliveries_that_ended_without_counting_are_not_in_a_snapshot() -> None:
    states = table(acked((1, 2)))
    found = states.get(1, "", KEY)
    assert found is not None
    found.failures[5] = Failure(0, 0, 99)
    (record,) = states.snapshot()
    assert isinstance(record, AtRecord)
    assert record.failed == []
