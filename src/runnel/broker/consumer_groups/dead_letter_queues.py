"""Lists and settles open dead letters: those that were neither sent back nor dropped yet.

Settled dead letters are stored like acknowledgements, under an owner that no subscription can be. After a dead letter
is sent back, only its subscription, or the member that gave the message up, is owed the message again. If the log has
lost the message since, its copy is published anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from runnel.broker.consumer_groups.ack_journals import AckJournals
from runnel.broker.consumer_groups.dead_letter_writer import DeadLetterWriter, dead_topic
from runnel.broker.consumer_groups.errands import SEND_BACK, Errand, Errands
from runnel.broker.consumer_groups.run_reader import read_runs
from runnel.broker.consumer_groups.subscriptions import WorkSubscription, WorkSubscriptions
from runnel.broker.stores import Stores, owned_shard
from runnel.errors import ClientFault, MovedError, UnknownSubscriptionError
from runnel.formats.batch import Batch
from runnel.formats.dead_letters import (
    LETTER_TAGS,
    MEMBER_TAG,
    OFFSET_TAG,
    PARTITION_TAG,
    TOPIC_TAG,
)
from runnel.formats.message import Message
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.records import FailedRecord
from runnel.log.log import Store
from runnel.platform.workers import Workers
from runnel.topics.names import SYSTEM_MARK, TopicPartition, check_topic

# Dead letters outlive their subscription, and so does the record of which are settled.
_OWNER: Final = (0, "!dead")
_PAGE_BYTES: Final = 2**20
_LISTED_MAX: Final = 1000
_REFUSED_SHOWN_MAX: Final = 5


class SettleRequest(msgspec.Struct, frozen=True):
    """Asks to send dead letters back to their subscription, or to drop them."""

    subscription: str
    offsets: Sequence[int] = ()  # in the dead-letter topic
    is_all: bool = False  # all letters that are open now, instead of `offsets`
    is_redriven: bool = False  # sends them back; False: drops them


class DeadLetterQueues:
    """Counts, lists and settles the dead letters of all subscriptions."""

    def __init__(
        self,
        stores: Stores,
        state: AckJournals,
        subscriptions: WorkSubscriptions,
        dead_letter_writer: DeadLetterWriter,
        workers: Workers,
        errands: Errands,
    ) -> None:
        self._errands = errands
        errands.carry_out[SEND_BACK] = self._carry_out
        self._stores = stores
        self._state = state
        self._subscriptions = subscriptions
        self._dead_letter_writer = dead_letter_writer
        self._workers = workers

    async def count(self, subscription: WorkSubscription) -> int:
        """How many of a subscription's dead letters are open, of those that the log still has."""
        key, log = self._locate(subscription)
        if log is None:
            return 0
        try:
            bounds = await log.bounds(*key)
            settled = self._settled(key)
        except MovedError:
            return 0  # the owner of their shard counts them
        open_ranges = settled.missing(bounds.first_offset, bounds.next_offset)
        return sum(end - begin for begin, end in open_ranges)

    def _settled(self, key: TopicPartition) -> AckSet:
        state = self._state.find(*_OWNER, key)
        return AckSet(1) if state is None else state.acked

    async def list(self, name: str, offset: int, messages_max: int) -> tuple[Sequence[Batch], int]:
        """Open letters from an offset of the dead-letter topic on, and where the next page begins; 0: at no offset."""
        subscription = self._subscriptions.get(name)
        key, log = self._locate(subscription)
        if log is None:
            return (), 0
        settled = self._settled(key)
        offset = max(offset, settled.floor)
        left = max(1, min(messages_max, _LISTED_MAX))
        batches: list[Batch] = []
        shard = owned_shard(log, key)
        while left and offset < shard.next_offset(*key):
            read = await read_runs(log, key, offset, _PAGE_BYTES, self._workers)
            for run in read.runs:
                rows = [
                    at - run.base
                    for at in range(max(offset, run.base), run.end)
                    if at not in settled
                ][:left]
                if rows:
                    batches.append(run.batch.take(rows))
                    left -= len(rows)
                    offset = run.base + rows[-1] + 1
                if not left:
                    break
            else:
                ends = [run.end for run in read.runs] + [gap.end for gap in read.missing]
                offset = max([offset + 1, *ends])
        return batches, offset if offset < shard.next_offset(*key) else 0

    async def settle(self, request: SettleRequest) -> int:
        """Send letters back, or drop them. Returns how many."""
        name, is_redriven = request.subscription, request.is_redriven
        subscription = self._subscriptions.get(name)
        key, log = self._locate(subscription)
        if log is None:
            return 0
        if not request.is_all:
            return await self._settle(subscription, key, request.offsets, is_redriven=is_redriven)
        settled, offset = 0, 1
        end = owned_shard(log, key).next_offset(*key)  # letters that come meanwhile stay open
        while offset:
            batches, offset = await self.list(name, offset, _LISTED_MAX)
            found = [message.offset for batch in batches for message in batch]
            wanted = [at for at in found if at < end]
            settled += await self._settle(subscription, key, wanted, is_redriven=is_redriven)
            if len(wanted) < len(found):
                break
        return settled

    async def _settle(
        self,
        subscription: WorkSubscription,
        key: TopicPartition,
        offsets: Sequence[int],
        *,
        is_redriven: bool,
    ) -> int:
        end = owned_shard(self._stores.existing(key[0]), key).next_offset(*key)
        settled = self._settled(key)
        wanted = sorted({at for at in offsets if at not in settled})
        for at in wanted:
            if not 1 <= at < end:
                raise ClientFault(
                    f"{key[0]} has no dead letter {at}; those there are begin at {settled.floor}"
                )
        settled_count = 0
        refused: list[str] = []
        for at in wanted:
            try:
                letter = await self._dead_letter_writer.message_at(key, at)
                if letter is not None:
                    if is_redriven:
                        await self._send_back_anywhere(subscription, letter)
                    settled_count += 1
            except ClientFault as error:
                refused.append(f"{key[0]}@{at}: {error}")
            else:
                self._state.of(key).note_acked(*_OWNER, key, at, at + 1)
        await self._state.of(key).wait_stored()
        if refused:
            raise ClientFault(
                f"{settled_count} dead letters were settled, {len(refused)} were not; drop those instead: "
                + "; ".join(refused[:_REFUSED_SHOWN_MAX])
            )
        return settled_count

    async def _send_back_anywhere(self, subscription: WorkSubscription, letter: Message) -> None:
        try:
            await self._send_back(subscription, letter)
        except MovedError:
            origin = _origin(letter)
            if origin is None or not self._errands.is_shared:
                raise
            # Its message lies in a shard of another node, which is told what to do.
            batch = Batch.from_messages([letter])
            name, definition = f"back {letter.offset}", subscription.definition
            await self._errands.post(
                f"{definition.id} {name}", SEND_BACK, origin[0], definition.name, batch
            )

    async def _carry_out(self, errand: Errand) -> None:
        """Send back a letter whose message lies here. Without its subscription there is nothing to do."""
        with suppress(UnknownSubscriptionError, ClientFault):
            subscription = self._subscriptions.get(errand.subscription)
            for letter in errand.batch.messages():
                await self._send_back(subscription, letter)

    async def _send_back(self, subscription: WorkSubscription, letter: Message) -> None:
        origin = _origin(letter)
        if origin is None:
            raise ClientFault("it does not say which message it was")
        original, offset = origin
        if not subscription.matches(original[0]):
            # Else a client that may write letters could make one with more rights publish anywhere.
            raise ClientFault("it is of a topic that the subscription is not over")
        found = await self._dead_letter_writer.message_at(original, offset)
        if found is not None and _is_same(found, letter):
            member = letter.tags.get(MEMBER_TAG)
            members = subscription.members if member is None else [member]
            await self._reopen(subscription, members, original, offset)
        else:
            await self._dead_letter_writer.store(_copy(letter, original))

    async def _reopen(
        self,
        subscription: WorkSubscription,
        members: Sequence[str],
        key: TopicPartition,
        offset: int,
    ) -> None:
        shard = self._state.of(key)
        for member in members:
            if member not in subscription.members:
                continue  # a removed member is owed nothing
            consumer_group = subscription.consumer_groups.get(member)
            if consumer_group is not None and consumer_group.acked(key) is not None:
                consumer_group.reopen(key, offset)
            else:
                owed_again = FailedRecord(
                    subscription.definition.id, member, *key, offset, 0, 0, 0, ""
                )
                shard.note_at_once(owed_again)
        await shard.wait_stored()

    def _locate(self, subscription: WorkSubscription) -> tuple[TopicPartition, Store | None]:
        """The partition of a subscription's dead letters, and its log; None if there is no such topic."""
        key = (dead_topic(subscription.definition.name), 0)
        return key, self._stores.log_of(key[0])


