"""What has to hold when a message is delivered, and when one could be and is not."""

from __future__ import annotations

from tests.group_rules.facts import Consumer, GroupFacts, Lease, PartitionFacts, cost_bytes
from tests.group_rules.history import (
    Attempt,
    Delivered,
    Rules,
    Wanted,
    message_text,
    offsets_text,
    place_text,
    seconds,
)
from tests.simulation.history import Violation


def named(partition: PartitionFacts, offset: int) -> str:
    """A message as violations call it."""
    key = partition.log.key(offset)
    keyed = "" if key is None else f" (key {key!r})"
    return f"message {message_text(partition.place, offset)}{keyed}"


def deliver(rules: Rules, group: GroupFacts, event: Delivered) -> None:
    """A delivery that is as it has to be is leased from now on."""
    consumer = group.consumers.get(event.consumer)
    where = f"delivery {event.delivery} to consumer {event.consumer}"
    if consumer is None:
        raise Violation(f"{where}: there is no such consumer")
    if event.delivery <= group.last_delivery:
        raise Violation(f"{where}: ids rise, and {group.last_delivery} was given before")
    if event.deadline_ns != event.at_ns + rules.lease_ns:
        right = seconds(event.at_ns + rules.lease_ns)
        raise Violation(f"{where} is leased until {seconds(event.deadline_ns)} instead of {right}")
    partition = group.partitions.get(event.place)
    if partition is None:
        raise Violation(f"{where}: {place_text(event.place)} is not owed at all")
    if partition.is_away:
        raise Violation(f"{where}: the shard of {place_text(event.place)} is elsewhere")
    if not event.offsets or list(event.offsets) != sorted(set(event.offsets)):
        raise Violation(f"{where} has offsets that do not rise: {list(event.offsets)}")
    attempts = {attempt.offset: attempt for attempt in event.attempts}
    if not attempts.keys() <= set(event.offsets):
        raise Violation(f"{where} tells of attempts at messages that are not in it")
    lease = Lease(event.delivery, event.consumer, event.place, event.deadline_ns, event.cost_bytes)
    group.leases[event.delivery] = lease
    group.last_delivery = event.delivery
    for offset in event.offsets:
        _check_message(rules, partition, offset, event)
        _check_attempt(partition, offset, attempts.get(offset))
        _check_window(partition, lease, offset, consumer)
        partition.first_delivery_ns.setdefault(offset, event.at_ns)
        group.lease(lease, offset)
    size_bytes = sum(cost_bytes(partition, lease, offset) for offset in event.offsets)
    if event.size_bytes != size_bytes:
        raise Violation(f"{where} is said to cost {event.size_bytes} bytes: {size_bytes}")


def _check_message(rules: Rules, partition: PartitionFacts, offset: int, event: Delivered) -> None:
    """The message is owed, no other consumer holds it, its delay is over, and its key's order is kept."""
    about = (partition.place, {offset})
    what = f"{named(partition, offset)} was delivered to consumer {event.consumer}"
    if not partition.log.first <= offset < partition.log.end:
        raise Violation(f"{what}, and was never published", about)
    if not partition.is_owed(offset):
        how = partition.done.get(offset, f"before @{partition.floor}, where the group begins")
        raise Violation(f"{what} after it was done: {how}", about)
    if (lease := partition.held.get(offset)) is not None:
        raise Violation(
            f"{what} while consumer {lease.consumer} held it by delivery {lease.delivery} "
            f"until {seconds(lease.deadline_ns)}",
            about,
        )
    if (lease := partition.recalled.get(offset)) is not None:
        raise Violation(f"{what} though consumer {lease.consumer} has not given it back", about)
    if offset in partition.letters_under_way or offset in partition.letter_again_ns:
        raise Violation(f"{what} though it failed too often and is to be dead-lettered", about)
    count = partition.counts.get(offset)
    if count is not None and count.not_before_ns > event.at_ns:
        raise Violation(
            f"{what} at {seconds(event.at_ns)}, before its delay ended at "
            f"{seconds(count.not_before_ns)}",
            about,
        )
    if rules.is_keyed:
        _check_order(partition, offset, event)


