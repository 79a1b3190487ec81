"""The methods of acknowledged subscriptions and their dead letters, except Consume (`consume_stream`)."""

from __future__ import annotations

from typing import Final

from runnel.broker.consumer_groups import SettleRequest, SubscriptionRequest
from runnel.errors import ClientFault, LimitExceededError, UnknownSubscriptionError
from runnel.formats import work_heads as heads
from runnel.protocols.grpc.encoding.messages import block_of, is_blocks, natural, proto_messages
from runnel.protocols.grpc.encoding.options import (
    mode_of,
    options_of,
    proto_mode,
    proto_options,
    start_of,
)
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.server.calls import GrpcCall

_DEAD_LISTED: Final = 100
# How many dead letters one call may name.
_OFFSETS_MAX: Final = 100_000


async def make_subscription(
    call: GrpcCall, request: pb.MakeSubscriptionRequest
) -> pb.MakeSubscriptionResponse:
    mode = mode_of(request.mode) or await _mode_of_existing(call, request.name)
    wanted = SubscriptionRequest(
        request.name,
        tuple(request.patterns),
        mode,
        start_of(request.start),
        options_of(request.options) if request.HasField("options") else None,
    )
    await call.complete(call.access.make_subscription(wanted))
    return pb.MakeSubscriptionResponse()


async def _mode_of_existing(call: GrpcCall, name: str) -> str:
    """The mode if the request has none. There is no default for a new subscription."""
    try:
        known = await call.access.subscription(name)
    except UnknownSubscriptionError:
        raise ClientFault(
            f"mode: subscription {name!r} does not exist; say whether to make it MODE_SHARED, MODE_KEY_SHARED or "
            "MODE_MULTICAST"
        ) from None
    return known.mode


async def list_subscriptions(
    call: GrpcCall, request: pb.ListSubscriptionsRequest
) -> pb.ListSubscriptionsResponse:
    if request.name:
        one = await call.access.subscription(request.name)
        return pb.ListSubscriptionsResponse(subscriptions=[_proto_subscription(one)])
    known, is_complete = await call.access.subscriptions(after=request.after, limit=request.limit)
    return pb.ListSubscriptionsResponse(
        subscriptions=map(_proto_subscription, known), has_more=not is_complete
    )


async def delete_subscription(
    call: GrpcCall, request: pb.DeleteSubscriptionRequest
) -> pb.DeleteSubscriptionResponse:
    await call.complete(call.access.delete_subscription(request.name))
    return pb.DeleteSubscriptionResponse()


async def pause_subscription(
    call: GrpcCall, request: pb.PauseSubscriptionRequest
) -> pb.PauseSubscriptionResponse:
    pausing = call.access.pause_subscription(request.name, is_paused=request.is_paused)
    await call.complete(pausing)
    return pb.PauseSubscriptionResponse()


async def move_subscription(
    call: GrpcCall, request: pb.MoveSubscriptionRequest
) -> pb.MoveSubscriptionResponse:
    start = start_of(request.start)
    if start is None:
        raise ClientFault("start: say where the subscription is to go on; start.kind is not set")
    member = request.member if request.HasField("member") else None
    await call.complete(call.access.move_subscription(request.name, start, member))
    return pb.MoveSubscriptionResponse()


async def remove_member(call: GrpcCall, request: pb.RemoveMemberRequest) -> pb.RemoveMemberResponse:
    await call.complete(call.access.remove_member(request.name, request.member))
    return pb.RemoveMemberResponse()


async def list_dead_letters(
    call: GrpcCall, request: pb.ListDeadLettersRequest
) -> pb.ListDeadLettersResponse:
    as_blocks = is_blocks(request.format)
    batches, next_offset = await call.access.dead_letters(
        request.subscription,
        natural("offset", request.offset),
        natural("messages_max", request.messages_max) or _DEAD_LISTED,
    )
    if as_blocks:
        return pb.ListDeadLettersResponse(blocks=map(block_of, batches), next_offset=next_offset)
    messages = [message for batch in batches for message in proto_messages(batch)]
    return pb.ListDeadLettersResponse(messages=messages, next_offset=next_offset)


async def settle_dead_letters(
    call: GrpcCall, request: pb.SettleDeadLettersRequest
) -> pb.SettleDeadLettersResponse:
    actions = (request.ACTION_REDRIVE, request.ACTION_DROP)
    if request.action not in actions:
        raise ClientFault("action: say whether to send them back (1) or to drop them (2)")
    if len(request.offsets) > _OFFSETS_MAX:
        raise LimitExceededError(
            f"{len(request.offsets):,} offsets; at most {_OFFSETS_MAX:,} fit into one call"
        )
    for offset in request.offsets:
        natural("offsets", offset)
    wanted = SettleRequest(
        request.subscription,
        tuple(request.offsets),
        is_all=request.all,
        is_redriven=request.action == request.ACTION_REDRIVE,
    )
    settled = await call.complete(call.access.settle_dead(wanted))
    return pb.SettleDeadLettersResponse(settled=settled)


def _proto_subscription(state: heads.SubscriptionState) -> pb.Subscription:
    members = [
        pb.Member(
            name=member.name,
            consumers=member.consumers,
            backlog=member.backlog,
            in_flight=member.in_flight,
            delayed=member.delayed,
            oldest_ns=member.oldest_ns,
            absent_ns=member.absent_ns,
        )
        for member in state.members
    ]
    partitions = [
        pb.PartitionWork(
            member=place.member,
            topic=place.topic,
            partition=place.partition,
            floor=place.floor,
            next_offset=place.next_offset,
            acked_beyond=place.acked_beyond,
            in_flight=place.in_flight,
        )
        for place in state.partitions
    ]
    return pb.Subscription(
        name=state.name,
        mode=proto_mode(state.mode),
        patterns=state.patterns,
        is_paused=state.is_paused,
        made_ns=state.made_ns,
        options=proto_options(state.options),
        members=members,
        redelivered=state.redelivered,
        dead=state.dead,
        partitions=partitions,
    )
