"""`runnel poll`: prints stored messages of one topic from an offset on, and says where to go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from runnel.cli.connecting import DEFAULT_URL, Url, run_connected
from runnel.cli.messages import Format
from runnel.cli.places import Place, Time, parse_place
from runnel.cli.printing import MessageOutput, tell_gap
from runnel.errors import ClientFault, OffsetAheadError, OffsetGoneError
from runnel.formats.wire import CursorPlace

if TYPE_CHECKING:
    from runnel.client import Bus, Page

_EARLIEST: Final = "earliest"
_WAIT_S: Final = 20.0

app = typer.Typer(add_completion=False)


class Request(msgspec.Struct, frozen=True):
    """What was asked for on the command line."""

    topic: str
    partition: int | None
    begin: Place | None
    count: int | None
    is_following: bool
    cursor: str | None


@app.command()
def poll(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")],
    *,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="PLACE", help="Where reading begins; see above."),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(metavar="P", min=0, help="Needed if the topic has more than one."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="End after so many messages.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="As with `runnel sub`.")] = Format.TEXT,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more at the end, until Ctrl-C.")
    ] = False,
    cursor: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Go on where this cursor stands, and move it."),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Print stored messages of one topic.

    Begins at PLACE: an offset, earliest, or a time (2026-05-01T12:30:00Z, a date, an age such as 2h);
    without it at the place of --cursor, or else at the earliest. Ends at what was the last message when
    it began, and tells on standard error the offset to go on with.

    A named cursor is the broker's memory of that offset; it also keeps retention from removing what
    was not read yet.
    """
    place = None if begin is None else parse_place("--from", begin, time.time_ns(), (_EARLIEST,))
    request = Request(topic, partition, place, count, follow, cursor)
    output = MessageOutput(form)
    run_connected(url, lambda bus: Poll(bus, request, output).run(), tells_losses=follow)


class Poll:
    """Reads page after page, prints each, and then moves the cursor past it."""

    def __init__(self, bus: Bus, request: Request, output: MessageOutput) -> None:
        self._bus = bus
        self._request = request
        self._output = output
        self._next_offset: int | None = None

    async def run(self) -> None:
        try:
            await self._read_all()
        except OffsetGoneError as error:
            raise ClientFault(f"{error}; go on with --from {error.first_offset}") from error
        except OffsetAheadError as error:
            raise ClientFault(
                f"{error}; --from {error.next_offset} --follow waits for it"
            ) from error
        finally:
            if self._next_offset is not None:
                typer.echo(f"next offset: {self._next_offset}", err=True)

    async def _read_all(self) -> None:
        request = self._request
        left = request.count
        page = await self._fetch(await self._begin(), left)
        end_offset = page.end_offset  # what comes while we read is for the next time
        while True:
            await self._take(page)
            if left is not None:
                left -= len(page)
                if left <= 0:
                    return
            if not request.is_following and page.next_offset >= end_offset:
                return
            page = await self._fetch(page.next_offset, left)

    async def _begin(self) -> int | Time:
        match self._request.begin:
            case int() | Time() as begin:
                return begin
            case None if self._request.cursor is not None:
                for place in await self._cursor_places(self._request.cursor):
                    if self._is_ours(place):
                        return place.offset
        return Time(0)  # whatever is the earliest by then

    async def _fetch(self, begin: int | Time, count: int | None) -> Page:
        request = self._request
        wait_s = _WAIT_S if request.is_following else 0.0
        if isinstance(begin, Time):
            return await self._bus.fetch(
                request.topic,
                partition=request.partition,
                time=begin.time_ns,
                messages_max=count or 0,
                wait_s=wait_s,
            )
        return await self._bus.fetch(
            request.topic,
            begin,
            partition=request.partition,
            messages_max=count or 0,
            wait_s=wait_s,
        )

    async def _take(self, page: Page) -> None:
        for gap in page.gaps:
            tell_gap(gap)
        await self._output.write(page.messages)
        has_moved = page.next_offset != self._next_offset
        self._next_offset = page.next_offset
        if has_moved and self._request.cursor is not None:
            await self._move_cursor(self._request.cursor, page.next_offset)

    # --- The cursor ---

    async def _move_cursor(self, name: str, offset: int) -> None:
        # A cursor is set as a whole: its places elsewhere stay what they are.
        others = [place for place in await self._cursor_places(name) if not self._is_ours(place)]
        place = CursorPlace(self._request.topic, self._request.partition or 0, offset)
        await self._bus.set_cursor(name, [*others, place])

    async def _cursor_places(self, name: str) -> Sequence[CursorPlace]:
        cursor = await self._bus.cursor(name)
        return () if cursor is None else cursor.places

    def _is_ours(self, place: CursorPlace) -> bool:
        request = self._request
        return place.topic == request.topic and place.partition == (request.partition or 0)
