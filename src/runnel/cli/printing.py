"""Messages on standard output, as fast as whoever reads them takes them; what concerns them on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from runnel.cli.messages import Format, escaped, printer
from runnel.cli.streams import write_all
from runnel.cli.tables import counted
from runnel.errors import ClientFault
from runnel.formats.message import Message
from runnel.formats.wire import GapState


class MessageOutput:
    """Prints messages. Each call writes what it was given at once: nothing waits in a buffer."""

    def __init__(self, form: Format) -> None:
        if sys.stdout is None:
            raise ClientFault("standard output is closed: there is nowhere to print messages to")
        sys.stdout.flush()
        self._descriptor = sys.stdout.fileno()
        self._print = printer(form, for_terminal=sys.stdout.isatty())

    async def write(self, messages: Sequence[Message]) -> None:
        await write_all(self._descriptor, self._print(messages))


def check_count(came: int, count: int | None, timeout_s: float | None) -> None:
    """Says so and ends with an exit code, if fewer messages came than were wanted."""
    if count is None or came >= count:
        return
    waited = "" if timeout_s is None else f"; nothing for {timeout_s:g} s"
    typer.echo(f"error: {counted(came, 'message')} of {count:,} came{waited}", err=True)
    raise typer.Exit(1)


def tell_gap(gap: GapState) -> None:
    """A line on standard error: messages that will not come, and why."""
    typer.echo(f"gap: {gap_text(gap)}", err=True)


def gap_text(gap: GapState) -> str:
    missed = counted(gap.missed, "message") if gap.missed else "an unknown number of messages"
    where = f" of {gap.topic}[{gap.partition}]" if gap.topic else ""
    offsets = f", offsets {gap.first_offset} to {gap.next_offset - 1}" if gap.next_offset else ""
    text = f": {gap.text}" if gap.text else ""
    return escaped(f"{missed}{where} missed by {gap.reason}{offsets}{text}")
