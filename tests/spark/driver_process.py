"""The other end of tests/spark/driver.py: starts it, asks it for jobs, and kills it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from tests.spark import driver

# Far more than it takes, also on a machine that is busy with other tests.
SECONDS_MAX: Final = 240.0
_END_S: Final = 30.0


class DriverFailedError(Exception):
    """A job failed in the driver: the reason, as `runnel pipeline` would tell it."""


class Driver:
    """A driver of a master, started when it is first asked for something; so is another after it was killed.

    Use it in a `with`. What it and Spark say is in `directory`/driver.log.
    """

    def __init__(self, master: str, directory: Path, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-W", "ignore", driver.__file__, master, str(directory)]
        self._environment = environment
        self._log = directory / "driver.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        try:
            self._process.communicate(timeout=_END_S)  # it ends when there is nothing more to do
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """The driver, its JVM and what Python that one started: nothing of them does anything more."""
        assert self._process is not None
        with suppress(ProcessLookupError):  # if all of them have ended by themselves
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None

    def do(self, job: str, **arguments: Any) -> Any:
        """What a job returned. DriverFailedError if it failed there."""
        answers = self.begin(job, **arguments).stdout
        assert answers is not None
        is_in_time = bool(select.select([answers], [], [], SECONDS_MAX)[0])
        line = answers.readline() if is_in_time else b""
        if not line:
            # The next test gets another: this one is gone, or would answer when it is not asked any more.
            self.kill()
            what = (
                "the driver ended" if is_in_time else f"{job} takes more than {SECONDS_MAX:.0f} s"
            )
            raise AssertionError(f"{what}: {self._told()}")
        answer = json.loads(line)
        if "error" in answer:
            raise DriverFailedError(answer["error"])
        return answer["value"]

    def begin(self, job: str, **arguments: Any) -> subprocess.Popen[bytes]:
        """A job whose result is not awaited."""
        if self._process is None:
            self._process = self._started()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._process

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # so that its JVM and workers can be killed with it
            )

    def wait_for_file(self, path: Path) -> None:
        """By which a job shows how far it is."""
        ends_at_s = time.monotonic() + SECONDS_MAX
        while not path.exists():
            assert self._process is not None
            assert self._process.poll() is None, self._told()
            assert time.monotonic() < ends_at_s, self._told()
            time.sleep(0.05)

    def _told(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]
