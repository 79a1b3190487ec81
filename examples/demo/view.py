"""Shows the board on a terminal, redrawn as it changes; or line by line without a terminal."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.demo.board import Board, Happening
from examples.demo.evidence import ShopReport
from examples.demo.world import GATEWAYS, STATIONS, OrderSource, many

WIDTH_MAX: Final = 108
_FRAME_S: Final = 0.2
_SAMPLE_S: Final = 0.5
_SAMPLES: Final = 48
_LINE_EVERY_S: Final = 5.0
_BARS: Final = " ▁▂▃▄▅▆▇█"
_HAPPENINGS: Final = 7
_FRAMES_AFTER: Final = 20  # until the moment that is recorded
_ROWS_WITHOUT_HAPPENINGS: Final = 12


@asynccontextmanager
async def showing(console: Console, board: Board) -> AsyncIterator[None]:
    """Shows the board until the block ends."""
    is_alive = console.is_terminal and not console.is_dumb_terminal
    async with _beside(_draw(console, board) if is_alive else _tell(console, board)):
        yield


@asynccontextmanager
async def recording(recorder: Console, board: Board) -> AsyncIterator[None]:
    """Also draws one moment on another console: shortly after the broker is back."""

    async def record() -> None:
        screen = Screen(board)
        was_down = False
        while not was_down or not board.is_broker_up:
            screen.sample()
            was_down = was_down or (bool(board.listeners) and not board.is_broker_up)
            await asyncio.sleep(_FRAME_S)
        for _ in range(_FRAMES_AFTER):
            screen.sample()
            await asyncio.sleep(_FRAME_S)
        recorder.print(screen.draw(height=recorder.height))

    async with _beside(record()):
        yield


@asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


# --- On a terminal ---


class Screen:
    """The screen at one moment, as wide and as high as the terminal."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._rates: deque[int] = deque(maxlen=_SAMPLES)
        self._sampled_at_s = 0.0
        self._seen = 0

    def sample(self) -> None:
        """Messages that reached the dashboard, by half seconds."""
        if self._board.seconds - self._sampled_at_s >= _SAMPLE_S:
            self._rates.append(self._board.seen - self._seen)
            self._seen, self._sampled_at_s = self._board.seen, self._board.seconds

    def draw(self, *, height: int) -> RenderableType:
        board = self._board
        parts: list[RenderableType] = [self._rows()]
        room = height - _ROWS_WITHOUT_HAPPENINGS
        if room > 0:
            last = board.happenings[-min(room, _HAPPENINGS) :]
            parts += [Text(), *map(_happening, last)]
        return Panel(
            Group(*parts),
            title=f"[bold]Runnel[/] · {board.phase}",
            subtitle=f"{board.seconds:.0f} s",
            title_align="left",
            subtitle_align="right",
            box=box.ROUNDED,
            width=WIDTH_MAX,
            border_style="cyan" if board.is_broker_up else "red",
        )

    def _rows(self) -> Table:
        board, work, spark = self._board, self._board.work(), self._board.pipeline
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        state = "[green]up[/]" if board.is_broker_up else "[bold red]DOWN[/]"
        rows.add_row("broker", f"{state}  {'  '.join(board.listeners)}")
        waiting = board.sent - board.stored
        rows.add_row(
            f"{len(STATIONS)} weather stations",
            f"{board.stored:,} readings stored, {waiting:,} waiting; {GATEWAYS} named publishers",
        )
        rows.add_row("dashboard", f"{board.seen:,} live, p50 {board.p50_ms:.1f} ms  {self._bars()}")
        rows.add_row(
            "", "[dim]" + "   ".join(f"{k} {v:.1f}°" for k, v in sorted(board.celsius.items()))
        )
        rows.add_row("web shop, REST", _shop(board.shops.get(OrderSource.WEB)))
        rows.add_row("partner, gRPC", _shop(board.shops.get(OrderSource.PARTNER)))
        rows.add_row(
            f"{len(board.workers)} workers",
            f"{many(work.invoiced, 'invoice')}, {many(work.in_hand, 'order')} in hand; "
            f"{work.failed:,} failed, {work.postponed:,} given back",
        )
        rows.add_row(
            "Spark",
            f"{spark.archived:,} archived in {many(spark.batches, 'transaction')}; {spark.state}",
        )
        return rows

    def _bars(self) -> str:
        """The square root of each value, because the burst after the broker's return would hide the usual rate."""
        top = max(self._rates, default=0) or 1
        steps = (math.ceil(math.sqrt(rate / top) * (len(_BARS) - 1)) for rate in self._rates)
        return "[cyan]" + "".join(_BARS[step] for step in steps)


def _shop(report: ShopReport | None) -> str:
    if report is None:
        return "not yet"
    return f"{report.sent.messages:,} orders stored; {report.seen:,} invoices seen"


def _happening(what: Happening) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{what.at_s:6.1f} s  ", style="dim")
    return line.append(what.text, style="bold red" if what.is_trouble else "")


async def _draw(console: Console, board: Board) -> None:
    screen = Screen(board)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            screen.sample()
            live.update(screen.draw(height=console.height), refresh=True)
            await asyncio.sleep(_FRAME_S)


# --- Without a terminal ---


async def _tell(console: Console, board: Board) -> None:
    """Prints every event as a line, and the progress at intervals."""
    told, due_s = 0, _LINE_EVERY_S
    try:
        while True:
            told = _tell_news(console, board, told)
            if board.seconds >= due_s:
                due_s = board.seconds + _LINE_EVERY_S
                work, spark = board.work(), board.pipeline
                _line(
                    console,
                    board.seconds,
                    f"stored {board.stored:,}, live {board.seen:,}, invoices {work.invoiced:,}, "
                    f"archived {spark.archived:,} ({spark.state})",
                )
            await asyncio.sleep(_FRAME_S)
    finally:
        _tell_news(console, board, told)


def _tell_news(console: Console, board: Board, told: int) -> int:
    for what in board.happenings[told:]:
        _line(console, what.at_s, what.text)
    return len(board.happenings)


def _line(console: Console, at_s: float, text: str) -> None:
    console.print(f"{at_s:6.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)
