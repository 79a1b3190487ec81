"""The base class of all heads of the native protocol, and the read positions that several heads contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Time: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Head(msgspec.Struct, array_like=True, frozen=True, gc=False, tag_field="head"):
    """The base class of all heads: an array whose first element names the head."""


class PartitionPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A read position in a partition: the next offset to read."""

    topic: str
    partition: Natural
    offset: Natural
    epoch: Natural = 0


class ShardPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A read position in a shard: the next entry to read, and the row in it."""

    journal: str
    shard: Natural
    epoch: Natural
    entry: Natural
    row: Natural = 0


class Start(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a subscription begins: `kind` is latest, last, earliest, offsets, time, resume or resume_last.

    `offsets` needs `partitions`; `time` needs `time_ns`. `resume` continues from the positions that `subscribed` gave,
    advanced by the deliveries since; `resume_last` does so if not all last values had come.
    """

    kind: str
    partitions: Sequence[PartitionPlace] = ()
    time_ns: Time = 0
    shards: Sequence[ShardPlace] = ()
