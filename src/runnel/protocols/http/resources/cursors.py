"""The resource of named cursors: positions that outlive their readers, and hold the messages after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from litestar import Request, delete, get, put
from litestar.params import FromPath, JSONBody

from runnel.errors import UnknownTopicError
from runnel.formats.wire import CursorPlace, CursorState
from runnel.protocols.http.encoding.parameters import After, Natural, PageLimit, time_text
from runnel.protocols.http.server.calls import HttpCall, call_of


class CursorPlaceIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The next message to read: `offset` of a topic's partition, or `entry` and `row` of a shard for some patterns."""

    topic: str | None = None
    partition: Natural = 0
    offset: Natural = 0
    journal: str | None = None
    shard: Natural = 0
    epoch: Natural = 0
    entry: Natural = 0
    row: Natural = 0
    patterns: Sequence[str] = ()


class CursorIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All positions of a cursor."""

    places: Annotated[Sequence[CursorPlaceIn], msgspec.Meta(min_length=1)]


class CursorPlaceOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """A position of a cursor, and how far behind it is."""

    lag: Annotated[
        int,
        msgspec.Meta(
            description="Messages that match and are not passed yet; for a position in a shard, an upper bound."
        ),
    ]
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    journal: str | None = None
    shard: int | None = None
    epoch: int | None = None
    entry: int | None = None
    row: int | None = None
    patterns: Sequence[str] | None = None


class CursorOut(msgspec.Struct, frozen=True):
    """A cursor with all its positions."""

    name: str
    updated_ns: int
    updated: str
    places: Sequence[CursorPlaceOut]


class CursorList(msgspec.Struct, frozen=True):
    """Cursors in order of their names."""

    cursors: Annotated[
        Sequence[CursorOut],
        msgspec.Meta(description="Cursors whose every position you may read or administer."),
    ]
    is_complete: Annotated[
        bool, msgspec.Meta(description="If false, ask again with `after` set to the last name.")
    ]


@get("/v1/cursors", operation_id="listCursors", tags=["cursors"])
async def list_cursors(
    request: Request[Any, Any, Any], after: After = "", limit: PageLimit = 0
) -> CursorList:
    """List the cursors, in order of their names."""
    cursors, is_complete = await call_of(request).access.cursors(after=after, limit=limit)
    return CursorList([_cursor(each) for each in cursors], is_complete)


@get("/v1/cursors/{name:str}", operation_id="describeCursor", tags=["cursors"])
async def describe_cursor(request: Request[Any, Any, Any], name: FromPath[str]) -> CursorOut:
    """Describe a cursor with its positions."""
    return await _found(call_of(request), name)


@put("/v1/cursors/{name:str}", operation_id="setCursor", tags=["cursors"])
async def set_cursor(
    request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[CursorIn]
) -> CursorOut:
    """Create a cursor, or move it: from now on it has exactly these positions."""
    call = call_of(request)
    places = [
        CursorPlace(
            place.topic,
            place.partition,
            place.offset,
            place.journal,
            place.shard,
            place.epoch,
            place.entry,
            place.row,
            place.patterns,
        )
        for place in data.places
    ]
    await call.access.set_cursor(name, places)
    return await _found(call, name)


@delete("/v1/cursors/{name:str}", operation_id="removeCursor", tags=["cursors"])
async def remove_cursor(request: Request[Any, Any, Any], name: FromPath[str]) -> None:
    """Remove a cursor: it no longer holds any messages."""
    await call_of(request).access.remove_cursor(name)


async def _found(call: HttpCall, name: str) -> CursorOut:
    for cursor in await call.access.cursor(name):
        return _cursor(cursor)
    raise UnknownTopicError(f"cursor {name!r} does not exist")


def _cursor(state: CursorState) -> CursorOut:
    return CursorOut(
        state.name,
        state.updated_ns,
        time_text(state.updated_ns),
        [_place(place) for place in state.places],
    )


def _place(place: CursorPlace) -> CursorPlaceOut:
    if place.topic is not None:
        return CursorPlaceOut(place.lag, place.topic, place.partition, place.offset)
    return CursorPlaceOut(
        place.lag,
        journal=place.journal,
        shard=place.shard,
        epoch=place.epoch,
        entry=place.entry,
        row=place.row,
        patterns=place.patterns,
    )


cursor_handlers = [list_cursors, describe_cursor, set_cursor, remove_cursor]
