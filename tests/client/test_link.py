"""Connecting, staying connected, and the errors when that fails."""

from __future__ import annotations

import asyncio
import re

import pytest

from runnel.client import Bus, connect, connect_blocking
from runnel.client.connection import Deadline, parse_host, parse_url
from runnel.client.connection.connection import listener_kind
from runnel.errors import (
    ClientFault,
    ClosedError,
    ConnectionLostError,
    DiskFullError,
    HandshakeError,
    RunnelError,
    TimeoutExpiredError,
    Unavailable,
)
from runnel.formats import wire
from tests.client.fake_server import FakeServer, Peer, refusing, silent
from tests.client.running import FakeTimers, in_both_loops, until

# --- The first connection ---


@in_both_loops
async def test_a_broker_that_is_not_there_is_reported_with_its_address_and_what_to_do() -> None:
    async with FakeServer() as server:
        url = server.url
    with pytest.raises(Unavailable, match=rf"{url[9:]}: connection refused.*runnel serve"):
        await connect(url)


@in_both_loops
async def test_a_broker_that_does_not_answer_is_given_up() -> None:
    async with FakeServer() as server:
        server.on(wire.Hello, silent)
        with pytest.raises(TimeoutExpiredError, match=r"no answer within 0\.01 s"):
            await connect(server.url, connect_timeout_s=0.01)


@in_both_loops
async def test_another_version_of_the_protocol_is_an_error_of_its_own() -> None:
    async with FakeServer() as server:
        server.on(wire.Hello, refusing("handshake", retriable=False))
        with pytest.raises(HandshakeError):
            await connect(server.url)

        def newer(peer: Peer, request: wire.Hello, tail: memoryview) -> None:
            peer.say(wire.Welcome(request.id, 9, (), "", "", "", 1, 1, 1, 1))

        server.on(wire.Hello, newer)
        with pytest.raises(HandshakeError, match="version 9"):
            await connect(server.url)


@in_both_loops
async def test_a_connection_that_is_refused_says_why() -> None:
    async with FakeServer() as server:

        def refuse(peer: Peer, request: wire.Hello, tail: memoryview) -> None:
            peer.say(wire.Error(0, "limit_exceeded", "too many connections", retriable=False))
            peer.transport.close()

        server.on(wire.Hello, refuse)
        with pytest.raises(RunnelError, match="too many connections"):
            await connect(server.url)


@in_both_loops
async def test_a_broker_that_is_full_is_asked_again_within_the_time_to_connect() -> None:
    async with FakeServer() as server:
        hellos = 0
        refused_max = 3

        def refuse(peer: Peer, request: wire.Hello, tail: memoryview) -> None:
            nonlocal hellos
            hellos += 1
            if hellos == refused_max:
                server.usual(wire.Hello)
            peer.say(wire.Error(0, "busy", "all places are taken", retriable=True))
            peer.transport.close()

        server.on(wire.Hello, refuse)
        async with await connect(server.url):
            assert hellos == 3
        refused_max = 1_000_000
        server.on(wire.Hello, refuse)
        with pytest.raises(Unavailable, match="all places are taken"):
            await connect(server.url, connect_timeout_s=0.5)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "this is an HTTP listener, not the native one"),
        (bytes.fromhex("000012 04 00 00000000 000500004000"), "this is a gRPC listener, not the"),
    ],
)
@in_both_loops
async def test_another_listener_is_called_by_its_name_and_not_tried_again(
    answer: bytes, problem: str
) -> None:
    async with FakeServer() as server:
        server.on(wire.Hello, lambda peer, request, tail: peer.transport.write(answer))
        with pytest.raises(HandshakeError, match=f"{problem}.* usually listens on 7470"):
            await connect(server.url)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTT",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        bytes.fromhex("000012 04"),
        bytes.fromhex("000012 01 00 00000000"),
        wire.encode(wire.Pong(1, 1)),
    ],
)
def test_what_no_listener_begins_with_is_called_nothing(answer: bytes) -> None:
    assert listener_kind(memoryview(answer)) is None


@in_both_loops
async def test_hello_says_who_the_client_is() -> None:
    async with (
        FakeServer() as server,
        connect(server.url, name="authenticator", token="secret") as bus,
    ):
        (hello,) = server.asked(wire.Hello)
        assert re.fullmatch(r"runnel-python/\S+ authenticator", hello.client)
        assert hello.token == "secret"
        assert bus.server.node == "node-1"


@in_both_loops
async def test_connecting_can_be_cancelled_in_any_turn_of_the_loop() -> None:
    async with FakeServer() as server:
        for turns in range(100):
            connecting = asyncio.ensure_future(_connected(server.url))
            for _ in range(turns):
                await asyncio.sleep(0)
            is_done = connecting.done()
            connecting.cancel()
            await asyncio.wait((connecting,))  # ends: a hang is cut short by the test's own timeout
            if is_done:
                await (await connecting).close()
            else:
                assert connecting.cancelled()
            await until(lambda: not server.peers)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            if is_done:
                return
    pytest.fail("it did not connect at all")


