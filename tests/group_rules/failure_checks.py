"""What counts as a failure, and what follows from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.group_rules.expectations import Expected
from tests.group_rules.facts import Count, GroupFacts, Lease, PartitionFacts
from tests.group_rules.history import Place, Rules

Message = tuple[PartitionFacts, int]


def end(group: GroupFacts, leases: Sequence[Lease]) -> list[Message]:
    """All that these leases have comes back. Returns what was held and is owed; what was recalled is back, too."""
    ended = []
    for lease in leases:
        partition = group.partitions[lease.place]
        for offset in sorted(lease.recalled):
            group.give_back(lease, offset)
        for offset in sorted(lease.offsets):
            group.release(lease, offset)
            if partition.is_owed(offset):
                ended.append((partition, offset))
    return ended


def fail(
    rules: Rules,
    group: GroupFacts,
    ended: Sequence[Message],
    at_ns: int,
    expected: Expected,
    delay_ns: Callable[[int], int],
) -> list[tuple[PartitionFacts, int, Count]]:
    """These came back because something went wrong. Of a key the first counts, and later ones are recalled.

    Returns what counts, and as what; `delay_ns` tells how long a message waits that failed so often.
    """
    counted = []
    seen: set[tuple[Place, bytes]] = set()
    for partition, offset in sorted(ended, key=lambda message: message[1]):
        key = partition.log.key(offset)
        if rules.is_keyed and key is not None:
            if (partition.place, key) in seen:
                continue
            seen.add((partition.place, key))
            _recall_later(group, partition, offset, expected)
        before = partition.counts.get(offset)
        failures = 1 if before is None else before.failures + 1
        not_before_ns = at_ns
        if not rules.is_dead(failures):
            not_before_ns += delay_ns(failures)
            partition.hold_key(offset, not_before_ns)
        partition.reopened.discard(offset)
        first_ns = partition.first_delivery_ns[offset] if before is None else before[2]
        counted.append((partition, offset, Count(failures, not_before_ns, first_ns)))
    return counted


def return_unbegun(
    rules: Rules, group: GroupFacts, ended: Sequence[Message], expected: Expected
) -> None:
    """Consumers returned these, and nothing counts. Later ones of their keys are recalled."""
    seen: set[tuple[Place, bytes]] = set()
    for partition, offset in sorted(ended, key=lambda message: message[1]):
        key = partition.log.key(offset)
        if rules.is_keyed and key is not None and (partition.place, key) not in seen:
            seen.add((partition.place, key))
            partition.reopened.discard(offset)
            _recall_later(group, partition, offset, expected)


def _recall_later(
    group: GroupFacts, partition: PartitionFacts, offset: int, expected: Expected
) -> None:
    for later in partition.queue(offset):
        lease = partition.held.get(later) if later > offset else None
        if lease is not None and partition.is_owed(later):  # not so if it is gone meanwhile
            group.recall(lease, later)
            expected.recalls.add((lease.consumer, lease.delivery, later))


def move_to_dead_letters(partition: PartitionFacts, offset: int, expected: Expected) -> None:
    """A dead letter is to be stored from now on."""
    partition.letter_again_ns.pop(offset, None)
    partition.letters_under_way.add(offset)
    expected.dead_letters[partition.place, offset] = partition.counts[offset].failures
