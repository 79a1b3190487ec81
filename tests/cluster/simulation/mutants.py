"""Deliberate mistakes in nodes, ownership and hand-over, which histories must find."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import msgspec
import pytest

from runnel.broker.consumer_groups.ack_journals import ShardAckJournal
from runnel.broker.consumer_groups.consumer_group import ConsumerGroup
from runnel.broker.live_shards import LiveShards
from runnel.cluster import ownership_rows
from runnel.cluster.node import ClusterNode
from runnel.cluster.ownership import Ownership, ShardPhase
from runnel.errors import RunnelError
from runnel.log.disk.disk_log import DiskLog
from runnel.log.disk.owned_shards import OwnedShards
from runnel.log.disk.shard import DiskShard
from runnel.log.log import ShardId
from runnel.log.memory import MemoryLog
from runnel.log.shard_view import moved
from tests.simulation.mutants import Mutant


class _NoLock:
    def release(self) -> None:
        """There is none."""


def term_begins_without_a_higher_epoch(patch: pytest.MonkeyPatch) -> None:
    """It has the epoch of the term before it, and the rows do not look."""
    make, begin = DiskLog._make_shard, ownership_rows.begin_term

    def made(self: DiskLog, found: Any, above: int = 0) -> DiskShard:
        shard = make(self, found, 0)
        epoch = max(1, found.recorded.epoch)
        return self._factory.shard(found.id, found.catalogue, epoch) if above else shard

    def begun(row: Any, *args: Any, **named: Any) -> Any:
        return begin(msgspec.structs.replace(row, epoch=0), *args, **named)

    patch.setattr(DiskLog, "_make_shard", made)
    patch.setattr(ownership_rows, "begin_term", begun)


def shard_is_served_before_its_lock_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnedShards, "_lock", lambda self, shard_id: _NoLock())


def term_in_memory_is_served_before_it_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """The record comes later, and its refusal is not heard."""

    async def begin(
        self: ClusterNode, shard: ShardId, epoch: int, next_entry: int, *, has_lock: bool
    ) -> None:
        self._tasks.start(_quietly(self, shard, epoch, next_entry, has_lock=has_lock))

    async def _quietly(
        self: ClusterNode, shard: ShardId, epoch: int, next_entry: int, *, has_lock: bool
    ) -> None:
        with suppress(RunnelError):
            await self.state.begin_term(shard, epoch, next_entry, has_lock=has_lock)

    patch.setattr(ClusterNode, "begin", begin)


def shard_is_released_without_what_is_queued(patch: pytest.MonkeyPatch) -> None:
    async def release(self: OwnedShards, shard_id: ShardId) -> None:
        shard = self.shards.get(shard_id)
        if shard is not None:
            await self._factory.listener.before_release(self.view(shard_id))
            next_entry = shard.entries().next_offset
            shard.drop(moved(shard_id))
            if self._end_term(shard):
                await self._let_go(shard, next_entry)

    patch.setattr(OwnedShards, "_release", release)


def acks_are_answered_before_they_are_stored(patch: pytest.MonkeyPatch) -> None:
    def wait_stored(self: ShardAckJournal) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    patch.setattr(ShardAckJournal, "wait_stored", wait_stored)
    patch.setattr(ConsumerGroup, "lose_acks", lambda self, journal, error: None)


def shard_is_taken_from_a_living_owner(patch: pytest.MonkeyPatch) -> None:
    """The node that is wished for does not wait, and the row lets it."""
    begin = ownership_rows.begin_term

    def should_take(self: Ownership, shard: ShardId) -> bool:
        return self.heir(shard) == self._name

    def begun(*args: Any, has_lock: bool) -> Any:
        return begin(*args, has_lock=True)

    patch.setattr(Ownership, "_should_take", should_take)
    patch.setattr(ownership_rows, "begin_term", begun)


def stale_node_goes_on_after_its_end(patch: pytest.MonkeyPatch) -> None:
    """It has given up the shard in memory, told everybody, and takes messages for it all the same."""
    end = MemoryLog._end_term

    def ended(self: MemoryLog, shard: ShardId, view: Any) -> None:
        kept = self._shards[shard]
        end(self, shard, view)
        self._shards[shard] = kept

    patch.setattr(MemoryLog, "_end_term", ended)


def ephemeral_topics_are_published_at_any_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveShards, "has", lambda self, shard: True)
    patch.setattr(LiveShards, "drop", _drop_silently)


async def _drop_silently(self: LiveShards, shard: ShardId) -> None:
    """The topics stay."""


def plan_is_carried_out_twice(patch: pytest.MonkeyPatch) -> None:
    """A wish stays when it is fulfilled, so the shard comes back whenever it goes."""
    begin = ownership_rows.begin_term

    def begun(row: Any, *args: Any, **named: Any) -> Any:
        return msgspec.structs.replace(begin(row, *args, **named), wanted=row.wanted)

    patch.setattr(ownership_rows, "begin_term", begun)


def term_whose_end_was_not_recorded_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The row names a node that does not serve the shard, and nobody takes it."""

    def should_take(self: Ownership, shard: ShardId) -> bool:
        row = self.view.owners.get(shard)
        if row is not None and row.owner == self._name and self.view.is_served(shard):
            return False
        return not self.owner(shard) and self.heir(shard) == self._name

    patch.setattr(Ownership, "_should_take", should_take)


def refused_shard_is_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    def refused(self: Ownership, shard: ShardId, now_ns: int) -> None:
        self._shards[shard].phase = ShardPhase.FREE
        self._shards[shard].retry_at_ns = 2**62

    patch.setattr(Ownership, "refused", refused)


def draining_node_keeps_its_shards(patch: pytest.MonkeyPatch) -> None:
    """It gives none up, and leaves with them."""

    def stopping(self: Ownership) -> None:
        for shard in self._shards.values():
            shard.phase = ShardPhase.FREE

    patch.setattr(Ownership, "stopping", stopping)


MUTANTS: Final[tuple[Mutant, ...]] = (
    term_begins_without_a_higher_epoch,
    shard_is_served_before_its_lock_is_there,
    term_in_memory_is_served_before_it_is_recorded,
    shard_is_released_without_what_is_queued,
    acks_are_answered_before_they_are_stored,
    shard_is_taken_from_a_living_owner,
    stale_node_goes_on_after_its_end,
    ephemeral_topics_are_published_at_any_node,
    plan_is_carried_out_twice,
    term_whose_end_was_not_recorded_is_forgotten,
    refused_shard_is_not_tried_again,
    draining_node_keeps_its_shards,
)

# Seeds that show mutants which are rare.
SHOWN_BY: Final[dict[Mutant, int]] = {acks_are_answered_before_they_are_stored: 106}
