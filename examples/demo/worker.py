"""A worker: takes orders, makes an invoice of each, and acknowledges. Now and then it fails; it may be killed.

python -m examples.demo.worker runnel://127.0.0.1:7470 worker-1
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Final

import msgspec
import uvloop

import runnel
from examples.demo.evidence import WorkerReport
from examples.demo.invoices import Invoice
from examples.demo.world import BILLING, INVOICES, fails_at_first, has_to_wait
from runnel.client import Bus

_PRINTING_S: Final = 0.06
_CONCURRENCY: Final = 8
_PATIENCE_S: Final = 60.0
_REPORT_EVERY_S: Final = 0.25


class Order(msgspec.Struct, frozen=True):
    order: str
    cents: int


class PrinterJammedError(Exception):
    """The printer is jammed."""


class InvoiceWorker:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.report = WorkerReport()

    async def bill(self, work: runnel.Work) -> None:
        """Make an invoice. An exception gives the order back for another attempt; then it is a dead letter."""
        self.report.in_hand += 1
        try:
            order = msgspec.json.decode(work.payload, type=Order)  # raises for a poisonous one
            await asyncio.sleep(_PRINTING_S)
            if work.delivery_count == 1 and fails_at_first(work.offset):
                raise PrinterJammedError("the printer is jammed")
            if work.delivery_count == 1 and has_to_wait(work.offset):
                await work.nack(delay_s=0.5, reason="the customer is on the telephone")
                self.report.postponed += 1
                return
            invoice = Invoice(order.order, order.cents, work.delivery_count)
            # The invoice is stored before the order is acknowledged. A crash in between makes the invoice again.
            await self._bus.publish(INVOICES, msgspec.json.encode(invoice), key=work.key)
            self.report.invoiced += 1
        except Exception:
            self.report.failed += 1
            raise
        finally:
            self.report.in_hand -= 1

    async def tell(self) -> None:
        """Print its progress as a line of JSON at intervals."""
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            self.say()

    def say(self) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(self.report) + b"\n")
        sys.stdout.buffer.flush()


async def main(url: str, name: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # No commands come there: it ends with its parent, and then there may be no broker either.
    loop.add_reader(sys.stdin, os._exit, 1)
    async with (
        runnel.connect(url, name=name, deadline_s=_PATIENCE_S) as bus,
        bus.consume(BILLING, window_messages=2 * _CONCURRENCY) as consumer,
    ):
        worker = InvoiceWorker(bus)
        telling = asyncio.create_task(worker.tell())
        try:
            await consumer.process(worker.bill, concurrency=_CONCURRENCY, stop=stop)
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling
        worker.say()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:3]))
