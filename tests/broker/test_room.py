"""Waiting for room concerns the shard that a batch goes to."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from runnel.broker.broker import Broker
from runnel.config import LogSettings, Settings, TopicRule
from runnel.errors import BusyError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.workers import SimulatedWorkers

SETTINGS = Settings(
    topics=(TopicRule(match="*", partitions=4, journal="main"),),
    log=LogSettings(
        allocate_bytes=0, disk_reserve_bytes=0, write_queue_batches_max=1, journal_shards=4
    ),
)


def batch(partition: int) -> Batch:
    return Batch.from_messages([Message("a", b"x", partition=partition)])


def test_publisher_waits_for_the_shard_of_its_partition_and_for_no_other() -> None:
    async def scenario() -> None:
        broker = await Broker.open(
            SETTINGS,
            directory="data",
            disk=FakeDisk(1),
            clock=VirtualClock(),
            workers=SimulatedWorkers(Random(1)),
        )
        try:
            (route,) = broker.routes(["a"])
            here = 0
            there = next(
                number
                for number, owner in enumerate(route.owners)
                if owner.shard != route.owners[here].shard
            )
            await broker.publish(batch(here))
            stored = broker.publish(batch(there))
            with pytest.raises(BusyError):
                broker.publish(batch(there))
            waits = [
                asyncio.ensure_future(broker.wait_room("a", partition))
                for partition in (here, there, None)
            ]
            await asyncio.sleep(0)
            assert [wait.done() for wait in waits] == [True, False, False]
            await broker.publish(batch(here))  # there is room
            await stored
            await asyncio.gather(*waits)
            await broker.publish(batch(there))
        finally:
            await broker.close()

    asyncio.run(scenario())
