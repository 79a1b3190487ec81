"""Copies last messages to the catalogue of their shard before retention removes their segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

from runnel.config import LogSettings
from runnel.formats.single_messages import singles
from runnel.log.disk.shard import DiskShard
from runnel.log.log import Chosen
from runnel.log.metadata.last_values import fits
from runnel.log.metadata.records import LastValue
from runnel.log.metadata.topic_table import Partition
from runnel.platform.workers import Workers


class LastValueKeeper:
    """Keeps the last messages of topics with `last_value`. A message that is too large is removed like the others."""

    def __init__(
        self, keeps: Callable[[Partition], bool], workers: Workers, settings: LogSettings
    ) -> None:
        self._keeps = keeps
        self._workers = workers
        self._settings = settings

    async def take_over(self, shard: DiskShard, partitions: Sequence[Partition]) -> None:
        """Keep the last messages of these partitions of a shard: retention is about to remove their segment."""
        wanted = {
            partition.key: partition.visible_next - 1
            for partition in partitions
            if self._keeps(partition)
        }
        if not wanted:
            return
        lasting = {partition.key: partition for partition in partitions}
        kept: list[LastValue] = []
        async with aclosing(shard.messages_at(wanted, lasting, lambda *_: None)) as found:
            async for chosen in found:
                kept += await self._workers.submit(self._records_of, chosen)

        def apply() -> None:
            for value in kept:
                shard.last_values.put((value.topic, value.partition), value.block)

        if kept:
            await shard.catalogue.add(*kept, apply=apply)

    def _records_of(self, chosen: Sequence[Chosen]) -> list[LastValue]:
        """One record per message. Runs in a worker: a batch may hold the last messages of many partitions."""
        return [
            LastValue(run.topic, run.partition, message.pack())
            for each in chosen
            for message in singles(each.taken())
            if fits(message, self._settings)
            for run in message.runs()
        ]
