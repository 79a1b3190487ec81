"""What every compared system has in common: plans, payloads, the watch over arrivals, and servers on free ports."""

from __future__ import annotations

import asyncio
import ctypes
import enum
import os
import queue
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.processes import RoleError, RoleReport

PAYLOAD_BYTES = 100
NUMBERS = 250  # payloads are numbered in their first byte, round and round
IDLE_SECONDS_MAX = 5.0
START_SECONDS_MAX = 20.0
UP_SECONDS_MAX = 120.0
_UP_POLL_SECONDS = 0.01
_STAMP = struct.Struct("<BQ")

_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


class PayloadOrder(enum.Enum):
    """Within what the numbers of payloads must follow each other."""

    ALL = "all"
    TOPIC = "topic"
    PUBLISHER = "publisher"
    STAMPED = "stamped"  # as ALL, and each payload carries the time it was sent


class RolePlan(msgspec.Struct, frozen=True):
    """What a role has to do. Topics are written the way Runnel does; peers translate."""

    url: str
    topics: Sequence[str] = ("live/a",)
    pattern: str = "live/a"
    count: int = 0  # messages that each connection publishes or waits for
    connections: int = 1
    clients: int = 0  # of all processes together, where publishers are told apart
    first_client: int = 0
    rate: int = 0  # messages/s, where it is given
    seconds: float = 0.0  # how long, where it is time that ends it
    order: PayloadOrder = PayloadOrder.ALL
    payload_bytes: int = PAYLOAD_BYTES


def payloads(publisher: int = 0, size: int = PAYLOAD_BYTES) -> list[bytes]:
    return [bytes((number, publisher)) + bytes(size - 2) for number in range(NUMBERS)]


def stamped(number: int, filler: bytes = bytes(PAYLOAD_BYTES - _STAMP.size)) -> bytes:
    return _STAMP.pack(number % NUMBERS, time.time_ns()) + filler


class ReceivedMessages:
    """What one connection has received: counted, and checked for order by the payloads' numbers."""

    __slots__ = ("_expected", "_numbers", "count", "end_ns", "misplaced", "take", "taken_ns")

    def __init__(self, expected: int, order: PayloadOrder) -> None:
        self._expected = expected
        self._numbers: dict[str | int, int] = {}
        self.count = 0
        self.misplaced = 0
        self.end_ns = 0
        self.taken_ns = array("q")
        self.take: Callable[[str, bytes], bool] = {
            PayloadOrder.ALL: self._take_any,
            PayloadOrder.TOPIC: self._take_topic,
            PayloadOrder.PUBLISHER: self._take_publisher,
            PayloadOrder.STAMPED: self._take_stamped,
        }[order]

    # Each returns whether that was the last one.

    def _take_any(self, _: str, payload: bytes) -> bool:
        if payload[0] != self.count % NUMBERS:
            self.misplaced += 1
        return self._counted()

    def _take_topic(self, topic: str, payload: bytes) -> bool:
        numbers = self._numbers
        number = payload[0]
        if number != numbers.get(topic, 0):
            self.misplaced += 1
        numbers[topic] = number + 1 if number < NUMBERS - 1 else 0
        return self._counted()

    def _take_publisher(self, _: str, payload: bytes) -> bool:
        numbers = self._numbers
        number, publisher = payload[0], payload[1]
        if number != numbers.get(publisher, 0):
            self.misplaced += 1
        numbers[publisher] = number + 1 if number < NUMBERS - 1 else 0
        return self._counted()

    def _take_stamped(self, _: str, payload: bytes) -> bool:
        number, sent_ns = _STAMP.unpack_from(payload)
        self.taken_ns.append(time.time_ns() - sent_ns)
        if number != self.count % NUMBERS:
            self.misplaced += 1
        return self._counted()

    def _counted(self) -> bool:
        self.count += 1
        if self.count < self._expected:
            return False
        self.end_ns = time.time_ns()
        return True


class ArrivalWatch:
    """Waits until every connection of a process has all it expects, or nothing has come for a while."""

    def __init__(self, connections: int, expected: int, order: PayloadOrder) -> None:
        self.arrivals = [ReceivedMessages(expected, order) for _ in range(connections)]
        self._left = connections
        self._finished = asyncio.Event()

    def finish_one(self) -> None:
        self._left -= 1
        if not self._left:
            self._finished.set()

    async def finished(self) -> RoleReport:
        """Idle time counts from the first message on: before it, publishers are still being made."""
        count, moved = 0, time.monotonic()
        while not self._finished.is_set():
            try:
                await asyncio.wait_for(self._finished.wait(), 1.0)
            except TimeoutError:
                now = self._count()
                if now != count or not now:
                    count, moved = now, time.monotonic()
                elif time.monotonic() - moved > IDLE_SECONDS_MAX:
                    break
        return report_of(self.arrivals)

    def _count(self) -> int:
        return sum(arrivals.count for arrivals in self.arrivals)


