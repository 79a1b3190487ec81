"""Copies last messages to the catalogue before retention removes their segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

from runnel.config import LogSettings
from runnel.formats.single_messages import singles
from runnel.log.disk.shard import DiskShard
from runnel.log.log import Chosen, ShardId
from runnel.log.metadata.catalogue import Catalogue, LastValue
from runnel.log.metadata.last_values import LastValues, fits
from runnel.log.metadata.topic_table import Partition
from runnel.platform.workers import Workers


class LastValueKeeper:
    """Keeps the last messages of topics with `last_value`. A message that is too large is removed like the others."""

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
        """Keep the last messages of these partitions of one shard: retention is about to remove their segment."""
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
        """One record per message. Runs in a worker: a batch may hold the last messages of many partitions."""
        return [
            LastValue(run.topic, run.partition, message.pack())
            for each in chosen
            for message in singles(each.taken())
            if fits(message, self._settings)
            for run in message.runs()
        ]
