"""Deliberate mistakes in the broker's consumer groups, which histories must find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from msgspec import structs

from runnel.broker.consumer_groups import group_holds
from runnel.broker.consumer_groups.ack_journals import AckJournals, ShardAckJournal
from runnel.broker.consumer_groups.consumer import WorkConsumer
from runnel.broker.consumer_groups.consumer_group import ConsumerGroup
from runnel.broker.consumer_groups.dead_letter_queues import DeadLetterQueues
from runnel.broker.consumer_groups.dead_letter_writer import DeadLetterWriter
from runnel.broker.consumer_groups.group_holds import GroupHolds
from runnel.broker.consumer_groups.run_cache import RunCache, StoredRun
from runnel.broker.consumer_groups.subscriptions import WorkSubscriptions
from runnel.broker.consumer_groups.timer_queue import TimerQueue
from runnel.config import Pin, Retain, Rotate, Until
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.effects import Effects, Failure
from runnel.group_rules.records import Record
from runnel.log.log import OwnedShard
from runnel.log.metadata.state_journal import StateJournal
from runnel.topics.names import TopicPartition
from tests.broker.consumer_groups.simulation.plan import Plan
from tests.simulation.mutants import Mutant

Patch = pytest.MonkeyPatch


# --- What is stored ---


def acks_are_said_to_be_stored_before_they_are(patch: Patch) -> None:
    async def at_once(consumer: WorkConsumer) -> None:
        return None

    patch.setattr(WorkConsumer, "wait_stored", at_once)


def notes_are_lost_when_a_write_fails(patch: Patch) -> None:
    written = ShardAckJournal._written

    def forgetful(state: ShardAckJournal, notes: list[Record], done: asyncio.Future[None]) -> None:
        written(state, [] if done.exception() else notes, done)

    patch.setattr(ShardAckJournal, "_written", forgetful)


def snapshots_are_made_of_what_was_there_at_first(patch: Patch) -> None:
    """What has come since the start is not in them."""
    init = ShardAckJournal.__init__

    def old(state: ShardAckJournal, *parts: Any) -> None:
        init(state, *parts)
        known = list(state._snapshot())
        parts[0].state.snapshot = lambda: known

    patch.setattr(ShardAckJournal, "__init__", old)


def begins_are_not_written_down(patch: Patch) -> None:
    patch.setattr(WorkSubscriptions, "_note_begins", lambda *arguments: None)


def moves_are_not_written_down(patch: Patch) -> None:
    move = WorkSubscriptions.move

    async def only_in_memory(subscriptions: WorkSubscriptions, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(WorkSubscriptions, "_note_begins", lambda *arguments: None)
            await move(subscriptions, *arguments)

    patch.setattr(WorkSubscriptions, "move", only_in_memory)


def restarts_forget_failures(patch: Patch) -> None:
    stored_state = ConsumerGroup._stored_state

    def forgetful(
        consumer_group: ConsumerGroup, key: TopicPartition, floor: int
    ) -> tuple[AckSet, dict[int, Failure]]:
        return stored_state(consumer_group, key, floor)[0], {}

    patch.setattr(ConsumerGroup, "_stored_state", forgetful)


def state_is_found_damaged(patch: Patch) -> None:
    """The last content of a state journal is passed over when it is read."""
    read = StateJournal.open

    def careless(journal: StateJournal) -> Any:
        loaded = read(journal)
        journal.contents = journal.contents[:-1]
        return loaded

    patch.setattr(StateJournal, "open", careless)


# --- Dead letters ---


def messages_are_done_before_their_letters_are_stored(patch: Patch) -> None:
    write = DeadLetterWriter.write

    async def hasty(*arguments: Any) -> bool:
        task = asyncio.get_running_loop().create_task(write(*arguments))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return True

    patch.setattr(DeadLetterWriter, "write", hasty)


def letters_that_could_not_be_stored_count_as_stored(patch: Patch) -> None:
    write = DeadLetterWriter.write

    async def careless(*arguments: Any) -> bool:
        await write(*arguments)
        return True

    patch.setattr(DeadLetterWriter, "write", careless)


def settled_letters_are_not_written_down(patch: Patch) -> None:
    settle = DeadLetterQueues._settle

    async def forgetful(letters: DeadLetterQueues, *arguments: Any, **options: Any) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ShardAckJournal, "note_acked", lambda *arguments: None)
            return await settle(letters, *arguments, **options)

    patch.setattr(DeadLetterQueues, "_settle", forgetful)


# --- Retention ---


def holds_free_what_is_owed(patch: Patch) -> None:
    """One subscription's acknowledgement is enough."""
    owed = GroupHolds.owed

    def hasty(
        holds: GroupHolds, key: TopicPartition, begin: int, end: int
    ) -> Sequence[tuple[int, int]] | None:
        covering = WorkSubscriptions.covering
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                WorkSubscriptions, "covering", lambda all_, topic: covering(all_, topic)[:1]
            )
            return owed(holds, key, begin, end)

    patch.setattr(GroupHolds, "owed", hasty)


