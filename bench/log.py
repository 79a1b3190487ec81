"""The foundation's speed: batches, log, index. Every figure beside a bare loop that does the same bytes.

append      stored acknowledgements, 64 batches in flight | os.writev + os.fdatasync, same groups
shards      the same, to 16 shards of a journal in turn   | the same, with one shard
read        stored batches as bytes and as Arrow          | os.pread over the same file, same size
objects     messages to bytes and back                    | msgspec's row-wise msgpack
runs        a thousand runs in a batch                    | the same messages in one run
open        a clean journal, and one after a crash        | reading it
topics      memory of a hundred thousand idle topics
fetch       one of ten thousand topics: read amplification
saturated   acknowledgements while the loop never rests
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import uvloop

from bench.report import Result, interleaved, seconds_of
from runnel.config import LogSettings, Settings
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import SCAN_BYTES, Position, ShardId
from runnel.log.reading import OfflineLog
from runnel.platform.clock import SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.topics.partitions import shard_of_partition
from runnel.topics.policies import Policies

MESSAGES = 1000
PAYLOAD_BYTES = 100
IN_FLIGHT = 64

T = TypeVar("T")
MAIN = ShardId("main")


@asynccontextmanager
async def _open_log(directory: Path, settings: Settings | None = None) -> AsyncIterator[DiskLog]:
    workers = ThreadWorkers(2)
    log = await DiskLog.open(
        str(directory),
        settings=settings or Settings(),
        policies=Policies(()),
        disk=RealDisk(),
        clock=SystemClock(),
        workers=workers,
    )
    try:
        yield log
    finally:
        await log.close()
        workers.close()


def _run(work: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(work)


def _messages(topic: str = "bench/a", count: int = MESSAGES) -> list[Message]:
    chance = random.Random(1)
    return [
        Message(
            topic, chance.randbytes(PAYLOAD_BYTES), event_time_ns=1_700_000_000_000_000_000 + row
        )
        for row in range(count)
    ]


def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="runnel-bench-"))


# --- append ---


async def _append_all(log: DiskLog, batch: Batch, count: int) -> None:
    await _append_in_turn(log, [batch], count)


async def _append_in_turn(log: DiskLog, batches: Sequence[Batch], count: int) -> None:
    """`count` appends of these batches in turn, with at most IN_FLIGHT unanswered."""
    window = asyncio.Semaphore(IN_FLIGHT)

    def answered(_: object) -> None:
        window.release()

    for batch in islice(cycle(batches), count):
        await window.acquire()
        log.append(batch).add_done_callback(answered)
    for _ in range(IN_FLIGHT):  # until all are answered: shards do not wait for each other
        await window.acquire()


def bench_append(*, quick: bool) -> list[Result]:
    batch = Batch.from_messages(_messages())
    count = 1024 if quick else 8192
    groups: list[float] = []

    def product() -> float:
        directory = _scratch()

        async def work() -> float:
            async with _open_log(directory) as log:
                await log.append(batch)
                before = log.statistics().shards[0]
                begin = time.perf_counter()
                await _append_all(log, batch, count)
                seconds = time.perf_counter() - begin
                after = log.statistics().shards[0]
                groups.append(count / (after.syncs - before.syncs))
            return count * MESSAGES / seconds

        try:
            return _run(work())
        finally:
            shutil.rmtree(directory)

    def bare() -> float:
        directory = _scratch()
        block = batch.pack()
        per_group = round(groups[-1])
        try:
            file = os.open(directory / "bare", os.O_RDWR | os.O_CREAT)
            begin = time.perf_counter()
            for _ in range(0, count, per_group):
                os.writev(file, [block] * per_group)
                os.fdatasync(file)
            seconds = time.perf_counter() - begin
            os.close(file)
            return -(-count // per_group) * per_group * MESSAGES / seconds
        finally:
            shutil.rmtree(directory)

    product()
    ours, baseline = interleaved([product, bare], 5 if quick else 11)
    return [
        Result(
            "append, stored",
            ours,
            "messages/s",
            baseline,
            0.7,
            note=f"{statistics.median(groups):.0f} batches in a group",
        )
    ]


# --- shards ---

_SHARDS = 16


def bench_shards(*, quick: bool) -> list[Result]:
    """With many messages in a batch the bytes matter, with few the syncs: each shard has a file of its own."""
    return [
        _appended_in_shards(1000, 1024 if quick else 8192, quick=quick),
        _appended_in_shards(10, 8192 if quick else 65_536, quick=quick),
    ]


def _appended_in_shards(messages: int, count: int, *, quick: bool) -> Result:
    topics = {shard_of_partition(f"bench/{number}", 0, _SHARDS): number for number in range(500)}
    assert len(topics) == _SHARDS
    batches = [
        Batch.from_messages(_messages(f"bench/{number}", messages)) for number in topics.values()
    ]
    groups: list[float] = []

    def product(shards: int) -> float:
        directory = _scratch()
        settings = Settings(log=LogSettings(journal_shards=shards))

        async def work() -> float:
            async with _open_log(directory, settings) as log:
                await asyncio.gather(*(log.append(batch) for batch in batches))
                syncs = sum(shard.syncs for shard in log.statistics().shards)
                begin = time.perf_counter()
                await _append_in_turn(log, batches, count)
                seconds = time.perf_counter() - begin
                syncs = sum(shard.syncs for shard in log.statistics().shards) - syncs
                if shards > 1:
                    groups.append(count / syncs)
            return count * messages / seconds

        try:
            return _run(work())
        finally:
            shutil.rmtree(directory)

    ours, baseline = interleaved([lambda: product(_SHARDS), lambda: product(1)], 5 if quick else 11)
    return Result(
        f"append, stored, {_SHARDS} shards, {messages} messages a batch",
        ours,
        "messages/s",
        baseline,
        note=f"{statistics.median(groups):.1f} batches in a group",
    )


# --- read ---

# About as many as the reads without a broker have.
_TABLE_BATCHES = 36


async def _fill(directory: Path, batch: Batch, count: int) -> None:
    async with _open_log(directory) as log:
        await _append_all(log, batch, count)


def bench_read(*, quick: bool) -> list[Result]:
    """At the size that scans have by default, and at that of a reader's page: the ratio depends on it."""
    return [
        result for read_bytes in (SCAN_BYTES, 2**20) for result in _read_in(read_bytes, quick=quick)
    ]


