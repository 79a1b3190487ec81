"""Processes of a measurement: each plays one role, says when it is ready, waits to go and hands back a report."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

import msgspec

READY_SECONDS_MAX = 60.0
REPORT_SECONDS_MAX = 120.0

_READY, _DONE, _FAILED = "ready", "done", "failed"


class RoleError(Exception):
    """A role did not get through: its own traceback, or the time that it overran."""


class RoleReport(msgspec.Struct, frozen=True):
    """What a role saw. Times are wall-clock nanoseconds, so that processes can be compared."""

    begin_ns: int = 0
    end_ns: int = 0
    messages: int = 0
    misplaced: int = 0  # messages that came out of order
    taken_ns: Sequence[int] = ()  # one figure a message, for latencies


class RolePipe:
    """The role's end of its pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ready(self) -> None:
        """Everything is imported, connected and subscribed."""
        self._connection.send((_READY, None))

    def wait_go(self) -> None:
        self._connection.recv()

    def is_over(self) -> bool:
        """Has the measurement said that what runs beside it may stop?"""
        return self._connection.poll()

    async def wait_over(self) -> None:
        """Wait for it, while the event loop goes on."""
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.fileno(), told.set)
        await told.wait()
        loop.remove_reader(self._connection.fileno())


Role = Callable[..., RoleReport]  # called with a plan and a authenticator


def _play(role: Role, plan: object, connection: Connection) -> None:
    try:
        report = role(plan, RolePipe(connection))
    except Exception:  # noqa: BLE001 - this is the boundary of the process: whatever it was, it is told
        connection.send((_FAILED, traceback.format_exc()))
    else:
        connection.send((_DONE, report))


class Member:
    """One process of a team, seen from the measurement."""

    def __init__(self, process: BaseProcess, connection: Connection, name: str) -> None:
        self.process = process
        self._connection = connection
        self._name = name

    def wait_ready(self) -> None:
        self._expect(_READY, READY_SECONDS_MAX)

    def go(self) -> None:
        self._connection.send(None)

    over = go  # the same byte: a role that runs beside the measurement takes it as its end

    def report(self, seconds_max: float = REPORT_SECONDS_MAX) -> RoleReport:
        report = self._expect(_DONE, seconds_max)
        assert isinstance(report, RoleReport)
        return report

    def _expect(self, wanted: str, seconds_max: float) -> object:
        if not self._connection.poll(seconds_max):
            raise RoleError(f"{self._name}: nothing heard for {seconds_max:.0f} s, not {wanted}")
        try:
            kind, content = self._connection.recv()
        except EOFError:
            raise RoleError(f"{self._name}: ended without a word, not {wanted}") from None
        if kind == _FAILED:
            raise RoleError(f"{self._name} failed:\n{content}")
        assert kind == wanted, (self._name, kind, wanted)
        return content


class Team:
    """The processes of one run. Leaving the block ends those that are still there."""

    def __init__(self) -> None:
        # spawn: a fresh interpreter each, as separate programs would be.
        self._context = multiprocessing.get_context("spawn")
        self.members: list[Member] = []

    def add(self, role: Role, plan: object) -> Member:
        ours, theirs = self._context.Pipe()
        name = f"{role.__module__.rpartition('.')[2]}.{role.__name__}"
        process = self._context.Process(
            target=_play, args=(role, plan, theirs), name=name, daemon=True
        )
        process.start()
        theirs.close()
        member = Member(process, ours, name)
        self.members.append(member)
        return member

    def wait_ready(self) -> None:
        for member in self.members:
            member.wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        deadline = time.monotonic() + (5.0 if kind is None else 0.0)
        for member in self.members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
