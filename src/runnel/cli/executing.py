"""Runs a command for each message that a consumer gets; its exit code says whether the message is done."""

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

from runnel.cli.messages import escaped
from runnel.cli.streams import write_all
from runnel.cli.tables import counted
from runnel.errors import ClientFault

if TYPE_CHECKING:
    from runnel.client import Consumer, Work

# What a shell says of a command that is not there, or is none. The message is not to blame.
_CANNOT_RUN: Final = (126, 127)
# What became of a command that wrote to a pipe without a reader: told by the system, or by its shell.
_NOBODY_READS: Final = (-signal.SIGPIPE, 128 + signal.SIGPIPE)
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)
# Whoever does not want to wait for what runs presses Ctrl-C again.
_DRAIN_S: Final = 86_400.0
_READ_BYTES: Final = 1 << 16
_LAST_LINE_BYTES_MAX: Final = 1 << 12


class Outcome(msgspec.Struct, frozen=True):
    """How a command ended: its exit code, or the negative number of a signal."""

    code: int
    last_line: str  # of standard error

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"ended by signal {-self.code} ({signal.strsignal(-self.code)})"


class Executor:
    """Runs the command, so many at a time, until enough messages came or none has come for long.

    Ctrl-C and SIGTERM begin nothing more; those that run may finish. A second one ends them, a third one at once.
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
        self._busy = 0  # workers whose message is not settled
        self._running: set[Process] = set()
        self._problem: Exception | None = None

    async def run(self, consumer: Consumer) -> int:
        """For how many messages the command was run."""
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
            told = f"waiting for {counted(self._busy, 'command')}; Ctrl-C again ends {them}"
            typer.echo(told, err=True)

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
                raise  # its key or its tags are more than a command can be told
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
        if self.interrupts > 1:  # it came while the command was being started
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
            # `… | head` has left: every further command would fail, and no message is to blame for that.
            self._problem = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            await _leave_undone()
        elif outcome.code and self.interrupts > 1:
            await _leave_undone()
        elif outcome.code:
            where = f"{work.topic}[{work.partition}]@{work.offset}"
            told = f"failed: {where}, delivery {work.delivery_count}: {outcome.how}"
            typer.echo(escaped(told), err=True)
            # Processing acknowledges what is left when the function returns; of this nothing is.
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
    """Whether it is a pipe whose reader has gone."""
    if stream is None:
        return False
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are told whether asked for or not
    return any(event & select.POLLERR for _, event in poll.poll(0))


async def _leave_undone() -> None:
    """End the worker that calls this, and with it all processing: its message goes back, and has not failed."""
    worker = asyncio.current_task()
    assert worker is not None
    worker.cancel()
    await asyncio.sleep(0)


async def start_command(command: str, work: Work) -> Process:
    """In a shell, with the payload as its input, and in a session of its own."""
    # A file rather than a pipe: the command may leave it unread, as a whole or in part.
    with tempfile.TemporaryFile() as payload:
        payload.write(work.payload)
        payload.seek(0)
        return await asyncio.create_subprocess_shell(
            command,
            stdin=payload,
            stderr=asyncio.subprocess.PIPE,
            env=variables(work, os.environ),
            # Ctrl-C at the terminal is for us: the command shall finish what it has begun.
            start_new_session=True,
        )


async def wait_ended(process: Process) -> Outcome:
    """Pass on what a command says on standard error until it has ended."""
    assert process.stderr is not None
    last_line = await _relay(process.stderr)
    return Outcome(await process.wait(), last_line)


def _end(process: Process, number: signal.Signals) -> None:
    """The shell and all that it has started."""
    with suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, number)


def variables(work: Work, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a command learns of its message besides the payload. No variable can hold a key with a zero byte."""
    found = {
        **inherited,
        "MESSAGE_TOPIC": work.topic,
        "MESSAGE_PARTITION": str(work.partition),
        "MESSAGE_OFFSET": str(work.offset),
        "MESSAGE_ATTEMPT": str(work.delivery_count),
        "MESSAGE_TAGS": msgspec.json.encode(dict(work.tags)).decode(),
    }
    found.pop("MESSAGE_KEY", None)  # of another message, if we are such a command ourselves
    if work.key is not None and b"\0" not in work.key:
        found["MESSAGE_KEY"] = os.fsdecode(work.key)
    return found


async def _relay(stderr: asyncio.StreamReader) -> str:
    """Pass on what a command says on standard error; its last line."""
    tail = b""
    while data := await stderr.read(_READ_BYTES):
        if sys.stderr is not None:
            await write_all(sys.stderr.fileno(), data)
        tail = (tail + data)[-_LAST_LINE_BYTES_MAX:]
    lines = tail.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
