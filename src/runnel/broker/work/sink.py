"""What acknowledged work looks like at the border to a door: deliveries out, and who takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from runnel.errors import RunnelError
from runnel.formats.work_heads import Lease, Part


class WorkDelivery(NamedTuple):
    """Messages leased to a consumer: what they are, and their block in buffers."""

    lease: Lease
    buffers: Sequence[bytes | memoryview]
    size: int
    messages: int


class WorkSink(Protocol):
    """Where a consumer's messages go: a session. Each call only queues; it neither waits nor fails."""

    @property
    def connection_id(self) -> int: ...
    @property
    def peer(self) -> str: ...
    def deliver_work(self, consumer: int, deliveries: Sequence[WorkDelivery]) -> None: ...
    def recall(self, consumer: int, parts: Sequence[Part]) -> None: ...
    def late(self, consumer: int, parts: Sequence[Part]) -> None: ...
    def consumer_ended(self, consumer: int, error: RunnelError) -> None: ...
