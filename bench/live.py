"""The broker's speed, end to end and beside its peers: NATS with nats-py, Redis with redis-py and hiredis.

one to one      ephemeral, 100-byte messages
one to thirty   the same to 30 connections in 3 processes
clients         30 connections in 3 processes publish over a to g as fast as they can and listen to a
stored          acknowledged publishing to disk
saturated       stored acknowledgements, one by one, while eight other connections saturate the broker
latency         5,000 messages/s, one by one
catching up     stored messages read from the beginning, to Python objects
small batches   single messages evenly over 1,000 topics, one subscriber on all of them
growth          a busy topic beside many topics, and beside many pattern subscriptions
memory          of a connection with one subscription

Publishers, broker and subscribers are separate processes, the same number for each system, all on CPython; every
system has a fresh server on loopback TCP and a fresh directory for each run. The clock goes from just before the first
message is sent to the last delivery, after imports and connecting. Systems take turns; medians count. Both sides use
the interface for single messages. Every run counts its messages and checks their order; one with loss is told and not
counted. How each peer is used, and why so: the first lines of systems/nats_system.py and systems/redis_system.py.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import psutil

from bench.contest import Contender, Sample, alone, better, compared, contest
from bench.processes import Report, RoleError, Team
from bench.report import Result
from bench.systems import nats_system, redis_system, runnel_system
from bench.systems.system import Order, Plan, Served

RUNNEL, NATS, REDIS = runnel_system.NAME, nats_system.NAME, redis_system.NAME
JETSTREAM, JETSTREAM_ALWAYS = "JetStream", "JetStream with sync always"
STREAMS = "Redis Streams with appendfsync always"
LETTERS = tuple(f"live/{letter}" for letter in "abcdefg")
SUBSCRIBER_PROCESSES = 3
FAN_OUT = 30
CLIENTS = 30
LOADING_CONNECTIONS = 8
STEADY_RATE = 5000
SMALL_TOPICS = 1000


def _rounds(*, quick: bool) -> int:
    return 3 if quick else 5


def _sized(full: int, *, quick: bool) -> int:
    return full // 4 if quick else full


def more_facts() -> dict[str, str]:
    peers = [system for system in (nats_system, redis_system) if system.absence() is None]
    return {"peers": ", ".join(system.version() for system in peers) or "none"}


def _trouble(received: Report, expected: int) -> str:
    problems = []
    if received.messages != expected:
        problems.append(f"{received.messages:,} of {expected:,} messages")
    if received.misplaced:
        problems.append(f"{received.misplaced:,} out of order")
    return " and ".join(problems)


def _together(reports: list[Report]) -> Report:
    return Report(
        min(report.begin_ns for report in reports),
        max(report.end_ns for report in reports),
        sum(report.messages for report in reports),
        sum(report.misplaced for report in reports),
        [taken for report in reports for taken in report.taken_ns],
    )


def _rate(messages: int, begin_ns: int, end_ns: int) -> float:
    return messages / (end_ns - begin_ns) * 1e9


# --- Live ---


def _fan_out(
    system: ModuleType,
    served: Served,
    count: int,
    *,
    topics: tuple[str, ...] = ("live/a",),
    pattern: str = "live/a",
    processes: int = 1,
    connections: int = 1,
    order: Order = Order.ALL,
) -> Sample:
    """One publisher; so many subscribing processes with so many connections each."""
    plan = Plan(served.url, topics, pattern, count, connections, order=order)
    with Team() as team:
        readers = [team.add(system.subscribe, plan) for _ in range(processes)]
        writer = team.add(system.publish, plan)
        team.wait_ready()
        writer.go()
        sent = writer.report()
        received = _together([reader.report() for reader in readers])
    expected = count * processes * connections
    rate = _rate(received.messages, sent.begin_ns, received.end_ns)
    return Sample((rate,), _trouble(received, expected))


def bench_one_to_one(*, quick: bool) -> list[Result]:
    counts = {RUNNEL: 2_000_000, NATS: 300_000, REDIS: 200_000}

    def measuring(system: ModuleType) -> Contender:
        def measure() -> Sample:
            with system.serve() as served:
                return _fan_out(system, served, _sized(counts[system.NAME], quick=quick))

        return Contender(system.NAME, measure, system.absence())

    systems = (runnel_system, nats_system, redis_system)
    standings = contest([measuring(system) for system in systems], _rounds(quick=quick))
    name, unit = "1 to 1, ephemeral, 100 bytes", "messages/s"
    return [
        compared(name, unit, standings[RUNNEL], standings[NATS], target=8),
        compared(name, unit, standings[RUNNEL], standings[REDIS], target=10),
    ]


def bench_one_to_thirty(*, quick: bool) -> list[Result]:
    counts = {RUNNEL: 160_000, NATS: 16_000}

    def measuring(system: ModuleType) -> Contender:
        def measure() -> Sample:
            with system.serve() as served:
                return _fan_out(
                    system,
                    served,
                    _sized(counts[system.NAME], quick=quick),
                    processes=SUBSCRIBER_PROCESSES,
                    connections=FAN_OUT // SUBSCRIBER_PROCESSES,
                )

        return Contender(system.NAME, measure, system.absence())

    standings = contest(
        [measuring(system) for system in (runnel_system, nats_system)], _rounds(quick=quick)
    )
    return [
        compared(
            f"1 to {FAN_OUT}, delivered",
            "messages/s",
            standings[RUNNEL],
            standings[NATS],
            target=5,
            note=f"{SUBSCRIBER_PROCESSES} subscriber processes",
        )
    ]


def bench_clients(*, quick: bool) -> list[Result]:
    counts = {RUNNEL: 42_000, NATS: 4_200}  # multiples of the number of topics, also a quarter

    def measuring(system: ModuleType) -> Contender:
        def measure() -> Sample:
            count = _sized(counts[system.NAME], quick=quick) // len(LETTERS) * len(LETTERS)
            each = CLIENTS // SUBSCRIBER_PROCESSES
            with system.serve() as served, Team() as team:
                for first in range(0, CLIENTS, each):
                    plan = Plan(served.url, LETTERS, LETTERS[0], count, each, CLIENTS, first)
                    team.add(system.clients, plan)
                team.wait_ready()
                for member in team.members:
                    member.go()
                seen = _together([member.report() for member in team.members])
            sent, expected = CLIENTS * count, CLIENTS * CLIENTS * count // len(LETTERS)
            commands = _rate(sent + seen.messages, seen.begin_ns, seen.end_ns)
            return Sample((commands,), _trouble(seen, expected))

        return Contender(system.NAME, measure, system.absence())

    standings = contest(
        [measuring(system) for system in (runnel_system, nats_system)], _rounds(quick=quick)
    )
    return [
        compared(
            f"{CLIENTS} clients publish over a to g, all subscribed to a",
            "commands/s",
            standings[RUNNEL],
            standings[NATS],
            note="every message in and every message out is a command",
        )
    ]


def bench_latency(*, quick: bool) -> list[Result]:
    count = STEADY_RATE * (1 if quick else 2)

    def measuring(system: ModuleType) -> Contender:
        def measure() -> Sample:
            with system.serve() as served, Team() as team:
                plan = Plan(served.url, count=count, rate=STEADY_RATE, order=Order.STAMPED)
                reader = team.add(system.subscribe, plan)
                writer = team.add(system.publish_steadily, plan)
                team.wait_ready()
                writer.go()
                sent, received = writer.report(), reader.report()
            trouble = _trouble(received, count)
            kept_up = _rate(count, sent.begin_ns, sent.end_ns) / STEADY_RATE
            if kept_up < 0.95:
                trouble = trouble or f"only {kept_up:.0%} of the rate"
            return Sample(_percentiles(received, "µs"), trouble)

        return Contender(system.NAME, measure, system.absence())

    systems = (runnel_system, nats_system, redis_system)
    standings = contest([measuring(system) for system in systems], _rounds(quick=quick))
    name, unit = f"latency at {STEADY_RATE:,} messages/s, one by one", "µs"
    results = []
    for place, percentile, target in ((0, "p50", 1.0), (1, "p99", 1.5)):
        peer = better(standings, (NATS, REDIS), place)
        other = standings[REDIS if peer.name == NATS else NATS]
        results.append(
            compared(
                f"{name}, {percentile}",
                unit,
                standings[RUNNEL],
                peer,
                place=place,
                target=target,
                is_at_most=True,
                note=f"the other peer: {other.told(place)}",
            )
        )
    return results


_UNITS_NS = {"µs": 1e3, "ms": 1e6}


def _percentiles(report: Report, unit: str) -> tuple[float, float]:
    """p50 and p99, without the first tenth, in which connections and code warm up."""
    taken = sorted(report.taken_ns[len(report.taken_ns) // 10 :]) or [0]
    return (
        taken[len(taken) // 2] / _UNITS_NS[unit],
        taken[int(len(taken) * 0.99)] / _UNITS_NS[unit],
    )


def bench_small_batches(*, quick: bool) -> list[Result]:
    counts = {RUNNEL: 800_000, NATS: 240_000}
    topics = tuple(f"live/small/{number}" for number in range(SMALL_TOPICS))

    def measuring(system: ModuleType) -> Contender:
        def measure() -> Sample:
            with system.serve() as served:
                return _fan_out(
                    system,
                    served,
                    _sized(counts[system.NAME], quick=quick),
                    topics=topics,
                    pattern="live/small/*",
                    order=Order.TOPIC,
                )

        return Contender(system.NAME, measure, system.absence())

    standings = contest(
        [measuring(system) for system in (runnel_system, nats_system)], _rounds(quick=quick)
    )
    return [
        compared(
            f"single messages over {SMALL_TOPICS:,} topics, one subscriber on all",
            "messages/s",
            standings[RUNNEL],
            standings[NATS],
            target=4,
        )
    ]


# --- Stored ---


def _acknowledged(system: ModuleType, served: Served, count: int) -> Sample:
    with Team() as team:
        writer = team.add(system.publish_stored, Plan(served.url, ("stored/a",), count=count))
        team.wait_ready()
        writer.go()
        sent = writer.report()
    return Sample((_rate(sent.messages, sent.begin_ns, sent.end_ns),), _trouble(sent, count))


def bench_stored(*, quick: bool) -> list[Result]:
    def measuring(name: str, system: ModuleType, full: int, stored: str) -> Contender:
        def measure() -> Sample:
            with system.serve(stored=stored) as served:
                return _acknowledged(system, served, _sized(full, quick=quick))

        return Contender(name, measure, system.absence())

    contenders = [
        measuring(RUNNEL, runnel_system, 2_000_000, "disk"),
        measuring(JETSTREAM, nats_system, 60_000, "default"),
        measuring(JETSTREAM_ALWAYS, nats_system, 8_000, "always"),
        measuring(STREAMS, redis_system, 120_000, "always"),
    ]
    standings = contest(contenders, _rounds(quick=quick))
    name, unit = "publishing to disk, acknowledged as stored", "messages/s"
    late = "JetStream acknowledges before it syncs, every two minutes"
    return [
        compared(name, unit, standings[RUNNEL], standings[JETSTREAM], target=10, note=late),
        compared(name, unit, standings[RUNNEL], standings[JETSTREAM_ALWAYS]),
        compared(name, unit, standings[RUNNEL], standings[STREAMS], target=5),
    ]


def bench_saturated(*, quick: bool) -> list[Result]:
    seconds = 1.0 if quick else 3.0

    def measuring(name: str, system: ModuleType, stored: str) -> Contender:
        def measure() -> Sample:
            with system.serve(stored=stored) as served, Team() as team:
                loading = Plan(served.url, ("live/load",), connections=LOADING_CONNECTIONS)
                loader = team.add(system.load, loading)
                prober = team.add(
                    system.probe_stored, Plan(served.url, ("stored/a",), seconds=seconds)
                )
                team.wait_ready()
                broker = psutil.Process(served.pid)
                broker.cpu_percent()
                prober.go()
                probed = prober.report()
                busy = broker.cpu_percent()
                loader.over()
                loader.report()
            return Sample((*_percentiles(probed, "ms"), busy))

        return Contender(name, measure, system.absence())

    contenders = [
        measuring(RUNNEL, runnel_system, "disk"),
        measuring(JETSTREAM_ALWAYS, nats_system, "always"),
    ]
    standings = contest(contenders, _rounds(quick=quick))
    ours, peer = standings[RUNNEL], standings[JETSTREAM_ALWAYS]
    busy = f"the broker's process is busy for {ours.median(2) or 0:.0f} percent of a core"
    name = f"stored acknowledgement while {LOADING_CONNECTIONS} connections saturate the broker"
    return [
        compared(f"{name}, {percentile}", "ms", ours, peer, place=place, note=busy)
        for place, percentile in ((0, "p50"), (1, "p99"))
    ]


def bench_catching_up(*, quick: bool) -> list[Result]:
    counts = {RUNNEL: 500_000 if quick else 5_000_000, JETSTREAM: 20_000 if quick else 100_000}

    def reading(name: str, system: ModuleType, served: Served) -> Contender:
        plan = Plan(served.url, ("stored/a",), "stored/a", counts[name])

        def measure() -> Sample:
            with Team() as team:
                reader = team.add(system.catch_up, plan)
                team.wait_ready()
                reader.go()
                read = reader.report()
            rate = _rate(read.messages, read.begin_ns, read.end_ns)
            return Sample((rate,), _trouble(read, plan.count))

        return Contender(name, measure)

    contenders = []
    with ExitStack() as stack:
        # All servers stand by, since filling them takes longer than reading; an idle one costs next to nothing.
        for name, system, stored in (
            (RUNNEL, runnel_system, "disk"),
            (JETSTREAM, nats_system, "default"),
        ):
            if absence := system.absence():
                contenders.append(Contender(name, lambda: Sample(()), absence))
                continue
            served = stack.enter_context(system.serve(stored=stored))
            if trouble := _acknowledged(system, served, counts[name]).trouble:
                raise RoleError(f"{name} could not be filled: {trouble}")
            contenders.append(reading(name, system, served))
        standings = contest(contenders, _rounds(quick=quick))
    peer = standings[JETSTREAM].median()
    return [
        compared(
            f"catching up on {counts[RUNNEL]:,} stored messages, to Python objects",
            "messages/s",
            standings[RUNNEL],
            standings[JETSTREAM],
            target=None if peer is None else min(10.0, 1e6 / peer),
            note=f"1 M/s or 10 times the ordered consumer, which read {counts[JETSTREAM]:,}",
        )
    ]


# --- Growth and memory ---


def bench_growth(*, quick: bool) -> list[Result]:
    return _growth_of_topics(quick=quick) + _growth_of_patterns(quick=quick)


def _growth_of_topics(*, quick: bool) -> list[Result]:
    """The busy topic is on disk, as the others are, and in the same journal."""
    count = _sized(1_000_000, quick=quick)
    with ExitStack() as stack:
        contenders = []
        for topics in (1, 100_000) if quick else (1, 1000, 100_000):
            served = stack.enter_context(runnel_system.serve(stored="disk"))
            names = tuple(f"grow/{number}" for number in range(topics - 1))
            if names:
                with Team() as team:
                    plan = Plan(served.url, names, count=len(names))
                    maker = team.add(runnel_system.publish, plan)
                    team.wait_ready()
                    maker.go()
                    maker.report()
            among = f"{topics:,} topics" if names else "no other topic"
            contenders.append(_busy(among, served, count, "grow/busy"))
        return _growth("a busy topic on disk", contenders, quick=quick)


def _growth_of_patterns(*, quick: bool) -> list[Result]:
    count = _sized(1_600_000, quick=quick)
    with ExitStack() as stack:
        contenders = []
        for patterns in (1, 10_000) if quick else (1, 1000, 10_000):
            served = stack.enter_context(runnel_system.serve())
            # Ends before its server does: the stack is undone from its end.
            team = stack.enter_context(Team())
            holder = team.add(runnel_system.hold_patterns, Plan(served.url, count=patterns - 1))
            holder.wait_ready()
            stack.callback(holder.over)
            among = (
                f"{patterns:,} pattern subscriptions" if patterns > 1 else "no other subscription"
            )
            contenders.append(_busy(among, served, count, "live/busy"))
        return _growth("a busy ephemeral topic", contenders, quick=quick)


def _busy(among: str, served: Served, count: int, topic: str) -> Contender:
    """One to one on that topic. The servers of all sizes stand by: what they hold takes time to make."""

    def measure() -> Sample:
        return _fan_out(runnel_system, served, count, topics=(topic,), pattern=topic)

    return Contender(among, measure)


def _growth(name: str, contenders: list[Contender], *, quick: bool) -> list[Result]:
    standings = list(contest(contenders, _rounds(quick=quick)).values())
    return [
        compared(f"{name}, {grown.name}", "messages/s", grown, standings[0], target=0.7)
        for grown in standings[1:]
    ]


def bench_memory(*, quick: bool) -> list[Result]:
    wanted = 500 if quick else 2000
    connections = _allowed(wanted)

    def measuring(system: ModuleType) -> Contender:
        def measure() -> Sample:
            with system.serve() as served:
                broker = psutil.Process(served.pid)
                # The first connections bring in code and buffers that all share.
                with _held(system, served, 10):
                    pass
                before = broker.memory_info().rss
                with _held(system, served, connections):
                    after = broker.memory_info().rss
            return Sample(((after - before) / connections / 1024,))

        return Contender(system.NAME, measure, system.absence())

    systems = (runnel_system, nats_system, redis_system)
    standings = contest([measuring(system) for system in systems], 1 if quick else 3)
    note = "; ".join(standings[peer].told() for peer in (NATS, REDIS))
    return [
        alone(
            f"memory of a connection with one subscription, {connections:,} of them",
            "KiB",
            standings[RUNNEL],
            target=60,
            is_at_most=True,
            note=note if connections == wanted else f"RLIMIT_NOFILE allows no more; {note}",
        )
    ]


@contextmanager
def _held(system: ModuleType, served: Served, connections: int) -> Iterator[None]:
    """So many connections, with one subscription each, for as long as the block lasts."""
    with Team() as team:
        holder = team.add(system.connect_many, Plan(served.url, connections=connections))
        team.wait_ready()
        yield
        holder.over()
        holder.report()


def _allowed(connections: int) -> int:
    """As many as the limit on open files leaves room for, raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(connections, hard - 200)


PARTS = (
    ("one to one", bench_one_to_one),
    ("one to thirty", bench_one_to_thirty),
    ("clients", bench_clients),
    ("stored", bench_stored),
    ("saturated", bench_saturated),
    ("latency", bench_latency),
    ("catching up", bench_catching_up),
    ("small batches", bench_small_batches),
    ("growth", bench_growth),
    ("memory", bench_memory),
)
