"""`runnel dead`: lists and shows dead letters, sends them back, or drops them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import typer

from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.options import DefaultCommandGroup, Form, TableFormat, Yes, confirm
from runnel.cli.render.dead_letters import count_table, document, letter_lines, letter_table
from runnel.cli.render.messages import MessageFormat, text_of
from runnel.cli.render.tables import counted, json_text, printable
from runnel.errors import ClientFault

if TYPE_CHECKING:
    from runnel.client import Bus
    from runnel.formats.message import Message
    from runnel.formats.work_heads import SubscriptionState

_LISTED: Final = 100

app = typer.Typer(cls=DefaultCommandGroup, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="Name of the subscription.")]
Offsets = Annotated[
    list[int] | None,
    typer.Argument(
        metavar="OFFSETS", min=1, help="Offsets of dead letters, as `runnel dead list` shows them."
    ),
]
All = Annotated[bool, typer.Option("--all", help="Choose all dead letters of the subscription.")]

_Chosen: TypeAlias = list[int] | Literal["all"]


@app.callback()
def _dead() -> None:
    """List and show messages that failed too often; send them back or drop them. Without a command: list."""


@app.command("list")
def list_dead(
    subscription: Annotated[
        str | None,
        typer.Argument(
            metavar="SUBSCRIPTION",
            help="List its dead letters. Default: count them for each subscription.",
        ),
    ] = None,
    *,
    begin: Annotated[
        int, typer.Option("--from", metavar="OFFSET", min=1, help="Begin at this offset.")
    ] = 1,
    count: Annotated[
        int, typer.Option(metavar="N", min=1, max=1_000_000, help="List at most N dead letters.")
    ] = _LISTED,
    form: Form = TableFormat.TABLE,
    url: Url = DEFAULT_URL,
) -> None:
    """List dead letters that were neither sent back nor dropped, oldest first.

    `offset` is the offset in the topic !dead/SUBSCRIPTION; the other commands take it. `was` is the message that
    failed, `error` is its last error.
    """
    if subscription is None:
        _list_counts(run_connected(url, lambda bus: bus.subscriptions()), form)
        return
    name = subscription
    letters, next_offset = run_connected(url, lambda bus: _letters(bus, name, begin, count))
    if form is TableFormat.JSON:
        typer.echo(json_text([document(letter) for letter in letters]))
    elif letters:
        letter_table(letters).show()
    else:
        behind = f" from {begin} on" if begin > 1 else ""
        typer.echo(f"{printable(name)} has no dead letters{behind}", err=True)
    if next_offset:
        typer.echo(f"there may be more: --from {next_offset}", err=True)


def _list_counts(states: Sequence[SubscriptionState], form: TableFormat) -> None:
    found = [state for state in states if state.dead]
    if form is TableFormat.JSON:
        typer.echo(json_text([{"subscription": state.name, "dead": state.dead} for state in found]))
    elif found:
        count_table(found).show()
    else:
        typer.echo("there are no dead letters", err=True)


async def _letters(bus: Bus, name: str, begin: int, count: int) -> tuple[list[Message], int]:
    """Return up to `count` letters, and the offset where more begin (0: there are no more)."""
    letters: list[Message] = []
    while True:
        page = await bus.dead_letter_page(name, begin, messages_max=count - len(letters))
        letters += page.messages
        begin = page.next_offset
        if not begin or len(letters) >= count:
            return letters, begin


@app.command()
def show(
    subscription: Name,
    offset: Annotated[
        int,
        typer.Argument(
            metavar="OFFSET",
            min=1,
            help="Offset of the dead letter, as `runnel dead list` shows it.",
        ),
    ],
    *,
    form: Annotated[
        MessageFormat,
        typer.Option("--format", help="Output format. raw: the unchanged payload only."),
    ] = MessageFormat.TEXT,
    url: Url = DEFAULT_URL,
) -> None:
    """Show one dead letter: its message, its errors and its payload."""
    letter = run_connected(url, lambda bus: _letter(bus, subscription, offset))
    match form:
        case MessageFormat.JSON:
            typer.echo(json_text(document(letter)))
        case MessageFormat.RAW:
            typer.echo(letter.payload)
        case MessageFormat.TEXT:
            for line in letter_lines(subscription, letter):
                typer.echo(line)
            typer.echo()
            typer.echo(text_of(letter.payload))


async def _letter(bus: Bus, name: str, offset: int) -> Message:
    page = await bus.dead_letter_page(name, offset, messages_max=1)
    if not page.messages or page.messages[0].offset != offset:
        raise ClientFault(f"subscription {name!r} has no dead letter {offset}, or not any more")
    return page.messages[0]


@app.command()
def redrive(
    subscription: Name,
    offset: Offsets = None,
    *,
    every: All = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Send dead letters back to their subscription, as if they had never failed."""
    chosen = _chosen(offset, is_all=every)
    settled = run_connected(url, lambda bus: bus.redrive(subscription, chosen))
    _tell(subscription, chosen, settled, "sent back")


@app.command()
def drop(
    subscription: Name,
    offset: Offsets = None,
    *,
    every: All = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Drop dead letters: they are no longer listed."""
    chosen = _chosen(offset, is_all=every)
    if not yes:
        which = "all dead letters" if every else counted(len(chosen), "dead letter")
        confirm(f"Drop {which} of {printable(subscription)}?")
    settled = run_connected(url, lambda bus: bus.drop_dead(subscription, chosen))
    _tell(subscription, chosen, settled, "dropped")


def _chosen(offsets: list[int] | None, *, is_all: bool) -> _Chosen:
    if is_all and offsets:
        raise ClientFault("offsets and --all were given; leave one of them out")
    if is_all:
        return "all"
    if not offsets:
        raise ClientFault("which? Give offsets as `runnel dead list` shows them, or --all")
    return sorted(set(offsets))


def _tell(name: str, chosen: _Chosen, settled: int, done: str) -> None:
    if chosen != "all" and not settled:
        raise ClientFault(
            f"subscription {name!r} has no dead letter {', '.join(map(str, chosen))}, or not any more"
        )
    line = f"{done} {counted(settled, 'dead letter')}"
    if chosen != "all" and settled < len(chosen):
        line += f" of {len(chosen):,}; the others were sent back or dropped before"
    typer.echo(line, err=True)
