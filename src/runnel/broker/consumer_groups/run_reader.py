"""Reads a page of a partition for consumers: its runs, and the offsets that will never come."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runnel.broker.consumer_groups.run_cache import StoredRun
from runnel.errors import OffsetGoneError
from runnel.formats.envelope import Codec
from runnel.log.log import FoundBatch, MessageLog
from runnel.platform.workers import Workers
from runnel.topics.names import TopicPartition


class Missing(msgspec.Struct, frozen=True):
    """Offsets that will never be read, because of a hole, damage or retention."""

    begin: int
    end: int
    reason: str  # as in a gap; "" for a hole that deletion left, which is no loss


class RunsRead(msgspec.Struct, frozen=True):
    """A page of a partition."""

    runs: Sequence[StoredRun]
    missing: Sequence[Missing]


async def read_runs(
    log: MessageLog, key: TopicPartition, offset: int, bytes_max: int, workers: Workers
) -> RunsRead:
    """Read the partition's runs from an offset on. Raises UnknownTopicError if the topic is gone."""
    try:
        page = await log.read(*key, offset, bytes_max=bytes_max)
    except OffsetGoneError as gone:
        return RunsRead((), [Missing(offset, gone.first_offset, "retention")])
    runs: list[StoredRun] = []
    for found in page.found:
        runs += await _runs_of(found, workers)
    missing = [Missing(gap.first_offset, gap.next_offset, "damage") for gap in page.gaps]
    present = sorted(
        [(run.base, run.end) for run in runs] + [(gap.begin, gap.end) for gap in missing]
    )
    missing += _holes(offset, page.next_offset, present)
    return RunsRead(runs, missing)


def _holes(begin: int, end: int, present: Sequence[tuple[int, int]]) -> list[Missing]:
    """The ranges between two offsets that `present`, in order, leaves out."""
    holes = []
    for first, behind in present:
        if first > begin:
            holes.append(Missing(begin, first, ""))
        begin = max(begin, behind)
    if begin < end:
        holes.append(Missing(begin, end, ""))
    return holes


async def _runs_of(found: FoundBatch, workers: Workers) -> Sequence[StoredRun]:
    if found.batch.envelope.codec == Codec.NONE:
        return _cut(found)
    return await workers.submit(_cut, found)


def _cut(found: FoundBatch) -> Sequence[StoredRun]:
    """Each run as a batch of its own. A compressed batch is unpacked: rows will be picked from it."""
    batch = found.wanted()
    head = batch.envelope
    if head.run_count == 1:
        packed = (found.block,) if batch is found.batch else None
        if head.codec != Codec.NONE:
            batch = batch.uncompressed()
        base = int.from_bytes(head.base_offsets, "little")
        return [StoredRun(batch, base, head.message_count, packed)]
    if head.codec != Codec.NONE:
        batch = batch.uncompressed()
    return [
        StoredRun(batch, run.base_offset, run.count, run=number)
        for number, run in enumerate(batch.runs())
    ]
