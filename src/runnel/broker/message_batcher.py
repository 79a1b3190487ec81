"""Batches single messages across topics and connections: one batch per shard and turn of the loop.

Each message was checked before, keeps its order among everything published to its shard, and gets its own answer. A
batch is flushed when the loop turns, when it is full, and before a whole batch for the same shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from runnel.config import BrokerSettings
from runnel.errors import BusyError, ClientFault, RunnelError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.log import Appended, Level, ShardId
from runnel.platform.tasks import OwnedTasks

Published = Appended
Publish = Callable[[Batch, Level | None], asyncio.Future[Published]]
WaitRoom = Callable[[str, int], Awaitable[None]]  # a topic and its partition
ErrorOf = Callable[[Sequence[str]], RunnelError]  # of messages of these topics


class ShardBatcher:
    """The single messages of one shard that wait for this turn of the loop to end."""

    __slots__ = (
        "_bytes",
        "_is_held",
        "_level",
        "_messages",
        "_publish",
        "_settings",
        "_tasks",
        "_wait_room",
        "_waiting",
    )

    def __init__(
        self, publish: Publish, wait_room: WaitRoom, settings: BrokerSettings, tasks: OwnedTasks
    ) -> None:
        self._publish = publish
        self._wait_room = wait_room
        self._tasks = tasks
        self._is_held = False  # until the shard has room again
        self._settings = settings
        self._messages: list[Message] = []
        self._waiting: list[asyncio.Future[Published]] = []
        self._bytes = 0
        self._level: Level | None = None

    def add(self, message: Message, level: Level | None) -> asyncio.Future[Published]:
        """Add a message. BusyError: the shard has no room now, and the message was not added."""
        settings = self._settings
        if self._messages and (
            level is not self._level
            or len(self._messages) >= settings.gather_messages_max
            or self._bytes + message.size > settings.gather_bytes_max
        ):
            self.flush()
            if self._messages:
                raise BusyError("single messages wait to be stored; wait for room")
        loop = asyncio.get_running_loop()
        if not self._messages:
            loop.call_soon(self.flush)
        self._level = level
        self._messages.append(message)
        self._bytes += message.size
        future: asyncio.Future[Published] = loop.create_future()
        self._waiting.append(future)
        return future

    def flush(self) -> None:
        """Publish the messages. If the shard is busy they stay until there is room."""
        if not self._messages or self._is_held:
            return
        messages, waiting, level = self._messages, self._waiting, self._level
        if len(messages) > 1:  # messages of one partition together, as one run
            order = sorted(range(len(messages)), key=lambda at: _key(messages[at]))
            messages = [messages[at] for at in order]
            waiting = [waiting[at] for at in order]
        try:
            published = self._publish(Batch.from_messages(messages), level)
        except BusyError:
            self._is_held = True
            self._tasks.start(self._flush_when_room(*_key(messages[0])))
            return
        except ClientFault as fault:
            self._clear()
            self._publish_each(messages, waiting, level, fault)
            return
        except RunnelError as error:
            self._clear()
            _fail(waiting, error)
            return
        self._clear()
        published.add_done_callback(lambda done: _answer_each(done, messages, waiting))

    async def _flush_when_room(self, topic: str, partition: int) -> None:
        try:
            await self._wait_room(topic, partition)
        except RunnelError as error:
            waiting = self._waiting
            self._clear()
            _fail(waiting, error)
        finally:
            self._is_held = False
        self.flush()

    def fail(self, error_of: ErrorOf) -> None:
        """Publish none of the messages: the shard has gone."""
        messages, waiting = self._messages, self._waiting
        self._clear()
        if messages:
            _fail(waiting, error_of([message.topic for message in messages]))

    def _clear(self) -> None:
        self._messages, self._waiting, self._bytes = [], [], 0

    def _publish_each(
        self,
        messages: Sequence[Message],
        waiting: Sequence[asyncio.Future[Published]],
        level: Level | None,
        fault: ClientFault,
    ) -> None:
        """One message was refused: publish each in its own batch, so that the others are stored."""
        if len(messages) == 1:
            _fail(waiting, fault)
            return
        for message, future in zip(messages, waiting, strict=True):
            try:
                published = self._publish(Batch.from_messages([message]), level)
            except RunnelError as error:
                _fail([future], error)
            else:
                published.add_done_callback(
                    lambda done, message=message, future=future: _answer_each(  # type: ignore[misc]
                        done, [message], [future]
                    )
                )


def _key(message: Message) -> tuple[str, int]:
    return (message.topic, message.partition)


def _answer_each(
    published: asyncio.Future[Published],
    messages: Sequence[Message],
    waiting: Sequence[asyncio.Future[Published]],
) -> None:
    if published.cancelled():
        _fail(waiting, BusyError("the broker closed before this was stored"))
        return
    failure = published.exception()
    if failure is not None:
        _fail(waiting, failure)
        return
    answer = published.result()
    run, row = -1, 0
    last: tuple[str, int] | None = None
    for message, future in zip(messages, waiting, strict=True):
        key = _key(message)
        if key != last:
            run, row, last = run + 1, 0, key
        if not future.done():
            own = [answer.base_offsets[run] + row] if answer.base_offsets else []
            future.set_result(msgspec.structs.replace(answer, base_offsets=own))
        row += 1


def _fail(waiting: Sequence[asyncio.Future[Published]], error: BaseException) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(error)


class MessageBatcher:
    """Batches the single messages of a broker, with a `ShardBatcher` for each shard."""

    def __init__(self, publish: Publish, wait_room: WaitRoom, settings: BrokerSettings) -> None:
        self._publish = publish
        self._wait_room = wait_room
        self._settings = settings
        self.tasks = OwnedTasks("the message batcher")
        self._by_shard: dict[ShardId, ShardBatcher] = {}
        self._filled: dict[ShardBatcher, None] = {}

    def add(
        self, shard: ShardId, message: Message, level: Level | None
    ) -> asyncio.Future[Published]:
        batcher = self._by_shard.get(shard)
        if batcher is None:
            batcher = self._by_shard[shard] = ShardBatcher(
                self._publish, self._wait_room, self._settings, self.tasks
            )
        self._filled[batcher] = None
        return batcher.add(message, level)

    def fail(self, shard: ShardId, error_of: ErrorOf) -> None:
        """Fail the messages that were gathered for a shard, which has gone."""
        if (batcher := self._by_shard.pop(shard, None)) is not None:
            self._filled.pop(batcher, None)
            batcher.fail(error_of)

    def flush(self) -> None:
        """Publish all single messages. Called before a whole batch is published, to keep the order."""
        if self._filled:
            filled, self._filled = self._filled, {}
            for batcher in filled:
                batcher.flush()
