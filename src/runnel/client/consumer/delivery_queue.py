"""What has arrived for a consumer and was not handed out: deliveries in their order, messages of the first of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat

from runnel.client.consumer.deliveries import BEGUN, WAITING, HeldDelivery
from runnel.client.consumer.ledger import Ledger
from runnel.client.consumer.work import Work, WorkBatch


class DeliveryQueue:
    """Deliveries that wait, and the one whose messages are handed out now."""

    def __init__(
        self, ledger: Ledger, now_ns: Callable[[], int], wake: Callable[[], object]
    ) -> None:
        self.taken_bytes = 0  # since its reader last let others run
        self._ledger = ledger
        self._now_ns = now_ns
        self._wake = wake
        self._deliveries: deque[HeldDelivery] = deque()
        self._current: HeldDelivery | None = None
        self._works: Iterator[Work] = iter(())  # of the current one; some may not wait any more

    def add(self, delivery: HeldDelivery) -> None:
        self._deliveries.append(delivery)
        self._wake()

    def put_back(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Whoever took of these did not begin all of it: the rest comes first again, in its order."""
        again = {delivery.id: delivery for delivery in deliveries}
        if self._current is not None:
            again[self._current.id] = self._current
        self._current = None
        self._works = iter(())
        self._deliveries.extendleft(again[number] for number in sorted(again, reverse=True))

    def clear(self) -> None:
        self._deliveries.clear()
        self._current = None
        self._works = iter(())

    # --- One at a time ---

    def begin_each(self) -> Iterator[Work]:
        """The messages that wait, each begun as it is given; of what is not asked for nothing is begun.

        Hot (bench/queue.py, "work"): `Ledger.begin` without a call for each message.
        """
        ledger, now_ns = self._ledger, self._now_ns
        while True:
            for work in self._works:
                delivery, offset = work.delivery, work.message.offset
                states, row = delivery.states, offset - delivery.begin
                if states[row] == WAITING:
                    states[row] = BEGUN
                    delivery.begun_ns[offset] = ledger.taken_ns = now_ns()
                    yield work
            if not self._advance():
                return

    def take_nowait(self) -> Work | None:
        """The next message that waits; it is not begun yet."""
        while True:
            for work in self._works:
                if work.delivery.state(work.message.offset) == WAITING:
                    return work
            if not self._advance():
                return None

    def begin_nowait(self, work: Work) -> Work | None:
        """Hand out what was taken, unless it was recalled or lost meanwhile."""
        if self._ledger.begin(work.delivery, work.message.offset, self._now_ns()):
            return work
        return None

    def _advance(self) -> bool:
        delivery = self._current = self._pop()
        if delivery is None:
            self._works = iter(())
            return False
        self._works = map(Work, delivery.batch, repeat(delivery))
        return True

    # --- A delivery at a time ---

    def take_delivery_nowait(self) -> HeldDelivery | None:
        """The next delivery of which something waits, be it the rest of one; it is not begun yet."""
        current, self._current = self._current, None
        self._works = iter(())
        if current is not None and WAITING in current.states:
            return current
        return self._pop()

    def begin_batch_nowait(self, delivery: HeldDelivery) -> WorkBatch | None:
        """Hand out what waits of a delivery, if anything does."""
        batch = delivery.batch
        begun = self._ledger.begin_all(delivery, self._now_ns())
        if sum([end - begin for begin, end in begun]) == delivery.count:
            return WorkBatch(batch, delivery)
        if not begun:
            return None
        wanted = {offset for begin, end in begun for offset in range(begin, end)}
        there = (
            offset
            for run in batch.runs()
            for offset in range(run.base_offset, run.base_offset + run.count)
        )
        rows = [row for row, offset in enumerate(there) if offset in wanted]
        return WorkBatch(batch.take(rows), delivery)

    def _pop(self) -> HeldDelivery | None:
        while self._deliveries:
            delivery = self._deliveries.popleft()
            if WAITING in delivery.states:
                self.taken_bytes += len(delivery.batch.body)
                return delivery
        return None
