"""What the broker's benchmarks share: a run of publisher and readers, rates, percentiles, systems side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import msgspec

from bench.contest import Contender, Sample, Standing, compared, contest
from bench.processes import RoleReport, Team
from bench.report import Result
from bench.servers import Servers
from bench.systems import kafka_system, nats_system, rabbit_system, redis_system, runnel_system
from bench.systems.system import PayloadOrder, RolePlan, RunningServer

RUNNEL, NATS, REDIS = runnel_system.NAME, nats_system.NAME, redis_system.NAME
RABBIT, KAFKA = rabbit_system.NAME, kafka_system.NAME
PEERS: tuple[ModuleType, ...] = (nats_system, redis_system, rabbit_system, kafka_system)
SYSTEMS: tuple[ModuleType, ...] = (runnel_system, *PEERS)
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
_UNITS_NS = {"µs": 1e3, "ms": 1e6}


def rounds(*, quick: bool) -> int:
    return 1 if quick else 5


def sized(full: int, *, quick: bool) -> int:
    return full // 4 if quick else full


def peer_facts() -> dict[str, str]:
    present = [system.version() for system in PEERS if system.absence() is None]
    return {"peers": ", ".join(present) or "none"}


# --- A run ---


def trouble(received: RoleReport, expected: int) -> str:
    problems = []
    if received.messages != expected:
        problems.append(f"{received.messages:,} of {expected:,} messages")
    if received.misplaced:
        problems.append(f"{received.misplaced:,} out of order")
    return " and ".join(problems)


def together(reports: Sequence[RoleReport]) -> RoleReport:
    return RoleReport(
        min(report.begin_ns for report in reports),
        max(report.end_ns for report in reports),
        sum(report.messages for report in reports),
        sum(report.misplaced for report in reports),
        [taken for report in reports for taken in report.taken_ns],
    )


def rate(messages: int, begin_ns: int, end_ns: int) -> float:
    return messages / (end_ns - begin_ns) * 1e9


def fan_out(
    system: ModuleType,
    served: RunningServer,
    count: int,
    *,
    topics: tuple[str, ...] = ("live/a",),
    pattern: str = "live/a",
    processes: int = 1,
    connections: int = 1,
    order: PayloadOrder = PayloadOrder.ALL,
) -> Sample:
    """One publisher; so many subscribing processes with so many connections each. Messages delivered a second."""
    plan = RolePlan(served.url, topics, pattern, count, connections, order=order)
    with Team() as team:
        readers = [team.add(system.subscribe, plan) for _ in range(processes)]
        writer = team.add(system.publish, plan)
        team.wait_ready()
        writer.go()
        sent = writer.report()
        received = together([reader.report() for reader in readers])
    expected = count * processes * connections
    delivered = rate(received.messages, sent.begin_ns, received.end_ns)
    return Sample((delivered,), trouble(received, expected))


def acknowledged(system: ModuleType, served: RunningServer, count: int) -> Sample:
    """One publisher to a stored topic. Acknowledged messages a second."""
    with Team() as team:
        writer = team.add(system.publish_stored, RolePlan(served.url, ("stored/a",), count=count))
        team.wait_ready()
        writer.go()
        sent = writer.report()
    return Sample((rate(sent.messages, sent.begin_ns, sent.end_ns),), trouble(sent, count))


def percentiles(report: RoleReport, unit: str) -> tuple[float, ...]:
    """p50, p90, p99 and p99.9, without the first tenth, in which connections and code warm up."""
    taken = sorted(report.taken_ns[len(report.taken_ns) // 10 :]) or [0]
    places = [min(int(len(taken) * share), len(taken) - 1) for share in PERCENTILES.values()]
    return tuple(taken[place] / _UNITS_NS[unit] for place in places)


# --- Systems side by side ---


class Entry(msgspec.Struct, frozen=True):
    """A system as it takes part: under which name, how its server keeps messages, and how many it gets."""

    name: str
    system: ModuleType
    count: int
    stored: str = ""


def entries(counts: Mapping[str, int]) -> list[Entry]:
    """Under their own names, in the order of SYSTEMS; `counts` says who takes part."""
    return [
        Entry(system.NAME, system, counts[system.NAME])
        for system in SYSTEMS
        if system.NAME in counts
    ]


Measure = Callable[[Entry, RunningServer, int], Sample]


def contest_of(
    taking_part: Sequence[Entry], measure: Measure, *, quick: bool
) -> dict[str, Standing]:
    """Each with a server of its own, fresh or standing; those that stand have a run that is not counted."""
    with Servers() as servers:

        def contender(entry: Entry) -> Contender:
            def run() -> Sample:
                with servers.serve(entry.system, stored=entry.stored) as served:
                    return measure(entry, served, sized(entry.count, quick=quick))

            is_warmed = getattr(entry.system, "STANDS", False) and not quick
            return Contender(entry.name, run, entry.system.absence(), is_warmed)

        return contest([contender(entry) for entry in taking_part], rounds(quick=quick))


def against_each(
    name: str,
    unit: str,
    standings: Mapping[str, Standing],
    targets: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
    *,
    note: str = "",
) -> list[Result]:
    """The first of the standings against every other: a result for each."""
    ours, *peers = standings.values()
    return [
        compared(
            name,
            unit,
            ours,
            peer,
            target=(targets or {}).get(peer.name),
            note="; ".join(filter(None, (note, (notes or {}).get(peer.name, "")))),
        )
        for peer in peers
    ]
