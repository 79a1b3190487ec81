"""Groups as a broker would use them: joined to a small log, a state journal and a clock, with everything written down.

Each method is one event of a history; the checker sees it at once. Simulations draw what to call, scenarios have it
written down. A group's clock begins anew with every restart; events tell the time of one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from random import Random
from typing import Any

from runnel.formats.work_heads import DeliveryPart, Picked
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.definition import SubscriptionOptions
from runnel.group_rules.effects import Effects, Failure, LeasedDelivery, Want
from runnel.group_rules.group import Group
from runnel.group_rules.masks import runs
from runnel.group_rules.records import (
    AckedRecord,
    AtRecord,
    FailedRecord,
    ForgottenRecord,
    PartitionAcks,
    PickedRecord,
    Record,
    at_record,
    pack_ranges,
)
from tests.group_rules import history
from tests.group_rules.checker import Checker
from tests.group_rules.history import NS_PER_SECOND, Place, Rules, Stretch, Told
from tests.group_rules.journal import ModelJournal
from tests.group_rules.messages import ModelLog, Run

SUBSCRIPTION = 7
# The time at which histories begin, by the clock on the wall.
WALL_NS = 1_000_000 * NS_PER_SECOND


class Stage:
    """Runs a group's rules under a checker. `make_group` may make groups that break a rule."""

    def __init__(
        self,
        options: SubscriptionOptions,
        *,
        is_keyed: bool,
        waiting_max: int = 65_536,
        make_group: Callable[..., Group] = Group,
    ) -> None:
        self.options = options
        self.is_keyed = is_keyed
        self._waiting_max = waiting_max
        self._make_group = make_group
        self.checker = Checker(
            Rules(
                is_keyed=is_keyed,
                lease_ns=options.lease_ns,
                deliveries_max=options.deliveries_max,
                retry_delay_ns=options.retry_delay_ns,
                retry_delay_ns_max=options.retry_delay_ns_max,
                backoff=options.backoff,
            )
        )
        self.now_ns = 0
        self._booted_ns = -NS_PER_SECOND  # when the groups' clock stood at 0
        self.log = ModelLog()
        self.journal = ModelJournal()
        self.groups: dict[str, Group] = {}
        self.places: dict[str, list[Place]] = {}  # what each group covers
        self.dead_letters: list[tuple[str, Place, int]] = []  # dead letters to be stored
        self.dead: set[tuple[str, Place, int]] = set()  # dead letters that are
        self.on_recall: Callable[[int, Stretch], None] = lambda consumer, part: None
        self.is_paused = False
        self._next_delivery = 1

    # --- Clocks ---

    @property
    def group_ns(self) -> int:
        """Now, by the groups' clock."""
        return self.now_ns - self._booted_ns

    def pass_time(self, duration_ns: int) -> None:
        assert duration_ns >= 0
        self.now_ns += duration_ns

    def next_time_ns(self) -> int | None:
        """When a group has something to do by itself."""
        times = [group.next_time_ns() for group in self.groups.values()]
        return min((time + self._booted_ns for time in times if time is not None), default=None)

    def _from_group(self, time_ns: int) -> int:
        return time_ns + self._booted_ns

    def _to_wall(self, time_ns: int) -> int:
        return time_ns + self._booted_ns + WALL_NS

    def _from_wall(self, time_ns: int) -> int:
        return time_ns - WALL_NS - self._booted_ns

    # --- Writing down ---

    def _see(self, event: history.Event) -> int:
        self.checker.see(event)
        return self.checker.number

    def _told(self, name: str, effects: Effects, make: Callable[..., Any], **fields: Any) -> None:
        """An event that a group answered. What it told is added to the journal, and dead letters are begun."""
        told = Told(
            late=[_stretch(part) for part in effects.late],
            recalls=[
                history.Recall(consumer, _stretch(part)) for consumer, part in effects.recalls
            ],
            dead_letters=[
                history.GivenUp(b.key, b.offset, b.failures) for b in effects.dead_letters
            ],
            failed=[
                history.Failure(
                    key,
                    offset,
                    failures,
                    self._from_group(not_before_ns),
                    self._from_group(first_ns),
                )
                for key, offset, failures, not_before_ns, first_ns, _ in effects.failed
                if failures  # 0: owed again, which is for the journal
            ],
            acked=[*effects.acked, *_picked(effects)],
            expired=effects.expired,
        )
        number = self._see(make(self.now_ns, name, told=told, **fields))
        records = self._records(name, effects)
        if records:
            self.journal.add(number, records)
        self.dead_letters += [
            (name, dead_letter.key, dead_letter.offset) for dead_letter in effects.dead_letters
        ]
        for recall in told.recalls:
            self.on_recall(recall.consumer, recall.stretch)

    def _records(self, name: str, effects: Effects) -> list[Record]:
        records: list[Record] = [
            AckedRecord(SUBSCRIPTION, name, *key, pack_ranges([(begin, end)]))
            for key, begin, end in effects.acked
        ]
        records += [
            PickedRecord(SUBSCRIPTION, name, *key, base, _bits(mask))
            for key, base, mask in effects.picked
        ]
        records += [
            FailedRecord(
                SUBSCRIPTION,
                name,
                *key,
                offset,
                failures,
                self._to_wall(not_before_ns),
                self._to_wall(first_ns),
                reason,
            )
            for key, offset, failures, not_before_ns, first_ns, reason in effects.failed
        ]
        return records

    # --- Messages and partitions ---

    def make_place(self, place: Place, first: int = 1) -> None:
        """A partition whose messages begin at an offset: retention took those before."""
        self.log.make(place, first)

    def publish(self, place: Place, keys: Sequence[bytes | None], cost_bytes: int = 1) -> Run:
        run = self.log.publish(place, keys, cost_bytes)
        self._see(
            history.Published(
                self.now_ns, place=place, base=run.base, keys=run.keys, cost_bytes=cost_bytes
            )
        )
        return run

    def extend(self, name: str) -> None:
        for place in self.places[name]:
            self.groups[name].extend(place, self.log.ends[place])
            self.groups[name].extend(place, self.log.first(place))  # an end never falls

    def make_group(self, name: str = "") -> None:
        self.groups[name] = self._make_group(
            self.options,
            is_keyed=self.is_keyed,
            waiting_max=self._waiting_max,
            first_delivery_id=self._next_delivery,
        )
        self.places[name] = []

    def begin(self, name: str, place: Place, floor: int) -> None:
        """The group covers this partition from now on; that is stored before anything else happens."""
        self.store()
        number = self._see(history.Began(self.now_ns, name, place=place, floor=floor))
        self.journal.add(number, [_begun(name, place, floor)])
        self.store()
        self.places[name].append(place)
        self.groups[name].add_partition(place, AckSet(floor), now_ns=self.group_ns)
        self.groups[name].extend(place, self.log.ends[place])

    def remove_topic(self, topic: str) -> None:
        """It is deleted, and the groups forget it; that is stored at once too."""
        for name, places in self.places.items():
            for place in [place for place in places if place[0] == topic]:
                self._remove_place(name, place)
        self.journal.add(self.checker.number, [ForgottenRecord(SUBSCRIPTION, None, topic)])
        self.store()
        for place in [place for place in self.log.ends if place[0] == topic]:
            self.log.delete(place)

    def remove_group(self, name: str) -> None:
        """A member of a multicast is removed."""
        for place in list(self.places[name]):
            self._remove_place(name, place)
        self.journal.add(self.checker.number, [ForgottenRecord(SUBSCRIPTION, name, None)])
        self.store()
        del self.groups[name], self.places[name]

    def _remove_place(self, name: str, place: Place) -> None:
        self.places[name].remove(place)
        self.dead_letters = [
            dead_letter for dead_letter in self.dead_letters if dead_letter[:2] != (name, place)
        ]
        self.dead = {dead for dead in self.dead if dead[:2] != (name, place)}
        effects = self.groups[name].remove_partition(place)
        self._told(name, effects, history.Removed, place=place)

    def gone(self, name: str, place: Place, begin: int, end: int) -> None:
        effects = self.groups[name].gone(place, begin, end)
        self._told(name, effects, history.Gone, place=place, begin=begin, end=end)

    def retain(self, place: Place, begin: int, end: int) -> None:
        """Retention takes messages, and the groups hear of it."""
        self.log.remove(place, begin, end)
        for name, places in self.places.items():
            if place in places:
                self.gone(name, place, begin, end)

    def move(self, name: str, place: Place, floor: int) -> None:
        effects = self.groups[name].reset_partition(place, floor)
        self._told(name, effects, history.Moved, place=place, floor=floor)
        self.journal.add(self.checker.number, [_begun(name, place, floor)])

    def reopen(self, name: str, place: Place, offset: int) -> None:
        self.dead.discard((name, place, offset))
        effects = self.groups[name].reopen(place, offset)
        self._told(name, effects, history.Reopened, place=place, offset=offset)

    # --- Consumers ---

    def join(self, name: str, consumer: int, messages: int, size_bytes: int) -> None:
        window = {"window_messages": messages, "window_bytes": size_bytes}
        self.groups[name].join(consumer, **window)
        self._see(history.Joined(self.now_ns, name, consumer=consumer, **window))

    def resize(self, name: str, consumer: int, messages: int, size_bytes: int) -> None:
        window = {"window_messages": messages, "window_bytes": size_bytes}
        self.groups[name].resize(consumer, **window)
        self._see(history.Resized(self.now_ns, name, consumer=consumer, **window))

    def leave(self, name: str, consumer: int, *, is_clean: bool) -> None:
        effects = self.groups[name].leave(consumer, self.group_ns, is_clean=is_clean)
        self._told(name, effects, history.Left, consumer=consumer, is_clean=is_clean)

    # --- Deliveries ---

    def want(self, name: str) -> Want | None:
        want = None if self.is_paused else self.groups[name].next_want(self.group_ns)
        if want is not None:
            self._see(
                history.Wanted(self.now_ns, name, place=want.key, begin=want.begin, end=want.end)
            )
        return want

    def read(self, name: str, want: Want) -> Run | None:
        """What the log has at that place; holes that are met on the way are gone."""
        run = self.log.read(want.key, want.begin)
        begin = want.end if run is None else min(run.base, want.end)
        if begin > want.begin:
            self.gone(name, want.key, want.begin, begin)
        return run if run is not None and run.base < want.end else None

    def offer(self, name: str, place: Place, run: Run) -> list[LeasedDelivery]:
        deliveries = self.groups[name].offer(
            place,
            run.base,
            len(run.keys),
            run.cost_bytes * len(run.keys),
            self.group_ns,
            run.keys if self.is_keyed else None,
        )
        for delivery in deliveries:
            self._next_delivery = max(self._next_delivery, delivery.id + 1)
            self._see(
                history.Delivered(
                    self.now_ns,
                    name,
                    consumer=delivery.consumer,
                    delivery=delivery.id,
                    place=delivery.key,
                    offsets=offsets_of(delivery),
                    size_bytes=delivery.size_bytes,
                    deadline_ns=self._from_group(delivery.deadline_ns),
                    attempts=[
                        history.Attempt(offset, failures, self._from_group(first_ns))
                        for offset, failures, first_ns in delivery.attempts
                    ],
                )
            )
        return deliveries

    def rest(self, name: str) -> None:
        self._see(history.Rested(self.now_ns, name))

    # --- What consumers say ---

    def ack(
        self,
        name: str,
        consumer: int,
        deliveries: Sequence[int],
        parts: Sequence[Stretch],
        *,
        is_picked: bool = False,
    ) -> None:
        """`is_picked`: the parts are named bit by bit, which says the same."""
        group = self.groups[name]
        if is_picked:
            effects = group.ack(consumer, deliveries, (), self.group_ns, bit_by_bit(parts))
        else:
            effects = group.ack(consumer, deliveries, _parts(parts), self.group_ns)
        self._told(
            name, effects, history.Acked, consumer=consumer, deliveries=deliveries, parts=parts
        )

    def ack_up_to(self, name: str, consumer: int, place: Place, offset: int) -> None:
        effects = self.groups[name].ack_up_to(consumer, place, offset, self.group_ns)
        self._told(name, effects, history.AckedUpTo, consumer=consumer, place=place, offset=offset)

    def nack(
        self, name: str, consumer: int, parts: Sequence[Stretch], delay_ns: int | None = None
    ) -> None:
        effects = self.groups[name].nack(
            consumer, _parts(parts), self.group_ns, delay_ns=delay_ns, reason="no luck"
        )
        self._told(name, effects, history.Nacked, consumer=consumer, parts=parts, delay_ns=delay_ns)

    def renew(
        self, name: str, consumer: int, deliveries: Sequence[int], lease_ns: int | None = None
    ) -> None:
        self.groups[name].renew(consumer, deliveries, self.group_ns, lease_ns=lease_ns)
        self._see(
            history.Renewed(
                self.now_ns, name, consumer=consumer, deliveries=deliveries, lease_ns=lease_ns
            )
        )

    def give_back(self, name: str, consumer: int, parts: Sequence[Stretch]) -> None:
        effects = self.groups[name].recalled(consumer, _parts(parts), self.group_ns)
        self._told(name, effects, history.GaveBack, consumer=consumer, parts=parts)

    def return_unbegun(self, name: str, consumer: int, parts: Sequence[Stretch]) -> None:
        effects = self.groups[name].give_back(consumer, _parts(parts), self.group_ns)
        self._told(name, effects, history.Returned, consumer=consumer, parts=parts)

    # --- Time, dead letters ---

    def expire(self, name: str) -> None:
        effects = self.groups[name].expire(self.group_ns)
        self._told(name, effects, history.Expired)

    def write_dead_letter(self, name: str, place: Place, offset: int, *, is_stored: bool) -> None:
        self.dead_letters.remove((name, place, offset))
        group = self.groups[name]
        settle = group.dead_letter_stored if is_stored else group.dead_letter_failed
        effects = settle(place, offset, self.group_ns)
        self._told(
            name,
            effects,
            history.DeadLetterSettled,
            place=place,
            offset=offset,
            is_stored=is_stored,
        )
        if is_stored:
            self.dead.add((name, place, offset))

    # --- The broker ---

    def pause(self, *, is_paused: bool) -> None:
        self.is_paused = is_paused
        self._see(history.Paused(self.now_ns, is_paused=is_paused))

    def store(self, count: int | None = None) -> None:
        """So many contents of the journal are stored, or all."""
        if self.journal.unstored:
            event = self.journal.store(self.journal.unstored if count is None else count)
            if event is not None:
                self._see(history.Stored(self.now_ns, events=event))

    def compact(self) -> None:
        self.journal.compact(self.checker.number)
        self._see(history.Stored(self.now_ns, events=self.checker.number))

    def restart(self, random: Random) -> None:
        """A crash: groups and consumers are gone, what the journal still has is the beginning of new ones."""
        lost = self.journal.crash(random)
        events = self.checker.number if lost is None else lost - 1
        self._see(history.Restarted(self.now_ns, events=events))
        # The machine may have started anew, and its clock with it.
        if random.random() < 0.5:
            self._booted_ns = self.now_ns - random.randint(1, NS_PER_SECOND)
        self.dead_letters.clear()
        for name, places in self.places.items():
            self.make_group(name)
            for place in places:
                self.places[name].append(place)
                self._restore(name, place)

    def _restore(self, name: str, place: Place) -> None:
        state = self.journal.table.get(SUBSCRIPTION, name, place)
        assert state is not None
        failures = {
            offset: Failure(
                failure.failures,
                self._from_wall(failure.not_before_ns),
                self._from_wall(failure.first_delivery_ns),
                failure.reason,
            )
            for offset, failure in state.failures.items()
        }
        group = self.groups[name]
        group.add_partition(place, state.acked, failures, now_ns=self.group_ns)
        group.extend(place, self.log.ends[place])

    def state(self, name: str, place: Place) -> None:
        """Ask the group where it stands."""
        group = self.groups[name]
        state = group.partition_state(place)
        assert state is not None
        self._see(
            history.Stated(
                self.now_ns,
                name,
                place=place,
                floor=state.acked.floor,
                done=state.acked.ranges(),
                in_flight=group.partition_in_flight(place),
            )
        )

    def finish(self) -> None:
        self._see(history.Finished(self.now_ns))


