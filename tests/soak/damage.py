"""Data directories with damaged files, and how the offline reader and a broker deal with them.

Half of the time goes to single files on a fake disk (`damage_trials`), half to several at once in a real directory.

A broker may refuse to open one, with an error that names the file, and then has changed nothing. If it opens it, every
message that it serves is the one that was stored, it takes new ones, and it finds them again after the next start.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from runnel.client import Bus
from runnel.config import LogSettings, Rotate, Settings, TopicRule
from runnel.embedded import Broker
from runnel.errors import OffsetGoneError, RunnelError, UnknownTopicError
from runnel.log.reading import OfflineLog, verify
from tests.soak.damage_trials import try_for

SETTINGS: Final = Settings(
    log=LogSettings(allocate_bytes=4096, disk_reserve_bytes=0),
    topics=(
        TopicRule(match="own/*", journal="{topic}", rotate=Rotate(bytes_max=2000)),
        TopicRule(match="*", rotate=Rotate(bytes_max=6000), last_value=True),
    ),
)
TOPICS: Final = ("main/a", "main/b", "own/c")
MESSAGES: Final = 60
# Far more than a round takes, also on a busy machine.
PATIENCE_S: Final = 60.0
_FAILURES_SHOWN_MAX: Final = 20
# A broker that refuses a directory may still write its lock file.
_WRITTEN_ANYWAY: Final = frozenset({"lock"})

# Errors of the operating system name their file, too: a folder in place of a file causes nothing else.
REFUSALS: Final = (RunnelError, OSError)

Place = tuple[str, int]
Stored = dict[Place, bytes]


class DamageFault(AssertionError):
    """A broker or reader broke a promise about damaged directories."""


class DamageReport(NamedTuple):
    rounds: int
    refused: int
    served: int
    ways: Counter[str]


# --- A directory with all kinds of data ---


async def _fill(directory: Path, copy_to: Path) -> Stored:
    """Store messages, a cursor, a named publisher, acknowledged work and dead letters; copy it while it is open."""
    stored: Stored = {}
    async with Broker.open(directory, settings=SETTINGS) as broker, broker.connect() as bus:
        for number in range(MESSAGES):
            for topic in TOPICS:
                payload = f"{topic} {number} ".encode() * 5
                receipt = await bus.publish(topic, payload, key=b"k", tags={"n": str(number)})
                stored[topic, receipt.offset] = payload
        async with bus.publisher("main/a", name="named") as publisher:
            publisher.send(b"named")
        stored["main/a", MESSAGES + 1] = b"named"
        await bus.set_cursor("cursor", {("main/a", 0): 10})
        await bus.make_subscription("work", "main/*", deliveries_max=1)
        async with bus.consume("work") as consumer:
            for number in range(20):
                work = await anext(consumer)
                await (work.ack(stored=True) if number % 4 else work.nack(reason="on purpose"))
            await consumer.flush()
        await broker.sync()
        shutil.copytree(directory, copy_to)
    return stored


# --- Ways of damaging a file ---


def _cut(path: Path, random: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: random.randrange(len(content) + 1)])


def _empty(path: Path, _: Random) -> None:
    path.write_bytes(b"")


def _flip(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 1, 5))):
        if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _overwrite(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    begin = random.randrange(len(content) + 1)
    size = random.choice((1, 16, 100, len(content)))
    filler = random.choice((bytes(size), b"\xff" * size, random.randbytes(size)))
    content[begin : begin + size] = filler
    path.write_bytes(content)


def _replace(path: Path, random: Random) -> None:
    size = random.choice((1, 8, 100, 5000))
    path.write_bytes(random.choice((random.randbytes(size), bytes(size), b"{}", b"text\n")))


def _append(path: Path, random: Random) -> None:
    with path.open("ab") as file:
        file.write(random.choice((random.randbytes(50), bytes(5000), path.read_bytes()[:200])))


def _remove(path: Path, _: Random) -> None:
    path.unlink()


def _make_folder(path: Path, _: Random) -> None:
    path.unlink()
    path.mkdir()


def _leave_strangers(path: Path, random: Random) -> None:
    """Add files that are not Runnel's."""
    names = ("core", ".DS_Store", "lost+found", "backup.tar", "x.segment", "0.tmp", "ä ö", "99")
    for name in random.sample(names, 3):
        stranger = path.parent / name
        if stranger.exists():  # left by an earlier round
            continue
        if random.random() < 0.5:
            stranger.mkdir()
        else:
            stranger.write_bytes(random.randbytes(20))


def _copy_beside(path: Path, random: Random) -> None:
    """Copy another file's content over the file, or to a new name beside it."""
    others = [each for each in path.parent.iterdir() if each.is_file()]
    shutil.copyfile(random.choice(others), path.parent / f"{path.name}.bak")
    with suppress(shutil.SameFileError):
        shutil.copyfile(random.choice(others), path)


WAYS: Final[tuple[Callable[[Path, Random], None], ...]] = (
    _cut,
    _empty,
    _flip,
    _overwrite,
    _replace,
    _append,
    _remove,
    _make_folder,
    _leave_strangers,
    _copy_beside,
)


