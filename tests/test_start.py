"""What a start has to do, and what it leaves for later."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runnel import server as servers
from runnel.client import connect
from runnel.config import GrpcSettings, HttpSettings, NativeSettings, Settings
from runnel.errors import Unavailable
from tests.server.server_process import SECONDS_MAX, held_port


@pytest.mark.parametrize(
    ("statements", "unneeded"),
    [
        ("import runnel.cli.main", ("rich", "numpy", "structlog", "litestar", "grpc")),
        (
            "import runnel.cli.commands.serve, runnel.server",
            ("rich", "pygments", "litestar", "grpc"),
        ),
        (
            "from runnel.protocols.http.app import litestar_app; litestar_app()",
            ("polyfactory", "faker", "grpc"),
        ),
    ],
)
def test_a_start_imports_nothing_that_it_does_not_need(
    statements: str, unneeded: tuple[str, ...]
) -> None:
    program = (
        f"import sys\n{statements}\nprint([name for name in {unneeded} if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"


async def publish_once_it_listens(port: int) -> int:
    while True:
        try:
            async with connect(f"runnel://127.0.0.1:{port}") as bus:
                return (await bus.publish("a", b"1")).offset
        except Unavailable:  # not yet; but the opening gets its turn
            await asyncio.sleep(0.01)


def test_native_clients_are_served_while_other_listeners_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_import = threading.Event()
    import_listeners = servers._import_listeners

    def import_later(
        settings: Settings, child: servers.ChildParts | None
    ) -> list[tuple[str, servers.OpenListener]]:
        assert may_import.wait(SECONDS_MAX)
        return import_listeners(settings, child)

    monkeypatch.setattr(servers, "_import_listeners", import_later)

    async def scenario(port: int) -> None:
        settings = Settings(
            data=str(tmp_path / "data"),
            native=NativeSettings(listen=f"127.0.0.1:{port}"),
            http=HttpSettings(listen="127.0.0.1:0"),
            grpc=GrpcSettings(listen=None),
        )
        opening = servers.open_server(settings)
        opened = asyncio.ensure_future(opening.__aenter__())
        try:
            async with asyncio.timeout(SECONDS_MAX):
                assert await publish_once_it_listens(port) == 1
            assert not opened.done()  # not ready before every listener is open
            may_import.set()
            assert list((await opened).addresses) == ["native", "http"]
        finally:
            may_import.set()
            await opened
            await opening.__aexit__(None, None, None)

    with held_port() as port:
        asyncio.run(scenario(port))
