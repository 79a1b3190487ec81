"""Acknowledged work beside its peers: publish, deliver and acknowledge each message, stored, from Python.

work                one producer and four consumers, shared and key_shared, beside the peers
keys                key_shared over many keys
in flight           a million messages leased and not acknowledged: memory, and acknowledging them in any order
idle subscriptions  publishing to a topic that a thousand subscriptions without consumers cover

Producer, consumers and broker are separate processes, the same number for each system, all on CPython; every system
has a server on loopback TCP, fresh for each run or with a queue of its own for each. Consumers are there before the
first message. The clock goes from just before the first message is sent to the last acknowledgement. Systems take
turns; medians count. Every run adds up what its consumers acknowledged and asks the server whether it agrees; one
that lacks or repeats a message is told and not counted. Runnel's consumers take and acknowledge message by message;
the same by batches is told beside it. How each peer is used, and why so: the first lines of systems/nats_queue.py,
redis_queue.py, rabbit_queue.py and kafka_queue.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType

import msgspec
import psutil

from bench.contest import Contender, Sample, Standing, alone, compared, contest, highest
from bench.processes import Member, RoleReport, Team
from bench.report import Result
from bench.servers import Servers
from bench.systems import kafka_queue, nats_queue, rabbit_queue, redis_queue, runnel_queue
from bench.systems.system import IDLE_SECONDS_MAX, PAYLOAD_BYTES, RunningServer, scratch
from bench.systems.work import TOPIC, AckTally, WorkPlan
from runnel.formats.work_heads import DeliveryPart
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.definition import SubscriptionOptions
from runnel.group_rules.group import Group

CONSUMERS = 4
KEYS = 1000
KEYS_MANY = 100_000
IN_FLIGHT = 1_000_000
SUBSCRIPTIONS = 1000
_POLL_SECONDS = 0.005
_PARTS_AT_ONCE = 1000  # as many as a client puts into a frame
_SEED = 1
_FIRST_SECONDS_MAX = 30.0


class Rival(msgspec.Struct, frozen=True):
    """A system as it is set up for work: how its server stores, and what its consumers ask for."""

    name: str
    system: ModuleType
    stored: str
    mode: str
    count: int


SHARED = Rival("shared", runnel_queue, "disk", "shared", 1_000_000)
BY_BATCHES = Rival("shared by batches", runnel_queue, "disk", "shared by batches", 1_000_000)
KEY_SHARED = Rival("key_shared", runnel_queue, "disk", "key_shared", 400_000)
PEERS = (
    Rival("JetStream", nats_queue, "default", "", 60_000),
    Rival("JetStream with sync always", nats_queue, "always", "", 16_000),
    Rival("Redis Streams", redis_queue, "everysec", "", 200_000),
    Rival("Redis Streams with appendfsync always", redis_queue, "always", "", 200_000),
    Rival("RabbitMQ, classic queue", rabbit_queue, "classic", "classic", 20_000),
    Rival("RabbitMQ, quorum queue", rabbit_queue, "quorum", "quorum", 20_000),
)
# Its groups acknowledge up to an offset, not message by message, so it is told apart from those that do.
KAFKAS = (
    Rival("Kafka", kafka_queue, "default", "", 400_000),
    Rival("Kafka with flush.messages=1", kafka_queue, "always", "", 400_000),
)


def _rounds(*, quick: bool) -> int:
    return 1 if quick else 5


def _sized(full: int, *, quick: bool) -> int:
    return full // 4 if quick else full


def more_facts() -> dict[str, str]:
    peers = {peer.system: None for peer in (*PEERS, *KAFKAS) if peer.system.absence() is None}
    return {"peers": ", ".join(system.version() for system in peers) or "none"}


# --- Publish, deliver, acknowledge ---


def _work(rival: Rival, served: RunningServer, count: int, *, keys: int = 0) -> Sample:
    with (
        scratch() as directory,
        AckTally.make(directory / "tally", CONSUMERS) as tally,
        Team() as team,
    ):
        plan = WorkPlan(served.url, str(directory / "tally"), 0, count, keys, rival.mode)
        consumers = [
            team.add(rival.system.consume, msgspec.structs.replace(plan, place=place))
            for place in range(CONSUMERS)
        ]
        producer = team.add(rival.system.produce, plan)
        team.wait_ready()
        producer.go()
        _wait_acknowledged(tally, count, consumers)
        sent = producer.report()
        for consumer in consumers:
            consumer.over()
        taken = [consumer.report() for consumer in consumers]
        audited = _audited(team, rival.system, plan)
    seconds = (max(report.end_ns for report in taken) - sent.begin_ns) / 1e9
    return Sample((count / seconds,), _trouble(taken, audited, count))


def _wait_acknowledged(tally: AckTally, count: int, consumers: Sequence[Member]) -> None:
    """Until all are acknowledged, a consumer has failed, or nothing has moved for a while."""
    before, moved = 0, time.monotonic()
    while (total := tally.total()) < count:
        if total != before:
            before, moved = total, time.monotonic()
        elif time.monotonic() - moved > (IDLE_SECONDS_MAX if total else _FIRST_SECONDS_MAX):
            return
        if not all(consumer.process.is_alive() for consumer in consumers):
            return
        time.sleep(_POLL_SECONDS)


def _audited(team: Team, system: ModuleType, plan: WorkPlan) -> RoleReport:
    """What the server says of it, once its consumers are gone."""
    auditor = team.add(system.audit, plan)
    auditor.wait_ready()
    return auditor.report()


def _trouble(taken: Sequence[RoleReport], audited: RoleReport, count: int) -> str:
    problems = []
    acknowledged = sum(report.messages for report in taken)
    if acknowledged != count:
        problems.append(f"{acknowledged:,} of {count:,} acknowledged")
    if audited.messages != count:
        problems.append(f"the server knows of {audited.messages:,} of {count:,} acknowledgements")
    if repeated := audited.misplaced:
        problems.append(f"{repeated:,} delivered again")
    if misplaced := sum(report.misplaced for report in taken):
        problems.append(f"{misplaced:,} out of order or delivered again")
    return " and ".join(problems)


def _contender(
    rival: Rival, servers: Servers, *, quick: bool, keys: int = 0, name: str = ""
) -> Contender:
    def measure() -> Sample:
        with servers.serve(rival.system, stored=rival.stored) as served:
            return _work(rival, served, _sized(rival.count, quick=quick), keys=keys)

    is_warmed = getattr(rival.system, "STANDS", False) and not quick
    return Contender(name or rival.name, measure, rival.system.absence(), is_warmed)


def bench_work(*, quick: bool) -> list[Result]:
    with Servers() as servers:
        contenders = [
            _contender(SHARED, servers, quick=quick),
            _contender(BY_BATCHES, servers, quick=quick),
            _contender(KEY_SHARED, servers, quick=quick, keys=KEYS),
            *(_contender(peer, servers, quick=quick) for peer in (*PEERS, *KAFKAS)),
        ]
        standings = contest(contenders, _rounds(quick=quick))
    shared, keyed = standings[SHARED.name], standings[KEY_SHARED.name]
    batches = standings[BY_BATCHES.name]
    names = [peer.name for peer in PEERS]
    best = highest(standings, names)
    others = [standings[name] for name in names if standings[name] is not best]
    groups = [peer.name for peer in KAFKAS]
    group = highest(standings, groups)
    other_groups = [standings[name] for name in groups if standings[name] is not group]
    up_to = "a group acknowledges up to an offset, not message by message"
    name, unit = "publish, deliver, acknowledge, 1 to 4", "messages/s"
    return [
        compared(f"{name}, shared", unit, shared, best, target=5, others=others),
        compared(f"{name}, shared", unit, shared, group, target=5, note=up_to, others=other_groups),
        compared(f"{name}, shared, batch by batch", unit, batches, best),
        compared(f"{name}, shared, batch by batch", unit, batches, group, note=up_to),
        compared(f"{name}, key_shared", unit, keyed, best, target=2, note=f"{KEYS:,} keys"),
        compared(f"{name}, key_shared", unit, keyed, group, note=f"{KEYS:,} keys; {up_to}"),
        compared(f"{name}, key_shared", unit, keyed, shared, target=1 / 3),
    ]


def bench_keys(*, quick: bool) -> list[Result]:
    few, many = f"{KEYS:,} keys", f"{KEYS_MANY:,} keys"
    with Servers() as servers:
        contenders = [
            _contender(KEY_SHARED, servers, quick=quick, keys=KEYS, name=few),
            _contender(KEY_SHARED, servers, quick=quick, keys=KEYS_MANY, name=many),
        ]
        standings = contest(contenders, _rounds(quick=quick))
    name = f"key_shared over {many}"
    return [compared(name, "messages/s", standings[many], standings[few])]


# --- A million in flight ---


def bench_in_flight(*, quick: bool) -> list[Result]:
    count = _sized(IN_FLIGHT, quick=quick)

    ordered, shuffled = "in order", "in random order"

    def measured(measure: Callable[..., Sample]) -> dict[str, Standing]:
        contenders = [
            Contender(ordered, partial(measure, count, is_shuffled=False)),
            Contender(shuffled, partial(measure, count, is_shuffled=True)),
        ]
        return contest(contenders, _rounds(quick=quick))

    standings = measured(_in_flight)
    rules = measured(_rules_acknowledge)
    samples = [*standings[ordered].samples, *standings[shuffled].samples]
    both = Standing("Runnel", samples)
    name = f"{count:,} messages in flight"
    return [
        alone(
            f"{name}, memory of each in the broker",
            "bytes",
            both,
            place=1,
            target=150,
            is_at_most=True,
        ),
        compared(
            f"{name}, acknowledged one by one {shuffled}",
            "messages/s",
            standings[shuffled],
            standings[ordered],
            target=0.5,
            note="by the client, which tells of whole deliveries where it can",
        ),
        compared(
            f"{name}, acknowledged in parts of one message {shuffled}",
            "messages/s",
            rules[shuffled],
            rules[ordered],
            note="the rules alone",
        ),
    ]


def _in_flight(count: int, *, is_shuffled: bool) -> Sample:
    """All leased to four consumers, then acknowledged by all of them at once."""
    with (
        scratch() as directory,
        AckTally.make(directory / "tally", CONSUMERS),
        runnel_queue.serve(stored="disk") as served,
    ):
        broker = psutil.Process(served.pid)
        path = str(directory / "tally")
        with Team() as team:
            plan = WorkPlan(served.url, path, 0, count, is_shuffled=is_shuffled)
            filler = team.add(runnel_queue.produce, plan)
            team.wait_ready()
            filler.go()
            filler.report()
        before_bytes = broker.memory_info().rss
        with Team() as team:
            each = msgspec.structs.replace(plan, count=count // CONSUMERS)
            holders = [
                team.add(runnel_queue.hold, msgspec.structs.replace(each, place=place))
                for place in range(CONSUMERS)
            ]
            team.wait_ready()  # each has its share
            held_bytes = broker.memory_info().rss - before_bytes
            for holder in holders:
                holder.go()
            taken = [holder.report() for holder in holders]
            audited = _audited(team, runnel_queue, plan)
        begin_ns = min(report.begin_ns for report in taken)
        seconds = (max(report.end_ns for report in taken) - begin_ns) / 1e9
        return Sample((count / seconds, held_bytes / count), _trouble(taken, audited, count))


def _rules_acknowledge(count: int, *, is_shuffled: bool) -> Sample:
    """The rules alone, without broker and client: each message acknowledged as a part of its own."""
    key, each = (TOPIC, 0), count // CONSUMERS
    group = Group(SubscriptionOptions(), is_keyed=False)
    group.add_partition(key, AckSet(1), now_ns=0)
    for consumer in range(CONSUMERS):
        group.join(consumer, window_messages=each, window_bytes=each * PAYLOAD_BYTES)
    group.extend(key, 1 + count)
    parts: dict[int, list[DeliveryPart]] = {consumer: [] for consumer in range(CONSUMERS)}
    for base in range(1, 1 + count, _PARTS_AT_ONCE):
        messages = min(_PARTS_AT_ONCE, 1 + count - base)
        for delivery in group.offer(key, base, messages, messages * PAYLOAD_BYTES, 0):
            offsets = range(delivery.base, delivery.base + delivery.mask.bit_length())
            parts[delivery.consumer] += [DeliveryPart(delivery.id, at, at + 1) for at in offsets]
    leased = group.in_flight
    if is_shuffled:
        for of_one in parts.values():
            random.Random(_SEED).shuffle(of_one)
    begin_ns = time.perf_counter_ns()
    for consumer, of_one in parts.items():
        for begin in range(0, len(of_one), _PARTS_AT_ONCE):
            group.ack(consumer, (), of_one[begin : begin + _PARTS_AT_ONCE], 0)
    took_ns = time.perf_counter_ns() - begin_ns
    left = group.in_flight
    trouble = f"{leased:,} of {count:,} leased, {left:,} left" if leased != count or left else ""
    return Sample((count / took_ns * 1e9,), trouble)


# --- Subscriptions without consumers ---


def bench_idle_subscriptions(*, quick: bool) -> list[Result]:
    count = _sized(1_000_000, quick=quick)
    with ExitStack() as stack:
        contenders = []
        for subscriptions in (0, SUBSCRIPTIONS):
            served = stack.enter_context(runnel_queue.serve(stored="disk"))
            if subscriptions:
                with Team() as team:
                    plan = WorkPlan(served.url, subscriptions=subscriptions)
                    maker = team.add(runnel_queue.subscribe_idly, plan)
                    team.wait_ready()
                    maker.report()
            among = f"{subscriptions:,} subscriptions" if subscriptions else "none"
            contenders.append(_publishing(among, served, count))
        none, many = contest(contenders, _rounds(quick=quick)).values()
    return [
        compared(
            f"publishing to a topic, {many.name} without consumers",
            "messages/s",
            many,
            none,
            target=0.5,
        )
    ]


def _publishing(name: str, served: RunningServer, count: int) -> Contender:
    def measure() -> Sample:
        with Team() as team:
            producer = team.add(runnel_queue.produce, WorkPlan(served.url, count=count))
            team.wait_ready()
            producer.go()
            sent = producer.report()
        return Sample((sent.messages / (sent.end_ns - sent.begin_ns) * 1e9,))

    return Contender(name, measure)


PARTS = (
    ("work", bench_work),
    ("keys", bench_keys),
    ("in flight", bench_in_flight),
    ("idle subscriptions", bench_idle_subscriptions),
)
