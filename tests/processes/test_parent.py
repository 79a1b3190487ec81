"""A parent with real processes as children, which behave as a file says."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

PARENT: Final = Path(__file__).with_name("fake_parent.py")
SECONDS_MAX: Final = 30.0


class RunningParent:
    """A parent process, what it prints, and what it and its children write to standard error."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._stderr = directory / "stderr"

    @property
    def lines(self) -> list[str]:
        return self._stderr.read_text().splitlines()

    def matching(self, pattern: str) -> list[re.Match[str]]:
        return [found for line in self.lines if (found := re.search(pattern, line))]

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Wait until so many lines match, and return these."""
        self.wait_until(lambda: len(self.matching(pattern)) >= count)
        return self.matching(pattern)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + SECONDS_MAX
        while not condition():
            assert time.monotonic() < ends_at, "\n".join(self.lines)
            time.sleep(0.01)

    def pid_of(self, node: str) -> int:
        """The process of this node that was launched last."""
        return int(self.wait_for(rf"^{node} (\d+) launched")[-1][1])

    def wait_listening(self) -> int:
        """Wait until it says that it listens; returns the port."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], SECONDS_MAX)[0], "\n".join(self.lines)
        said = self.process.stdout.readline().decode()
        assert said.startswith("listening on 127.0.0.1:"), "\n".join(self.lines)
        return int(said.rpartition(":")[2])

    def wait_end(self) -> int:
        return self.process.wait(SECONDS_MAX)


@contextmanager
def running_parent(
    directory: Path, count: int, *deeds: str, environment: Mapping[str, str] | None = None
) -> Iterator[RunningParent]:
    """A parent with so many children. Each deed is `NODE WHAT`, taken one for each life."""
    (directory / "deeds").write_text("".join(f"{deed}\n" for deed in deeds))
    with (
        (directory / "stderr").open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, str(PARENT), str(directory / "deeds"), str(count)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
        ) as process,
    ):
        try:
            yield RunningParent(directory, process)
        finally:
            children = psutil.Process(process.pid).children() if process.poll() is None else []
            process.kill()
            for child in children:
                child.kill()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_children_share_the_socket_and_end_with_the_parent(tmp_path: Path) -> None:
    with running_parent(tmp_path, 3) as parent:
        port = parent.wait_listening()
        pids = {parent.pid_of(f"node-{number}") for number in (1, 2, 3)}
        assert len(pids) == 3
        parent.process.send_signal(signal.SIGTERM)
        assert parent.wait_end() == 0
        ports = {found[1] for found in parent.wait_for(r"end hurried=False listens=(\d+)", 3)}
        assert ports == {str(port)}
        assert parent.lines[-1].endswith(" closed")
        assert not parent.matching("dead")
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_killed_child_is_declared_dead_and_started_again(tmp_path: Path) -> None:
    with running_parent(tmp_path, 2) as parent:
        parent.wait_listening()
        os.kill(parent.pid_of("node-2"), signal.SIGKILL)
        parent.wait_for(r"^parent \d+ dead node-2 1$")
        parent.wait_for(r"^node-2 \d+ launched life=2 former='SIGKILL' ")
        parent.wait_for(r"^log a process has ended and is started again process=node-2 end=SIGKILL")
        assert len(parent.matching(r"^node-1 \d+ launched")) == 1
        parent.process.send_signal(signal.SIGTERM)
        assert parent.wait_end() == 0


def test_child_that_ends_unasked_is_declared_dead_whatever_its_exit_code_is(
    tmp_path: Path,
) -> None:
    with running_parent(tmp_path, 2, "node-1 serve", "node-1 vanish") as parent:
        parent.wait_listening()
        os.kill(parent.pid_of("node-1"), signal.SIGKILL)
        parent.wait_for(r"^parent \d+ dead node-1 2$")
        parent.wait_for(r"^node-1 \d+ launched life=3 former='' ")
        parent.process.send_signal(signal.SIGTERM)
        assert parent.wait_end() == 0