def _check_order(partition: PartitionFacts, offset: int, event: Delivered) -> None:
    """All earlier messages of its key are done or with the same consumer; no consumer holds a later one."""
    queue = partition.queue(offset)
    what = f"{named(partition, offset)} was delivered to consumer {event.consumer}"
    about = (partition.place, {offset, *queue})
    for other in queue:
        if other == offset:
            continue
        held, recalled = partition.held.get(other), partition.recalled.get(other)
        if held is not None and held.consumer != event.consumer:
            raise Violation(
                f"{what} while consumer {held.consumer} held @{other} of its key", about
            )
        if recalled is not None:
            raise Violation(
                f"{what} though consumer {recalled.consumer} has not given back @{other} of its key",
                about,
            )
        if not partition.is_owed(other):
            continue  # done, or gone while somebody has it
        if other < offset and held is None:
            state = (
                "is about to be dead-lettered" if other in partition.letters_under_way else "waits"
            )
            raise Violation(f"{what} before @{other} of its key, which {state}", about)
        if other > offset and held is not None and offset not in partition.reopened:
            raise Violation(f"{what} while the later @{other} of its key was out", about)


def _check_attempt(partition: PartitionFacts, offset: int, attempt: Attempt | None) -> None:
    """How often it failed and when it was first delivered, if it was, are told as they are."""
    about = (partition.place, {offset})
    count = partition.counts.get(offset)
    right = 0 if count is None else count.failures
    told = 0 if attempt is None else attempt.failures
    if told != right:
        raise Violation(
            f"{named(partition, offset)} failed {right} times, "
            f"and was delivered as if it had {told} times",
            about,
        )
    first_ns = partition.first_delivery_ns.get(offset) if count is None else count[2]
    told_ns = None if attempt is None else attempt.first_delivery_ns
    if told_ns != first_ns:
        raise Violation(
            f"{named(partition, offset)} was first delivered {_when(first_ns)}, "
            f"and was delivered as if that was {_when(told_ns)}",
            about,
        )


def _when(time_ns: int | None) -> str:
    return "never before" if time_ns is None else f"at {seconds(time_ns)}"


def _check_window(partition: PartitionFacts, lease: Lease, offset: int, consumer: Consumer) -> None:
    cost = cost_bytes(partition, lease, offset)
    if not consumer.has_room(cost):
        raise Violation(
            f"{named(partition, offset)} of {cost} bytes was delivered to consumer "
            f"{lease.consumer}, which had {consumer.messages} messages of {consumer.bytes} bytes; "
            f"its window: {consumer.window_messages} messages, {consumer.window_bytes} bytes",
            (partition.place, {offset}),
        )


def check_wanted(rules: Rules, group: GroupFacts, event: Wanted) -> None:
    """What came back goes before what is new; with keys, each key has an order of its own."""
    if rules.is_keyed:
        return
    partition = group.partitions[event.place]
    for offset in range(partition.floor, min(event.begin, partition.log.end)):
        if partition.is_waiting(offset) and partition.is_due(offset, group.looked_ns):
            raise Violation(
                f"{named(partition, offset)} waits, and {offsets_text(event.begin, event.end)} "
                "were wanted before it",
                (partition.place, {offset}),
            )


def check_rested(rules: Rules, group: GroupFacts, cost_bytes_max: int) -> None:
    """No consumer with room is left without a message that could be delivered."""
    for number, consumer in group.consumers.items():
        # With less room, the message it was passed over for may be another, which is larger.
        if not consumer.has_room(cost_bytes_max):
            continue
        for partition in group.partitions.values():
            for offset in () if partition.is_away else partition.owed():
                if _could_go(rules, partition, offset, number, group.looked_ns):
                    raise Violation(
                        f"{named(partition, offset)} waits for nothing while consumer {number} "
                        "has room",
                        (partition.place, {offset}),
                    )


def _could_go(
    rules: Rules, partition: PartitionFacts, offset: int, consumer: int, looked_ns: int
) -> bool:
    """Whether nothing at all is in the way of delivering a message to a consumer that has room for it."""
    if not partition.is_waiting(offset) or not partition.is_due(offset, looked_ns):
        return False
    if not rules.is_keyed:
        return True
    key = partition.log.key(offset)
    if key is not None and partition.key_held_ns.get(key, 0) > looked_ns:
        return False
    for other in partition.queue(offset):
        held = partition.held.get(other)
        if other in partition.recalled or (held is not None and held.consumer != consumer):
            return False
        if other == offset or not partition.is_owed(other):
            continue
        if other in partition.letters_under_way or other in partition.letter_again_ns:
            return False  # whichever of a key is being dead-lettered, the others wait for it
        if (other < offset) != (held is not None):
            return False
        if held is None and not partition.is_due(other, looked_ns):
            return False
    return True
