"""The evidence of a run as data: written at its end, and judged by `proof`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from examples.demo.world import INVOICES, OrderSource

FILE: Final = "evidence.json"


class Sum(msgspec.Struct):
    """The number of messages and bytes, and the sum of their checksums, which does not depend on their order."""

    messages: int = 0
    size_bytes: int = 0
    checksum: int = 0

    def add(self, payload: bytes) -> None:
        self.messages += 1
        self.size_bytes += len(payload)
        self.checksum += zlib.crc32(payload)


def total(sums: Iterable[Sum]) -> Sum:
    found = list(sums)
    return Sum(
        sum(each.messages for each in found),
        sum(each.size_bytes for each in found),
        sum(each.checksum for each in found),
    )


class ShopReport(msgspec.Struct, kw_only=True):
    """Evidence of a client of one listener: its orders that are certainly stored, and the invoices it saw."""

    sent: Sum = msgspec.field(default_factory=Sum)
    misplaced: int = 0  # orders that are not at the offset of their number
    unanswered: int = 0  # requests without an answer: it looked whether they were stored
    found_stored: int = 0  # … and found that they were, so they were not sent again
    seen: int = 0
    missing: int = 0
    again: int = 0
    resumed: int = 0  # reconnects, after which it continued where it was
    is_stopped: bool = False


class WorkerReport(msgspec.Struct, kw_only=True):
    """The report of one worker process."""

    invoiced: int = 0
    failed: int = 0
    postponed: int = 0
    in_hand: int = 0


class PipelineReport(msgspec.Struct, kw_only=True):
    """Evidence of Spark."""

    state: str = "starting Java and Spark"
    archived: int = 0
    batches: int = 0
    windows_s: float = 0.0  # what counting them took


class DashboardFound(msgspec.Struct, kw_only=True):
    """What the live reader got, beginning with the last known value of each station."""

    expected: int  # from the first that it got of each station to the last that was published
    seen: int
    missing: int
    again: int
    misplaced: int
    known_at_once: int  # stations that had a value as soon as it was switched on
    p50_ms: float
    p99_ms: float
    longest_ms: float


class WorkFound(msgspec.Struct, kw_only=True):
    """The fate of the orders, counted from the invoices and the dead letters."""

    invoiced: int  # orders with at least one invoice
    invoices: Sum
    cents: int  # of one invoice for each order
    more_than_once: int  # invoices beyond the first of their order
    came_again: int  # orders that were delivered more than once before they were done
    wrong: int  # invoices of orders that were never sent, that are poisonous, or with another price
    dead: int
    dead_wrong: int  # dead letters of orders that were good
    dead_again: int
    left: int  # in the queue: waiting, in hand or postponed


class TopicRows(msgspec.Struct, kw_only=True):
    """A topic in the archive."""

    rows: Sum
    first_offset: int
    last_offset: int
    distinct: int

    @property
    def is_contiguous(self) -> bool:
        """Each offset from 1 on exists once."""
        count = self.rows.messages
        return (self.first_offset, self.last_offset, self.distinct) == (1, count, count)


class WindowsFound(msgspec.Struct, kw_only=True):
    """The table of windows, summed up."""

    rows: int  # one for each window and topic
    messages: int
    size_bytes: int


class Times(msgspec.Struct, kw_only=True):
    """Times of events in seconds since the start, and durations."""

    publishing_s: float
    killed_at_s: float
    archived_at_kill: int
    away_s: float  # the broker, from its death until it listened again
    waited: int  # readings that were not acknowledged when it came back
    worker_killed_at_s: float
    in_hand_at_kill: int  # of the worker
    total_s: float


class Evidence(msgspec.Struct, kw_only=True):
    """All evidence of a run."""

    readings: dict[str, Sum]  # by topic; acknowledged to the gateways as stored
    stored: dict[str, int]  # by topic; stored in the broker at the end
    web: ShopReport
    partner: ShopReport
    dashboard: DashboardFound
    work: WorkFound
    pipeline: PipelineReport
    archive: dict[str, TopicRows]
    windows: WindowsFound
    times: Times
    broker_exit_code: int | None  # None: it continues

    def published(self) -> dict[str, Sum]:
        """Everything that was published, by topic."""
        orders = {
            OrderSource.WEB.topic: self.web.sent,
            OrderSource.PARTNER.topic: self.partner.sent,
        }
        return {**self.readings, **orders, INVOICES: self.work.invoices}


def save(evidence: Evidence, directory: Path) -> None:
    text = msgspec.json.format(msgspec.json.encode(evidence), indent=1)
    (directory / FILE).write_bytes(text)


def load(directory: Path) -> Evidence:
    return msgspec.json.decode((directory / FILE).read_bytes(), type=Evidence)
