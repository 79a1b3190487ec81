"""Worker processes that are started and killed, the publisher of their work, and checks of the events they report."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from runnel.client import connect
from runnel.client.results import Receipt
from tests.server import worker_events
from tests.server.load import DEADLINE_S, TOPICS
from tests.server.worker_events import (
    AcksStored,
    MessageId,
    WorkBegun,
    WorkDone,
    WorkerEvent,
    WorkerReady,
    WorkFailed,
)

STYLES: Final = ("loop", "process", "batches")

_ROOT: Final = Path(__file__).parents[2]
_NOTE_BYTES_MAX: Final = 2**20
_KEYS: Final = 24
_BURST_MESSAGES_MAX: Final = 40
# The publisher waits when more messages than this are published and not processed.
_AHEAD_MAX: Final = 600

Key = tuple[str, int, str]  # topic, partition, key


class Outage(NamedTuple):
    """From just before the broker ended until it listened again."""

    begin_ns: int
    end_ns: int


class WorkerProcess:
    """A worker process and the events it has reported."""

    def __init__(self, style: str, process: Process) -> None:
        self.style = style
        self.events: list[WorkerEvent] = []
        self.is_ending = False
        self._process = process
        self._reading: asyncio.Task[None] | None = None

    def read(self, hear: Callable[[WorkerEvent], None]) -> None:
        async def run() -> None:
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                if line.endswith(b"\n"):  # else it was killed while it wrote
                    event = worker_events.decode(line)
                    self.events.append(event)
                    hear(event)

        self._reading = asyncio.create_task(run())

    @property
    def is_ready(self) -> bool:
        return bool(self.events)

    @property
    def has_failed(self) -> bool:
        """Whether it ended without being asked to."""
        return self._process.returncode is not None and not self.is_ending

    async def end(self, number: signal.Signals) -> int:
        """Send a signal, read the last events, and return the exit code."""
        assert self._reading is not None
        self.is_ending = True
        if self._process.returncode is None:
            self._process.send_signal(number)
        await self._reading
        return await self._process.wait()


class WorkerProcesses:
    """The workers of one subscription. Call `discard` in any case."""

    def __init__(self, url: str, mode: str, seed: int, *, failing: float = 0.0) -> None:
        self.all: list[WorkerProcess] = []  # also those that ended
        self.done: set[MessageId] = set()
        self.kills = 0
        self._url = url
        self._mode = mode
        self._random = Random(seed)
        self._failing = failing

    @property
    def running(self) -> list[WorkerProcess]:
        return [worker for worker in self.all if not worker.is_ending]

    async def start(self, style: str) -> WorkerProcess:
        """Start a worker, and do not wait."""
        words = (self._url, self._mode, style, self._random.getrandbits(32), self._failing)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RUNNEL_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.server.worker",
            *map(str, words),
            cwd=_ROOT,
            env=environment,
            stdout=PIPE,
            limit=_NOTE_BYTES_MAX,
        )
        worker = WorkerProcess(style, process)
        worker.read(self._hear)
        self.all.append(worker)
        return worker

    def _hear(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkDone):
            self.done.add(event.message)

    def check_running(self) -> None:
        """Fails if a worker has failed."""
        failed = [worker.style for worker in self.all if worker.has_failed]
        assert not failed, failed

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, or a client has failed."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.check_running()
                await asyncio.sleep(0.001)

    async def work_on(self, messages: int) -> None:
        """Wait until so many more messages are done and every worker takes part."""
        wanted = len(self.done) + messages
        await self.wait_for(
            lambda: len(self.done) >= wanted and all(worker.is_ready for worker in self.running)
        )

    async def kill(self, worker: WorkerProcess) -> None:
        """Kill it, without a warning."""
        self.kills += 1
        assert await worker.end(signal.SIGKILL) == -signal.SIGKILL

    async def stop(self) -> None:
        """Shut them down in good order: their acknowledgements are stored."""
        codes = await asyncio.gather(*(worker.end(signal.SIGTERM) for worker in self.running))
        assert not any(codes), codes

    async def discard(self) -> None:
        await asyncio.gather(*(worker.end(signal.SIGKILL) for worker in self.running))


class WorkPublisher:
    """A named publisher, so that no message fails. It does not run too far ahead of the workers."""

    def __init__(self, url: str, seed: int, workers: WorkerProcesses) -> None:
        self.stored: dict[MessageId, str] = {}  # the payload of each stored message
        self._url = url
        self._random = Random(seed)
        self._workers = workers
        self._is_ending = False
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Stop, and wait until all messages are stored."""
        assert self._running is not None
        self._is_ending = True
        async with asyncio.timeout(DEADLINE_S):
            await self._running

    async def discard(self) -> None:
        """End it, in whatever state it is."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _run(self) -> None:
        random = self._random
        sent: deque[tuple[str, asyncio.Future[Receipt]]] = deque()
        number = 0
        async with (
            connect(self._url, deadline_s=DEADLINE_S) as bus,
            bus.publisher(name="feed", batch_messages_max=16) as publisher,
        ):
            while not self._is_ending:
                for _ in range(random.randint(1, _BURST_MESSAGES_MAX)):
                    number += 1
                    key = b"%d" % random.randrange(_KEYS) if random.random() < 0.9 else None
                    future = publisher.submit(b"%d" % number, random.choice(TOPICS), key)
                    sent.append((str(number), future))
                await publisher.ready()
                await asyncio.sleep(0)
                self._settle(sent)
                await self._wait_for_workers(number)
            await publisher.flush()
            self._settle(sent)
            assert not sent

    async def _wait_for_workers(self, sent: int) -> None:
        await self._workers.wait_for(
            lambda: self._is_ending or sent - len(self._workers.done) <= _AHEAD_MAX
        )

    def _settle(self, sent: deque[tuple[str, asyncio.Future[Receipt]]]) -> None:
        while sent and sent[0][1].done():
            payload, future = sent.popleft()
            receipt = future.result()
            assert receipt.level == "stored"
            self.stored[MessageId(receipt.topic, receipt.partition, receipt.offset)] = payload


# --- Checks of the promises ---


def check_everything_was_done(workers: WorkerProcesses, stored: dict[MessageId, str]) -> None:
    """The workers did every stored message at least once, and nothing else."""
    missing = stored.keys() - workers.done
    assert not missing, f"{len(missing)} of {len(stored)} were not processed: {sorted(missing)[:5]}"
    for worker in workers.all:
        for event in _of(worker, WorkBegun):
            assert stored.get(event.message) == event.payload, event


def check_stored_acks_hold(workers: Sequence[WorkerProcess]) -> None:
    """No work begins after its acknowledgement was answered as stored."""
    stored_ns: dict[MessageId, int] = {}
    for worker in workers:
        for event in _of(worker, AcksStored):
            for message in event.messages:
                stored_ns[message] = min(event.at_ns, stored_ns.get(message, event.at_ns))
    assert stored_ns
    for worker in workers:
        for begun in _of(worker, WorkBegun):
            late_ns = begun.at_ns - stored_ns.get(begun.message, begun.at_ns)
            assert late_ns <= 0, f"after its ack was stored:\n{_story(workers, begun.message)}"


def check_failures_are_counted(workers: WorkerProcesses) -> None:
    """A message has failed at most as often as workers nacked it or were killed."""
    given_back: defaultdict[MessageId, int] = defaultdict(int)
    for worker in workers.all:
        for failed in _of(worker, WorkFailed):
            given_back[failed.message] += 1
    for worker in workers.all:
        for begun in _of(worker, WorkBegun):
            assert begun.failures <= given_back[begun.message] + workers.kills, begun


def check_keys_are_in_order(workers: Sequence[WorkerProcess]) -> None:
    """Across all workers, the messages of each key are first begun, and first done, in order."""
    keys = _keys(workers)
    begun = [event for worker in workers for event in _of(worker, WorkBegun)]
    done = [event for worker in workers for event in _of(worker, WorkDone)]
    for what in (begun, done):
        first_ns: dict[MessageId, int] = {}
        for event in what:
            first_ns[event.message] = min(event.at_ns, first_ns.get(event.message, event.at_ns))
        by_key: defaultdict[Key, list[MessageId]] = defaultdict(list)
        for message in sorted(first_ns, key=first_ns.__getitem__):
            if message in keys:
                by_key[keys[message]].append(message)
        for key, order in by_key.items():
            assert order == sorted(order), f"{key}: {_disorder(order)}"


def check_keys_are_with_one_at_a_time(
    workers: Sequence[WorkerProcess], outages: Sequence[Outage]
) -> None:
    """No two workers work on one key at a time, except under leases that ended with their broker."""
    keys = _keys(workers)
    spans: defaultdict[Key, list[tuple[int, int, int]]] = defaultdict(list)
    for number, worker in enumerate(workers):
        for message, begin_ns, end_ns in _spans(worker, outages):
            if message in keys:
                spans[keys[message]].append((begin_ns, end_ns, number))
    for key, of_key in spans.items():
        last_end_ns: dict[int, int] = {}
        for begin_ns, end_ns, number in sorted(of_key):
            for other, other_end_ns in last_end_ns.items():
                assert other == number or other_end_ns <= begin_ns, (
                    f"{key}: workers {other} and {number} overlap by {other_end_ns - begin_ns} ns"
                )
            last_end_ns[number] = max(end_ns, last_end_ns.get(number, 0))


def _of(worker: WorkerProcess, kind: type[worker_events.EventT]) -> Iterator[worker_events.EventT]:
    return (event for event in worker.events if isinstance(event, kind))


def _keys(workers: Sequence[WorkerProcess]) -> dict[MessageId, Key]:
    """The key of each message that has one."""
    return {
        event.message: (event.message.topic, event.message.partition, event.key)
        for worker in workers
        for event in _of(worker, WorkBegun)
        if event.key is not None
    }


def _spans(
    worker: WorkerProcess, outages: Sequence[Outage]
) -> Iterator[tuple[MessageId, int, int]]:
    """The times of a worker's messages, as long as a running broker knew their leases.

    Work on a message that it never finished lasted until the worker's last event.
    """
    begun_ns: dict[MessageId, int] = {}
    for event in worker.events:
        if isinstance(event, WorkBegun):
            begun_ns[event.message] = event.at_ns
        elif isinstance(event, WorkDone | WorkFailed):
            yield from _under_lease(
                event.message, begun_ns.pop(event.message), event.at_ns, outages
            )
    for message, at_ns in begun_ns.items():
        yield from _under_lease(message, at_ns, worker.events[-1].at_ns, outages)


def _under_lease(
    message: MessageId, begin_ns: int, end_ns: int, outages: Iterable[Outage]
) -> Iterator[tuple[MessageId, int, int]]:
    for outage in outages:
        if outage.begin_ns <= begin_ns <= outage.end_ns:
            return  # the lease of a broker that has ended
        if begin_ns < outage.begin_ns:
            end_ns = min(end_ns, outage.begin_ns)
    yield message, begin_ns, end_ns


def _story(workers: Sequence[WorkerProcess], message: MessageId) -> str:
    """All events of a message in their order, for the text of a failure."""
    told: list[tuple[int, str]] = []
    for number, worker in enumerate(workers):
        who = f"worker {number} ({worker.style})"
        told.append((worker.events[-1].at_ns, f"{who} reported its last event"))
        for event in worker.events:
            if isinstance(event, AcksStored):
                if message in event.messages:
                    told.append((event.at_ns, f"{who} Stored, with {len(event.messages)}"))
            elif not isinstance(event, WorkerReady) and event.message == message:
                told.append((event.at_ns, f"{who} {event}"))
    told.sort()
    return "\n".join(f"{(at_ns - told[0][0]) / 1e6:10.3f} ms  {what}" for at_ns, what in told)


def _disorder(order: Sequence[MessageId]) -> tuple[MessageId, MessageId]:
    return next(pair for pair in pairwise(order) if pair[0] > pair[1])