def _read_in(read_bytes: int, *, quick: bool) -> list[Result]:
    directory = _scratch()
    batch = Batch.from_messages(_messages())
    count = 1024 if quick else 2000
    size = len(batch.pack()) * count
    try:
        _run(_fill(directory, batch, count))
        path = next((directory / "journals/main/0").glob("*.segment"))

        def bare() -> float:
            file = os.open(path, os.O_RDONLY)

            def work() -> None:
                position = 0
                while data := os.pread(file, read_bytes, position):
                    position += len(data)

            work()
            seconds = seconds_of(work)
            os.close(file)
            return size / seconds / 1e6

        async def scan(log: DiskLog, *, arrow: bool) -> float:
            begin = time.perf_counter()
            position, seen = Position(0, 1), 0
            while seen < count:
                page = await log.read_shard(MAIN, position, bytes_max=read_bytes)
                if arrow:
                    Batch.table(found.batch for found in page.found)
                seen += len(page.found)
                position = page.next_position
            return size / (time.perf_counter() - begin) / 1e6

        def product(*, arrow: bool) -> float:
            async def work() -> float:
                async with _open_log(directory) as log:
                    await scan(
                        log, arrow=arrow
                    )  # index read, memory warm: as in a scan that goes on
                    return await scan(log, arrow=arrow)

            return _run(work())

        def without_broker() -> float:
            log = OfflineLog(str(directory))

            def work() -> None:
                batches = log.scan()
                while group := list(islice(batches, _TABLE_BATCHES)):
                    Batch.table(group)

            work()
            return size / seconds_of(work) / 1e6

        baseline, as_bytes, as_arrow, offline = interleaved(
            [bare, lambda: product(arrow=False), lambda: product(arrow=True), without_broker],
            5 if quick else 11,
        )
    finally:
        shutil.rmtree(directory)
    size_text = f"{read_bytes // 2**20} MiB reads"
    is_scan = read_bytes == SCAN_BYTES
    found = [
        Result(f"read, bytes, checksums verified, {size_text}", as_bytes, "MB/s", baseline, 0.5),
        Result(
            f"read, to Arrow, {size_text}", as_arrow, "MB/s", baseline, 0.4 if is_scan else None
        ),
    ]
    if is_scan:
        found.append(Result("read without a broker, to Arrow", offline, "MB/s", baseline))
    return found


