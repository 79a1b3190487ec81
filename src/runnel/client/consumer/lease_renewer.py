"""Renews the leases of deliveries in processing, and lets those expire that take too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from runnel.client.connection import Handle, Timers
from runnel.client.consumer.deliveries import WAITING, HeldDelivery
from runnel.client.consumer.ledger import BegunWork, Ledger

_RENEWALS_PER_LEASE: Final = 3


class LeaseRenewer:
    """Checks the deliveries of a consumer's part every third of a lease, as long as there are any."""

    def __init__(
        self,
        ledger: Ledger,
        begun: BegunWork,
        timers: Timers,
        renew: Callable[[Sequence[int]], object] | None,
    ) -> None:
        """Without `renew`, somebody else watches the leases."""
        self.lease_ns = 0  # set when the broker has accepted the consumer
        self.processing_ns_max = 0
        self._ledger = ledger
        self._begun = begun
        self._timers = timers
        self._renew = renew
        self._timer: Handle | None = None

    def watch(self) -> None:
        """Start the timer, unless it runs: a delivery is leased."""
        if self._timer is None and self.lease_ns and self._renew is not None:
            seconds = self.lease_ns / 1e9 / _RENEWALS_PER_LEASE
            self._timer = self._timers.call_later(seconds, self._renew_due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _renew_due(self) -> None:
        self._timer = None
        now_ns = self._timers.monotonic_ns()
        due: list[int] = []
        for delivery in list(self._ledger.deliveries.values()):
            if delivery.is_lapsed or delivery.deadline_ns > now_ns + self.lease_ns:
                continue  # its lease is over, or `extend` has made it longer
            if delivery.deadline_ns < now_ns:
                # The loop was blocked, or the delivery was not processed for long: the broker has taken it back by now.
                self._ledger.lapse(delivery)
            elif delivery.left and self._is_in_processing(delivery, now_ns):
                delivery.deadline_ns = now_ns + self.lease_ns
                due.append(delivery.id)
        if due and self._renew is not None:
            self._renew(due)
        if self._ledger.deliveries:
            self.watch()

    def _is_in_processing(self, delivery: HeldDelivery, now_ns: int) -> bool:
        """Whether no message is in processing for too long, and none waits for a reader that has stopped reading."""
        with self._ledger.lock:
            oldest_ns = delivery.oldest_begun_ns(now_ns)
        if now_ns - oldest_ns > self.processing_ns_max:
            return False
        if WAITING not in delivery.states:
            return True
        return now_ns - max(delivery.arrived_ns, self._begun.taken_ns) <= self.processing_ns_max
