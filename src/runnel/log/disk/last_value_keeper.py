"""Last messages taken over by the catalogue before retention removes the segments that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

from runnel.config import LogSettings
from runnel.log.disk.shard import DiskShard
from runnel.log.log import Chosen, ShardId
from runnel.log.metadata.catalogue import Catalogue, LastValue
from runnel.log.metadata.last_values import LastValues, fits, singles
from runnel.log.metadata.topic_table import Partition
from runnel.platform.workers import Workers


class LastValueKeeper:
    """For topics whose policy says `last_value`; a message that is too large for it goes with the others."""

    def __init__(
        self,
        keeps: Callable[[Partition], bool],
        last_values: LastValues,
        catalogue: Catalogue,
        shard: Callable[[ShardId], DiskShard],
        workers: Workers,
        settings: LogSettings,
    ) -> None:
        self._keeps = keeps
        self._last_values = last_values
        self._catalogue = catalogue
        self._shard = shard
        self._workers = workers
        self._settings = settings

    async def take_over(self, partitions: Sequence[Partition]) -> None:
        """Of one shard: their last messages are about to go with a segment."""
        wanted = {
            partition.key: partition.visible_next - 1
            for partition in partitions
            if self._keeps(partition)
        }
        if not wanted:
            return
        lasting = {partition.key: partition for partition in partitions}
        kept: list[LastValue] = []
        shard = self._shard(partitions[0].shard)
        async with aclosing(shard.messages_at(wanted, lasting, lambda *_: None)) as found:
            async for chosen in found:
                kept += await self._workers.submit(self._records_of, chosen)

        def apply() -> None:
            for value in kept:
                self._last_values.put((value.topic, value.partition), value.block)

        if kept:
            await self._catalogue.add(*kept, apply=apply)

    def _records_of(self, chosen: Sequence[Chosen]) -> list[LastValue]:
        """In a worker: a batch may have the last messages of many partitions, and each gets a block of its own."""
        return [
            LastValue(run.topic, run.partition, message.pack())
            for each in chosen
            for message in singles(each.taken())
            if fits(message, self._settings)
            for run in message.runs()
        ]
