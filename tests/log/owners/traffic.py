"""Batches that a history sends to the logs of a directory, and the answers that it gets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from runnel.errors import BusyError, MovedError, RunnelError, Unavailable
from runnel.log.log import Appended, ShardId
from tests.fakes.power import PowerLoss
from tests.log.owners.member import Member
from tests.log.owners.model import Fate, Sent
from tests.log.owners.plan import KEYS, NUMBERED_KEYS
from tests.log.samples import batch
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.log.owners.history import History


class Traffic:
    """What is on its way. Named publishers send a batch again until it is answered, each one in one partition."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._on_way: dict[asyncio.Future[Appended], tuple[Sent, ShardId, Member]] = {}
        self._numbered: dict[str, list[Sent]] = {}  # the batches of each named publisher
        self._count = 0

    def payloads(self) -> list[bytes]:
        self._count += 1
        filler = b"x" * self._history.random.choice((0, 30, 200))
        return [
            b"%d.%d %s" % (self._count, n, filler)
            for n in range(self._history.random.choice((1, 1, 3)))
        ]

    async def append(self) -> None:
        for _ in range(self._history.random.choice((1, 1, 4))):
            key = self._history.random.choice(KEYS)
            shard = self._history.shard_of(key)
            sent = self._history.model.sending(key, self.payloads())
            owner = self._history.owner_of(shard)
            if owner is not None and self._history.random.random() < 0.9:
                self.give(owner, sent)
                continue
            member = self._history.some_member()
            if member is not None and member is not owner:
                self.give(member, sent)

    async def append_named(self) -> None:
        key = self._history.random.choice(NUMBERED_KEYS)
        publisher = f"p{key[0]}{key[1]}"
        batches = self._numbered.setdefault(publisher, [])
        first_open = next(
            (at for at, sent in enumerate(batches) if sent.fate is Fate.OPEN), len(batches)
        )
        is_waiting = {id(sent) for sent, _, _ in self._on_way.values()}
        for sent in batches[first_open:]:
            if id(sent) not in is_waiting:
                self._send_numbered(publisher, sent)
        if batches and self._history.random.random() < 0.2:
            self._send_numbered(publisher, self._history.random.choice(batches[-3:]))
        sent = self._history.model.sending(key, self.payloads(), (publisher, len(batches)))
        batches.append(sent)
        self._send_numbered(publisher, sent)

    def _send_numbered(self, publisher: str, sent: Sent) -> None:
        owner = self._history.owner_of(self._history.shard_of(sent.key))
        if owner is not None:
            self.give(owner, sent)

    def give(self, member: Member, sent: Sent) -> None:
        """Publish at a process. It has to refuse a batch whose shard is not its own."""
        shard = self._history.shard_of(sent.key)
        topic, partition = sent.key
        publisher, number = sent.producer or (None, 0)
        made = batch((topic, sent.payloads, partition), producer=publisher, number=number)
        self._history.say(f"{member} gets {sent} for {topic}[{partition}]")
        is_owner = self._history.model.shard(shard).owner is member
        try:
            future = member.run(lambda: member.log.append(made))
        except (MovedError, BusyError) as error:
            if is_owner and isinstance(error, MovedError):
                raise Violation(f"{member} serves {shard}, and refuses {sent}: {error}") from error
            self._history.model.refused(sent)
            return
        except RunnelError as error:
            if sent.producer is None:
                raise
            self._history.say(
                f"   {error}"
            )  # a batch before it failed, and its publisher has not heard of it
            return
        except PowerLoss:
            return
        if not is_owner:
            raise Violation(f"{member} takes {sent}, and does not serve {shard}")
        sent.epoch = self._history.model.shard(shard).epoch
        known = member.log._topics.recorded(topic)
        assert known is not None
        sent.generation = known.generation
        self._on_way[future] = (sent, shard, member)

    def look_at_answers(self) -> None:
        for future in [each for each in self._on_way if each.done()]:
            sent, shard, member = self._on_way.pop(future)
            if member.is_dead or future.cancelled():
                continue
            error = future.exception()
            if error is None:
                self._history.say(f"   {sent} is stored at {list(future.result().base_offsets)}")
                self._history.model.stored(shard, sent, future.result())
            elif isinstance(error, MovedError):
                self._history.say(f"   {sent}: {error}")
                if sent.producer is None:
                    self._history.model.refused(sent)
            elif not isinstance(error, (Unavailable, PowerLoss)):
                raise error

    async def repeat_all(self) -> None:
        """Every batch of a named publisher is there once in the end."""
        for publisher, batches in self._numbered.items():
            for sent in batches:
                if sent.fate is Fate.OPEN:
                    self._send_numbered(publisher, sent)
        await self._history.at(
            self._history.members[0], self._history.members[0].log.sync(), "sync"
        )
        self.look_at_answers()
        for sent in (each for batches in self._numbered.values() for each in batches):
            if sent.fate is Fate.OPEN:
                raise Violation(f"{sent} was sent until it was answered, and is not stored")

    def check_answered(self, member: Member, shard: ShardId) -> None:
        """With a term everything that was on its way to the shard is answered."""
        self.look_at_answers()
        for sent, of_shard, at in self._on_way.values():
            if of_shard == shard and at is member:
                raise Violation(f"{sent} is not answered, and {member} serves {shard} no more")

    def forget(self, member: Member) -> None:
        """The process has ended: what it has not answered stays open."""
        self.look_at_answers()
        self._on_way = {
            future: each for future, each in self._on_way.items() if each[2] is not member
        }
