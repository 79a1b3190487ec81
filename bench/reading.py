"""Catching up: stored messages read from the beginning, beside the peers.

objects     to Python objects, one by one
arrow       to Arrow record batches
iteration   what `async for` adds to decoding, in processor time of the reader

All servers of a part stand by, since filling them takes longer than reading; an idle one costs next to nothing. Each
read is a process of its own; the clock goes from the request to the last message. What is read was just written, so it
comes from the page cache for every system.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from bench.contest import Contender, Sample, Standing, compared, contest
from bench.measures import (
    KAFKA,
    RUNNEL,
    Entry,
    acknowledged,
    against_each,
    peer_facts,
    rate,
    rounds,
    sized,
    trouble,
)
from bench.processes import Role, RoleError, Team
from bench.report import Result
from bench.servers import Servers
from bench.systems import kafka_system, nats_system, rabbit_system, redis_system, runnel_system
from bench.systems.system import RolePlan, RunningServer

JETSTREAM, STREAMS, RABBIT_STREAM = "JetStream", "Redis Streams", "RabbitMQ, stream"
STORED = Entry(RUNNEL, runnel_system, 5_000_000, "disk")
PEERS = (
    Entry(JETSTREAM, nats_system, 100_000, "default"),
    Entry(STREAMS, redis_system, 200_000, "everysec"),
    Entry(RABBIT_STREAM, rabbit_system, 20_000, "stream"),
    Entry(KAFKA, kafka_system, 1_000_000, "default"),
)

more_facts = peer_facts


def _reading(entry: Entry, served: RunningServer, role: Role, *, quick: bool) -> Contender:
    plan = RolePlan(served.url, ("stored/a",), "stored/a", sized(entry.count, quick=quick))

    def measure() -> Sample:
        with Team() as team:
            reader = team.add(role, plan)
            team.wait_ready()
            reader.go()
            read = reader.report()
        return Sample((rate(read.messages, read.begin_ns, read.end_ns),), trouble(read, plan.count))

    return Contender(entry.name, measure)


def _filled(servers: Servers, stack: ExitStack, entry: Entry, *, quick: bool) -> RunningServer:
    served = stack.enter_context(servers.serve(entry.system, stored=entry.stored))
    filled = acknowledged(entry.system, served, sized(entry.count, quick=quick))
    if filled.trouble:
        raise RoleError(f"{entry.name} could not be filled: {filled.trouble}")
    return served


def _contest(taking_part: Sequence[tuple[Entry, str]], *, quick: bool) -> dict[str, Standing]:
    """Each entry with the name of the role that reads."""
    contenders = []
    with Servers() as servers, ExitStack() as stack:
        for entry, role in taking_part:
            if absence := entry.system.absence():
                contenders.append(Contender(entry.name, lambda: Sample(()), absence))
                continue
            served = _filled(servers, stack, entry, quick=quick)
            contenders.append(_reading(entry, served, getattr(entry.system, role), quick=quick))
        return contest(contenders, rounds(quick=quick))


def bench_objects(*, quick: bool) -> list[Result]:
    taking_part = [(entry, "catch_up") for entry in (STORED, *PEERS)]
    standings = _contest(taking_part, quick=quick)
    counts = {entry.name: sized(entry.count, quick=quick) for entry in (STORED, *PEERS)}
    slowest = standings[JETSTREAM].median()
    targets = {} if slowest is None else {JETSTREAM: min(10.0, 1e6 / slowest)}
    notes = {name: f"which read {count:,}" for name, count in counts.items()}
    notes[JETSTREAM] = f"1 M/s or 10 times the ordered consumer, {notes[JETSTREAM]}"
    name = f"catching up on {counts[RUNNEL]:,} stored messages, to Python objects"
    return against_each(name, "messages/s", standings, targets, notes)


def bench_arrow(*, quick: bool) -> list[Result]:
    """Runnel twice on one server: the second time to objects, to be compared with."""
    with Servers() as servers, ExitStack() as stack:
        served = _filled(servers, stack, STORED, quick=quick)
        contenders = [
            _reading(STORED, served, runnel_system.catch_up_arrow, quick=quick),
            _as("Runnel, to Python objects", served, quick=quick),
        ]
        entry = PEERS[-1]
        if absence := entry.system.absence():
            contenders.append(Contender(entry.name, lambda: Sample(()), absence))
        else:
            filled = _filled(servers, stack, entry, quick=quick)
            contenders.append(_reading(entry, filled, kafka_system.catch_up_arrow, quick=quick))
        ours, objects, kafka = contest(contenders, rounds(quick=quick)).values()
    name = f"catching up on {sized(STORED.count, quick=quick):,} stored messages, to Arrow"
    made = "whose messages are made into record batches of 10,000"
    return [
        compared(name, "messages/s", ours, kafka, note=made),
        compared(name, "messages/s", ours, objects),
    ]


def _as(name: str, served: RunningServer, *, quick: bool) -> Contender:
    entry = Entry(name, runnel_system, STORED.count)
    return _reading(entry, served, runnel_system.catch_up, quick=quick)


def bench_iteration(*, quick: bool) -> list[Result]:
    count = sized(2_000_000, quick=quick)
    one_by_one, by_batches = "async for", "by batches"

    def reading(name: str, served: RunningServer, role: Role) -> Contender:
        plan = RolePlan(served.url, ("stored/a",), "stored/a", count)

        def measure() -> Sample:
            with Team() as team:
                reader = team.add(role, plan)
                team.wait_ready()
                reader.go()
                read = reader.report()
            return Sample((read.taken_ns[0] / count,), trouble(read, count))

        return Contender(name, measure)

    with runnel_system.serve(stored="disk") as served:
        acknowledged(runnel_system, served, count)
        contenders = [
            reading(one_by_one, served, runnel_system.iterate),
            reading(by_batches, served, runnel_system.decode),
        ]
        standings = contest(contenders, rounds(quick=quick))
    one, batches = (standings[name].median() or 0.0 for name in (one_by_one, by_batches))
    return [
        Result(
            "iterating, above decoding, processor time a message",
            one - batches,
            "ns",
            target=150,
            is_at_most=True,
            note=f"{one:.0f} ns with `async for`, {batches:.0f} by batches, receiving included",
        )
    ]


PARTS = (("objects", bench_objects), ("arrow", bench_arrow), ("iteration", bench_iteration))
