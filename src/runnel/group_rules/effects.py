"""What the rules return: deliveries, reads that they ask for, and effects for the broker to carry out."""

from __future__ import annotations

from typing import Final

import msgspec

from runnel.formats.work_heads import DeliveryPart as DeliveryPart  # effects consist of them
from runnel.topics.names import TopicPartition

OFFSET_MAX: Final = 2**63 - 1


class Failure(msgspec.Struct, frozen=True, gc=False):
    """The failures of a message that was delivered before. Neighbouring messages may share one object.

    `failures` is 0 if no delivery counted as failed; consumers see such an object, but it is never stored.
    Times are monotonic within a group, wall times in records.
    """

    failures: int
    not_before_ns: int = 0
    first_delivery_ns: int = 0  # 0: not known
    reason: str = ""


def forget(failures: dict[int, Failure], begin: int, end: int) -> None:
    """Remove a range of offsets. The cost is that of the smaller: the range, or all failures."""
    if end - begin <= len(failures):
        for offset in range(begin, end):
            failures.pop(offset, None)
    else:
        for offset in [offset for offset in failures if begin <= offset < end]:
            del failures[offset]


class Want(msgspec.Struct, frozen=True, gc=False):
    """A read that the group asks for, to be offered: messages of a partition from `begin` up to but not `end`.

    The maxima say how much the consumers can take; one message is wanted even if it is larger than `bytes_max`.
    """

    key: TopicPartition
    begin: int
    end: int
    messages_max: int
    bytes_max: int


class LeasedDelivery(msgspec.Struct, frozen=True):
    """Messages of a partition, leased to a consumer: bit i of `mask` says that offset `base` + i is in it."""

    id: int
    consumer: int
    key: TopicPartition
    base: int
    mask: int
    count: int
    size_bytes: int
    deadline_ns: int
    attempts: list[tuple[int, int, int]]
    """(offset, failures, first_delivery_ns) of the messages that were delivered before."""


class Adopted(msgspec.Struct, frozen=True, gc=False):
    """A lease of a partition's former owner, which goes on here under another id."""

    delivery: int
    former: int
    base: int
    outstanding: int  # masks at `base`
    recalled: int


class DeadLetter(msgspec.Struct, frozen=True, gc=False):
    """A message that failed too often. The broker stores it as a dead letter, then calls `dead_letter_stored`."""

    key: TopicPartition
    offset: int
    failures: int
    reason: str


class Effects(msgspec.Struct):
    """What the broker has to do after an event. It stores `acked`, `picked` and `failed`, in this order."""

    recalls: list[tuple[int, DeliveryPart]] = []
    dead_letters: list[DeadLetter] = []
    acked: list[tuple[TopicPartition, int, int]] = []
    picked: list[tuple[TopicPartition, int, int]] = []
    """Scattered acked messages: key, base, and a mask whose bit i stands for offset base + i."""
    failed: list[tuple[TopicPartition, int, int, int, int, str]] = []
    """key, offset, failures (0: owed again, as if never delivered), not_before_ns, first_delivery_ns, reason."""
    late: list[DeliveryPart] = []
    expired: list[tuple[int, int]] = []
    """Leases that expired: the consumer, and the id of the delivery."""

    def __bool__(self) -> bool:
        return bool(
            self.acked
            or self.picked
            or self.late
            or self.failed
            or self.dead_letters
            or self.recalls
            or self.expired
        )

    def or_nothing(self) -> Effects:
        return self if self else NOTHING


NOTHING: Final = Effects()
"""Empty effects, shared: do not change them."""
