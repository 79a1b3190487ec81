"""The records of subscriptions in a state journal, and the table that results from applying them. No files here.

Acks are recorded as ranges, failures one by one; leases are not recorded. Applying a record twice, alone or together
with the records that followed it, gives the same table: a journal may repeat what a snapshot says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from runnel.errors import MalformedError
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.effects import Failure, forget
from runnel.group_rules.masks import runs
from runnel.topics.names import TopicPartition

_PAIR: Final = struct.Struct("<qq")


class _StateRecord(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """One record of a state journal: an array that begins with its kind."""


class AckedRecord(_StateRecord, tag="acked", frozen=True, gc=False):
    """Ranges of offsets are done: `ranges` has the begin and end of each, as little-endian 64-bit numbers."""

    subscription: int
    member: str
    topic: str
    partition: int
    ranges: bytes


class FailedRecord(_StateRecord, tag="failed", frozen=True, gc=False):
    """How often a message has failed. 0 failures: it is owed again, as if it had never been delivered."""

    subscription: int
    member: str
    topic: str
    partition: int
    offset: int
    failures: int
    not_before_ns: int  # wall time
    first_delivery_ns: int  # wall time
    reason: str


class FailedAt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message that failed, within an AtRecord. Its fields are those of a FailedRecord."""

    offset: int
    failures: int
    not_before_ns: int
    first_delivery_ns: int
    reason: str


class AtRecord(_StateRecord, tag="at", frozen=True):
    """The whole state of a partition. It replaces all earlier records of the partition."""

    subscription: int
    member: str
    topic: str
    partition: int
    floor: int
    ranges: bytes
    failed: list[FailedAt]


class ForgottenRecord(_StateRecord, tag="forgotten", frozen=True, gc=False):
    """The state of a subscription is deleted; only that of one member, or of one topic, if they are not None."""

    subscription: int
    member: str | None = None
    topic: str | None = None


class PickedRecord(_StateRecord, tag="picked", frozen=True, gc=False):
    """Scattered messages are done: bit i of `bits`, lowest byte first, stands for offset `base` + i."""

    subscription: int
    member: str
    topic: str
    partition: int
    base: int
    bits: bytes


