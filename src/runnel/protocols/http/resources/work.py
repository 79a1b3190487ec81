"""The resources for acknowledged work: take messages, acknowledge or reject them, extend their leases."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, delete, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.types import ControllerRouterHandler
from msgspec import UNSET, UnsetType

from runnel.errors import ConnectionLostError, LateAckError, UnknownSubscriptionError
from runnel.group_rules.definition import LEASE_NS_MIN
from runnel.protocols.http.consumers.ack_ids import NamedMessages, ack_id, named_messages
from runnel.protocols.http.consumers.polling_consumer import Leased, PollingConsumer, TakeRequest
from runnel.protocols.http.encoding.messages import (
    TIMES_TEXT,
    MessageOut,
    PayloadForm,
    TimeForm,
    message_as,
)
from runnel.protocols.http.encoding.parameters import Duration, duration_ns, time_text_if_set
from runnel.protocols.http.encoding.problems import FieldFault
from runnel.protocols.http.resources.dead_letters import dead_letter_handlers
from runnel.protocols.http.resources.subscriptions import subscription_handlers
from runnel.protocols.http.server.answers import Answer, encode_json
from runnel.protocols.http.server.calls import HttpCall, call_of
from runnel.topics.names import check_text

_NS_PER_SECOND: Final = 1_000_000_000
_MESSAGES_MAX: Final = 1000
_BYTES_MAX: Final = 16 * 2**20
_BYTES_USUAL: Final = 2**20
_WAIT_NS_MAX: Final = 60 * _NS_PER_SECOND
# A request without `wait` still waits this long for the disk: stored messages may have to be read.
_DISK_SECONDS: Final = 0.05


class LeasedMessage(MessageOut, frozen=True, omit_defaults=True, gc=False):
    """A leased message, acknowledged by its `ack`. `attempt` is 1, or more if it failed before."""

    first_delivery_ns: int | UnsetType = UNSET
    """When it was first delivered, if it was delivered before."""
    first_delivery: str | UnsetType = UNSET


class Consumed(msgspec.Struct, frozen=True):
    """Messages that are leased to a consumer. Empty: none came within the waiting time."""

    consumer: str
    messages: Sequence[LeasedMessage]


class AckIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages, by the `ack` that each came with."""

    acks: Sequence[str]


class NackIn(AckIn, frozen=True, forbid_unknown_fields=True):
    """Messages that failed. Without a delay, the subscription's own applies."""

    delay: float | str | None = None
    reason: str = ""


class ExtendIn(AckIn, frozen=True, forbid_unknown_fields=True):
    """Messages that are still being worked on. Without a lease, the subscription's own applies."""

    lease: float | str | None = None


class Acked(msgspec.Struct, frozen=True):
    """`late`: messages whose lease has ended, or that were settled otherwise. Acknowledging twice is not late."""

    acked: int
    late: Sequence[str]


class Nacked(msgspec.Struct, frozen=True):
    """`late`: messages whose lease has ended, or that were settled otherwise."""

    nacked: int
    late: Sequence[str]


class Extended(msgspec.Struct, frozen=True):
    """`late`: messages whose lease has ended, or that were settled otherwise."""

    extended: int
    late: Sequence[str]


