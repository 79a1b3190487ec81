"""Every speed that was asked for, and whether the results reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from bench.report import Result, is_met, number


class SpeedTarget(msgspec.Struct, frozen=True):
    """A bound for the results of one benchmark whose names match. Several results: each has to hold it.

    Without a bound of its own it is the one that the result carries, which depends on the run.
    """

    area: str
    what: str
    name: str  # of the benchmark
    pattern: str  # of the results' names, as fnmatch has it
    bound: float | None = None
    is_aim: bool = False  # named later, beyond what was asked for first


class Verdict(msgspec.Struct, frozen=True):
    wanted: SpeedTarget
    target: str
    measured: str
    is_met: bool | None  # None: not measured


_LIVE, _STORED, _LATENCY = "live", "stored", "latency"
_WORK, _GROWTH, _LISTENERS, _LOG, _CORES, _SPARK = (
    "acknowledged work",
    "growth",
    "listeners",
    "log",
    "several processes",
    "Spark",
)
_TO_ONE = "1 to 1, ephemeral, 100 bytes, against"
_TO_DISK = "publishing to disk, acknowledged as stored, against"
_AT_5000 = "latency at 5,000 messages/s, one by one,"
_DONE = "publish, deliver, acknowledge, 1 to 4,"

_NATS = "NATS with nats-py"
_PEERS = "JetStream, Redis Streams, RabbitMQ"
_ROUTE, _STREAM = "an empty Litestar route", "an empty stream of grpcio"
# Of the peers that acknowledge message by message: JetStream, Redis Streams, RabbitMQ.
_BEST = "[JR]*"

WANTED = (
    SpeedTarget(_LIVE, f"1 to 1, against {_NATS}", "live", f"{_TO_ONE} NATS", 8),
    SpeedTarget(_LIVE, f"1 to 1, against {_NATS}", "live", f"{_TO_ONE} NATS", 10, is_aim=True),
    SpeedTarget(_LIVE, "1 to 1, against Redis pub/sub", "live", f"{_TO_ONE} Redis", 10),
    SpeedTarget(
        _LIVE,
        "1 to 1, against Kafka with confluent-kafka",
        "live",
        f"{_TO_ONE} Kafka",
        3,
        is_aim=True,
    ),
    SpeedTarget(_LIVE, f"1 to 30, against {_NATS}", "live", "1 to 30, delivered, against NATS", 5),
    SpeedTarget(
        _LIVE,
        f"single messages over 1,000 topics, against {_NATS}",
        "live",
        "single messages over 1,000 topics, *, against NATS",
        4,
    ),
    SpeedTarget(_LIVE, "memory of a connection, KiB", "live", "memory of a connection *", 60),
    SpeedTarget(
        _STORED, "acknowledged publishing, against JetStream", "live", f"{_TO_DISK} JetStream", 10
    ),
    SpeedTarget(
        _STORED,
        "acknowledged publishing, against Redis Streams with appendfsync always",
        "live",
        f"{_TO_DISK} Redis Streams *",
        5,
    ),
    SpeedTarget(
        _STORED,
        "catching up to objects: 1 M/s, or 10 times JetStream",
        "reading",
        "catching up on *, to Python objects, against JetStream",
    ),
    SpeedTarget(
        _STORED,
        "`async for`, above decoding, ns a message",
        "reading",
        "iterating, above decoding*",
        150,
    ),
    SpeedTarget(
        _LATENCY, "p50 at 5,000/s, against the best peer", "latency", f"{_AT_5000} p50, *", 1
    ),
    SpeedTarget(
        _LATENCY, "p99 at 5,000/s, against the best peer", "latency", f"{_AT_5000} p99, *", 1.5
    ),
    SpeedTarget(
        _WORK,
        f"shared, against the best of {_PEERS}",
        "queue",
        f"{_DONE} shared, against {_BEST}",
        5,
    ),
    SpeedTarget(
        _WORK, "shared, against Kafka", "queue", f"{_DONE} shared, against Kafka*", 5, is_aim=True
    ),
    SpeedTarget(
        _WORK,
        f"key_shared, against the best of {_PEERS}",
        "queue",
        f"{_DONE} key_shared, against {_BEST}",
        2,
    ),
    SpeedTarget(
        _WORK, "key_shared, against shared", "queue", f"{_DONE} key_shared, against shared", 1 / 3
    ),
    SpeedTarget(_WORK, "a million in flight, bytes each", "queue", "* in flight, memory *", 150),
    SpeedTarget(
        _WORK,
        "a million in flight, acknowledged in random order, against in order",
        "queue",
        "* in flight, acknowledged one by one in random order, *",
        0.5,
    ),
    SpeedTarget(
        _WORK,
        "publishing beside 1,000 subscriptions without consumers, against none",
        "queue",
        "publishing to a topic, 1,000 subscriptions *",
        0.5,
    ),
    SpeedTarget(
        _GROWTH,
        "a busy topic beside 1,000 and 100,000 topics, against alone",
        "growth",
        "a busy topic on disk, * topics, *",
        0.7,
    ),
    SpeedTarget(
        _GROWTH,
        "a busy topic beside 1,000 and 10,000 pattern subscriptions, against alone",
        "growth",
        "a busy ephemeral topic, * pattern subscriptions, *",
        0.7,
    ),
    SpeedTarget(
        _LISTENERS,
        f"REST, publish JSON, against {_ROUTE}",
        "listeners",
        "REST, publish, JSON, against an empty *",
        0.5,
    ),
    SpeedTarget(
        _LISTENERS,
        f"REST, publish raw bytes, against {_ROUTE}",
        "listeners",
        "REST, publish, raw bytes, against an empty *",
        0.5,
    ),
    SpeedTarget(
        _LISTENERS,
        f"REST, consume, against {_ROUTE}",
        "listeners",
        "REST, consume one message, against an empty *",
        0.5,
    ),
    SpeedTarget(
        _LISTENERS,
        f"REST, acknowledge, against {_ROUTE}",
        "listeners",
        "REST, acknowledge one message, against an empty *",
        0.5,
    ),
    SpeedTarget(
        _LISTENERS,
        f"REST, publish, consume and acknowledge, against {_ROUTE}",
        "listeners",
        "REST, publish, consume, acknowledge, against an empty *",
        0.5,
    ),
    SpeedTarget(_LISTENERS, "REST, NDJSON, against single posts", "listeners", "REST, bulk, *", 20),
    SpeedTarget(
        _LISTENERS,
        f"gRPC, a stream of single messages, against {_STREAM}",
        "listeners",
        "gRPC, publish, 1 stream, a message a request, against *",
        0.6,
    ),
    SpeedTarget(
        _LISTENERS,
        f"gRPC, 8 streams of single messages, against {_STREAM}",
        "listeners",
        "gRPC, publish, 8 streams, a message a request, against *",
        0.6,
    ),
    SpeedTarget(
        _LISTENERS,
        f"gRPC, a stream of 100 messages a request, against {_STREAM}",
        "listeners",
        "gRPC, publish, 1 stream, 100 messages a request, against *",
        0.6,
    ),
    SpeedTarget(
        _LISTENERS,
        "native with a token, single messages, against without",
        "listeners",
        "native listener with a token, single messages, *",
        0.95,
    ),
    SpeedTarget(
        _LISTENERS,
        "native with a token, batches of 100, against without",
        "listeners",
        "native listener with a token, batches of 100, *",
        0.95,
    ),
    SpeedTarget(_LOG, "append, against a bare loop", "log", "append, stored", 0.7),
    SpeedTarget(
        _LOG, "read as bytes (4 and 1 MiB), against a bare read", "log", "read, bytes, *", 0.5
    ),
    SpeedTarget(
        _LOG, "read to Arrow (4 MiB), against a bare read", "log", "read, to Arrow, 4 MiB *", 0.4
    ),
    SpeedTarget(_LOG, "encode a message, ns", "log", "encode a message object", 250),
    SpeedTarget(_LOG, "decode a message, ns", "log", "decode to a message object", 300),
    SpeedTarget(_LOG, "a run, above the single-run case, µs", "log", "a run, above *", 3),
    SpeedTarget(
        _LOG, "open a clean journal, against reading it", "log", "open a clean journal of *", 0.1
    ),
    SpeedTarget(
        _LOG, "recovery reads the last segment alone", "log", "bytes read by recovery, against *", 2
    ),
    SpeedTarget(_LOG, "memory of an idle topic, bytes", "log", "memory of an idle topic, *", 2048),
    SpeedTarget(
        _SPARK,
        "batch read, against the same batches from memory",
        "spark",
        "batch read of *, through the broker, against memory",
        0.8,
    ),
    SpeedTarget(
        _SPARK,
        "batch read from files, against through the broker",
        "spark",
        "batch read of *, from files, against broker",
        1,
    ),
    SpeedTarget(_SPARK, "archive, against Spark's own Parquet writer", "spark", "archive of *", 5),
    SpeedTarget(
        _SPARK,
        "micro-batch at 10,000 rows/s, against a constant source",
        "spark",
        "micro-batch of a stream *",
        1.3,
    ),
    SpeedTarget(
        _SPARK, "stream into a topic, against a no-op sink", "spark", "stream into a topic, *", 0.7
    ),
    SpeedTarget(
        _CORES,
        "processor time of the brokers a message, 2 and 4 processes against 1",
        "cores",
        "*: processor time of the brokers, against 1 process*",
        1.15,
    ),
    SpeedTarget(
        _CORES,
        "a pattern over 2 and 4 owners, delivered, against 1",
        "cores",
        "*: delivered, against 1 process*",
        0.9,
    ),
    SpeedTarget(
        _CORES,
        "pause of a planned move, worst, ms",
        "cores",
        "pause around a planned move, worst",
        500,
    ),
    SpeedTarget(
        _CORES,
        "time to serve after SIGKILL, worst, ms",
        "cores",
        "pause around a SIGKILL*worst",
        1000,
    ),
)


def verdicts(results: Mapping[str, Sequence[Result]]) -> list[Verdict]:
    """By benchmark. A target whose result is not there says so: a renamed result hides nothing."""
    return [_verdict(wanted, results.get(wanted.name, ())) for wanted in WANTED]


def factors(results: Mapping[str, Sequence[Result]]) -> list[tuple[str, float]]:
    """What was wanted, and how many times that was reached: of several results the worst."""
    found = []
    for wanted in WANTED:
        reached = [
            bound / result.judged if result.is_at_most else result.judged / bound
            for result in results.get(wanted.name, ())
            if fnmatchcase(result.name, wanted.pattern)
            and (bound := wanted.bound or result.target)
            and result.judged > 0
        ]
        if reached:
            bound_told = f" ({number(wanted.bound)})" if wanted.bound is not None else ""
            found.append((f"{wanted.area}: {wanted.what}{bound_told}", min(reached)))
    return found


def _verdict(wanted: SpeedTarget, results: Sequence[Result]) -> Verdict:
    found = [result for result in results if fnmatchcase(result.name, wanted.pattern)]
    if not found:
        bound = "" if wanted.bound is None else number(wanted.bound)
        return Verdict(wanted, bound, "not measured", None)
    bounds = [wanted.bound if wanted.bound is not None else result.target for result in found]
    sign = "≤" if found[0].is_at_most else "≥"
    judged = [
        is_met(result, bound)
        for result, bound in zip(found, bounds, strict=True)
        if bound is not None
    ]
    return Verdict(
        wanted,
        f"{sign} {number(bounds[0])}" if bounds[0] is not None else "",
        ", ".join(number(result.judged) for result in found),
        all(judged) if judged else None,
    )
