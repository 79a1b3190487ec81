"""The parts of a relayed consumer at all nodes: a client's session that passes nothing to a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from runnel.client.connection import Handle, Timers
from runnel.client.consumer import (
    ConsumerPart,
    ConsumerSession,
    HeldDelivery,
    LateWork,
    LeaseHolder,
    Ledger,
)
from runnel.errors import RunnelError
from runnel.formats.work_heads import Consume, HeldLease
from runnel.platform.clock import Clock
from runnel.relay.node_links import RelayedLinks


class PartsListener(Protocol):
    """The relayed consumer, as its parts see it. Each call only queues."""

    def woken(self) -> None:
        """Something has arrived, or a node has accepted the consumer."""

    def arrived(self, delivery: HeldDelivery) -> None: ...
    def tell_recalled(self, ledger: Ledger) -> None:
        """Pass on what is recalled, unless the caller has been told."""

    def lost(self, ledger: Ledger) -> None:
        """The connection to a node is lost, and with it all its leases."""

    def reported_late(self, late: Sequence[LateWork]) -> None: ...
    def failed(self, error: RunnelError) -> None: ...


class WorkParts(ConsumerSession):
    """The parts of a relayed consumer. What happens to them, it tells the consumer."""

    renews_leases = False

    def __init__(
        self,
        consumer: PartsListener,
        links: RelayedLinks,
        timers: Timers,
        request: Consume,
    ) -> None:
        self._consumer = consumer
        super().__init__(links, timers, request, deadline_s=None)

    @property
    def holder(self) -> LeaseHolder:
        # Nobody asks for it: no message of these is handed to a program here.
        return cast(LeaseHolder, self)

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def is_stored(self) -> bool:
        """Whether everything acked so far is known to be stored."""
        return not self._handover.has_acks and all(
            part.ack_sender.is_stored for part in self._parts.values()
        )

    def begin(self) -> None:
        self._begin()

    def ledgers(self) -> list[Ledger]:
        return [*(part.ledger for part in self._parts.values()), self._handover.parked.ledger]

    def expire(self, before_ns: int) -> list[HeldDelivery]:
        """End leases that were over by then, except of shards that move now."""
        over: list[HeldDelivery] = []
        for part in list(self._parts.values()):
            ledger = part.ledger
            found = [each for each in ledger.deliveries.values() if each.deadline_ns < before_ns]
            for delivery in found:
                ledger.expire(delivery)
            if found:
                self.report_late(ledger)
                self.part_settled(part)
            over += found
        return over

    def wake(self) -> None:
        super().wake()
        self._consumer.woken()

    def part_arrived(self, part: ConsumerPart, delivery: HeldDelivery) -> None:
        super().part_arrived(part, delivery)
        self._consumer.arrived(delivery)

    def part_recalled(self, part: ConsumerPart) -> None:
        self._consumer.tell_recalled(part.ledger)

    def part_holds(self, part: ConsumerPart, leases: Sequence[HeldLease]) -> None:
        super().part_holds(part, leases)
        self._consumer.tell_recalled(part.ledger)

    def part_moving(self, part: ConsumerPart, epoch: int, deliveries: Sequence[int]) -> None:
        super().part_moving(part, epoch, deliveries)
        for other in self._parts.values():  # the next owner may have said first what it holds
            if other is not part:
                self._consumer.tell_recalled(other.ledger)

    def part_lost(self, part: ConsumerPart) -> None:
        super().part_lost(part)
        self._consumer.lost(part.ledger)

    def part_failed(self, part: ConsumerPart, error: RunnelError) -> None:
        super().part_failed(part, error)
        if self._error is not None:
            self._consumer.failed(self._error)

    def report_late(self, ledger: Ledger) -> list[LateWork]:
        found = ledger.take_late()
        self._consumer.reported_late(found)
        return found


class LeaseTimers:
    """The broker's clock for leases, and real time for waits."""

    def __init__(self, clock: Clock, timers: Timers) -> None:
        self.time_ns: Final = clock.time_ns
        self.monotonic_ns: Final = clock.monotonic_ns
        self._timers = timers

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Handle:
        return self._timers.call_later(seconds, callback)
