"""Run every check at once and say how each went: style, types, import layers, tests.

With arguments, hands them to pytest and runs nothing else. pytest's output is passed on as it
comes; the others are silent unless they fail. An interrupt ends everything that was started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SOURCES = tuple(
    name
    for name in ("src", "tests", "bench", "examples", "tools")
    if next((ROOT / name).rglob("*.py"), None) is not None
)
# Bytecode is kept, whatever the caller says: a test run starts Python by the hundred, and in a fresh clone
# each of these processes would compile all its imports, which takes longer than most of their work.
ENVIRONMENT = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}
COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ
GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """A command, and how to put right by hand what it finds."""

    name: str
    command: tuple[str, ...]
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: Check
    code: int
    seconds: float
    output: bytes

    def line(self) -> str:
        word, colour = ("ok", "32") if self.code == 0 else ("FAILED", "31")
        if COLOUR:
            word = f"\x1b[{colour}m{word}\x1b[0m"
        return f"[check] {self.check.name}: {word} in {self.seconds:.1f} s"


def tool(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(BIN / name), *arguments)


STATIC_CHECKS = (
    Check(
        "ruff check",
        tool("ruff", "check", "--quiet", *SOURCES),
        "many of these: .venv/bin/ruff check --fix",
    ),
    Check(
        "ruff format",
        tool("ruff", "format", "--check", "--quiet", "--diff", *SOURCES),
        ".venv/bin/ruff format",
    ),
    Check("mypy", tool("mypy", *SOURCES)),
    Check("import layers", tool("lint-imports", "--no-logo")),
)
TESTS = Check(
    "pytest",
    tool(
        "pytest",
        "-n",
        "auto",
        "--dist",
        "loadgroup",
        "--quiet",
        f"--color={'yes' if COLOUR else 'no'}",
    ),
)


class CheckScreen:
    """Shared standard output: pytest's bytes as they come, and our lines only between its lines."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._at_line_start = True

    def line(self, text: str) -> None:
        self._waiting.append(text.encode() + b"\n")
        if self._at_line_start:
            self._flush()

    def stream(self, chunk: bytes) -> None:
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            sys.stdout.buffer.write(head + newline)
            self._flush()
        sys.stdout.buffer.write(tail)
        self._at_line_start = not tail if newline else False
        sys.stdout.buffer.flush()

    def _flush(self) -> None:
        sys.stdout.buffer.write(b"".join(self._waiting))
        sys.stdout.buffer.flush()
        self._waiting.clear()


async def run(check: Check, screen: CheckScreen, *, live: bool) -> CheckResult:
    """Run one check to its end; if cancelled, end it and everything that it started."""
    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *check.command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # a group of its own, so that it can be ended whole
    )
    assert process.stdout is not None
    output = bytearray()
    try:
        while chunk := await process.stdout.read(65536):
            if live:
                screen.stream(chunk)
            else:
                output += chunk
        code = await process.wait()
    except asyncio.CancelledError:
        await end(process)
        raise
    outcome = CheckResult(check, code, time.monotonic() - begun, bytes(output))
    screen.line(outcome.line())
    return outcome


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask a process group to stop, then kill it."""
    for number, patience_seconds in ((signal.SIGINT, GRACE_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            async with asyncio.timeout(patience_seconds):
                await process.wait()
        except TimeoutError:
            continue


async def run_all() -> int:
    screen = CheckScreen()
    begun = time.monotonic()
    whole = asyncio.current_task()
    assert whole is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, whole.cancel)
    try:
        async with asyncio.TaskGroup() as group:
            # One alone would leave cores idle while it starts and ends.
            started = [group.create_task(run(check, screen, live=False)) for check in STATIC_CHECKS]
            started.append(group.create_task(run(TESTS, screen, live=True)))
    except asyncio.CancelledError:
        print("\n[check] interrupted; everything was stopped", flush=True)
        return 130
    outcomes = [task.result() for task in started]
    failed = [outcome for outcome in outcomes if outcome.code != 0]
    for outcome in failed:
        if outcome.output:
            print(f"\n[check] {outcome.check.name} says:", flush=True)
            sys.stdout.buffer.write(outcome.output.rstrip() + b"\n")
        if outcome.check.remedy:
            print(f"[check] to put it right: {outcome.check.remedy}")
    seconds = time.monotonic() - begun
    if failed:
        names = ", ".join(outcome.check.name for outcome in failed)
        print(f"\n[check] {len(failed)} of {len(outcomes)} failed in {seconds:.1f} s: {names}")
        return 1
    print(f"[check] all {len(outcomes)} passed in {seconds:.1f} s")
    return 0


def only_pytest(arguments: list[str]) -> None:
    """Replace this process by pytest. Paths are relative to the caller's directory, or to the root."""
    here = Path.cwd()
    resolved = []
    for argument in arguments:
        path, colons, rest = argument.partition("::")
        if not argument.startswith("-") and (here / path).exists():
            argument = f"{here / path}{colons}{rest}"
        resolved.append(argument)
    # These options want one process: output at once, a debugger, or the caller's number of processes.
    alone = (
        "-n",
        "-s",
        "--capture=no",
        "--numprocesses",
        "--pdb",
        "--trace",
        "--collect-only",
        "--co",
    )
    parallel = [] if any(argument.startswith(alone) for argument in arguments) else ["-n", "auto"]
    os.chdir(ROOT)
    command = tool("pytest", *parallel, *resolved)
    os.execve(command[0], command, ENVIRONMENT)


def main(arguments: list[str]) -> int:
    if arguments:
        only_pytest(arguments)
    return asyncio.run(run_all())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
