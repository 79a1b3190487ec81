"""Deliberate mistakes inside the parts of a group, which histories must find.

They patch internal names, which `mutants.py` does without, and so break what the group's interface does not reach.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import pytest

from runnel.group_rules import records
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.delivery_builders import DeliveryBuilder, DeliveryBuilders
from runnel.group_rules.effects import Effects, Failure
from runnel.group_rules.key_queue import KeyQueue
from runnel.group_rules.keyed_partition import KeyedPartition
from runnel.group_rules.leases import LeasedRange, LeaseTable
from runnel.group_rules.records import FailedRecord, Record, StateTable
from runnel.group_rules.shared_partition import SharedPartition
from tests.simulation.mutants import Mutant

Patch = pytest.MonkeyPatch


# --- Keys ---


def delays_do_not_hold_keys(patch: Patch) -> None:
    patch.setattr(
        KeyQueue, "is_open", property(lambda queue: not (queue.unconfirmed or queue.dying))
    )


def dead_letters_do_not_hold_keys(patch: Patch) -> None:
    is_open = property(lambda queue: not (queue.unconfirmed or queue.held_until_ns))
    patch.setattr(KeyQueue, "is_open", is_open)


def recalls_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(
        KeyQueue, "is_open", property(lambda queue: not (queue.dying or queue.held_until_ns))
    )


def keys_have_no_holder(patch: Patch) -> None:
    def anybody(
        work: KeyedPartition, queue: KeyQueue, delivery_builders: DeliveryBuilders
    ) -> DeliveryBuilder | None:
        return delivery_builders.for_any_consumer()

    patch.setattr(KeyedPartition, "_delivery_builder", anybody)


def what_came_back_waits_behind_the_rest(patch: Patch) -> None:
    def wait(queue: KeyQueue, offsets: list[int]) -> None:
        queue.waiting = deque([*(queue.waiting or ()), *offsets])

    patch.setattr(KeyQueue, "wait", wait)


# --- Shared work ---


def messages_passed_over_are_forgotten(patch: Patch) -> None:
    def skip_to(work: SharedPartition, offset: int) -> None:
        work.fresh = max(work.fresh, offset)

    patch.setattr(SharedPartition, "_skip_to", skip_to)


def counts_stay_at_one(patch: Patch) -> None:
    count = SharedPartition._count

    def forgetful(work: SharedPartition, lease: LeasedRange, offset: int, *others: Any) -> Failure:
        former = work.failures.get(offset)
        if former is not None:
            work.failures[offset] = Failure(0, 0, former.first_delivery_ns)
        return count(work, lease, offset, *others)

    patch.setattr(SharedPartition, "_count", forgetful)


def delays_end_with_the_broker(patch: Patch) -> None:
    patch.setattr(SharedPartition, "_is_held_back", lambda work, offset, now_ns: False)


def leases_end_one_by_one(patch: Patch) -> None:
    """Of several whose time is up at once, only the first is ended."""
    ended = LeaseTable.ended
    patch.setattr(LeaseTable, "ended", lambda table, now_ns: ended(table, now_ns)[:1])


# --- What is stored ---


def snapshots_forget_failures(patch: Patch) -> None:
    patch.setattr(records, "FailedAt", lambda offset, *others: None)
    at_record = records.at_record

    def forgetful(*arguments: Any) -> records.AtRecord:
        arguments[3].failures.clear()
        return at_record(*arguments)

    patch.setattr(records, "at_record", forgetful)


def floor_swallows_what_lies_above_it(patch: Patch) -> None:
    """Acknowledging the first that is owed takes its neighbour along."""
    move = AckSet._move_floor
    patch.setattr(AckSet, "_move_floor", lambda acked, floor: move(acked, floor + 1))


def what_is_sent_back_stays_done(patch: Patch) -> None:
    """The table passes over the record that says so."""
    apply = StateTable.apply

    def passing_over(table: StateTable, record: Record) -> None:
        if not isinstance(record, FailedRecord) or record.failures:
            apply(table, record)

    patch.setattr(StateTable, "apply", passing_over)


def scattered_acks_are_not_stored(patch: Patch) -> None:
    """Those that are acknowledged bit by bit are not told."""
    acknowledge = SharedPartition.acknowledge

    def secretive(work: SharedPartition, lease: LeasedRange, mask: int, effects: Effects) -> None:
        acknowledge(work, lease, mask, effects)
        effects.picked.clear()

    patch.setattr(SharedPartition, "acknowledge", secretive)


SLIPS: Final[tuple[Mutant, ...]] = (
    delays_do_not_hold_keys,
    dead_letters_do_not_hold_keys,
    recalls_are_not_waited_for,
    keys_have_no_holder,
    what_came_back_waits_behind_the_rest,
    messages_passed_over_are_forgotten,
    counts_stay_at_one,
    delays_end_with_the_broker,
    leases_end_one_by_one,
    snapshots_forget_failures,
    floor_swallows_what_lies_above_it,
    what_is_sent_back_stays_done,
    scattered_acks_are_not_stored,
)
