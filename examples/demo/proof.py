"""The claims that the demo makes, and whether they hold. Pure: from evidence to claims."""

from __future__ import annotations

from enum import Enum

import msgspec

from examples.demo.evidence import Evidence, ShopReport, total
from examples.demo.world import GATEWAYS, INVOICES, STATIONS, OrderSource, cents, many, payable


class Chapter(Enum):
    """The subject of a claim."""

    PUBLISHED = "published, and stored"
    DELIVERED = "delivered, in order, once"
    WORKED = "worked on, at least once"
    ARCHIVED = "archived, exactly once"
    COUNTED = "counted in windows"
    BROKER = "the broker"


class Claim(msgspec.Struct, frozen=True):
    """A number, the number that it must be, and a remark."""

    chapter: Chapter
    what: str
    expected: int
    found: int
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.expected == self.found


def judge(evidence: Evidence) -> list[Claim]:
    """All claims, in the order in which they are printed."""
    return [
        *_published(evidence),
        *_delivered(evidence),
        *_worked(evidence),
        *_archived(evidence),
        *_counted(evidence),
        *_stopped(evidence),
    ]


def _published(evidence: Evidence) -> list[Claim]:
    return [
        Claim(
            Chapter.PUBLISHED,
            f"readings of {len(STATIONS)} stations",
            total(evidence.readings.values()).messages,
            sum(evidence.stored.get(topic, 0) for topic in evidence.readings),
            f"{GATEWAYS} named publishers; {evidence.times.waited:,} waited for the broker",
        ),
        _orders("orders over REST", OrderSource.WEB, evidence.web, evidence),
        _orders("orders over gRPC", OrderSource.PARTNER, evidence.partner, evidence),
    ]


def _orders(what: str, source: OrderSource, shop: ShopReport, evidence: Evidence) -> Claim:
    note = f"{shop.unanswered} unanswered, looked up: {shop.found_stored} stored"
    stored = evidence.stored.get(source.topic, 0)
    return Claim(Chapter.PUBLISHED, what, shop.sent.messages, stored, note)


def _delivered(evidence: Evidence) -> list[Claim]:
    live, web, partner = evidence.dashboard, evidence.web, evidence.partner
    invoices = evidence.stored.get(INVOICES, 0)
    faults = sum(each.missing + each.again + each.misplaced for each in (live, web, partner))
    return [
        Claim(
            Chapter.DELIVERED,
            "readings, live dashboard",
            live.expected,
            live.seen,
            f"from {live.known_at_once} last values on; p50 {live.p50_ms:,.1f} ms, "
            f"max {live.longest_ms / 1000:.1f} s",
        ),
        Claim(
            Chapter.DELIVERED,
            "invoices, REST (SSE)",
            invoices,
            web.seen,
            f"cut off {_times(web.resumed)}, went on by event id",
        ),
        Claim(
            Chapter.DELIVERED,
            "invoices, gRPC stream",
            invoices,
            partner.seen,
            f"cut off {_times(partner.resumed)}, went on by position",
        ),
        Claim(
            Chapter.DELIVERED,
            "lost, twice or misplaced",
            0,
            faults,
            "the number of every message checked",
        ),
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _worked(evidence: Evidence) -> list[Claim]:
    work = evidence.work
    sent = (evidence.web.sent.messages, evidence.partner.sent.messages)
    good = [number for count in sent for number in payable(count)]
    return [
        Claim(
            Chapter.WORKED,
            "orders with an invoice",
            len(good),
            work.invoiced,
            f"{work.came_again:,} failed at first, came again; {work.more_than_once} billed twice",
        ),
        Claim(
            Chapter.WORKED,
            "cents billed",
            sum(map(cents, good)),
            work.cents,
            "by one invoice of each order",
        ),
        Claim(
            Chapter.WORKED,
            "dead letters",
            sum(sent) - len(good),
            work.dead,
            "exactly the orders that nobody can bill",
        ),
        Claim(
            Chapter.WORKED,
            "wrong, or left undone",
            0,
            work.wrong + work.dead_wrong + work.dead_again + work.left,
            f"a worker was killed with {many(evidence.times.in_hand_at_kill, 'order')} in hand",
        ),
    ]


def _archived(evidence: Evidence) -> list[Claim]:
    published, archive = evidence.published(), evidence.archive
    through = ", through the kill" if evidence.times.archived_at_kill else ""
    agreeing = sum(
        topic in archive and archive[topic].rows == sums for topic, sums in published.items()
    )
    return [
        Claim(
            Chapter.ARCHIVED,
            "messages in the Delta table",
            total(published.values()).messages,
            total(topic.rows for topic in archive.values()).messages,
            f"by Spark in {many(evidence.pipeline.batches, 'transaction')}{through}",
        ),
        Claim(
            Chapter.ARCHIVED,
            "topics without gap or repeat",
            len(published),
            sum(topic.is_contiguous for topic in archive.values()),
            "offsets 1, 2, 3 … in each of them",
        ),
        Claim(
            Chapter.ARCHIVED,
            "topics with equal checksums",
            len(published),
            agreeing,
            "CRC-32 of each payload, as it was published",
        ),
    ]


def _counted(evidence: Evidence) -> list[Claim]:
    everything, windows = total(evidence.published().values()), evidence.windows
    return [
        Claim(
            Chapter.COUNTED,
            "messages in windows",
            everything.messages,
            windows.messages,
            f"{windows.rows} of 5 s and a topic, in {evidence.pipeline.windows_s:.1f} s",
        ),
        Claim(
            Chapter.COUNTED,
            "bytes in windows",
            everything.size_bytes,
            windows.size_bytes,
            "of payloads",
        ),
    ]


def _stopped(evidence: Evidence) -> list[Claim]:
    times, code = evidence.times, evidence.broker_exit_code
    if code is None:
        return []
    note = f"killed at {times.killed_at_s:.0f} s, back after {times.away_s:.1f} s, stopped"
    return [Claim(Chapter.BROKER, "exit code", 0, code, note)]
