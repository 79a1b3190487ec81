"""What all heads of the native protocol have in common, and the places that several of them name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Time: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Head(msgspec.Struct, array_like=True, frozen=True, gc=False, tag_field="head"):
    """What all heads have in common: nothing but their form."""


class PartitionPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message number in a partition: the next one to read."""

    topic: str
    partition: Natural
    offset: Natural
    epoch: Natural = 0


class ShardPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A place in a shard's order: the next entry to read, and the row in it."""

    journal: str
    shard: Natural
    epoch: Natural
    entry: Natural
    row: Natural = 0


class Start(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a subscription begins: `kind` is latest, last, earliest, offsets, time, resume or resume_last.

    `offsets` needs `partitions`; `time` needs `time_ns`; `resume` goes on from the places that a subscription
    was told when it began and moved on by its deliveries, `resume_last` after last values that had not all come.
    """

    kind: str
    partitions: Sequence[PartitionPlace] = ()
    time_ns: Time = 0
    shards: Sequence[ShardPlace] = ()
