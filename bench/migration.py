"""How long the first start on a directory of format 1 takes, against an ordinary start on the same directory.

    python -m bench.migration --topics 1000000

The directory has one journal, with one message in each topic. It is written in the present format and then turned into
one of format 1, as an earlier Runnel would have left it. Each start is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from runnel.config import LimitSettings, Settings
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.disk.disk_log import DiskLog
from runnel.log.metadata.catalogue import read_catalogue, read_metadata
from runnel.log.metadata.records import Closed, Opened, Record
from runnel.log.segments import paths
from runnel.log.segments.records import RecordFile
from runnel.platform.clock import SystemClock
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.topics.policies import Policies

_RUNS = 10_000  # of a batch
_RECORDS = 10_000  # written together


async def _open(directory: str, topics: int) -> tuple[DiskLog, ThreadWorkers]:
    workers = ThreadWorkers(2)
    log = await DiskLog.open(
        directory,
        settings=Settings(limits=LimitSettings(topics_max=topics)),
        policies=Policies(()),
        disk=RealDisk(),
        clock=SystemClock(),
        workers=workers,
    )
    return log, workers


async def _fill(directory: str, topics: int) -> None:
    log, workers = await _open(directory, topics)
    for first in range(0, topics, _RUNS):
        names = [f"plant/{n % 100}/sensor/{n}" for n in range(first, min(first + _RUNS, topics))]
        await log.append(Batch.from_messages([Message(name, b"21.5") for name in names]))
    await log.close()
    workers.close()


def _former_records(directory: str) -> Iterator[Record]:
    disk = RealDisk()
    shard = paths.shard_folder(directory, "main", 0)
    yield Opened(1, 0)
    for record in chain(
        read_metadata(disk, directory).records, read_catalogue(disk, shard).records
    ):
        if not isinstance(record, Opened | Closed):
            yield record
    yield Closed(1)


def _make_former(directory: str) -> None:
    """Turn the directory into one of format 1. Without synced marks, as before there were any."""
    records = list(_former_records(directory))
    Path(directory, paths.CATALOGUE).mkdir()
    file = RecordFile.create(RealDisk(), f"{directory}/{paths.CATALOGUE}/{1:020d}")
    for begin in range(0, len(records), _RECORDS):
        file.append(msgspec.msgpack.encode(records[begin : begin + _RECORDS]))
    file.close()
    folder = Path(paths.catalogue_folder(paths.shard_folder(directory, "main", 0)))
    for gone in (Path(directory, paths.METADATA), folder):
        for path in gone.iterdir():
            path.unlink()
        gone.rmdir()
    Path(directory, paths.MARKS_FILE).unlink()
    Path(directory, paths.FORMAT_FILE).write_text('{"format":1}')


async def _start(directory: str, topics: int) -> float:
    begun = time.perf_counter()
    log, workers = await _open(directory, topics)
    took = time.perf_counter() - begun
    found, damage = log.statistics().topics, log.recovered.damage
    await log.close()
    workers.close()
    assert found == topics, f"{found} topics"
    assert not damage, damage
    return took


def _measured(directory: str, topics: int) -> float:
    """One start, in a process of its own."""
    command = (sys.executable, "-m", "bench.migration", "--topics", str(topics), "--on", directory)
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=100_000)
    parser.add_argument("--on", metavar="DIRECTORY", help="only start on this directory")
    chosen = parser.parse_args()
    if chosen.on:
        print(asyncio.run(_start(chosen.on, chosen.topics)))
        return
    with tempfile.TemporaryDirectory() as made:
        directory = f"{made}/data"
        asyncio.run(_fill(directory, chosen.topics))
        _make_former(directory)
        first = _measured(directory, chosen.topics)
        later = [_measured(directory, chosen.topics) for _ in range(3)]
    ordinary = sorted(later)[1]
    print(
        f"{chosen.topics:,} topics: migrated and opened in {first:.1f} s, "
        f"{first / ordinary:.2f} times an ordinary start ({ordinary:.1f} s)"
    )


if __name__ == "__main__":
    main()
