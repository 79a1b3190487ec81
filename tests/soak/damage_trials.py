"""One damaged file of a data directory, and how every kind of reader deals with it.

The directory lies on a fake disk and is opened by a broker within the test. It was closed in good order, or its broker
was killed. A trial damages one of its files: a flipped bit, a cut, zeros at the end, nothing left in it, or no file.
Then it holds that

- every message that was stored is served as it was, or reported missing: by fetch, to live readers, to consumers of
  acknowledged work, by an export; at the next start too;
- acknowledgements, cursors and subscriptions are what they were, or the start has reported damage;
- no offset is given again;
- or the broker refuses the directory, and names the file.

The journal was made with one shard or with several. The broker that opens it makes new journals with one. The directory
has the present format, or format 1, so that it is migrated with its damage, or it has been migrated before the damage.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from random import Random
from typing import Any, Final, NamedTuple

import msgspec

from runnel.broker.broker import Broker
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest
from runnel.broker.fetcher import FetchRequest
from runnel.broker.live.subscription import SubscribeRequest
from runnel.broker.monitoring.events import EventKind
from runnel.config import LogSettings, Rotate, Settings, TopicRule
from runnel.errors import OffsetGoneError, RunnelError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace, Start
from runnel.formats.work_heads import Consume
from runnel.log.reading import OfflineLog, verify
from tests.broker.consumer_groups.scenes import Worker
from tests.broker.scenes import PLENTY, Reader
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.workers import SimulatedWorkers
from tests.log.images import DIRECTORY, Image, disk_of, flipped, format_one, image_of

SETTINGS: Final = Settings(
    log=LogSettings(allocate_bytes=512, disk_reserve_bytes=0),
    topics=(
        TopicRule(match="own/*", journal="{topic}"),
        TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1500)),
    ),
)
TOPICS: Final = ("a", "b", "own/c")
MESSAGES: Final = 12
ACKED: Final = frozenset({("a", 1), ("a", 2), ("a", 4), ("b", 1), ("own/c", 1), ("own/c", 2)})
CURSORS: Final = 2
SUBSCRIPTION: Final = "work"
TAIL_BYTES: Final = 512
_FOLDERS: Final = (
    "metadata",
    "catalogue",
    "journals",
    "journals/main",
    "journals/main/0",
    "journals/main/0/catalogue",
    "journals/main/0/state",
    "journals/main/1",
    "journals/main/1/catalogue",
    "journals/main/1/state",
    "journals/own%2Fc",
)
_TURNS: Final = 40
_TURNS_ROUNDS_MAX: Final = 50

Place = tuple[str, int]


class Origin(NamedTuple):
    """How the directory came about. With three shards, `a` lies in the first, `b` in the second."""

    shards: int = 1  # of the journal
    format: int = 2
    is_migrated: bool = False  # of format 1, and opened and closed since

    def __str__(self) -> str:
        return (
            f"{self.shards} shards, {'migrated' if self.is_migrated else f'format {self.format}'}"
        )


PRESENT: Final = Origin()
ORIGINS: Final = (
    PRESENT,
    Origin(3),
    Origin(1, format=1),
    Origin(3, format=1),
    Origin(1, is_migrated=True),
    Origin(3, is_migrated=True),
)


def payload_of(place: Place) -> bytes:
    return (b"%s %d " % (place[0].encode(), place[1])) * 8


STORED: Final = frozenset((topic, offset) for topic in TOPICS for offset in range(1, MESSAGES + 1))


class Trial(NamedTuple):
    """A directory with one changed file. Without content the file is missing, or all files of the folder."""

    was_closed: bool
    path: str
    way: str
    content: bytes | None
    origin: Origin = PRESENT

    def __str__(self) -> str:
        end = "closed" if self.was_closed else "killed"
        return f"{end} {self.path} {self.way}, {self.origin}"

    def disk(self) -> FakeDisk:
        whole = images(self.origin)[self.was_closed]
        is_folder = self.path.endswith("/")
        rest = {
            path: data
            for path, data in whole.items()
            if path != self.path and not (is_folder and path.startswith(self.path))
        }
        return disk_of(rest if self.content is None else rest | {self.path: self.content})


class TrialResult(NamedTuple):
    is_refused: bool
    violations: Sequence[str]  # each begins with its kind and a colon


# --- The directory ---


async def open_broker(disk: FakeDisk, shards: int = 1) -> Broker:
    """`shards`: of the journals that it makes."""
    log = msgspec.structs.replace(SETTINGS.log, journal_shards=shards)
    return await Broker.open(
        msgspec.structs.replace(SETTINGS, log=log),
        directory=DIRECTORY,
        disk=disk,
        clock=VirtualClock(),
        workers=SimulatedWorkers(Random(0), turns_max=0),
    )


@cache
def images(origin: Origin = PRESENT) -> dict[bool, Image]:
    """The same directory after an orderly end (True), and as a killed process leaves it (False)."""
    if origin.is_migrated:
        former = images(Origin(origin.shards, format=1))
        return {was_closed: asyncio.run(_migrated(image)) for was_closed, image in former.items()}
    if origin.format == 1:
        present = images(Origin(origin.shards))
        return {was_closed: format_one(image) for was_closed, image in present.items()}
    return asyncio.run(_fill(origin.shards))


async def _migrated(image: Image) -> Image:
    disk = disk_of(image)
    broker = await open_broker(disk)
    await broker.close()
    return image_of(disk)


async def _fill(shards: int) -> dict[bool, Image]:
    disk = disk_of({})
    broker = await open_broker(disk, shards)
    await broker.consumer_groups.make_subscription(
        SubscriptionRequest(SUBSCRIPTION, TOPICS, "shared", Start("earliest"))
    )
    for offset in range(1, MESSAGES + 1):
        for topic in TOPICS:
            message = Message(topic, payload_of((topic, offset)))
            [stored] = (await broker.publish(Batch.from_messages([message]))).base_offsets
            assert stored == offset
    for number in range(CURSORS):
        await broker.cursors.set(f"cursor{number}", [CursorPlace("a", 0, number + 3)])
    worker = await _consume(broker)
    await _turn(lambda: len(worker.parts) == len(STORED))
    for topic, offset in sorted(ACKED):
        worker.ack(offset, topic=topic)
        await worker.consumer.wait_stored()
    killed = image_of(disk)
    await broker.close()
    return {True: image_of(disk), False: killed}


async def _consume(broker: Broker) -> Worker:
    worker = Worker()
    request = Consume(1, 1, SUBSCRIPTION, (), "", 1000, 2**24, "", None, None)
    worker.consumer = await broker.consumer_groups.consume(1, worker, request)
    worker.consumer.start()
    return worker


async def _turn(is_done: Any) -> None:
    for _ in range(_TURNS_ROUNDS_MAX):
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if is_done():
            return


# --- Ways of damaging a file ---


def trials(random: Random, *, flips: int, cuts: int, origin: Origin = PRESENT) -> Iterator[Trial]:
    """For every file of both directories: so many flips and cuts (all of them for a small file), and all other ways."""
    for was_closed, image in images(origin).items():
        for folder in _FOLDERS:
            path = f"{DIRECTORY}/{folder}/"
            if any(each.startswith(path) for each in image):
                yield Trial(was_closed, path, "folder missing", None, origin)
        for path, content in sorted(image.items()):
            for way, damaged in _ways(content, random, flips, cuts):
                yield Trial(was_closed, path, way, damaged, origin)


def _ways(
    content: bytes, random: Random, flips: int, cuts: int
) -> Iterator[tuple[str, bytes | None]]:
    yield "missing", None
    yield "emptied", b""
    yield "all zeros", bytes(len(content))
    yield (
        f"last {TAIL_BYTES} bytes zeroed",
        content[:-TAIL_BYTES] + bytes(min(TAIL_BYTES, len(content))),
    )
    for position in _chosen(range(len(content)), flips, random):
        bit = random.randrange(8)
        yield f"bit {bit} of {position} flipped", flipped(content, position, bit)
    for size in _chosen(range(1, len(content)), cuts, random):
        yield f"cut to {size} of {len(content)}", content[:size]


def _chosen(places: range, count: int, random: Random) -> Iterable[int]:
    return places if len(places) <= count else sorted(random.sample(places, count))


# --- Checks ---


class _ReaderRecord:
    """The messages that a reader got, and those that were reported missing to it."""

    def __init__(self, reader: str, violations: list[str]) -> None:
        self.reader = reader
        self._violations = violations
        self.served: set[Place] = set()
        self._missing: list[tuple[str, int, int]] = []
        self.is_all_missing = False

    def serve(self, messages: Iterable[Any]) -> None:
        for message in messages:
            place = (message.topic, message.offset)
            if place not in STORED:
                continue  # published by the trial itself
            if message.payload != payload_of(place):
                got = f"{self.reader} got {message.payload!r} as {place}"
                self._violations.append(f"served wrong: {got}")
            self.served.add(place)

    def miss(self, topic: str, begin: int, end: int) -> None:
        self._missing.append((topic, begin, end))
        self.is_all_missing |= not topic  # a stretch of a whole shard

    def silent(self, expected: Iterable[Place] = STORED) -> list[Place]:
        """The messages that were neither served nor reported missing."""
        if self.is_all_missing:
            return []
        return sorted(
            place
            for place in set(expected) - self.served
            if not any(
                place[0] == topic and begin <= place[1] < end for topic, begin, end in self._missing
            )
        )

    def check(self, expected: Iterable[Place] = STORED) -> None:
        if silent := self.silent(expected):
            self._violations.append(f"{self.reader} skips: {_shown(silent)}")


def _shown(places: Sequence[Place]) -> str:
    return ", ".join(f"{topic}@{offset}" for topic, offset in places[:6]) + (
        f" and {len(places) - 6} more" if len(places) > 6 else ""
    )


def run_trial(trial: Trial) -> TrialResult:
    try:
        return asyncio.run(_run(trial))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the trial found
        return TrialResult(is_refused=False, violations=[f"crash: {error!r}"])


async def _run(trial: Trial) -> TrialResult:
    violations: list[str] = []
    disk = trial.disk()
    try:
        _read_offline(disk, violations)
    except (RunnelError, OSError) as error:
        _check_refusal(error, violations)
    try:
        broker = await open_broker(disk)
    except (RunnelError, OSError) as error:
        _check_refusal(error, violations)
        return TrialResult(is_refused=True, violations=violations)
    reported = [line for line in broker.recovered if line.startswith(("damaged:", "torn"))]
    await _check_state(broker, reported, violations)
    known = await _check_readers(broker, violations)
    await _check_work(broker, known, reported, violations)
    added = await _publish(broker, violations)
    await broker.close()
    broker = await open_broker(disk)
    second: list[str] = []
    await _check_readers(broker, second)
    for topic, offset in added:
        page = await broker.fetch(FetchRequest(topic, 0, offset=offset, messages_max=1))
        if [message.payload for batch in page.batches for message in batch.messages()] != [b"new"]:
            second.append(f"new message is lost: {topic}@{offset}")
    violations += [f"second start: {violation}" for violation in second]
    await broker.close()
    return TrialResult(is_refused=False, violations=violations)


def _nobody(_: str) -> None:
    return None


def _check_refusal(error: Exception, violations: list[str]) -> None:
    if DIRECTORY not in str(error):
        violations.append(f"refusal names no file: {error!r}")


def _read_offline(disk: FakeDisk, violations: list[str]) -> None:
    record = _ReaderRecord("export", violations)
    log = OfflineLog(DIRECTORY, disk=disk, find_holder=_nobody)
    for batch in log.scan():
        record.serve(batch.messages())
    if (silent := record.silent()) and not log.report.damage:
        violations.append(f"export skips: {_shown(silent)}")
    found = verify(OfflineLog(DIRECTORY, disk=disk, find_holder=_nobody))
    if silent and not found.damage:
        violations.append(f"verify says nothing: {_shown(silent)}")


async def _check_state(broker: Broker, reported: Sequence[str], violations: list[str]) -> None:
    cursors = {
        cursor.name: [place.offset for place in cursor.places]
        for cursor in await broker.cursors.list()
    }
    expected = {f"cursor{number}": [number + 3] for number in range(CURSORS)}
    if cursors != expected and not reported:
        violations.append(f"cursors lost: {cursors}")
    is_damaged = any(line.startswith("damaged:") for line in reported)
    if bool(broker.metrics.gauges()["damage"]) != is_damaged:
        violations.append(f"gauge contradicts the report: {reported}")
    if bool(broker.monitor.warnings()) != is_damaged:
        violations.append(f"readiness contradicts the report: {reported}")


async def _check_readers(broker: Broker, violations: list[str]) -> set[Place]:
    """Returns the stored messages of topics that are still known: a fetch of others is refused."""
    fetch = _ReaderRecord("fetch", violations)
    topics = [topic for topic in TOPICS if await _fetch_all(broker, topic, fetch)]
    fetch.check()
    known = {place for place in STORED if place[0] in topics}
    live = _ReaderRecord("live", violations)
    reader = Reader()
    subscription = await broker.subscribe(
        SubscribeRequest(1, reader, TOPICS, Start("earliest"), credit_bytes=PLENTY)
    )
    subscription.start()
    await _turn(lambda: not subscription.is_behind)
    live.serve(reader.messages)
    for gap in reader.gaps:
        live.miss(gap.topic, gap.first_offset, gap.next_offset)
    live.check(known)
    subscription.close()
    await _check_last_values(broker, known, violations)
    return known


async def _check_last_values(broker: Broker, known: set[Place], violations: list[str]) -> None:
    """A reader that starts with the last values gets each of them, or a gap for it."""
    reader = Reader()
    subscription = await broker.subscribe(
        SubscribeRequest(2, reader, TOPICS, Start("last"), credit_bytes=PLENTY)
    )
    subscription.start()
    await _turn(lambda: not subscription.is_behind)
    subscription.close()
    reported = {message.topic for message in reader.messages} | {gap.topic for gap in reader.gaps}
    silent = {topic for topic, _ in known} - reported
    violations += [f"last value is passed over: {topic}" for topic in silent]


async def _fetch_all(broker: Broker, topic: str, record: _ReaderRecord) -> bool:
    """Fetch all of a topic. Returns whether it exists."""
    offset, next_offset = 0, 1
    while next_offset != offset:
        offset = next_offset
        try:
            page = await broker.fetch(FetchRequest(topic, 0, offset=offset))
        except OffsetGoneError as error:
            next_offset = error.first_offset
            record.miss(topic, offset, next_offset)
        except UnknownTopicError:
            record.miss(topic, 1, PLENTY)
            return False
        else:
            for batch in page.batches:
                record.serve(batch.messages())
            for gap in page.gaps:
                record.miss(topic, gap.first_offset, gap.next_offset)
            next_offset = page.next_offset
    return True


async def _check_work(
    broker: Broker, known: set[Place], reported: Sequence[str], violations: list[str]
) -> None:
    work = _ReaderRecord("work", violations)
    emit = broker.events.emit

    def listen(kind: EventKind, subject: str, /, **fields: Any) -> None:
        if kind is EventKind.WORK_LOST:
            work.miss(fields["topic"], fields["first_offset"], fields["next_offset"])
        emit(kind, subject, **fields)

    broker.events.emit = listen  # type: ignore[method-assign]
    try:
        worker = await _consume(broker)
    except RunnelError as error:
        if not reported:
            violations.append(f"subscription lost: {error}")
        return
    await _turn(lambda: not work.silent(known - ACKED - set(worker.parts)))
    work.serve(worker.messages)
    work.check(known - ACKED)
    if (again := work.served & ACKED) and not reported:
        violations.append(f"acknowledgements lost: {_shown(sorted(again))}")
    worker.consumer.close(is_clean=True)


async def _publish(broker: Broker, violations: list[str]) -> list[Place]:
    added = []
    for topic in TOPICS:
        [offset] = (
            await broker.publish(Batch.from_messages([Message(topic, b"new")]))
        ).base_offsets
        added.append((topic, offset))
        if (topic, offset) in STORED:
            violations.append(f"offset given again: {topic}@{offset}")
    return added


class Summary:
    """The number of trials, and the violations they found."""

    def __init__(self) -> None:
        self.trials = 0
        self.refused = 0
        self.kinds: Counter[str] = Counter()
        self.failures: list[str] = []

    def add(self, trial: Trial, outcome: TrialResult) -> None:
        self.trials += 1
        self.refused += outcome.is_refused
        self.kinds.update({_kind(violation) for violation in outcome.violations})
        if outcome.violations:
            self.failures.append(f"{trial}: {'; '.join(outcome.violations)}")


def try_for(seconds: float, seed: int) -> Summary:
    """Run trials in random order, for so long."""
    summary = Summary()
    ends_at = time.monotonic() + seconds
    while not summary.trials or time.monotonic() < ends_at:
        random = Random(f"{seed} {summary.trials}")
        some = list(trials(random, flips=4, cuts=4, origin=random.choice(ORIGINS)))
        random.shuffle(some)
        for trial in some:
            summary.add(trial, run_trial(trial))
            if time.monotonic() >= ends_at:
                break
    return summary


def _kind(violation: str) -> str:
    return violation.rpartition("second start: ")[2].partition(":")[0]
