"""The log at work: write sensor readings, kill the writer half-way, recover, prove that nothing is missing.

bin/demo [--batches N] [--data DIR]

The writer is a process of its own, killed with SIGKILL while it writes. A second one goes on where the log ends.
Then the files are read without any broker: every message counted, checked for order and content, and filtered by
tag and time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runnel.config import Rotate, Settings, TopicRule
from runnel.embedded import open_log
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.reading import OfflineLog, Selection

STATIONS = 50
READINGS = 20  # of each station in a batch
IN_FLIGHT = 8
BEGIN_NS = 1_767_225_600_000_000_000  # 2026-01-01, the event time of the first reading
STEP_NS = 1_000_000_000
SETTINGS = Settings(
    topics=(TopicRule(match="sensors/*", journal="sensors", rotate=Rotate(bytes_max=8 * 2**20)),)
)
console = Console(highlight=False)


def station(number: int) -> tuple[str, dict[str, str]]:
    unit = "hPa" if number % 5 == 0 else "C"
    return f"sensors/site-{number % 7}/{number:02d}", {"unit": unit, "site": str(number % 7)}


def readings(batch: int) -> list[Message]:
    """The messages of one batch; anyone can compute them again, and so check what was stored."""
    messages = []
    for number in range(STATIONS):
        topic, tags = station(number)
        for at in range(batch * READINGS, (batch + 1) * READINGS):
            payload = b"%d:%.2f" % (at, 20 + (at * 7 + number) % 500 / 100)
            messages.append(Message(topic, payload, b"%d" % number, tags, BEGIN_NS + at * STEP_NS))
    return messages


# --- The writer: a process that will not live to see its end ---


def tell(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os._exit(1)  # whoever listened is dead: nobody wants the rest


async def write(directory: str, batches: int) -> None:
    """Append batches from where the log ends, and print how many are stored after each answer."""
    async with open_log(directory, SETTINGS) as log:
        first = station(0)[0]
        await log.ensure_topic(first)
        stored = ((await log.bounds(first, 0)).next_offset - 1) // READINGS
        torn = "; ".join(log.recovered.torn)
        tell(f"open {stored} {torn}")
        window = asyncio.Semaphore(IN_FLIGHT)
        term = time.time_ns()

        async def append(batch: int) -> None:
            named = Batch.from_messages(
                readings(batch), producer="demo", term=term, number=batch - stored
            )
            answer = log.append(named)
            await answer
            tell(f"stored {batch + 1}")
            window.release()

        async with asyncio.TaskGroup() as tasks:
            for batch in range(stored, batches):
                await window.acquire()
                tasks.create_task(append(batch))


@dataclass
class Written:
    """What one writer process told before it ended."""

    found: int = 0  # batches that were there when it opened the log
    torn: str = ""
    stored: int = 0
    seconds: float = 0.0


def run_writer(directory: str, batches: int, kill_at: int | None) -> Written:
    """Run a writer to its end, or until `kill_at` batches are stored; then SIGKILL."""
    told = Written()
    command = [sys.executable, __file__, "--write", directory, "--batches", str(batches)]
    # In a group of its own: Ctrl-C is for us, and we end the writer.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            _listen(process, told, kill_at)
        except BaseException:
            process.kill()
            raise
    if process.returncode not in (0, -signal.SIGKILL):
        sys.exit(f"error: the writer ended with exit code {process.returncode}")
    return told


def _listen(process: subprocess.Popen[str], told: Written, kill_at: int | None) -> None:
    assert process.stdout is not None
    begin = time.perf_counter()
    for line in process.stdout:
        word, number, *rest = line.split(maxsplit=2)
        if word == "open":
            told.found, told.torn = int(number), "".join(rest).strip()
            begin = time.perf_counter()
        else:
            told.stored = max(told.stored, int(number))
            told.seconds = time.perf_counter() - begin
        if kill_at is not None and told.stored >= kill_at:
            process.send_signal(signal.SIGKILL)
            kill_at = None
    process.wait()


# --- Reading back ---


@dataclass
class ReadBack:
    messages: int = 0
    wrong: int = 0  # not the message that was published as this one
    out_of_order: int = 0
    seconds: float = 0.0
    next_offsets: Counter[str] = field(default_factory=Counter)


def read_back(directory: str, batches: int) -> ReadBack:
    """Every message, checked against what was published."""
    expected = {
        topic: [message.payload for message in messages] for topic, messages in _by_topic(batches)
    }
    seen = ReadBack()
    begin = time.perf_counter()
    for batch in OfflineLog(directory).scan(Selection(topics=("sensors/*",))):
        for message in batch:
            seen.messages += 1
            if message.offset != seen.next_offsets[message.topic] + 1:
                seen.out_of_order += 1
            seen.next_offsets[message.topic] = message.offset
            published = expected[message.topic]
            if message.offset > len(published) or published[message.offset - 1] != message.payload:
                seen.wrong += 1
    seen.seconds = time.perf_counter() - begin
    return seen


def _by_topic(batches: int) -> Iterator[tuple[str, list[Message]]]:
    topics: dict[str, list[Message]] = {}
    for batch in range(batches):
        for message in readings(batch):
            topics.setdefault(message.topic, []).append(message)
    return iter(topics.items())


def filter_offline(directory: str, batches: int) -> tuple[int, int, float]:
    """Pressure readings of the second quarter of the time: found, expected, seconds."""
    first, last = batches * READINGS // 4, batches * READINGS // 2
    begin = time.perf_counter()
    found = sum(
        len(batch)
        for batch in OfflineLog(directory).scan(
            Selection(
                topics=("sensors/*",),
                tags={"unit": "hPa"},
                event_since_ns=BEGIN_NS + first * STEP_NS,
                event_until_ns=BEGIN_NS + last * STEP_NS,
            )
        )
    )
    stations = sum(station(number)[1]["unit"] == "hPa" for number in range(STATIONS))
    return found, (last - first) * stations, time.perf_counter() - begin


# --- The demo ---


def demo(directory: str, batches: int) -> bool:
    size = STATIONS * READINGS
    console.print(f"Writing {batches * size:,} readings of {STATIONS} stations to {directory} …")
    killed = run_writer(directory, batches, kill_at=batches * 2 // 5)
    console.print(
        f"Killed the writer (SIGKILL) after {killed.stored * size:,} acknowledged readings; starting another …"
    )
    resumed = run_writer(directory, batches, kill_at=None)
    console.print("Reading everything back from the files, without a broker …")
    seen = read_back(directory, batches)
    console.print("Filtering by tag and time, offline …")
    found, wanted, filter_seconds = filter_offline(directory, batches)

    table = Table(title="What happened", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    table.add_row(
        "acknowledged before the kill", f"{killed.stored * size:,}", "stored, each after a sync"
    )
    table.add_row(
        "found by recovery",
        f"{resumed.found * size:,}",
        resumed.torn or "no torn tail: every write had finished",
    )
    written = resumed.stored - resumed.found
    rate = written * size / resumed.seconds if resumed.seconds else 0
    table.add_row(
        "written by the second writer", f"{written * size:,}", f"{rate:,.0f} a second, stored"
    )
    table.add_row(
        "read back",
        f"{seen.messages:,}",
        f"{seen.messages / seen.seconds:,.0f} a second, as objects, checked",
    )
    missing = batches * size - seen.messages
    table.add_row("missing, wrong, out of order", f"{missing}, {seen.wrong}, {seen.out_of_order}")
    table.add_row(
        "tag unit=hPa, second quarter", f"{found:,}", f"expected {wanted:,}; {filter_seconds:.2f} s"
    )
    console.print(table)
    return (
        resumed.found >= killed.stored
        and resumed.stored == batches
        and (missing, seen.wrong, seen.out_of_order) == (0, 0, 0)
        and found == wanted
    )


def unusable(directory: str) -> str | None:
    """Why the demo cannot write there; None if it can. Makes the directory."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        if not directory:
            return "the name is empty"
        if os.listdir(directory):
            return "it is not empty, and the demo counts from the first message"
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(directory, os.W_OK | os.X_OK) else "it cannot be written to"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bin/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=300, help="of 1,000 readings each (300)")
    parser.add_argument(
        "--data", metavar="DIR", help="where to write; it is kept (a temporary one is too)"
    )
    parser.add_argument("--write", metavar="DIR", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.batches < 10:
        parser.error("--batches must be at least 10")
    if chosen.write is not None:
        asyncio.run(write(chosen.write, chosen.batches))
        return 0
    if chosen.data is not None and (problem := unusable(chosen.data)):
        parser.error(f"--data {chosen.data}: {problem}")
    directory = chosen.data or tempfile.mkdtemp(prefix="runnel-demo-")
    try:
        good = demo(directory, chosen.batches)
    except (KeyboardInterrupt, SystemExit):
        if chosen.data is None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    runnel = Path(sys.executable).parent / "runnel"
    command = (
        str(runnel.relative_to(Path.cwd())) if runnel.is_relative_to(Path.cwd()) else str(runnel)
    )
    console.print("Everything adds up." if good else "[bold red]The counts do not add up.[/]")
    console.print(f"The data lies in {directory}; look at it with")
    for words in ("inspect", "verify", "export"):
        tail = (
            " --topic 'sensors/site-3/*' --tag unit=C --limit 3 --to -" if words == "export" else ""
        )
        console.print(f"  {command} log {words} {directory}{tail}", soft_wrap=True)
    if not chosen.data:
        console.print(f"and remove it with  rm -r {directory}", soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