# --- objects ---


class _Row(msgspec.Struct, array_like=True, gc=False):
    """What a row-wise format would carry: the yardstick."""

    topic: str
    payload: bytes
    event_time_ns: int
    key: bytes | None = None


def bench_objects(*, quick: bool) -> list[Result]:
    messages = _messages()
    rows = [_Row(message.topic, message.payload, message.event_time_ns) for message in messages]
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[_Row])
    packed, packed_rows = Batch.from_messages(messages).pack(), encoder.encode(rows)

    def nanoseconds(work: Any) -> Any:
        def measure() -> float:
            return min(seconds_of(work) for _ in range(20)) / MESSAGES * 1e9

        return measure

    encode, decode, encode_rows, decode_rows = interleaved(
        [
            nanoseconds(lambda: Batch.from_messages(messages).pack()),
            nanoseconds(lambda: Batch.unpack(packed).messages()),
            nanoseconds(lambda: encoder.encode(rows)),
            nanoseconds(lambda: decoder.decode(packed_rows)),
        ],
        5 if quick else 15,
    )
    return [
        Result("encode a message object", encode, "ns", target=250, is_at_most=True),
        Result("decode to a message object", decode, "ns", target=300, is_at_most=True),
        Result(
            "encode, msgspec row-wise",
            encode_rows,
            "ns",
            note="yardstick, without columns or checksums",
        ),
        Result("decode, msgspec row-wise", decode_rows, "ns", note="yardstick"),
    ]


# --- runs ---


def bench_runs(*, quick: bool) -> list[Result]:
    one_run = Batch.from_messages(_messages())
    chance = random.Random(1)
    many_runs = Batch.from_messages(
        [
            Message(f"bench/sensor-{row:04d}", chance.randbytes(PAYLOAD_BYTES), event_time_ns=row)
            for row in range(MESSAGES)
        ]
    )
    count = 100 if quick else 300

    def measure(batch: Batch) -> float:
        """Microseconds of processor time a batch: appended, indexed, read back by a reader of everything."""
        directory = _scratch()

        async def work() -> float:
            async with _open_log(directory) as log:
                await log.append(batch)
                begin = time.process_time()
                await _append_all(log, batch, count)
                position, seen = Position(0, 2), 0
                while seen < count:
                    page = await log.read_shard(MAIN, position, bytes_max=SCAN_BYTES)
                    seen += len(page.found)
                    position = page.next_position
                return (time.process_time() - begin) / count * 1e6

        try:
            return _run(work())
        finally:
            shutil.rmtree(directory)

    many, one = interleaved(
        [lambda: measure(many_runs), lambda: measure(one_run)], 3 if quick else 7
    )
    return [
        Result(
            "a run, above the single-run case",
            (many - one) / MESSAGES,
            "µs",
            target=3,
            is_at_most=True,
            note=f"a batch: {many:.0f} µs in 1,000 runs, {one:.0f} µs in one",
        )
    ]


# --- open ---


