"""The results of the client's verbs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import msgspec

from runnel.formats.batch import Batch
from runnel.formats.cluster_heads import NodeReport, ShardReport
from runnel.formats.message import Message
from runnel.formats.wire import GapState

Gap: TypeAlias = GapState


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Where a message is stored, and the level of the broker's promise.

    Offset and epoch are 0 at level none, which has no answer. `receivers` is the number of subscriptions that got the
    message at once; only ephemeral topics have it.
    """

    topic: str
    partition: int
    offset: int
    epoch: int  # of the shard: raised each time its broker starts
    receive_time_ns: int
    level: str  # stored, received or none
    receivers: int | None = None


class BatchReceipt(msgspec.Struct, frozen=True):
    """The receipt of a whole batch: the offset of each run's first message."""

    base_offsets: Sequence[int]
    entry: int  # the batch's number in its shard
    epoch: int
    receive_time_ns: int
    level: str
    is_repeated: bool = False  # a named publisher's batch that had been stored before
    receivers: int | None = None


class ClusterStatus(msgspec.Struct, frozen=True):
    """The nodes of a cluster, and its shards. `version` rises with every change of either."""

    version: int
    nodes: Sequence[NodeReport]
    shards: Sequence[ShardReport]


class ShardPage(msgspec.Struct, frozen=True):
    """The result of `fetch_shard`. The next page begins at `next_entry`, even if nothing in this one matches."""

    batches: Sequence[Batch]
    epoch: int
    next_entry: int
    first_entry: int  # of the shard, now
    end_entry: int  # the shard's next entry, now
    gaps: Sequence[Gap] = ()

    def __len__(self) -> int:
        return sum(map(len, self.batches))


class Page:
    """The result of a fetch. `messages` are decoded on first use; the next fetch begins at `next_offset`.

    `batches` has them as they were stored. `first_offset` and `end_offset` are the partition's at this moment: its
    first message, and its next one. `gaps` lists the messages that are missing in between.
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
        """The messages of all batches, in order."""
        return [message for batch in self.batches for message in batch.messages()]

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def __repr__(self) -> str:
        gaps = f", {len(self.gaps)} gaps" if self.gaps else ""
        return (
            f"<Page {len(self)} messages, next offset {self.next_offset}, partition has "
            f"{self.first_offset} to {self.end_offset - 1}{gaps}>"
        )
