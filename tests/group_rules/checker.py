"""The promises of acknowledged work, held against a history event by event.

    checker = Checker(rules)
    for event in history:
        checker.see(event)               # raises Violation at the first promise that is broken

What is promised, in all modes:
- Nothing is lost: in the end every message is acknowledged, stored as a dead letter, or gone by retention.
- Nothing comes after its acknowledgement: after a restart, if the acknowledgement was stored; before, in any case.
- A message is leased once at a time, until its deadline; only its consumer or an operator can end that earlier.
- Failures count, and what counts as one is told: nack, lapsed lease, lost consumer. Nothing else counts.
- What a consumer returns unbegun comes again at once, uncounted.
- A consumer is notified of each lease of its own that expires, and of no other.
- A failed message does not come before its delay is over. One that failed too often is dead-lettered, once.
- No consumer has more messages or bytes leased than its window allows, except a single larger message.
- An acknowledgement that comes too late is told so, and no other is.
- What can be delivered to somebody who has room is delivered.
- While the shard of a partition is elsewhere nothing of it is delivered; its leases are over, and count as no failure.
With keys besides:
- A key's messages are with one consumer at a time, and are delivered in order: when one is, all before it are done or
  with the same consumer, and no consumer holds a later one. So a failed message comes again before newer ones.
- Only the first message of a key counts as failed, and those after it are recalled.
A multicast is as many groups as it has members, each with promises of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.group_rules import delivery_checks, failure_checks
from tests.group_rules.delivery_checks import named
from tests.group_rules.expectations import Expected, compare
from tests.group_rules.facts import Consumer, GroupFacts, Lease, LogFacts, PartitionFacts, count_of
from tests.group_rules.failure_checks import Message, end, move_to_dead_letters, return_unbegun
from tests.group_rules.history import (
    Acked,
    AckedUpTo,
    Began,
    DeadLetterSettled,
    Delivered,
    Event,
    Expired,
    Finished,
    Forgotten,
    GaveBack,
    Gone,
    Joined,
    Left,
    Moved,
    Nacked,
    Parted,
    Paused,
    Place,
    Published,
    Recovered,
    Removed,
    Renewed,
    Reopened,
    Resized,
    Restarted,
    Rested,
    Returned,
    Rules,
    Stated,
    Stored,
    Stretch,
    Wanted,
    offsets_text,
    place_text,
)
from tests.simulation.history import Violation

# So often the same may be wanted in vain: each time, one consumer may turn out to have too little room.
WANTS_MAX = 10
# When a message is dead-lettered that had failed too often before a restart.
AT_SOME_TIME = -1


def check(rules: Rules, events: Iterable[Event]) -> None:
    """Raise the first Violation of a whole history."""
    checker = Checker(rules)
    for event in events:
        checker.see(event)


class Checker:
    """Compares each event of a group with the rules above, and keeps all events in `history`."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._logs: dict[Place, LogFacts] = {}
        self._groups: dict[str, GroupFacts] = {}
        self._is_paused = False
        self.history: list[Event] = []
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Published: self._published,
            Began: self._began,
            Removed: self._removed,
            Parted: self._parted,
            Forgotten: self._forgotten,
            Joined: self._joined,
            Resized: self._resized,
            Left: self._left,
            Wanted: self._wanted,
            Delivered: self._delivered,
            Acked: self._acked,
            AckedUpTo: self._acked_up_to,
            Nacked: self._nacked,
            Renewed: self._renewed,
            GaveBack: self._gave_back,
            Returned: self._returned,
            Expired: self._expired,
            DeadLetterSettled: self._dead_letter_settled,
            Moved: self._moved,
            Reopened: self._reopened,
            Gone: self._gone,
            Paused: self._paused,
            Stored: self._stored,
            Restarted: self._restarted,
            Recovered: self._recovered,
            Stated: self._stated,
            Rested: self._rested,
            Finished: self._finished,
        }

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self._groups)

    @property
    def number(self) -> int:
        """Of the event that is looked at: 1, 2, 3 …"""
        return len(self.history)

    def see(self, event: Event) -> None:
        if self.history and event.at_ns < self.history[-1].at_ns:
            raise Violation(f"time goes back: {event}")
        self.history.append(event)
        self._handlers[type(event)](event)

    def group(self, name: str = "") -> GroupFacts:
        if name not in self._groups:
            self._groups[name] = GroupFacts(name)
        return self._groups[name]

    def _partition(self, event: Event, place: Place) -> PartitionFacts:
        return self.group(event.group).partitions[place]

    # --- Messages and partitions ---

    def _published(self, event: Published) -> None:
        log = self._logs.setdefault(event.place, LogFacts(event.place))
        log.publish(event.base, list(event.keys), event.cost_bytes)

    def _began(self, event: Began) -> None:
        log = self._logs.setdefault(event.place, LogFacts(event.place))
        partition = PartitionFacts(log, event.floor)
        partition.gone_below = log.end if event.is_again else 1
        for span in event.done:
            partition.done |= dict.fromkeys(range(*span), "gone with its topic")
        partition.counts = {failed.offset: count_of(failed) for failed in event.failed}
        self._take_up(partition)
        self.group(event.group).partitions[event.place] = partition

    def _removed(self, event: Removed) -> None:
        group = self.group(event.group)
        compare(event, self._take_all(group, self._partition(event, event.place)))
        del group.partitions[event.place]

    def _parted(self, event: Parted) -> None:
        partition = self._partition(event, event.place)
        compare(event, self._take_all(self.group(event.group), partition))
        partition.is_away = True
        partition.letter_again_ns.clear()  # they are asked for again when it is taken up

    def _forgotten(self, event: Forgotten) -> None:
        self._groups.pop(event.group, None)

    def _gone(self, event: Gone) -> None:
        group = self.group(event.group)
        partition = self._partition(event, event.place)
        expected = Expected()
        for offset in range(
            max(event.begin, partition.log.first), min(event.end, partition.log.end)
        ):
            # A consumer that holds one of them keeps it: it does not know of this, and may still settle it.
            self._settle(group, partition, offset, "gone", expected)
        compare(event, expected)

    def _moved(self, event: Moved) -> None:
        group = self.group(event.group)
        partition = self._partition(event, event.place)
        expected = self._take_all(group, partition)
        group.move(partition, event.floor, self.number)
        compare(event, expected)

    def _take_all(self, group: GroupFacts, partition: PartitionFacts) -> Expected:
        """All held messages of a partition are recalled, without waiting for an answer."""
        expected = Expected()
        for offset, lease in partition.held.items():
            expected.recalls.add((lease.consumer, lease.delivery, offset))
        group.end_leases(partition)
        return expected

    def _reopened(self, event: Reopened) -> None:
        group = self.group(event.group)
        partition = self._partition(event, event.place)
        if not partition.is_owed(event.offset):
            group.reopen(partition, event.offset, self.number)
            partition.first_delivery_ns.pop(event.offset, None)
            partition.reopened.add(event.offset)
        elif event.is_forgiven:
            group.forgive(partition, event.offset, self.number)
        compare(event, Expected())

    def _settle(
        self,
        group: GroupFacts,
        partition: PartitionFacts,
        offset: int,
        how: str,
        expected: Expected,
    ) -> None:
        """It is done: nothing of it is owed."""
        if not partition.is_owed(offset):
            return
        partition.letters_under_way.discard(offset)
        partition.letter_again_ns.pop(offset, None)
        partition.reopened.discard(offset)
        group.settle(partition, offset, how, self.number)
        expected.acked.add((partition.place, offset))

    # --- Consumers ---

    def _joined(self, event: Joined) -> None:
        consumer = Consumer(event.window_messages, event.window_bytes)
        self.group(event.group).consumers[event.consumer] = consumer

    def _resized(self, event: Resized) -> None:
        consumer = self.group(event.group).consumers[event.consumer]
        consumer.window_messages = event.window_messages
        consumer.window_bytes = event.window_bytes

    def _left(self, event: Left) -> None:
        group = self.group(event.group)
        leases = [lease for lease in group.leases.values() if lease.consumer == event.consumer]
        ended = end(group, leases)
        expected = Expected()
        if not event.is_clean:
            self._fail(group, ended, event.at_ns, expected)
        compare(event, expected)
        del group.consumers[event.consumer]

    # --- Deliveries ---

    def _wanted(self, event: Wanted) -> None:
        recent = self.history[-WANTS_MAX:]
        # What was read for a group and not taken is not wanted again at once, or nothing else is ever done.
        if len(recent) == WANTS_MAX and all(former == event for former in recent):
            raise Violation(
                f"{place_text(event.place)} {offsets_text(event.begin, event.end)} were wanted "
                f"{WANTS_MAX} times, and nothing of it was taken",
                (event.place, {event.begin}),
            )
        delivery_checks.check_wanted(self._rules, self.group(event.group), event)

    def _delivered(self, event: Delivered) -> None:
        if self._is_paused:
            raise Violation(f"delivery {event.delivery} while deliveries are paused")
        delivery_checks.deliver(self._rules, self.group(event.group), event)

    def _rested(self, event: Rested) -> None:
        cost_bytes_max = max((log.cost_bytes_max for log in self._logs.values()), default=0)
        delivery_checks.check_rested(self._rules, self.group(event.group), cost_bytes_max)

    # --- What consumers say ---

    def _acked(self, event: Acked) -> None:
        group = self.group(event.group)
        expected = Expected()
        for delivery in event.deliveries:
            lease = group.leases.get(delivery)
            if lease is None or lease.consumer != event.consumer:
                expected.is_late(delivery)
                continue
            self._stop(group, lease, sorted(lease.recalled), expected)
            self._take(group, lease, sorted(lease.offsets), expected)
        for part in event.parts:
            taken = self._in_time(group, event.consumer, part, expected)
            if taken:
                lease = group.leases[part.delivery]
                self._take(group, lease, taken, expected)
        compare(event, expected)

    def _acked_up_to(self, event: AckedUpTo) -> None:
        group = self.group(event.group)
        expected = Expected()
        for lease in list(group.leases.values()):
            if lease.consumer == event.consumer and lease.place == event.place:
                late = sorted(offset for offset in lease.recalled if offset <= event.offset)
                self._stop(group, lease, late, expected)
                done = sorted(offset for offset in lease.offsets if offset <= event.offset)
                self._take(group, lease, done, expected)
        compare(event, expected)

    def _take(
        self, group: GroupFacts, lease: Lease, offsets: Sequence[int], expected: Expected
    ) -> None:
        partition = group.partitions[lease.place]
        for offset in offsets:
            group.release(lease, offset)
            self._settle(group, partition, offset, "acknowledged", expected)

    def _stop(
        self, group: GroupFacts, lease: Lease, recalled: Sequence[int], expected: Expected
    ) -> None:
        """A consumer says anything of what was recalled: too late, but it does not work on it any more."""
        for offset in recalled:
            group.give_back(lease, offset)
            expected.is_late(lease.delivery, offset, offset + 1)

    def _in_time(
        self, group: GroupFacts, consumer: int, part: Stretch, expected: Expected
    ) -> list[int]:
        """Which of a part its consumer really holds; the others come late, and are not worked on any more."""
        lease = group.leases.get(part.delivery)
        if lease is None or lease.consumer != consumer:
            expected.is_late(part.delivery, part.begin, part.end)
            return []
        held = sorted(offset for offset in lease.offsets if part.begin <= offset < part.end)
        begin = part.begin
        for offset in held:
            expected.is_late(part.delivery, begin, offset)
            begin = offset + 1
        expected.is_late(part.delivery, begin, part.end)
        for offset in sorted(lease.recalled):
            if part.begin <= offset < part.end:
                group.give_back(lease, offset)
        return held

    def _nacked(self, event: Nacked) -> None:
        group = self.group(event.group)
        expected = Expected()
        ended = self._released(group, event.consumer, event.parts, expected)
        own = event.delay_ns
        delay = self._rules.delay_ns if own is None else lambda failures: own
        self._fail(group, ended, event.at_ns, expected, delay)
        compare(event, expected)

    def _released(
        self, group: GroupFacts, consumer: int, parts: Sequence[Stretch], expected: Expected
    ) -> list[Message]:
        """The messages of these parts that the consumer had and that are still owed. It has them no more."""
        ended = []
        for part in parts:
            for offset in self._in_time(group, consumer, part, expected):
                lease = group.leases[part.delivery]
                partition = group.partitions[lease.place]
                group.release(lease, offset)
                if partition.is_owed(offset):
                    ended.append((partition, offset))
        return ended

    def _returned(self, event: Returned) -> None:
        group = self.group(event.group)
        expected = Expected()
        ended = self._released(group, event.consumer, event.parts, Expected())
        return_unbegun(self._rules, group, ended, expected)
        compare(event, expected)

    def _renewed(self, event: Renewed) -> None:
        group = self.group(event.group)
        for delivery in event.deliveries:
            lease = group.leases.get(delivery)
            if lease is not None and lease.consumer == event.consumer:
                length_ns = self._rules.lease_ns if event.lease_ns is None else event.lease_ns
                lease.deadline_ns = event.at_ns + length_ns

    def _gave_back(self, event: GaveBack) -> None:
        group = self.group(event.group)
        for part in event.parts:
            lease = group.leases.get(part.delivery)
            if lease is None or lease.consumer != event.consumer:
                continue
            for offset in sorted(lease.recalled):
                if part.begin <= offset < part.end:
                    group.give_back(lease, offset)
        compare(event, Expected())

    # --- Time, failures, dead letters ---

    def _expired(self, event: Expired) -> None:
        group = self.group(event.group)
        group.looked_ns = event.at_ns
        over = [lease for lease in group.leases.values() if lease.deadline_ns <= event.at_ns]
        expected = Expected()
        expected.expired = {(lease.consumer, lease.delivery) for lease in over}
        self._fail(group, end(group, over), event.at_ns, expected)
        told = {(dead_letter.place, dead_letter.offset) for dead_letter in event.told.dead_letters}
        for partition in group.partitions.values():
            for offset, due_ns in list(partition.letter_again_ns.items()):
                # With keys, what failed before a restart is found when it is read, and that may take a while.
                may_wait = due_ns == AT_SOME_TIME and self._rules.is_keyed
                is_due = (partition.place, offset) in told if may_wait else due_ns <= event.at_ns
                if is_due:
                    move_to_dead_letters(partition, offset, expected)
        compare(event, expected)

    def _fail(
        self,
        group: GroupFacts,
        ended: Sequence[Message],
        at_ns: int,
        expected: Expected,
        delay_ns: Callable[[int], int] = lambda failures: 0,
    ) -> None:
        counted = failure_checks.fail(self._rules, group, ended, at_ns, expected, delay_ns)
        for partition, offset, count in counted:
            group.count(partition, offset, count, self.number)
            expected.failed[partition.place, offset] = count
            if self._rules.is_dead(count.failures):
                move_to_dead_letters(partition, offset, expected)

    def _dead_letter_settled(self, event: DeadLetterSettled) -> None:
        group = self.group(event.group)
        expected = Expected()
        partition = group.partitions.get(event.place)
        if partition is not None and event.offset in partition.letters_under_way:
            if event.is_stored:
                self._settle(group, partition, event.offset, "dead_letter_stored", expected)
            else:
                partition.letters_under_way.remove(event.offset)
                again_ns = event.at_ns + self._rules.retry_delay_ns_max
                partition.letter_again_ns[event.offset] = again_ns
        compare(event, expected)

    # --- The broker ---

    def _paused(self, event: Paused) -> None:
        self._is_paused = event.is_paused

    def _named(self, event: Event) -> list[GroupFacts]:
        """The group of an event that may be about all of them."""
        return [self.group(event.group)] if event.group else list(self._groups.values())

    def _stored(self, event: Stored) -> None:
        for group in self._named(event):
            group.stored(event.events, is_consumers=event.is_consumers)

    def _restarted(self, event: Restarted) -> None:
        for group in self._named(event):
            group.restart(event.events)
            for partition in group.partitions.values():
                self._take_up(partition)

    def _take_up(self, partition: PartitionFacts) -> None:
        """What failed before is held back again, or has to be dead-lettered."""
        for offset, count in partition.counts.items():
            if self._rules.is_dead(count.failures):
                partition.letter_again_ns[offset] = AT_SOME_TIME
            else:
                partition.hold_key(offset, count.not_before_ns)

    def _recovered(self, event: Recovered) -> None:
        """What is taken up must be how things stood at some moment, not before what is known to be stored."""
        group = self.group(event.group)
        partition = self._partition(event, event.place)
        told = {offset for begin, end in event.done for offset in range(begin, end)}
        failed = {failed.offset: count_of(failed) for failed in event.failed}

        def differing() -> set[int]:
            end = max([partition.log.end, event.floor, *(offset + 1 for offset in told)])
            return {
                offset
                for offset in range(partition.gone_below, end)
                if (offset >= event.floor and offset not in told) != partition.is_owed(offset)
                or failed.get(offset) != partition.counts.get(offset)
            }

        before = differing()
        is_found = not before
        if not event.is_exact:
            is_found = group.recover(partition, lambda: not differing())
        if not is_found:
            wrong = differing()
            when = "now stands" if event.is_exact else "stood at any time since it was last stored"
            raise Violation(
                f"{place_text(event.place)} was not taken up as it {when}: "
                f"{named(partition, min(before & wrong or wrong))} above all",
                (event.place, wrong),
            )
        partition.believe(event.floor, told, failed)
        partition.forget_leases()
        partition.is_away = False
        self._take_up(partition)

    def _stated(self, event: Stated) -> None:
        partition = self._partition(event, event.place)
        told = {offset for begin, end in event.done for offset in range(begin, end)}
        for offset in range(partition.log.first, partition.log.end):
            is_done = offset < event.floor or offset in told
            if is_done == partition.is_owed(offset):
                words = ("owed", "done") if is_done else ("done", "owed")
                raise Violation(
                    f"{named(partition, offset)} is {words[0]}, and the group says {words[1]}",
                    (event.place, {offset}),
                )
        out = partition.held.keys() | partition.recalled.keys()
        if event.in_flight != len(out):
            raise Violation(
                f"of {place_text(event.place)} {len(out)} messages are with consumers, "
                f"and the group says {event.in_flight}",
                (event.place, out),
            )

    def _finished(self, event: Finished) -> None:
        for group in self._groups.values():
            for partition in group.partitions.values():
                for offset in partition.owed():
                    holder = partition.held.get(offset) or partition.recalled.get(offset)
                    where = (
                        "nobody holds it"
                        if holder is None
                        else f"consumer {holder.consumer} holds it"
                    )
                    whose = f" of {group.name}" if group.name else ""
                    raise Violation(
                        f"{named(partition, offset)}{whose} was lost: it is neither "
                        f"acknowledged nor dead-lettered, and {where}",
                        (partition.place, {offset}),
                    )
