"""Runnel at work: sensors publish, a dashboard watches, a slow reader falls back, the broker is killed half-way.

bin/demo [--readings N] [--data DIR]

A real broker with default settings, in a process of its own. Gateways with names publish the readings of 48 stations
as fast as they can and do not stop when the broker is killed (SIGKILL); it is started again half a second later.
A dashboard reads live from the last known values on, a slow reader falls behind and is fed from the log, and when all
is published a third one replays everything by offsets. Every reading carries its number, so each reader knows what
it lost and what came twice. At the end the files are filtered without a broker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console

import runnel
from runnel.client import Bus, Receipt, Subscription
from runnel.log.reading import OfflineLog, Selection

GATEWAYS = 4
STATIONS = 48
SITES = 6
BEGIN_NS = 1_767_225_600_000_000_000  # 2026-01-01, the event time of every station's first reading
STEP_NS = 1_000_000_000
BUFFER_BYTES = 32 * 1024  # of a gateway: what is not acknowledged yet
SLOW_BUFFER_BYTES = 64 * 1024
SLOW_PAUSE_S = 0.1
AWAY_S = 0.5
PATIENCE_S = 60.0
console = Console(highlight=False)


def say(line: str) -> None:
    console.print(line, soft_wrap=True)  # lines are as long as they are, whoever reads them


@dataclass(frozen=True)
class Station:
    """A sensor with a topic of its own."""

    number: int

    @property
    def topic(self) -> str:
        return f"sensors/site-{self.number % SITES}/{self.number:02d}"

    @property
    def tags(self) -> dict[str, str]:
        return {"unit": "hPa" if self.number % 4 == 0 else "C", "site": str(self.number % SITES)}

    def reading(self, number: int) -> bytes:
        return b"%d %.2f" % (number, 20 + (number * 7 + self.number) % 500 / 100)


ALL_STATIONS = tuple(map(Station, range(STATIONS)))


class Tally:
    """What one reader got: the readings of each station are numbered 1, 2, 3 … and so are their offsets."""

    def __init__(self, goal: int, *, begins_at: int | None = 1) -> None:
        """`begins_at` None: wherever the first reading of a station stands."""
        self.count = self.lost = self.twice = self.misplaced = 0
        self._goal = goal
        self._begins_at = begins_at
        self._next: dict[str, int] = {}
        self._finished = 0

    def take(self, messages: Iterable[runnel.Message]) -> None:
        for message in messages:
            number = int(message.payload.partition(b" ")[0])
            expected = self._next.get(message.topic, self._begins_at or number)
            self.count += 1
            self.misplaced += number != message.offset
            if number < expected:
                self.twice += 1
                continue
            self.lost += number - expected
            self._next[message.topic] = number + 1
            self._finished += number == self._goal

    @property
    def is_complete(self) -> bool:
        return self._finished == STATIONS

    def check(self) -> tuple[int, int, int]:
        """Lost, twice, and not at the offset where it belongs; what never came is lost too."""
        missing = sum(
            self._goal + 1 - self._next.get(station.topic, self._begins_at or 1)
            for station in ALL_STATIONS
        )
        return self.lost + missing, self.twice, self.misplaced


class BrokerProcess:
    """`runnel serve` with its defaults, on a port that it keeps when it is started again."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self.diagnostics = directory / "broker.log"
        self.url = ""
        self._address = "127.0.0.1:0"
        self._process: subprocess.Process | None = None

    async def start(self) -> None:
        where = ("--data", str(self.data), "--listen", self._address)
        command = ("-m", "runnel", "serve", *where, "--http", "none", "--grpc", "none")
        with self.diagnostics.open("ab") as diagnostics:
            self._process = await subprocess.create_subprocess_exec(
                sys.executable,
                *command,
                stdout=subprocess.PIPE,
                stderr=diagnostics,
                start_new_session=True,  # Ctrl-C is for us, and we end the broker
            )
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode().strip()
        if not line.startswith("listening on "):
            raise runnel.RunnelError(f"the broker did not start; see {self.diagnostics}")
        self.url = line.removeprefix("listening on ")
        self._address = self.url.removeprefix("runnel://")

    async def end(self, number: signal.Signals) -> int:
        """Send a signal, and wait for its exit code."""
        if self._process is None or self._process.returncode is not None:
            return 0
        self._process.send_signal(number)
        return await self._process.wait()


