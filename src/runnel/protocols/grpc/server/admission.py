"""Who is let in at the gRPC door, with which rights, and how many at a time."""

from __future__ import annotations

from typing import Final

from runnel.errors import LimitExceededError, UnauthenticatedError
from runnel.protocols.grpc.server.calls import Call, Context, peer_of, token_of
from runnel.protocols.grpc.server.connections import GrpcDoor

# Calls with a wrong token that wait for their answer; beyond that they are answered at once.
_PUNISHED_MAX: Final = 256


async def enter(door: GrpcDoor, context: Context) -> Call:
    """Let a call in. Its task is the one that asks, and in the end says `leave`."""
    counters = door.broker.metrics.counters
    counters.requests += 1
    if door.refusal is not None:
        raise door.refusal
    peer = peer_of(context)
    try:
        given = door.gate.admit(token_of(context))
    except UnauthenticatedError as error:
        await _punish(door, error, peer)
        raise
    calls_max = door.settings.grpc.calls_max
    if len(door.calls) >= calls_max:
        given.leave()
        counters.connections_refused += 1
        raise LimitExceededError(
            f"the broker has {calls_max} calls under way; no more are allowed (grpc.calls_max)"
        )
    call = Call(door, context, peer, next(door.broker.connection_ids), given)
    door.add(call)
    return call


async def _punish(door: GrpcDoor, error: UnauthenticatedError, peer: str) -> None:
    if door.punished < _PUNISHED_MAX:
        door.punished += 1
        try:
            await door.gate.penalty(error, peer.rpartition(":")[0])
        finally:
            door.punished -= 1
