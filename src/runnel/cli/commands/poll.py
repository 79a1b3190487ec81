"""`runnel poll`: prints stored messages of one topic from an offset on, and the offset to continue at."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.places import Place, Time, parse_place
from runnel.cli.render.message_output import MessageOutput, tell_gap
from runnel.cli.render.messages import MessageFormat
from runnel.errors import ClientFault, OffsetAheadError, OffsetGoneError
from runnel.formats.wire import CursorPlace

if TYPE_CHECKING:
    from runnel.client import Bus, Page

_EARLIEST: Final = "earliest"
_WAIT_S: Final = 20.0

app = typer.Typer(add_completion=False)


class PollRequest(msgspec.Struct, frozen=True):
    """The options of the command, checked."""

    topic: str
    partition: int | None
    begin: Place | None
    count: int | None
    is_following: bool
    cursor: str | None


@app.command()
def poll(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to read.")],
    *,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="PLACE", help="Where to begin (see above)."),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            metavar="P", min=0, help="Partition to read. Required if the topic has more than one."
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after N messages.")
    ] = None,
    form: Annotated[
        MessageFormat, typer.Option("--format", help="Output format, as in `runnel sub`.")
    ] = MessageFormat.TEXT,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Wait for further messages at the end, until Ctrl-C."),
    ] = False,
    cursor: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Continue at this cursor, and move it."),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Print stored messages of one topic.

    PLACE is an offset, earliest, or a time (2026-05-01T12:30:00Z, a date, an age such as 2h). Without --from,
    reading begins at --cursor, or at the earliest message. It ends at the message that was the last when it began,
    and prints on standard error the offset to continue at.

    A named cursor stores that offset in the broker. It also keeps retention from removing messages that are not
    read yet.
    """
    place = None if begin is None else parse_place("--from", begin, time.time_ns(), (_EARLIEST,))
    request = PollRequest(topic, partition, place, count, follow, cursor)
    output = MessageOutput(form)
    run_connected(url, lambda bus: Poll(bus, request, output).run(), tells_losses=follow)


class Poll:
    """Reads page after page, prints each, and then moves the cursor past it."""

    def __init__(self, bus: Bus, request: PollRequest, output: MessageOutput) -> None:
        self._bus = bus
        self._request = request
        self._output = output
        self._next_offset: int | None = None

    async def run(self) -> None:
        try:
            await self._read_all()
        except OffsetGoneError as error:
            raise ClientFault(f"{error}; continue with --from {error.first_offset}") from error
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
        end_offset = page.end_offset  # messages that arrive during the run are for the next run
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
        return Time(0)  # the earliest message at the time of the request

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
        # `set_cursor` replaces all places of a cursor, so the places in other topics are set again.
        others = [place for place in await self._cursor_places(name) if not self._is_ours(place)]
        place = CursorPlace(self._request.topic, self._request.partition or 0, offset)
        await self._bus.set_cursor(name, [*others, place])

    async def _cursor_places(self, name: str) -> Sequence[CursorPlace]:
        cursor = await self._bus.cursor(name)
        return () if cursor is None else cursor.places

    def _is_ours(self, place: CursorPlace) -> bool:
        request = self._request
        return place.topic == request.topic and place.partition == (request.partition or 0)
