"""`GroupStore`: where the batches of a shard become durable. The seam between numbering and the medium.

A shard's writer (`disk/writer.py`) numbers batches, queues them, takes them in groups, and answers their publishers. A
group store makes one group durable, and says how that ended:

    stored    the group is durable, all of it
    failed    nothing of it is stored, nor ever will be: the writer takes its numbers back
    unknown   it is stored, or not, or will be: no publisher is told anything, the numbers stay, and the writer stores
              the same group again until it is stored

To be durable and to lie in the segment file are two steps. Readers find messages through the segment's index, so a
batch becomes visible when its bytes are in the file. The local store (`disk/group_writer.py`) does both in one write.
Where a commit elsewhere makes a group durable, the store answers `Stored(in_segment)` after the commit, and writes the
same bytes into the segment file, which is a cache then; meanwhile the next group may be committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from runnel.errors import RunnelError
from runnel.formats import block
from runnel.log.log import ShardId
from runnel.log.segments.segment import SegmentHeader
from runnel.log.segments.segments import Segment
from runnel.platform.disk import Buffer


class NumberedBatch(Protocol):
    """A batch with its numbers: its encoded envelope and its body."""

    encoded: bytes
    body: bytes | memoryview


class BatchGroup(msgspec.Struct, frozen=True, eq=False):
    """Batches with consecutive entry numbers, and their place in the shard's segments.

    It never changes, however often it is stored: numbers, bytes and order stay. The shard, the epoch and the first
    entry identify it.
    """

    shard: ShardId
    epoch: int
    first_entry: int
    next_entry: int
    batches: Sequence[NumberedBatch]
    size: int  # bytes of its blocks
    segment: Segment
    position: int  # of its first block in the segment file; everything before it is durable
    header: SegmentHeader | None  # of a segment that begins with this group, and has no file yet

    def blocks(self) -> list[Buffer]:
        """The bytes of the group as a segment file holds them. For a worker, because it computes checksums."""
        buffers: list[Buffer] = []
        for batch in self.batches:
            buffers += block.pack(batch.encoded, batch.body, durable_position=self.position)
        return buffers


class Stored(msgspec.Struct, frozen=True, eq=False):
    """The group is durable. `in_segment` is done when it lies in its segment file too; None: it does."""

    in_segment: asyncio.Future[None] | None = None


class Failed(msgspec.Struct, frozen=True, eq=False):
    """Nothing of the group is stored, and no earlier attempt at it can still be. `error` is for its publishers.

    If the medium `needs_reopening`, the shard takes no more batches until it has been reopened.
    """

    error: RunnelError
    needs_reopening: bool = False


class Unknown(msgspec.Struct, frozen=True, eq=False):
    """The group may be stored, now or later, for example because the answer to a commit was lost."""

    reason: str


Outcome: TypeAlias = Stored | Failed | Unknown
STORED: Final = Stored()


class GroupStore(Protocol):
    """Makes the groups of one shard durable. The writer gives it one group at a time, in the order of their entries."""

    def store(self, group: BatchGroup) -> asyncio.Future[Outcome]:
        """Begin to store the group at once, before anything is awaited. Never raises: every error is an outcome.

        After `unknown` the writer calls this again with the same group, and with no other before that one is stored. A
        group that turns out to be present is stored: it is not stored twice. The answer must come in bounded time: a
        medium that is silent for too long is `unknown`. A store that joins groups of several shards in one commit
        repeats the same commit, whichever shard asks first.

        After `unknown` the writer takes `failed` for `unknown`: an earlier attempt may still be stored.
        """
        ...

    def abandon(self) -> None:
        """The shard is lost: end what is under way as soon as possible. It may have been stored or not.

        Every future that this store has returned must be done soon, `in_segment` too. When they are done the store
        touches no file of the shard any more.
        """
        ...
