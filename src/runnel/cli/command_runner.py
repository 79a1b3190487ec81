"""Runs a shell command for each message of a consumer. The exit code says whether the message is done."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TextIO

import msgspec
import typer

from runnel.cli.render.messages import escaped
from runnel.cli.render.tables import counted
from runnel.cli.standard_streams import write_all
from runnel.errors import ClientFault

if TYPE_CHECKING:
    from runnel.client import Consumer, Work

# Exit codes of a shell for a command that does not exist or cannot be executed. The message did not fail.
_CANNOT_RUN: Final = (126, 127)
# Exit codes of a command that wrote to a pipe without a reader: from the system, or from its shell.
_NOBODY_READS: Final = (-signal.SIGPIPE, 128 + signal.SIGPIPE)
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)
# Long enough for any command. A user who does not want to wait presses Ctrl-C again.
_DRAIN_S: Final = 86_400.0
_READ_BYTES: Final = 1 << 16
_LAST_LINE_BYTES_MAX: Final = 1 << 12


class Outcome(msgspec.Struct, frozen=True):
    """How a command ended: its exit code, or the negative number of the signal that ended it."""

    code: int
    last_line: str  # of standard error

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"ended by signal {-self.code} ({signal.strsignal(-self.code)})"


class CommandRunner:
    """Runs up to `concurrency` commands at a time, until `count` messages came or none came for `timeout_s`.

    The first Ctrl-C or SIGTERM starts no further commands and lets running ones finish. The second sends them
    SIGTERM, the third SIGKILL.
    """

    def __init__(
        self, command: str, *, concurrency: int, count: int | None, timeout_s: float | None
    ) -> None:
        self.interrupts = 0
        self._command = command
        self._concurrency = concurrency
        self._count = count
        self._timeout_s = timeout_s
        self._stop = asyncio.Event()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._begun = 0
        self._busy = 0  # workers whose message is not settled yet
        self._running: set[Process] = set()
        self._problem: Exception | None = None

    async def run(self, consumer: Consumer) -> int:
        """Process messages until done; return how many commands were started."""
        loop = asyncio.get_running_loop()
        for number in _INTERRUPTS:
            loop.add_signal_handler(number, self._interrupt)
        self._begin_idling()
        try:
            await consumer.process(
                self._do, concurrency=self._concurrency, stop=self._stop, drain_s=_DRAIN_S
            )
        finally:
            self._end_idling()
            for number in _INTERRUPTS:
                loop.remove_signal_handler(number)
        if self._problem is not None:
            raise self._problem
        return self._begun

    def _interrupt(self) -> None:
        self.interrupts += 1
        self._stop.set()
        if self.interrupts > 1:
            for process in self._running:
                _end(process, signal.SIGTERM if self.interrupts == 2 else signal.SIGKILL)
        elif self._busy:
            them = "it" if self._busy == 1 else "them"
            line = f"waiting for {counted(self._busy, 'command')}; Ctrl-C again ends {them}"
            typer.echo(line, err=True)

    async def _do(self, work: Work) -> None:
        if self._problem is not None or self._begun == self._count:
            await _leave_undone()
        self._begun += 1
        self._busy += 1
        self._end_idling()
        if self._begun == self._count:
            self._stop.set()
        try:
            outcome = await self._run(work)
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise  # the key or the tags are larger than an environment may be
            self._problem = error
            await _leave_undone()
        else:
            await self._settle(work, outcome)
        finally:
            self._busy -= 1
            if not self._busy:
                self._begin_idling()

    async def _run(self, work: Work) -> Outcome:
        process = await start_command(self._command, work)
        self._running.add(process)
        if self.interrupts > 1:  # the interrupt came while the command was being started
            _end(process, signal.SIGTERM)
        try:
            return await wait_ended(process)
        except BaseException:
            _end(process, signal.SIGTERM)
            raise
        finally:
            self._running.discard(process)

    async def _settle(self, work: Work, outcome: Outcome) -> None:
        if outcome.code in _CANNOT_RUN:
            self._problem = ClientFault(
                f"--exec {self._command!r} cannot be run: {outcome.last_line or outcome.how}"
            )
            await _leave_undone()
        elif outcome.code in _NOBODY_READS and _is_unread(sys.stdout):
            # The reader of the pipe has left (`… | head`): every further command would fail, and no message causes
            # that.
            self._problem = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            await _leave_undone()
        elif outcome.code and self.interrupts > 1:
            await _leave_undone()
        elif outcome.code:
            where = f"{work.topic}[{work.partition}]@{work.offset}"
            line = f"failed: {where}, delivery {work.delivery_count}: {outcome.how}"
            typer.echo(escaped(line), err=True)
            # `Consumer.process` acknowledges what is not settled when the function returns; this message is settled
            # here.
            await work.nack(reason=outcome.last_line or outcome.how)

    def _begin_idling(self) -> None:
        if self._timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(self._timeout_s, self._stop.set)

    def _end_idling(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


def _is_unread(stream: TextIO | None) -> bool:
    """Whether the stream is a pipe whose reader has left."""
    if stream is None:
        return False
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are reported whether requested or not
    return any(event & select.POLLERR for _, event in poll.poll(0))


async def _leave_undone() -> None:
    """Cancel the calling worker, which ends all processing. Its message goes back and does not count as failed."""
    worker = asyncio.current_task()
    assert worker is not None
    worker.cancel()
    await asyncio.sleep(0)


async def start_command(command: str, work: Work) -> Process:
    """Start the command in a shell of its own session, with the payload as its standard input."""
    # A file instead of a pipe: the command may leave all or part of it unread.
    with tempfile.TemporaryFile() as payload:
        payload.write(work.payload)
        payload.seek(0)
        return await asyncio.create_subprocess_shell(
            command,
            stdin=payload,
            stderr=asyncio.subprocess.PIPE,
            env=variables(work, os.environ),
            # Ctrl-C at the terminal reaches Runnel only: a command that has begun finishes.
            start_new_session=True,
        )


async def wait_ended(process: Process) -> Outcome:
    """Relay the standard error of a command until the command ends."""
    assert process.stderr is not None
    last_line = await _relay(process.stderr)
    return Outcome(await process.wait(), last_line)


def _end(process: Process, number: signal.Signals) -> None:
    """Send a signal to the shell and to everything it started."""
    with suppress(ProcessLookupError):  # the command has just ended
        os.killpg(process.pid, number)


def variables(work: Work, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command: the facts of its message besides the payload.

    A key that contains a zero byte is left out: no variable can hold it.
    """
    found = {
        **inherited,
        "MESSAGE_TOPIC": work.topic,
        "MESSAGE_PARTITION": str(work.partition),
        "MESSAGE_OFFSET": str(work.offset),
        "MESSAGE_ATTEMPT": str(work.delivery_count),
        "MESSAGE_TAGS": msgspec.json.encode(dict(work.tags)).decode(),
    }
    found.pop("MESSAGE_KEY", None)  # inherited when Runnel itself runs in such a command
    if work.key is not None and b"\0" not in work.key:
        found["MESSAGE_KEY"] = os.fsdecode(work.key)
    return found


async def _relay(stderr: asyncio.StreamReader) -> str:
    """Copy a command's standard error to ours; return its last line."""
    tail = b""
    while data := await stderr.read(_READ_BYTES):
        if sys.stderr is not None:
            await write_all(sys.stderr.fileno(), data)
        tail = (tail + data)[-_LAST_LINE_BYTES_MAX:]
    lines = tail.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