def _origin(letter: Message) -> tuple[TopicPartition, int] | None:
    tags = letter.tags
    try:
        key = (tags[TOPIC_TAG], int(tags[PARTITION_TAG]))
        offset = int(tags[OFFSET_TAG])
    except (KeyError, ValueError):
        return None
    return (key, offset) if key[1] >= 0 and offset >= 1 else None


def _is_same(found: Message, letter: Message) -> bool:
    """Whether this is the letter's message: after a restart, a topic in memory assigns the same offsets again."""
    return (found.payload, found.key, found.event_time_ns, found.transmit_time_ns, found.uid) == (
        letter.payload,
        letter.key,
        letter.event_time_ns,
        letter.transmit_time_ns,
        letter.uid,
    )


def _copy(letter: Message, original: TopicPartition) -> Message:
    """The original message, to be published anew."""
    topic, partition = original
    check_topic(topic)
    if topic.startswith(SYSTEM_MARK):
        raise ClientFault(f"{topic!r} is the system's: nothing is sent back there")
    return Message(
        topic,
        letter.payload,
        letter.key,
        {name: value for name, value in letter.tags.items() if name not in LETTER_TAGS},
        letter.event_time_ns,
        letter.transmit_time_ns,
        partition=partition,
        uid=letter.uid,
        partition_key=letter.partition_key,
    )
