"""Stored batches made without a log: numbered, packed, and written into segment files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runnel.formats import block
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.log.log import ShardId
from runnel.log.metadata.topic_table import Partition, number_runs
from runnel.log.segments import paths
from runnel.log.segments.files import OpenFiles
from runnel.log.segments.segment import SegmentHeader
from runnel.log.segments.segments import OpenedSegment, Segment, SegmentFolder
from runnel.platform.disk import FileAccess
from runnel.topics.names import TopicPartition
from tests.fakes.disk import FakeDisk

SHARD = ShardId("main")
FOLDER = "data/journals/main/0"


class Numbers:
    """The numbers that a shard gives."""

    def __init__(self, entry: int = 1, epoch: int = 1) -> None:
        self.partitions: dict[TopicPartition, Partition] = {}
        self.entry = entry
        self.epoch = epoch

    def partition(self, key: TopicPartition) -> Partition:
        return self.partitions.setdefault(key, Partition(key, SHARD))

    def store(self, batch: Batch, time_ns: int = 0) -> Batch:
        """The batch as it would be stored next."""
        head = batch.envelope
        keys = zip(head.topics, head.column32(head.partitions), strict=True)
        numbered = number_runs(
            head,
            [self.partition(key) for key in keys],
            shard=0,
            epoch=self.epoch,
            entry=self.entry,
            receive_time_ns=time_ns,
        )
        self.entry += 1
        return Batch(numbered, batch.body)


def keys_of(batch: Batch) -> list[TopicPartition]:
    head = batch.envelope
    return list(zip(head.topics, head.column32(head.partitions), strict=True))


def packed(batch: Batch, durable_position: int) -> bytes:
    parts = block.pack(
        envelopes.encode(batch.envelope), batch.body, durable_position=durable_position
    )
    return b"".join(parts)


def segment_bytes(batches: Iterable[Batch], *, number: int = 1, group: int = 1) -> bytes:
    """A segment file, its blocks synced in groups of so many."""
    batches = list(batches)
    first = batches[0].envelope.entry if batches else 1
    content = SegmentHeader(0, number, first, 0, 1, 0).encode()
    durable = len(content)
    for at, batch in enumerate(batches):
        if at % group == 0:
            durable = len(content)
        content += packed(batch, durable)
    return content


def write_segment(disk: FakeDisk, content: bytes, *, number: int = 1) -> str:
    disk.make_directory(FOLDER)
    path = paths.segment_path(FOLDER, number, 0)
    file = disk.open(path, FileAccess.CREATE)
    file.write(0, [content], sync=True)
    disk.sync_directory(FOLDER)
    return path


def open_segments(disk: FakeDisk) -> tuple[SegmentFolder, OpenFiles, Sequence[OpenedSegment]]:
    files = OpenFiles(disk, 64)
    folder = SegmentFolder(disk, files, FOLDER)
    return folder, files, folder.open_all()


def sealed_segment(disk: FakeDisk, batches: Iterable[Batch]) -> tuple[Segment, OpenFiles]:
    """One sealed segment with these batches."""
    write_segment(disk, segment_bytes(batches))
    folder, files, [opened] = open_segments(disk)
    folder.seal(opened.segment)
    opened.segment.growing = None
    return opened.segment, files
