"""The interface between consumer groups and listeners: deliveries, and the sinks that take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from runnel.broker.consumer_groups.run_cache import StoredRun
from runnel.errors import RunnelError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.work_heads import DeliveryPart, HeldLease, Lease


class WorkDelivery:
    """Messages leased to a consumer: their lease, their approximate size, and themselves as a block or as objects."""

    __slots__ = ("_base", "_mask", "_run", "lease", "messages", "size")

    def __init__(self, lease: Lease, run: StoredRun, base: int, mask: int, messages: int) -> None:
        self.lease = lease
        self.messages = messages
        self.size = run.size * messages // run.count
        self._run = run
        self._base = base
        self._mask = mask

    @classmethod
    def whole(cls, lease: Lease, batch: Batch) -> WorkDelivery:
        """The delivery of a batch, as another node has sent it. Its offsets may have gaps."""
        count = len(batch)
        # Rows have no gaps.
        delivery = cls(lease, StoredRun(batch, 0, count), 0, (1 << count) - 1, count)
        delivery.size = len(batch.body)
        return delivery

    @property
    def buffers(self) -> Sequence[bytes | memoryview]:
        """The block of the messages, packed anew on each access unless they are a whole run."""
        return self._run.block_of(self._base, self._mask)

    def each(self) -> list[Message]:
        """The messages as objects, without a block in between."""
        return self._run.messages_of(self._base, self._mask)


class HolderSink(Protocol):
    """Where a consumer learns more that has joined at every node of a cluster. Each call only queues."""

    def moving(self, consumer: int, epoch: int, deliveries: Sequence[int]) -> None: ...
    def held(self, consumer: int, leases: Sequence[HeldLease]) -> None: ...
    def wants(self, consumer: int, *, is_wanting: bool) -> None: ...


class HeldPart(msgspec.Struct, frozen=True):
    """A consumer that has joined at every node: its own id, and where its part at this node learns more."""

    holder: str
    sink: HolderSink


class WorkSink(Protocol):
    """Where a consumer's messages go: a session. Each call only queues; it neither waits nor fails."""

    @property
    def connection_id(self) -> int: ...
    @property
    def peer(self) -> str: ...
    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None: ...
    def recall(self, consumer: int, parts: Sequence[DeliveryPart]) -> None: ...
    def late(self, consumer: int, parts: Sequence[DeliveryPart]) -> None: ...
    def leases_expired(self, consumer: int, deliveries: Sequence[int]) -> None: ...
    def consumer_ended(self, consumer: int, error: RunnelError) -> None: ...
