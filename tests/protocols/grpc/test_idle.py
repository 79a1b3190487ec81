"""A connection without calls does not stay open for ever."""

from __future__ import annotations

import asyncio

from grpc import ChannelConnectivity

from runnel.config import GrpcSettings
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import channel, opened, run
from tests.protocols.grpc.stub import Stub

IDLE_NS = 200_000_000


def test_connection_without_a_call_is_closed_and_the_next_call_opens_it_again() -> None:
    async def scenario() -> None:
        settings = GrpcSettings(listen="127.0.0.1:0", idle_timeout_ns=IDLE_NS)
        async with opened(settings) as scene, channel(scene) as connection:
            stub = Stub(connection)
            await stub.Ping(pb.PingRequest())
            state = ChannelConnectivity.READY
            while state is ChannelConnectivity.READY:
                await asyncio.wait_for(connection.wait_for_state_change(state), 30)
                state = connection.get_state()
            assert state is ChannelConnectivity.IDLE
            await stub.Ping(pb.PingRequest())

    run(scenario())
