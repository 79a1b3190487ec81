"""A terminal in which a command keeps running: what it prints is read as it comes, and Ctrl-C ends it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import psutil

from tests.docs.output import end_of, normal, pattern_of, plain

WAIT_SECONDS_MAX: Final = 20.0
_INTERRUPTED: Final = (0, 130, -signal.SIGINT)
_CHUNK_BYTES: Final = 65_536


class Terminal:
    """One command on a pseudo-terminal, so that it speaks as it does to a person."""

    def __init__(self, command: str, directory: Path, environment: Mapping[str, str]) -> None:
        self.command = command
        self.was_ended = False
        self._printed = bytearray()
        self._has_printed = threading.Condition()
        self._shown_lines = 0  # of its normal text, by the blocks so far
        self._own, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=directory,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,  # a process group, which Ctrl-C reaches as a whole
        )
        os.close(theirs)
        # Somebody has to read all the time: a terminal that is full holds its command up.
        self._reading = threading.Thread(target=self._read, name=f"terminal of {command}")
        self._reading.start()

    def text(self) -> str:
        """Everything it has printed."""
        with self._has_printed:
            return plain(bytes(self._printed))

    def wait_for(self, pattern: str) -> None:
        """Until it has printed something that fits."""
        wanted = re.compile(pattern)
        if not self._wait(lambda: wanted.search(self.text()) is not None):
            raise AssertionError(
                f"{self.command!r} did not print {pattern!r}, but\n{end_of(self.text())}"
            )

    def wait_for_output(
        self, expected: str, documented: Callable[[str], str], *, do_numbers_vary: bool
    ) -> None:
        """Until it has printed these lines, behind those that were shown before."""
        pattern = pattern_of(expected, do_numbers_vary=do_numbers_vary)

        def end_of_it() -> int | None:
            text = normal(documented(self.text()), do_numbers_vary=do_numbers_vary)
            lines = text.splitlines(keepends=True)
            for first in range(self._shown_lines, len(lines)):
                if found := pattern.match("".join(lines[first:])):
                    return first + found[0].count("\n")
            return None

        if not self._wait(lambda: end_of_it() is not None):
            raise AssertionError(
                f"the page shows of {self.command!r}\n{expected}\nand this was printed\n{end_of(self.text())}"
            )
        self._shown_lines = end_of_it() or 0

    def is_at_rest(self) -> bool:
        """Whether it, and all that it started, has nothing to do."""
        try:
            return all(process.status() == psutil.STATUS_SLEEPING for process in self._family())
        except psutil.NoSuchProcess:
            return False

    def is_connected(self) -> bool:
        """Whether it has reached somebody."""
        try:
            return any(
                line.status == psutil.CONN_ESTABLISHED
                for process in self._family()
                for line in process.net_connections("tcp")
            )
        except psutil.NoSuchProcess:
            return False

    def interrupt(self) -> None:
        """Ctrl-C. It has to be running still, and to end as one who was interrupted."""
        self._end(signal.SIGINT)
        if self._process.returncode not in _INTERRUPTED:
            raise AssertionError(
                f"{self.command!r} ended with {self._process.returncode}:\n{end_of(self.text())}"
            )

    def kill(self) -> None:
        """As the end of power would."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Whatever is left of it goes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reading.join()
        os.close(self._own)

    def _family(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def _end(self, number: signal.Signals) -> None:
        if self._process.poll() is not None:
            raise AssertionError(f"{self.command!r} did not keep running:\n{end_of(self.text())}")
        self.was_ended = True
        os.killpg(self._process.pid, number)
        self._process.wait(WAIT_SECONDS_MAX)
        self._reading.join(WAIT_SECONDS_MAX)

    def _wait(self, is_fulfilled: Callable[[], bool]) -> bool:
        with self._has_printed:
            return (
                self._has_printed.wait_for(
                    lambda: is_fulfilled() or not self._reading.is_alive(), WAIT_SECONDS_MAX
                )
                and is_fulfilled()
            )

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._own, _CHUNK_BYTES)
            except OSError:  # the last who had the other end open has ended
                data = b""
            with self._has_printed:
                self._printed += data
                self._has_printed.notify_all()
            if not data:
                return