def offsets_of(delivery: LeasedDelivery) -> list[int]:
    mask = delivery.mask
    return [delivery.base + bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def stretches(delivery: int, offsets: Sequence[int]) -> list[Stretch]:
    """Rising offsets of a delivery, in as few stretches as can be."""
    spans: list[list[int]] = []
    for offset in offsets:
        if spans and spans[-1][1] == offset:
            spans[-1][1] = offset + 1
        else:
            spans.append([offset, offset + 1])
    return [Stretch(delivery, begin, end) for begin, end in spans]


def _begun(name: str, place: Place, floor: int) -> AtRecord:
    """Owed from there on, all of it."""
    return at_record(SUBSCRIPTION, name, place, PartitionAcks(AckSet(floor), {}))


def _picked(effects: Effects) -> list[tuple[Place, int, int]]:
    """Those acked that lie scattered, as ranges."""
    return [
        (key, begin, end) for key, base, mask in effects.picked for begin, end in runs(base, mask)
    ]


def bit_by_bit(parts: Sequence[Stretch]) -> list[Picked]:
    """The same messages, one for each delivery in a row."""
    picked = []
    for delivery, group in groupby(parts, lambda part: part.delivery):
        named = list(group)
        begin = min(part.begin for part in named)
        mask = 0
        for part in named:
            mask |= ((1 << part.end - part.begin) - 1) << part.begin - begin
        picked.append(Picked(delivery, begin, _bits(mask)))
    return picked


def _bits(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _stretch(part: DeliveryPart) -> Stretch:
    return Stretch(part.delivery, part.begin, part.end)


def _parts(stretches: Sequence[Stretch]) -> list[DeliveryPart]:
    return [DeliveryPart(part.delivery, part.begin, part.end) for part in stretches]