async def _connected(url: str) -> Bus:
    return await connect(url)


# --- Staying connected ---


@in_both_loops
async def test_requests_wait_for_a_lost_connection() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        await server.stop()
        await until(lambda: not bus.is_connected)
        pinging = asyncio.ensure_future(bus.ping())
        await asyncio.sleep(0)
        await server.start()
        assert await pinging >= 0


@in_both_loops
async def test_a_question_is_asked_again_when_the_connection_is_lost_under_it() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Ping, silent)
        pinging = asyncio.ensure_future(bus.ping())
        await until(lambda: server.asked(wire.Ping))
        server.usual(wire.Ping)
        server.drop()
        await pinging
        assert len(server.asked(wire.Hello)) == 2


@in_both_loops
async def test_a_question_that_loses_every_connection_is_asked_less_and_less_often() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers, deadline_s=20) as bus:
        server.on(wire.Ping, lambda peer, request, tail: peer.transport.close())
        asking = asyncio.ensure_future(bus.ping())
        await timers.advance_until(asking.done)
        with pytest.raises(TimeoutExpiredError, match="pinging: not done within 20 s"):
            await asking
        assert 3 < len(server.asked(wire.Ping)) < 100


@in_both_loops
async def test_a_change_is_not_made_again_when_the_connection_is_lost_under_it() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.DeleteTopic, silent)
        deleting = asyncio.ensure_future(bus.delete_topic("a"))
        await until(lambda: server.asked(wire.DeleteTopic))
        server.drop()
        with pytest.raises(ConnectionLostError, match="done or not"):
            await deleting


@in_both_loops
async def test_a_busy_broker_is_asked_again() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers) as bus:
        server.on(wire.Ping, refusing("busy", retriable=True))
        pinging = asyncio.ensure_future(bus.ping())
        await timers.advance_until(lambda: len(server.asked(wire.Ping)) > 2)
        server.usual(wire.Ping)
        await timers.advance_until(pinging.done)
        await pinging


@in_both_loops
async def test_a_deadline_says_what_was_waited_for_and_the_state_of_the_link() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers, deadline_s=30) as bus:
        await server.stop()
        await until(lambda: not bus.is_connected)
        pinging = asyncio.ensure_future(bus.ping())
        await timers.advance_until(pinging.done)
        expected = (
            rf"pinging: not done within 30 s; not connected to {server.address}: "
            r"connection refused, tried \d+ times"
        )
        with pytest.raises(TimeoutExpiredError, match=expected):
            await pinging


@in_both_loops
async def test_an_answer_that_does_not_come_is_given_up_at_the_deadline() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers, deadline_s=3) as bus:
        server.on(wire.Statistics, silent)
        asking = asyncio.ensure_future(bus.statistics())
        await timers.advance_until(asking.done)
        with pytest.raises(TimeoutExpiredError, match=r"asking for statistics.*connected to"):
            await asking


@in_both_loops
async def test_a_refusal_that_lasts_until_the_deadline_is_raised_itself() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers, deadline_s=0.5) as bus:
        server.on(wire.Send, refusing("disk_full", retriable=True))
        publishing = asyncio.ensure_future(bus.publish("a", b"x"))
        await timers.advance_until(publishing.done)
        with pytest.raises(DiskFullError, match="refused with disk_full"):
            await publishing


@in_both_loops
async def test_a_deadline_after_a_refusal_tells_the_refusal_too() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers, deadline_s=30) as bus:

        def refuse_once(peer: Peer, request: wire.Ping, tail: memoryview) -> None:
            server.on(wire.Ping, silent)
            refusing("disk_full", retriable=True)(peer, request, tail)

        server.on(wire.Ping, refuse_once)
        pinging = asyncio.ensure_future(bus.ping())
        await timers.advance_until(pinging.done)
        with pytest.raises(TimeoutExpiredError, match="refused with disk_full") as caught:
            await pinging
        assert isinstance(caught.value.__cause__, DiskFullError)


@in_both_loops
async def test_routes_of_many_topics_are_asked_for_in_parts() -> None:
    names = [f"t/{number}" for number in range(2500)]
    async with FakeServer() as server, connect(server.url) as bus:
        await bus._router.resolve(names, Deadline(FakeTimers(), None))
        asked = [request.topics for request in server.asked(wire.Routes)]
        assert max(map(len, asked)) <= 1000
        assert [name for part in asked for name in part] == names


