"""The data directory as other users of the machine see it: its permissions, and the disk space of a small one."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import runnel
from tests.server.server_process import running_server

_SHARED = "other users of this machine may enter the data directory"
_OWN_JOURNALS = 'topics=[{ match = "own/*", journal = "{topic}" }]'


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def _modes(directory: Path) -> dict[str, int]:
    return {
        str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode)
        for path in (directory, *directory.rglob("*"))
    }


@pytest.mark.usefixtures("usual_umask")
def test_what_the_broker_stores_is_for_its_user_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"

    async def scenario() -> None:
        async with running_server(tmp_path, _OWN_JOURNALS) as server:
            async with await runnel.connect(server.url) as bus:
                await bus.publish("own/a", b"1")
                await bus.publish("b", b"1")
                await bus.set_cursor("c", {"b": 1})
            _command("token", "add", "t", "--allow", "read:*", "--data", str(data))
            await server.stop()
            assert _SHARED not in server.stderr

    asyncio.run(scenario())
    export = tmp_path / "export.jsonl"
    _command("log", "export", str(data), "--to", str(export))
    assert stat.S_IMODE(export.stat().st_mode) == 0o600
    copy = tmp_path / "copy"
    _command("restore", str(data), str(copy))
    for directory in (data, copy):
        modes = _modes(directory)
        assert len(modes) > 10
        for name, mode in modes.items():
            assert mode == (0o700 if (directory / name).is_dir() else 0o600), (directory, name)


@pytest.mark.usefixtures("usual_umask")
def test_a_directory_that_was_there_keeps_its_permissions_and_is_warned_of(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(0o755)

    async def scenario() -> None:
        async with running_server(tmp_path) as server:
            async with await runnel.connect(server.url) as bus:
                await bus.publish("b", b"1")
            await server.stop()
            assert server.stderr.count(_SHARED) == 1
            assert '"mode": "0755"' in server.stderr

    asyncio.run(scenario())
    modes = _modes(data)
    assert modes.pop(".") == 0o755
    assert set(modes.values()) == {0o600, 0o700}


def test_a_journal_with_a_small_message_takes_little_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, _OWN_JOURNALS) as server:
            async with await runnel.connect(server.url) as bus:
                for number in range(10):
                    await bus.publish(f"own/{number}", b"1")
                files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
                taken_bytes = sum(path.stat().st_blocks * 512 for path in files)
                assert 10 * 64 * 1024 <= taken_bytes < 11 * 100 * 1024
            await server.stop()

    asyncio.run(scenario())


def _command(*words: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "runnel", *words], capture_output=True, check=False, text=True
    )
    assert ended.returncode == 0, ended.stderr
