"""A stream's position in each shard, as the JSON that Spark keeps in a query's checkpoint.

    {"main/0": [3, 1042], "sensors/0": [3, 77, 120]}

The numbers are the shard's epoch and the next entry to read. The third, as long as it is larger than the second, is the
shard's next entry at the time when the query first saw the shard. Keys are sorted, because Spark compares offsets as
texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import msgspec

from runnel.errors import ClientFault

Offset: TypeAlias = dict[str, list[int]]


class StreamShard(msgspec.Struct, frozen=True, order=True):
    """A shard of a journal, as a key of the checkpoint."""

    journal: str
    shard: int

    def __str__(self) -> str:
        return f"{self.journal}/{self.shard}"


class ShardReadPosition(msgspec.Struct, frozen=True):
    """The next entry to read of a shard. Entries below `settled` existed before the query."""

    epoch: int
    entry: int
    settled: int = 0

    def moved(self, epoch: int, entry: int) -> ShardReadPosition:
        """The position at another entry of the shard. In a new epoch nothing is older than the query."""
        settled = self.settled if epoch == self.epoch and entry < self.settled else 0
        return ShardReadPosition(epoch, entry, settled)


Positions: TypeAlias = dict[StreamShard, ShardReadPosition]


def encode(places: Mapping[StreamShard, ShardReadPosition]) -> Offset:
    return {
        str(key): [
            place.epoch,
            place.entry,
            *([place.settled] if place.settled > place.entry else []),
        ]
        for key, place in sorted(places.items())
    }


def decode(offset: Mapping[str, Iterable[int]]) -> Positions:
    """Decode an offset. ClientFault if it is not of a stream from Runnel."""
    if not isinstance(offset, dict):
        raise _foreign(repr(offset))
    places: Positions = {}
    for text, numbers in offset.items():
        journal, slash, shard = text.rpartition("/")
        values = list(numbers) if isinstance(numbers, list) else []
        is_place = len(values) in (2, 3) and all(type(n) is int and n >= 0 for n in values)
        if not slash or not shard.isdecimal() or not is_place:
            raise _foreign(f"{text!r}: {numbers!r}")
        places[StreamShard(journal, int(shard))] = ShardReadPosition(*values)
    return places


def _foreign(what: str) -> ClientFault:
    return ClientFault(
        f"the checkpoint's offset {what} is not of a stream from Runnel; a query needs a checkpointLocation of its own"
    )
