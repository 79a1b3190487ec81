"""The resource of dead letters: list them, send them back to their subscription, drop them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, get, post
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.types import ControllerRouterHandler
from msgspec import Meta

from runnel.broker.consumer_groups import SettleRequest
from runnel.protocols.http.encoding.messages import (
    TIMES_TEXT,
    MessageOut,
    PayloadForm,
    TimeForm,
    messages_out,
)
from runnel.protocols.http.encoding.parameters import INT64_MAX, Natural
from runnel.protocols.http.encoding.problems import FieldFault
from runnel.protocols.http.server.calls import call_of

_LETTERS_MAX: Final = 1000
_OFFSETS_MAX: Final = 10_000


class DeadLetters(msgspec.Struct, frozen=True):
    """Letters that have not been sent back or dropped. Their tags say which messages they were, and why they failed."""

    messages: Sequence[MessageOut]
    next_offset: Annotated[int, Meta(description="Where the next page begins; 0: there is none.")]


class SettleIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Letters by their offsets in the dead letter topic, or all of them."""

    offsets: Annotated[Sequence[Natural], Meta(max_length=_OFFSETS_MAX)] = ()
    all: bool = False


class Settled(msgspec.Struct, frozen=True):
    """How many letters were sent back or dropped."""

    settled: int


@get("/v1/subscriptions/{name:str}/dead", operation_id="listDeadLetters", tags=["work"])
async def list_dead(
    request: Request[Any, Any, Any],
    name: FromPath[str],
    offset: Annotated[
        int,
        QueryParameter(
            ge=0,
            le=INT64_MAX,
            description="Offset of the first dead letter, in the dead-letter topic.",
        ),
    ] = 0,
    limit: Annotated[
        int,
        QueryParameter(
            ge=1, le=_LETTERS_MAX, description="Maximum number of dead letters per page."
        ),
    ] = 100,
    payload: Annotated[
        PayloadForm, QueryParameter(description="The form of the payloads.")
    ] = PayloadForm.AUTO,
    times: Annotated[TimeForm, QueryParameter(description=TIMES_TEXT)] = TimeForm.NS,
) -> DeadLetters:
    """List the messages that failed too often."""
    call = call_of(request)
    batches, next_offset = await call.read(call.access.dead_letters(name, offset, limit))
    messages = [out for batch in batches for out in messages_out(batch, payload, times)]
    return DeadLetters(messages, next_offset)


@post(
    "/v1/subscriptions/{name:str}/dead/redrive",
    status_code=200,
    operation_id="redriveDeadLetters",
    tags=["work"],
)
async def redrive(
    request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[SettleIn]
) -> Settled:
    """Send letters back: their subscription owes the messages again, as if they had never been delivered."""
    return await _settle(request, name, data, is_redriven=True)


@post(
    "/v1/subscriptions/{name:str}/dead/drop",
    status_code=200,
    operation_id="dropDeadLetters",
    tags=["work"],
)
async def drop(
    request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[SettleIn]
) -> Settled:
    """Drop letters: they are no longer listed, but stay in the dead letter topic."""
    return await _settle(request, name, data, is_redriven=False)


async def _settle(
    request: Request[Any, Any, Any], name: str, given: SettleIn, *, is_redriven: bool
) -> Settled:
    if given.all == bool(given.offsets):
        raise FieldFault("$.offsets", "give offsets, or all = true, and not both")
    settled = await call_of(request).access.settle_dead(
        SettleRequest(name, given.offsets, given.all, is_redriven)
    )
    return Settled(settled)


dead_letter_handlers: list[ControllerRouterHandler] = [list_dead, redrive, drop]
