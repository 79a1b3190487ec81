"""Growth: how fast one busy topic is while ever more stands beside it.

topics          stored topics in the same journal
subscriptions   pattern subscriptions that match other topics
connections     idle connections with a subscription each
stored bytes    what the busy topic's journal already holds

One publisher, one subscriber; ephemeral, but for topics and stored bytes, where the busy topic is on disk. The servers
of all sizes stand by, since what they hold takes time to make, and take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from bench.contest import Contender, Sample, compared, contest
from bench.live import allowed_connections, held_connections
from bench.measures import fan_out, rounds, sized
from bench.processes import Team
from bench.report import Result
from bench.systems import runnel_system
from bench.systems.system import RolePlan, RunningServer

TOPICS = (1, 1000, 100_000)
PATTERNS = (1, 1000, 10_000)
CONNECTIONS = (0, 500, 2000)
STORED_MIB = (0, 256, 2048)
FILLING_BYTES = 4000  # of a message, so that filling is quick
WITHIN = 0.7  # of the smallest


def _sizes(sizes: Sequence[int], *, quick: bool) -> Sequence[int]:
    return (sizes[0], sizes[-1]) if quick else sizes


def _growth(
    name: str,
    sizes: Sequence[int],
    count: int,
    topic: str,
    make: Callable[[ExitStack, int], tuple[RunningServer, str]],
    *,
    quick: bool,
    target: float | None = WITHIN,
) -> list[Result]:
    """`make` starts a server with that much beside the busy topic, and says what it is."""
    with ExitStack() as stack:
        contenders = []
        for size in _sizes(sizes, quick=quick):
            served, beside = make(stack, size)
            contenders.append(_busy(beside, served, sized(count, quick=quick), topic))
        first, *grown = contest(contenders, rounds(quick=quick)).values()
    return [
        compared(f"{name}, {each.name}", "messages/s", each, first, target=target) for each in grown
    ]


def _busy(beside: str, served: RunningServer, count: int, topic: str) -> Contender:
    def measure() -> Sample:
        return fan_out(runnel_system, served, count, topics=(topic,), pattern=topic)

    return Contender(beside, measure)


def _publish(plan: RolePlan) -> None:
    with Team() as team:
        maker = team.add(runnel_system.publish, plan)
        team.wait_ready()
        maker.go()
        maker.report()


def bench_topics(*, quick: bool) -> list[Result]:
    """The busy topic is on disk, as the others are, and in the same journal."""

    def make(stack: ExitStack, topics: int) -> tuple[RunningServer, str]:
        served = stack.enter_context(runnel_system.serve(stored="disk"))
        names = tuple(f"grow/{number}" for number in range(topics - 1))
        if names:
            _publish(RolePlan(served.url, names, count=len(names)))
        return served, f"{topics:,} topics" if names else "no other topic"

    return _growth("a busy topic on disk", TOPICS, 1_000_000, "grow/busy", make, quick=quick)


def bench_subscriptions(*, quick: bool) -> list[Result]:
    def make(stack: ExitStack, patterns: int) -> tuple[RunningServer, str]:
        served = stack.enter_context(runnel_system.serve())
        # Ends before its server does: the stack is undone from its end.
        team = stack.enter_context(Team())
        holder = team.add(runnel_system.hold_patterns, RolePlan(served.url, count=patterns - 1))
        holder.wait_ready()
        stack.callback(holder.over)
        many = f"{patterns:,} pattern subscriptions"
        return served, many if patterns > 1 else "no other subscription"

    name = "a busy ephemeral topic"
    return _growth(name, PATTERNS, 1_600_000, "live/busy", make, quick=quick)


def bench_connections(*, quick: bool) -> list[Result]:
    def make(stack: ExitStack, connections: int) -> tuple[RunningServer, str]:
        held = allowed_connections(connections)
        served = stack.enter_context(runnel_system.serve())
        if held:
            stack.enter_context(held_connections(runnel_system, served, held))
        return served, f"{held:,} idle connections" if held else "no other connection"

    name = "a busy ephemeral topic"
    return _growth(name, CONNECTIONS, 1_600_000, "live/busy", make, quick=quick, target=None)


def bench_stored_bytes(*, quick: bool) -> list[Result]:
    def make(stack: ExitStack, mib: int) -> tuple[RunningServer, str]:
        served = stack.enter_context(runnel_system.serve(stored="disk"))
        stored_mib = mib // 4 if quick else mib
        if stored_mib:
            count = stored_mib * 2**20 // FILLING_BYTES
            plan = RolePlan(served.url, ("grow/busy",), count=count, payload_bytes=FILLING_BYTES)
            _publish(plan)
        return served, f"{stored_mib:,} MiB stored" if stored_mib else "nothing stored"

    name = "a busy topic on disk"
    return _growth(name, STORED_MIB, 1_000_000, "grow/busy", make, quick=quick, target=None)


PARTS = (
    ("topics", bench_topics),
    ("subscriptions", bench_subscriptions),
    ("connections", bench_connections),
    ("stored bytes", bench_stored_bytes),
)
