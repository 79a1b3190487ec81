"""Creates the topics of wide batches in steps, before the batch itself is stored.

A batch may have 65,536 topics that do not exist yet, and creating one takes about ten microseconds. So `publish`
creates a few at once. For a batch with more it starts the `TopicCreator` and answers that the queue is full: the
publisher waits for room, as for any full queue, and the broker stores its batch whole once all its topics exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

from runnel.broker.limits.loop_share import LoopShare
from runnel.errors import RunnelError
from runnel.formats.envelope import Envelope
from runnel.log.log import Creator, MetadataStore
from runnel.platform.tasks import OwnedTasks

TOPICS_PER_STEP: Final = 128

# Errors kept for their publishers, which may never try again.
_FAULTS_MAX: Final = 100


class TopicCreator:
    """Creates the topics of wide batches, one batch at a time for each first topic: `wait_room` asks by first topic."""

    def __init__(
        self, share: LoopShare, look_up: Callable[[str, Hashable], Awaitable[None]]
    ) -> None:
        """`look_up` finds the readers of a new topic, to which the batch will be sent."""
        self._share = share
        self._look_up = look_up
        self._under_way: dict[str, asyncio.Future[None]] = {}
        # By first topic and creator, until the batch is tried again: the topic that could not be created, and why.
        # One creator's quota is no reason to refuse another's batch.
        self._faults: dict[tuple[str, str], tuple[str, RunnelError]] = {}
        self.tasks: Final = OwnedTasks("the topic creator")
        self.after_step: Callable[[], None] = lambda: None
        """Called when topics were created, which stay for good."""

    def begin(self, metadata: MetadataStore, envelope: Envelope, creator: Creator | None) -> None:
        """Start to create the topics of a batch. Raises the error of an earlier try."""
        first = envelope.topics[0]
        if first in self._under_way:
            return  # for another batch: this one begins when that one is done
        topic, fault = self._faults.pop((first, _name_of(creator)), ("", None))
        if fault is not None and topic in envelope.topics:
            raise fault
        self._under_way[first] = asyncio.get_running_loop().create_future()
        self.tasks.start(self._create(metadata, envelope, creator))

    async def wait(self, topic: str) -> None:
        """Wait until no topics are being created for a batch that begins with this topic."""
        while (under_way := self._under_way.get(topic)) is not None:
            await asyncio.wait({under_way})

    async def _create(
        self, metadata: MetadataStore, envelope: Envelope, creator: Creator | None
    ) -> None:
        topics, run = envelope.topics, 0
        try:
            while run < len(topics):
                await self._share.turn(self)
                made = await metadata.make_topics(envelope, run, TOPICS_PER_STEP, creator)
                for name in topics[run : made.next_run]:
                    await self._look_up(name, self)
                run = made.next_run
                self.after_step()
                if made.fault is not None:
                    raise made.fault
        except RunnelError as error:
            self._faults[topics[0], _name_of(creator)] = (topics[run], error)
            if len(self._faults) > _FAULTS_MAX:
                del self._faults[next(iter(self._faults))]
        finally:
            self._under_way.pop(topics[0]).set_result(None)


def _name_of(creator: Creator | None) -> str:
    return "" if creator is None else creator.name
