"""Finds single messages of many partitions of a shard together: each stored batch that holds some is read once.

A slow reader may take hours between two answers. Between answers the picker therefore holds numbers only: no file, no
index, no batch. It looks again for messages in segments that retention removed or rewrote meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Final

import msgspec

from runnel.errors import MalformedError
from runnel.formats.envelope import Envelope
from runnel.log.disk.reader import ShardReader, adjoining, found_at
from runnel.log.log import Chosen
from runnel.log.retention.rules import IsServed
from runnel.log.segments.index import RunPlace, StaleIndexError
from runnel.log.segments.segments import Segment
from runnel.topics.names import TopicPartition

# Looking up a topic-partition in an index file takes some ten microseconds. After this many the loop takes a turn.
_LOOKUPS_AT_ONCE: Final = 100
# Adjoining small batches are read together, up to this size.
_GROUP_BYTES_MAX: Final = 64 * 1024


class _Wanted(msgspec.Struct, frozen=True, gc=False):
    """A wanted message: its run in the block, and its row in the run."""

    key: TopicPartition
    run: int
    row: int
    next_offset: int  # behind the run


class _Block(msgspec.Struct, frozen=True):
    """A block with wanted messages."""

    position: int
    size: int
    entry: int
    time_ns: int
    wanted: Sequence[_Wanted]


class MessagePicker:
    """Finds messages by partition and offset. `left` has those not found yet, and at the end the missing ones."""

    def __init__(
        self,
        reader: ShardReader,
        segments: Sequence[Segment],
        wanted: Mapping[TopicPartition, int],
        served_now: Callable[[], IsServed],
    ) -> None:
        """`segments` is the shard's list, which may change between two awaits; `served_now` is called before a read."""
        self._reader = reader
        self._segments = segments
        self._served_now = served_now
        self.left = dict(wanted)
        self._looked_in: set[str] = set()  # paths: a rewritten segment has a new one

    async def pick(self) -> AsyncGenerator[Sequence[Chosen], None]:
        """Yield the batches that hold the messages, a few at a time. Damaged ones are reported and left out."""
        is_mended = False
        while self.left and (segment := self._next_segment()) is not None:
            self._looked_in.add(segment.path)
            try:
                for group in adjoining(await self._blocks_in(segment), _GROUP_BYTES_MAX):
                    # No variable: it would keep the batches in memory while the reader waits.
                    yield await self._read(segment, group)
            except FileNotFoundError:
                if segment in self._segments:
                    raise
            except StaleIndexError:
                if is_mended:
                    raise
                is_mended = True
                await self._reader.rebuild_index(segment)
                self._looked_in.discard(segment.path)

    def _next_segment(self) -> Segment | None:
        """Newest first: most wanted messages are last messages."""
        looked_in = self._looked_in
        return next((each for each in reversed(self._segments) if each.path not in looked_in), None)

    async def _blocks_in(self, segment: Segment) -> list[_Block]:
        """The blocks that hold wanted messages, in the order of the file."""
        index = await self._reader.index(segment)
        found: dict[int, list[_Wanted]] = {}
        for looked_up, (key, offset) in enumerate(list(self.left.items()), 1):
            if looked_up % _LOOKUPS_AT_ONCE == 0:
                await asyncio.sleep(0)
            place: RunPlace | None = next(index.runs_from(key, offset), None)
            if place is not None and place.base_offset <= offset:
                row, end = offset - place.base_offset, place.base_offset + place.count
                found.setdefault(place.block, []).append(_Wanted(key, place.run, row, end))
        blocks: list[_Block] = []
        for number, wanted in sorted(found.items()):
            entry, _, time_ns = index.block_place(number)
            begin, end = index.block_positions(number, number + 1)
            blocks.append(_Block(begin, end - begin, entry, time_ns, wanted))
        return blocks

    async def _read(self, segment: Segment, group: Sequence[_Block]) -> list[Chosen]:
        blocks = self._served(group)
        if not blocks:
            return []
        begin = blocks[0].position
        size = blocks[-1].position + blocks[-1].size - begin
        data = await self._reader.read_bytes(segment, begin, size)
        chosen: list[Chosen] = []
        for block in blocks:
            try:
                batch = found_at(data, block.position - begin, None).batch
            except MalformedError as error:
                self._reader.report_damage(segment, block, error)
                continue
            rows = _rows(batch.envelope, block)
            if rows is None:
                raise StaleIndexError(segment.path)
            chosen.append(Chosen(batch, rows))
            for item in block.wanted:
                self.left.pop(item.key, None)
        return chosen

    def _served(self, group: Sequence[_Block]) -> list[_Block]:
        is_served = self._served_now()
        blocks: list[_Block] = []
        for block in group:
            wanted = [
                item
                for item in block.wanted
                if is_served(item.key, item.next_offset, block.time_ns, block.entry)
            ]
            if wanted:
                blocks.append(msgspec.structs.replace(block, wanted=wanted))
        return blocks


def _rows(head: Envelope, block: _Block) -> list[int] | None:
    """The rows of the messages in their batch; None if it is not the batch that the index describes."""
    topics = head.topics
    if head.entry != block.entry or any(
        item.run >= len(topics) or topics[item.run] != item.key[0] for item in block.wanted
    ):
        return None
    starts = head.run_starts()
    return sorted(int(starts[item.run]) + item.row for item in block.wanted)
