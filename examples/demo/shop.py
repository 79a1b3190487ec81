"""A client that sends orders and follows invoices: the part that the REST and the gRPC client share.

It has no named publisher. When an order gets no answer, the client asks whether the order is stored before it sends it
again: only this client writes its topic, so order 17 is at offset 17, or nowhere.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Iterator
from typing import Final, Protocol

from examples.demo.world import INVOICES, OrderSource, order

ORDERS_PER_S: Final = 15
_RETRY_S: Final = 0.1
_REPORT_EVERY_S: Final = 0.25
_REST_MAX_S: Final = 20.0


class NoAnswerError(Exception):
    """No answer came: the request may have been carried out or not."""


class RefusedError(Exception):
    """The request is wrong: the same request would be refused again."""


class ShopClient(Protocol):
    """The requests that a shop makes, over one protocol. Each method may raise NoAnswerError."""

    def publish(self, topic: str, payload: bytes, event_time_ns: int) -> int:
        """Publish a message. Returns its offset."""

    def has(self, topic: str, offset: int) -> bool:
        """Whether there is a message at this offset."""

    def follow(self, topic: str, *, from_now: bool) -> Iterator[int]:
        """Offsets of the topic's messages as they arrive. Called again, it continues where it was."""


class Shop:
    """Prints what it has done, as a line of JSON now and then, and does what it is told on standard input.

    `stop`: no more orders. `until 17`: end once invoice 17 has come, or has not for long. The end of the input: end
    at once.
    """

    def __init__(
        self, publishing: ShopClient, following: ShopClient, source: OrderSource, first: int
    ) -> None:
        """Two clients, because each does one thing at a time. `first` is the number of the first order."""
        self._publishing = publishing
        self._following = following
        self._source = source
        self._next_number = first
        self._follows_from_now = first > 1
        self._stop = threading.Event()
        self._until: int | None = None
        self._wake = threading.Event()
        self._counts = dict.fromkeys(
            ("misplaced", "unanswered", "found_stored", "seen", "missing", "again", "resumed"), 0
        )
        self._sent = {"messages": 0, "size_bytes": 0, "checksum": 0}
        self._last_seen: int | None = None
        self._is_stopped = False

    def run(self) -> None:
        threading.excepthook = _end
        for work in (self._listen, self._follow, self._report_often):
            threading.Thread(target=work, daemon=True).start()
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self._place_order(self._next_number)
            self._next_number += 1
            due_s = max(due_s + 1 / ORDERS_PER_S, time.monotonic())
        self._is_stopped = True
        self._report()
        while self._until is None:
            self._wake.wait()
            self._wake.clear()
        ends_at = time.monotonic() + _REST_MAX_S
        while (self._last_seen or 0) < self._until and time.monotonic() < ends_at:
            self._wake.wait(_RETRY_S)
            self._wake.clear()
        self._report()

    def _place_order(self, number: int) -> None:
        topic, payload = self._source.topic, order(self._source, number)
        event_time_ns = time.time_ns()
        is_unsure = False
        while True:
            try:
                if is_unsure and self._publishing.has(topic, number):
                    self._counts["found_stored"] += 1
                    break
                offset = self._publishing.publish(topic, payload, event_time_ns)
                self._counts["misplaced"] += offset != number
                break
            except NoAnswerError:
                self._counts["unanswered"] += not is_unsure
                is_unsure = True
                time.sleep(_RETRY_S)
        self._sent["messages"] += 1
        self._sent["size_bytes"] += len(payload)
        self._sent["checksum"] += zlib.crc32(payload)

    def _follow(self) -> None:
        was_away = False
        while True:
            try:
                for offset in self._following.follow(INVOICES, from_now=self._follows_from_now):
                    self._counts["resumed"] += was_away
                    was_away = False
                    self._see(offset)
            except NoAnswerError:
                was_away = True
                time.sleep(_RETRY_S)

    def _see(self, offset: int) -> None:
        expected = offset if self._follows_from_now and self._last_seen is None else 1
        if self._last_seen is not None:
            expected = self._last_seen + 1
        if offset < expected:
            self._counts["again"] += 1
            return
        self._counts["missing"] += offset - expected
        self._counts["seen"] += 1
        self._last_seen = offset
        self._wake.set()

    def _listen(self) -> None:
        for line in sys.stdin:
            word, _, number = line.strip().partition(" ")
            if word == "stop":
                self._stop.set()
            elif word == "until":
                self._until = int(number)
                self._wake.set()
        os._exit(0)  # its parent has ended

    def _report_often(self) -> None:
        while True:
            time.sleep(_REPORT_EVERY_S)
            self._report()

    def _report(self) -> None:
        counts = {**self._counts, "sent": self._sent, "is_stopped": self._is_stopped}
        sys.stdout.write(json.dumps(counts) + "\n")
        sys.stdout.flush()


def _end(failed: threading.ExceptHookArgs) -> None:
    """A thread that fails must not leave the others waiting for it."""
    traceback.print_exception(failed.exc_value)
    os._exit(1)
