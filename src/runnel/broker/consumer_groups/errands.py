"""Errands: what the owner of another shard has to do for a subscription. They are recorded until they are done.

A dead letter belongs into the shard of `!dead/…`, and a letter that is sent back concerns the shard of its message.
With several nodes either may be another node's. The errand is recorded where all nodes see it, and whichever node
serves the shard, now or later, carries it out and removes it. An errand may be carried out twice, if a node dies in
between: a dead letter then is a repetition that its shard recognises, and a message that is owed again stays so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec

from runnel.broker.consumer_groups.timer_queue import TimerQueue
from runnel.broker.stores import Stores
from runnel.errors import MovedError, RunnelError, Unavailable
from runnel.formats.batch import Batch
from runnel.log.log import MetadataStore, OwnedShard
from runnel.platform.clock import Clock
from runnel.platform.tasks import OwnedTasks
from runnel.topics.names import TopicPartition

ERRAND_PREFIX: Final = "!errand/"
"""Errands are recorded beside the definitions of subscriptions. No subscription has such a name."""

LETTER: Final = "letter"  # store this batch
SEND_BACK: Final = "send back"  # this dead letter, to its subscription

# Beyond it nothing is posted: the message or the letter stays where it is, and is tried again.
_PENDING_MAX: Final = 10_000
_RETRY_NS: Final = 1_000_000_000


class Errand(msgspec.Struct, array_like=True, frozen=True):
    """What is to be done, by the owner of which partition, and with which messages."""

    kind: str
    topic: str
    partition: int
    subscription: str
    block: bytes

    @property
    def batch(self) -> Batch:
        return Batch.unpack(self.block)


CarryOut = Callable[[Errand], Awaitable[None]]
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Errand)


class Errands:
    """The errands that are pending in the cluster. Each node carries out those for its own shards."""

    def __init__(self, stores: Stores, tasks: OwnedTasks, timers: TimerQueue, clock: Clock) -> None:
        self.carry_out: Final[dict[str, CarryOut]] = {}  # by kind
        self._stores = stores
        self._tasks = tasks
        self._timers = timers
        self._clock = clock
        self._pending: dict[str, Errand] = {}
        self._running: set[str] = set()

    @property
    def _metadata(self) -> MetadataStore:
        return self._stores.main.metadata

    @property
    def is_shared(self) -> bool:
        """Whether there are other nodes. A broker that is alone has no errands."""
        return bool(self._metadata.member)

    def open(self) -> None:
        for name in self._metadata.subscriptions():
            if name.startswith(ERRAND_PREFIX):
                self.follow(name)

    async def post(self, name: str, kind: str, key: TopicPartition, of: str, batch: Batch) -> None:
        """Record an errand. One of this name that is pending is the same."""
        if len(self._pending) >= _PENDING_MAX:
            raise Unavailable(f"{_PENDING_MAX} errands wait for the owners of their shards")
        name = f"{ERRAND_PREFIX}{name}"
        content = _encoder.encode(Errand(kind, *key, of, batch.pack()))
        try:
            await self._metadata.set_subscription(name, content, replaces=None)
        except Unavailable:
            if self._metadata.subscription(name) is None:
                raise
        self.follow(name)

    def follow(self, name: str) -> None:
        """An errand was posted, or is done."""
        content = self._metadata.subscription(name)
        if content is None:
            self._pending.pop(name, None)
        else:
            self._pending[name] = _decoder.decode(content)
            self._begin(name)

    def on_shard_acquired(self, shard: OwnedShard) -> None:
        for name, errand in self._pending.items():
            if self._stores.lies_in(errand.topic, shard.id):
                self._begin(name)

    def _begin(self, name: str) -> None:
        if name in self._pending and name not in self._running:
            self._running.add(name)
            self._tasks.start(self._run(name, self._pending[name]))

    async def _run(self, name: str, errand: Errand) -> None:
        try:
            with suppress(RunnelError):  # what follows says it again
                await self._stores.wait_here([errand.topic], errand.partition)
            await self.carry_out[errand.kind](errand)
            await self._metadata.remove_subscription(name)
            self._pending.pop(name, None)
        except MovedError:
            pass  # its owner does it, or this node when the shard has come
        except (RunnelError, OSError):
            self._timers.set(self._clock.monotonic_ns() + _RETRY_NS, lambda: self._begin(name))
        finally:
            self._running.discard(name)