@dataclass
class Facts:
    """What happened, for the table."""

    goal: int  # readings of each station
    sent: int = 0
    acknowledged: int = 0
    sent_at_kill: int = 0
    acknowledged_at_kill: int = 0
    fell_back: int = 0  # times, before the kill
    behind: int = 0  # messages, when the last was published
    away_s: float = 0.0
    publishing_s: float = 0.0
    watching_s: float = 0.0
    replaying_s: float = 0.0
    exit_code: int = 0
    filtered: int = 0
    filtering_s: float = 0.0
    under_way: asyncio.Event = field(default_factory=asyncio.Event)  # a tenth is sent
    half_way: asyncio.Event = field(default_factory=asyncio.Event)
    is_published: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def total(self) -> int:
        return self.goal * STATIONS


# --- Publishing ---


async def publish(bus: Bus, gateway: int, facts: Facts) -> None:
    """One gateway: the readings of its stations in turn, whether or not the broker is there."""
    stations = [(each, each.topic, each.tags) for each in ALL_STATIONS[gateway::GATEWAYS]]
    numbers_at_once = 20

    def on_stored(count: int) -> Callable[[asyncio.Future[Receipt]], None]:
        def note(stored: asyncio.Future[Receipt]) -> None:
            if not stored.cancelled() and stored.exception() is None:
                facts.acknowledged += count

        return note

    # With a name, what was not acknowledged when the connection broke is sent again and stored once.
    async with bus.publisher(
        name=f"gateway-{gateway}", buffer_bytes_max=BUFFER_BYTES, deadline_s=PATIENCE_S
    ) as publisher:
        for begin in range(1, facts.goal + 1, numbers_at_once):
            numbers = range(begin, min(begin + numbers_at_once, facts.goal + 1))
            for station, topic, tags in stations:
                for number in numbers:
                    payload, event_time_ns = station.reading(number), BEGIN_NS + number * STEP_NS
                    if number == numbers[-1]:
                        stored = publisher.submit(payload, topic, None, tags, event_time_ns)
                        stored.add_done_callback(on_stored(len(numbers)))
                    else:
                        publisher.send(payload, topic, None, tags, event_time_ns)
            facts.sent += len(numbers) * len(stations)
            await publisher.ready()  # waits while too much is not acknowledged
            if facts.sent >= facts.total // 10:
                facts.under_way.set()
            if facts.sent >= facts.total // 2:
                facts.half_way.set()


async def kill_half_way(broker: BrokerProcess, bus: Bus, facts: Facts) -> None:
    """Kill the broker while everybody is at work, and start it again."""
    await facts.half_way.wait()
    statistics = await bus.statistics()
    facts.fell_back = statistics["totals"]["slow_readers"]
    facts.sent_at_kill, facts.acknowledged_at_kill = facts.sent, facts.acknowledged
    await broker.end(signal.SIGKILL)
    killed_at = time.perf_counter()
    say(
        f"Killed the broker (SIGKILL): {facts.sent_at_kill:,} readings sent, "
        f"{facts.acknowledged_at_kill:,} of them acknowledged. The gateways go on …"
    )
    await asyncio.sleep(AWAY_S)
    await broker.start()
    facts.away_s = time.perf_counter() - killed_at
    say(f"Started it again; nobody could reach it for {facts.away_s:.1f} s.")


# --- Reading ---


