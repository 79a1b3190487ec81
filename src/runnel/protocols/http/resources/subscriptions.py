"""The resource of subscriptions: create, describe, pause, move and delete them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, Response, delete, get, post, put
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody
from litestar.types import ControllerRouterHandler
from msgspec import UNSET, Meta, UnsetType

from runnel.broker.consumer_groups import SubscriptionRequest
from runnel.formats.heads import PartitionPlace, Start
from runnel.formats.work_heads import MemberState, PartitionWork, SubscriptionState, WorkOptions
from runnel.protocols.http.encoding.parameters import (
    After,
    Natural,
    PageLimit,
    time_ns,
    time_text,
    time_text_if_set,
)
from runnel.protocols.http.encoding.problems import FieldFault
from runnel.protocols.http.server.calls import HttpCall, call_of

_Kind = Literal["earliest", "latest", "time", "offsets"]
_Mode = Literal["shared", "key_shared", "multicast"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a subscription delivers messages. Options left out have the broker's defaults, or stay as they are."""

    lease_ms: Natural | None = None
    processing_ms_max: Natural | None = None
    deliveries_max: Annotated[
        Natural | None, Meta(description="0: no limit, nothing becomes a dead letter.")
    ] = None
    retry_delay_ms: Natural | None = None
    retry_delay_ms_max: Natural | None = None
    backoff: Annotated[
        float | None, Meta(description="Factor by which each further delay is longer.")
    ] = None
    absent_ms_max: Annotated[
        Natural | None, Meta(description="Only for members of a multicast subscription.")
    ] = None


class PlaceIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a partition that is owed."""

    topic: str
    offset: Natural
    partition: Natural = 0


class StartIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a subscription begins. `time` goes with kind time, `places` with kind offsets."""

    kind: _Kind
    time: str | int | None = None
    places: Sequence[PlaceIn] = ()


class SubscriptionIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A subscription to create. If it exists, it must have the same patterns and mode."""

    patterns: Annotated[Sequence[str], Meta(min_length=1)]
    mode: _Mode = "shared"
    start: StartIn | None = None
    options: Options | None = None


class MoveIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new start. `member`: move only this member of a multicast."""

    start: StartIn
    member: str | None = None


class MemberOut(msgspec.Struct, frozen=True):
    """A member of a multicast, or the consumers of another mode taken together (without a name)."""

    name: str
    consumers: int
    backlog: Annotated[
        int, Meta(description="Messages not acknowledged, those in flight included.")
    ]
    in_flight: int
    delayed: Annotated[int, Meta(description="Messages that wait for their next attempt.")]
    oldest_ns: Annotated[
        int, Meta(description="When the oldest message not acknowledged was received; 0: none.")
    ]
    absent_ns: Annotated[int, Meta(description="Since when it has no consumer; 0: it has one.")]
    oldest: str | UnsetType = UNSET
    absent: str | UnsetType = UNSET

    @classmethod
    def of(cls, state: MemberState) -> MemberOut:
        return cls(
            state.name,
            state.consumers,
            state.backlog,
            state.in_flight,
            state.delayed,
            state.oldest_ns,
            state.absent_ns,
            time_text_if_set(state.oldest_ns),
            time_text_if_set(state.absent_ns),
        )


class PartitionOut(msgspec.Struct, frozen=True):
    """Where a member stands in a partition: everything before `floor` is acknowledged."""

    member: str
    topic: str
    partition: int
    floor: int
    next_offset: int
    acked_beyond: int
    in_flight: int

    @classmethod
    def of(cls, state: PartitionWork) -> PartitionOut:
        return cls(*(getattr(state, name) for name in cls.__struct_fields__))


class SubscriptionOut(msgspec.Struct, frozen=True):
    """A subscription as it is now. `partitions` is empty in lists."""

    name: str
    mode: str
    patterns: Sequence[str]
    is_paused: bool
    made_ns: int
    made: str
    options: Options
    members: Sequence[MemberOut]
    redelivered: Annotated[
        int, Meta(description="Messages delivered again since the broker started.")
    ]
    dead: Annotated[int, Meta(description="Dead letters that have not been sent back or dropped.")]
    partitions: Sequence[PartitionOut]

    @classmethod
    def of(cls, state: SubscriptionState) -> SubscriptionOut:
        return cls(
            state.name,
            state.mode,
            state.patterns,
            state.is_paused,
            state.made_ns,
            time_text(state.made_ns),
            Options(**msgspec.structs.asdict(state.options)),
            [MemberOut.of(member) for member in state.members],
            state.redelivered,
            state.dead,
            [PartitionOut.of(partition) for partition in state.partitions],
        )


