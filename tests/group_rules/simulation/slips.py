"""Slips inside a group's parts, to see that the checker notices: each is a function of pytest's monkeypatch.

They need names of the inside, which `mutants.py` does without; in return they break what nobody reaches from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import pytest

from runnel.group_rules import records
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.delivery_builders import DeliveryBuilder, DeliveryBuilders
from runnel.group_rules.effects import Effects, Failure
from runnel.group_rules.keyed_work import KeyedWork
from runnel.group_rules.lanes import Lane
from runnel.group_rules.leases import Lease, LeaseTable
from runnel.group_rules.partition_work import PartitionWork
from runnel.group_rules.records import FailedRecord, Record, StateTable

Patch = pytest.MonkeyPatch
Slip = Callable[[Patch], None]


# --- Keys ---


def delays_do_not_hold_keys(patch: Patch) -> None:
    patch.setattr(Lane, "is_open", property(lambda lane: not (lane.unconfirmed or lane.dying)))


def burials_do_not_hold_keys(patch: Patch) -> None:
    is_open = property(lambda lane: not (lane.unconfirmed or lane.held_until_ns))
    patch.setattr(Lane, "is_open", is_open)


def recalls_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(Lane, "is_open", property(lambda lane: not (lane.dying or lane.held_until_ns)))


def keys_have_no_holder(patch: Patch) -> None:
    def anybody(
        work: KeyedWork, lane: Lane, delivery_builders: DeliveryBuilders
    ) -> DeliveryBuilder | None:
        return delivery_builders.of_anybody()

    patch.setattr(KeyedWork, "_delivery_builder", anybody)


def what_came_back_waits_behind_the_rest(patch: Patch) -> None:
    def wait(lane: Lane, offsets: list[int]) -> None:
        lane.waiting = deque([*(lane.waiting or ()), *offsets])

    patch.setattr(Lane, "wait", wait)


# --- Shared work ---


def messages_passed_over_are_forgotten(patch: Patch) -> None:
    def skip_to(work: PartitionWork, offset: int) -> None:
        work.fresh = max(work.fresh, offset)

    patch.setattr(PartitionWork, "_skip_to", skip_to)


def counts_stay_at_one(patch: Patch) -> None:
    count = PartitionWork._count

    def forgetful(work: PartitionWork, lease: Lease, offset: int, *others: Any) -> Failure:
        former = work.failures.get(offset)
        if former is not None:
            work.failures[offset] = Failure(0, 0, former.first_delivery_ns)
        return count(work, lease, offset, *others)

    patch.setattr(PartitionWork, "_count", forgetful)


def delays_end_with_the_broker(patch: Patch) -> None:
    patch.setattr(PartitionWork, "_is_held_back", lambda work, offset, now_ns: False)


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
    acknowledge = PartitionWork.acknowledge

    def secretive(work: PartitionWork, lease: Lease, mask: int, effects: Effects) -> None:
        acknowledge(work, lease, mask, effects)
        effects.picked.clear()

    patch.setattr(PartitionWork, "acknowledge", secretive)


SLIPS: Final[tuple[Slip, ...]] = (
    delays_do_not_hold_keys,
    burials_do_not_hold_keys,
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
