"""What the client's verbs return."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import msgspec

from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import GapState

Gap: TypeAlias = GapState


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Where a message is, and what the broker promised: the level that was reached.

    Offset and epoch are 0 at level none, which is not answered. `receivers` is how many subscriptions got it at
    once; only topics that are not kept say so.
    """

    topic: str
    partition: int
    offset: int
    epoch: int  # of the shard: raised each time that its broker starts
    receive_time_ns: int
    level: str  # stored, received or none
    receivers: int | None = None


class BatchReceipt(msgspec.Struct, frozen=True):
    """The same for a whole batch: the offset of each run's first message."""

    base_offsets: Sequence[int]
    entry: int  # the batch's number in its shard
    epoch: int
    receive_time_ns: int
    level: str
    is_repeated: bool = False  # a named publisher's batch that had been stored before
    receivers: int | None = None


class ShardPage(msgspec.Struct, frozen=True):
    """What `fetch_shard` found. There may be nothing that matches, and yet it goes on at `next_entry`."""

    batches: Sequence[Batch]
    epoch: int
    next_entry: int
    first_entry: int  # of the shard, now
    end_entry: int  # the shard's next entry, now
    gaps: Sequence[Gap] = ()

    def __len__(self) -> int:
        return sum(map(len, self.batches))


class Page:
    """What a fetch found. `messages` are made when they are first looked at; `next_offset` goes on from here.

    `batches` are the same as they were stored. `first_offset` and `end_offset` are the partition's, now: its first
    message, and its next one. `gaps` tells of what is missing in between.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        *,
        next_offset: int,
        first_offset: int,
        end_offset: int,
        gaps: Sequence[Gap] = (),
    ) -> None:
        self.batches = batches
        self.next_offset = next_offset
        self.first_offset = first_offset
        self.end_offset = end_offset
        self.gaps = gaps

    @cached_property
    def messages(self) -> list[Message]:
        """Those of all batches, in order."""
        return [message for batch in self.batches for message in batch.messages()]

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def __repr__(self) -> str:
        gaps = f", {len(self.gaps)} gaps" if self.gaps else ""
        return (
            f"<Page {len(self)} messages, next offset {self.next_offset}, partition has "
            f"{self.first_offset} to {self.end_offset - 1}{gaps}>"
        )
