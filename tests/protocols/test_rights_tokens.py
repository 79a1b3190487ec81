"""Tokens at every listener: none, wrong, in the wrong place, too many of one, and revoked while in use."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from runnel.client import Bus
from runnel.config import HttpSettings
from runnel.errors import LimitExceededError, UnauthenticatedError, Unavailable
from tests.conformance.clients.grpc_bus import GrpcBus
from tests.conformance.clients.http_bus import HttpBus
from tests.protocols.guarded import EVERYTHING, LISTENERS, Guarded, run_guarded

at_every_listener = pytest.mark.parametrize("listener", LISTENERS)
# The native client retries for its configured time, and then reports that it could not connect.
FULL = (LimitExceededError, Unavailable)
STATUS = {"http": 401, "grpc": grpc.StatusCode.UNAUTHENTICATED}


async def turned_away(guarded: Guarded, listener: str, token: str | None) -> UnauthenticatedError:
    """A token that allows nothing."""
    with pytest.raises(UnauthenticatedError) as refusal:
        async with guarded.connecting(listener, token) as bus:
            await bus.publish("a", b"x")
    assert getattr(refusal.value, "status", None) == STATUS.get(listener)
    return refusal.value


async def knows(guarded: Guarded, listener: str, token: str) -> None:
    async with guarded.connecting(listener, token) as bus:
        await bus.topics()


@at_every_listener
def test_without_a_token_nobody_comes_in_and_is_told_how_to_get_one(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        assert "runnel token add" in str(await turned_away(guarded, listener, None))

    run_guarded(scenario, listener)


@at_every_listener
def test_wrong_token_is_refused_and_shown_to_nobody(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        right = guarded.token(*EVERYTHING)
        _, token_id, secret = right.split("_", 2)
        for wrong in (
            secret,
            f"runnel_{token_id}_{secret[:-1]}",
            f"runnel_{'0' * len(token_id)}_{secret}",
            f"Runnel_{token_id}_{secret}",
            "x" * 5000,
        ):
            text = str(await turned_away(guarded, listener, wrong))
            assert wrong not in text
            assert secret not in text
        await knows(guarded, listener, right)

    run_guarded(scenario, listener)


@at_every_listener
def test_token_is_good_as_soon_as_it_is_made_and_no_longer_than_until_it_is_revoked(
    listener: str,
) -> None:
    async def scenario(guarded: Guarded) -> None:
        token = guarded.token(*EVERYTHING)
        await knows(guarded, listener, token)
        guarded.revoke(token)
        await turned_away(guarded, listener, token)

    run_guarded(scenario, listener)


# --- In the wrong place ---


def test_token_is_taken_from_the_header_alone_but_for_streams() -> None:
    async def scenario(guarded: Guarded) -> None:
        token = guarded.token(*EVERYTHING)
        bus = HttpBus(guarded.addresses["http"], None, guarded.clock.time_ns)
        async with bus:
            for headers in (
                {"authorization": token},
                {"authorization": f"Basic {token}"},
                {"x-api-key": token},
                {"cookie": f"access_token={token}"},
            ):
                with pytest.raises(UnauthenticatedError):
                    await bus.transport.ask("GET", "/v1/topics", headers=headers)
            with pytest.raises(UnauthenticatedError):
                await bus.transport.ask("GET", "/v1/topics", {"access_token": token})
            answer = await bus.transport.listen(
                "/v1/stream", {"pattern": "a", "access_token": token}
            )
            await answer.aclose()
            with pytest.raises(UnauthenticatedError):
                await bus.transport.listen("/v1/stream", {"pattern": "a"})

    run_guarded(scenario, "http")


def test_token_is_taken_from_the_metadata_authorization_alone() -> None:
    async def scenario(guarded: Guarded) -> None:
        token = guarded.token(*EVERYTHING)
        for metadata in (
            ("authorization", token),
            ("authorization", f"Basic {token}"),
            ("token", token),
            ("x-authorization", f"Bearer {token}"),
        ):
            bus = GrpcBus(guarded.addresses["grpc"], None, guarded.clock.time_ns)
            bus.transport._metadata = (metadata,)
            async with bus:
                with pytest.raises(UnauthenticatedError):
                    await bus.topics()

    run_guarded(scenario, "grpc")


# --- Open to all ---


def test_health_and_what_the_listener_can_do_are_told_without_a_token() -> None:
    async def scenario(guarded: Guarded) -> None:
        async with HttpBus(guarded.addresses["http"], None, guarded.clock.time_ns) as bus:
            for path in ("/healthz", "/readyz", "/openapi.json", "/docs"):
                answer = await bus.transport.listen(path, ())
                assert answer.status_code == 200, path
                await answer.aclose()
            for path in ("/metrics", "/v1/topics", "/v1/statistics", "/v1/nowhere", "/nowhere"):
                with pytest.raises(UnauthenticatedError):
                    await bus.transport.listen(path, ())

    run_guarded(scenario, "http")


def test_standard_health_service_answers_without_a_token() -> None:
    async def scenario(guarded: Guarded) -> None:
        async with aio.insecure_channel(guarded.addresses["grpc"]) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            answer = await check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    run_guarded(scenario, "grpc")


# --- Too many of one ---


async def stay(bus: Bus) -> Any:
    """Be inside for longer than a call."""
    subscription = bus.subscribe("a")
    await subscription.open()
    return subscription


async def is_full(guarded: Guarded, listener: str, token: str) -> bool:
    try:
        await knows(guarded, listener, token)
    except FULL:
        return True
    return False


@at_every_listener
def test_token_has_so_many_connections_or_calls_and_no_more(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        token = guarded.token(*EVERYTHING, connections_max=2)
        async with (
            guarded.connecting(listener, token) as one,
            guarded.connecting(listener, token) as two,
        ):
            staying = [await stay(one), await stay(two)]
            with pytest.raises(FULL, match="2 connections or calls"):
                await knows(guarded, listener, token)
            await knows(guarded, listener, guarded.token(*EVERYTHING))  # others are not concerned
            await staying[1].close()
            if listener == "native":
                await two.close()
            while await is_full(
                guarded, listener, token
            ):  # the broker soon notices that a client has left
                pass
            await staying[0].close()

    run_guarded(scenario, listener)


# --- Revoked while inside ---


@at_every_listener
def test_revoked_token_ends_streams_and_work_that_are_under_way(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        token = guarded.token(*EVERYTHING)
        async with (
            guarded.connecting(listener, token) as bus,
            guarded.connecting(listener, token) as other,
        ):
            subscription = bus.subscribe("a")
            await subscription.open()
            consumer = other.consume("s", "a", lease_s=3600, deliveries_max=1)
            await consumer.open()
            await root.publish("a", b"1")
            assert (await anext(subscription)).payload == b"1"
            assert (await anext(consumer)).payload == b"1"
            guarded.revoke(token)
            for waiting in (subscription, consumer):
                with pytest.raises(UnauthenticatedError, match="revoked"):
                    await anext(waiting)
            await turned_away(guarded, listener, token)
        # What it had been given to do is for others now, at once, and did not fail.
        async with root.consume("s") as consumer:
            work = await anext(consumer)
            assert (work.payload, work.failures) == (b"1", 0)

    run_guarded(scenario, listener)


@at_every_listener
def test_revoked_token_ends_a_fetch_that_waits(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        await root.publish("a", b"1")
        token = guarded.token(*EVERYTHING)
        async with guarded.connecting(listener, token) as bus:
            waiting = asyncio.ensure_future(bus.fetch("a", 2, wait_s=50))
            while not (await root.statistics())["gauges"]["fetches_waiting"]:
                pass
            guarded.revoke(token)
            with pytest.raises(UnauthenticatedError):
                await waiting

    run_guarded(scenario, listener)


def test_one_token_has_a_part_of_the_polling_consumers_and_not_those_of_others() -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        await root.make_subscription("s", "a", mode="key_shared")
        for number in range(4):
            await root.publish("a", b"%d" % number, key=b"%d" % number)

        async def take(token: str, consumer: str) -> httpx.Response:
            return await client.post(
                f"{address}/v1/subscriptions/s/messages?lease=3600&consumer={consumer}",
                headers={"Authorization": f"Bearer {token}"},
            )

        address = f"http://{guarded.addresses['http']}"
        greedy, other = guarded.token(*EVERYTHING), guarded.token(*EVERYTHING)
        async with httpx.AsyncClient() as client:
            for consumer in ("c1", "c2"):
                assert len((await take(greedy, consumer)).json()["messages"]) == 1
            refused = await take(greedy, "c3")
            assert (refused.status_code, refused.json()["code"]) == (429, "limit_exceeded")
            assert len((await take(other, "c3")).json()["messages"]) == 1

    run_guarded(scenario, "http", http=HttpSettings(consumers_max=8))
