"""Combines the results of all processes into the report of a bench. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runnel.cli.bench.latencies import Latencies
from runnel.cli.bench.plan import Received, Sent
from runnel.cli.render.tables import counted, human_time


class Latency(msgspec.Struct, frozen=True):
    """Time from the event time that the publisher set to the arrival at a subscriber."""

    p50_ns: int
    p99_ns: int
    p99_9_ns: int


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a bench. `seconds` is the time from the first publish to the last arrival or acknowledgement."""

    clients: int
    subscribers: int
    processes: int
    seconds: float
    messages_in: int
    messages_out: int
    commands_per_s: float  # every message in and every message out is one
    messages_in_per_s: float
    messages_out_per_s: float
    megabytes_in_per_s: float  # of payload, 1,000,000 bytes each
    megabytes_out_per_s: float
    latency: Latency | None
    lost: int
    told_missed: int  # of these the broker reported as missed
    disordered: int
    foreign: int

    @property
    def is_sound(self) -> bool:
        return not self.lost and not self.disordered


def expected_of(sent: Sequence[Sent], subscribed: frozenset[str]) -> int:
    """The number of messages that each subscriber should receive."""
    return sum(
        count for part in sent for topic, count in part.messages.items() if topic in subscribed
    )


def put_together(
    sent: Sequence[Sent], received: Sequence[Received], *, clients: int, size: int, expected: int
) -> BenchReport:
    messages_in = sum(sum(part.messages.values()) for part in sent)
    messages_out = sum(part.messages + part.disordered for part in received)
    subscribers = sum(part.subscribers for part in received)
    ended_ns = max(max(part.last_ns for part in sent), max(part.last_ns for part in received))
    seconds = max(ended_ns - min(part.first_ns for part in sent), 1) / 1e9
    latencies = Latencies()
    for part in received:
        latencies.merge(Latencies(part.latencies))
    return BenchReport(
        clients=clients,
        subscribers=subscribers,
        processes=len(sent),
        seconds=seconds,
        messages_in=messages_in,
        messages_out=messages_out,
        commands_per_s=(messages_in + messages_out) / seconds,
        messages_in_per_s=messages_in / seconds,
        messages_out_per_s=messages_out / seconds,
        megabytes_in_per_s=messages_in * size / seconds / 1e6,
        megabytes_out_per_s=sum(part.bytes for part in received) / seconds / 1e6,
        latency=_latency(latencies),
        lost=subscribers * expected - sum(part.messages for part in received),
        told_missed=sum(part.told_missed for part in received),
        disordered=sum(part.disordered for part in received),
        foreign=sum(part.foreign for part in received),
    )


def _latency(latencies: Latencies) -> Latency | None:
    values = [latencies.percentile_ns(percent) for percent in (50, 99, 99.9)]
    p50, p99, p99_9 = values
    if p50 is None or p99 is None or p99_9 is None:
        return None
    return Latency(p50, p99, p99_9)


def lines(report: BenchReport) -> list[str]:
    """The report as lines for people."""
    latency = report.latency
    times = (
        "-"
        if latency is None
        else f"p50 {human_time(latency.p50_ns)}, p99 {human_time(latency.p99_ns)}, "
        f"p99.9 {human_time(latency.p99_9_ns)}"
    )
    return [
        f"{counted(report.clients, 'client')} in "
        f"{counted(report.processes, 'process', 'processes')}, "
        f"{counted(report.subscribers, 'subscriber')}, {report.seconds:.2f} s",
        f"commands  {report.commands_per_s:,.0f}/s",
        f"in        {report.messages_in:,} messages, {report.messages_in_per_s:,.0f}/s, "
        f"{report.megabytes_in_per_s:,.2f} MB/s",
        f"out       {report.messages_out:,} messages, {report.messages_out_per_s:,.0f}/s, "
        f"{report.megabytes_out_per_s:,.2f} MB/s",
        f"latency   {times}",
        f"checked   {_verdict(report)}",
    ]


def _verdict(report: BenchReport) -> str:
    if report.is_sound:
        return "nothing lost, everything in order" if report.subscribers else "no subscribers"
    gaps = f" ({report.told_missed:,} of them reported as gaps)" if report.told_missed else ""
    return f"{report.lost:,} LOST{gaps}, {report.disordered:,} OUT OF ORDER"