@post(
    "/v1/subscriptions/{name:str}/messages",
    status_code=200,
    operation_id="consume",
    tags=["work"],
    responses={200: ResponseSpec(Consumed, description="The messages, if there are any.")},
)
async def consume(
    request: Request[Any, Any, Any],
    name: FromPath[str],
    limit: Annotated[
        int, QueryParameter(ge=1, le=_MESSAGES_MAX, description="Maximum number of messages.")
    ] = 1,
    bytes_max: Annotated[
        int,
        QueryParameter(
            name="bytes",
            ge=1,
            le=_BYTES_MAX,
            description="Approximate size of the answer in bytes; at least one message is returned.",
        ),
    ] = _BYTES_USUAL,
    wait: Annotated[
        Duration | None,
        QueryParameter(
            description="If there is no message: how long to wait for one, in seconds or with a unit, up to a minute."
        ),
    ] = None,
    lease: Annotated[
        Duration | None,
        QueryParameter(
            description="How long the messages are yours, instead of the subscription's own lease."
        ),
    ] = None,
    member: Annotated[
        str, QueryParameter(description="In a multicast: the member to take messages for.")
    ] = "",
    consumer: Annotated[
        str,
        QueryParameter(
            description="A name of your own, so that in a key_shared subscription the keys that you have stay with "
            "you. Without one you are given one. Clients with another token cannot use it."
        ),
    ] = "",
    payload: Annotated[
        PayloadForm, QueryParameter(description="The form of the payloads.")
    ] = PayloadForm.AUTO,
    times: Annotated[TimeForm, QueryParameter(description=TIMES_TEXT)] = TimeForm.NS,
) -> Answer:
    """Take messages that are not acknowledged yet: they are leased to you until you acknowledge them."""
    call = call_of(request)
    wait_ns = min(duration_ns("wait", wait), _WAIT_NS_MAX)
    wanted = TakeRequest(limit, bytes_max, _lease_ns("lease", lease))
    if consumer:
        check_text("consumer", consumer)
    consumers = call.server.polling_consumers
    owned = await consumers.find(call, name, member, consumer)
    polling = owned.polling
    try:
        found = await polling.take(wanted, may_wait=False)
        if not found:
            found = await _wait(call, polling, wanted, wait_ns)
        if found and call.connection.transport.is_closing():
            polling.give_back(found)
            raise ConnectionLostError("the client has gone")
    finally:
        consumers.release(polling)
    flow = call.flow
    flow.messages_out += len(found)
    flow.bytes_out += sum([each.message.size for each in found])
    messages = [_leased_message(polling.id, each, payload, times) for each in found]
    return Answer(encode_json(Consumed(owned.name, messages)))


def _leased_message(
    consumer_id: str, leased: Leased, form: PayloadForm, times: TimeForm
) -> LeasedMessage:
    ack = ack_id(consumer_id, leased.delivery, leased.message.offset)
    before = leased.before
    attempt = 1 if before is None else before.failures + 1
    out = message_as(LeasedMessage, leased.message, form, times, ack=ack, attempt=attempt)
    if before is None:
        return out
    first_ns = before.first_delivery_ns
    first = time_text_if_set(first_ns) if times is TimeForm.RFC_3339 else UNSET
    return msgspec.structs.replace(out, first_delivery_ns=first_ns, first_delivery=first)


async def _wait(
    call: HttpCall, polling: PollingConsumer, wanted: TakeRequest, wait_ns: int
) -> list[Leased]:
    """Messages that come within the time, or before the listener closes. A client that has disconnected gets none."""
    loop, clock = call.server.loop, call.server.broker.clock
    with call.server.enter_stream():
        taking = loop.create_task(polling.take(wanted, may_wait=True))
        sleeping: asyncio.Task[None] = loop.create_task(
            clock.sleep(wait_ns / _NS_PER_SECOND) if wait_ns else asyncio.sleep(_DISK_SECONDS)
        )
        ending = loop.create_task(call.ended.wait())
        waited = {taking, sleeping, ending}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waited:
                task.cancel()
            await asyncio.wait(waited)
    if not taking.cancelled() and (error := taking.exception()) is not None:
        raise error
    found = [] if taking.cancelled() else taking.result()
    if call.why_ended is None:
        return found or await polling.take(
            wanted, may_wait=False
        )  # messages that came at the last moment
    if call.server.is_closing:
        return found
    polling.give_back(found)
    raise call.why_ended


@post(
    "/v1/subscriptions/{name:str}/ack",
    status_code=200,
    operation_id="ack",
    tags=["work"],
    responses={200: ResponseSpec(Acked, description="Stored.")},
)
async def ack(
    request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[AckIn]
) -> Answer:
    """Acknowledge messages. Answered once that is stored.

    If no answer comes, repeat the request: messages acknowledged within the last minute count as acknowledged.
    """
    call = call_of(request)
    found = named_messages(call, call.server.polling_consumers, name, data.acks, verb="ack")
    for owned, offsets in found.by_consumer.values():
        _note_late(found, owned.polling, owned.polling.ack(offsets))
    await _wait_stored(call, found)
    return Answer(encode_json(Acked(*_count_in_time(found))))


