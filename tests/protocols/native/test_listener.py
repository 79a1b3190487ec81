"""The listener on real sockets, with a real broker behind it."""

from __future__ import annotations

import asyncio
import gc
import shutil
import socket
import ssl
import struct
import subprocess
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
import uvloop

import runnel.client
from runnel.broker.broker import Broker
from runnel.client import Bus
from runnel.config import Keep, NativeSettings, Settings, TopicRule
from runnel.errors import SettingsError, Unavailable
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.platform import acceptor
from runnel.platform.clock import SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.protocols.native.listener import Listener
from runnel.security.authenticator import Authenticator
from tests.protocols.native.talker import HELLO, Talker, packed, publish, subscribe

MS_NS = 1_000_000
LIVE = TopicRule(match="live/*", keep=Keep.NONE)
ANYWHERE = NativeSettings(listen="127.0.0.1:0")

LOOPS = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
NewLoop = Callable[[], asyncio.AbstractEventLoop]


def run(main: Awaitable[None], new_loop: NewLoop = asyncio.new_event_loop) -> None:
    async def scenario() -> None:
        await main

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


@asynccontextmanager
async def listening(native: NativeSettings = ANYWHERE) -> AsyncIterator[Listener]:
    settings = Settings(native=native, topics=(LIVE,))
    workers = ThreadWorkers(1)
    try:
        broker = await Broker.open(
            settings, directory=None, disk=RealDisk(), clock=SystemClock(), workers=workers
        )
        try:
            listener = await Listener.open(
                broker, Authenticator.open(settings, broker.clock), settings
            )
            try:
                yield listener
            finally:
                await listener.close()
        finally:
            await broker.close()
    finally:
        workers.close()


async def connect(listener: Listener, context: ssl.SSLContext | None = None) -> Talker:
    host, _, port = listener.address.rpartition(":")
    _, talker = await asyncio.get_running_loop().create_connection(
        Talker, host.strip("[]"), int(port), ssl=context
    )
    return talker


async def greeted(listener: Listener, context: ssl.SSLContext | None = None) -> Talker:
    talker = await connect(listener, context)
    await talker.greet()
    return talker


