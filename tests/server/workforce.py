"""Worker processes that come, are killed and go, what they work on, and the promises held against their notes."""

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
from tests.server import notes
from tests.server.load import DEADLINE_S, TOPICS
from tests.server.notes import Begun, Done, Failed, Note, Ready, Stored, Where

STYLES: Final = ("loop", "process", "batches")

_ROOT: Final = Path(__file__).parents[2]
_NOTE_BYTES_MAX: Final = 2**20
_KEYS: Final = 24
_BURST_MESSAGES_MAX: Final = 40
# Published and not processed yet: beyond it the publisher waits.
_AHEAD_MAX: Final = 600

Key = tuple[str, int, str]  # topic, partition, key


class Outage(NamedTuple):
    """From just before the broker was gone until it listened again."""

    begin_ns: int
    end_ns: int


class Worker:
    """A process and everything it has told."""

    def __init__(self, style: str, process: Process) -> None:
        self.style = style
        self.notes: list[Note] = []
        self.is_ending = False
        self._process = process
        self._reading: asyncio.Task[None] | None = None

    def read(self, hear: Callable[[Note], None]) -> None:
        async def run() -> None:
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                if line.endswith(b"\n"):  # else it was killed while it wrote
                    note = notes.decode(line)
                    self.notes.append(note)
                    hear(note)

        self._reading = asyncio.create_task(run())

    @property
    def is_ready(self) -> bool:
        return bool(self.notes)

    @property
    def has_failed(self) -> bool:
        """Whether it ended by itself."""
        return self._process.returncode is not None and not self.is_ending

    async def end(self, number: signal.Signals) -> int:
        """Send it a signal, and hear the last of it: its exit code."""
        assert self._reading is not None
        self.is_ending = True
        if self._process.returncode is None:
            self._process.send_signal(number)
        await self._reading
        return await self._process.wait()


class Workforce:
    """Workers of one subscription. `discard` whatever happened."""

    def __init__(self, url: str, mode: str, seed: int, *, failing: float = 0.0) -> None:
        self.workers: list[Worker] = []  # all there ever were
        self.done: set[Where] = set()
        self.kills = 0
        self._url = url
        self._mode = mode
        self._random = Random(seed)
        self._failing = failing

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.is_ending]

    async def start(self, style: str) -> Worker:
        """Begin to start one, and do not wait."""
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
        worker = Worker(style, process)
        worker.read(self._hear)
        self.workers.append(worker)
        return worker

    def _hear(self, note: Note) -> None:
        if isinstance(note, Done):
            self.done.add(note.where)

    def check_running(self) -> None:
        """One that failed is told now rather than at the end."""
        failed = [worker.style for worker in self.workers if worker.has_failed]
        assert not failed, failed

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Let everybody work until something has come about."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.check_running()
                await asyncio.sleep(0.001)

    async def work_on(self, messages: int) -> None:
        """Until so many more are done, and everybody takes part."""
        wanted = len(self.done) + messages
        await self.wait_for(
            lambda: len(self.done) >= wanted and all(worker.is_ready for worker in self.running)
        )

    async def kill(self, worker: Worker) -> None:
        """No warning, nothing finished."""
        self.kills += 1
        assert await worker.end(signal.SIGKILL) == -signal.SIGKILL

    async def stop(self) -> None:
        """In good order: what they acknowledged is stored."""
        codes = await asyncio.gather(*(worker.end(signal.SIGTERM) for worker in self.running))
        assert not any(codes), codes

    async def discard(self) -> None:
        await asyncio.gather(*(worker.end(signal.SIGKILL) for worker in self.running))