def bench_open(*, quick: bool) -> list[Result]:
    directory = _scratch()
    batch = Batch.from_messages(_messages())
    total = (256 if quick else 2048) * 2**20
    count = int(total * 1.06) // len(batch.pack())  # the last segment is half full
    settings = Settings()
    if quick:  # the same number of segments as the full journal has
        rotate = msgspec.structs.replace(_default_rotate(), bytes_max=32 * 2**20)
        policies = _policies(rotate)
    else:
        policies = Policies(())

    async def open_log() -> tuple[DiskLog, ThreadWorkers, _CountingDisk]:
        workers, disk = ThreadWorkers(2), _CountingDisk()
        log = await DiskLog.open(
            str(directory),
            settings=settings,
            policies=policies,
            disk=disk,
            clock=SystemClock(),
            workers=workers,
        )
        return log, workers, disk

    async def fill() -> None:
        log, workers, _ = await open_log()
        await _append_all(log, batch, count)
        await log.close()
        workers.close()

    async def measure_open() -> tuple[float, int]:
        begin = time.perf_counter()
        log, workers, disk = await open_log()
        seconds = time.perf_counter() - begin
        await log.close()
        workers.close()
        return seconds, disk.read_bytes

    def read_all() -> float:
        def work() -> None:
            for path in sorted((directory / "journals").rglob("*.segment")):
                file = os.open(path, os.O_RDONLY)
                position = 0
                while data := os.pread(file, SCAN_BYTES, position):
                    position += len(data)
                os.close(file)

        return seconds_of(work)

    try:
        _run(fill())
        opened, reading = interleaved(
            [lambda: _run(measure_open())[0], read_all], 3 if quick else 5
        )
        # As a crash would leave it: the catalogue's closing record is gone, and so is the last index.
        newest = max((directory / "catalogue").iterdir())
        newest.write_bytes(newest.read_bytes()[:-8])
        max((directory / "journals").rglob("*.index")).unlink()
        crashed, crashed_bytes = _run(measure_open())
        last_bytes = max((directory / "journals").rglob("*.segment")).stat().st_size
    finally:
        shutil.rmtree(directory)
    return [
        Result(
            f"open a clean journal of {total // 2**20} MiB",
            opened,
            "s",
            reading,
            0.1,
            is_at_most=True,
        ),
        Result("recovery after a crash", crashed, "s"),
        Result(
            "bytes read by recovery, against the last segment",
            crashed_bytes,
            "bytes",
            last_bytes,
            2,
            is_at_most=True,
            note="all of it, and its last group once more to store it again",
        ),
    ]


def _default_rotate() -> Any:
    from runnel.config import Rotate

    return Rotate()


def _policies(rotate: Any) -> Policies:
    from runnel.config import TopicRule

    return Policies((TopicRule(match="*", journal="bench", rotate=rotate),))


class _CountingDisk(RealDisk):
    """A real disk that counts what is read through it."""

    read_bytes = 0

    def open(self, path: str, access: Any) -> Any:
        file = super().open(path, access)
        disk = self
        plain, nowait = file.read, file.read_nowait

        def read(position: int, size: int) -> bytes:
            data = plain(position, size)
            disk.read_bytes += len(data)
            return data

        def read_nowait(position: int, size: int) -> Any:
            data = nowait(position, size)
            disk.read_bytes += len(data) if data is not None else 0
            return data

        return _CountedFile(file, read, read_nowait)


class _CountedFile:
    def __init__(self, file: Any, read: Any, read_nowait: Any) -> None:
        self._file = file
        self.read = read
        self.read_nowait = read_nowait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# --- topics, fetch, saturated ---


def bench_topics(*, quick: bool) -> list[Result]:
    topics = 50_000 if quick else 100_000
    directory = _scratch()
    names = [f"fleet/vehicle-{number:06d}/position" for number in range(topics)]
    batches = [
        Batch.from_messages([Message(name, b"x" * 16) for name in names[begin : begin + 1000]])
        for begin in range(0, topics, 1000)
    ]

    async def work() -> float:
        async with _open_log(directory) as log:
            await log.append(Batch.from_messages([Message("first", b"")]))
            gc.collect()
            before = psutil.Process().memory_info().rss
            for batch in batches:
                await log.append(batch)
            gc.collect()
            return (psutil.Process().memory_info().rss - before) / topics

    try:
        return [
            Result(
                f"memory of an idle topic, {topics:,} of them",
                _run(work()),
                "bytes",
                target=2048,
                is_at_most=True,
            )
        ]
    finally:
        shutil.rmtree(directory)


