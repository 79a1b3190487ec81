"""`runnel cursors`: lists named cursors with their lag, sets them and removes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.options import AsJson, DefaultCommandGroup, Form, TableFormat
from runnel.cli.places import parse_cursor_place
from runnel.cli.render.tables import Table, json_text, printable
from runnel.cli.render.times import format_time
from runnel.errors import ClientFault
from runnel.formats.wire import CursorPlace, CursorState

if TYPE_CHECKING:
    from runnel.client import Bus

app = typer.Typer(cls=DefaultCommandGroup, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cursor.")]


@app.callback()
def _cursors() -> None:
    """List named cursors with their lag; set and remove them. Without a command: list."""


@app.command("list")
def list_cursors(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="List only this cursor.")
    ] = None,
    *,
    form: Form = TableFormat.TABLE,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List named cursors.

    `lag` is the number of matching messages that the cursor has not passed. For a place in a shard it is an upper
    bound.
    """
    found = run_connected(url, lambda bus: _find(bus, name))
    if as_json or form is TableFormat.JSON:
        documents = [cursor_document(cursor) for cursor in found]
        typer.echo(json_text(documents))
    elif found:
        cursor_table(found).show()
    else:
        typer.echo("there are no cursors", err=True)


async def _find(bus: Bus, name: str | None) -> list[CursorState]:
    if name is None:
        return await bus.cursors()
    cursor = await bus.cursor(name)
    if cursor is None:
        raise ClientFault(f"there is no cursor {name!r}")
    return [cursor]


@app.command("set")
def set_cursor(
    name: Name,
    place: Annotated[
        list[str],
        typer.Argument(
            metavar="TOPIC[:PARTITION]=OFFSET", help="Offset of the next message to read."
        ),
    ],
    *,
    url: Url = DEFAULT_URL,
) -> None:
    """Create a cursor, or move it.

    The cursor then stands at these places and no others. It holds retention back: messages that it has not passed
    are kept.
    """
    places: dict[str | tuple[str, int], int] = dict(map(parse_cursor_place, place))
    if len(places) < len(place):
        raise ClientFault("a partition is named twice; a cursor stands at one place in each")
    run_connected(url, lambda bus: bus.set_cursor(name, places))


@app.command()
def remove(name: Name, *, url: Url = DEFAULT_URL) -> None:
    """Remove a cursor. Retention may then remove messages that only this cursor held back."""
    run_connected(url, lambda bus: bus.remove_cursor(name))
    typer.echo(f"removed {printable(name)}", err=True)


def cursor_table(cursors: Sequence[CursorState]) -> Table:
    """One row for each place."""
    return Table(
        ("cursor", "place", "next", "lag (messages)", "updated"),
        [
            (
                cursor.name,
                _place_name(place),
                str(place.entry if place.topic is None else place.offset),
                f"{place.lag:,}",
                f"{format_time(cursor.updated_ns)[:23]}Z",
            )
            for cursor in cursors
            for place in cursor.places
        ],
        frozenset(("next", "lag (messages)")),
    )


def _place_name(place: CursorPlace) -> str:
    if place.topic is not None:
        return f"{place.topic}[{place.partition}]"
    return f"{', '.join(place.patterns)} in {place.journal}/{place.shard}"


def cursor_document(cursor: CursorState) -> dict[str, Any]:
    """The cursor as JSON objects; on the wire it is arrays."""
    return {
        "name": cursor.name,
        "updated": format_time(cursor.updated_ns),
        "updated_ns": cursor.updated_ns,
        "places": [_place_document(place) for place in cursor.places],
    }


def _place_document(place: CursorPlace) -> dict[str, Any]:
    of_topic = ("topic", "partition", "offset", "lag")
    of_shard = ("journal", "shard", "epoch", "entry", "row", "patterns", "lag")
    fields = of_shard if place.topic is None else of_topic
    return {field: getattr(place, field) for field in fields}