@post("/v1/subscriptions/{name:str}/nack", status_code=200, operation_id="nack", tags=["work"])
async def nack(
    request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[NackIn]
) -> Nacked:
    """Reject messages that failed: they are delivered again after a delay, or become dead letters."""
    call = call_of(request)
    delay_ns = _duration_in("$.delay", data.delay)
    found = named_messages(call, call.server.polling_consumers, name, data.acks, verb="nack")
    for owned, offsets in found.by_consumer.values():
        late = owned.polling.nack(offsets, delay_ns=delay_ns, reason=data.reason)
        _note_late(found, owned.polling, late)
    await _wait_stored(call, found)
    return Nacked(*_count_in_time(found))


@post("/v1/subscriptions/{name:str}/extend", status_code=200, operation_id="extend", tags=["work"])
async def extend(
    request: Request[Any, Any, Any], name: FromPath[str], data: JSONBody[ExtendIn]
) -> Extended:
    """Renew the leases of messages from now on, together with the others of the same delivery."""
    call = call_of(request)
    lease_ns = _duration_in("$.lease", data.lease)
    _check_lease("$.lease", lease_ns)
    found = named_messages(call, call.server.polling_consumers, name, data.acks, verb="extend")
    for owned, offsets in found.by_consumer.values():
        _note_late(found, owned.polling, owned.polling.extend(offsets, lease_ns))
    return Extended(*_count_in_time(found))


@delete(
    "/v1/subscriptions/{name:str}/consumers/{consumer:str}",
    status_code=204,
    operation_id="leave",
    tags=["work"],
)
async def leave(
    request: Request[Any, Any, Any], name: FromPath[str], consumer: FromPath[str]
) -> None:
    """End a consumer. Its leased messages go to others at once, and do not count as failed."""
    call = call_of(request)
    found = call.server.polling_consumers.named(call, name, consumer)
    if not found:
        raise UnknownSubscriptionError(
            f"subscription {name!r} has no consumer {consumer!r} of yours"
        )
    for owned in found:
        owned.polling.close()


# --- Shared by the handlers ---


def _note_late(found: NamedMessages, polling: PollingConsumer, late: set[tuple[int, int]]) -> None:
    found.late += [ack_id(polling.id, *each) for each in sorted(late)]


async def _wait_stored(call: HttpCall, found: NamedMessages) -> None:
    """Wait until everything is stored. Raises the error if storing fails."""
    for owned, _ in found.by_consumer.values():
        await owned.polling.consumer.wait_stored()
        call.server.polling_consumers.release(owned.polling)


def _count_in_time(found: NamedMessages) -> tuple[int, list[str]]:
    in_time = found.count - len(found.late)
    if not in_time:
        raise LateAckError(
            "the lease of each of these has ended, or they were settled otherwise, or this broker never gave them"
        )
    return in_time, found.late


def _duration_in(field: str, given: float | str | None) -> int | None:
    if given is None:
        return None
    if isinstance(given, str):
        return duration_ns(field, given)
    if not 0 <= given < 1e9:
        raise FieldFault(field, f"{given} is no number of seconds from 0 on")
    return round(given * _NS_PER_SECOND)


def _lease_ns(field: str, given: str | None) -> int | None:
    lease_ns = None if given is None else duration_ns(field, given)
    _check_lease(field, lease_ns)
    return lease_ns


def _check_lease(field: str, lease_ns: int | None) -> None:
    if lease_ns is not None and lease_ns < LEASE_NS_MIN:
        raise FieldFault(field, f"a lease is {LEASE_NS_MIN // 1_000_000} ms or longer")


work_handlers: list[ControllerRouterHandler] = [
    consume,
    ack,
    nack,
    extend,
    leave,
    *subscription_handlers,
    *dead_letter_handlers,
]