def bench_fetch(*, quick: bool) -> list[Result]:
    """Topics in batches of 100 runs; fetching one topic needs the batches that hold its runs, no others."""
    topics, rounds = 10_000, 2 if quick else 10
    directory = _scratch()
    names = [f"fleet/{number:05d}" for number in range(topics)]
    batches = [
        Batch.from_messages(
            [Message(name, bytes(PAYLOAD_BYTES)) for name in names[begin : begin + 100]]
        )
        for begin in range(0, topics, 100)
    ]
    block_bytes = len(batches[0].pack())

    async def work() -> tuple[float, float, float]:
        workers, disk = ThreadWorkers(2), _CountingDisk()
        log = await DiskLog.open(
            str(directory),
            settings=Settings(),
            policies=Policies(()),
            disk=disk,
            clock=SystemClock(),
            workers=workers,
        )
        for _ in range(rounds):
            await asyncio.gather(*[log.append(batch) for batch in batches])
        chance = random.Random(1)
        disk.read_bytes = 0
        fetched = 200
        begin = time.perf_counter()
        for _ in range(fetched):
            page = await log.read(chance.choice(names), 0, 1)
            assert page.next_offset == rounds + 1
        seconds = time.perf_counter() - begin
        read_bytes = disk.read_bytes / fetched
        await log.close()
        workers.close()
        wanted = rounds * PAYLOAD_BYTES
        return read_bytes / (rounds * block_bytes), read_bytes / wanted, seconds / fetched * 1e6

    try:
        amplification, against_payload, microseconds = _run(work())
    finally:
        shutil.rmtree(directory)
    return [
        Result(
            "bytes read, against the blocks that hold the topic",
            amplification,
            "times",
            target=1.5,
            is_at_most=True,
        ),
        Result(
            "bytes read, against the payloads wanted",
            against_payload,
            "times",
            note="100 topics share a batch",
        ),
        Result(
            "fetch one of 10,000 topics",
            microseconds,
            "µs",
            note=f"{rounds} messages, in {rounds} batches",
        ),
    ]


def bench_saturated(*, quick: bool) -> list[Result]:
    """Acknowledgements of small stored batches while callbacks of 0.3 ms follow each other without a rest."""
    directory = _scratch()
    batch = Batch.from_messages(_messages(count=10))
    count = 200 if quick else 1000

    async def work(*, busy: bool) -> list[float]:
        loop = asyncio.get_running_loop()
        running = busy

        def burn() -> None:
            end = time.perf_counter() + 0.0003
            while time.perf_counter() < end:
                pass
            if running:
                loop.call_soon(burn)

        taken = []
        async with _open_log(directory) as log:
            await log.append(batch)
            if busy:
                loop.call_soon(burn)
            for _ in range(count):
                begin = time.perf_counter()
                await log.append(batch)
                taken.append((time.perf_counter() - begin) * 1e3)
            running = False
        return sorted(taken)

    try:
        idle, busy = _run(work(busy=False)), _run(work(busy=True))
    finally:
        shutil.rmtree(directory)
    return [
        Result("stored acknowledgement, idle loop, p50", idle[len(idle) // 2], "ms"),
        Result("stored acknowledgement, idle loop, p99", idle[int(len(idle) * 0.99)], "ms"),
        Result("stored acknowledgement, saturated loop, p50", busy[len(busy) // 2], "ms"),
        Result("stored acknowledgement, saturated loop, p99", busy[int(len(busy) * 0.99)], "ms"),
    ]


PARTS = (
    ("append", bench_append),
    ("shards", bench_shards),
    ("read", bench_read),
    ("objects", bench_objects),
    ("runs", bench_runs),
    ("open", bench_open),
    ("topics", bench_topics),
    ("fetch", bench_fetch),
    ("saturated", bench_saturated),
)
