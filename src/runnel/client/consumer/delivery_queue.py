"""The queue of arrived messages that a consumer has not handed out yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat

from runnel.client.consumer.deliveries import BEGUN, WAITING, HeldDelivery
from runnel.client.consumer.ledger import BegunWork, Ledger
from runnel.client.consumer.work import Work, WorkBatch


class DeliveryQueue:
    """Waiting deliveries in their order, and the current one, whose messages are handed out one by one."""

    def __init__(
        self, begun: BegunWork, now_ns: Callable[[], int], wake: Callable[[], object]
    ) -> None:
        self.taken_bytes = 0  # since the reader last let other tasks run
        self._begun = begun
        self._now_ns = now_ns
        self._wake = wake
        self._deliveries: deque[HeldDelivery] = deque()
        self._current: HeldDelivery | None = None
        self._works: Iterator[Work] = iter(
            ()
        )  # of the current delivery; some may not wait any more

    def add(self, delivery: HeldDelivery) -> None:
        self._deliveries.append(delivery)
        self._wake()

    def put_back(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Put deliveries that were not begun completely before all others, in their order."""
        again = {delivery.order: delivery for delivery in deliveries}
        if self._current is not None:
            again[self._current.order] = self._current
        self._current = None
        self._works = iter(())
        self._deliveries.extendleft(again[number] for number in sorted(again, reverse=True))

    def restore(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Add deliveries that arrived before, in the order of their arrival. They may be here already."""
        known = {delivery.order: delivery for delivery in (*self._deliveries, *deliveries)}
        if self._current is not None:
            known[self._current.order] = self._current
        self._current = None
        self._works = iter(())
        self._deliveries = deque(known[order] for order in sorted(known))
        self._wake()

    def drop(self, ledger: Ledger) -> None:
        """Remove the deliveries of one ledger."""
        self._deliveries = deque(
            delivery for delivery in self._deliveries if delivery.part.ledger is not ledger
        )
        if self._current is not None and self._current.part.ledger is ledger:
            self._current = None
            self._works = iter(())

    # --- By message ---

    def begin_each(self) -> Iterator[Work]:
        """The waiting messages; each is begun only when it is yielded.

        Hot (bench/queue.py, "work"): `BegunWork.begin` without a call for each message.
        """
        begun, now_ns = self._begun, self._now_ns
        while True:
            for work in self._works:
                delivery, offset = work.delivery, work.message.offset
                states, row = delivery.states, offset - delivery.begin
                if states[row] == WAITING:
                    states[row] = BEGUN
                    delivery.begun_ns[offset] = begun.taken_ns = now_ns()
                    yield work
            if not self._advance():
                return

    def take_nowait(self) -> Work | None:
        """The next waiting message, not begun yet."""
        while True:
            for work in self._works:
                if work.delivery.state(work.message.offset) == WAITING:
                    return work
            if not self._advance():
                return None

    def begin_nowait(self, work: Work) -> Work | None:
        """Begin a message that was taken. None: it was recalled or lost meanwhile."""
        if self._begun.begin(work.delivery, work.message.offset, self._now_ns()):
            return work
        return None

    def _advance(self) -> bool:
        delivery = self._current = self._pop()
        if delivery is None:
            self._works = iter(())
            return False
        self._works = map(Work, delivery.batch, repeat(delivery))
        return True

    # --- By delivery ---

    def take_delivery_nowait(self) -> HeldDelivery | None:
        """The next delivery with waiting messages, or the rest of the current one; not begun yet."""
        current, self._current = self._current, None
        self._works = iter(())
        if current is not None and WAITING in current.states:
            return current
        return self._pop()

    def begin_batch_nowait(self, delivery: HeldDelivery) -> WorkBatch | None:
        """Begin all waiting messages of a delivery. None: no message waits."""
        batch = delivery.batch
        begun = self._begun.begin_all(delivery, self._now_ns())
        if sum([end - begin for begin, end in begun]) == delivery.count:
            return WorkBatch(batch, delivery)
        if not begun:
            return None
        wanted = {offset for begin, end in begun for offset in range(begin, end)}
        offsets = (
            offset
            for run in batch.runs()
            for offset in range(run.base_offset, run.base_offset + run.count)
        )
        rows = [row for row, offset in enumerate(offsets) if offset in wanted]
        return WorkBatch(batch.take(rows), delivery)

    def _pop(self) -> HeldDelivery | None:
        while self._deliveries:
            delivery = self._deliveries.popleft()
            if WAITING in delivery.states:
                self.taken_bytes += len(delivery.batch.body)
                return delivery
        return None
