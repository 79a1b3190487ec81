"""Admits calls to the gRPC listener: authenticates them and limits their number."""

from __future__ import annotations

from typing import Final

from runnel.errors import LimitExceededError, UnauthenticatedError
from runnel.protocols.grpc.server.calls import Context, GrpcCall, peer_of, token_of
from runnel.protocols.grpc.server.grpc_server import GrpcServer

# Calls with a wrong token whose answers are delayed at a time. Further ones are answered at once.
_PUNISHED_MAX: Final = 256


async def enter(server: GrpcServer, context: Context) -> GrpcCall:
    """Admit a call. The calling task is the call's own; it calls `leave` at its end."""
    counters = server.broker.metrics.counters
    counters.requests += 1
    if server.refusal is not None:
        raise server.refusal
    peer = peer_of(context)
    try:
        authenticated = server.authenticator.admit(token_of(context))
    except UnauthenticatedError as error:
        await _punish(server, error, peer)
        raise
    calls_max = server.settings.grpc.calls_max
    if len(server.calls) >= calls_max:
        authenticated.leave()
        counters.connections_refused += 1
        raise LimitExceededError(
            f"the broker has {calls_max} calls under way; no more are allowed (grpc.calls_max)"
        )
    call = GrpcCall(server, context, peer, next(server.broker.connection_ids), authenticated)
    server.add(call)
    return call


async def _punish(server: GrpcServer, error: UnauthenticatedError, peer: str) -> None:
    if server.punished < _PUNISHED_MAX:
        server.punished += 1
        try:
            await server.authenticator.penalty(error, peer.rpartition(":")[0])
        finally:
            server.punished -= 1
