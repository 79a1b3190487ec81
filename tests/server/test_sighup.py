"""SIGHUP reloads the settings of a running broker. On a terminal it means that the terminal is gone: it drains."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runnel.client import connect
from runnel.config import Settings
from runnel.embedded import open_log
from tests.server.server_process import SECONDS_MAX, ServerProcess, running_server

pytestmark = pytest.mark.slow

RULES = """
[[topics]]
match = "sensors/*"
journal = "sensors"
rotate.bytes = "{rotate}"
last_value = {last_value}
"""


def lines_of(server: ServerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.stderr.splitlines()]


async def hang_up(server: ServerProcess, event: str) -> list[dict[str, Any]]:
    """Send SIGHUP, wait until this was logged, and return the log since then."""
    before = len(lines_of(server))
    server.send_signal(signal.SIGHUP)
    async with asyncio.timeout(SECONDS_MAX):
        while event not in [line["event"] for line in lines_of(server)[before:]]:
            assert server.process.status() != "zombie", server.stderr
            await asyncio.sleep(0.02)
    return lines_of(server)[before:]


def segments_in(directory: Path) -> int:
    return len(list(directory.glob("data/journals/sensors/0/*.segment")))


def test_changed_rules_and_levels_hold_after_sighup_and_the_rest_is_reported(
    tmp_path: Path,
) -> None:
    file = tmp_path / "runnel.toml"
    file.write_text(RULES.format(rotate="1MiB", last_value="false"))

    async def scenario() -> None:
        async with (
            running_server(tmp_path, options=("--config", str(file))) as server,
            connect(server.url) as bus,
        ):
            for _ in range(4):
                await bus.publish("sensors/a", bytes(8000))
            assert segments_in(tmp_path) == 1
            file.write_text(
                'log_level = "debug"\ncluster = "other"\n[limits]\ntags_max = 3\n'
                + RULES.format(rotate="16KiB", last_value="true")
                + 'keep = "memory"\n'
            )
            told = await hang_up(server, "settings reloaded")
            changed = [
                (line["key"], line["old"], line["new"])
                for line in told
                if line["event"] == "setting changed"
            ]
            assert changed == [
                ("log_level", '"info"', '"debug"'),
                ("topics[0].keep", '"disk"', '"memory"'),
                ("topics[0].rotate.bytes", '"1MiB"', '"16KiB"'),
                ("topics[0].last_value", "false", "true"),
            ]
            waiting = [
                (line["key"], line["running"], line["file"])
                for line in told
                if line["event"] == "setting needs a restart"
            ]
            assert waiting == [
                ("cluster.name", '"runnel"', '"other"'),
                ("limits.tags_max", "64", "3"),
            ]
            (stays,) = [line for line in told if line["event"] == "a topic stays as it was made"]
            assert "'sensors/a' stays with keep = disk" in stays["text"]
            # Small segments from now on, by a rule of its journal with keep = "disk".
            file.write_text(RULES.format(rotate="16KiB", last_value="true"))
            await hang_up(server, "settings reloaded")
            for _ in range(4):
                await bus.publish("sensors/a", bytes(8000))
            assert segments_in(tmp_path) > 2
            await server.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('[[topics]]\nmatch = "sensors/*"\nrotate.bytes = "a lot"', "a lot"),
        ('[[topics]]\nmatch = "["', "topics[0].match"),
        ("[[topics", "not valid TOML"),
        (None, "cannot read the settings file"),
        ("a pipe", "a pipe cannot be read again"),
    ],
)
def test_broken_settings_leave_everything_as_it_was(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    file = tmp_path / "runnel.toml"
    file.write_text(RULES.format(rotate="16KiB", last_value="false"))

    async def scenario() -> None:
        async with (
            running_server(tmp_path, options=("--config", str(file))) as server,
            connect(server.url) as bus,
        ):
            if content in {None, "a pipe"}:
                file.unlink()
                if content == "a pipe":
                    os.mkfifo(file)
            else:
                file.write_text(content)
            told = await hang_up(
                server, "the settings were not reloaded, everything stays as it was"
            )
            assert problem in told[-1]["problem"]
            for _ in range(8):
                await bus.publish("sensors/a", bytes(8000))
            assert segments_in(tmp_path) > 2
            await server.stop()

    asyncio.run(scenario())


# The session's leader opens the terminal: that makes it the session's controlling terminal.
_ON_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
os.execv(sys.executable, [sys.executable, "-m", "runnel", *sys.argv[2:]])
"""


def test_closing_the_terminal_drains_the_broker(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    words = ["serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    words += ["--http", "none", "--grpc", "none"]
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_TERMINAL, os.ttyname(slave), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        said = b""
        ends_at = time.monotonic() + SECONDS_MAX
        while b"Ctrl-C ends it" not in said:
            assert select.select([master], [], [], max(0.0, ends_at - time.monotonic()))[0], said
            said += os.read(master, 4096)
        os.close(slave)
        os.close(master)  # as a terminal window does when it is closed
        assert process.wait(SECONDS_MAX) == 0
    finally:
        process.kill()
        process.wait(SECONDS_MAX)

    async def was_clean() -> bool:
        async with open_log(tmp_path / "data", Settings()) as log:
            return log.recovered.was_clean

    assert asyncio.run(was_clean())