class SubscriptionList(msgspec.Struct, frozen=True):
    """Subscriptions in order of their names."""

    subscriptions: Sequence[SubscriptionOut]
    is_complete: Annotated[
        bool, msgspec.Meta(description="If false, ask again with `after` set to the last name.")
    ]


def _start(given: StartIn) -> Start:
    if (given.kind == "time") != (given.time is not None):
        raise FieldFault("$.start.time", "kind time needs a time, and the other kinds have none")
    if (given.kind == "offsets") != bool(given.places):
        raise FieldFault(
            "$.start.places", "kind offsets needs places, and the other kinds have none"
        )
    return Start(
        given.kind,
        [PartitionPlace(place.topic, place.partition, place.offset) for place in given.places],
        0 if given.time is None else time_ns("$.start.time", given.time),
    )


async def _described(call: HttpCall, name: str) -> SubscriptionOut:
    return SubscriptionOut.of(await call.access.subscription(name))


@put(
    "/v1/subscriptions/{name:str}",
    operation_id="makeSubscription",
    tags=["work"],
    responses={201: ResponseSpec(SubscriptionOut, description="Created.")},
)
async def make(
    request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[SubscriptionIn]
) -> Response[SubscriptionOut]:
    """Create a subscription. If it exists with the same patterns and mode, its options may change."""
    call = call_of(request)
    options = None
    if data.options is not None:
        options = WorkOptions(**msgspec.structs.asdict(data.options))
    start = None if data.start is None else _start(data.start)
    is_new = await call.access.make_subscription(
        SubscriptionRequest(name, data.patterns, data.mode, start, options)
    )
    return Response(await _described(call, name), status_code=201 if is_new else 200)


@get("/v1/subscriptions", operation_id="listSubscriptions", tags=["work"])
async def list_all(
    request: Request[Any, Any, Any], after: After = "", limit: PageLimit = 0
) -> SubscriptionList:
    """List the subscriptions that you may consume from, or administer, in order of their names."""
    states, is_complete = await call_of(request).access.subscriptions(after=after, limit=limit)
    return SubscriptionList([SubscriptionOut.of(state) for state in states], is_complete)


@get("/v1/subscriptions/{name:str}", operation_id="describeSubscription", tags=["work"])
async def describe(request: Request[Any, Any, Any], name: FromPath[str]) -> SubscriptionOut:
    """Describe a subscription with its partitions."""
    return await _described(call_of(request), name)


@delete(
    "/v1/subscriptions/{name:str}",
    status_code=204,
    operation_id="deleteSubscription",
    tags=["work"],
)
async def remove(request: Request[Any, Any, Any], name: FromPath[str]) -> None:
    """Forget a subscription and everything it was owed. Its dead letters stay."""
    await call_of(request).access.delete_subscription(name)


@post(
    "/v1/subscriptions/{name:str}/pause",
    status_code=204,
    operation_id="pauseSubscription",
    tags=["work"],
)
async def pause(request: Request[Any, Any, Any], name: FromPath[str]) -> None:
    """Pause a subscription: nothing more is delivered for now. Leased messages stay leased."""
    await call_of(request).access.pause_subscription(name, is_paused=True)


@post(
    "/v1/subscriptions/{name:str}/resume",
    status_code=204,
    operation_id="resumeSubscription",
    tags=["work"],
)
async def resume(request: Request[Any, Any, Any], name: FromPath[str]) -> None:
    """Resume a paused subscription."""
    await call_of(request).access.pause_subscription(name, is_paused=False)


@post(
    "/v1/subscriptions/{name:str}/move",
    status_code=204,
    operation_id="moveSubscription",
    tags=["work"],
)
async def move(
    request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[MoveIn]
) -> None:
    """Move a subscription to another start. Leases end, and do not count as failed."""
    await call_of(request).access.move_subscription(name, _start(data.start), data.member)


@delete(
    "/v1/subscriptions/{name:str}/members/{member:str}",
    status_code=204,
    operation_id="removeMember",
    tags=["work"],
)
async def remove_member(
    request: Request[Any, Any, Any], name: FromPath[str], member: FromPath[str]
) -> None:
    """Remove a member of a multicast: it is no longer owed any message."""
    await call_of(request).access.remove_member(name, member)


subscription_handlers: list[ControllerRouterHandler] = [
    make,
    list_all,
    describe,
    remove,
    pause,
    resume,
    move,
    remove_member,
]
