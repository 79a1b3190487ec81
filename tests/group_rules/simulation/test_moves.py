"""Partitions move between owners, and no promise is broken; each rule that is broken on purpose is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.awaited_holders import AwaitedHolders
from runnel.group_rules.effects import Effects
from runnel.group_rules.group import Group
from runnel.group_rules.keyed_partition import KeyedPartition
from runnel.group_rules.leases import LeasedRange
from runnel.group_rules.shared_partition import SharedPartition
from runnel.topics.names import TopicPartition
from tests.group_rules.simulation.moves import MovesHistory, WrongMoveError
from tests.simulation.seeds import Seeds

SEEDS: Final = Seeds(fixed=300, daily=100, chunk=100)
# Each mistake has to show within so many histories.
_SEEDS_FOR_A_MISTAKE: Final = range(250)

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("seeds", SEEDS.chunks())
def test_moves_keep_every_promise_in_history(seeds: range) -> None:
    for seed in seeds:
        try:
            MovesHistory(seed).play()
        except Exception as error:
            error.add_note(f"repeat it with MovesHistory({seed}).play()")
            raise


# --- Mistakes ---


def delivers_before_the_wait_is_over(patch: Patch) -> None:
    for kind in (SharedPartition, KeyedPartition):
        for name in ("want", "offer"):
            patch.setattr(kind, name, _without_waiting(getattr(kind, name)))


def _without_waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    def hurried(partition: SharedPartition, *arguments: Any) -> Any:
        awaited, partition.awaited = partition.awaited, None
        try:
            return method(partition, *arguments)
        finally:
            partition.awaited = awaited

    return hurried


def adopts_what_was_acknowledged(patch: Patch) -> None:
    def blind(method: Callable[..., Any]) -> Callable[..., Any]:
        def adopt(partition: SharedPartition, *arguments: Any) -> Any:
            acked, partition.acked = partition.acked, AckSet()
            try:
                return method(partition, *arguments)
            finally:
                partition.acked = acked

        return adopt

    for kind in (SharedPartition, KeyedPartition):
        patch.setattr(kind, "adopt", blind(kind.adopt))


def adopts_twice(patch: Patch) -> None:
    patch.setattr(AwaitedHolders, "pop", AwaitedHolders.of)


def counts_a_move_as_a_failure(patch: Patch) -> None:
    former = Group.remove_partition

    def remove_partition(group: Group, key: TopicPartition) -> Effects:
        effects = Effects()
        group._end(group.leases_of(key), 0, reason="it has moved", effects=effects)
        former(group, key)
        return effects

    patch.setattr(Group, "remove_partition", remove_partition)


def forgets_what_was_recalled(patch: Patch) -> None:
    former = KeyedPartition.adopt

    def adopt(
        partition: KeyedPartition,
        lease: LeasedRange,
        outstanding: int,
        _: int,
        row_keys: Mapping[int, bytes | None],
    ) -> tuple[int, int]:
        return former(partition, lease, outstanding, 0, row_keys)

    patch.setattr(KeyedPartition, "adopt", adopt)


def forgets_the_keys_of_what_is_held(patch: Patch) -> None:
    former = KeyedPartition.adopt

    def adopt(
        partition: KeyedPartition,
        lease: LeasedRange,
        outstanding: int,
        recalled: int,
        row_keys: Mapping[int, bytes | None],
    ) -> tuple[int, int]:
        return former(partition, lease, outstanding, recalled, dict.fromkeys(row_keys))

    patch.setattr(KeyedPartition, "adopt", adopt)


def delivers_what_is_held(patch: Patch) -> None:
    patch.setattr(SharedPartition, "adopt", lambda _partition, _lease, taken, *_: (taken, 0))
    patch.setattr(KeyedPartition, "adopt", lambda _partition, _lease, taken, *_: (taken, 0))


def waits_for_ever(patch: Patch) -> None:
    patch.setattr(Group, "_end_wait", lambda *_: None)


@pytest.mark.parametrize(
    "mistake",
    [
        delivers_before_the_wait_is_over,
        adopts_what_was_acknowledged,
        adopts_twice,
        counts_a_move_as_a_failure,
        forgets_what_was_recalled,
        forgets_the_keys_of_what_is_held,
        delivers_what_is_held,
        waits_for_ever,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_mistake_with_a_move_is_found(
    mistake: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    for seed in _SEEDS_FOR_A_MISTAKE:
        try:
            MovesHistory(seed).play()
        except (WrongMoveError, KeyError):
            return
    pytest.fail("no history has found it")
