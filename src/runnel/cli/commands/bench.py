"""`runnel bench`: many clients publish and read at once; measures the speed and checks that every message arrives."""

from __future__ import annotations

import asyncio
import enum
import secrets
import signal
import sys
from collections.abc import Coroutine
from contextlib import nullcontext
from typing import Annotated, Any, Final

import msgspec
import typer

from runnel.cli.bench.payload import SIZE_MIN
from runnel.cli.bench.plan import Load
from runnel.cli.bench.processes import own_broker, run_load
from runnel.cli.bench.report import BenchReport, lines, put_together
from runnel.cli.connection import DEFAULT_URL, Url, run_connected, run_loop
from runnel.cli.options import level_option
from runnel.cli.render.tables import counted, json_text
from runnel.config import Keep
from runnel.config.settings import BATCH_BYTES_CEILING
from runnel.errors import ClientFault
from runnel.log.log import Level
from runnel.topics.names import check_topic
from runnel.topics.patterns import Pattern

app = typer.Typer(add_completion=False)

# Larger values are typing mistakes: no machine keeps up with them.
_CLIENTS_MAX: Final = 10_000
_PROCESSES_MAX: Final = 256
_BATCH_MAX: Final = 1_000_000
_SECONDS_MAX: Final = 7 * 86_400


class ReportFormat(enum.StrEnum):
    """The formats of the report."""

    TEXT = "text"
    JSON = "json"


@app.command()
def bench(
    *,
    clients: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=_CLIENTS_MAX,
            help="Number of clients, each with its own connection.",
        ),
    ] = 30,
    interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=_SECONDS_MAX,
            help="Time between two batches of a client. 0: send without a pause.",
        ),
    ] = 0.01,
    subscribe: Annotated[
        str,
        typer.Option(
            metavar="PATTERNS",
            help="Patterns, separated by commas, that every client reads. '': read nothing.",
        ),
    ] = "a",
    size: Annotated[
        int,
        typer.Option(
            metavar="BYTES",
            min=SIZE_MIN,
            max=BATCH_BYTES_CEILING,
            help="Payload size of a message.",
        ),
    ] = 100,
    batch: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=_BATCH_MAX, help="Messages that a client sends at a time."
        ),
    ] = 1,
    level: Annotated[
        Level | None,
        level_option("What to wait for. Default: stored on disk topics, received on others."),
    ] = None,
    duration: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.01, max=_SECONDS_MAX, help="How long the clients publish."
        ),
    ] = 10.0,
    topics: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Topics, separated by commas. Each client publishes to them in turn.",
        ),
    ] = "a,b,c,d,e,f,g",
    processes: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=_PROCESSES_MAX, help="Number of processes that run the clients."
        ),
    ] = 1,
    start_broker: Annotated[
        bool, typer.Option("--start-broker", help="Start a broker for this run only.")
    ] = False,
    keep: Annotated[
        Keep | None,
        typer.Option(help="How the broker of --start-broker keeps the topics. Default: disk."),
    ] = None,
    form: Annotated[
        ReportFormat, typer.Option("--format", help="Print lines for people, or JSON for programs.")
    ] = ReportFormat.TEXT,
    url: Url = DEFAULT_URL,
) -> None:
    """Load a broker and measure it.

    At each interval, every client publishes a batch to the next topic. Every client also reads the topics that
    match --subscribe. Each message has a number, so that bench finds lost and disordered messages; the exit code is
    then 1. Topics that are not kept may lose messages by design when readers are too slow.

    A command is one message in or one message out. Latency is the time from the event time of a message to its
    arrival. On several machines it is only as exact as their clocks.
    """
    names = _names("--topics", topics)
    if not names:
        raise ClientFault("--topics: at least one topic is needed, such as a,b,c")
    for name in names:
        check_topic(name)
    if keep is not None and not start_broker:
        raise ClientFault("--keep is for the broker of --start-broker; others have their own rules")
    patterns = [Pattern(text) for text in _names("--subscribe", subscribe)]
    plan = Load(
        url=url,
        run=secrets.randbits(64),
        clients=tuple(range(clients)),
        topics=names,
        subscribe=tuple(pattern.text for pattern in patterns),
        interval_s=interval,
        batch=batch,
        size=size,
        level=level,
        duration_s=duration,
    )
    subscribed = frozenset(
        name for name in names if any(pattern.matches(name) for pattern in patterns)
    )
    if not start_broker:
        run_connected(url, _is_there)
    if sys.stderr is not None and sys.stderr.isatty():
        typer.echo(f"{counted(clients, 'client')} for {duration:g} s …", err=True)
    own = (keep or Keep.DISK) if start_broker else None
    report = run_loop(_until_ended(_run(plan, min(processes, clients), subscribed, own)))
    if form is ReportFormat.JSON:
        typer.echo(json_text(report))
    else:
        for line in lines(report):
            typer.echo(line)
    if not report.is_sound:
        raise typer.Exit(1)


async def _until_ended(main: Coroutine[Any, Any, BenchReport]) -> BenchReport:
    """Turn SIGTERM and SIGHUP into cancellation, so that the processes of the bench end too.

    They have sessions of their own, so no signal of the terminal reaches them.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    ended_by: list[int] = []

    def end(number: int) -> None:
        if not ended_by:  # only once: ending the processes must not be interrupted
            ended_by.append(number)
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        return await main
    except asyncio.CancelledError:
        if not ended_by:
            raise
        raise typer.Exit(128 + ended_by[0]) from None


async def _run(
    plan: Load, processes: int, subscribed: frozenset[str], keep: Keep | None
) -> BenchReport:
    async with nullcontext(plan.url) if keep is None else own_broker(keep) as url:
        loads = [
            msgspec.structs.replace(plan, url=url, clients=plan.clients[part::processes])
            for part in range(processes)
        ]
        sent, received, expected = await run_load(loads, subscribed)
    return put_together(
        sent, received, clients=len(plan.clients), size=plan.size, expected=expected
    )


async def _is_there(_bus: object) -> None:
    """Connect and do nothing: one error here instead of one from every process."""


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if len(set(names)) < len(names):
        raise ClientFault(f"{option} {text!r}: a name is given twice")
    return names
