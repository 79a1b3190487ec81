"""A real broker for the tests of the commands that talk to one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

RULES = (
    'topics=[{ match = "live/*", keep = "none" }, { match = "split/*", partitions = 2 }, '
    '{ match = "memory/*", keep = "memory" }]'
)
LISTENING = "listening on "
# Tests of the other listeners open them at ports of their own.
ONLY_NATIVE = ("--http", "none", "--grpc", "none")
START_SECONDS_MAX = 30.0


class Running:
    """A `runnel` command that is under way."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._read = b""

    def has_output(self, within_s: float) -> bool:
        """Whether there is something to read."""
        return bool(self._read or select.select([self._stdout], [], [], within_s)[0])

    def line(self) -> str:
        """Its next line on standard output."""
        while b"\n" not in self._read:
            # A command that says nothing must fail the test, not hang it.
            assert select.select([self._stdout], [], [], START_SECONDS_MAX)[0], "nothing came"
            data = os.read(self._stdout, 65_536)
            assert data, self.process.communicate(timeout=30)
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def write(self, text: str) -> None:
        """To its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Ask it to end; its exit code and what it said on standard error."""
        self.process.send_signal(number)
        _, told = self.process.communicate(timeout=30)
        return self.process.returncode, told.decode()

    @property
    def _stdout(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()


def environment(url: str | None = None, token: str | None = None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RUNNEL_")}
    given = {"RUNNEL_URL": url, "RUNNEL_TOKEN": token}
    return own | {name: value for name, value in given.items() if value is not None}


@contextmanager
def running(
    words: Sequence[str], url: str | None = None, token: str | None = None
) -> Iterator[Running]:
    """A command in a process of its own; it is gone afterwards, whatever happens."""
    with subprocess.Popen(
        [sys.executable, "-m", "runnel", *words],
        env=environment(url, token),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    ) as process:
        try:
            yield Running(process)
        finally:
            if process.poll() is None:
                process.kill()


@contextmanager
def serving(directory: Path, *more: str) -> Iterator[tuple[Running, str]]:
    """`runnel serve` on a free port; the command and its URL."""
    words = ["serve", "--data", str(directory), "--listen", "127.0.0.1:0", *ONLY_NATIVE, *more]
    with running(words) as broker:
        line = broker.line()
        assert line.startswith(LISTENING), line
        yield broker, line.removeprefix(LISTENING)


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One for each module: that no process outlives a module is checked for all tests alike."""
    directory = tmp_path_factory.mktemp("broker")
    quick = ("--set", RULES, "--set", "broker.metrics_interval=100ms")
    with serving(directory, *quick) as (broker, url):
        yield url
        code, told = broker.end(signal.SIGTERM)
    assert code == 0, told


@pytest.fixture
def url(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The broker, which commands run in this process find by themselves."""
    monkeypatch.setenv("RUNNEL_URL", broker_url)
    return broker_url
