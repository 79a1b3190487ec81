"""bin/demo: a small world around a broker that is killed half-way, and a table that proves that nothing was lost.

Weather stations publish, a dashboard reads live, two shops order over REST and gRPC, workers that fail make invoices,
Spark archives everything and counts it in windows. One worker and the broker itself are killed on the way. Exit code 0
means that every count agrees, 1 that one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import io
import signal
import sys
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console

from examples.demo import evidence as notes
from examples.demo.board import Board
from examples.demo.child import DemoFailedError
from examples.demo.counting import count_archive, count_windows
from examples.demo.evidence import Evidence
from examples.demo.picture import write_picture
from examples.demo.place import PlaceError, prepare
from examples.demo.proof import judge
from examples.demo.report import print_claims, print_listeners, print_places
from examples.demo.story import Story, StoryPlan
from examples.demo.view import WIDTH_MAX, recording, showing
from runnel.errors import RunnelError

ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS_MIN: Final = 4
READINGS_PER_S_MAX: Final = 50_000
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# For terminals and files that do not take UTF-8.
_PLAIN: Final = {"…": ".", "·": "-", "✓": "+", "✗": "!", "°": " "}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bin/demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="N",
        help="how long the world runs, half of it before the broker is killed; it waits for Spark to be at work (20)",
    )
    parser.add_argument(
        "--rate",
        type=int,
        default=5000,
        metavar="N",
        help="readings of the stations in a second, all together (5000)",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        default=ROOT / ".demo",
        help="where everything is kept; what an earlier demo left there is replaced (.demo in this repository)",
    )
    parser.add_argument(
        "--stay",
        action="store_true",
        help="keep the broker and the world running after the table, until Ctrl-C",
    )
    parser.add_argument(
        "--recount",
        action="store_true",
        help="run nothing: count the archive of an earlier demo in DIR again, and print its table",
    )
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, help="write what is seen at the end as SVG, too"
    )
    chosen = parser.parse_args(words)
    if chosen.seconds < SECONDS_MIN:
        parser.error(
            f"--seconds {chosen.seconds:g}: at least {SECONDS_MIN}, or nothing would happen"
        )
    if not 1 <= chosen.rate <= READINGS_PER_S_MAX:
        parser.error(f"--rate {chosen.rate}: from 1 to {READINGS_PER_S_MAX:,}")
    return chosen


class Demo:
    """From the command line to the exit code."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self._chosen = chosen
        self._directory: Path = chosen.data.absolute()
        self._console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_MAX)
        self._recorder = Console(
            file=io.StringIO(), record=True, width=WIDTH_MAX, highlight=False, force_terminal=True
        )
        self._board = Board()
        self._agrees = False

    def main(self) -> int:
        try:
            if self._chosen.recount:
                return self._recount()
            with prepare(self._directory):
                return uvloop.run(self._run())
        except PlaceError as error:
            print(f"bin/demo: {error}", file=sys.stderr)
            return 2
        except (DemoFailedError, RunnelError) as error:
            print(f"bin/demo: {error}\nIts files are in {self._directory}", file=sys.stderr)
            return 1

    async def _run(self) -> int:
        """The exit code. After a signal it is 128 plus the signal's number."""
        whole = asyncio.current_task()
        assert whole is not None
        signals: list[int] = []

        def end(number: int) -> None:
            signals.append(number)
            whole.cancel()

        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        plan = StoryPlan(
            self._directory, self._chosen.seconds, self._chosen.rate, stays=self._chosen.stay
        )
        try:
            async with showing(self._console, self._board), recording(self._recorder, self._board):
                await Story(plan, self._board).run(self._prove)
        except asyncio.CancelledError:
            if not self._agrees or not plan.stays:
                print(f"interrupted; its files are in {self._directory}", file=sys.stderr)
                return 128 + signals[0]
        return 0 if self._agrees else 1

    def _prove(self, evidence: Evidence) -> None:
        notes.save(evidence, self._directory)
        self._show(evidence)
        if self._chosen.stay:
            print_listeners(self._console, self._board.listeners)

    def _recount(self) -> int:
        try:
            evidence = notes.load(self._directory)
        except FileNotFoundError:
            raise PlaceError(
                f"{self._directory} has no {notes.FILE}: no demo has ended there"
            ) from None
        evidence.archive = count_archive(self._directory / "archive")
        evidence.windows = count_windows(self._directory / "windows")
        self._show(evidence)
        return 0 if self._agrees else 1

    def _show(self, evidence: Evidence) -> None:
        claims = judge(evidence)
        self._agrees = all(claim.holds for claim in claims)
        print_claims(self._console, claims, evidence)
        print_places(self._console, self._directory)
        if self._chosen.picture is not None:
            print_claims(self._recorder, claims, evidence)
            write_picture(self._recorder, self._chosen.picture, "bin/demo")


def _plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(
        _PLAIN.get(character, "#" if character in "▁▂▃▄▅▆▇" else "?") for character in text
    ), error.end


def main(words: list[str] | None = None) -> int:
    """The exit code of a command line."""
    return Demo(parse(words)).main()


if __name__ == "__main__":
    codecs.register_error("plainly", _plainly)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="plainly")  # type: ignore[union-attr]
    sys.exit(main())
