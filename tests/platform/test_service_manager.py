"""A service manager that waits for the broker is told when it serves, and when it begins to end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runnel.platform.service_manager import ServiceState, notify
from tests.cli.conftest import ONLY_NATIVE

SECONDS_MAX = 30.0


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(SECONDS_MAX)
        listener.bind(address)
        yield listener


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """From the working directory on: whole paths of sockets have to be short."""
    monkeypatch.chdir(tmp_path)
    return "notify"


def test_state_is_told_at_the_address_of_the_environment(address: str) -> None:
    with manager(address) as listener:
        notify(ServiceState.READY, {"NOTIFY_SOCKET": address})
        assert listener.recv(100) == b"READY=1"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names without a file")
def test_an_address_may_be_a_name_without_a_file(tmp_path: Path) -> None:
    name = tmp_path.name + str(os.getpid())
    with manager("\0" + name) as listener:
        notify(ServiceState.STOPPING, {"NOTIFY_SOCKET": "@" + name})
        assert listener.recv(100) == b"STOPPING=1"


def test_without_an_address_nothing_is_said() -> None:
    notify(ServiceState.READY, {})
    notify(ServiceState.READY, {"NOTIFY_SOCKET": ""})


def test_a_manager_that_is_gone_is_warned_of(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    notify(ServiceState.READY, {"NOTIFY_SOCKET": address})
    assert "the service manager could not be notified" in caplog.text


def test_serve_says_that_it_is_ready_and_that_it_stops(address: str) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RUNNEL_")}
    words = ["serve", "--data", "memory:", "--listen", "127.0.0.1:0", *ONLY_NATIVE]
    with (
        manager(address) as listener,
        subprocess.Popen(
            [sys.executable, "-m", "runnel", *words],
            env=own | {"NOTIFY_SOCKET": address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as broker,
    ):
        try:
            assert listener.recv(100) == b"READY=1"
            assert broker.stdout is not None
            assert broker.stdout.readline().startswith(b"listening on ")
            broker.terminate()
            assert listener.recv(100) == b"STOPPING=1"
            _, told = broker.communicate(timeout=SECONDS_MAX)
            assert broker.returncode == 0, told
        finally:
            broker.kill()