@in_both_loops
async def test_attempts_become_rarer() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers) as bus:
        link = bus._router.home
        await server.stop()
        await until(lambda: not bus.is_connected)
        await timers.advance_until(lambda: link._attempts >= 8)
        attempts = link._attempts
        for _ in range(100):
            await timers.advance(0.02)
        assert link._attempts - attempts < 20
        assert "connection refused" in link.state


@in_both_loops
async def test_a_quiet_connection_is_kept_alive() -> None:
    timers = FakeTimers()
    async with FakeServer(idle_timeout_ms=30_000) as server, connect(server.url, timers=timers):
        await timers.advance_until(lambda: len(server.asked(wire.Ping)) >= 3)
        assert timers.monotonic_ns() / 1e9 < 1 + 61
        assert len(server.peers) == 1


@in_both_loops
async def test_a_peer_that_leaves_a_ping_unanswered_is_taken_for_dead() -> None:
    timers = FakeTimers()
    async with (
        FakeServer(idle_timeout_ms=30_000) as server,
        connect(server.url, timers=timers) as bus,
    ):
        server.on(wire.Ping, silent)
        await timers.advance_until(lambda: not bus.is_connected)
        assert "no answer to a ping for 10 s" in bus._router.home.state
        server.usual(wire.Ping)
        await timers.advance_until(lambda: bus.is_connected)


@in_both_loops
async def test_rubbish_from_the_broker_ends_the_connection_and_nothing_else() -> None:
    async with FakeServer() as server, connect(server.url) as bus:

        def rubbish(peer: Peer, request: wire.Ping, tail: memoryview) -> None:
            server.usual(wire.Ping)
            peer.transport.write(b"\x08\0\0\0\x08\0\0\0rubbish!")

        server.on(wire.Ping, rubbish)
        await bus.ping()
        assert len(server.asked(wire.Hello)) == 2


@in_both_loops
async def test_an_answer_of_the_wrong_kind_is_an_error() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Ping, lambda peer, request, _: peer.say(wire.Done(request.id)))
        with pytest.raises(RunnelError, match="Done where Pong"):
            await bus.ping()


@in_both_loops
async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        await server.stop()
        await until(lambda: not bus.is_connected)
        asking = asyncio.ensure_future(bus.ping())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,))
        assert not bus._router.home._waiting


@in_both_loops
async def test_closing_fails_whoever_waits() -> None:
    async with FakeServer() as server:
        bus = await connect(server.url)
        server.on(wire.Ping, silent)
        pinging = asyncio.ensure_future(bus.ping())
        await until(lambda: server.asked(wire.Ping))
        await bus.close()
        with pytest.raises(ClosedError):
            await pinging
        with pytest.raises(ClosedError):
            await bus.ping()
        await until(lambda: not server.peers)


# --- URLs ---


def test_url_of_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    @in_both_loops
    async def scenario() -> None:
        async with FakeServer() as server:
            monkeypatch.setenv("RUNNEL_URL", server.url)
            async with connect() as bus:
                assert repr(bus) == f"<Bus connected to {server.address}>"
            monkeypatch.setenv("RUNNEL_URL", "runnel://127.0.0.1:1")
            async with connect(server.url) as bus:
                assert bus.is_connected

    scenario()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: connection refused"):
        connect_blocking()
    monkeypatch.setenv("RUNNEL_URL", "http://broker")
    with pytest.raises(ClientFault, match="http://broker"):
        connect_blocking()


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_url_the_broker_is_on_this_machine(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNNEL_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("RUNNEL_URL", value)
    assert [each.address for each in connect()._home] == ["127.0.0.1:7470"]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("runnel://127.0.0.1:7000", "127.0.0.1:7000"),
        ("runnel://broker", "broker:7470"),
        ("runnel://broker/", "broker:7470"),
        ("runnel://[::1]:7", "[::1]:7"),
        ("runnels://broker", "broker:7470"),
    ],
)
def test_urls(url: str, address: str) -> None:
    parsed = parse_url(url)
    assert str(parsed) == address
    assert (parsed.ssl is not None) == url.startswith("runnels")


@pytest.mark.parametrize(
    "url",
    [
        "http://broker",
        "broker:7470",
        "runnel://",
        "runnel://broker:port",
        "runnel://broker/path",
        "runnel://user:secret@broker",
        "runnel://broker?ca=file",
        "runnels://broker?cafile=file",
        "runnels://broker?ca=/does/not/exist",
    ],
)
def test_what_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(ClientFault):
        parse_url(url)


def test_password_in_a_url_is_refused_without_repeating_it() -> None:
    with pytest.raises(ClientFault, match="the URL for broker has a user or password") as caught:
        parse_url("runnel://user:secret@broker")
    assert "secret" not in str(caught.value)


def test_addresses_of_other_nodes() -> None:
    assert str(parse_host("10.0.0.1:7000", None)) == "10.0.0.1:7000"
    with pytest.raises(ClientFault):
        parse_host(":x", None)
