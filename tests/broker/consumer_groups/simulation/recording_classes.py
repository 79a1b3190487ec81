"""Consumer groups, their rules and their stored state, each as a subclass that records what it does.

A broker that is opened within `watched(recorder)` is the real one, except for these subclasses. They work as usual and
report to the recorder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import runnel.broker.broker as broker_module
import runnel.broker.consumer_groups.ack_journals as state_module
import runnel.broker.consumer_groups.consumer_group as consumer_group_module
import runnel.broker.consumer_groups.subscriptions as subscriptions_module
from runnel.broker.consumer_groups.ack_journals import ShardAckJournal
from runnel.broker.consumer_groups.consumer_group import ConsumerGroup
from runnel.broker.consumer_groups.consumer_groups import ConsumerGroups
from runnel.broker.stores import owned_shard
from runnel.errors import MovedError, RunnelError
from runnel.formats.batch import Batch
from runnel.formats.work_heads import DeliveryPart, Picked
from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.awaited_holders import AwaitedHolders
from runnel.group_rules.definition import Definition
from runnel.group_rules.effects import DeadLetter, Effects, Failure, LeasedDelivery, Want
from runnel.group_rules.group import Group
from runnel.group_rules.records import PartitionAcks, Record
from runnel.log.log import LogTopic, VisibleBatch
from runnel.topics.names import TopicPartition
from tests.group_rules import history
from tests.group_rules.history import Stretch

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.recorder import Recorder
    from tests.broker.consumer_groups.simulation.writer import Writer


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """Brokers that are at work meanwhile tell the recorder everything."""
    places: Sequence[tuple[Any, str, Any]] = (
        (broker_module, "ConsumerGroups", partial(RecordingWork, recorder)),
        (subscriptions_module, "ConsumerGroup", partial(RecordingConsumerGroup, recorder)),
        (consumer_group_module, "Group", RecordingGroup),
        (state_module, "ShardAckJournal", partial(RecordingShardState, recorder)),
    )
    former = [getattr(module, name) for module, name, _ in places]
    for module, name, watching in places:
        setattr(module, name, watching)
    try:
        yield
    finally:
        for (module, name, _), value in zip(places, former, strict=True):
            setattr(module, name, value)


class RecordingWork(ConsumerGroups):
    """Reports messages and topics before the other listeners get them."""

    def __init__(self, recorder: Recorder, *parts: Any) -> None:
        self._recorder = recorder
        recorder.consumer_groups = self.consumer_groups
        super().__init__(*parts)

    def on_stored(self, stored: VisibleBatch) -> None:
        self._recorder.published(Batch(stored.envelope, stored.body).messages())
        super().on_stored(stored)

    def on_topic_made(self, info: LogTopic) -> None:
        self._recorder.topic_made(info.name, len(info.shards))
        self._note_floors(info)
        super().on_topic_made(info)

    def _note_floors(self, info: LogTopic) -> None:
        """A deletion also hides what is being stored: only the log knows up to where."""
        stores = self._subscriptions._parts.stores
        for partition in range(len(info.shards)):
            key = (info.name, partition)
            with suppress(MovedError):
                floor = owned_shard(stores.existing(info.name), key).floor(*key)
                self._recorder.stock.hidden_below(key, floor)

    def on_topic_deleted(self, name: str) -> None:
        self._recorder.topic_deleted(name)
        super().on_topic_deleted(name)

    def definitions(self) -> list[Definition]:
        return [subscription.definition for subscription in self._subscriptions.all()]

    def stored_state(
        self, subscription: int, member: str, key: TopicPartition
    ) -> PartitionAcks | None:
        """As a group takes it up: what the log hides is not owed."""
        parts = self._subscriptions._parts
        state = parts.state.find(subscription, member, key)
        floor = owned_shard(parts.stores.existing(key[0]), key).floor(*key)
        if state is None or floor == 1:
            return state
        acked = state.acked.copy()
        acked.add(1, floor)
        return PartitionAcks(acked, {o: each for o, each in state.failures.items() if o >= floor})

    @property
    def is_busy(self) -> bool:
        """Whether a request is not done yet; its caller may have left."""
        return bool(self._verbs) or bool(self._subscriptions._parts.tasks)

    @property
    def dead_keepers(self) -> list[str]:
        """Those that should be at work as long as the broker is."""
        return [str(keeper) for keeper in self._keepers if keeper.done()]

    @property
    def consumer_groups_awake(self) -> int:
        return len(self._subscriptions._active)

    def consumer_groups(self) -> list[ConsumerGroup]:
        return [
            consumer_group
            for each in self._subscriptions.all()
            for consumer_group in each.consumer_groups.values()
        ]


class RecordingConsumerGroup(ConsumerGroup):
    """Says when it begins and ends, when its subscription is paused, and what it notes by itself."""

    def __init__(
        self, recorder: Recorder, definition: Definition, member: str, *parts: Any, **options: Any
    ) -> None:
        super().__init__(definition, member, *parts, **options)
        self._recorder = recorder
        assert isinstance(self.group, RecordingGroup)
        self.group.writer = recorder.consumer_group_made(self)

    def redefine(self, definition: Definition) -> None:
        self._recorder.defined(definition)
        super().redefine(definition)

    def leave(self, consumer_id: int, *, is_clean: bool) -> bool:
        was_there = super().leave(consumer_id, is_clean=is_clean)
        if not self.is_durable and not self.consumers:
            self._recorder.left(self)
        return was_there

    def end(self, error: RunnelError) -> None:
        super().end(error)
        self.fall_silent()

    def fall_silent(self) -> None:
        """Nothing is owed to it any more, and nothing it says counts."""
        assert isinstance(self.group, RecordingGroup)
        self.group.writer = None

    def release(self, journal: ShardAckJournal, *, is_planned: bool) -> None:
        assert isinstance(self.group, RecordingGroup)
        self.group.is_parting = True
        try:
            super().release(journal, is_planned=is_planned)
        finally:
            self.group.is_parting = False

    def _settle_dead_letter(
        self, dead_letter: DeadLetter, journal: ShardAckJournal, *, is_stored: bool
    ) -> None:
        super()._settle_dead_letter(dead_letter, journal, is_stored=is_stored)
        assert isinstance(self.group, RecordingGroup)
        writer = self.group.writer
        is_told = dead_letter.key in self._shards or not journal.is_being_released
        if is_stored and not is_told and writer is not None:
            key, offset = dead_letter.key, dead_letter.offset
            told = history.Told(acked=[(key, offset, offset + 1)])
            writer.see(
                history.DeadLetterSettled, place=key, offset=offset, is_stored=True, told=told
            )

    def covers(self, key: TopicPartition) -> bool:
        return key in self._shards

    @property
    def is_busy(self) -> bool:
        """Whether the group continues by itself, without a request."""
        return self._is_reading or self._is_turn_due or bool(self._letters_under_way)

    def _note(self, effects: Effects) -> None:
        with self._recorder.noting():
            super()._note(effects)


class RecordingShardState(ShardAckJournal):
    """Reports what is stored beside consumer groups: where subscriptions begin, move and end."""

    def __init__(self, recorder: Recorder, *parts: Any) -> None:
        self._recorder = recorder
        super().__init__(*parts)

    def note(self, record: Record) -> None:
        self._recorder.noted(record)
        super().note(record)


class RecordingGroup(Group):
    """Every call is an event, told as soon as the group has answered."""

    writer: Writer | None = None
    is_parting = False  # with the shard of its partitions

    def _tell(self, effects: Effects, make: Any, **fields: Any) -> Effects:
        if self.writer is not None:
            self.writer.told(effects, make, **fields)
        return effects

    def _see(self, make: Any, **fields: Any) -> None:
        if self.writer is not None:
            self.writer.see(make, **fields)

    # --- Partitions ---

    def add_partition(
        self,
        key: TopicPartition,
        acked: AckSet,
        failures: Mapping[int, Failure] = {},
        *,
        now_ns: int,
        awaited: AwaitedHolders | None = None,
    ) -> None:
        if self.writer is not None:
            self.writer.taken_up(key, acked, failures)
        super().add_partition(key, acked, failures, now_ns=now_ns, awaited=awaited)

    def remove_partition(self, key: TopicPartition) -> Effects:
        if key not in self._partitions:
            return super().remove_partition(key)
        make = history.Parted if self.is_parting else history.Removed
        return self._tell(super().remove_partition(key), make, place=key)

    def reset_partition(self, key: TopicPartition, floor: int) -> Effects:
        if key not in self._partitions:
            return super().reset_partition(key, floor)
        writer, self.writer = (
            self.writer,
            None,
        )  # it removes the partition on the way, and that is not told
        try:
            effects = super().reset_partition(key, floor)
        finally:
            self.writer = writer
        return self._tell(effects, history.Moved, place=key, floor=floor)

    def reopen(self, key: TopicPartition, offset: int) -> Effects:
        return self._tell(super().reopen(key, offset), history.Reopened, place=key, offset=offset)

    def gone(self, key: TopicPartition, begin: int, end: int) -> Effects:
        if self.writer is not None:
            self.writer.about_to_go(key, begin, end)
        effects = super().gone(key, begin, end)
        return self._tell(effects, history.Gone, place=key, begin=begin, end=end)

    # --- Consumers ---

    def join(self, consumer: int, *, window_messages: int, window_bytes: int) -> None:
        super().join(consumer, window_messages=window_messages, window_bytes=window_bytes)
        self._see(
            history.Joined,
            consumer=consumer,
            window_messages=window_messages,
            window_bytes=window_bytes,
        )

    def resize(self, consumer: int, *, window_messages: int, window_bytes: int) -> None:
        super().resize(consumer, window_messages=window_messages, window_bytes=window_bytes)
        self._see(
            history.Resized,
            consumer=consumer,
            window_messages=window_messages,
            window_bytes=window_bytes,
        )

    def leave(self, consumer: int, now_ns: int, *, is_clean: bool) -> Effects:
        effects = super().leave(consumer, now_ns, is_clean=is_clean)
        return self._tell(effects, history.Left, consumer=consumer, is_clean=is_clean)

    # --- Delivering ---

    def next_want(self, now_ns: int) -> Want | None:
        want = super().next_want(now_ns)
        if want is not None:
            self._see(history.Wanted, place=want.key, begin=want.begin, end=want.end)
        return want

    def offer(
        self,
        key: TopicPartition,
        base: int,
        count: int,
        size_bytes: int,
        now_ns: int,
        row_keys: Sequence[bytes | None] | None = None,
    ) -> list[LeasedDelivery]:
        deliveries = super().offer(key, base, count, size_bytes, now_ns, row_keys)
        if self.writer is not None:
            for delivery in deliveries:
                self.writer.delivered(delivery, cost_bytes=-(-size_bytes // count))
        return deliveries

    # --- What consumers say ---

    def ack(
        self,
        consumer: int,
        deliveries: Sequence[int],
        parts: Sequence[DeliveryPart],
        now_ns: int,
        picked: Sequence[Picked] = (),
    ) -> Effects:
        effects = super().ack(consumer, deliveries, parts, now_ns, picked)
        return self._tell(
            effects,
            history.Acked,
            consumer=consumer,
            deliveries=deliveries,
            parts=[*map(stretch, parts), *(piece for part in picked for piece in _pieces(part))],
        )

    def ack_up_to(self, consumer: int, key: TopicPartition, offset: int, now_ns: int) -> Effects:
        effects = super().ack_up_to(consumer, key, offset, now_ns)
        return self._tell(effects, history.AckedUpTo, consumer=consumer, place=key, offset=offset)

    def nack(
        self,
        consumer: int,
        parts: Sequence[DeliveryPart],
        now_ns: int,
        *,
        delay_ns: int | None,
        reason: str,
    ) -> Effects:
        effects = super().nack(consumer, parts, now_ns, delay_ns=delay_ns, reason=reason)
        return self._tell(
            effects,
            history.Nacked,
            consumer=consumer,
            parts=[*map(stretch, parts)],
            delay_ns=delay_ns,
        )

    def give_back(self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int) -> Effects:
        effects = super().give_back(consumer, parts, now_ns)
        return self._tell(
            effects, history.Returned, consumer=consumer, parts=[*map(stretch, parts)]
        )

    def renew(
        self,
        consumer: int,
        deliveries: Sequence[int],
        now_ns: int,
        *,
        lease_ns: int | None = None,
    ) -> None:
        super().renew(consumer, deliveries, now_ns, lease_ns=lease_ns)
        self._see(history.Renewed, consumer=consumer, deliveries=deliveries, lease_ns=lease_ns)

    def recalled(self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int) -> Effects:
        effects = super().recalled(consumer, parts, now_ns)
        return self._tell(
            effects, history.GaveBack, consumer=consumer, parts=[*map(stretch, parts)]
        )

    # --- Dead letters, time ---

    def dead_letter_stored(self, key: TopicPartition, offset: int, now_ns: int) -> Effects:
        if self.writer is not None:
            self.writer.about_to_be_buried(key, offset)
        effects = super().dead_letter_stored(key, offset, now_ns)
        return self._tell(
            effects, history.DeadLetterSettled, place=key, offset=offset, is_stored=True
        )

    def dead_letter_failed(self, key: TopicPartition, offset: int, now_ns: int) -> Effects:
        effects = super().dead_letter_failed(key, offset, now_ns)
        return self._tell(
            effects, history.DeadLetterSettled, place=key, offset=offset, is_stored=False
        )

    def expire(self, now_ns: int) -> Effects:
        return self._tell(super().expire(now_ns), history.Expired)


def stretch(part: DeliveryPart) -> Stretch:
    return Stretch(part.delivery, part.begin, part.end)


def _pieces(picked: Picked) -> list[Stretch]:
    mask = int.from_bytes(picked.bits, "little")
    return [Stretch(picked.delivery, begin, end) for begin, end in masks.runs(picked.begin, mask)]