class Feed:
    """Publishes with a name, so that nothing fails, and stays not too far ahead of the workers."""

    def __init__(self, url: str, seed: int, workforce: Workforce) -> None:
        self.stored: dict[Where, str] = {}  # what it was told is stored: payloads
        self._url = url
        self._random = Random(seed)
        self._workforce = workforce
        self._is_ending = False
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Until everything that was sent is stored."""
        assert self._running is not None
        self._is_ending = True
        async with asyncio.timeout(DEADLINE_S):
            await self._running

    async def discard(self) -> None:
        """It is gone afterwards, whatever happened."""
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
                await self._let_them_work(number)
            await publisher.flush()
            self._settle(sent)
            assert not sent

    async def _let_them_work(self, sent: int) -> None:
        await self._workforce.wait_for(
            lambda: self._is_ending or sent - len(self._workforce.done) <= _AHEAD_MAX
        )

    def _settle(self, sent: deque[tuple[str, asyncio.Future[Receipt]]]) -> None:
        while sent and sent[0][1].done():
            payload, future = sent.popleft()
            receipt = future.result()
            assert receipt.level == "stored"
            self.stored[Where(receipt.topic, receipt.partition, receipt.offset)] = payload


# --- The promises ---


def check_everything_was_done(workforce: Workforce, stored: dict[Where, str]) -> None:
    """Every message that a publisher was told is stored, at least once, and nothing else."""
    missing = stored.keys() - workforce.done
    assert not missing, f"{len(missing)} of {len(stored)} were not processed: {sorted(missing)[:5]}"
    for worker in workforce.workers:
        for note in _of(worker, Begun):
            assert stored.get(note.where) == note.payload, note


def check_stored_acks_hold(workers: Sequence[Worker]) -> None:
    """Nothing is begun after an acknowledgement of it was answered as stored."""
    stored_ns: dict[Where, int] = {}
    for worker in workers:
        for note in _of(worker, Stored):
            for where in note.places:
                stored_ns[where] = min(note.at_ns, stored_ns.get(where, note.at_ns))
    assert stored_ns
    for worker in workers:
        for begun in _of(worker, Begun):
            late_ns = begun.at_ns - stored_ns.get(begun.where, begun.at_ns)
            assert late_ns <= 0, f"after its ack was stored:\n{_story(workers, begun.where)}"


def check_failures_are_counted(workforce: Workforce) -> None:
    """A message failed no oftener than somebody gave it back or was killed."""
    given_back: defaultdict[Where, int] = defaultdict(int)
    for worker in workforce.workers:
        for failed in _of(worker, Failed):
            given_back[failed.where] += 1
    for worker in workforce.workers:
        for begun in _of(worker, Begun):
            assert begun.failures <= given_back[begun.where] + workforce.kills, begun


def check_keys_are_in_order(workers: Sequence[Worker]) -> None:
    """The messages of each key are begun, and are done, in order, whoever does it: each for the first time."""
    keys = _keys(workers)
    begun = [note for worker in workers for note in _of(worker, Begun)]
    done = [note for worker in workers for note in _of(worker, Done)]
    for what in (begun, done):
        first_ns: dict[Where, int] = {}
        for note in what:
            first_ns[note.where] = min(note.at_ns, first_ns.get(note.where, note.at_ns))
        by_key: defaultdict[Key, list[Where]] = defaultdict(list)
        for where in sorted(first_ns, key=first_ns.__getitem__):
            if where in keys:
                by_key[keys[where]].append(where)
        for key, order in by_key.items():
            assert order == sorted(order), f"{key}: {_disorder(order)}"


def check_keys_are_with_one_at_a_time(workers: Sequence[Worker], outages: Sequence[Outage]) -> None:
    """No two processes work on one key, but for those whose lease ended with the broker that gave it."""
    keys = _keys(workers)
    spans: defaultdict[Key, list[tuple[int, int, int]]] = defaultdict(list)
    for number, worker in enumerate(workers):
        for where, begin_ns, end_ns in _spans(worker, outages):
            if where in keys:
                spans[keys[where]].append((begin_ns, end_ns, number))
    for key, of_key in spans.items():
        last_end_ns: dict[int, int] = {}
        for begin_ns, end_ns, number in sorted(of_key):
            for other, other_end_ns in last_end_ns.items():
                assert other == number or other_end_ns <= begin_ns, (
                    f"{key}: workers {other} and {number} overlap by {other_end_ns - begin_ns} ns"
                )
            last_end_ns[number] = max(end_ns, last_end_ns.get(number, 0))


def _of(worker: Worker, kind: type[notes.Kind]) -> Iterator[notes.Kind]:
    return (note for note in worker.notes if isinstance(note, kind))


def _keys(workers: Sequence[Worker]) -> dict[Where, Key]:
    """Of the messages that have one."""
    return {
        note.where: (note.where.topic, note.where.partition, note.key)
        for worker in workers
        for note in _of(worker, Begun)
        if note.key is not None
    }


def _spans(worker: Worker, outages: Sequence[Outage]) -> Iterator[tuple[Where, int, int]]:
    """When it worked on what, under leases that somebody held to.

    A message that it never came to the end of was in work until it was last heard of.
    """
    begun_ns: dict[Where, int] = {}
    for note in worker.notes:
        if isinstance(note, Begun):
            begun_ns[note.where] = note.at_ns
        elif isinstance(note, Done | Failed):
            yield from _under_lease(note.where, begun_ns.pop(note.where), note.at_ns, outages)
    for where, at_ns in begun_ns.items():
        yield from _under_lease(where, at_ns, worker.notes[-1].at_ns, outages)


def _under_lease(
    where: Where, begin_ns: int, end_ns: int, outages: Iterable[Outage]
) -> Iterator[tuple[Where, int, int]]:
    for outage in outages:
        if outage.begin_ns <= begin_ns <= outage.end_ns:
            return  # of a broker that is no more
        if begin_ns < outage.begin_ns:
            end_ns = min(end_ns, outage.begin_ns)
    yield where, begin_ns, end_ns


def _story(workers: Sequence[Worker], where: Where) -> str:
    """All that was told of a message, in its order: for whoever has to find out what happened."""
    told: list[tuple[int, str]] = []
    for number, worker in enumerate(workers):
        who = f"worker {number} ({worker.style})"
        told.append((worker.notes[-1].at_ns, f"{who} was last heard of"))
        for note in worker.notes:
            if isinstance(note, Stored):
                if where in note.places:
                    told.append((note.at_ns, f"{who} Stored, with {len(note.places)}"))
            elif not isinstance(note, Ready) and note.where == where:
                told.append((note.at_ns, f"{who} {note}"))
    told.sort()
    return "\n".join(f"{(at_ns - told[0][0]) / 1e6:10.3f} ms  {what}" for at_ns, what in told)


def _disorder(order: Sequence[Where]) -> tuple[Where, Where]:
    return next(pair for pair in pairwise(order) if pair[0] > pair[1])
