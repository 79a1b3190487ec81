"""A run against a listener in phases: the plan of its load, and the time and processor time of each phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import psutil

from bench.processes import RoleReport
from bench.systems.system import PAYLOAD_BYTES

# Phases that several listeners have, by the same name.
PUBLISH, CONSUME, ACK, TOGETHER = "publish", "consume", "ack", "together"

PAYLOAD = b"p" * PAYLOAD_BYTES


class LoadPlan(msgspec.Struct, frozen=True):
    """What a load has to do. All of it is done by one process."""

    address: str  # of the listener, host and port
    pid: int  # of the server
    name: str  # of this run: topics and subscriptions have it in their names
    clients: int = 1  # connections or streams at a time
    calls: int = 0  # of each client, in each phase
    messages: int = 1  # in each call, where it takes many
    window: int = (
        1  # calls of a client that wait for an answer at a time, where there may be several
    )
    is_block: bool = False  # the messages of a call are one batch, in columns
    token: str | None = None


class Phase(msgspec.Struct, frozen=True):
    """One thing, done `count` times."""

    count: int
    took_ns: int
    cpu_s: float  # processor time of the server, all its threads and processes

    @property
    def rate(self) -> float:
        return self.count / self.took_ns * 1e9

    @property
    def cpu_us(self) -> float:
        """What one of them cost the server."""
        return self.cpu_s / self.count * 1e6


class LoadReport(RoleReport, frozen=True):
    """The phases by their names."""

    phases: Mapping[str, Phase] = {}


def cpu_seconds(server: psutil.Process) -> float:
    """The processor time of a server so far, with its processes that live."""
    spent = [each.cpu_times() for each in (server, *server.children(recursive=True))]
    return sum(times.user + times.system for times in spent)


class Meter:
    """Takes the times of the phases."""

    def __init__(self, server_pid: int) -> None:
        self._server = psutil.Process(server_pid)
        self._phases: dict[str, Phase] = {}

    @contextmanager
    def phase(self, name: str, count: int) -> Iterator[None]:
        """May come in several parts."""
        cpu_s, begin_ns = self._cpu_s(), time.perf_counter_ns()
        yield
        took_ns, cpu_s = time.perf_counter_ns() - begin_ns, self._cpu_s() - cpu_s
        before = self._phases.get(name, Phase(0, 0, 0.0))
        self._phases[name] = Phase(
            before.count + count, before.took_ns + took_ns, before.cpu_s + cpu_s
        )

    def _cpu_s(self) -> float:
        return cpu_seconds(self._server)

    def report(self, messages: int = 0) -> LoadReport:
        """`messages`: how many were published to the topic of the run's subscription."""
        return LoadReport(messages=messages, phases=self._phases)
