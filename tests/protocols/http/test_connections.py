"""Connections: their number, their duration, and their end when the scene closes."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from runnel.config import HttpSettings
from tests.protocols.grpc.certificates import make_certificate
from tests.protocols.http.scene import HttpScene, in_loop, open_scene, until
from tests.protocols.http.talker import Talker

SECOND_NS = 1_000_000_000
SHORT = HttpSettings(request_timeout_ns=10 * SECOND_NS, idle_timeout_ns=20 * SECOND_NS)


async def _pass(scene: HttpScene, seconds: int) -> None:
    """Let time pass, so that the scene looks at its connections in between."""
    for _ in range(seconds):
        scene.clock.advance(SECOND_NS)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_either_loop_will_do(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        async with open_scene() as scene:
            assert (await scene.http.post("/v1/topics/a/messages", content=b"x")).status_code == 200
            talker = await Talker.connect(scene.listener.address)
            talker.ask("GET", "/v1/topics/a/messages?offset=2&wait=1h")
            await until(lambda: scene.listener.server.stream_count == 1)
            assert scene.listener.connection_count == 2
            assert await scene.listener.drain()
            assert (await talker.hear()).status == 200
            assert await talker.is_over()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a matter of Linux")
@in_loop
async def test_the_system_gives_up_a_client_that_acknowledges_nothing() -> None:
    async with open_scene(http=SHORT) as scene:
        assert (await scene.http.get("/healthz")).status_code == 200
        (connection,) = scene.listener.server.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 40_000


@in_loop
async def test_a_connection_too_many_is_told_so_and_closed() -> None:
    async with open_scene(http=HttpSettings(connections_max=1)) as scene:
        await scene.publish("a", b"1")
        first = await Talker.connect(scene.listener.address)
        first.ask("GET", "/v1/topics/a/messages?offset=2&wait=1h")
        await until(lambda: scene.listener.server.stream_count == 1)
        second = await Talker.connect(scene.listener.address)
        second.ask("GET", "/healthz")
        answer = await second.hear()
        assert (answer.status, answer.json["code"]) == (503, "busy")
        assert answer.headers["connection"] == "close"
        assert await second.is_over()
        assert scene.broker.metrics.counters.connections_refused == 1
        await scene.publish("a", b"2")
        assert (await first.hear()).status == 200
        first.vanish()
        await until(lambda: scene.listener.connection_count == 0)
        third = await Talker.connect(scene.listener.address)
        third.ask("GET", "/healthz")
        assert (await third.hear()).status == 200
        third.vanish()


@in_loop
async def test_whoever_is_refused_and_stays_is_cut_off() -> None:
    async with open_scene(http=HttpSettings(connections_max=1)) as scene:
        await scene.publish("a", b"1")
        first = await Talker.connect(scene.listener.address)
        first.ask("GET", "/v1/topics/a/messages?offset=2&wait=1h")
        await until(lambda: scene.listener.server.stream_count == 1)
        second = await Talker.connect(scene.listener.address)
        assert (await second.hear()).status == 503
        await _pass(scene, 3)
        second.say(b"x")
        assert await second.is_over()
        first.vanish()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /v1/topics/a/messages HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
@in_loop
async def test_what_is_not_http_is_told_so_and_counted(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_scene() as scene:
        talker = await Talker.connect(scene.listener.address)
        talker.say(data)
        answer = await talker.hear()
        assert (answer.status, answer.json["code"]) == (400, "handshake")
        assert await talker.is_over()
        assert scene.broker.metrics.counters.protocol_errors == 1
        assert "uvicorn" not in {record.name.split(".")[0] for record in caplog.records}


@in_loop
async def test_a_head_has_a_size() -> None:
    async with open_scene() as scene:
        talker = await Talker.connect(scene.listener.address)
        talker.say(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: ")
        for _ in range(20):
            talker.say(b"x" * 8192)
            await asyncio.sleep(0.001)
        answer = await talker.hear()
        assert (answer.status, answer.json["code"]) == (431, "limit_exceeded")
        assert await talker.is_over()


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /healthz HTTP/1.1\r\nhost: loc",
        b"POST /v1/topics/a/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nabc",
        b"PUT /v1/cursors/a HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    ],
)
@in_loop
async def test_a_request_has_a_time_to_arrive_in(begun: bytes) -> None:
    async with open_scene(http=SHORT) as scene:
        talker = await Talker.connect(scene.listener.address)
        talker.say(begun)
        await until(lambda: scene.listener.connection_count == 1)
        await asyncio.sleep(0.01)
        for _ in range(12):
            talker.say(b" ")  # now and then a byte does not help
            await _pass(scene, 1)
        answer = await talker.hear()
        assert (answer.status, answer.json["code"]) == (408, "timeout")
        assert await talker.is_over()


@in_loop
async def test_a_connection_without_requests_is_closed() -> None:
    async with open_scene(http=SHORT) as scene:
        silent = await Talker.connect(scene.listener.address)
        once = await Talker.connect(scene.listener.address)
        await until(lambda: scene.listener.connection_count == 2)
        await _pass(scene, 15)
        once.ask("GET", "/healthz")
        assert (await once.hear()).status == 200
        await _pass(scene, 10)
        assert await silent.is_over()
        assert scene.listener.connection_count == 1
        await _pass(scene, 15)
        assert await once.is_over()
        assert scene.broker.metrics.counters.connections_idle == 2


@in_loop
async def test_whoever_does_not_read_the_answer_is_cut_off() -> None:
    async with open_scene(http=SHORT) as scene:
        for _ in range(6):
            await scene.publish("a", *[b"x" * 100_000] * 10)
        talker = await Talker.connect(scene.listener.address)
        talker.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(10):
            talker.ask("GET", "/v1/topics/a/messages?bytes=4194304")
        [connection] = scene.listener.server.connections
        await until(lambda: connection.transport.get_write_buffer_size() > 0)
        await until(lambda: connection.flow.write_paused)
        await _pass(scene, 30)
        await until(lambda: scene.listener.connection_count == 0)
        talker.vanish()


@in_loop
async def test_an_answer_given_before_the_body_came_does_not_end_the_connection() -> None:
    async with open_scene(http=HttpSettings(body_bytes_max=100_000)) as scene:
        talker = await Talker.connect(scene.listener.address)
        talker.ask("POST", "/v1/topics/a/messages", b"x" * 50_000, {"content-encoding": "gzip"})
        assert (await talker.hear()).status == 415
        talker.ask("GET", "/healthz")
        assert (await talker.hear()).status == 200
        talker.ask("POST", "/v1/topics/a/messages", b"", {"content-length": "10000000"})
        assert (await talker.hear()).status == 413
        for _ in range(50):
            talker.say(b"x" * 8192)
            await asyncio.sleep(0)
        assert await talker.is_over()


@in_loop
async def test_requests_that_come_together_are_answered_in_order() -> None:
    async with open_scene() as scene:
        talker = await Talker.connect(scene.listener.address)
        for number in range(5):
            talker.ask("POST", f"/v1/topics/t{number}/messages", b"x")
        topics = [(await talker.hear()).json["topic"] for _ in range(5)]
        assert topics == ["t0", "t1", "t2", "t3", "t4"]
        talker.vanish()


@in_loop
async def test_other_protocols_are_not_spoken() -> None:
    async with open_scene() as scene:
        talker = await Talker.connect(scene.listener.address)
        talker.ask(
            "GET",
            "/healthz",
            headers={
                "connection": "upgrade",
                "upgrade": "websocket",
                "sec-websocket-version": "13",
            },
        )
        assert (await talker.hear()).status == 200
        assert await talker.is_over()


@in_loop
async def test_draining_finishes_what_was_asked_and_takes_nobody() -> None:
    async with open_scene() as scene:
        busy = await Talker.connect(scene.listener.address)
        busy.say(
            b"POST /v1/topics/a/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nab"
        )
        idle = await Talker.connect(scene.listener.address)
        await until(lambda: scene.broker.metrics.counters.requests == 1)
        await until(lambda: scene.listener.connection_count == 2)
        draining = asyncio.create_task(scene.listener.drain())
        assert await idle.is_over()
        with pytest.raises(ConnectionRefusedError):
            await Talker.connect(scene.listener.address)
        assert not draining.done()
        busy.say(b"c")
        answer = await busy.hear()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await draining
        assert await busy.is_over()


@in_loop
async def test_a_drain_takes_no_longer_than_it_may() -> None:
    async with open_scene() as scene:
        stuck = await Talker.connect(scene.listener.address)
        stuck.say(
            b"POST /v1/topics/a/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nab"
        )
        await until(lambda: scene.broker.metrics.counters.requests == 1)
        draining = asyncio.create_task(scene.listener.drain())
        await asyncio.sleep(0.01)
        await _pass(scene, 11)
        assert not await draining
        await scene.listener.close()
        assert await stuck.is_over()


@in_loop
async def test_who_is_in_a_hurry_does_not_wait() -> None:
    async with open_scene() as scene:
        stuck = await Talker.connect(scene.listener.address)
        stuck.say(
            b"POST /v1/topics/a/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\n"
        )
        await until(lambda: scene.broker.metrics.counters.requests == 1)
        draining = asyncio.create_task(scene.listener.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        scene.listener.hurry()
        assert not await draining
        stuck.vanish()


@in_loop
async def test_closing_leaves_nothing_running() -> None:
    before = len(asyncio.all_tasks())
    async with open_scene() as scene:
        talkers = [await Talker.connect(scene.listener.address) for _ in range(3)]
        await scene.publish("a", b"1")
        talkers[0].ask("GET", "/v1/topics/a/messages?offset=2&wait=1h")
        talkers[1].say(b"GET / HT")
        await until(lambda: scene.listener.server.stream_count == 1)
        await scene.listener.close()
        assert scene.listener.connection_count == 0
        assert scene.listener.server.stream_count == 0
        assert scene.listener.server.rows not in scene.broker.connections.listeners
        for talker in talkers:
            assert await talker.is_over()
    assert len(asyncio.all_tasks()) == before


@in_loop
async def test_a_handshake_of_https_has_a_time_of_its_own(tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "own")
    http = HttpSettings(
        tls_certificate=str(own.certificate), tls_key=str(own.key), handshake_timeout_ns=50_000_000
    )
    async with open_scene(http=http) as scene:
        silent = await Talker.connect(scene.listener.address)
        await until(lambda: scene.listener.connection_count == 1)
        assert await silent.is_over()
        await until(lambda: scene.listener.connection_count == 0)


@in_loop
async def test_a_certificate_is_replaced_without_a_restart(tmp_path: Path) -> None:
    old, new = (make_certificate(tmp_path, name) for name in ("old", "new"))
    http = HttpSettings(tls_certificate=str(old.certificate), tls_key=str(old.key))
    async with open_scene(http=http) as scene:

        async def trusting(certificate: Path) -> Talker:
            context = ssl.create_default_context(cafile=str(certificate))
            return await Talker.connect(scene.listener.address, context)

        first = await trusting(old.certificate)
        first.ask("POST", "/v1/topics/a/messages", b"x" * 500_000)
        assert (await first.hear()).status == 200
        old.certificate.write_bytes(new.certificate.read_bytes())
        old.key.write_bytes(new.key.read_bytes())
        assert scene.listener.tls is not None
        assert scene.listener.tls.reload()
        second = await trusting(new.certificate)
        for talker in (first, second):
            talker.ask("GET", "/healthz")
            assert (await talker.hear()).status == 200
        assert await scene.listener.drain()
        for talker in (first, second):
            assert await talker.is_over()
