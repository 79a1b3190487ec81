"""A process of the demo: starts it, reads its lines, sends it commands, and ends it with all its children."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Final

_PATIENCE_S: Final = 10.0
_LINES: Final = 5
_LINE_CHARS: Final = 300
_REASON: Final = re.compile(r"[:\w. ]*(Error|Exception|Fault|Unavailable|error)\b.*: ")


class DemoFailedError(Exception):
    """The demo cannot continue; the text says why, and where to read more."""


class Child:
    """`python -m MODULE …`, with standard error in a file. It must not end unless it was asked to."""

    def __init__(self, name: str, directory: Path, *words: str) -> None:
        self.name = name
        self._directory = directory
        self._diagnostics = directory / "logs" / f"{name}.log"
        self._words = words
        self._running: subprocess.Process | None = None
        self._asked_to_end: subprocess.Process | None = None
        self._is_heard = asyncio.Event()

    async def start(self, *more: str) -> None:
        self._diagnostics.parent.mkdir(exist_ok=True)
        # Settings of Runnel in the user's shell are not for this broker and its clients.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RUNNEL_")}
        with self._diagnostics.open("ab") as diagnostics:
            self._running = await subprocess.create_subprocess_exec(
                sys.executable,
                "-P",  # not from the current directory
                "-m",
                *self._words,
                *more,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=diagnostics,
                cwd=self._directory,
                env=environment,
                # Its own process group: Ctrl-C reaches only this process, and all its children can be ended with it.
                start_new_session=True,
            )

    @property
    def _process(self) -> subprocess.Process:
        assert self._running is not None, "it has not been started"
        return self._running

    # --- Reading and writing lines ---

    async def first_line(self, *, within_s: float) -> str:
        """The next line; empty if the process ended without one, or took too long."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                return (await self._process.stdout.readline()).decode().strip()
        except TimeoutError:
            return ""

    async def lines(self) -> AsyncIterator[bytes]:
        """Its lines, until it ends. Raises DemoFailedError if it ended by itself."""
        process = self._process  # it may be started again meanwhile
        assert process.stdout is not None
        async for line in process.stdout:
            yield line
        self._is_heard.set()
        code = await process.wait()
        if self._asked_to_end is not process:
            raise self.failure(f"ended with code {code}")

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        if self._process.returncode is None:
            self._process.stdin.write(f"{line}\n".encode())

    # --- Ending ---

    def ask_to_end(self, number: Signals | None = None) -> None:
        """From now on it may end. With a number, send that signal to it and all its children."""
        self._asked_to_end = self._process
        if number is not None and self._process.returncode is None:
            os.killpg(self._process.pid, number)

    async def wait_end(self, within_s: float) -> None:
        """Wait until it has ended well and its last line was read. Raises DemoFailedError otherwise."""
        self.ask_to_end()
        try:
            async with asyncio.timeout(within_s):
                code = await self._process.wait()
                await self._is_heard.wait()
        except TimeoutError:
            raise self.failure(f"did not end within {within_s:.0f} s") from None
        if code != 0:
            raise self.failure(f"ended with code {code}")

    async def end(self, number: Signals) -> int:
        """Its exit code. If it ignores the request to end, it is killed."""
        if self._running is None:
            return 0
        self.ask_to_end(number)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._process.wait()
        except TimeoutError:
            self.ask_to_end(SIGKILL)
            return await self._process.wait()

    def failure(self, problem: str) -> DemoFailedError:
        """The error, with those lines of its output that look like a reason."""
        said = self._diagnostics.read_text(errors="replace").splitlines()
        reasons = [line for line in said if _REASON.match(line)] or said
        shown = "".join(f"\n    {line[:_LINE_CHARS]}" for line in reasons[:_LINES])
        return DemoFailedError(
            f"{self.name} {problem}; {self._diagnostics} has{shown or ' nothing'}"
        )
