"""`runnel top`: shows a live view of a broker from the metrics that it publishes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from runnel.cli.commands.cursors import cursor_document
from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.render.node_reports import ReportsByNode
from runnel.cli.render.tables import json_text
from runnel.cli.render.top_view import (
    TOPICS,
    BrokerReports,
    head_lines,
    kind_of,
    summary_line,
    tables,
)
from runnel.errors import TimeoutExpiredError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from runnel.client import Bus

_ONCE_TIMEOUT_S: Final = 30.0
_ONCE_ROWS_MAX: Final = 20
_TABLE_LINES: Final = 4  # the head of a table and the empty lines around it

app = typer.Typer(add_completion=False)


@app.command()
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one report and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one report as JSON and exit.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two updates."),
    ] = 1.0,
    url: Url = DEFAULT_URL,
) -> None:
    """Watch a broker: rates in and out, topics, backlogs, subscribers, lag, journals and their sync times.

    Ctrl-C ends it. If standard output is not a terminal, it prints one line at each interval. Where several processes
    serve the topics, it adds up what they report; of durations it shows those of the slowest.

    The broker publishes these numbers on !system/metrics/… every second. `runnel sub '!system/metrics/*' --format
    json` prints all of them.
    """
    if as_json:
        typer.echo(run_connected(url, _json))
    elif once:
        run_connected(url, _once)
    elif sys.stdout is not None and sys.stdout.isatty():
        run_connected(url, lambda bus: _live(bus, interval))
    else:
        run_connected(url, lambda bus: _watch(bus, interval, _print_line))


async def _once(bus: Bus) -> None:
    reports = ReportsByNode()
    await _one_report(bus, reports)
    latest = reports.added_up(_names(bus))
    latest.cursors = await bus.cursors()
    for line in head_lines(latest):
        typer.echo(line)
    for table in tables(latest, _ONCE_ROWS_MAX):
        typer.echo()
        table.show()


async def _json(bus: Bus) -> str:
    """The latest report of each kind, complete, and the cursors. With several nodes: by node."""
    documents = await _one_report(bus, ReportsByNode())
    document: dict[str, Any] = {"nodes": documents}
    if len(documents) == 1:
        (document,) = documents.values()
    document["cursors"] = [cursor_document(cursor) for cursor in await bus.cursors()]
    return json_text(document)


def _names(bus: Bus) -> set[str]:
    """The living nodes; none if the broker is alone."""
    return {node.name for node in bus.nodes}


async def _one_report(bus: Bus, latest: ReportsByNode) -> dict[str, dict[str, Any]]:
    """Wait until a report of each kind has come of every node; return them by node and kind."""
    reports: dict[str, dict[str, Any]] = {}
    try:
        async with asyncio.timeout(_ONCE_TIMEOUT_S), bus.subscribe(TOPICS, start="last") as found:
            async for message in found:
                node = latest.take(message.topic, message.payload)
                found_here = reports.setdefault(node, {})
                found_here[kind_of(message.topic)] = msgspec.Raw(message.payload)
                if latest.is_complete(_names(bus)):
                    break
    except TimeoutError:
        raise TimeoutExpiredError(
            f"the broker has published no metrics for {_ONCE_TIMEOUT_S:g} s"
        ) from None
    return reports


async def _live(bus: Bus, interval_s: float) -> None:
    # Rarely needed, and slow to import.
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
        live.update(_drawn(BrokerReports(), console.height), refresh=True)
        await _watch(
            bus,
            interval_s,
            lambda latest: live.update(_drawn(latest, console.height), refresh=True),
        )


async def _watch(bus: Bus, interval_s: float, show: Callable[[BrokerReports], None]) -> None:
    """Show the latest reports at each interval, until cancelled."""
    reports_of = ReportsByNode()
    heard = asyncio.Event()

    async def listen() -> None:
        async with bus.subscribe(TOPICS, start="last") as reports:
            async for message in reports:
                reports_of.take(message.topic, message.payload)
                if reports_of.is_complete(_names(bus)):
                    heard.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listen())
        while True:
            await heard.wait()  # a broker that published nothing has nothing new to show
            heard.clear()
            latest = reports_of.added_up(_names(bus))
            latest.cursors = await bus.cursors()
            show(latest)
            await asyncio.sleep(interval_s)


def _print_line(latest: BrokerReports) -> None:
    typer.echo(summary_line(latest))
    sys.stdout.flush()


def _drawn(latest: BrokerReports, height: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    head = head_lines(latest)
    made = tables(latest, height)
    # The tables share the lines that the head leaves.
    room = height - len(head) - _TABLE_LINES * len(made)
    made = tables(latest, max(room // max(len(made), 1), 1))
    return Group(Text("\n".join(head)), *(table.renderable() for table in made))