async def read(subscription: Subscription, tally: Tally) -> None:
    """Until the last reading of every station has come; what has not come in time is lost."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for batch in subscription.batches():
                tally.take(batch.messages())
                if tally.is_complete:
                    return
    except TimeoutError:
        return


async def watch(bus: Bus, tally: Tally, facts: Facts) -> None:
    """The dashboard: the last known value of every station first, then whatever comes."""
    await facts.under_way.wait()
    begin = time.perf_counter()
    async with bus.subscribe("sensors/*", start="last") as subscription:
        await read(subscription, tally)
    facts.watching_s = time.perf_counter() - begin


async def read_slowly(bus: Bus, tally: Tally, facts: Facts) -> None:
    """Takes its time as long as anything is published: it misses nothing, because the log has it."""
    async with bus.subscribe(
        "sensors/*", start="earliest", buffer_bytes=SLOW_BUFFER_BYTES
    ) as subscription:
        await facts.half_way.wait()
        while not facts.is_published.is_set() and not tally.is_complete:
            await asyncio.sleep(SLOW_PAUSE_S)
            for batch in await subscription.next_batches():  # what has arrived, never all of it
                tally.take(batch.messages())
        facts.behind = facts.total - tally.count
        await read(subscription, tally)


async def replay(bus: Bus, tally: Tally, facts: Facts) -> None:
    """Every station from its first reading on, page by page; any reader may do so at any time."""
    begin = time.perf_counter()
    for station in ALL_STATIONS:
        offset = 1
        while True:
            page = await bus.fetch(station.topic, offset)
            tally.take(page.messages)
            offset = page.next_offset
            if offset >= page.end_offset:
                break
    facts.replaying_s = time.perf_counter() - begin


def filter_offline(data: Path, facts: Facts) -> int:
    """Pressures of the second quarter of the time, from the files; returns how many there must be."""
    first, last = facts.goal // 4 + 1, facts.goal // 2
    begin = time.perf_counter()
    wanted = Selection(
        topics=("sensors/*",),
        tags={"unit": "hPa"},
        event_since_ns=BEGIN_NS + first * STEP_NS,
        event_until_ns=BEGIN_NS + (last + 1) * STEP_NS,
    )
    facts.filtered = sum(map(len, OfflineLog(str(data)).scan(wanted)))
    facts.filtering_s = time.perf_counter() - begin
    pressures = sum(station.tags["unit"] == "hPa" for station in ALL_STATIONS)
    return (last - first + 1) * pressures


# --- The demo ---


async def demo(directory: Path, goal: int) -> bool:
    broker = BrokerProcess(directory)
    facts = Facts(goal)
    live = Tally(goal, begins_at=None)
    slow, replayed = Tally(goal), Tally(goal)
    try:
        await broker.start()
        say(f"A broker listens on {broker.url}, data in {broker.data}")
        await run_all(broker, facts, live, slow)
        say("All is published and read; replaying everything by offsets …")
        async with runnel.connect(broker.url, name="replay") as bus:
            await replay(bus, replayed, facts)
        facts.exit_code = await broker.end(signal.SIGTERM)
    finally:
        await broker.end(signal.SIGKILL)
    say("Stopped the broker; filtering its files by tag and time …\n")
    expected = filter_offline(broker.data, facts)
    return report(facts, live, slow, replayed, expected)


async def run_all(broker: BrokerProcess, facts: Facts, live: Tally, slow: Tally) -> None:
    """Publishers and readers at once, each with a connection of its own."""
    say(
        f"{GATEWAYS} gateways publish {facts.total:,} readings of {STATIONS} stations; "
        "a dashboard and a slow reader read …"
    )

    async with (
        runnel.connect(broker.url, name="gateways", deadline_s=PATIENCE_S) as sending,
        runnel.connect(broker.url, name="dashboard", deadline_s=PATIENCE_S) as watching,
        runnel.connect(broker.url, name="slow reader", deadline_s=PATIENCE_S) as lagging,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(read_slowly(lagging, slow, facts))
        tasks.create_task(watch(watching, live, facts))
        tasks.create_task(kill_half_way(broker, watching, facts))
        begin = time.perf_counter()
        gateways = [
            tasks.create_task(publish(sending, number, facts)) for number in range(GATEWAYS)
        ]
        tasks.create_task(show(facts, live, slow))
        await asyncio.wait(gateways)
        facts.publishing_s = time.perf_counter() - begin
        facts.is_published.set()


async def show(facts: Facts, live: Tally, slow: Tally) -> None:
    """One line that moves, on a terminal; nothing elsewhere."""
    with console.status("") as status:
        while not (live.is_complete and slow.is_complete):
            status.update(
                f"sent {facts.sent:,}   acknowledged {facts.acknowledged:,}   "
                f"dashboard {live.count:,}   slow reader {slow.count:,}"
            )
            await asyncio.sleep(0.1)


def report(facts: Facts, live: Tally, slow: Tally, replayed: Tally, expected: int) -> bool:
    """Print the table; True if every count agrees."""
    checks = [tally.check() for tally in (live, slow, replayed)]
    lost, twice, misplaced = (sum(column) for column in zip(*checks, strict=True))
    rows = [
        (
            "published",
            f"{facts.acknowledged:,}",
            f"all stored; {facts.acknowledged / (facts.publishing_s - facts.away_s):,.0f}/s while "
            f"there was a broker ({facts.away_s:.1f} s there was none)",
        ),
        (
            "acknowledged before the kill",
            f"{facts.acknowledged_at_kill:,}",
            f"of {facts.sent_at_kill:,} sent; what was not goes out again by itself",
        ),
        (
            "delivered live",
            f"{live.count:,}",
            "to the dashboard, from the last known values on; "
            f"{live.count / (facts.watching_s - facts.away_s):,.0f}/s",
        ),
        (
            "read slowly",
            f"{slow.count:,}",
            f"fell back to the log, {facts.behind:,} behind when the last was published",
        ),
        (
            "replayed",
            f"{replayed.count:,}",
            f"by offsets; {replayed.count / facts.replaying_s:,.0f}/s",
        ),
        (
            "lost, twice, misplaced",
            f"{lost}, {twice}, {misplaced}",
            "of all three readers together",
        ),
        (
            "filtered offline",
            f"{facts.filtered:,}",
            f"unit=hPa, second quarter; expected {expected:,}; {facts.filtering_s:.2f} s",
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, words in rows:
        say(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {words}")
    return (
        (lost, twice, misplaced) == (0, 0, 0)
        and facts.acknowledged == slow.count == replayed.count == facts.total
        and facts.fell_back > 0
        and facts.exit_code == 0
        and facts.filtered == expected
    )


def unusable(directory: str) -> str | None:
    """Why the demo cannot work there; None if it can. Makes the directory."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        if not directory:
            return "the name is empty"
        if os.listdir(directory):
            return "it is not empty, and the demo counts from the first message"
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(directory, os.W_OK | os.X_OK) else "it cannot be written to"


