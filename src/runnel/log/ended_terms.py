"""`EndedTerms`: the counters of shards that a log serves no more, so that its totals never fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from runnel.log.values import ShardId, ShardStatistics

_SUMMED: Final = (
    "entries",
    "messages",
    "bytes",
    "syncs",
    "sync_time_ns",
    "failed_batches",
    "unknown_outcomes",
)


class EndedTerms:
    """Sums of counters, for each journal. The sizes of a shard that has gone belong to its next owner."""

    def __init__(self) -> None:
        self._sums: dict[str, ShardStatistics] = {}

    def add(self, last: ShardStatistics) -> None:
        """A term has ended, with these statistics."""
        journal = last.shard.journal
        before = self._sums.get(journal)
        sums = {name: getattr(last, name) + getattr(before, name, 0) for name in _SUMMED}
        self._sums[journal] = msgspec.structs.replace(
            last,
            **sums,
            shard=ShardId(journal),
            sync_time_max_ns=max(last.sync_time_max_ns, getattr(before, "sync_time_max_ns", 0)),
            stored_bytes=0,
            segments=0,
            queued_batches=0,
            queued_bytes=0,
            is_read_only=False,
            producers=0,
        )

    def statistics(self) -> Sequence[ShardStatistics]:
        """The sums, one for each journal."""
        return list(self._sums.values())
