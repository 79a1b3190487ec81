"""The broker's speed beside its peers: NATS, Redis, RabbitMQ and Kafka, each with its Python client.

one to one      ephemeral, 100-byte messages
one to thirty   the same to 30 connections in 3 processes
clients         30 connections in 3 processes publish over a to g as fast as they can and listen to a
stored          acknowledged publishing to disk
saturated       stored acknowledgements, one by one, while eight other connections saturate the broker
small batches   single messages evenly over 1,000 topics, one subscriber on all of them
memory          of a connection with one subscription

Publishers, broker and subscribers are separate processes, the same number for each system, all on CPython, over
loopback TCP; the server is fresh for each run, or stands and has topics of its own for each. The clock goes from just
before the first message is sent to the last delivery, after imports and connecting. Systems take turns; medians count.
Both sides use the interface for single messages. Every run counts its messages and checks their order; one with loss
is told and not counted. How each peer is used, and why so: the first lines of its module in systems/.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import psutil

from bench.contest import Contender, Sample, alone, compared, contest
from bench.measures import (
    KAFKA,
    NATS,
    RABBIT,
    REDIS,
    RUNNEL,
    Entry,
    acknowledged,
    against_each,
    contest_of,
    entries,
    fan_out,
    peer_facts,
    percentiles,
    rate,
    rounds,
    together,
    trouble,
)
from bench.processes import Team
from bench.report import Result
from bench.systems import kafka_system, nats_system, rabbit_system, redis_system, runnel_system
from bench.systems.system import PayloadOrder, RolePlan, RunningServer

JETSTREAM, JETSTREAM_ALWAYS = "JetStream", "JetStream with sync always"
STREAMS = "Redis Streams with appendfsync always"
RABBIT_CLASSIC, RABBIT_QUORUM = "RabbitMQ, classic queue", "RabbitMQ, quorum queue"
KAFKA_SYNCED = "Kafka with flush.messages=1"
LETTERS = tuple(f"live/{letter}" for letter in "abcdefg")
SUBSCRIBER_PROCESSES = 3
FAN_OUT = 30
CLIENTS = 30
LOADING_CONNECTIONS = 8
SMALL_TOPICS = 1000
NOT_EPHEMERAL = "Kafka has no ephemeral topics: on disk, not synced"

more_facts = peer_facts


# --- Live ---


def bench_one_to_one(*, quick: bool) -> list[Result]:
    counts = {RUNNEL: 2_000_000, NATS: 300_000, REDIS: 200_000, RABBIT: 20_000, KAFKA: 600_000}

    def measure(entry: Entry, served: RunningServer, count: int) -> Sample:
        return fan_out(entry.system, served, count)

    return against_each(
        "1 to 1, ephemeral, 100 bytes",
        "messages/s",
        contest_of(entries(counts), measure, quick=quick),
        targets={NATS: 10, REDIS: 10, KAFKA: 3},
        notes={KAFKA: NOT_EPHEMERAL},
    )


def bench_one_to_thirty(*, quick: bool) -> list[Result]:
    counts = {RUNNEL: 160_000, NATS: 16_000, REDIS: 12_000, RABBIT: 1600, KAFKA: 40_000}

    def measure(entry: Entry, served: RunningServer, count: int) -> Sample:
        each = FAN_OUT // SUBSCRIBER_PROCESSES
        return fan_out(
            entry.system, served, count, processes=SUBSCRIBER_PROCESSES, connections=each
        )

    return against_each(
        f"1 to {FAN_OUT}, delivered",
        "messages/s",
        contest_of(entries(counts), measure, quick=quick),
        targets={NATS: 5},
        notes={KAFKA: NOT_EPHEMERAL},
        note=f"{SUBSCRIBER_PROCESSES} subscriber processes",
    )


def bench_clients(*, quick: bool) -> list[Result]:
    # Multiples of the number of topics, also a quarter of them.
    counts = {RUNNEL: 42_000, NATS: 4200, REDIS: 3360, RABBIT: 336, KAFKA: 12_600}

    def measure(entry: Entry, served: RunningServer, full: int) -> Sample:
        count = full // len(LETTERS) * len(LETTERS)
        each = CLIENTS // SUBSCRIBER_PROCESSES
        with Team() as team:
            for first in range(0, CLIENTS, each):
                plan = RolePlan(served.url, LETTERS, LETTERS[0], count, each, CLIENTS, first)
                team.add(entry.system.clients, plan)
            team.wait_ready()
            for member in team.members:
                member.go()
            seen = together([member.report() for member in team.members])
        sent, expected = CLIENTS * count, CLIENTS * CLIENTS * count // len(LETTERS)
        commands = rate(sent + seen.messages, seen.begin_ns, seen.end_ns)
        return Sample((commands,), trouble(seen, expected))

    return against_each(
        f"{CLIENTS} clients publish over a to g, all subscribed to a",
        "commands/s",
        contest_of(entries(counts), measure, quick=quick),
        notes={KAFKA: NOT_EPHEMERAL},
        note="every message in and every message out is a command",
    )


def bench_small_batches(*, quick: bool) -> list[Result]:
    counts = {RUNNEL: 800_000, NATS: 240_000, REDIS: 160_000, RABBIT: 16_000}
    topics = tuple(f"live/small/{number}" for number in range(SMALL_TOPICS))

    def measure(entry: Entry, served: RunningServer, count: int) -> Sample:
        return fan_out(
            entry.system,
            served,
            count,
            topics=topics,
            pattern="live/small/*",
            order=PayloadOrder.TOPIC,
        )

    return against_each(
        f"single messages over {SMALL_TOPICS:,} topics, one subscriber on all",
        "messages/s",
        contest_of(entries(counts), measure, quick=quick),
        targets={NATS: 4},
    )


# --- Stored ---


def bench_stored(*, quick: bool) -> list[Result]:
    taking_part = [
        Entry(RUNNEL, runnel_system, 2_000_000, "disk"),
        Entry(JETSTREAM, nats_system, 60_000, "default"),
        Entry(JETSTREAM_ALWAYS, nats_system, 8000, "always"),
        Entry(STREAMS, redis_system, 120_000, "always"),
        Entry(RABBIT_CLASSIC, rabbit_system, 10_000, "classic"),
        Entry(RABBIT_QUORUM, rabbit_system, 10_000, "quorum"),
        Entry(KAFKA, kafka_system, 1_000_000, "default"),
        Entry(KAFKA_SYNCED, kafka_system, 1_000_000, kafka_system.SYNCED),
    ]

    def measure(entry: Entry, served: RunningServer, count: int) -> Sample:
        return acknowledged(entry.system, served, count)

    return against_each(
        "publishing to disk, acknowledged as stored",
        "messages/s",
        contest_of(taking_part, measure, quick=quick),
        targets={JETSTREAM: 10, STREAMS: 5},
        notes={
            JETSTREAM: "JetStream acknowledges before it syncs, every two minutes",
            KAFKA: "Kafka acknowledges before it syncs, and leaves that to the operating system",
            KAFKA_SYNCED: "it syncs each batch that it appends before it acknowledges it",
        },
    )


def bench_saturated(*, quick: bool) -> list[Result]:
    seconds = 1.0 if quick else 3.0

    def measuring(name: str, system: ModuleType, stored: str) -> Contender:
        def measure() -> Sample:
            with system.serve(stored=stored) as served, Team() as team:
                loading = RolePlan(served.url, ("live/load",), connections=LOADING_CONNECTIONS)
                loader = team.add(system.load, loading)
                probing = RolePlan(served.url, ("stored/a",), seconds=seconds)
                prober = team.add(system.probe_stored, probing)
                team.wait_ready()
                broker = psutil.Process(served.pid)
                broker.cpu_percent()
                prober.go()
                probed = prober.report()
                busy = broker.cpu_percent()
                loader.over()
                loader.report()
            p50, _, p99, _ = percentiles(probed, "ms")
            return Sample((p50, p99, busy))

        return Contender(name, measure, system.absence())

    contenders = [
        measuring(RUNNEL, runnel_system, "disk"),
        measuring(JETSTREAM_ALWAYS, nats_system, "always"),
    ]
    standings = contest(contenders, rounds(quick=quick))
    ours, peer = standings[RUNNEL], standings[JETSTREAM_ALWAYS]
    busy = f"the broker's process is busy for {ours.median(2) or 0:.0f} percent of a core"
    name = f"stored acknowledgement while {LOADING_CONNECTIONS} connections saturate the broker"
    return [
        compared(f"{name}, {percentile}", "ms", ours, peer, place=place, note=busy)
        for place, percentile in ((0, "p50"), (1, "p99"))
    ]


# --- Memory ---


def bench_memory(*, quick: bool) -> list[Result]:
    wanted = 500 if quick else 2000
    connections = allowed_connections(wanted)

    def measuring(system: ModuleType) -> Contender:
        def measure() -> Sample:
            with system.serve() as served:
                broker = psutil.Process(served.pid)
                # The first connections bring in code and buffers that all share.
                with held_connections(system, served, 10):
                    pass
                before = broker.memory_info().rss
                with held_connections(system, served, connections):
                    after = broker.memory_info().rss
            return Sample(((after - before) / connections / 1024,))

        return Contender(system.NAME, measure, system.absence())

    systems = (runnel_system, nats_system, redis_system)
    standings = contest([measuring(system) for system in systems], rounds(quick=quick))
    return [
        alone(
            f"memory of a connection with one subscription, {connections:,} of them",
            "KiB",
            standings[RUNNEL],
            target=60,
            is_at_most=True,
            note="" if connections == wanted else "RLIMIT_NOFILE allows no more",
            others=[standings[NATS], standings[REDIS]],
        )
    ]


@contextmanager
def held_connections(system: ModuleType, served: RunningServer, connections: int) -> Iterator[None]:
    """So many connections, with one subscription each, for as long as the block lasts."""
    with Team() as team:
        holder = team.add(system.connect_many, RolePlan(served.url, connections=connections))
        team.wait_ready()
        yield
        holder.over()
        holder.report()


def allowed_connections(wanted: int) -> int:
    """As many as the limit on open files leaves room for, raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(wanted, hard - 200)


PARTS = (
    ("one to one", bench_one_to_one),
    ("one to thirty", bench_one_to_thirty),
    ("clients", bench_clients),
    ("stored", bench_stored),
    ("saturated", bench_saturated),
    ("small batches", bench_small_batches),
    ("memory", bench_memory),
)
