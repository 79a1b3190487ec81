"""Records what happens in a broker as one history for each subscription, and compares it with the promises.

Each subscription has a checker, which sees every event of its groups as it happens (tests/group_rules/checker.py).
The recorder checks what lies between subscriptions, or between them and the log:

- a message is gone only for a reason: deleted, purged, past a limit, or owed to no group at some time;
- a message is done as a dead letter only after its letter is stored;
- a subscription begins where its creator asked; one that was made, paused or deleted is so after a crash, too;
- what a group decides to deliver reaches its consumer, complete and as it was published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from runnel.broker.consumer_groups.consumer_group import ConsumerGroup
from runnel.formats.message import Message
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.definition import Definition, Mode
from runnel.group_rules.records import (
    AtRecord,
    FailedRecord,
    ForgottenRecord,
    PartitionAcks,
    Record,
)
from runnel.platform.clock import Clock
from runnel.topics.names import SYSTEM_MARK, TopicPartition
from runnel.topics.policies import Policies
from tests.broker.consumer_groups.simulation.recording_classes import RecordingConsumerGroup
from tests.broker.consumer_groups.simulation.stock import Stock
from tests.broker.consumer_groups.simulation.subject import Subject, is_unnamed, names
from tests.broker.consumer_groups.simulation.writer import Writer, failed_before
from tests.group_rules import history
from tests.group_rules.expectations import trail
from tests.group_rules.history import Event, place_text
from tests.simulation.history import Violation

# Costs depend on how a message is read, alone or with others; of these small ones none costs more.
COST_BYTES_MAX = 4_000

FindState = Callable[[int, str, TopicPartition], PartitionAcks | None]


class Recorder:
    """Turns what the broker does into events of each subscription, and checks them."""

    def __init__(self, policies: Policies, clock: Clock) -> None:
        self.stock = Stock(policies)
        self.clock = clock
        self._began_ns = clock.time_ns()
        self.subjects: dict[int, Subject] = {}
        self.deleted: set[int] = set()  # subscriptions: somebody was told so
        self.is_alive = True  # a process is there
        self.consumer_groups: Callable[[], Sequence[ConsumerGroup]] = list  # that the broker has
        # Where subscriptions and members begin that are being made.
        self._begins: dict[tuple[int, str], dict[TopicPartition, int]] = {}
        self.is_away: Callable[[TopicPartition], bool] = lambda key: (
            False
        )  # whether its shard is elsewhere
        self._is_noting = False
        self._lines: list[tuple[str, Event | None]] = []
        self.violation: Violation | None = None  # the first

    # --- The transcript ---

    @property
    def now_ns(self) -> int:
        return self.clock.time_ns() - self._began_ns

    def from_group(self, time_ns: int) -> int:
        """A time of the broker's monotonic clock, as histories have it."""
        return time_ns + self.clock.time_ns() - self.clock.monotonic_ns() - self._began_ns

    def from_wall(self, time_ns: int) -> int:
        return time_ns - self._began_ns

    def say(self, line: str) -> None:
        self._lines.append((f"{history.seconds(self.now_ns):>8}  {line}", None))

    def see(self, subject: Subject, event: Event) -> None:
        if not self.is_alive:
            return
        self._lines.append((f"  {subject.name:2} {event}", event))
        try:
            subject.checker.see(event)
        except Violation as violation:
            violation.args = (f"{subject.name}: {violation}",)
            self.violate(violation)

    def violate(self, violation: Violation) -> NoReturn:
        """Remembered, too: whatever of the broker it is raised through may keep it to itself."""
        self.violation = self.violation or violation
        raise violation

    def transcript(self, violation: Violation | None = None) -> list[str]:
        """All of it; lines that concern a violation are marked."""
        marked: set[int] = set()
        if violation is not None and violation.about is not None:
            for subject in self.subjects.values():
                marked |= {
                    id(event) for _, event in trail(subject.checker.history, violation.about)
                }
        return [
            f"{'>' if event is not None and id(event) in marked else ' '} {line}"
            for line, event in self._lines
        ]

    def events(self) -> list[Event]:
        return [event for _, event in self._lines if event is not None]

    # --- Messages and topics ---

    def published(self, batch: Sequence[Message]) -> None:
        """Messages have become visible, or are found after a restart."""
        if not self.is_alive:
            return
        places: dict[TopicPartition, list[Message]] = {}
        for message in batch:
            places.setdefault((message.topic, message.partition), []).append(message)
        for key, messages in places.items():
            try:
                self.stock.take(key, messages)
            except Violation as violation:
                self.violate(violation)
            for subject in self.subjects.values():
                if subject.matches(key[0]):
                    self._tell_published(subject, key, messages)

    def _tell_published(
        self, subject: Subject, key: TopicPartition, messages: Sequence[Message]
    ) -> None:
        event = history.Published(
            self.now_ns,
            place=key,
            base=messages[0].offset,
            keys=[message.key for message in messages],
            cost_bytes=COST_BYTES_MAX,
        )
        self.see(subject, event)

    def topic_made(self, name: str, partitions: int) -> None:
        self.stock.topics.add(name)
        if name.startswith(SYSTEM_MARK):
            return
        for partition in range(partitions):
            self.stock.messages.setdefault((name, partition), {})
        for subject in self.subjects.values():
            for group in subject.groups():
                self._cover(subject, group)

    def topic_deleted(self, name: str) -> None:
        """Consumer groups that cover it say so themselves."""
        self.stock.topics.discard(name)
        for subject in self.subjects.values():
            for group in subject.checker.groups:
                self.drop_topics(subject, group)

    def note_purged(self, subject: Subject, group: str, key: TopicPartition) -> None:
        """Purged messages may or may not count as owed."""
        partition = subject.partition(group, key)
        assert partition is not None
        partition.gone_below = max(partition.gone_below, self.stock.purged_below(key))

    def excuse(self, subject: Subject, group: str, key: TopicPartition) -> None:
        """A group begins with a partition, or elsewhere in it: messages that no other group was owed may be gone."""
        subject.excused[group, key] = {
            offset
            for offset in range(1, self.stock.end(key))
            if not any(
                self._holds(other, name, key, offset)
                for other in self.subjects.values()
                for name in other.checker.groups
                if (other, name) != (subject, group)
            )
        }

    def _holds(self, subject: Subject, group: str, key: TopicPartition, offset: int) -> bool:
        """Whether a group has been owed a message since it was surely there."""
        partition = subject.partition(group, key)
        return (
            partition is not None
            and partition.is_owed(offset)
            and offset not in partition.ever_done
            and offset not in subject.excused.get((group, key), ())
        )

    # --- Subscriptions ---

    def defined(self, definition: Definition) -> Subject:
        """A definition as the broker has it now."""
        subject = self.subjects.get(definition.id)
        if subject is None:
            subject = self.subjects[definition.id] = Subject(definition)
            for key, messages in self.stock.messages.items():
                if messages and subject.matches(key[0]):
                    self._tell_all_published(subject, key)
            if subject.mode is not Mode.MULTICAST:
                self._begin(subject, "")
        if definition.is_paused != subject.is_paused:
            subject.is_paused = definition.is_paused
            self.see(subject, history.Paused(self.now_ns, is_paused=definition.is_paused))
        return subject

    def _tell_all_published(self, subject: Subject, key: TopicPartition) -> None:
        messages = [self.stock.messages[key][offset] for offset in sorted(self.stock.messages[key])]
        first = messages[0].offset
        if [message.offset for message in messages] != list(range(first, first + len(messages))):
            self.violate(
                Violation(
                    f"{place_text(key)} became visible with gaps: {list(self.stock.messages[key])}"
                )
            )
        self._tell_published(subject, key, messages)

    def _begin(self, subject: Subject, group: str) -> None:
        """Where it begins was written down before it was there itself."""
        for key, floor in self._begins.pop((subject.id, group), {}).items():
            if key[0] not in self.stock.topics:
                subject.left_out.add((group, key))  # deleted meanwhile
                continue
            self.see(subject, history.Began(self.now_ns, group, place=key, floor=floor))
            self.excuse(subject, group, key)
        self._cover(subject, group)

    def forget_begin(self, subject: Subject, group: str, key: TopicPartition) -> None:
        self._begins.get((subject.id, group), {}).pop(key, None)

    def _cover(self, subject: Subject, group: str) -> None:
        """Topics made later are owed from their first message on."""
        for key in self.stock.messages:
            if (
                key[0] in self.stock.topics
                and not key[0].startswith(SYSTEM_MARK)
                and subject.matches(key[0])
                and subject.partition(group, key) is None
                and (group, key) not in subject.left_out
            ):
                floor = self._begins.get((subject.id, group), {}).pop(key, 1)
                self.see(subject, history.Began(self.now_ns, group, place=key, floor=floor))
                self.excuse(subject, group, key)
                if self.is_away(key):
                    self.see(subject, history.Parted(self.now_ns, group, place=key))

    def consumer_group_made(self, consumer_group: RecordingConsumerGroup) -> Writer:
        subject = self.defined(consumer_group.definition)
        group = consumer_group.member
        writer = Writer(self, subject, group, is_durable=consumer_group.is_durable)
        if consumer_group.is_durable:
            if group in subject.consumer_groups:
                # The former was let go: everything was written down, and is taken up exactly so.
                self.see(subject, history.Restarted(self.now_ns, group, events=None))
            self._begin(subject, group)
        subject.consumer_groups[group] = consumer_group
        return writer

    def left(self, consumer_group: RecordingConsumerGroup) -> None:
        """An unnamed member is gone, and what it was owed with it."""
        subject = self.subjects.get(consumer_group.definition.id)
        if subject is not None:
            self.forget(subject, consumer_group.member)

    def drop_topics(self, subject: Subject, group: str) -> None:
        """Topics that were deleted while no consumer group was there to be told."""
        for key in list(subject.checker.group(group).partitions):
            if key[0] not in self.stock.topics and not self._covers(subject, group, key):
                self.see(subject, history.Removed(self.now_ns, group, place=key))
                subject.left_out.add((group, key))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A consumer group writes down what its group has told."""
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False

    def noted(self, record: Record) -> None:
        """Something else is written down."""
        if self._is_noting or not self.is_alive:
            return
        subject = self.subjects.get(record.subscription)
        match record:
            case AtRecord(member=member, topic=topic, partition=partition, floor=floor):
                key = (topic, partition)
                is_known = subject is not None and subject.partition(member, key) is not None
                if subject is not None and not is_known and (member, key) in subject.left_out:
                    return  # deleted once: how it stands is told when it is taken up
                if subject is None or not is_known:
                    self._begins.setdefault((record.subscription, member), {})[key] = floor
                    return
                self._begins.get((record.subscription, member), {}).pop(key, None)
                if not self._covers(subject, member, key):
                    self.see(subject, history.Moved(self.now_ns, member, place=key, floor=floor))
                    self.excuse(subject, member, key)
            case FailedRecord(member=member, topic=topic, partition=partition, offset=offset):
                key = (topic, partition)
                if subject is not None and subject.partition(member, key) is not None:
                    event = history.Reopened(
                        self.now_ns, member, place=key, offset=offset, is_forgiven=True
                    )
                    self.see(subject, event)
                    self.excuse(subject, member, key)
            case ForgottenRecord(member=None) if subject is not None:
                self.retire(subject)
            case ForgottenRecord(member=str(member)) if subject is not None:
                self.forget(subject, member)

    def defined_now(self, definitions: Sequence[Definition]) -> None:
        """All of them; one that is no more was deleted by somebody who may have left before it was."""
        found = {definition.id for definition in definitions}
        for subject in list(self.subjects.values()):
            if subject.may_be_deleted and subject.id not in found:
                self.retire(subject)
        for definition in definitions:
            if definition.id not in self.subjects:
                continue
            subject = self.defined(definition)
            if subject.mode is Mode.MULTICAST:
                for group in set(subject.groups()) - names(definition):
                    self.forget(subject, group)

    def _covers(self, subject: Subject, group: str, key: TopicPartition) -> bool:
        consumer_group = subject.consumer_groups.get(group)
        return (
            consumer_group is not None
            and consumer_group in self.consumer_groups()
            and consumer_group.covers(key)
        )

    def retire(self, subject: Subject) -> None:
        """It was deleted."""
        for group in list(subject.checker.groups):
            self.forget(subject, group)
        self.subjects.pop(subject.id, None)

    def forget(self, subject: Subject, group: str) -> None:
        self.see(subject, history.Forgotten(self.now_ns, group))
        subject.members.discard(group)
        consumer_group = subject.consumer_groups.pop(group, None)
        if consumer_group is not None:
            consumer_group.fall_silent()
        subject.left_out = {each for each in subject.left_out if each[0] != group}
        subject.excused = {
            each: offsets for each, offsets in subject.excused.items() if each[0] != group
        }

    # --- Shards that go and come ---

    def _in_shard(
        self, is_in: Callable[[TopicPartition], bool]
    ) -> Iterator[tuple[Subject, str, TopicPartition]]:
        for subject in self.subjects.values():
            for group in subject.checker.groups:
                for key in list(subject.checker.group(group).partitions):
                    if is_in(key):
                        yield subject, group, key

    def shard_goes(self, is_in: Callable[[TopicPartition], bool], *, loses_nothing: bool) -> None:
        """The groups that are in memory have said so; others wait for it, too."""
        for subject, group, key in self._in_shard(is_in):
            if not (loses_nothing or is_unnamed(group)):
                subject.inexact.add((group, key))
            partition = subject.partition(group, key)
            if partition is not None and not partition.is_away:
                self.see(subject, history.Parted(self.now_ns, group, place=key))

    def shard_comes(self, is_in: Callable[[TopicPartition], bool], state: FindState) -> None:
        """How things stand is told of groups that have not taken it up themselves."""
        for subject, group, key in self._in_shard(is_in):
            if not (is_unnamed(group) or self._covers(subject, group, key)):
                is_exact = (group, key) not in subject.inexact
                subject.inexact.discard((group, key))
                stored = state(subject.id, group, key)
                self._recover(subject, group, key, stored, is_exact=is_exact)

    # --- Processes ---

    def all_is_stored(self) -> None:
        """The broker has closed without complaint."""
        for subject in self.subjects.values():
            self.see(subject, history.Stored(self.now_ns, events=subject.checker.number))

    def process_ends(self) -> None:
        """Nothing that is still said means anything."""
        self.is_alive = False
        self.stock.nobody_answers()

    def process_begins(self, clock: Clock, topics: Mapping[str, int]) -> None:
        """Another broker has been opened on what is left; these topics are there, with so many partitions."""
        self.clock = clock
        self.is_alive = True
        self.stock.topics = set(topics)
        for topic, partitions in topics.items():
            for partition in range(partitions):
                if not topic.startswith(SYSTEM_MARK):
                    self.stock.messages.setdefault((topic, partition), {})
        for subject in list(self.subjects.values()):
            subject.consumer_groups.clear()
            subject.inexact.clear()
            for group in filter(is_unnamed, list(subject.checker.groups)):
                self.forget(subject, group)
            self.see(subject, history.Restarted(self.now_ns, events=None))

    def take_up(self, definitions: Sequence[Definition], state: FindState) -> None:
        """What subscriptions the new broker knows: those that it has to, as they have to be."""
        found = {definition.id: definition for definition in definitions}
        if found.keys() & self.deleted:
            self.violate(Violation(f"deleted, and there again: {found.keys() & self.deleted}"))
        for subject in list(self.subjects.values()):
            definition = found.get(subject.id)
            if definition is None:
                if subject.is_made and not subject.may_be_deleted:
                    self.violate(Violation(f"subscription {subject.name} is lost"))
                self.retire(subject)
                continue
            if subject.is_made and definition.is_paused not in (
                subject.is_paused,
                *subject.pausing,
            ):
                self.violate(
                    Violation(f"subscription {subject.name} has forgotten whether it is paused")
                )
            subject.pausing.clear()
            subject.may_be_deleted = False
            members = names(definition)
            if subject.members - members:
                self.violate(
                    Violation(f"{subject.name} has lost members: {subject.members - members}")
                )
            for group in subject.groups():
                if subject.mode is Mode.MULTICAST and group not in members:
                    self.forget(subject, group)
                else:
                    self.drop_topics(subject, group)
                    self._cover(subject, group)
        self._begins = {
            (id_, member): begins
            for (id_, member), begins in self._begins.items()
            if id_ in found and (not member or member in names(found[id_]))
        }
        for definition in definitions:
            subject = self.defined(definition)
            for member in definition.members:
                self._begin(subject, member.name)
            for group in subject.groups():
                for key in subject.checker.group(group).partitions:
                    self._recover(subject, group, key, state(subject.id, group, key))

    def _recover(
        self,
        subject: Subject,
        group: str,
        key: TopicPartition,
        state: PartitionAcks | None,
        *,
        is_exact: bool = False,
    ) -> None:
        if state is None:
            state = PartitionAcks(AckSet(1), {})
        self.note_purged(subject, group, key)
        floor, done = state.acked.snapshot()
        failed = failed_before(key, state.failures, self.from_wall)
        recovered = history.Recovered(
            self.now_ns,
            group,
            place=key,
            floor=floor,
            done=done,
            failed=failed,
            is_exact=is_exact,
        )
        self.see(subject, recovered)
