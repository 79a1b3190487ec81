"""Certificates that are replaced while the listener is open: new connections get the new one, and nothing breaks."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import msgspec
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from runnel.config import GrpcSettings, HttpSettings, NativeSettings, Settings
from runnel.errors import SettingsError
from runnel.formats import wire
from runnel.platform.tls import TlsFiles
from runnel.server import Server, open_server
from tests.protocols.native.talker import Talker
from tests.security.keyring import Keyring

LOOPS = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
NewLoop = Callable[[], asyncio.AbstractEventLoop]


class Pair:
    """A certificate file and its key's, in a directory, to be written again and again."""

    def __init__(self, directory: Path) -> None:
        self.certificate = directory / "listener.pem"
        self.key = directory / "listener.key"

    def settings(self) -> NativeSettings:
        return NativeSettings(
            listen="127.0.0.1:0", tls_certificate=str(self.certificate), tls_key=str(self.key)
        )

    def files(self) -> TlsFiles:
        files = TlsFiles.of("native", str(self.certificate), str(self.key))
        assert files is not None
        return files

    def write(self, name: str) -> None:
        certificate, key = made(name)
        _replace(self.certificate, certificate)
        _replace(self.key, key)


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)


def made(name: str) -> tuple[bytes, bytes]:
    """A certificate that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def anything() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def shown_by(address: str) -> str:
    """Whose certificate a listener shows."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        anything().wrap_socket(plain) as encrypted,
    ):
        shown = encrypted.getpeercert(binary_form=True)
    assert shown is not None
    subject = x509.load_der_x509_certificate(shown).subject
    return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


async def connected(address: str) -> Talker:
    host, _, port = address.rpartition(":")
    _, talker = await asyncio.get_running_loop().create_connection(
        Talker, host, int(port), ssl=anything()
    )
    await talker.greet()
    return talker


def serve(new_loop: NewLoop, native: NativeSettings, scenario: Callable[[Server], object]) -> None:
    settings = Settings(
        data="memory:",
        native=native,
        http=HttpSettings(listen=None),
        grpc=GrpcSettings(listen=None),
    )

    async def main() -> None:
        async with asyncio.timeout(30), open_server(settings) as server:
            found = scenario(server)
            assert asyncio.iscoroutine(found)
            await found

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@LOOPS
def test_new_connections_get_the_new_certificate_and_old_ones_go_on(
    new_loop: NewLoop, tmp_path: Path
) -> None:
    pair = Pair(tmp_path)
    pair.write("first")

    async def scenario(server: Server) -> None:
        address = server.addresses["native"]
        assert await asyncio.to_thread(shown_by, address) == "first"
        old = await connected(address)
        pair.write("second")
        tls = server.listeners["native"].tls
        assert tls is not None
        assert tls.reload()
        assert not tls.reload()
        assert await asyncio.to_thread(shown_by, address) == "second"
        await old.ask(wire.Ping(2), wire.Pong)
        new = await connected(address)
        await new.ask(wire.Ping(2), wire.Pong)

    serve(new_loop, pair.settings(), scenario)


class Told(logging.Handler):
    """Lines of the server's diagnostics, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put_nowait(record.getMessage())


def test_a_server_looks_for_new_certificates_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runnel.server._CERTIFICATES_SECONDS", 0.01)
    caplog.set_level("INFO", "runnel")
    pair = Pair(tmp_path)
    pair.write("first")

    async def scenario(server: Server) -> None:
        told = Told()
        logging.getLogger("runnel").addHandler(told)
        try:
            for name in ("second", "third"):
                _replace(pair.key, b"rubbish")
                line = await told.lines.get()
                assert line.startswith("the certificate was not changed listener=native")
                assert await asyncio.to_thread(shown_by, server.addresses["native"]) != name
                pair.write(name)
                while line != "a new certificate is in use listener=native":
                    line = await told.lines.get()
                assert await asyncio.to_thread(shown_by, server.addresses["native"]) == name
        finally:
            logging.getLogger("runnel").removeHandler(told)

    serve(asyncio.new_event_loop, pair.settings(), scenario)


def test_a_replacement_that_cannot_be_used_leaves_the_old_one_and_is_reported_once(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path)
    pair.write("first")
    files = pair.files()
    other_certificate, other_key = made("other")

    def problem() -> str:
        with pytest.raises(SettingsError) as refused:
            files.reload()
        assert not files.reload()  # until something has changed again
        return str(refused.value)

    _replace(pair.certificate, other_certificate)  # half of a pair
    assert "the key is not the certificate's" in problem()
    _replace(pair.certificate, b"")
    assert "native.tls_certificate" in problem()
    pair.certificate.unlink()
    assert "cannot be read: No such file" in problem()
    _replace(pair.key, b"rubbish")
    assert "cannot be read" in problem()
    _replace(pair.certificate, other_certificate)
    _replace(pair.key, other_key)
    assert files.reload()


def test_tokens_that_cross_the_network_in_the_clear_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keyring(tmp_path)
    keys.add("a", "read:*")
    pair = Pair(tmp_path)
    pair.write("own")
    warning = "tokens and messages cross the network in the clear"

    async def opened(native: NativeSettings) -> str:
        caplog.clear()
        settings = keys.settings(
            Settings(
                data="memory:",
                native=native,
                http=HttpSettings(listen=None),
                grpc=GrpcSettings(listen=None),
            )
        )
        async with open_server(settings):
            return caplog.text

    everywhere = "0.0.0.0:0"
    remote = NativeSettings(listen=everywhere)
    assert warning in asyncio.run(opened(remote))
    encrypted = msgspec.structs.replace(pair.settings(), listen=everywhere)
    assert warning not in asyncio.run(opened(encrypted))
    assert warning not in asyncio.run(opened(NativeSettings(listen="127.0.0.1:0")))