def report_of(all_arrivals: Sequence[ReceivedMessages]) -> RoleReport:
    return RoleReport(
        end_ns=max(arrivals.end_ns for arrivals in all_arrivals) or time.time_ns(),
        messages=sum(arrivals.count for arrivals in all_arrivals),
        misplaced=sum(arrivals.misplaced for arrivals in all_arrivals),
        taken_ns=[taken for arrivals in all_arrivals for taken in arrivals.taken_ns],
    )


# --- Threads, where a client blocks ---


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """All at once, until all are done; one alone needs no thread. What goes wrong in any of them is raised at once:
    others may be waiting for what it did not do."""
    if len(works) == 1:
        works[0]()
        return
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            ended.put(error)
        else:
            ended.put(None)

    for work in works:
        threading.Thread(target=run, args=(work,), daemon=True).start()
    for _ in works:
        if (error := ended.get()) is not None:
            raise error


# --- Waiting for a server ---


def when_up(url: str, read: Callable[[], int]) -> int:
    """Try to read until it works; the time at which it had. Before somebody listens no client is troubled."""
    port = int(url.partition("#")[0].rpartition(":")[2])
    deadline = time.monotonic() + UP_SECONDS_MAX
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0):
                pass
            return read()
        except (OSError, TimeoutError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_UP_POLL_SECONDS)


# --- A steady rate ---


class _Timer:
    """A timerfd: event loops round their timers to a millisecond, and this needs a fifth of one."""

    def __init__(self, rate: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        interval = (0, 1_000_000_000 // rate)
        if self.fd < 0 or libc.timerfd_settime(
            self.fd, 0, (ctypes.c_long * 4)(*interval, *interval), None
        ):
            raise OSError(ctypes.get_errno(), "timerfd")

    def wait(self) -> int:
        """Blocks until the next tick; how many have passed."""
        return int.from_bytes(os.read(self.fd, 8), "little")


def ticks(rate: int, count: int) -> Iterator[int]:
    """0, 1, 2 … at a steady rate, blocking in between."""
    timer = _Timer(rate)
    number = 0
    while number < count:
        for _ in range(min(timer.wait(), count - number)):
            yield number
            number += 1
    os.close(timer.fd)


async def aticks(rate: int, count: int) -> AsyncIterator[int]:
    """The same on an event loop, which goes on working in between."""
    timer = _Timer(rate)
    due = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(timer.fd, due.set)
    number = 0
    while number < count:
        await due.wait()
        due.clear()
        for _ in range(min(timer.wait(), count - number)):
            yield number
            number += 1
    loop.remove_reader(timer.fd)
    os.close(timer.fd)


# --- Saturation ---


def blast(sockets: Sequence[socket.socket], chunk: bytes, is_over: Callable[[], bool]) -> int:
    """Write the same bytes to every socket as fast as they are taken; what comes back is dropped. How many chunks."""
    views = [memoryview(b"")] * len(sockets)
    chunks = 0
    for each in sockets:
        each.settimeout(0)
    poller = select.epoll()
    for each in sockets:
        poller.register(each.fileno(), select.EPOLLIN | select.EPOLLOUT)
    by_fd = {each.fileno(): place for place, each in enumerate(sockets)}
    while not is_over():
        for fd, events in poller.poll(0.1):
            place = by_fd[fd]
            if events & select.EPOLLIN and not sockets[place].recv(65536):
                raise ConnectionResetError("the broker closed a connection that loads it")
            if events & select.EPOLLOUT:
                if not views[place]:
                    views[place] = memoryview(chunk)
                    chunks += 1
                views[place] = views[place][sockets[place].send(views[place]) :]
    return chunks


# --- Servers ---


class RunningServer(msgspec.Struct, frozen=True):
    """A running server."""

    url: str
    pid: int


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="runnel-bench-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _end_with_us() -> None:
    """In the child: also if we are killed. One that stays behind would disturb every later measurement."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def serving(
    command: Sequence[str],
    port: int,
    scheme: str,
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    start_seconds_max: float = START_SECONDS_MAX,
) -> Iterator[RunningServer]:
    """Run a server until the block is left. What it printed is shown if it does not start."""
    printed = directory / f"printed-by-{scheme}"
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_us,
        )
    try:
        _wait_listening(process, port, printed, start_seconds_max)
        yield RunningServer(f"{scheme}://127.0.0.1:{port}", process.pid)
        if process.poll() is not None:
            raise RoleError(_epitaph(process, printed, "ended by itself"))
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_listening(
    process: subprocess.Popen[bytes], port: int, printed: Path, seconds_max: float
) -> None:
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RoleError(_epitaph(process, printed, f"does not listen on port {port}"))


def _epitaph(process: subprocess.Popen[bytes], printed: Path, what: str) -> str:
    text = printed.read_text(errors="replace")[-2000:]
    return f"{process.args!r} {what}; it printed:\n{text}"