# --- Checks ---


def _content(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.name not in _WRITTEN_ANYWAY
    }


def _read_offline(directory: Path, stored: Stored) -> None:
    try:
        log = OfflineLog(str(directory))
        verify(log)
        log.topics()
        for batch in OfflineLog(str(directory)).scan():
            for message in batch.messages():
                _compare("the offline reader", message, stored)
    except REFUSALS:
        return


def _compare(who: str, message: Any, stored: Stored) -> None:
    expected = stored.get((message.topic, message.offset))
    if message.payload != expected:
        raise DamageFault(
            f"{who} served {message.payload!r} as {message.topic} {message.offset}, which was {expected!r}"
        )


async def _try(directory: Path, stored: Stored) -> int | None:
    """Open a broker. Returns the number of messages it served; None if it refused the directory."""
    before = _content(directory)
    try:
        async with Broker.open(directory, settings=SETTINGS) as broker, broker.connect() as bus:
            served = await _read_all(bus, stored)
            added = await _publish_more(bus)
    except REFUSALS as error:
        if isinstance(error, RunnelError) and _content(directory) != before:
            raise DamageFault(f"it was refused, and something was changed: {error}") from error
        if str(directory) not in str(error):
            raise DamageFault(f"the error names no file: {error!r}") from error
        return None
    async with Broker.open(directory, settings=SETTINGS) as broker, broker.connect() as bus:
        for topic, offset, payload in added:
            page = await bus.fetch(topic, offset)
            if page.messages[0].payload != payload:
                raise DamageFault(f"{topic} {offset} is not there after the next start")
    return served


async def _read_all(bus: Bus, stored: Stored) -> int:
    served = 0
    for topic in TOPICS:
        offset, next_offset = 0, 1
        while next_offset != offset:
            offset = next_offset
            try:
                page = await bus.fetch(topic, offset)
            except OffsetGoneError as error:
                next_offset = error.first_offset
            except UnknownTopicError:
                break
            else:
                next_offset = page.next_offset
                served += len(page.messages)
                for message in page.messages:
                    _compare("the broker", message, stored)
    return served


async def _publish_more(bus: Bus) -> list[tuple[str, int, bytes]]:
    added = []
    for topic in TOPICS:
        receipt = await bus.publish(topic, b"new")
        added.append((topic, receipt.offset, b"new"))
    return added


async def damage_directories(seconds: float, seed: int) -> DamageReport:
    """For so long, damage copies of two directories: one closed, the other copied while it was open."""
    with tempfile.TemporaryDirectory(prefix="runnel-damage-") as folder:
        closed, left_open = Path(folder, "closed"), Path(folder, "open")
        stored = await _fill(closed, left_open)
        ends_at = time.monotonic() + seconds
        rounds = refused = served = 0
        ways: Counter[str] = Counter()
        while not rounds or time.monotonic() < ends_at:
            random = Random(f"{seed} {rounds}")
            copy = Path(folder, "copy")
            shutil.copytree(random.choice((closed, left_open)), copy)
            done = _damage(copy, random)
            ways.update(way for way, _ in done)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    _read_offline(copy, stored)
                    found = await _try(copy, stored)
            except Exception as error:
                ways_shown = ", ".join(f"{way[1:]} {path}" for way, path in done)
                raise DamageFault(f"round {rounds} ({ways_shown}): {error!r}") from error
            refused += found is None
            served += found or 0
            rounds += 1
            shutil.rmtree(copy)
        return DamageReport(rounds, refused, served, ways)


def _damage(directory: Path, random: Random) -> list[tuple[str, str]]:
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        path, way = random.choice(files), random.choice(WAYS)
        way(path, random)
        done.append((way.__name__, str(path.relative_to(directory))))
    return done


def soak_damage(seconds: float, seed: int) -> int:
    """The command: prints what it does, and returns its exit code."""
    print(f"damaged data directories from seed {seed} on, for {seconds:g} s", flush=True)
    logging.getLogger("runnel").setLevel(logging.CRITICAL)  # every trial logs warnings
    tried = try_for(seconds / 2, seed)
    print(f"{tried.trials:,} damaged files, {tried.refused:,} of them refused", flush=True)
    if tried.failures:
        print("\n".join(tried.failures[:_FAILURES_SHOWN_MAX]))
        print(f"seed {seed}: {len(tried.failures):,} trials failed: {dict(tried.kinds)}")
        return 1
    try:
        outcome = asyncio.run(damage_directories(seconds / 2, seed))
    except DamageFault as fault:
        traceback.print_exc(file=sys.stdout)
        print(f"seed {seed}: {fault}")
        return 1
    for name, count in sorted(outcome.ways.items()):
        print(f"  {name[1:]:24} {count:,} times")
    print(
        f"{outcome.rounds:,} directories, {outcome.refused:,} of them refused; {outcome.served:,} messages read "
        f"from the others; nothing broken"
    )
    return 0