async def run(directory: Path, goal: int) -> int:
    """The demo, ended by a signal if one comes: 0 if all counts agree, 128 and the signal's number otherwise."""
    whole = asyncio.current_task()
    assert whole is not None
    signals: list[int] = []

    def end(number: int) -> None:
        signals.append(number)
        whole.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return 0 if await demo(directory, goal) else 1
    except asyncio.CancelledError:
        print("interrupted", file=sys.stderr)
        return 128 + signals[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bin/demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--readings", type=int, default=8000, help=f"of each of the {STATIONS} stations (8000)"
    )
    parser.add_argument("--data", metavar="DIR", help="where to work (a temporary directory)")
    chosen = parser.parse_args()
    if chosen.readings < 500:
        parser.error("--readings must be at least 500, or nobody would be slow")
    if chosen.data is not None and (problem := unusable(chosen.data)):
        parser.error(f"--data {chosen.data}: {problem}")
    directory = Path(chosen.data or tempfile.mkdtemp(prefix="runnel-demo-"))
    code = uvloop.run(run(directory, chosen.readings))
    if code > 1:
        if chosen.data is None:
            shutil.rmtree(directory, ignore_errors=True)
        return code
    runnel_path = Path(sys.executable).parent / "runnel"
    here = Path.cwd()
    command = runnel_path.relative_to(here) if runnel_path.is_relative_to(here) else runnel_path
    data = directory / "data"
    say("\nEverything adds up." if code == 0 else "\n[bold red]The counts do not add up.[/]")
    say(f"The data lies in {data}; look at it with")
    for words in (
        f"{command} log inspect {data} --topics",
        f"{command} log export {data} --topic 'sensors/site-3/*' --tag unit=C --limit 3 --to -",
        f"{command} serve --data {data}     # and elsewhere: {command} sub 'sensors/*' --from last",
    ):
        say(f"  {words}")
    if chosen.data is None:
        say(f"and remove it with  rm -r {directory}")
    return code


if __name__ == "__main__":
    sys.exit(main())
