"""Prints messages on standard output as fast as the reader accepts them, and gaps on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from runnel.cli.render.messages import MessageFormat, escaped, printer
from runnel.cli.render.tables import counted
from runnel.cli.standard_streams import write_all
from runnel.errors import ClientFault
from runnel.formats.message import Message
from runnel.formats.wire import GapState


class MessageOutput:
    """Prints messages. Each call writes all of its messages at once, without a buffer."""

    def __init__(self, form: MessageFormat) -> None:
        if sys.stdout is None:
            raise ClientFault("standard output is closed: there is nowhere to print messages to")
        sys.stdout.flush()
        self._descriptor = sys.stdout.fileno()
        self._print = printer(form, for_terminal=sys.stdout.isatty())

    async def write(self, messages: Sequence[Message]) -> None:
        await write_all(self._descriptor, self._print(messages))


def check_count(came: int, count: int | None, timeout_s: float | None) -> None:
    """If fewer messages came than were requested, print an error and exit with code 1."""
    if count is None or came >= count:
        return
    waited = "" if timeout_s is None else f"; nothing for {timeout_s:g} s"
    typer.echo(f"error: {counted(came, 'message')} of {count:,} came{waited}", err=True)
    raise typer.Exit(1)


def tell_gap(gap: GapState) -> None:
    """Print on standard error which messages will not come, and why."""
    typer.echo(f"gap: {gap_text(gap)}", err=True)


def gap_text(gap: GapState) -> str:
    missed = counted(gap.missed, "message") if gap.missed else "an unknown number of messages"
    where = f" of {gap.topic}[{gap.partition}]" if gap.topic else ""
    offsets = f", offsets {gap.first_offset} to {gap.next_offset - 1}" if gap.next_offset else ""
    text = f": {gap.text}" if gap.text else ""
    return escaped(f"{missed}{where} missed by {gap.reason}{offsets}{text}")
