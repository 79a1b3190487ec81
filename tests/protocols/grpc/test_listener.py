"""The gRPC listener's port: where it listens, with which certificate, and when it refuses to open."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from runnel.config import GrpcSettings
from runnel.errors import SettingsError
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.certificates import make_certificate
from tests.protocols.grpc.scene import LOOPS, NewLoop, Scene, channel, client, failure, opened, run
from tests.protocols.grpc.stub import Stub


def refused(settings: GrpcSettings) -> str:
    """Why the listener does not open."""

    async def scenario() -> None:
        with pytest.raises(SettingsError) as raised:
            async with opened(settings):
                pass
        problems.append(str(raised.value))

    problems: list[str] = []
    run(scenario())
    return problems[0]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_port_0_becomes_a_real_one(listen: str) -> None:
    if "::1" in listen and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")

    async def scenario() -> None:
        async with opened(GrpcSettings(listen=listen)) as scene:
            assert int(scene.listener.address.rpartition(":")[2]) > 0
            await scene.stub.Ping(pb.PingRequest())

    run(scenario())


def test_limits_may_be_as_large_as_settings_allow() -> None:
    most = 2**63 - 1
    settings = GrpcSettings(
        listen="127.0.0.1:0", idle_timeout_ns=most, calls_max=most, message_bytes_max=most
    )

    async def scenario() -> None:
        async with opened(settings) as scene:
            await scene.stub.Ping(pb.PingRequest())

    run(scenario())


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_port_that_is_taken_is_an_error() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            address = scene.listener.address
            with pytest.raises(SettingsError, match=f"the address {address} is in use"):
                async with opened(GrpcSettings(listen=address)):
                    pass

    run(scenario())


def test_an_address_that_others_reach_needs_a_token_or_a_word(tmp_path: Path) -> None:
    problem = refused(GrpcSettings(listen="0.0.0.0:0"))
    assert 'grpc.listen = "0.0.0.0:0" would let other machines in' in problem
    assert "grpc.allow_remote" in problem

    async def scenario() -> None:
        async with opened(GrpcSettings(listen="0.0.0.0:0", allow_remote=True)):
            pass
        async with opened(GrpcSettings(listen="0.0.0.0:0"), tokens=tmp_path / "tokens.json"):
            pass

    run(scenario())


def test_an_address_that_is_none_is_refused() -> None:
    assert "grpc.listen" in refused(GrpcSettings(listen="nonsense"))
    assert "grpc.listen" in refused(GrpcSettings(listen="192.0.2.1:0", allow_remote=True))


# --- TLS ---


def test_a_handshake_of_grpc_has_a_time_of_its_own(tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "own")
    settings = GrpcSettings(
        listen="127.0.0.1:0",
        tls_certificate=str(own.certificate),
        tls_key=str(own.key),
        handshake_timeout_ns=100_000_000,
    )

    async def scenario() -> None:
        async with opened(settings) as scene:
            host, _, port = scene.listener.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            async with asyncio.timeout(4):  # the default is 5 s
                assert await reader.read() == b""
            writer.close()

    run(scenario())


def test_tls_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    own, other = make_certificate(tmp_path, "own"), make_certificate(tmp_path, "other")

    def problem(certificate: Path | None, key: Path | None) -> str:
        return refused(
            GrpcSettings(
                listen="127.0.0.1:0",
                tls_certificate=None if certificate is None else str(certificate),
                tls_key=None if key is None else str(key),
            )
        )

    assert "grpc.tls_key is not: TLS needs both" in problem(own.certificate, None)
    assert "the key is not the certificate's" in problem(own.certificate, other.key)
    assert "cannot be read" in problem(tmp_path / "missing", own.key)


async def _ping(scene: Scene, trusted: bytes) -> pb.PingResponse:
    """Over a connection of its own, which trusts this certificate alone."""
    credentials = grpc.ssl_channel_credentials(trusted)
    async with channel(scene, credentials) as opened_channel:
        response: pb.PingResponse = await Stub(opened_channel).Ping(pb.PingRequest())
        return response


@LOOPS
def test_a_new_certificate_is_used_without_a_restart(new_loop: NewLoop, tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "own")
    first = own.certificate.read_bytes()
    settings = GrpcSettings(
        listen="127.0.0.1:0", tls_certificate=str(own.certificate), tls_key=str(own.key)
    )

    async def scenario() -> None:
        async with opened(settings) as scene:
            await _ping(scene, first)
            tls = scene.listener.tls
            assert tls is not None
            assert not tls.reload()
            # Half of a pair is not used: the last good one stays.
            other = make_certificate(tmp_path, "other")
            own.certificate.write_bytes(other.certificate.read_bytes())
            with pytest.raises(SettingsError):
                tls.reload()
            await _ping(scene, first)
            own.key.write_bytes(other.key.read_bytes())
            assert tls.reload()
            await _ping(scene, other.certificate.read_bytes())
            failed = await failure(asyncio.ensure_future(_ping(scene, first)))
            assert failed.status is StatusCode.UNAVAILABLE

    run(scenario(), new_loop)


def test_a_client_that_speaks_no_tls_disturbs_nobody(tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "own")
    settings = GrpcSettings(
        listen="127.0.0.1:0", tls_certificate=str(own.certificate), tls_key=str(own.key)
    )

    async def scenario() -> None:
        async with opened(settings) as scene, client(scene) as plain:
            failed = await failure(plain.Ping(pb.PingRequest()))
            assert failed.status is StatusCode.UNAVAILABLE
            await _ping(scene, own.certificate.read_bytes())

    run(scenario())


def test_bytes_that_are_no_http_disturb_nobody() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            host, _, port = scene.listener.address.rpartition(":")
            for rubbish in (
                b"GET / HTTP/1.1\r\n\r\n",
                bytes(range(256)) * 64,
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(rubbish)
                with suppress(ConnectionError):
                    await reader.read()
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
            await scene.stub.Ping(pb.PingRequest())

    run(scenario())