def topics_made_later_are_nobodys(patch: Patch) -> None:
    """Where nothing is written down yet, nothing is held."""
    acked = group_holds._acked

    def hasty(state: AckJournals, subscription: Any, key: TopicPartition) -> Any:
        for each in acked(state, subscription, key):
            yield AckSet(2**40) if each == AckSet(1) else each

    patch.setattr(group_holds, "_acked", hasty)


# --- Delivering ---


def clocks_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(TimerQueue, "_fire", lambda timers: None)


def topics_made_later_do_not_join(patch: Patch) -> None:
    patch.setattr(WorkSubscriptions, "on_topic_made", lambda subscriptions, info: None)


def what_is_stored_is_told_to_nobody(patch: Patch) -> None:
    patch.setattr(WorkSubscriptions, "on_stored", lambda subscriptions, stored: None)


def pausing_is_forgotten_by_the_consumer_group(patch: Patch) -> None:
    patch.setattr(ConsumerGroup, "redefine", lambda consumer_group, definition: None)


def rows_are_cut_from_the_wrong_end(patch: Patch) -> None:
    block_of = StoredRun.block_of

    def shifted(run: StoredRun, begin: int, mask: int) -> Any:
        return block_of(run, begin, mask if mask & 1 else mask >> 1)

    patch.setattr(StoredRun, "block_of", shifted)


def purged_messages_are_still_delivered(patch: Patch) -> None:
    """As long as they are in memory; and what is deleted with its topic comes again with it."""
    patch.setattr(RunCache, "forget", lambda run_cache, topic: None)


def recalls_reach_nobody(patch: Patch) -> None:
    apply = ConsumerGroup._apply

    def quiet(consumer_group: ConsumerGroup, effects: Effects) -> Any:
        effects.recalls.clear()
        return apply(consumer_group, effects)

    patch.setattr(ConsumerGroup, "_apply", quiet)


# --- Shards that go and come ---


def groups_acknowledge_into_a_lost_shard(patch: Patch) -> None:
    """They keep its partitions, with leases and all."""
    patch.setattr(ConsumerGroup, "release", lambda consumer_group, journal, is_planned: None)
    patch.setattr(ShardAckJournal, "end", lambda journal: False)


def shards_are_released_before_acknowledgements_are_stored(patch: Patch) -> None:
    async def at_once(journal: ShardAckJournal) -> None:
        return None

    patch.setattr(ShardAckJournal, "leave", at_once)


def shards_that_come_back_are_not_covered(patch: Patch) -> None:
    async def nothing(subscriptions: WorkSubscriptions, shard: OwnedShard) -> None:
        return None

    patch.setattr(WorkSubscriptions, "_cover", nothing)


def acknowledgements_in_an_ending_term_are_taken(patch: Patch) -> None:
    """While a planned release stores what was acknowledged, groups continue as if nothing had begun."""
    patch.setattr(WorkSubscriptions, "_drop", lambda subscriptions, journal, is_planned: None)


# --- A plan in which a rare mistake shows before long ---


def _acknowledged_messages_go_at_once(plan: Plan) -> Plan:
    """And several subscriptions are over the same topics."""
    rules = [
        structs.replace(
            rule, rotate=Rotate(bytes_max=1), retain=Retain(until=Until.ACKED), pin=Pin(age_ns=None)
        )
        for rule in plan.settings.topics
    ]
    first = plan.subscriptions[0]
    return replace(
        plan,
        settings=structs.replace(plan.settings, topics=tuple(rules)),
        subscriptions=(first, replace(first, name="twin")),
    )


CHANGES: Final[dict[Mutant, Callable[[Plan], Plan]]] = {
    holds_free_what_is_owed: _acknowledged_messages_go_at_once,
}

MUTANTS: Final[tuple[Mutant, ...]] = (
    acks_are_said_to_be_stored_before_they_are,
    notes_are_lost_when_a_write_fails,
    snapshots_are_made_of_what_was_there_at_first,
    begins_are_not_written_down,
    moves_are_not_written_down,
    restarts_forget_failures,
    state_is_found_damaged,
    messages_are_done_before_their_letters_are_stored,
    letters_that_could_not_be_stored_count_as_stored,
    settled_letters_are_not_written_down,
    holds_free_what_is_owed,
    topics_made_later_are_nobodys,
    clocks_are_not_looked_at,
    topics_made_later_do_not_join,
    what_is_stored_is_told_to_nobody,
    pausing_is_forgotten_by_the_consumer_group,
    rows_are_cut_from_the_wrong_end,
    purged_messages_are_still_delivered,
    recalls_reach_nobody,
    groups_acknowledge_into_a_lost_shard,
    shards_are_released_before_acknowledgements_are_stored,
    shards_that_come_back_are_not_covered,
    acknowledgements_in_an_ending_term_are_taken,
)

# Seeds that show mutants which are rare.
SHOWN_BY: Final[dict[Mutant, int]] = {
    notes_are_lost_when_a_write_fails: 58,
    settled_letters_are_not_written_down: 26,
    shards_are_released_before_acknowledgements_are_stored: 192,
}
