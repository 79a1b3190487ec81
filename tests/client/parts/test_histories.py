"""Random histories of a subscription in parts: some seeds are fixed, some change every day."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

from runnel.client.consumer.credit_shares import CreditShares
from runnel.client.consumer.part_merge import Accepted, Attach, PartMerge
from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.formats import wire
from runnel.formats.batch import Batch
from tests.client.parts.world import Broken, World, run_history
from tests.simulation.seeds import Seeds

SEEDS = Seeds(fixed=300, daily=150, chunk=50)
# Each mutant has to show within so many histories.
SEEDS_FOR_A_MUTANT = range(1500)
Mutant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("seeds", SEEDS.chunks())
def test_reader_misses_nothing_and_gets_nothing_twice(seeds: range) -> None:
    for seed in seeds:
        run_history(seed)


def test_history_repeats_from_its_seed() -> None:
    for seed in range(5):
        assert run_history(seed) == run_history(seed)


# --- Mistakes that the histories must find ---


def detached_part_counts(patch: pytest.MonkeyPatch) -> None:
    def delivered(
        self: PartMerge, part: int, head: wire.Deliver, batches: list[Batch]
    ) -> Accepted | None:
        if not batches and not head.next_entry:
            self._end_last_values(part, (head.journal, head.shard))
            return None
        return Accepted((), self.position.delivered(head, batches))

    patch.setattr(PartMerge, "delivered", delivered)


def lower_epoch_wins(patch: pytest.MonkeyPatch) -> None:
    came = PartMerge.came

    def came_last(self: PartMerge, part: int, shards: Iterable[wire.ShardTerm]) -> list[Attach]:
        for term in shards:
            if (shard := self._shards.get((term.journal, term.shard))) is not None:
                shard.epoch = 0
        return came(self, part, shards)

    patch.setattr(PartMerge, "came", came_last)


def begun_with_the_first_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PartMerge,
        "is_covered",
        property(lambda self: any(part.has_answered for part in self._parts.values())),
    )


def begun_before_shards_are_named(patch: pytest.MonkeyPatch) -> None:
    open_part = PartMerge.open

    def answered_at_once(self: PartMerge, part: int, node: str) -> wire.Start:
        start = open_part(self, part, node)
        self._parts[part].has_answered = True
        return start

    patch.setattr(PartMerge, "open", answered_at_once)


def begun_without_the_shards_elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartMerge, "answered", lambda self, elsewhere: None)


def place_ahead_of_what_was_delivered(patch: pytest.MonkeyPatch) -> None:
    resume = SubscriptionPosition.resume

    def ahead(
        self: SubscriptionPosition, shards: Collection[tuple[str, int]], *, awaits_last: bool
    ) -> wire.Start:
        start = resume(self, shards, awaits_last=awaits_last)
        return wire.Start(
            start.kind,
            [wire.PartitionPlace(p.topic, p.partition, p.offset + 1) for p in start.partitions],
            0,
            [wire.ShardPlace(p.journal, p.shard, p.epoch, p.entry + 1) for p in start.shards],
        )

    patch.setattr(SubscriptionPosition, "resume", ahead)


def late_answer_moves_the_place(patch: pytest.MonkeyPatch) -> None:
    placed = PartMerge.placed

    def placed_always(self: PartMerge, attach: Attach, answer: wire.Subscribed) -> None:
        placed(self, attach, answer)
        self.position.begin(answer)

    patch.setattr(PartMerge, "placed", placed_always)


def new_shard_begins_at_its_end(patch: pytest.MonkeyPatch) -> None:
    attach = PartMerge._attach

    def without_begun(self: PartMerge, part: int, shards: list[wire.ShardTerm]) -> list[Attach]:
        has_begun, self.has_begun = self.has_begun, False
        try:
            return attach(self, part, shards)
        finally:
            self.has_begun = has_begun

    patch.setattr(PartMerge, "_attach", without_begun)


def gap_is_told_before_its_delivery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartMerge, "missed", lambda self, part, notice: (notice.gap,))


def lost_part_keeps_its_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartMerge, "lost", lambda self, part: self._parts.pop(part, None))


def repeated_last_values_are_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionPosition, "_is_new", lambda self, run: True)


def credit_of_what_is_dropped_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "drop", lambda self, number, size: None)


def credit_is_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    """Every part may owe the whole buffer."""
    patch.setattr(CreditShares, "_share_bytes", property(lambda self: self._buffer_bytes))
    patch.setattr(CreditShares, "_free_bytes", property(lambda self: self._buffer_bytes))


def part_of_a_new_node_starves(patch: pytest.MonkeyPatch) -> None:
    open_share = CreditShares.open

    def without_taking_back(self: CreditShares, part: int) -> tuple[int, dict[int, Any]]:
        first, less = open_share(self, part)
        return (0 if len(self._shares) > 1 else first), less

    patch.setattr(CreditShares, "open", without_taking_back)


MUTANTS: list[Mutant] = [
    detached_part_counts,
    lower_epoch_wins,
    begun_with_the_first_part,
    begun_before_shards_are_named,
    begun_without_the_shards_elsewhere,
    place_ahead_of_what_was_delivered,
    late_answer_moves_the_place,
    new_shard_begins_at_its_end,
    gap_is_told_before_its_delivery,
    lost_part_keeps_its_shards,
    repeated_last_values_are_told,
    credit_of_what_is_dropped_is_forgotten,
    credit_is_not_taken_back,
    part_of_a_new_node_starves,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mistake_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    for seed in SEEDS_FOR_A_MUTANT:
        try:
            run_history(seed)
        except Broken:
            return
    pytest.fail("no history broke a promise")
