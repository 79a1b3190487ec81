"""Data directories as plain dicts of files, to be cut, flipped and opened again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

import msgspec

from runnel.config import LogSettings, Retain, Rotate, Settings, TopicRule
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.disk.disk_log import DiskLog
from runnel.log.metadata.catalogue import read_catalogue, read_metadata
from runnel.log.metadata.records import Closed, Opened, Record, ShardRecord
from runnel.log.segments.records import RecordFile
from runnel.log.segments.synced_marks import SLOT_BYTES, Mark, decode_slot, encode_slot, read_marks
from runnel.platform.disk import FileAccess
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.names import Directory
from tests.fakes.workers import SimulatedWorkers

T = TypeVar("T")
Image = dict[str, bytes]

DIRECTORY = "data"


async def open_log(
    disk: FakeDisk,
    *,
    clock: VirtualClock | None = None,
    segment_bytes_max: int = 100_000,
    catalogue_log_bytes_max: int = 100_000,
    age_ns: int | None = None,
    last_value: bool = False,
) -> DiskLog:
    """A log with one journal, `all`, for every topic."""
    rule = TopicRule(
        match="*",
        journal="all",
        rotate=Rotate(bytes_max=segment_bytes_max, every_ns=None),
        retain=Retain(age_ns=age_ns),
        last_value=last_value,
    )
    return await DiskLog.open(
        DIRECTORY,
        settings=Settings(
            log=LogSettings(
                allocate_bytes=0,
                disk_reserve_bytes=0,
                catalogue_log_bytes_max=catalogue_log_bytes_max,
            )
        ),
        policies=Policies((rule,)),
        disk=disk,
        clock=clock or VirtualClock(),
        workers=SimulatedWorkers(Random(0), turns_max=0),
    )


def run(work: Callable[[DiskLog], Awaitable[T]], disk: FakeDisk) -> T:
    """Open the log, do this, and leave the log as a killed process would."""

    async def act() -> T:
        return await work(await open_log(disk))

    return asyncio.run(act())


def disk_of(image: Image) -> FakeDisk:
    """A disk with these files, all durable."""
    disk = FakeDisk(0, nowait_probability=1.0)
    for path, content in image.items():
        folder = path.rpartition("/")[0]
        disk.make_directory(folder)
        disk.open(path, FileAccess.CREATE).write(0, [content], sync=True)
        disk.sync_directory(folder)
    return disk


def image_of(disk: FakeDisk) -> Image:
    """All files of the data directory but the lock."""
    found: Image = {}
    waiting = [(DIRECTORY, disk._tree.directory(DIRECTORY))]
    while waiting:
        path, node = waiting.pop()
        for name, child in sorted(node.entries.items()):
            if isinstance(child, Directory):
                waiting.append((f"{path}/{name}", child))
            elif name != "lock":
                found[f"{path}/{name}"] = bytes(child.content)
    return found


def without_segment_marks(marks: bytes) -> bytes:
    """The file of synced marks as a power loss may leave it: nothing is known of the segments written to last."""
    slots = [marks[at : at + SLOT_BYTES] for at in range(0, len(marks), SLOT_BYTES)]
    return b"".join(
        bytes(SLOT_BYTES) if decode_slot(slot)[0].rpartition("/")[2].isdecimal() else slot
        for slot in slots
    )


def the_path(image: Image, part: str) -> str:
    """The one file whose path has this in it."""
    [path] = [path for path in image if part in path]
    return path


def flipped(content: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def batch(topic: str, *payloads: bytes, producer: str | None = None, number: int = 0) -> Batch:
    messages = [Message(topic, payload) for payload in payloads]
    return Batch.from_messages(messages, producer=producer, number=number)


async def payloads(log: DiskLog, topic: str) -> dict[int, bytes]:
    """What a reader of the topic gets, by offset."""
    found: dict[int, bytes] = {}
    offset = (await log.bounds(topic, 0)).first_offset
    end = (await log.bounds(topic, 0)).next_offset
    while offset < end:
        page = await log.read(topic, 0, offset)
        for one in page.found:
            found.update((m.offset, m.payload) for m in one.wanted().messages())
        offset = page.next_offset
    return found


def reports(log: DiskLog) -> Sequence[str]:
    """Everything that the log has said about damaged or torn files."""
    return [*log.recovered.torn, *log.recovered.damage, *log.statistics().damage]


def format_one(image: Image, *, has_marks: bool = True) -> Image:
    """The same directory as a Runnel of format 1 would have left it: with one catalogue, and one epoch."""
    disk = disk_of(image)
    metadata = read_metadata(disk, DIRECTORY).records
    of_shards: list[ShardRecord] = []
    for folder in sorted(
        {path.rpartition("/catalogue/")[0] for path in image if "/catalogue/" in path}
    ):
        of_shards += read_catalogue(disk, folder).records
    records: list[Record] = [Opened(9, 0, has_marks)]
    records += [each for each in (*metadata, *of_shards) if not isinstance(each, Opened | Closed)]
    if any(isinstance(each, Closed) for each in metadata[-1:]):
        records.append(Closed(9))
    path = f"{DIRECTORY}/catalogue/{1:020d}"
    disk.make_directory(f"{DIRECTORY}/catalogue")
    RecordFile.create(disk, path).append(msgspec.msgpack.encode(records))
    rest = {
        path: content
        for path, content in image_of(disk).items()
        if "/metadata/" not in path and not ("/catalogue/" in path and "/journals/" in path)
    }
    marks = read_marks(disk, DIRECTORY).marks
    slots = [("", Mark(0, 0)), ("catalogue", Mark(1, len(rest[path])))]
    slots += [
        each for each in marks.items() if each[0] != "metadata" and "/catalogue" not in each[0]
    ]
    rest[f"{DIRECTORY}/synced"] = b"".join(encode_slot(*slot) for slot in slots)
    former = msgspec.json.decode(rest[f"{DIRECTORY}/runnel.json"])
    rest[f"{DIRECTORY}/runnel.json"] = msgspec.json.encode({**former, "format": 1})
    return rest
