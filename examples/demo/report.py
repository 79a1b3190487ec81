"""The end of a run: a table of claims, the verdict, and where to look further."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.demo.evidence import Evidence, total
from examples.demo.proof import Claim
from examples.demo.view import WIDTH_MAX
from examples.demo.world import BILLING

_WIDE: Final = 100  # columns from which on a claim and what there is to say of it fit into one line


def print_claims(console: Console, claims: Sequence[Claim], evidence: Evidence) -> None:
    """One line for each claim, by chapter; a broken claim stands out."""
    width = min(console.width, WIDTH_MAX)
    is_wide = width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, width=width)
    table.add_column("", width=2)
    table.add_column("what", ratio=None if is_wide else 1)
    table.add_column("must be", justify="right", no_wrap=True)
    table.add_column("is", justify="right", no_wrap=True)
    if is_wide:
        table.add_column("", ratio=1)
    chapter = None
    for claim in claims:
        if claim.chapter is not chapter:
            chapter = claim.chapter
            table.add_row("", Text(chapter.value, style="bold cyan"))
        table.add_row(*_cells(claim, is_wide=is_wide))
    console.print(table)
    wrong = [claim for claim in claims if not claim.holds]
    if wrong:
        console.print(f"[bold red]{len(wrong)} of {len(claims)} counts do not agree:[/]")
        for claim in wrong:
            line = f"  {claim.what}: {claim.found:,}, but it must be {claim.expected:,}"
            console.print(line, style="red", markup=False, soft_wrap=True)
        return
    times, everything = evidence.times, total(evidence.published().values())
    rate = total(evidence.readings.values()).messages / times.publishing_s
    console.print(
        f"[bold green]All {len(claims)} counts agree:[/] nothing lost, nothing archived twice. "
        f"{everything.messages:,} messages in {times.total_s:.0f} s, {rate:,.0f} readings/s."
    )


def _cells(claim: Claim, *, is_wide: bool) -> list[Text]:
    style = "green" if claim.holds else "bold red"
    note = Text(claim.note, style="dim")
    what = Text(claim.what)
    return [
        Text("✓" if claim.holds else "✗", style=style),
        what if is_wide else Text("\n").join((what, note)),
        Text(f"{claim.expected:,}"),
        Text(f"{claim.found:,}", style=style),
        *([note] if is_wide else []),
    ]


def print_places(console: Console, directory: Path) -> None:
    """The folders, and three commands to look at them that can be pasted into a shell."""
    bin_directory = Path(sys.executable).parent
    runnel, python = (_shortest(bin_directory / name) for name in ("runnel", "python"))
    place = _shortest(directory)
    data, windows = shlex.quote(f"{place}/data"), f"{place}/windows"
    script = (
        f"from deltalake import DeltaTable; print(DeltaTable({windows!r}).to_pandas()"
        ".groupby('window_start')[['messages', 'bytes']].sum())"
    )
    console.print(
        f"\nEverything lies in [bold]{place}[/]: data (the broker's), archive and windows (Delta tables), logs."
    )
    for words in (
        f"{runnel} log inspect {data} --topics",
        f"{runnel} log export {data} --topic '!dead/{BILLING}' --limit 2 --to -",
        f'{python} -c "{script}"',
    ):
        console.print(f"  {words}", markup=False, highlight=False, soft_wrap=True)


def print_listeners(console: Console, listeners: Sequence[str]) -> None:
    """The addresses of the broker while it stays up."""
    runnel = _shortest(Path(sys.executable).parent / "runnel")
    native, http, grpc = listeners
    console.print(
        f"\nThe world goes on, at {native}, {http}/docs and {grpc}, until Ctrl-C. From another terminal:"
    )
    for words in (
        f"{runnel} top --url {native}",
        f"{runnel} sub 'weather/*' --from last --url {native}",
        f"curl -N '{http}/v1/stream?pattern=invoices'",
    ):
        console.print(f"  {words}", markup=False, highlight=False, soft_wrap=True)


def _shortest(path: Path) -> str:
    """The path as it is called from the current directory."""
    here = Path.cwd()
    short = path.relative_to(here) if path.is_relative_to(here) else path
    return shlex.quote(str(short))
