"""Deliberate mistakes in the broker, which histories must find."""

from __future__ import annotations

from typing import Final

import pytest

from runnel.broker import fetcher
from runnel.broker.fetcher import Fetcher
from runnel.broker.live import start_positions, subscription
from runnel.broker.live.feeds import LastValuesFeed, PartitionsFeed, ShardFeed
from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.live.subscriptions import LiveSubscriptions
from runnel.broker.message_batcher import Publish, ShardBatcher
from runnel.broker.stores import Stores
from runnel.errors import MovedError, RunnelError
from runnel.formats.batch import Batch
from runnel.log.log import Level, OwnedShard, ShardId
from tests.simulation.mutants import Mutant


def reader_is_called_live_too_early(patch: pytest.MonkeyPatch) -> None:
    """After one page of a shard, whatever came meanwhile."""
    patch.setattr(ShardFeed, "_is_at_end", lambda self: True)


def places_are_not_moved_on(patch: pytest.MonkeyPatch) -> None:
    """A reader that falls behind begins again with what it was sent live."""
    patch.setattr(LiveSubscription, "advance_places", lambda self, envelope: None)


def pattern_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """A feed sends all topics of a shard."""
    patch.setattr(LiveSubscription, "matches", lambda self, topic: True)


def topics_made_while_a_reader_begins_are_overlooked(patch: pytest.MonkeyPatch) -> None:
    def ends_now(stores: Stores) -> dict[ShardId, int]:
        return {shard.id: shard.entries().next_offset for _, shard in stores.shards()}

    begin_positions = start_positions.begin_positions
    patch.setattr(
        start_positions,
        "begin_positions",
        lambda stores, start, matching, at_time, ends, *chosen: begin_positions(
            stores, start, matching, at_time, ends_now(stores), *chosen
        ),
    )


def one_partition_of_a_shard_is_read(patch: pytest.MonkeyPatch) -> None:
    keys = PartitionsFeed._keys
    patch.setattr(PartitionsFeed, "_keys", lambda self, subscription: keys(self, subscription)[:1])


def dropped_messages_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(subscription, "_count_missed", lambda missed, envelope: None)


def last_values_are_repeated(patch: pytest.MonkeyPatch) -> None:
    """What came while last values were looked up is taken for one of them."""

    def newest(
        self: LastValuesFeed, subscription: object, shard: OwnedShard, key: tuple[str, int]
    ) -> int:
        return shard.next_offset(*key) - 1

    patch.setattr(LastValuesFeed, "_last_before", newest)


def last_values_end_with_the_connection(patch: pytest.MonkeyPatch) -> None:
    """A reader that lost its connection among last values continues without the rest of them."""
    patch.setattr(start_positions, "WITH_LAST", ("last",))


def page_is_cut_short(patch: pytest.MonkeyPatch) -> None:
    """A fetch leaves out its last message, and the next fetch begins behind it."""
    patch.setattr(
        fetcher, "_first", lambda batches, messages_max: [batch.slice(0, 1) for batch in batches]
    )


# --- Shards that go and come ---


def readers_survive_the_loss_of_their_shard(patch: pytest.MonkeyPatch) -> None:
    """They continue with what they knew of it."""
    patch.setattr(LiveSubscriptions, "on_shard_released", lambda self, shard: None)


def readers_begin_without_shards_that_are_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stores, "check_all_here", lambda self: None)
    patch.setattr(Stores, "check_here", lambda self, topics: None)


def gathered_messages_are_published_after_they_were_refused(patch: pytest.MonkeyPatch) -> None:
    """Their publishers are told that they are refused, and they are stored once the shard is back."""
    kept: list[tuple[Publish, Batch]] = []
    flush = ShardBatcher.flush

    def stubborn(batcher: ShardBatcher) -> None:
        messages, waiting = batcher._messages, batcher._waiting
        flush(batcher)
        again, kept[:] = list(kept), []
        if waiting and waiting[0].done() and isinstance(waiting[0].exception(), MovedError):
            kept.append((batcher._publish, Batch.from_messages(messages)))
        for publish, batch in again:
            try:
                publish(batch, Level.NONE)
            except RunnelError:
                kept.append((publish, batch))

    patch.setattr(ShardBatcher, "flush", stubborn)


def waiting_fetches_are_not_woken(patch: pytest.MonkeyPatch) -> None:
    """When their shard goes."""
    patch.setattr(Fetcher, "on_shard_released", lambda self, shard: None)


MUTANTS: Final[tuple[Mutant, ...]] = (
    reader_is_called_live_too_early,
    places_are_not_moved_on,
    pattern_is_not_looked_at,
    topics_made_while_a_reader_begins_are_overlooked,
    one_partition_of_a_shard_is_read,
    dropped_messages_are_not_counted,
    last_values_are_repeated,
    last_values_end_with_the_connection,
    page_is_cut_short,
    readers_survive_the_loss_of_their_shard,
    readers_begin_without_shards_that_are_away,
    gathered_messages_are_published_after_they_were_refused,
    waiting_fetches_are_not_woken,
)

# Seeds that show mutants which are rare.
SHOWN_BY: Final[dict[Mutant, int]] = {
    places_are_not_moved_on: 41,
    topics_made_while_a_reader_begins_are_overlooked: 203,
    dropped_messages_are_not_counted: 92,
    last_values_are_repeated: 80,
}