class HeldBy(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A lease that ended because its shard moved, within a HeldRecord. `holder` is its consumer's own id.

    Bit i of `outstanding`, lowest byte first, stands for offset `base` + i. Work on `recalled` messages may go on.
    """

    holder: str
    delivery: int  # its id
    base: int
    outstanding: bytes
    recalled: bytes
    cost_bytes: int  # of each message
    delivered_ns: int  # by the wall clock


class HeldRecord(_StateRecord, tag="held", frozen=True):
    """What consumers had of a partition when a term of its shard ended as planned, for the next owner.

    It replaces earlier ones of the partition. The next owner notes an empty one.
    """

    subscription: int
    member: str
    topic: str
    partition: int
    epoch: int  # of the term that ended
    held: list[HeldBy]


Record = AckedRecord | PickedRecord | FailedRecord | AtRecord | ForgottenRecord | HeldRecord

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Record])


def encode(records: Sequence[Record]) -> bytes:
    return _encoder.encode(records)


def decode(content: bytes) -> list[Record]:
    try:
        records = _decoder.decode(content)
    except msgspec.DecodeError as error:
        raise MalformedError("subscription records", str(error)) from error
    for record in records:
        if isinstance(record, AckedRecord | AtRecord):
            unpack_ranges(record.ranges)
    return records


def pack_ranges(ranges: Iterable[tuple[int, int]]) -> bytes:
    return b"".join(_PAIR.pack(begin, end) for begin, end in ranges)


def unpack_ranges(content: bytes) -> list[tuple[int, int]]:
    if len(content) % _PAIR.size:
        raise MalformedError("ranges", f"{len(content)} bytes are not pairs of {_PAIR.size}")
    ranges: list[tuple[int, int]] = list(_PAIR.iter_unpack(content))
    for begin, end in ranges:
        if not 0 < begin < end:
            raise MalformedError("ranges", f"{begin} to {end} is no range of offsets")
    return ranges


class PartitionAcks(msgspec.Struct):
    """The acks and failures of a member of a subscription in a partition."""

    acked: AckSet
    failures: dict[int, Failure]
    held: HeldRecord | None = None


class StateTable:
    """The state of all subscriptions that results from the records applied so far."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, str], dict[TopicPartition, PartitionAcks]] = {}

    def apply(self, record: Record) -> None:
        match record:
            case AckedRecord():
                state = self._state(record)
                for begin, end in unpack_ranges(record.ranges):
                    state.acked.add(begin, end)
                    forget(state.failures, begin, end)
            case PickedRecord():
                state = self._state(record)
                mask = int.from_bytes(record.bits, "little")
                state.acked.add_scattered(record.base, mask)
                if state.failures:
                    for begin, end in runs(record.base, mask):
                        forget(state.failures, begin, end)
            case FailedRecord(offset=offset, failures=0):
                state = self._state(record)
                state.acked.discard(offset, offset + 1)
                state.failures.pop(offset, None)
            case FailedRecord(offset=offset):
                state = self._state(record)
                if offset not in state.acked:
                    state.failures[offset] = _failure(record)
            case AtRecord():
                acked = AckSet(record.floor, unpack_ranges(record.ranges))
                failures = {failed.offset: _failure(failed) for failed in record.failed}
                states = self._states.setdefault((record.subscription, record.member), {})
                states[record.topic, record.partition] = PartitionAcks(acked, failures)
            case HeldRecord(held=held):
                self._state(record).held = record if held else None
            case ForgottenRecord(subscription, member, topic):
                self._forget(subscription, member, topic)

    def _state(
        self, record: AckedRecord | PickedRecord | FailedRecord | HeldRecord
    ) -> PartitionAcks:
        states = self._states.setdefault((record.subscription, record.member), {})
        key = (record.topic, record.partition)
        state = states.get(key)
        if state is None:
            state = states[key] = PartitionAcks(AckSet(), {})
        return state

    def _forget(self, subscription: int, member: str | None, topic: str | None) -> None:
        for owner in [owner for owner in self._states if owner[0] == subscription]:
            if member is not None and member != owner[1]:
                continue
            states = self._states[owner]
            for key in [key for key in states if topic is None or key[0] == topic]:
                del states[key]
            if not states:
                del self._states[owner]

    def get(self, subscription: int, member: str, key: TopicPartition) -> PartitionAcks | None:
        return self._states.get((subscription, member), {}).get(key)

    def topics(self) -> dict[int, set[str]]:
        """The topics of which each subscription has state."""
        found: dict[int, set[str]] = {}
        for (subscription, _), states in self._states.items():
            found.setdefault(subscription, set()).update(topic for topic, _ in states)
        return found

    def keys(self, subscription: int, member: str) -> list[TopicPartition]:
        return list(self._states.get((subscription, member), {}))

    def snapshot(self) -> list[AtRecord | HeldRecord]:
        """Records that give the same table.

        May run in a worker while records are applied: it copies each table in one step.
        """
        found: list[AtRecord | HeldRecord] = []
        for (subscription, member), states in list(self._states.items()):
            for key, state in list(states.items()):
                held = state.held
                found.append(at_record(subscription, member, key, state))
                if held is not None:
                    found.append(held)
        return found

    def members(self) -> list[tuple[int, str]]:
        """The subscriptions and members that have state."""
        return list(self._states)


def at_record(
    subscription: int, member: str, key: TopicPartition, state: PartitionAcks
) -> AtRecord:
    """The record of a partition's whole state. The state's times must be wall times."""
    # Failures first: a failure that is acknowledged in between is then left out or harmless, never lost.
    failures = list(state.failures.items())
    floor, ranges = state.acked.snapshot()
    failed = [
        FailedAt(
            offset,
            failure.failures,
            failure.not_before_ns,
            failure.first_delivery_ns,
            failure.reason,
        )
        for offset, failure in failures
        if failure.failures and offset not in state.acked
    ]
    return AtRecord(subscription, member, *key, floor, pack_ranges(ranges), failed)


def _failure(record: FailedRecord | FailedAt) -> Failure:
    return Failure(record.failures, record.not_before_ns, record.first_delivery_ns, record.reason)
