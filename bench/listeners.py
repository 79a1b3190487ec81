"""The listeners: how near REST and gRPC come to an empty service in the same framework, and what tokens cost.

rest     publish, consume and acknowledge single messages, 32 clients | the same requests to an empty Litestar route
         publishing, and all three for each message                   | the native listener with Runnel's client
bulk     publishing many messages in a request, as NDJSON             | one in each request
grpc     publishing through a stream, by one and by several           | an empty bidirectional stream of grpcio
tokens   the native listener with authentication                      | without

The server is one process and its load another, which sends ready-made requests and reads of the answers only what it
needs, so that the server is what limits. Both sides of a comparison have the same load, payloads of 100 bytes and
number of connections, and take turns; medians count. Servers stand for the whole part, in fresh directories; topics
and subscriptions are new in each run. Messages are stored before they are acknowledged, and acknowledgements of work
too; what the same costs without a disk is told beside it. Every run checks all its answers, and where there is
work the broker is asked whether it agrees; a run that lacks or repeats a message is told and not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from importlib.metadata import version

import msgspec

from bench.contest import Contender, Sample, Standing, compared, contest
from bench.processes import Role, Team
from bench.report import Result
from bench.systems import (
    empty_grpc,
    empty_litestar,
    grpc_load,
    http_load,
    native_load,
    runnel_listeners,
)
from bench.systems.http_load import BULK, PUBLISH_LIVE, PUBLISH_RAW
from bench.systems.phases import ACK, CONSUME, PUBLISH, TOGETHER, LoadPlan, LoadReport
from bench.systems.runnel_listeners import ServedListeners
from bench.systems.system import RunningServer

CLIENTS = 32
BULK_CLIENTS, BULK_MESSAGES = 4, 5000
TOKEN_CONNECTIONS, TOKEN_WINDOW = 2, 128

# Run by run another name, of the same length: what it names is new, and requests are as long as before.
_names = (f"{number:04}" for number in itertools.count())


def _rounds(*, quick: bool) -> int:
    return 1 if quick else 5


def _sized(full: int, *, quick: bool) -> int:
    return full // 5 if quick else full


def more_facts() -> dict[str, str]:
    listeners = ("litestar", "uvicorn", "httptools", "grpcio")
    return {"listeners": ", ".join(f"{name} {version(name)}" for name in listeners)}


# --- Loads and what came of them ---


def _loaded(role: Role, plan: LoadPlan) -> LoadReport:
    with Team() as team:
        load = team.add(role, plan)
        team.wait_ready()
        load.go()
        report = load.report()
    assert isinstance(report, LoadReport)
    return report


def _sample(report: LoadReport, phases: Sequence[str], trouble: str = "") -> Sample:
    """By phase a rate and then, in the same order, what one call cost the server."""
    taken = [report.phases[phase] for phase in phases]
    rates, costs_us = [phase.rate for phase in taken], [phase.cpu_us for phase in taken]
    return Sample((*rates, *costs_us), trouble)


def _costs(what: str, phases: Sequence[str], phase: str, *standings: Standing) -> str:
    """Processor time, in the words of a note: the median of each."""
    place = len(phases) + phases.index(phase)
    told = [
        f"{standing.name} {cost_us:.3g} µs"
        for standing in standings
        if (cost_us := standing.median(place)) is not None
    ]
    return f"processor time of the server a {what}: {', '.join(told)}" if told else ""


def _contender(
    name: str, role: Role, plan: Callable[[], LoadPlan], phases: Sequence[str] = (PUBLISH,)
) -> Contender:
    return Contender(name, lambda: _sample(_loaded(role, plan()), phases))


# --- REST ---

_REST_PHASES = (PUBLISH, CONSUME, ACK, TOGETHER, PUBLISH_RAW, PUBLISH_LIVE)
_NATIVE_PHASES = (PUBLISH, TOGETHER)


def bench_rest(*, quick: bool) -> list[Result]:
    calls = _sized(200, quick=quick)
    with runnel_listeners.serve(http=True) as listeners, empty_litestar.serve() as empty:

        def to_empty() -> LoadPlan:
            address = empty.url.removeprefix("http://")
            return LoadPlan(address, empty.pid, next(_names), CLIENTS, calls)

        contenders = [
            _at_work("REST", listeners, listeners.http, http_load.work, _REST_PHASES, calls),
            _contender("an empty Litestar route", http_load.work, to_empty, _REST_PHASES),
            _at_work(
                "native", listeners, listeners.native, native_load.work, _NATIVE_PHASES, calls
            ),
        ]
        rest, route, native = contest(contenders, _rounds(quick=quick)).values()

    def against_route(
        name: str, phase: str, *, target: float | None = 0.5, note: str = ""
    ) -> Result:
        unit, what = ("messages/s", "message") if phase == TOGETHER else ("requests/s", "request")
        cost = _costs(what, _REST_PHASES, phase, rest, route)
        told = "; ".join(filter(None, (note, cost)))
        place = _REST_PHASES.index(phase)
        return compared(f"REST, {name}", unit, rest, route, place=place, target=target, note=told)

    def against_native(name: str, phase: str) -> Result:
        ours = _placed(rest, _REST_PHASES, phase)
        theirs = _placed(native, _NATIVE_PHASES, phase)
        return compared(f"REST, {name}", "messages/s", ours, theirs)

    together = "publish, consume, acknowledge"
    return [
        against_route("publish, JSON", PUBLISH),
        against_route("publish, raw bytes", PUBLISH_RAW),
        against_route("publish, JSON, to a topic kept nowhere", PUBLISH_LIVE, target=None),
        against_route("consume one message", CONSUME),
        against_route("acknowledge one message", ACK),
        against_route(together, TOGETHER, note="three requests for each message"),
        against_native("publish, JSON", PUBLISH),
        against_native(together, TOGETHER),
    ]


def _at_work(
    name: str,
    listeners: ServedListeners,
    address: str,
    role: Role,
    phases: Sequence[str],
    calls: int,
) -> Contender:
    """A load that also consumes and acknowledges what it publishes, and leaves nothing behind."""

    def measure() -> Sample:
        run = next(_names)
        runnel_listeners.subscribe(listeners, run)
        report = _loaded(role, LoadPlan(address, listeners.pid, run, CLIENTS, calls))
        return _sample(report, phases, runnel_listeners.audit(listeners, run, report.messages))

    return Contender(name, measure)


def _placed(standing: Standing, phases: Sequence[str], phase: str) -> Standing:
    """The same with the rate of one phase alone, to be compared with somebody who has other phases."""
    place = phases.index(phase)
    samples = [
        Sample(sample.values[place : place + 1], sample.trouble) for sample in standing.samples
    ]
    return msgspec.structs.replace(standing, samples=samples)


# --- Bulk ---


def bench_bulk(*, quick: bool) -> list[Result]:
    calls, bulk_calls = _sized(300, quick=quick), _sized(40, quick=quick)
    with runnel_listeners.serve(http=True) as listeners:

        def one_by_one() -> LoadPlan:
            return LoadPlan(listeners.http, listeners.pid, next(_names), CLIENTS, calls)

        def many() -> LoadPlan:
            run = next(_names)
            return LoadPlan(
                listeners.http, listeners.pid, run, BULK_CLIENTS, bulk_calls, messages=BULK_MESSAGES
            )

        contenders = [
            _contender("NDJSON", http_load.bulk, many, (BULK,)),
            _contender("single posts", http_load.singles, one_by_one),
        ]
        bulk, singles = contest(contenders, _rounds(quick=quick)).values()
    told = f"{BULK_CLIENTS} clients, {BULK_MESSAGES:,} lines a request; "
    told += _costs("message", (PUBLISH,), PUBLISH, bulk, singles)
    return [compared("REST, bulk", "messages/s", bulk, singles, target=20, note=told)]


# --- gRPC ---


class Shape(msgspec.Struct, frozen=True):
    """How messages go through streams."""

    name: str
    streams: int
    window: int
    messages: int
    calls: int
    is_block: bool = False
    target: float | None = 0.6


SHAPES = (
    Shape("1 stream, a message a request", 1, 64, 1, 12_000),
    Shape("8 streams, a message a request", 8, 16, 1, 2000),
    Shape("1 stream, 100 messages a request", 1, 16, 100, 5000),
    Shape("1 stream, a block of 1,000 a request", 1, 16, 1000, 2500, is_block=True, target=None),
)


def bench_grpc(*, quick: bool) -> list[Result]:
    results = []
    with runnel_listeners.serve(grpc=True) as listeners, empty_grpc.serve() as empty:
        for shape in SHAPES:
            results += _streamed(shape, listeners, empty, quick=quick)
    return results


def _streamed(
    shape: Shape, listeners: ServedListeners, empty: RunningServer, *, quick: bool
) -> list[Result]:
    def plan(address: str, pid: int, topic: str) -> LoadPlan:
        return LoadPlan(
            address,
            pid,
            f"{topic}-{next(_names)}",
            shape.streams,
            _sized(shape.calls, quick=quick),
            shape.messages,
            shape.window,
            shape.is_block,
        )

    nowhere = empty.url.removeprefix("grpc://")
    contenders = [
        _contender("gRPC", grpc_load.publish, lambda: plan(listeners.grpc, listeners.pid, "work")),
        _contender("an empty stream", grpc_load.publish, lambda: plan(nowhere, empty.pid, "work")),
        _contender(
            "kept nowhere", grpc_load.publish, lambda: plan(listeners.grpc, listeners.pid, "live")
        ),
    ]
    stored, stream, live = contest(contenders, _rounds(quick=quick)).values()
    name, unit = f"gRPC, publish, {shape.name}", "messages/s"
    cost = _costs("message", (PUBLISH,), PUBLISH, stored, stream, live)
    return [
        compared(name, unit, stored, stream, target=shape.target, note=cost),
        compared(f"{name}, to a topic kept nowhere", unit, live, stream),
    ]


# --- Tokens ---


class TokenLoad(msgspec.Struct, frozen=True):
    """What connections send, each `calls` times."""

    name: str
    role: Role
    messages: int
    calls: int
    target: float | None = None


SENDINGS = (
    TokenLoad("single messages", native_load.singles, 1, 40_000, target=0.95),
    TokenLoad("batches of 100", native_load.batches, 100, 12_000, target=0.95),
    TokenLoad("batches of 1,000 topics", native_load.wide, 1000, 1600),
)


def bench_tokens(*, quick: bool) -> list[Result]:
    with runnel_listeners.serve(has_tokens=True) as known, runnel_listeners.serve() as anybody:
        return [_with_token(sending, known, anybody, quick=quick) for sending in SENDINGS]


def _with_token(
    sending: TokenLoad, known: ServedListeners, anybody: ServedListeners, *, quick: bool
) -> Result:
    def plan(listeners: ServedListeners) -> LoadPlan:
        return LoadPlan(
            listeners.native,
            listeners.pid,
            sending.name.replace(" ", "-"),
            TOKEN_CONNECTIONS,
            _sized(sending.calls, quick=quick),
            sending.messages,
            TOKEN_WINDOW,
            token=listeners.token,
        )

    contenders = [
        _contender("with a token", sending.role, lambda: plan(known)),
        _contender("without", sending.role, lambda: plan(anybody)),
    ]
    # More often than the rest: what it is about is as small as the noise.
    shown, unasked = contest(contenders, 2 * _rounds(quick=quick) - 1).values()
    name = f"native listener with a token, {sending.name}"
    cost = _costs("message", (PUBLISH,), PUBLISH, shown, unasked)
    return compared(name, "messages/s", shown, unasked, target=sending.target, note=cost)


PARTS = (
    ("rest", bench_rest),
    ("bulk", bench_bulk),
    ("grpc", bench_grpc),
    ("tokens", bench_tokens),
)
