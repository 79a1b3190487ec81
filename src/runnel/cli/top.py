"""`runnel top`: a live view of a broker, drawn from what it publishes about itself."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from runnel.cli.connecting import DEFAULT_URL, Url, run_connected
from runnel.cli.cursors import cursor_document
from runnel.cli.watching import TOPICS, Watched, head_lines, kind_of, summary_line, tables
from runnel.errors import TimeoutExpiredError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from runnel.client import Bus

_ONCE_TIMEOUT_S: Final = 30.0
_ONCE_ROWS_MAX: Final = 20
_TABLE_LINES: Final = 4  # of a table's head and the empty lines around it

app = typer.Typer(add_completion=False)


@app.command()
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one report and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one report as JSON, and end.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two views."),
    ] = 1.0,
    url: Url = DEFAULT_URL,
) -> None:
    """Watch a broker: rates in and out, topics, backlogs, subscribers, lag, journals and their sync times.

    Ctrl-C ends it. Where standard output is no terminal, a line is printed at each interval.

    The broker publishes these numbers on !system/metrics/… every second; `runnel sub '!system/metrics/*'
    --format json` has all of them.
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
    watched = Watched()
    await _one_report(bus, watched)
    watched.cursors = await bus.cursors()
    for line in head_lines(watched):
        typer.echo(line)
    for table in tables(watched, _ONCE_ROWS_MAX):
        typer.echo()
        table.show()


async def _json(bus: Bus) -> str:
    """What the broker published last of each kind, whole, and its cursors."""
    document: dict[str, Any] = await _one_report(bus, Watched())
    document["cursors"] = [cursor_document(cursor) for cursor in await bus.cursors()]
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


async def _one_report(bus: Bus, watched: Watched) -> dict[str, Any]:
    """Waits until there is one of each kind; the reports by kind."""
    reports: dict[str, Any] = {}
    try:
        async with asyncio.timeout(_ONCE_TIMEOUT_S), bus.subscribe(TOPICS, start="last") as found:
            async for message in found:
                watched.take(message.topic, message.payload)
                reports[kind_of(message.topic)] = msgspec.Raw(message.payload)
                if watched.is_complete:
                    break
    except TimeoutError:
        raise TimeoutExpiredError(
            f"the broker has published no metrics for {_ONCE_TIMEOUT_S:g} s"
        ) from None
    return reports


async def _live(bus: Bus, interval_s: float) -> None:
    # Seldom needed, and slow to import.
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
        live.update(_drawn(Watched(), console.height), refresh=True)
        await _watch(
            bus,
            interval_s,
            lambda watched: live.update(_drawn(watched, console.height), refresh=True),
        )


async def _watch(bus: Bus, interval_s: float, show: Callable[[Watched], None]) -> None:
    """Show at each interval what was heard last, until cancelled."""
    watched = Watched()
    heard = asyncio.Event()

    async def listen() -> None:
        async with bus.subscribe(TOPICS, start="last") as reports:
            async for message in reports:
                watched.take(message.topic, message.payload)
                if watched.is_complete:
                    heard.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listen())
        while True:
            await heard.wait()  # a broker that is silent has nothing new to show
            heard.clear()
            watched.cursors = await bus.cursors()
            show(watched)
            await asyncio.sleep(interval_s)


def _print_line(watched: Watched) -> None:
    typer.echo(summary_line(watched))
    sys.stdout.flush()


def _drawn(watched: Watched, height: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    head = head_lines(watched)
    made = tables(watched, height)
    # Every table gets its share of what the head leaves.
    room = height - len(head) - _TABLE_LINES * len(made)
    made = tables(watched, max(room // max(len(made), 1), 1))
    return Group(Text("\n".join(head)), *(table.renderable() for table in made))
