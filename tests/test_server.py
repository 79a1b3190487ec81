"""The broker as a process: started, stopped by signals, and what it leaves for the next one."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import pytest

from runnel.config import GrpcSettings, HttpSettings, NativeSettings, Settings, TopicRule
from runnel.errors import SettingsError
from runnel.formats import wire
from runnel.formats.batch import Batch
from runnel.formats.frames import FrameReader
from runnel.formats.message import Message
from runnel.server import open_server, serve

A = TypeVar("A", bound=wire.Head)

PROGRAM = """
import sys
from runnel.config import GrpcSettings, HttpSettings, NativeSettings, Settings, TopicRule
from runnel.server import run
settings = Settings(
    data=sys.argv[1],
    native=NativeSettings(listen="127.0.0.1:0"),
    http=HttpSettings(listen=None),
    grpc=GrpcSettings(listen=None),
)
run(settings, ready=lambda server: print(server.addresses["native"], flush=True))
print("stopped", flush=True)
"""
EXIT_SECONDS_MAX = 30


class Line:
    """A blocking client of one socket."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=EXIT_SECONDS_MAX)
        self._reader = FrameReader(2**20)
        self._answers: list[wire.Answer] = []
        self.ask(wire.Hello(1, 1), wire.Welcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, request: wire.Head, kind: type[A], tail: bytes = b"") -> A:
        self.socket.sendall(wire.encode(request, len(tail)) + tail)
        return self.hear(kind)

    def hear(self, kind: type[A]) -> A:
        while not self._answers:
            data = self.socket.recv(65_536)
            assert data, "the broker has closed the connection"
            self._answers += map(wire.decode_answer, self._reader.feed(data))
        answer = self._answers.pop(0)
        assert isinstance(answer, kind), answer
        return answer

    def publish(self, payload: bytes) -> wire.Published:
        block = Batch.from_messages([Message("a", payload)]).pack()
        return self.ask(wire.Publish(2), wire.Published, block)


@contextmanager
def running(data: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(data)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the server has not started"
        yield process, address
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_good_order_and_all_is_there_next_time(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(tmp_path / "data") as (process, address):
        with Line(address) as line:
            assert line.publish(b"1").level == "stored"
            process.send_signal(number)
            assert line.hear(wire.Closing).within_ms == 10_000
            assert line.socket.recv(1) == b""
        assert process.wait(EXIT_SECONDS_MAX) == 0
        assert process.stdout is not None
        assert process.stdout.read().endswith("stopped\n")
    with running(tmp_path / "data") as (_, address), Line(address) as line:
        fetched = line.ask(wire.Fetch(2, "a", offset=1), wire.Fetched)
        assert fetched.end_offset == 2


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_clients(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (process, address), ExitStack() as stack:
        lines = [stack.enter_context(Line(address)) for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        for line in lines:  # which stay as if they had not heard
            line.hear(wire.Closing)
        process.send_signal(signal.SIGTERM)
        assert process.wait(EXIT_SECONDS_MAX) == 0


def settings(tmp_path: Path, listen: str = "127.0.0.1:0") -> Settings:
    return only_native(Settings(data=str(tmp_path / "data"), native=NativeSettings(listen=listen)))


def only_native(settings: Settings) -> Settings:
    closed = {"http": HttpSettings(listen=None), "grpc": GrpcSettings(listen=None)}
    return msgspec.structs.replace(settings, **closed)


def test_a_server_tells_its_addresses_and_counts_its_connections(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_server(settings(tmp_path)) as server:
            assert not server.addresses["native"].endswith(":0")
            host, _, port = server.addresses["native"].rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(wire.encode(wire.Hello(1, 1)))
            await reader.readexactly(8)
            assert server.broker.metrics.gauges()["connections"] == 1
            writer.close()
            await server.drain()

    asyncio.run(scenario())


def test_a_server_in_memory_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        in_memory = Settings(data="memory:", native=NativeSettings(listen="127.0.0.1:0"))
        async with open_server(only_native(in_memory)) as server:
            await server.broker.publish(Batch.from_messages([Message("a", b"1")]))

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_serving_ends_when_the_server_is_told_to_stop(tmp_path: Path) -> None:
    seen: list[str] = []

    async def scenario() -> None:
        await serve(
            settings(tmp_path),
            ready=lambda server: (seen.append(server.addresses["native"]), server.stop())[1],  # type: ignore[func-returns-value]
        )

    asyncio.run(scenario())
    assert len(seen) == 1


def test_a_listener_that_cannot_open_leaves_no_broker_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(SettingsError, match="no token is required"):
            await serve(settings(tmp_path, "0.0.0.0:0"))
        async with open_server(settings(tmp_path)):
            pass

    asyncio.run(scenario())


def test_listeners_whose_extras_are_missing_stay_closed_and_say_how_to_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runnel.server.has_extra", lambda name: False)
    caplog.set_level("INFO", "runnel")
    native = NativeSettings(listen="127.0.0.1:0")

    async def scenario() -> None:
        async with open_server(Settings(data=str(tmp_path / "data"), native=native)) as server:
            assert list(server.listeners) == ["native"]

    asyncio.run(scenario())
    assert "pip install '.[http]'" in caplog.text
    assert "pip install '.[grpc]'" in caplog.text


def test_letting_everybody_in_from_everywhere_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native = NativeSettings(listen="0.0.0.0:0", allow_remote=True)
    open_to_all = only_native(Settings(data=str(tmp_path / "data"), native=native))

    async def scenario() -> None:
        async with open_server(open_to_all):
            pass

    asyncio.run(scenario())
    assert "may read, write and delete everything" in caplog.text


def test_rule_with_a_wildcard_of_mqtt_is_warned_of_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = (TopicRule(match="sensors/#"), TopicRule(match="alerts/*"))
    settings = only_native(Settings(data=str(tmp_path / "data"), topics=rules))

    async def scenario() -> None:
        async with open_server(settings):
            pass

    asyncio.run(scenario())
    assert caplog.text.count("did you mean") == 1
    assert "did you mean 'sensors/*'?" in caplog.text
