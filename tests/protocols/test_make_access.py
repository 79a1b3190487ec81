"""Every listener makes its callers' accesses with what it was opened with, and says who asks and for how much."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import runnel
from runnel.broker.access import Access, MakeAccess, Scope, local_access
from runnel.config import IN_MEMORY, GrpcSettings, HttpSettings, NativeSettings, Settings
from runnel.formats import wire
from runnel.protocols.native.greeting import scope_of
from runnel.protocols.native.listener import Listener
from runnel.security.authenticator import AuthenticatedClient
from tests.conformance.clients.grpc_bus import connect_grpc
from tests.conformance.clients.http_bus import connect_http
from tests.protocols.guarded import LISTENER_CLASSES
from tests.security.keyring import Keyring

OPENED: dict[str, Any] = {"native": Listener, **LISTENER_CLASSES}


class Recorded:
    """Makes local accesses, and keeps whom they were made for."""

    def __init__(self, make: MakeAccess) -> None:
        self._make = make
        self.callers: list[tuple[str | None, Scope]] = []

    def __call__(
        self, client: AuthenticatedClient, peer: str, scope: Scope = Scope.CLUSTER
    ) -> Access:
        assert peer.startswith("127.0.0.1:")
        self.callers.append((client.token, scope))
        return self._make(client, peer, scope)


@pytest.mark.parametrize("name", OPENED)
def test_a_listener_hands_the_token_on_and_takes_what_it_is_given(
    name: str, tmp_path: Path
) -> None:
    keys = Keyring(tmp_path)
    token = keys.add("tester", "read:*", "publish:*")

    async def run() -> Sequence[tuple[str | None, Scope]]:
        settings = keys.settings(
            Settings(
                data=IN_MEMORY,
                native=NativeSettings(listen="127.0.0.1:0"),
                http=HttpSettings(listen="127.0.0.1:0"),
                grpc=GrpcSettings(listen="127.0.0.1:0"),
            )
        )
        async with runnel.Broker.open(settings) as broker:
            made = Recorded(local_access(broker._core))
            listener = await OPENED[name].open(broker._core, broker._authenticator, settings, made)
            try:
                clients: dict[str, Any] = {
                    "native": lambda: runnel.connect(f"runnel://{listener.address}", token=token),
                    "http": lambda: connect_http(listener.address, token),
                    "grpc": lambda: connect_grpc(listener.address, token),
                }
                async with clients[name]() as bus:
                    await bus.publish("a", b"x")
            finally:
                await listener.close()
            return made.callers

    callers = asyncio.run(run())
    assert callers
    assert {token for token, _ in callers} == {token}


@pytest.mark.parametrize(
    ("features", "scope"),
    [
        ((), Scope.CLUSTER),
        (("something", "of", "a later version"), Scope.CLUSTER),
        ((wire.PARTS,), Scope.PARTS),
        ((wire.PART_ONLY,), Scope.NODE),
        ((wire.PARTS, wire.PART_ONLY), Scope.NODE),
    ],
)
def test_a_client_says_in_its_hello_for_how_much_of_a_cluster_it_asks(
    features: tuple[str, ...], scope: Scope
) -> None:
    assert scope_of(wire.Hello(1, 1, features)) is scope