def test_service_manager_hears_of_the_whole_broker_from_the_parent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(SECONDS_MAX)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        with running_parent(tmp_path, 2, environment=environment) as parent:
            parent.wait_listening()
            assert manager.recv(100) == b"READY=1"
            parent.process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert parent.wait_end() == 0
            found = parent.matching(r"launched .* manager=(.*)$")
            assert {each[1] for each in found} == {"None"}


def test_crash_loop_slows_down(tmp_path: Path) -> None:
    crashes = ["node-2 serve", *["node-2 crash"] * 4]
    with running_parent(tmp_path, 2, *crashes) as parent:
        parent.wait_listening()
        begin = time.monotonic()
        os.kill(parent.pid_of("node-2"), signal.SIGKILL)
        parent.wait_for(r"^node-2 \d+ launched life=6")
        # 100, 200, 400, 800 and 1600 ms lie between them.
        assert time.monotonic() - begin >= 3.1
        told = [int(found[1]) for found in parent.matching(r"after_ms=(\d+)")]
        assert told == [100, 200, 400, 800, 1600]
        parent.process.send_signal(signal.SIGTERM)
        assert parent.wait_end() == 0


def test_silent_child_is_killed_and_started_again(tmp_path: Path) -> None:
    with running_parent(tmp_path, 2, "node-1 hang") as parent:
        parent.wait_listening()
        parent.wait_for(r"^log a process is killed process=node-1 why=.it has sent no heartbeat")
        parent.wait_for(r"^node-1 \d+ launched life=2")
        parent.process.send_signal(signal.SIGTERM)
        assert parent.wait_end() == 0


def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    with running_parent(tmp_path, 3) as parent:
        parent.wait_listening()
        pids = [parent.pid_of(f"node-{number}") for number in (1, 2, 3)]
        parent.process.kill()
        assert parent.wait_end() == -signal.SIGKILL
        parent.wait_for("orphaned", 3)
        parent.wait_until(lambda: not any(map(is_running, pids)))


def test_failure_of_a_child_at_the_start_is_that_of_the_parent(tmp_path: Path) -> None:
    with running_parent(tmp_path, 3, "node-2 refuse") as parent:
        assert parent.wait_end() == 2
        (failed,) = parent.matching("failed (.*)$")
        assert failed[1] == "SettingsError: tls_key: no such file"
        assert parent.process.stdout is not None
        assert parent.process.stdout.read() == b""


def test_crashes_at_the_start_end_the_parent(tmp_path: Path) -> None:
    with running_parent(tmp_path, 2, *["node-1 crash"] * 5) as parent:
        assert parent.wait_end() == 1
        assert len(parent.matching(r"^node-1 \d+ launched")) == 5


def test_second_signal_hurries(tmp_path: Path) -> None:
    with running_parent(tmp_path, 2, "node-1 stubborn", "node-2 stubborn") as parent:
        parent.wait_listening()
        parent.process.send_signal(signal.SIGINT)
        parent.wait_for("end hurried=False", 2)
        parent.process.send_signal(signal.SIGINT)
        assert parent.wait_end() == 0
        assert len(parent.matching("end hurried=True")) == 2


def test_children_get_new_settings_in_turn(tmp_path: Path) -> None:
    with running_parent(tmp_path, 3) as parent:
        parent.wait_listening()
        parent.process.send_signal(signal.SIGHUP)
        told = parent.wait_for(r"^(node-\d) \d+ settings level=debug node=(node-\d)$", 3)
        assert [found[1] for found in told] == ["node-1", "node-2", "node-3"]
        assert all(found[1] == found[2] for found in told)
        # A child that starts later gets them with its launch.
        os.kill(parent.pid_of("node-3"), signal.SIGKILL)
        parent.wait_for(r"^node-3 \d+ launched life=2")
        parent.process.send_signal(signal.SIGTERM)
        assert parent.wait_end() == 0
        assert parent.matching("level debug")


def test_signal_of_a_terminal_reaches_the_parent_alone(tmp_path: Path) -> None:
    with running_parent(tmp_path, 2) as parent:
        parent.wait_listening()
        groups = {os.getpgid(parent.pid_of(f"node-{number}")) for number in (1, 2)}
        assert os.getpgid(parent.process.pid) not in groups
        parent.process.send_signal(signal.SIGTERM)
        assert parent.wait_end() == 0
