"""Writes dead letters: messages that a subscription gave up, stored in `!dead/<subscription>` with their origin.

A dead letter has the message's own key, payload, times and tags, beside the letter's tags
(`formats/dead_letters.py`). Where there is no room for all tags, some of the message's own are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from runnel.broker.consumer_groups.errands import LETTER, Errand, Errands
from runnel.broker.consumer_groups.run_cache import RunCache, StoredRun
from runnel.broker.consumer_groups.run_reader import read_runs
from runnel.broker.monitoring.events import EventKind, Events
from runnel.broker.stores import Stores
from runnel.config import LimitSettings
from runnel.errors import BusyError, MovedError, RunnelError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.dead_letters import (
    DELIVERIES_TAG,
    ERROR_TAG,
    ERROR_TYPE_TAG,
    FROM_TAG,
    MEMBER_TAG,
    OFFSET_TAG,
    PARTITION_TAG,
    TOPIC_TAG,
    TRACEBACK_TAG,
    parse_reason,
)
from runnel.formats.message import Message
from runnel.formats.table import TAGS_MAX
from runnel.group_rules.effects import DeadLetter
from runnel.log.log import Appended, Level
from runnel.platform.clock import Clock
from runnel.platform.workers import Workers
from runnel.topics.names import DEAD_LETTER_PREFIX, TopicPartition

_ERROR_CHARACTERS_MAX: Final = 1000

Publish = Callable[[Batch, Level], asyncio.Future[Appended]]
WaitRoom = Callable[[str, int], Awaitable[None]]  # a topic and its partition


def dead_topic(subscription: str) -> str:
    return f"{DEAD_LETTER_PREFIX}{subscription}"


class LetterIdentity(NamedTuple):
    """Which letter it is, as a named publisher: its shard recognises a repetition."""

    name: str
    term: int

    @classmethod
    def of(
        cls, subscription: int, member: str, key: TopicPartition, offset: int, failed_ns: int
    ) -> LetterIdentity:
        """The letter of a message that failed for the last time at this time. Sent back, it may fail again later."""
        place = "\0".join((member, key[0], str(key[1]), str(offset)))
        digest = blake2b(place.encode(), digest_size=16).hexdigest()
        return cls(f"dead {subscription} {digest}", failed_ns // 1_000_000)


class DeadLetterWriter:
    """Reads a message that failed too often, and stores its dead letter."""

    def __init__(
        self,
        stores: Stores,
        run_cache: RunCache,
        workers: Workers,
        clock: Clock,
        events: Events,
        limits: LimitSettings,
        publish: Publish,
        wait_room: WaitRoom,
        errands: Errands,
    ) -> None:
        self._stores = stores
        self._run_cache = run_cache
        self._workers = workers
        self._clock = clock
        self._events = events
        self._limits = limits
        self._publish = publish
        self._wait_room = wait_room
        self._errands = errands
        errands.carry_out[LETTER] = self._carry_out

    async def write(
        self,
        subscription: str,
        member: str,
        dead_letter: DeadLetter,
        identity: LetterIdentity | None = None,
    ) -> bool:
        """Store a letter. Returns whether the message may be acknowledged: the letter is stored, or nothing is left.

        With an identity it is stored once, however often this is called, and also where another node has the shard of
        `!dead/…`: then it is an errand for that node.
        """
        try:
            message = await self.message_at(dead_letter.key, dead_letter.offset)
            if message is not None:
                letter = _letter(subscription, member, dead_letter, message, self._limits)
                await self._store_letter(subscription, letter, identity)
        except (RunnelError, OSError) as error:
            self._events.emit(
                EventKind.DEAD_LETTER_FAILED,
                subscription,
                topic=dead_letter.key[0],
                offset=dead_letter.offset,
                error=str(error),
            )
            return False
        self._events.emit(
            EventKind.DEAD_LETTER,
            subscription,
            topic=dead_letter.key[0],
            partition=dead_letter.key[1],
            offset=dead_letter.offset,
            deliveries=dead_letter.failures,
            reason=parse_reason(dead_letter.reason).error,
        )
        return True

    async def message_at(self, key: TopicPartition, offset: int) -> Message | None:
        """The message at an offset; None if it is gone."""
        run = self._run_cache.find(key, offset) or await self._read(key, offset)
        if run is None:
            return None
        return run.batch.slice(offset - run.base, offset - run.base + 1).messages()[0]

    async def _read(self, key: TopicPartition, offset: int) -> StoredRun | None:
        log = self._stores.log_of(key[0])
        if log is None:
            return None
        try:
            read = await read_runs(log, key, offset, 1, self._workers)
        except UnknownTopicError:
            return None
        return next((run for run in read.runs if run.base <= offset < run.end), None)

    async def _store_letter(
        self, subscription: str, letter: Message, identity: LetterIdentity | None
    ) -> None:
        if identity is None:
            await self.store(letter)
            return
        name, term = identity
        batch = Batch.from_messages([letter], producer=name, term=term)
        try:
            await self.store_batch(batch)
        except MovedError:
            key = (letter.topic, letter.partition)
            await self._errands.post(f"{name}/{term}", LETTER, key, subscription, batch)

    async def _carry_out(self, errand: Errand) -> None:
        await self.store_batch(errand.batch)

    async def store(self, message: Message) -> None:
        """Publish a message of the broker's own, and wait until it is stored."""
        await self.store_batch(Batch.from_messages([message]))

    async def store_batch(self, batch: Batch) -> None:
        head = batch.envelope
        while True:
            try:
                published = self._publish(batch, Level.STORED)
            except BusyError:
                await self._wait_room(head.topics[0], head.column32(head.partitions)[0])
                continue
            await published
            return


def _letter(
    subscription: str, member: str, dead_letter: DeadLetter, message: Message, limits: LimitSettings
) -> Message:
    reason = parse_reason(dead_letter.reason[:_ERROR_CHARACTERS_MAX])
    letter_tags = {
        ERROR_TAG: reason.error or "no reason was given",
        TOPIC_TAG: dead_letter.key[0],
        PARTITION_TAG: str(dead_letter.key[1]),
        OFFSET_TAG: str(dead_letter.offset),
        DELIVERIES_TAG: str(dead_letter.failures),
        FROM_TAG: subscription,
    }
    if member:
        letter_tags[MEMBER_TAG] = member
    details = {ERROR_TYPE_TAG: reason.error_type, TRACEBACK_TAG: reason.traceback}
    # Details never displace a tag of the message.
    if len(letter_tags) + len(details) + len(message.tags) <= TAGS_MAX:
        letter_tags |= {name: text for name, text in details.items() if text}
    return Message(
        dead_topic(subscription),
        message.payload,
        message.key,
        _own_tags(message, letter_tags, limits) | letter_tags,
        message.event_time_ns,
        message.transmit_time_ns,
        uid=message.uid,
        partition_key=message.partition_key,
    )


def _own_tags(
    message: Message, letter_tags: Mapping[str, str], limits: LimitSettings
) -> dict[str, str]:
    """The message's own tags that fit beside the letter's tags."""
    room = TAGS_MAX - len(letter_tags)
    room_bytes = limits.tag_bytes_max - sum(map(_tag_bytes, letter_tags.items()))
    kept: dict[str, str] = {}
    for tag in message.tags.items():
        room_bytes -= _tag_bytes(tag)
        if tag[0] not in letter_tags and room_bytes >= 0 and len(kept) < room:
            kept[tag[0]] = tag[1]
    return kept


def _tag_bytes(tag: tuple[str, str]) -> int:
    return len(tag[0].encode()) + len(tag[1].encode())
