"""Latency at fixed rates beside the peers: each message sent by itself, p50 to p99.9 of what it takes to arrive.

1,000 a second
5,000 a second
20,000 a second

Messages of 100 bytes leave at a steady rate, by a timer of the kernel, and carry the time they were sent; one
publisher, one subscriber and the broker are processes of their own. Ephemeral topics, but for Kafka, which has none.
The first tenth of a run is not counted. A run that loses a message, disorders it or falls behind its rate is told and
not counted: what a system cannot keep up with has no latency worth the name.
"""

from __future__ import annotations

from functools import partial

from bench.contest import Sample, compared, lowest
from bench.measures import (
    KAFKA,
    NATS,
    PERCENTILES,
    RABBIT,
    REDIS,
    RUNNEL,
    SYSTEMS,
    Entry,
    contest_of,
    peer_facts,
    percentiles,
    rate,
    trouble,
)
from bench.processes import Team
from bench.report import Result
from bench.systems.system import PayloadOrder, RolePlan, RunningServer

RATES = (1000, 5000, 20_000)
_SECONDS = 2
_MESSAGES_MIN = 3000  # so that p99.9 is more than the worst message
_KEPT_UP_MIN = 0.95
_TARGETS = {"p50": 1.0, "p99": 1.5}  # at 5,000 a second

more_facts = peer_facts


def bench_at(messages_per_s: int, *, quick: bool) -> list[Result]:
    count = max(_SECONDS * messages_per_s, _MESSAGES_MIN)

    def measure(entry: Entry, served: RunningServer, count: int) -> Sample:
        with Team() as team:
            plan = RolePlan(
                served.url, count=count, rate=messages_per_s, order=PayloadOrder.STAMPED
            )
            reader = team.add(entry.system.subscribe, plan)
            writer = team.add(entry.system.publish_steadily, plan)
            team.wait_ready()
            writer.go()
            sent, received = writer.report(), reader.report()
        wrong = trouble(received, count)
        kept_up = rate(count, sent.begin_ns, sent.end_ns) / messages_per_s
        if kept_up < _KEPT_UP_MIN:
            wrong = wrong or f"only {kept_up:.0%} of the rate"
        return Sample(percentiles(received, "µs"), wrong)

    taking_part = [Entry(system.NAME, system, count) for system in SYSTEMS]
    standings = contest_of(taking_part, measure, quick=quick)
    names = (NATS, REDIS, RABBIT, KAFKA)
    results = []
    for place, percentile in enumerate(PERCENTILES):
        best = lowest(standings, names, place)
        others = [standings[name] for name in names if standings[name] is not best]
        results.append(
            compared(
                f"latency at {messages_per_s:,} messages/s, one by one, {percentile}",
                "µs",
                standings[RUNNEL],
                best,
                place=place,
                target=_TARGETS.get(percentile) if messages_per_s == RATES[1] else None,
                is_at_most=True,
                others=others,
            )
        )
    return results


PARTS = tuple((f"{each:,} a second", partial(bench_at, each)) for each in RATES)
