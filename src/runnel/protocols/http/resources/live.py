"""The resource `/v1/stream`: reads live as server-sent events, for as long as the client stays connected."""

from __future__ import annotations

import enum
from typing import Annotated, Any

from litestar import Request, get
from litestar.params import HeaderParameter, QueryParameter
from litestar.types import ControllerRouterHandler

from runnel.broker.live.subscription import Overflow
from runnel.formats.wire import Start
from runnel.protocols.http.encoding.event_ids import FIELD, EventIds, resumed
from runnel.protocols.http.encoding.event_stream import CONTENT_TYPE
from runnel.protocols.http.encoding.messages import TIMES_TEXT, PayloadForm, TimeForm
from runnel.protocols.http.encoding.parameters import Time, time_ns
from runnel.protocols.http.encoding.problems import FieldFault
from runnel.protocols.http.resources.live_stream import HttpLiveStream
from runnel.protocols.http.server.calls import call_of
from runnel.topics.patterns import Pattern


class StreamStart(enum.StrEnum):
    """Where a stream begins if it does not resume after an id."""

    LATEST = "latest"  # with messages from now on
    LAST = "last"  # with the last message of each topic's partition
    EARLIEST = "earliest"
    TIME = "time"


@get(
    "/v1/stream",
    operation_id="stream",
    tags=["live"],
    media_type=CONTENT_TYPE,
)
async def stream(
    request: Request[Any, Any, Any],
    pattern: Annotated[
        list[str],
        QueryParameter(
            name="pattern",
            min_items=1,
            description="Topics by their names, or by patterns: `*` any characters, `?` one, `[a-z]` one of a set.",
        ),
    ],
    start: Annotated[
        StreamStart,
        QueryParameter(description="Where to begin, unless an id is given to resume after."),
    ] = StreamStart.LATEST,
    time: Annotated[
        Time | None,
        QueryParameter(description="With start=time: the first messages received then or later."),
    ] = None,
    overflow: Annotated[
        Overflow,
        QueryParameter(description="What a slow reader misses of ephemeral topics."),
    ] = Overflow.DROP_OLDEST,
    payload: Annotated[
        PayloadForm, QueryParameter(description="The form of the payloads.")
    ] = PayloadForm.AUTO,
    times: Annotated[TimeForm, QueryParameter(description=TIMES_TEXT)] = TimeForm.NS,
    last_event_id: Annotated[
        str | None,
        QueryParameter(
            name=FIELD, description="The id of an event of this stream: resume after it."
        ),
    ] = None,
    last_event_id_header: Annotated[
        str | None,
        HeaderParameter(
            name="Last-Event-ID",
            description="The same, as browsers send it when they reconnect.",
        ),
    ] = None,
) -> HttpLiveStream:
    """Read messages as they come, as server-sent events: `message`, `gap`, `caught_up`, `closing`, `ended`."""
    call = call_of(request)
    lists = call.server.sent_last_values
    for text in pattern:
        Pattern(text)
    # A browser reconnects with its first query, so the id in its header is newer.
    event_id = last_event_id_header or last_event_id
    if event_id:
        begin, seen = resumed(event_id, pattern, lists)
    else:
        begin, seen = _start(start, time), ()
    ids = EventIds(pattern, begin, lists, seen)
    return HttpLiveStream(call, pattern, begin, ids, overflow=overflow, form=payload, times=times)


def _start(start: StreamStart, time: str | None) -> Start:
    if (start is StreamStart.TIME) != (time is not None):
        raise FieldFault("time", "start=time needs a time, and the other starts have none")
    return Start(start) if time is None else Start(start, time_ns=time_ns("time", time))


live_handlers: list[ControllerRouterHandler] = [stream]