@LOOPS
def test_messages_go_from_one_connection_to_another(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with listening() as listener:
            reader, writer = await greeted(listener), await greeted(listener)
            await reader.ask(subscribe(2, 1, "*"), wire.Subscribed)
            await reader.ask(subscribe(3, 2, "live/*"), wire.Subscribed)
            published = await writer.ask(publish(2, b"1", topic="a"), wire.Published)
            assert (list(published.base_offsets), published.level) == ([1], "received")
            deliver, tail = await reader.hear_all()
            assert isinstance(deliver, wire.Deliver)
            assert deliver.subscription == 1
            assert [message.payload for message in Batch.unpack(tail)] == [b"1"]
            published = await writer.ask(publish(3, b"2", topic="live/b"), wire.Published)
            assert (published.level, published.receivers) == ("received", 2)
            for _ in range(2):
                assert Batch.unpack((await reader.hear_all())[1]).messages()[0].payload == b"2"
            fetched = await writer.ask(wire.Fetch(4, "a", offset=1), wire.Fetched)
            assert (fetched.next_offset, fetched.end_offset) == (2, 2)

    run(scenario(), new_loop)


@LOOPS
def test_large_batches_come_and_go_whole(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with listening() as listener:
            reader, writer = await greeted(listener), await greeted(listener)
            await reader.ask(subscribe(2, 1, "live/*"), wire.Subscribed)
            payloads = [bytes([number]) * 1_000_000 for number in range(20)]
            for number, payload in enumerate(payloads):
                writer.say(publish(number + 2, payload, topic="live/a"))
            for payload in payloads:
                _, tail = await reader.hear_all()
                assert Batch.unpack(tail).messages()[0].payload == payload

    run(scenario(), new_loop)


@LOOPS
def test_what_was_wrong_is_heard_also_while_more_is_being_sent(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with listening() as listener:
            other, talker = await greeted(listener), await greeted(listener)
            talker.say(struct.pack("<II", 2**31, 8))
            talker.transport.write(bytes(2**22))
            (error,) = await talker.hear_end()
            assert isinstance(error, wire.Error)
            assert error.code == "limit_exceeded"
            await other.ask(wire.Ping(2), wire.Pong)
            await until_gone(listener, 1)

    run(scenario(), new_loop)


async def until_gone(listener: Listener, left: int) -> None:
    while len(listener.server.connections) > left:  # noqa: ASYNC110 - a listener has no event for it
        await asyncio.sleep(0.001)


@LOOPS
def test_slow_and_silent_connections_are_cut_off(new_loop: NewLoop) -> None:
    native = msgspec.structs.replace(
        ANYWHERE, handshake_timeout_ns=100 * MS_NS, idle_timeout_ns=200 * MS_NS
    )

    async def scenario() -> None:
        async with listening(native) as listener:
            mute, loris, idle = (
                await connect(listener),
                await connect(listener),
                await greeted(listener),
            )
            loris.say(packed(HELLO)[:5])
            for talker, code in ((mute, "handshake"), (loris, "handshake"), (idle, "timeout")):
                (error,) = await talker.hear_end()
                assert isinstance(error, wire.Error)
                assert error.code == code
            await until_gone(listener, 0)

    run(scenario(), new_loop)


@LOOPS
def test_answers_are_not_held_back_for_company(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with listening() as listener:
            await greeted(listener)
            (connection,) = listener.server.connections
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(scenario(), new_loop)


# --- Addresses ---


def refused(native: NativeSettings) -> str:
    async def scenario() -> None:
        async with listening(native):
            pass

    with pytest.raises(SettingsError) as caught:
        run(scenario())
    return str(caught.value)


@pytest.mark.parametrize(
    ("listen", "text"),
    [
        ("127.0.0.1", "is not host:port"),
        (":7470", "is not host:port"),
        ("", "is not host:port"),
        ("127.0.0.1:http", "the port 'http' is not a number"),
        ("127.0.0.1:65536", "the port '65536' is not a number"),
        ("::1:7470", "in brackets"),
        ("nowhere.invalid:7470", "is no address here"),
        ("192.0.2.1:0", "no token is required"),
        ("0.0.0.0:0", "native.allow_remote = true"),
        ("[::]:0", "native.allow_remote = true"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_its_setting(listen: str, text: str) -> None:
    problem = refused(NativeSettings(listen=listen))
    assert problem.startswith(f'native.listen = "{listen}"')
    assert text in problem


def test_an_address_that_this_machine_has_not_got_is_refused() -> None:
    problem = refused(NativeSettings(listen="192.0.2.1:0", allow_remote=True))
    assert "cannot listen on 192.0.2.1:0" in problem


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = refused(NativeSettings(listen=f"127.0.0.1:{port}"))
    assert f"the address 127.0.0.1:{port} is in use" in problem


def test_other_machines_are_let_in_when_that_was_said_twice() -> None:
    async def scenario() -> None:
        async with listening(NativeSettings(listen="0.0.0.0:0", allow_remote=True)) as listener:
            assert listener.address.startswith("0.0.0.0:")

    run(scenario())


def test_a_name_and_ipv6_are_addresses_too() -> None:
    async def scenario(listen: str) -> None:
        async with listening(NativeSettings(listen=listen)) as listener:
            assert not listener.address.endswith(":0")
            await greeted(listener)

    run(scenario("localhost:0"))
    if _has_ipv6():
        run(scenario("[::1]:0"))


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@LOOPS
def test_the_port_is_free_again_when_the_listener_is_closed(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with listening() as listener:
            await greeted(listener)
            address = listener.address
        async with listening(NativeSettings(listen=address)) as listener:
            assert listener.address == address
            await greeted(listener)

    run(scenario(), new_loop)


# --- TLS ---


class Certificate(NamedTuple):
    certificate: str
    key: str

    def settings(self) -> NativeSettings:
        return NativeSettings(
            listen="127.0.0.1:0", tls_certificate=self.certificate, tls_key=self.key
        )

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.certificate)


def make_certificate(directory: Path, name: str = "own") -> Certificate:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate with")
    made = Certificate(str(directory / f"{name}.pem"), str(directory / f"{name}.key"))
    options = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    )
    subprocess.run(
        [
            *(openssl, *options.split()),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", made.key, "-out", made.certificate),
        ],
        check=True,
        capture_output=True,
    )
    return made


@LOOPS
def test_the_same_is_said_over_tls(new_loop: NewLoop, tmp_path: Path) -> None:
    own = make_certificate(tmp_path)

    async def scenario() -> None:
        async with listening(own.settings()) as listener:
            assert listener.tls is not None
            reader = await greeted(listener, own.trust())
            writer = await greeted(listener, own.trust())
            await reader.ask(subscribe(2, 1, "live/*"), wire.Subscribed)
            payloads = [bytes([number]) * 500_000 for number in range(8)]
            for number, payload in enumerate(payloads):
                writer.say(publish(number + 2, payload, topic="live/a"))
            for payload in payloads:
                _, tail = await reader.hear_all()
                assert Batch.unpack(tail).messages()[0].payload == payload
            writer.say(b"\xff" * 100)
            answers = await writer.hear_end()
            assert isinstance(answers[-1], wire.Error)
            assert await listener.drain()

    run(scenario(), new_loop)


@LOOPS
def test_a_client_that_gives_up_in_any_turn_of_a_tls_handshake_leaves_nothing_behind(
    new_loop: NewLoop, tmp_path: Path
) -> None:
    own = make_certificate(tmp_path)

    async def scenario() -> None:
        async with listening(own.settings()) as listener:
            url = f"runnels://{listener.address}"
            for turns in range(200):
                connecting = asyncio.ensure_future(dial(url, own.trust()))
                for _ in range(turns):
                    await asyncio.sleep(0)
                connecting.cancel()
                async with asyncio.timeout(20):
                    await asyncio.wait((connecting,))
                    if not connecting.cancelled():
                        await connecting.result().close()
                        break
                    while listener.server.connections:  # noqa: ASYNC110 - the listener's doing
                        await asyncio.sleep(0)
            else:
                pytest.fail("it did not connect at all")

    async def dial(url: str, trust: ssl.SSLContext) -> Bus:
        return await runnel.client.connect(url, ssl=trust)

    run(scenario(), new_loop)


async def _silent_socket(listener: Listener) -> socket.socket:
    """A connection that says nothing, not even a TLS hello."""
    host, _, port = listener.address.rpartition(":")
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    return client


async def _until_count(listener: Listener, count: int) -> None:
    async with asyncio.timeout(20):
        while listener.connection_count != count:  # noqa: ASYNC110 - the listener's doing
            await asyncio.sleep(0.001)


@LOOPS
def test_unfinished_handshakes_take_places_and_make_room_for_others(
    new_loop: NewLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "_HANDSHAKES_BEYOND_MAX", 1)
    own = make_certificate(tmp_path)
    settings = msgspec.structs.replace(
        own.settings(), connections_max=3, handshake_timeout_ns=3600 * 1000 * MS_NS
    )

    async def scenario() -> None:
        async with listening(settings) as listener:
            counters = listener.server.broker.metrics.counters
            handles = psutil.Process().num_fds()
            silent = [await _silent_socket(listener) for _ in range(20)]
            async with asyncio.timeout(20):
                while counters.connections_refused < 17:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            await _until_count(listener, 3)
            for oldest in silent[:17]:
                assert await asyncio.get_running_loop().sock_recv(oldest, 1) == b""
            assert psutil.Process().num_fds() <= handles + 20 + 3 + 2
            clients = [await greeted(listener, own.trust()) for _ in range(3)]
            await _until_count(listener, 3)
            # All places are taken by clients that were admitted: the next is told so, over TLS as well.
            late = await connect(listener, own.trust())
            (error,) = await late.hear_end()
            assert isinstance(error, wire.Error)
            assert (error.code, error.retriable) == ("busy", True)
            for client in clients:
                await client.ask(wire.Ping(2), wire.Pong)
            for each in silent:
                each.close()

    run(scenario(), new_loop)


@LOOPS
def test_a_handshake_has_a_time_of_its_own(new_loop: NewLoop, tmp_path: Path) -> None:
    own = make_certificate(tmp_path)
    settings = msgspec.structs.replace(own.settings(), handshake_timeout_ns=50 * MS_NS)

    async def scenario() -> None:
        async with listening(settings) as listener:
            with await _silent_socket(listener) as silent:
                await _until_count(listener, 1)
                assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""
            await _until_count(listener, 0)
            # And those that are under way when the broker goes do not keep it.
            last = await _silent_socket(listener)
            await _until_count(listener, 1)
        assert await asyncio.get_running_loop().sock_recv(last, 1) == b""
        last.close()

    run(scenario(), new_loop)


def test_a_client_that_speaks_no_tls_disturbs_nobody(tmp_path: Path) -> None:
    own = make_certificate(tmp_path)

    async def scenario() -> None:
        async with listening(own.settings()) as listener:
            plain = await connect(listener)
            plain.say(HELLO)
            await plain.lost
            await greeted(listener, own.trust())

    run(scenario())


@LOOPS
def test_whoever_speaks_tls_to_a_plain_port_or_the_reverse_is_told(
    new_loop: NewLoop, tmp_path: Path
) -> None:
    own = make_certificate(tmp_path)

    async def scenario() -> None:
        async with listening() as plain, listening(own.settings()) as encrypted:
            with pytest.raises(Unavailable, match="does not speak TLS; try runnel://"):
                await runnel.client.connect(f"runnels://{plain.address}", ssl=own.trust())
            with pytest.raises(Unavailable, match=r"does it speak TLS\? Then try runnels://"):
                await runnel.client.connect(f"runnel://{encrypted.address}")
            async with runnel.client.connect(
                f"runnels://{encrypted.address}", ssl=own.trust()
            ) as bus:
                await bus.ping()

    run(scenario(), new_loop)


@LOOPS
def test_a_certificate_of_a_private_authority_is_told_how_to_be_trusted(
    new_loop: NewLoop, tmp_path: Path
) -> None:
    own = make_certificate(tmp_path)

    async def scenario() -> None:
        async with listening(own.settings()) as listener:
            url = f"runnels://{listener.address}"
            with pytest.raises(Unavailable, match=r"does not verify: self.signed") as refused:
                await runnel.client.connect(url)
            assert "`?ca=FILE` in the URL names" in str(refused.value)
            assert f"{url}?ca=cert.pem" in str(refused.value)
            async with runnel.client.connect(f"{url}?ca={own.certificate}") as bus:
                await bus.ping()

    run(scenario(), new_loop)


def test_tls_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    own, other = make_certificate(tmp_path), make_certificate(tmp_path, "other")
    (tmp_path / "text").write_text("no certificate")
    missing, text = str(tmp_path / "missing"), str(tmp_path / "text")

    def problem(certificate: str | None, key: str | None) -> str:
        return refused(
            NativeSettings(listen="127.0.0.1:0", tls_certificate=certificate, tls_key=key)
        )

    assert "native.tls_key is not: TLS needs both" in problem(own.certificate, None)
    assert "native.tls_certificate is not: TLS needs both" in problem(None, own.key)
    assert "tls_certificate" in problem(missing, own.key)
    assert f'native.tls_key = "{missing}" cannot be read: No such file' in problem(
        own.certificate, missing
    )
    assert "the key is not the certificate's" in problem(own.certificate, other.key)
    assert "in PEM" in problem(text, own.key)
    assert "in PEM" in problem(own.certificate, text)


# --- Many ---


@LOOPS
def test_a_drain_lets_everybody_finish_and_nobody_in(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        async with listening() as listener:
            talkers = [await greeted(listener) for _ in range(20)]
            for talker in talkers:
                talker.say(*(publish(number + 2, b"x") for number in range(50)))
            await asyncio.sleep(0)
            assert await listener.drain()
            assert not listener.server.connections
            for talker in talkers:
                answers = await talker.hear_end()
                done = {answer.id for answer in answers if not isinstance(answer, wire.Closing)}  # type: ignore[union-attr]
                assert sum(isinstance(answer, wire.Closing) for answer in answers) == 1
                assert done <= set(range(2, 52))
                assert len(done) == len(answers) - 1
            with pytest.raises(OSError):
                await connect(listener)

    run(scenario(), new_loop)


@pytest.mark.slow
@LOOPS
def test_a_thousand_connections_opened_and_dropped_leave_nothing_behind(new_loop: NewLoop) -> None:
    rounds, together = 5, 200

    async def scenario() -> None:
        process = psutil.Process()
        async with listening() as listener:

            async def storm() -> None:
                talkers = await asyncio.gather(*(connect(listener) for _ in range(together)))
                for number, talker in enumerate(talkers):
                    talker.say(HELLO)
                    if number % 4 == 0:
                        talker.say(subscribe(2, 1, f"live/{number}"))
                    if number % 4 == 1:
                        talker.say(publish(3, bytes(3000))[:2000])
                    if number % 4 == 2:
                        talker.say(b"\xff" * 50)
                await asyncio.gather(*(talker.hear_all() for talker in talkers))
                for number, talker in enumerate(talkers):
                    talker.transport.abort() if number % 2 else talker.transport.close()
                await asyncio.gather(*(talker.lost for talker in talkers))
                await until_gone(listener, 0)

            await storm()
            gc.collect()
            handles = process.num_fds()
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                for _ in range(rounds):
                    await storm()
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert process.num_fds() <= handles + 2
            assert after - before < 500_000
            assert not listener.server.tasks
            await greeted(listener)

    run(scenario(), new_loop)
