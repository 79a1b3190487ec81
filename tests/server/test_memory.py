"""The memory that clients cost which send most of a large frame and never the rest, before and after their hello."""

from __future__ import annotations

import asyncio
import platform
import struct
import time
from contextlib import suppress
from pathlib import Path

import pytest

from runnel.formats import wire
from tests.server.server_process import ServerProcess, running_server

_MIB = 2**20
_FRAME_BYTES = 16 * _MIB
_CLIENTS = 20
_HELLO = wire.encode(wire.Hello(1, 1, (), "a test"))
_MEMORY_SECONDS_MAX = 30.0


def _resident_bytes(server: ServerProcess) -> int:
    return int(server.process.memory_info().rss)


async def _send_most_of_a_frame(
    server: ServerProcess, beginning: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    with suppress(ConnectionError):  # the server closed the connection
        writer.write(beginning + struct.pack("<II", _FRAME_BYTES, 100))
        for _ in range(15):
            writer.write(bytes(_MIB))
            await writer.drain()
    return reader, writer


async def _all(server: ServerProcess, beginning: bytes) -> list[asyncio.StreamWriter]:
    sending = (_send_most_of_a_frame(server, beginning) for _ in range(_CLIENTS))
    return [writer for _, writer in await asyncio.gather(*sending)]


async def _close(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def test_a_client_that_is_not_admitted_costs_no_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path) as server:
            before = _resident_bytes(server)
            writers = await _all(server, b"")
            assert _resident_bytes(server) - before < 16 * _MIB
            await _close(writers)
            await server.stop()

    asyncio.run(scenario())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do as they like")
def test_memory_that_clients_took_is_given_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path) as server:
            before = _resident_bytes(server)
            writers = await _all(server, _HELLO)
            ends_at = time.monotonic() + _MEMORY_SECONDS_MAX
            while (taken := _resident_bytes(server) - before) < _CLIENTS * 12 * _MIB:
                assert time.monotonic() < ends_at, f"{taken:,} bytes were taken"
                await asyncio.sleep(0.05)
            await _close(writers)
            ends_at = time.monotonic() + _MEMORY_SECONDS_MAX
            while (kept := _resident_bytes(server) - before) > 64 * _MIB:
                assert time.monotonic() < ends_at, f"{kept:,} bytes are kept"
                await asyncio.sleep(0.05)
            await server.stop()

    asyncio.run(scenario())
