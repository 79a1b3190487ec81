"""Records what one group does, and checks each event at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.effects import Effects, Failure, LeasedDelivery
from runnel.topics.names import TopicPartition
from tests.broker.consumer_groups.simulation.recording_classes import stretch
from tests.broker.consumer_groups.simulation.subject import Subject
from tests.group_rules import history
from tests.group_rules.facts import PartitionFacts
from tests.group_rules.history import Stretch, Told, message_text, place_text
from tests.group_rules.stage import offsets_of
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.recorder import Recorder


class Writer:
    """Writes down what one group does. Its group's clock is the broker's."""

    def __init__(
        self, recorder: Recorder, subject: Subject, group: str, *, is_durable: bool
    ) -> None:
        self._recorder = recorder
        self.subject = subject
        self.group = group
        self._is_durable = is_durable
        # Decided, and not with the consumer yet: that takes no time at all.
        self.on_way: dict[int, history.Delivered] = {}
        self.recalls_on_way: set[tuple[int, Stretch]] = set()
        self.expiries_on_way: set[tuple[int, int]] = set()  # consumer, delivery

    def see(self, make: Any, **fields: Any) -> None:
        self._recorder.see(self.subject, make(self._recorder.now_ns, self.group, **fields))

    def told(self, effects: Effects, make: Any, **fields: Any) -> None:
        from_group = self._recorder.from_group
        told = Told(
            late=[stretch(part) for part in effects.late],
            recalls=[
                history.Recall(consumer_id, stretch(part)) for consumer_id, part in effects.recalls
            ],
            dead_letters=[
                history.GivenUp(b.key, b.offset, b.failures) for b in effects.dead_letters
            ],
            failed=[
                history.Failure(key, offset, failures, from_group(until), from_group(first))
                for key, offset, failures, until, first, _ in effects.failed
                if failures  # 0: owed again, which is for the journal
            ],
            acked=[
                *effects.acked,
                *(
                    (key, begin, end)
                    for key, base, mask in effects.picked
                    for begin, end in masks.runs(base, mask)
                ),
            ],
            expired=effects.expired,
        )
        self.see(make, told=told, **fields)
        self.expiries_on_way |= set(effects.expired)
        self.recalls_on_way |= {(recall.consumer, recall.stretch) for recall in told.recalls}
        if make in (history.Moved, history.Reopened):
            self._recorder.excuse(self.subject, self.group, fields["place"])
        if make is history.Removed:
            self.subject.left_out.add((self.group, fields["place"]))

    def taken_up(self, key: TopicPartition, acked: AckSet, failures: Mapping[int, Failure]) -> None:
        """A partition comes to the group, with what was written down of it."""
        recorder, subject = self._recorder, self.subject
        floor, done = acked.snapshot()
        end = recorder.stock.end(key)
        is_behind = floor > end and not recorder.stock.was_hidden(key[0])
        if is_behind or any(stop > end for _, stop in done):
            self._recorder.violate(
                Violation(
                    f"{subject.name} takes up {place_text(key)} as done behind its end at {end}: "
                    f"{floor}, {done}"
                )
            )
        failed = failed_before(key, failures, recorder.from_group)
        is_known = subject.partition(self.group, key) is not None
        fields: dict[str, Any] = {"place": key, "floor": floor, "done": done, "failed": failed}
        if not is_known:
            if self._is_durable and (self.group, key) not in subject.left_out:
                self._recorder.violate(
                    Violation(f"{subject.name} covers {place_text(key)}, and nobody knows why")
                )
            self.see(history.Began, is_again=self._is_durable, **fields)
            subject.left_out.discard((self.group, key))
            recorder.forget_begin(subject, self.group, key)
            recorder.excuse(subject, self.group, key)
        else:
            recorder.note_purged(subject, self.group, key)
            is_exact = (self.group, key) not in subject.inexact
            subject.inexact.discard((self.group, key))
            self.see(history.Recovered, is_exact=is_exact, **fields)

    def about_to_go(self, key: TopicPartition, begin: int, end: int) -> None:
        """The broker says that these will never come: that has to be so."""
        partition = self.subject.partition(self.group, key)
        if partition is None:
            return
        for offset in range(begin, min(end, partition.log.end)):
            if partition.is_owed(offset) and not self._may_be_gone(partition, key, offset):
                self._recorder.violate(
                    Violation(
                        f"{self.subject.name}: {message_text(key, offset)} is owed, and gone for no "
                        "reason",
                        (key, {offset}),
                    )
                )

    def _may_be_gone(self, partition: PartitionFacts, key: TopicPartition, offset: int) -> bool:
        if self._recorder.stock.may_be_gone(key, offset):
            return True
        if not self._recorder.stock.goes_when_acked(key[0]):
            return False
        excused = self.subject.excused.get((self.group, key), set())
        return offset in partition.ever_done or offset in excused

    def about_to_be_buried(self, key: TopicPartition, offset: int) -> None:
        """The broker says that the letter is stored: it is, or there is no message to write one of."""
        if (self.subject.name, key, offset) in self._recorder.stock.letters:
            return
        partition = self.subject.partition(self.group, key)
        if partition is None or not partition.is_owed(offset):
            return
        if not self._may_be_gone(partition, key, offset):
            self._recorder.violate(
                Violation(
                    f"{self.subject.name}: {message_text(key, offset)} is done, and has no dead letter",
                    (key, {offset}),
                )
            )

    def delivered(self, delivery: LeasedDelivery, *, cost_bytes: int) -> None:
        from_group = self._recorder.from_group
        event = history.Delivered(
            self._recorder.now_ns,
            self.group,
            consumer=delivery.consumer,
            delivery=delivery.id,
            place=delivery.key,
            offsets=offsets_of(delivery),
            size_bytes=delivery.size_bytes,
            deadline_ns=from_group(delivery.deadline_ns),
            attempts=[
                history.Attempt(offset, failures, from_group(first_ns))
                for offset, failures, first_ns in delivery.attempts
            ],
            cost_bytes=cost_bytes,
        )
        self.on_way[delivery.id] = event
        self._recorder.see(self.subject, event)


def failed_before(
    key: TopicPartition, failures: Mapping[int, Failure], told: Callable[[int], int]
) -> list[history.Failure]:
    return [
        history.Failure(
            key,
            offset,
            failure.failures,
            told(failure.not_before_ns),
            told(failure.first_delivery_ns),
        )
        for offset, failure in failures.items()
    ]
